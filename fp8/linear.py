"""The three GEMMs of a linear layer in one autograd Function.

Shapes: T tokens, D input features, F output features.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fp8.activation import Activation, make_carrier
from fp8.gemm import gemm_nt
from fp8.quantize import requantize_t
from fp8.quantized import Quantized
from fp8.stash import Stash
from fp8.transposed import transposed
from fp8.weight import Weight


def quantize_grad_forms(weight: Weight, dy_TF: Tensor, for_input: bool) -> tuple[Quantized | None, Quantized | None]:
    """(dY for dgrad, dY for wgrad), in one pass where both are needed; None where the input or the weight needs no gradient."""
    if for_input and weight.trainable:
        return weight.quantize_grad_both(dy_TF)
    dy_q = weight.quantize_grad(dy_TF) if for_input else None
    return dy_q, weight.quantize_grad_t(dy_TF) if weight.trainable else None


class SharedGradient:
    """A dY that reaches two layers, as what is added to the residual stream does: the first to ask quantises it for both.

    Make a new one in each forward pass and hand it to both layers: in that pass's backward it keeps what the first has quantised
    until the second asks.
    """

    def __init__(self, first: Weight, second: Weight) -> None:
        self._first, self._second = first, second
        self._made: tuple[Tensor, int, tuple[Quantized, Quantized]] | None = None

    def forms(self, dy_TF: Tensor) -> tuple[Quantized, Quantized] | None:
        """dY for dgrad and for wgrad; None where the weights do not want the same."""
        a, b = self._first, self._second
        if a.is_watched or b.is_watched or not (a.trainable and b.trainable):
            return None
        if (a.recipe.gradient, a.gradient_t) != (b.recipe.gradient, b.gradient_t):
            return None
        made, self._made = self._made, None
        if made is not None and made[0].data_ptr() == dy_TF.data_ptr() and made[0].shape == dy_TF.shape:
            if made[1] == dy_TF._version:
                return made[2]
        forms = a.quantize_grad_both(dy_TF)
        self._made = dy_TF, dy_TF._version, forms  # holding dy keeps its place from being taken by another tensor
        return forms


class _Linear(torch.autograd.Function):
    """forward  y_TF  = x_TD . w_FD^T
    dgrad    dx_TD = dy_TF . w_FD
    wgrad    dw_FD += dy_TF^T . x_TD      into weight.main_grad

    dY is quantised twice from the same high-precision values, in one pass: 1x128 along F for dgrad, along tokens for wgrad (tiles
    of the block recipe). X is not: what was kept for backward is the X that forward rounded, 1x128 along D, and wgrad re-quantises
    those values along tokens (`requantize_t`), from tiles with power-of-two scales, so that only what falls among the subnormals
    of the new, larger scale is rounded a second time.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, carrier_TD: Tensor, anchor: Tensor, x: Activation, weight: Weight, shared: SharedGradient | None
    ) -> Tensor:
        ctx.ticket, ctx.weight, ctx.shared = x.ticket.claim(), weight, shared
        return gemm_nt(x.q, weight.q, dtype=carrier_TD.dtype)

    @staticmethod
    def backward(ctx: FunctionCtx, dy_TF: Tensor) -> tuple[Tensor | None, ...]:
        weight, x_q = ctx.weight, ctx.ticket.pop()
        dx_TD = None
        forms = ctx.shared.forms(dy_TF) if ctx.shared is not None and ctx.needs_input_grad[0] else None
        dy_q, dy_t = forms or quantize_grad_forms(weight, dy_TF, ctx.needs_input_grad[0])
        if dy_q is not None:
            dx_TD = gemm_nt(dy_q, transposed(weight), dtype=dy_TF.dtype)
        if dy_t is not None:
            x_t = requantize_t(x_q)
            weight.accumulate(lambda out, acc: gemm_nt(dy_t, x_t, out=out, accumulate=acc))
        return dx_TD, None, None, None, None


def linear(x: Activation, weight: Weight, shared: SharedGradient | None = None) -> Tensor:
    """x [T, D] . weight [F, D]^T -> [T, F] in the carrier's dtype; gradients as `_Linear` states.

    Args:
        shared: where another layer gets the same dY.
    """
    return _Linear.apply(x.carrier, weight.anchor, x, weight, shared)


def linear_ref(x_TD: Tensor, w_FD: Tensor) -> Tensor:
    """The differentiable definition, without quantisation."""
    return x_TD @ w_FD.t()


class _QuantizeEdge(torch.autograd.Function):
    """forward: hands the carrier out; backward: dx_TD = d(carrier), unchanged (straight through)."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_TD: Tensor) -> Tensor:
        return make_carrier(x_TD.shape, x_TD)

    @staticmethod
    def backward(ctx: FunctionCtx, dx_TD: Tensor) -> Tensor:
        return dx_TD


def quantize_activation(x_TD: Tensor, weight: Weight, stash: Stash, name: str = "activation") -> Activation:
    """Quantises a high-precision [T, D] for `weight` where no fused kernel has done it (attention output, a forker's own layer)."""
    q = weight.quantize_activation(x_TD.detach())
    return Activation(q, _QuantizeEdge.apply(x_TD), stash.put(name, q))
