"""Linear layers whose weight is split over tp, each one autograd Function; on a solo axis they are `fp8.linear.linear`.

    column   w split by output features; tokens gathered before (quantised first, then on the wire), outputs stay split
    row      w split by input features; partial outputs summed over the axis after

With `axis.sequence` tokens are split between such a pair (gather / reduce-scatter), without it they are replicated
(identity / all-reduce). Shapes: T tokens, t = T / n of this rank, D whole features, f this rank's features.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fp8.activation import Activation
from fp8.gemm import gemm_nt
from fp8.linear import SharedGradient, linear, quantize_grad_forms
from fp8.quantize import requantize_t
from fp8.transposed import transposed
from fp8.weight import Weight
from parallel.collectives import all_gather_rows, start_all_gather_rows
from parallel.mesh import Axis
from parallel.sequence import KIND, start_sum_tokens, sum_tokens


class _ColumnLinear(torch.autograd.Function):
    """forward  y_Tf  = gather(x_tD) . w_fD^T
    dgrad    dx_tD = reduce_scatter(dy_Tf . w_fD)
    wgrad    dw_fD += dy_Tf^T . gather(x_tD)

    Backward gathers x again, under dgrad, instead of keeping T rows; the reduce-scatter runs under wgrad.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, carrier_tD: Tensor, anchor: Tensor, x: Activation, weight: Weight, axis: Axis) -> Tensor:
        ctx.ticket, ctx.weight, ctx.axis = x.ticket.claim(), weight, axis
        x_q = all_gather_rows(x.q, axis, KIND) if axis.sequence else x.q
        return gemm_nt(x_q, weight.q, dtype=carrier_tD.dtype)

    @staticmethod
    def backward(ctx: FunctionCtx, dy_Tf: Tensor) -> tuple[Tensor | None, ...]:
        weight, axis, x_q, dx = ctx.weight, ctx.axis, ctx.ticket.pop(), None
        gathering = start_all_gather_rows(x_q, axis, KIND) if axis.sequence and weight.trainable else None
        dy_q, dy_t = quantize_grad_forms(weight, dy_Tf, ctx.needs_input_grad[0])
        if dy_q is not None:
            dx = start_sum_tokens(gemm_nt(dy_q, transposed(weight), dtype=dy_Tf.dtype), axis)
        if dy_t is not None:
            x_t = requantize_t(gathering.wait() if gathering else x_q)
            weight.accumulate(lambda out, acc: gemm_nt(dy_t, x_t, out=out, accumulate=acc))
        return dx.wait() if dx else None, None, None, None, None


def column_linear(x: Activation, weight: Weight, axis: Axis) -> Tensor:
    """x [t, D] . weight [f, D]^T -> [T, f], f this rank's output features (x is [T, D] with `axis.sequence` off)."""
    if axis.size == 1:
        return linear(x, weight)
    return _ColumnLinear.apply(x.carrier, weight.anchor, x, weight, axis)


class _RowLinear(torch.autograd.Function):
    """forward  y_tD  = reduce_scatter(x_Tf . w_Df^T)
    dgrad    dx_Tf = gather(dy_tD) . w_Df
    wgrad    dw_Df += gather(dy_tD)^T . x_Tf

    dY is quantised once, on the rank that has it, and travels in FP8; wgrad re-tiles those same bytes along tokens.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, carrier_Tf: Tensor, anchor: Tensor, x: Activation, weight: Weight, axis: Axis) -> Tensor:
        ctx.ticket, ctx.weight, ctx.axis = x.ticket.claim(), weight, axis
        return sum_tokens(gemm_nt(x.q, weight.q, dtype=carrier_Tf.dtype), axis)

    @staticmethod
    def backward(ctx: FunctionCtx, dy_tD: Tensor) -> tuple[Tensor | None, ...]:
        weight, axis, x_q, dx_Tf = ctx.weight, ctx.axis, ctx.ticket.pop(), None
        dy_q = weight.quantize_grad(dy_tD)
        dy_q = all_gather_rows(dy_q, axis, KIND) if axis.sequence else dy_q
        if ctx.needs_input_grad[0]:
            dx_Tf = gemm_nt(dy_q, transposed(weight), dtype=dy_tD.dtype)
        if weight.trainable:
            dy_t = weight.retile_grad_t(dy_q) if axis.sequence else weight.quantize_grad_t(dy_tD)
            x_t = requantize_t(x_q)
            weight.accumulate(lambda out, acc: gemm_nt(dy_t, x_t, out=out, accumulate=acc))
        return dx_Tf, None, None, None, None


def row_linear(x: Activation, weight: Weight, axis: Axis, shared: SharedGradient | None = None) -> Tensor:
    """x [T, f] . weight [D, f]^T, summed over the axis -> [t, D] ([T, D] with `axis.sequence` off).

    Args:
        shared: where another layer gets the same dY, which it does on a solo axis only.
    """
    if axis.size == 1:
        return linear(x, weight, shared)
    return _RowLinear.apply(x.carrier, weight.anchor, x, weight, axis)
