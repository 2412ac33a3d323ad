"""SwiGLU, optionally times a routing weight, reading the FP8 pre-activations that backward will read.

Shapes: R rows, f = width of the MLP; h_R2f holds [gate | up].
    forward   a = silu(g) * u * w
    backward  dg = da * w * u * s * (1 + g * (1 - s)),  du = da * w * silu(g),  dw = sum_f da * silu(g) * u     with s = sigmoid(g)
Forward reads the same bytes it stores, so that recomputing `a` in backward is bitwise the first forward.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fp8.activation import Activation, make_carrier
from fp8.quantized import Quantized
from fp8.stash import Stash, Ticket
from fp8.weight import Weight


def swiglu_ref(h_R2f: Tensor, w_R: Tensor | None = None) -> Tensor:
    """The differentiable definition in FP32: [R, 2f] -> [R, f]."""
    g, u = h_R2f.float().chunk(2, dim=-1)
    a_Rf = torch.nn.functional.silu(g) * u
    return a_Rf if w_R is None else a_Rf * w_R.float()[:, None]


def swiglu_backward_ref(h_R2f: Tensor, w_R: Tensor | None, da_Rf: Tensor) -> tuple[Tensor, Tensor | None]:
    """(dh [R, 2f] fp32, dw [R] fp32 or None)."""
    g, u = h_R2f.float().chunk(2, dim=-1)
    s, da = torch.sigmoid(g), da_Rf.float()
    silu = g * s
    dw_R = None if w_R is None else (da * silu * u).sum(-1)
    if w_R is not None:
        da = da * w_R.float()[:, None]
    return torch.cat([da * u * s * (1 + g * (1 - s)), da * silu], dim=-1), dw_R


def quantize_swiglu(h_q: Quantized, w_R: Tensor | None, consumer: Weight, dtype: torch.dtype) -> Quantized:
    """Stored pre-activations [R, 2f] -> quantised SwiGLU output [R, f] for `consumer` (the down projection).

    dtype: what an unquantised kernel would emit; the value is rounded to it before quantisation.
    """
    return consumer.quantize_activation(swiglu_ref(h_q.dequantize(), w_R).to(dtype))


class _Swiglu(torch.autograd.Function):
    """forward: the carrier of a; backward: dh from the stored pre-activations and d(carrier) = da."""

    @staticmethod
    def forward(ctx: FunctionCtx, h_R2f: Tensor, h_ticket: Ticket) -> Tensor:
        ctx.ticket = h_ticket.claim()
        return make_carrier((h_R2f.shape[0], h_R2f.shape[1] // 2), h_R2f)

    @staticmethod
    def backward(ctx: FunctionCtx, da_Rf: Tensor) -> tuple[Tensor, None]:
        h_q = ctx.ticket.pop()
        return swiglu_backward_ref(h_q.dequantize(), None, da_Rf)[0].to(da_Rf.dtype), None


def swiglu_quantize(h_R2f: Tensor, consumer: Weight, stash: Stash, name: str, rebuild: bool = False) -> Activation:
    """SwiGLU of [R, 2f] as the quantised input [R, f] of `consumer`; keeps the pre-activations in `consumer`'s activation format.

    Args:
        rebuild: do not keep the output; backward recomputes it from the stored pre-activations.
    """
    dtype = h_R2f.dtype
    h_q = consumer.quantize_activation(h_R2f.detach())
    h_ticket = stash.put(name + ".pre", h_q)
    carrier = _Swiglu.apply(h_R2f, h_ticket)
    a_q = quantize_swiglu(h_q, None, consumer, dtype)
    if not rebuild:
        return Activation(a_q, carrier, stash.put(name + ".out", a_q))
    h_again = h_ticket.claim()
    ticket = stash.put(name + ".out", a_q, lambda: quantize_swiglu(h_again.pop(), None, consumer, dtype))
    return Activation(a_q, carrier, ticket)
