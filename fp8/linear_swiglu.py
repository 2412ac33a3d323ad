"""A linear layer and the SwiGLU behind it as one autograd Function, so that dh is quantised where it is made and BF16 never leaves.

Shapes: T tokens, D input features, f width of the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fp8.activation import Activation, make_carrier
from fp8.gemm import gemm_nt
from fp8.linear import quantize_grad_forms
from fp8.quantize import requantize_t
from fp8.quantized import Quantized
from fp8.stash import Stash, Ticket
from fp8.swiglu import kept_or_rebuilt, quantize_pre_activation, quantize_swiglu_backward, swiglu_backward
from fp8.transposed import transposed
from fp8.weight import Weight


@dataclass
class _Made:
    """What forward made beside the carrier."""

    a: Quantized | None = None
    pre: Ticket | None = None


class _LinearSwiglu(torch.autograd.Function):
    """forward  h = x . w^T, a = silu(h_gate) * h_up
    dgrad    dh = swiglu'(h, da),  dx = dh . w
    wgrad    dw += dh^T . x      into weight.main_grad
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, carrier_TD: Tensor, anchor: Tensor, x: Activation, weight: Weight, consumer: Weight,
        stash: Stash, name: str, made: _Made,
    ) -> Tensor:  # fmt: skip
        ctx.x, ctx.weight = x.ticket.claim(), weight
        h_q, made.a = quantize_pre_activation(gemm_nt(x.q, weight.q, dtype=carrier_TD.dtype), None, consumer)
        made.pre = stash.put(name + ".pre", h_q)
        ctx.pre = made.pre.claim()
        return make_carrier((carrier_TD.shape[0], h_q.shape[1] // 2), carrier_TD)

    @staticmethod
    def backward(ctx: FunctionCtx, da_Tf: Tensor) -> tuple[Tensor | None, ...]:
        weight, h_q, x_q, dx_TD = ctx.weight, ctx.pre.pop(), ctx.x.pop(), None
        if ctx.needs_input_grad[0] and weight.trainable:
            dh_q, dh_t, _ = quantize_swiglu_backward(h_q, None, da_Tf, weight)
        else:
            dh_q, dh_t = quantize_grad_forms(weight, swiglu_backward(h_q, None, da_Tf)[0], ctx.needs_input_grad[0])
        del h_q
        if dh_q is not None:
            dx_TD = gemm_nt(dh_q, transposed(weight), dtype=da_Tf.dtype)
        if dh_t is not None:
            x_t = requantize_t(x_q)
            weight.accumulate(lambda out, acc: gemm_nt(dh_t, x_t, out=out, accumulate=acc))
        return dx_TD, None, None, None, None, None, None, None


def linear_swiglu(x: Activation, weight: Weight, consumer: Weight, stash: Stash, name: str, rebuild: bool = False) -> Activation:
    """`swiglu_quantize(linear(x, weight), consumer, ...)` of x [T, D] and weight [2f, D], gate first: [T, f] for `consumer`."""
    made = _Made()
    carrier = _LinearSwiglu.apply(x.carrier, weight.anchor, x, weight, consumer, stash, name, made)
    return kept_or_rebuilt(made.a, carrier, made.pre, consumer, stash, name, rebuild)
