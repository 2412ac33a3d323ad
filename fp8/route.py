"""The router's choice: sigmoid scores, group-limited top-k of (score + bias), normalised weights.

Shapes: T tokens, E experts in n_group groups, k experts a token.

    s = sigmoid(logits);   ids = the k best (s + bias) within the topk_group groups whose two best (s + bias) sum highest
    weights = factor * s[ids] / (sum s[ids] + 1e-20)          (the bias steers the choice, never the weight)
    lse = logsumexp(logits)                                   (what the z-loss reads)
Ties go to the lower id in the kernel; torch.topk leaves them open.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fp8.permute import BlockCounts, count_slots


def select_experts(biased_TE: Tensor, n_group: int, topk_group: int, k: int) -> Tensor:
    """[T, E] biased scores -> int64 [T, k]. Masked groups get -inf, not 0: biased scores can be negative."""
    grouped = biased_TE.unflatten(-1, (n_group, -1))
    group_score = grouped.topk(2, dim=-1).values.sum(-1)
    best = group_score.topk(topk_group, dim=-1, sorted=False).indices
    keep = torch.zeros_like(group_score, dtype=torch.bool).scatter_(1, best, True)
    masked = grouped.masked_fill(~keep[:, :, None], float("-inf")).flatten(1)
    return masked.topk(k, dim=-1).indices


def route_ref(
    logits_TE: Tensor, bias_E: Tensor, n_group: int, topk_group: int, k: int, factor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(ids int64 [T, k] best first, weights [T, k], lse [T]); differentiable in the logits."""
    scores_TE = torch.sigmoid(logits_TE)
    with torch.no_grad():
        ids_Tk = select_experts(scores_TE + bias_E, n_group, topk_group, k)
    chosen = scores_TE.gather(1, ids_Tk)
    weights_Tk = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * factor
    return ids_Tk, weights_Tk, torch.logsumexp(logits_TE, dim=-1)


def _kernels(logits_TE: Tensor, n_group: int) -> ModuleType | None:
    """The Triton kernel on a GPU (experts and groups powers of two), None for the reference."""
    experts = logits_TE.shape[1]
    if not logits_TE.is_cuda or experts & (experts - 1) or n_group & (n_group - 1):
        return None
    from fp8 import route_forward_kernel  # Triton comes with CUDA builds of torch only

    return route_forward_kernel


class PendingGradient:
    """Where backward of `route` leaves its work to that of the product before it, which knows what other losses gave the logits.

    One kernel then makes dlogits and writes it split into BF16 parts, as the products read it (router_gemm.py).
    """

    def __init__(self) -> None:
        self._make: Callable[[Tensor | None], Tensor] | None = None

    def leave(self, make: Callable[[Tensor | None], Tensor]) -> None:
        """`make` turns the other losses' dlogits (None: none) into the parts of all."""
        self._make = make

    def take(self, dlogits_TE: Tensor | None) -> Tensor | None:
        """BF16 [T, 4E], columns [high | middle | high | low] of dlogits and of what was left here; None where nothing was."""
        make, self._make = self._make, None
        return None if make is None else make(dlogits_TE)


class _Route(torch.autograd.Function):
    """forward (ids, weights, lse); backward dlogits of weights and lse. One kernel each way."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, logits_TE: Tensor, bias_E: Tensor, sizes: tuple[int, int, int, float], pending: PendingGradient | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        from fp8 import route_forward_kernel  # Triton comes with CUDA builds of torch only

        ids, weights, lse = route_forward_kernel.route(logits_TE, bias_E, *sizes)
        ctx.save_for_backward(logits_TE, ids, lse)
        ctx.factor, ctx.pending = sizes[-1], pending
        ctx.mark_non_differentiable(ids)
        return ids, weights, lse

    @staticmethod
    def backward(ctx: FunctionCtx, _: Tensor, dweights_Tk: Tensor, dlse_T: Tensor) -> tuple[Tensor | None, ...]:
        from fp8 import route_kernels

        given = *ctx.saved_tensors, dweights_Tk, dlse_T, ctx.factor
        if ctx.pending is None:
            return route_kernels.route_backward(*given), None, None, None
        ctx.pending.leave(lambda plus_TE: route_kernels.route_backward(*given, plus_TE, parts=True))
        return None, None, None, None


def route(
    logits_TE: Tensor, bias_E: Tensor, n_group: int, topk_group: int, k: int, factor: float,
    pending: PendingGradient | None = None, counts_E: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, BlockCounts | None]:  # fmt: skip
    """(ids int64 [T, k] best first, weights fp32 [T, k], lse fp32 [T], counts for `build_permutation`) of fp32 logits [T, E].

    Counted is what `counts_E` asks for, else None: whoever builds a permutation counts then, and nobody does at ep > 1.

    Args:
        bias_E: added to the scores for the choice only.
        pending: where backward may leave its part of dlogits, if whoever made the logits looks there.
        counts_E: int64, gains the number of tokens of each expert.
    """
    sizes = n_group, topk_group, k, factor
    if _kernels(logits_TE, n_group):
        made = _Route.apply(logits_TE, bias_E, sizes, pending)
    else:
        made = route_ref(logits_TE, bias_E, *sizes)
    return *made, None if counts_E is None else count_slots(made[0], logits_TE.shape[1], counts_E)
