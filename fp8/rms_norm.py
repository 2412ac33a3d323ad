"""RMSNorm, fused with the quantisation of its output.

Forward:   rstd = (mean(h^2) + eps)^-1/2,  n = cast(h * rstd),  x = w * n
Backward:  g = dx * w,  dh = rstd * (g - n * mean(g * n)),  dw = sum_T dx * n
Shapes: T tokens, D features. The statistics are FP32; `cast` goes to the residual stream's dtype (as the published model does).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fp8.activation import Activation, make_carrier
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


class _RmsNorm(torch.autograd.Function):
    """forward (carrier, x_TD); backward sums the gradients of both: GEMMs read the carrier's bytes, the router reads x_TD."""

    @staticmethod
    def forward(ctx: FunctionCtx, h_TD: Tensor, anchor: Tensor, weight: Weight, eps: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(h_TD)
        ctx.weight, ctx.eps = weight, eps
        ctx.set_materialize_grads(False)
        x_TD = rms_norm_ref(h_TD, weight.data, eps)
        return make_carrier(h_TD.shape, h_TD), x_TD

    @staticmethod
    def backward(ctx: FunctionCtx, d_carrier: Tensor | None, dx_TD: Tensor | None) -> tuple[Tensor | None, ...]:
        if d_carrier is None and dx_TD is None:
            return None, None, None, None
        total = d_carrier if dx_TD is None else dx_TD if d_carrier is None else d_carrier + dx_TD
        (h_TD,) = ctx.saved_tensors
        dh_TD, dw_D = rms_norm_backward_ref(h_TD, ctx.weight.data, total, ctx.eps)
        ctx.weight.add_grad(dw_D)
        return dh_TD, None, None, None


@dataclass(frozen=True, eq=False)
class Normed:
    """What a norm hands out.

    Attributes:
        edge: quantised rows for GEMMs.
        x_TD: the unquantised rows, differentiable: the router, and concatenations.
        x_ticket: how backward gets x_TD again (always recomputed from h, never kept).
    """

    edge: Activation
    x_TD: Tensor
    x_ticket: Ticket


def rms_norm(h_TD: Tensor, weight: Weight, eps: float) -> Tensor:
    """x [T, D] in h's dtype, unquantised."""
    return _RmsNorm.apply(h_TD, weight.anchor, weight, eps)[1]


def rms_norm_quantize(
    h_TD: Tensor, weight: Weight, eps: float, consumer: Weight, stash: Stash, name: str, rebuild: bool = False
) -> Normed:
    """Norm of h [T, D], quantised as `consumer`'s activation.

    Args:
        consumer: the weight whose GEMM reads the result; its recipe decides the format.
        rebuild: keep nothing; backward recomputes the bytes from h (1 byte a value less, one norm more). Bitwise the same.
    """
    carrier, x_TD = _RmsNorm.apply(h_TD, weight.anchor, weight, eps)
    h, w = h_TD.detach(), weight.data
    q = consumer.quantize_activation(x_TD.detach())

    def again() -> Tensor:
        return rms_norm_ref(h, w, eps)

    ticket = stash.put(name, q, (lambda: consumer.quantize_activation(again())) if rebuild else None)
    return Normed(Activation(q, carrier, ticket), x_TD, stash.put(name + ".x", None, again))
