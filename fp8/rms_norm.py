"""RMSNorm, fused with the quantisation of its output.

Forward:   rstd = (mean(h^2) + eps)^-1/2,  n = cast(h * rstd),  x = w * n
Backward:  g = dx * w,  dh = rstd * (g - n * mean(g * n)),  dw = sum_T dx * n
Shapes: T tokens, D features. The statistics are FP32; `cast` goes to the residual stream's dtype (as the published model does).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fp8.activation import Activation, make_carrier
from fp8.fused import fuses_activation
from fp8.quantized import Quantized
from fp8.stash import Stash, Ticket
from fp8.weight import Weight


def rms_norm_ref(h_TD: Tensor, w_D: Tensor, eps: float) -> Tensor:
    """The differentiable definition, in h's dtype."""
    h = h_TD.float()
    n_TD = (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)).to(h_TD.dtype)
    return (n_TD * w_D).to(h_TD.dtype)


def rms_norm_backward_ref(h_TD: Tensor, w_D: Tensor, dx_TD: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(dh [T, D] in h's dtype, dw [D] fp32)."""
    h, dx = h_TD.float(), dx_TD.float()
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    n = h * rstd
    g = dx * w_D.float()
    dh = rstd * (g - n * (g * n).mean(-1, keepdim=True))
    return dh.to(h_TD.dtype), (dx * n.to(h_TD.dtype).float()).flatten(0, -2).sum(0)


def _kernels(h: Tensor) -> ModuleType | None:
    """The Triton kernels on a GPU, None for the reference."""
    if not h.is_cuda or h.dtype not in (torch.bfloat16, torch.float32):
        return None
    from fp8 import rms_norm_kernels  # Triton comes with CUDA builds of torch only

    return rms_norm_kernels


def _norm(h_TD: Tensor, w_D: Tensor, eps: float, plain: bool, consumer: Weight | None) -> tuple[Tensor | None, Quantized | None]:
    """(x if `plain`, x as `consumer`'s activation if there is one), with one read of h where a kernel quantises."""
    kernels = _kernels(h_TD)
    if kernels and (consumer is None or fuses_activation(h_TD, consumer)):
        return kernels.rms_norm(h_TD, w_D, eps, plain, consumer is not None)
    x_TD = kernels.rms_norm(h_TD, w_D, eps, True, False)[0] if kernels else rms_norm_ref(h_TD, w_D, eps)
    return x_TD if plain else None, None if consumer is None else consumer.quantize_activation(x_TD)


class _RmsNorm(torch.autograd.Function):
    """forward (carrier, carrier, x_TD, h_TD); backward dh = norm'(d(carrier) + d(carrier) + d(x)) + d(h).

    GEMMs read the bytes, one or two of them, each with a carrier; the router reads x_TD; and the residual stream goes on from the h
    handed out: all these gradients are added here instead of by autograd.

    `made` holds x_TD, which the caller's kernel has made together with its quantised form; None where nobody reads it.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, h_TD: Tensor, anchor: Tensor, weight: Weight, eps: float, made: tuple[Tensor | None], twice: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        ctx.save_for_backward(h_TD)
        ctx.weight, ctx.eps = weight, eps
        ctx.set_materialize_grads(False)
        second = make_carrier(h_TD.shape, h_TD) if twice else None
        return make_carrier(h_TD.shape, h_TD), second, made[0], h_TD.view_as(h_TD)

    @staticmethod
    def backward(
        ctx: FunctionCtx, first: Tensor | None, second: Tensor | None, dx_TD: Tensor | None, dres_TD: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        grads = [d for d in (first, second, dx_TD) if d is not None]
        if not grads:
            return dres_TD, None, None, None, None, None
        (h_TD,), w_D, kernels = ctx.saved_tensors, ctx.weight.data, _kernels(grads[0])
        if kernels:
            dh_TD, dw_D = kernels.backward(h_TD, w_D, grads, dres_TD, ctx.eps)
        else:
            dh_TD, dw_D = rms_norm_backward_ref(h_TD, w_D, sum(grads[1:], grads[0]), ctx.eps)
            dh_TD = dh_TD if dres_TD is None else dh_TD + dres_TD
        ctx.weight.add_grad(dw_D)
        return dh_TD, None, None, None, None, None


@dataclass(frozen=True, eq=False)
class Normed:
    """What a norm hands out.

    Attributes:
        edge: quantised rows for GEMMs.
        x_TD: the unquantised rows, differentiable: the router, and concatenations. None where nobody reads them.
        x_ticket: how backward gets x_TD again (always recomputed from h, never kept).
        h_TD: the norm's input, for the residual stream to go on from.
        second: the same rows for a second GEMM, where one was announced; its gradient is added by the norm.
    """

    edge: Activation
    x_TD: Tensor | None
    x_ticket: Ticket
    h_TD: Tensor
    second: Activation | None = None


def rms_norm(h_TD: Tensor, weight: Weight, eps: float) -> Tensor:
    """x [T, D] in h's dtype, unquantised."""
    made = _norm(h_TD.detach(), weight.data, eps, True, None)[:1]
    return _RmsNorm.apply(h_TD, weight.anchor, weight, eps, made, False)[2]


def rms_norm_quantize(
    h_TD: Tensor,
    weight: Weight,
    eps: float,
    consumer: Weight,
    stash: Stash,
    name: str,
    rebuild: bool = False,
    plain: bool = True,
    twice: bool = False,
) -> Normed:
    """Norm of h [T, D], quantised as `consumer`'s activation.

    Args:
        consumer: the weight whose GEMM reads the result; its recipe decides the format.
        rebuild: keep nothing; backward recomputes the bytes from h (1 byte a value less, one norm more). Bitwise the same.
        plain: also hand out the unquantised rows; False saves writing them.
        twice: a second GEMM reads the rows.
    """
    h, w = h_TD.detach(), weight.data
    x_TD, q = _norm(h, w, eps, plain, consumer)
    carrier, second, x_TD, h_TD = _RmsNorm.apply(h_TD, weight.anchor, weight, eps, (x_TD,), twice)
    ticket = stash.put(name, q, (lambda: _norm(h, w, eps, False, consumer)[1]) if rebuild else None)
    x_ticket = stash.put(name + ".x", None, lambda: _norm(h, w, eps, True, None)[0])
    return Normed(Activation(q, carrier, ticket), x_TD, x_ticket, h_TD, Activation(q, second, ticket) if twice else None)
