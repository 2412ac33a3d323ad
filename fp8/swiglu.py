"""SwiGLU, optionally times a routing weight, reading the FP8 pre-activations that backward will read.

Shapes: R rows, f = width of the MLP; h_R2f holds [gate | up].
    forward   a = silu(g) * u * w
    backward  dg = da * w * u * s * (1 + g * (1 - s)),  du = da * w * silu(g),  dw = sum_f da * silu(g) * u     with s = sigmoid(g)
Forward reads the same bytes it stores, so that recomputing `a` in backward is bitwise the first forward.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fp8.activation import Activation, make_carrier
from fp8.fused import ROW, fuses_activation, fuses_gradient
from fp8.quantized import Quantized
from fp8.recipe import BLOCK, E4M3
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


def _kernels(t: Tensor) -> ModuleType | None:
    """The Triton kernels on a GPU (for BF16 and for E4M3 in 1x128 tiles), None for the reference."""
    if not t.is_cuda or t.dtype not in (torch.bfloat16, E4M3):
        return None
    from fp8 import swiglu_kernels  # Triton comes with CUDA builds of torch only

    return swiglu_kernels


def swiglu(h_q: Quantized, w_R: Tensor | None, dtype: torch.dtype, live_B: Tensor | None = None) -> Tensor:
    """Stored pre-activations [R, 2f] -> silu(gate) * up * w [R, f] in `dtype`, unquantised.

    Args:
        live_B: int32 [ceil(R / 128)], e.g. `Groups.block_expert_B`; kernels skip blocks with a negative entry (their output is
            undefined).
    """
    kernels = _kernels(h_q.data)
    if kernels and dtype == torch.bfloat16 and h_q.tile in (None, (1, BLOCK)):
        return kernels.plain(h_q, w_R, None, live_B)[0]
    return swiglu_ref(h_q.dequantize(), w_R).to(dtype)


def quantize_swiglu(
    h_q: Quantized, w_R: Tensor | None, consumer: Weight, dtype: torch.dtype, live_B: Tensor | None = None
) -> Quantized:
    """Stored pre-activations [R, 2f] -> quantised SwiGLU output [R, f] for `consumer` (the down projection).

    Args:
        dtype: what an unquantised kernel would emit; the value is rounded to it before quantisation.
        live_B: as for `swiglu`.
    """
    if h_q.tile == (1, BLOCK) and dtype == torch.bfloat16 and consumer.recipe.activation == ROW and not consumer.is_watched:
        kernels = _kernels(h_q.data)
        if kernels:
            return kernels.quantize_swiglu(h_q, w_R, live_B)[1]
    return consumer.quantize_activation(swiglu(h_q, w_R, dtype, live_B))


def quantize_pre_activation(
    h_R2f: Tensor, w_R: Tensor | None, consumer: Weight, live_B: Tensor | None = None
) -> tuple[Quantized, Quantized]:
    """h [R, 2f] -> (h as it is stored, SwiGLU of those bytes [R, f]), both in `consumer`'s activation format; h is read once."""
    if fuses_activation(h_R2f, consumer):
        return _kernels(h_R2f).quantize_swiglu(h_R2f, w_R, live_B)
    h_q = consumer.quantize_activation(h_R2f)
    return h_q, quantize_swiglu(h_q, w_R, consumer, h_R2f.dtype, live_B)


def swiglu_backward(
    h_q: Quantized, w_R: Tensor | None, da_Rf: Tensor, live_B: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """(dh [R, 2f] in da's dtype, dw [R] fp32 or None), unquantised. `live_B` as for `swiglu`."""
    kernels = _kernels(h_q.data)
    if kernels and da_Rf.dtype == torch.bfloat16 and h_q.tile in (None, (1, BLOCK)):
        return kernels.plain(h_q, w_R, da_Rf, live_B)
    dh_R2f, dw_R = swiglu_backward_ref(h_q.dequantize(), w_R, da_Rf)
    return dh_R2f.to(da_Rf.dtype), dw_R


def quantize_swiglu_backward(
    h_q: Quantized, w_R: Tensor | None, da_Rf: Tensor, producer: Weight, live_B: Tensor | None = None
) -> tuple[Quantized, Quantized, Tensor | None]:
    """(dh [R, 2f] as A of dgrad, dh transposed [2f, Rp] as A of wgrad, dw [R] fp32 or None).

    Args:
        producer: the weight that made h (gate and up); its recipe decides the formats.
        live_B: as for `swiglu`.
    """
    if h_q.tile == (1, BLOCK) and fuses_gradient(da_Rf, producer):
        return _kernels(da_Rf).backward(h_q, w_R, da_Rf, live_B)
    dh_R2f, dw_R = swiglu_backward(h_q, w_R, da_Rf, live_B)
    return producer.quantize_grad(dh_R2f), producer.quantize_grad_t(dh_R2f), dw_R


class _Swiglu(torch.autograd.Function):
    """forward: the carrier of a; backward: dh from the stored pre-activations and d(carrier) = da."""

    @staticmethod
    def forward(ctx: FunctionCtx, h_R2f: Tensor, h_ticket: Ticket) -> Tensor:
        ctx.ticket = h_ticket.claim()
        return make_carrier((h_R2f.shape[0], h_R2f.shape[1] // 2), h_R2f)

    @staticmethod
    def backward(ctx: FunctionCtx, da_Rf: Tensor) -> tuple[Tensor, None]:
        return swiglu_backward(ctx.ticket.pop(), None, da_Rf)[0], None


def swiglu_quantize(h_R2f: Tensor, consumer: Weight, stash: Stash, name: str, rebuild: bool = False) -> Activation:
    """SwiGLU of [R, 2f] as the quantised input [R, f] of `consumer`; keeps the pre-activations in `consumer`'s activation format.

    Args:
        rebuild: do not keep the output; backward recomputes it from the stored pre-activations.
    """
    h_q, a_q = quantize_pre_activation(h_R2f.detach(), None, consumer)
    pre = stash.put(name + ".pre", h_q)
    return kept_or_rebuilt(a_q, _Swiglu.apply(h_R2f, pre), pre, consumer, stash, name, rebuild)


def kept_or_rebuilt(
    a_q: Quantized, carrier: Tensor, pre: Ticket, consumer: Weight, stash: Stash, name: str, rebuild: bool
) -> Activation:
    """The edge of a SwiGLU output: kept for `consumer`'s backward, or with `rebuild` made again from `pre`, the pre-activations."""
    if not rebuild:
        return Activation(a_q, carrier, stash.put(name + ".out", a_q))
    again, dtype = pre.claim(), carrier.dtype
    ticket = stash.put(name + ".out", a_q, lambda: quantize_swiglu(again.pop(), None, consumer, dtype))
    return Activation(a_q, carrier, ticket)
