"""The MoE block: norm, router, routed experts, shared expert, and the router's auxiliary losses.

Shapes: T = B * S tokens, D features, E experts, k experts a token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fp8.recipe import Recipe
from fp8.rms_norm import rms_norm_quantize
from fp8.stash import Stash
from fp8.weight import Weight
from model.attention import Context
from model.config import ModelConfig
from model.experts import RoutedExperts
from model.mlp import MLP
from model.router import Router, Routing


def router_z_loss(logits_TE: Tensor) -> Tensor:
    """Sum over tokens of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, eq. 5)."""
    return torch.logsumexp(logits_TE, dim=-1).square().sum()


def sequence_balance_loss(routing: Routing, seq_len: int) -> Tensor:
    """Sum over sequences of sum_e f_e P_e (DeepSeek-V3, eq. 17-20): 1 a sequence when balanced.

    f_e: share of the sequence's slots that expert e got, times E. P_e: mean over tokens of s_e / sum s. The floor under sum s is the
    router's own 1e-20, so that vanishing scores stay finite.
    """
    scores, ids = routing.scores_TE, routing.ids_Tk
    num_experts, k = scores.shape[1], ids.shape[1]
    chosen = torch.zeros_like(scores).scatter_(1, ids, 1.0).unflatten(0, (-1, seq_len))
    fraction = chosen.sum(1) * (num_experts / (k * seq_len))
    share = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    return (fraction * share.unflatten(0, (-1, seq_len)).mean(1)).sum()


class MoE(nn.Module):
    """h [T, D] -> (contribution [T, D], auxiliary losses summed and weighted, z-loss sum for the log)."""

    def __init__(self, config: ModelConfig, recipe: Recipe, stash: Stash, name: str, stage: int) -> None:
        super().__init__()
        c = config
        self.config, self.stash, self.name, self.stage = c, stash, name, stage
        self.norm = Weight(c.hidden_size, recipe=Recipe.fp32(), init_std=None, decay=False, tp_partial=True)
        self.router = Router(c)
        self.experts = RoutedExperts(c, recipe, stash, f"{name}.experts", stage)
        width = c.shared_intermediate_size
        self.shared = MLP(c.hidden_size, width, c.initializer_range, recipe, stash, f"{name}.shared", stage) if width else None

    def forward(self, h_TD: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        c, rebuild = self.config, self.stage >= 2
        consumer = self.experts.gate_up
        x = rms_norm_quantize(h_TD, self.norm, c.rms_norm_eps, consumer, self.stash, f"{self.name}.norm", rebuild)
        routing = self.router(x)
        y_TD = self.experts(x.edge, routing.ids_Tk, routing.weights_Tk)
        if self.shared is not None:
            y_TD = y_TD + self.shared(x.edge)
        z = router_z_loss(routing.logits_TE) / ctx.num_tokens
        aux = c.router_z_loss_weight * z
        if c.aux_loss_weight:
            aux = aux + c.aux_loss_weight * sequence_balance_loss(routing, ctx.seq_len) * ctx.seq_len / ctx.num_tokens
        return y_TD, aux, z.detach()


class DenseBlock(nn.Module):
    """Norm and dense MLP, with the same signature as MoE."""

    def __init__(self, config: ModelConfig, recipe: Recipe, stash: Stash, name: str, stage: int) -> None:
        super().__init__()
        c = config
        self.config, self.stash, self.name, self.stage = c, stash, name, stage
        self.norm = Weight(c.hidden_size, recipe=Recipe.fp32(), init_std=None, decay=False, tp_partial=True)
        self.mlp = MLP(c.hidden_size, c.intermediate_size, c.initializer_range, recipe, stash, f"{name}.mlp", stage)

    def forward(self, h_TD: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        eps, rebuild = self.config.rms_norm_eps, self.stage >= 2
        x = rms_norm_quantize(h_TD, self.norm, eps, self.mlp.gate_up, self.stash, f"{self.name}.norm", rebuild)
        zero = torch.zeros((), device=h_TD.device)
        return self.mlp(x.edge), zero, zero
