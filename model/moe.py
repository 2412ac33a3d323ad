"""The MoE block: norm, router, routed experts, shared expert, and the router's auxiliary losses.

Shapes: T = B * S tokens, t = T / tp of this rank (every rank routes its own), D features, E experts, k experts a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8.linear import SharedGradient
from fp8.recipe import Recipe
from fp8.residual import add_residual
from fp8.rms_norm import Normed, rms_norm_quantize
from fp8.stash import Stash
from fp8.weight import Weight
from model.attention import Context
from model.config import ModelConfig
from model.experts import RoutedExperts
from model.mlp import MLP
from model.router import Router, Routing
from parallel.collectives import all_reduce
from parallel.mesh import Axis, Mesh
from parallel.sequence import join_tokens, split_normed


def router_z_loss(lse_T: Tensor) -> Tensor:
    """Sum over tokens of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, eq. 5)."""
    return lse_T.square().sum()


def sequence_balance_loss(routing: Routing, seq_len: int, tp: Axis) -> Tensor:
    """This rank's tokens' part of the sum over sequences of sum_e f_e P_e (DeepSeek-V3, eq. 17-20): 1 a balanced sequence.

    f_e: share of the sequence's slots that expert e got, times E. P_e: mean over tokens of s_e / sum s, from the logarithms of the
    scores s, so that vanishing ones keep their shares.
    """
    logits, ids = routing.logits_TE, routing.ids_Tk
    tokens, num_experts, k = *logits.shape, ids.shape[1]
    sequence_t = torch.arange(tp.rank * tokens, (tp.rank + 1) * tokens, device=ids.device) // seq_len
    zeros = logits.new_zeros(tokens * tp.size // seq_len, num_experts)
    chosen = torch.zeros_like(logits).scatter_(1, ids, 1.0)
    fraction = all_reduce(zeros.index_add(0, sequence_t, chosen), tp, "router") * (num_experts / (k * seq_len))
    share = F.logsigmoid(logits).softmax(-1)
    return (fraction * zeros.index_add(0, sequence_t, share)).sum() / seq_len


class MoE(nn.Module):
    """h [t, D] -> (h + experts of norm(h) [t, D], auxiliary losses weighted, z-loss for the log), losses of this rank's tokens."""

    def __init__(self, config: ModelConfig, recipe: Recipe, mesh: Mesh, stash: Stash, name: str, stage: int) -> None:
        super().__init__()
        c, tp = config, mesh.tp
        self.config, self.tp, self.stash, self.name, self.stage = c, tp, stash, name, stage
        self.norm = Weight(c.hidden_size, recipe=Recipe.fp32(), init_std=None, decay=False, tp_partial=tp.sequence)
        self.router = Router(c)
        self.experts = RoutedExperts(c, recipe, mesh.ep, stash, f"{name}.experts", stage)
        width, std = c.shared_intermediate_size, c.initializer_range
        self.shared = MLP(c.hidden_size, width, std, recipe, tp, stash, f"{name}.shared", stage) if width else None

    def forward(self, h_TD: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        c, rebuild = self.config, self.stage >= 2
        to = self.experts.gate_up, self.stash, f"{self.name}.norm", rebuild
        x = rms_norm_quantize(h_TD, self.norm, c.rms_norm_eps, *to, twice=self.shared is not None)
        own = split_normed(x, self.tp)
        tokens = self.experts.send(own.edge)  # the router hides their way, the shared expert the sums'
        routing = self.router(own, count=not ctx.recomputing)
        start = self.experts.start(routing.ids_Tk, routing.weights_Tk, tokens, routing.counted)
        same_dy = self._same_dy()
        shared_TD = self._shared(x, same_dy) if tokens is None else None  # hides the exchange of counts
        leaving = self.experts.work(own.edge, start, routing.weights_Tk, same_dy)
        shared_TD = self._shared(x, same_dy) if tokens is not None else shared_TD
        y_TD = join_tokens(self.experts(leaving), self.tp)
        out_TD = add_residual(x.h_TD, y_TD) if shared_TD is None else add_residual(x.h_TD, y_TD, shared_TD)
        z = router_z_loss(routing.lse_T) / ctx.num_tokens
        aux = c.router_z_loss_weight * z
        if c.aux_loss_weight:
            balance = sequence_balance_loss(routing, ctx.seq_len, self.tp)
            aux = aux + c.aux_loss_weight * balance * ctx.seq_len / ctx.num_tokens
        return out_TD, aux, z.detach()

    def _same_dy(self) -> SharedGradient | None:
        """The residual stream's gradient is the experts' dY, and the shared expert's where tp does not split it."""
        return SharedGradient(self.experts.down, self.shared.down) if self.shared is not None and self.tp.size == 1 else None

    def _shared(self, x: Normed, same_dy: SharedGradient | None) -> Tensor | None:
        return self.shared(x.second, same_dy) if self.shared is not None else None


class DenseBlock(nn.Module):
    """Norm and dense MLP, with the same signature as MoE."""

    def __init__(self, config: ModelConfig, recipe: Recipe, mesh: Mesh, stash: Stash, name: str, stage: int) -> None:
        super().__init__()
        c, tp = config, mesh.tp
        self.config, self.stash, self.name, self.stage = c, stash, name, stage
        self.norm = Weight(c.hidden_size, recipe=Recipe.fp32(), init_std=None, decay=False, tp_partial=tp.sequence)
        self.mlp = MLP(c.hidden_size, c.intermediate_size, c.initializer_range, recipe, tp, stash, f"{name}.mlp", stage)

    def forward(self, h_TD: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        eps, rebuild = self.config.rms_norm_eps, self.stage >= 2
        x = rms_norm_quantize(h_TD, self.norm, eps, self.mlp.gate_up, self.stash, f"{self.name}.norm", rebuild, plain=False)
        zero = torch.zeros((), device=h_TD.device)
        return add_residual(x.h_TD, self.mlp(x.edge)), zero, zero
