"""Group-limited sigmoid router with an expert bias that balances the load without a gradient.

Shapes: T tokens, D features, E experts in G groups, k experts a token.
    logits = x . w^T (fp32)      s = sigmoid(logits)
    selection: the `topk_group` groups with the largest sum of their two best (s + bias), the k best (s + bias) within them
    weights  = s[chosen] / (sum s[chosen] + 1e-20) * routed_scaling_factor         (unbiased)
Source: Ling 2.0 technical report (arXiv 2510.22115), section 2; bias update of section 2.2, zero-mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from fp8.permute import BlockCounts
from fp8.recipe import Recipe
from fp8.rms_norm import Normed
from fp8.route import PendingGradient, route
from fp8.router_gemm import router_dgrad, router_gemm, router_wgrad, split_gradient, splits
from fp8.stash import Ticket
from fp8.weight import Weight
from model.config import ModelConfig
from parallel.collectives import all_reduce
from parallel.mesh import Axis


class _Logits(torch.autograd.Function):
    """forward logits_TE = x_TD . w_ED^T; dgrad dx_TD = dlogits . w; wgrad dw_ED += dlogits^T . x. All in FP32 accuracy.

    dlogits is what autograd brings plus what `route` left in `pending`, split into BF16 once for both products.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, x_TD: Tensor, anchor: Tensor, weight: Weight, ticket: Ticket, pending: PendingGradient | None
    ) -> Tensor:
        ctx.weight, ctx.ticket, ctx.pending = weight, ticket.claim(), pending
        ctx.set_materialize_grads(False)
        return router_gemm(x_TD, weight.data)

    @staticmethod
    def backward(ctx: FunctionCtx, dlogits_TE: Tensor | None) -> tuple[Tensor | None, ...]:
        weight, x_TD = ctx.weight, ctx.ticket.pop()
        parts = None if ctx.pending is None else ctx.pending.take(dlogits_TE)
        if parts is None and dlogits_TE is None:
            return None, None, None, None, None
        if parts is None and splits(x_TD):
            parts = split_gradient(dlogits_TE)
        weight.add_grad(router_wgrad(dlogits_TE, x_TD, parts))
        return router_dgrad(dlogits_TE, weight.data, x_TD.dtype, parts), None, None, None, None


@dataclass(frozen=True, eq=False)
class Routing:
    """Where tokens go.

    Attributes:
        ids_Tk: int64 chosen experts, best first.
        weights_Tk: fp32 routing weights, differentiable.
        lse_T, logits_TE: fp32, differentiable, for the auxiliary losses; lse is logsumexp(logits).
        counted: of ids_Tk, for whoever builds the permutation; None where nobody has counted.
    """

    ids_Tk: Tensor
    weights_Tk: Tensor
    lse_T: Tensor
    logits_TE: Tensor
    counted: BlockCounts | None = None


class Router(nn.Module):
    """Chooses experts; `expert_bias` (fp32) steers the choice, `counts` (int64) is what was chosen since the last bias update."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        shape, std = (config.num_experts, config.hidden_size), config.initializer_range
        self.weight = Weight(*shape, recipe=Recipe.fp32(), init_std=std, tp_partial=True)
        self.register_buffer("expert_bias", torch.zeros(config.num_experts, dtype=torch.float32))
        self.register_buffer("counts", torch.zeros(config.num_experts, dtype=torch.int64))

    def _apply(self, fn, recurse: bool = True):  # noqa: ANN001, ANN202
        """Moves, but never casts: a bias in BF16 loses updates (0.5 + 0.001), counts above 256 lose ones."""
        super()._apply(fn, recurse)
        self.expert_bias, self.counts = self.expert_bias.float(), self.counts.long()
        return self

    def forward(self, x: Normed, count: bool = True) -> Routing:
        """x [T, D] unquantised -> Routing. Counts tokens in training only, and not when a layer is recomputed."""
        c = self.config
        pending = PendingGradient() if splits(x.x_TD) else None
        logits_TE = _Logits.apply(x.x_TD, self.weight.anchor, self.weight, x.x_ticket, pending)
        sizes = (c.n_group, c.topk_group, c.num_experts_per_tok, c.routed_scaling_factor)
        counts = self.counts if self.training and count else None
        ids_Tk, weights_Tk, lse_T, counted = route(logits_TE, self.expert_bias, *sizes, pending, counts)
        return Routing(ids_Tk, weights_Tk, lse_T, logits_TE, counted)


def routers(module: nn.Module) -> Iterator[tuple[str, Router]]:
    """(name, Router) of every MoE layer, the MTP layer's included."""
    for name, child in module.named_modules():
        if isinstance(child, Router):
            yield name, child


@torch.no_grad()
def bias_update(bias_E: Tensor, counts_E: Tensor, rate: float) -> Tensor:
    """New bias: b + rate * (sign(e) - mean sign(e)), e = mean(c) - c. Integer counts: E * (mean - c) keeps the sign exact.

    A layer that has routed nothing keeps its bias.
    """
    error = counts_E.sum() - counts_E * counts_E.numel()
    sign = torch.sign(error).float()
    return bias_E + rate * (sign - sign.mean())


@torch.no_grad()
def update_expert_bias(module: nn.Module, axis: Axis, rate: float) -> None:
    """Moves every router's bias once, from the counts of the whole global batch, and resets the counts.

    Args:
        axis: the ranks that hold different tokens (dp; under sequence parallelism dp x tp); integer sums, one collective.
    """
    found = [router for _, router in routers(module)]
    if not found:
        return
    counts = all_reduce(torch.stack([r.counts for r in found]), axis, "router")
    for router, counts_E in zip(found, counts, strict=True):
        router.expert_bias.copy_(bias_update(router.expert_bias, counts_E, rate))
        router.counts.zero_()
