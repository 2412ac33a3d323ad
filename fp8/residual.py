"""The residual stream's sum, in one pass: h + a (+ b), added in FP32 and rounded once.

Shapes: T tokens, D features.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


def add_residual_ref(h_TD: Tensor, *parts_TD: Tensor) -> Tensor:
    """The differentiable definition, in h's dtype."""
    total = h_TD.float()
    for part in parts_TD:
        total = total + part.float()
    return total.to(h_TD.dtype)


def _kernels(h_TD: Tensor, num_parts: int) -> ModuleType | None:
    """The Triton kernels on a GPU (one or two parts in BF16), None for the reference."""
    if not h_TD.is_cuda or h_TD.dtype != torch.bfloat16 or num_parts > 2:
        return None
    from fp8 import residual_kernels  # Triton comes with CUDA builds of torch only

    return residual_kernels


class _AddResidual(torch.autograd.Function):
    """forward: the sum; backward: dh = da = db = dy."""

    @staticmethod
    def forward(ctx: FunctionCtx, h_TD: Tensor, *parts_TD: Tensor) -> Tensor:
        ctx.num_parts = len(parts_TD)
        kernels = _kernels(h_TD, len(parts_TD))
        return kernels.add(h_TD, *parts_TD) if kernels else add_residual_ref(h_TD, *parts_TD)

    @staticmethod
    def backward(ctx: FunctionCtx, dy_TD: Tensor) -> tuple[Tensor, ...]:
        return (dy_TD,) * (1 + ctx.num_parts)


def add_residual(h_TD: Tensor, *parts_TD: Tensor) -> Tensor:
    """h [T, D] plus what one or two blocks contribute."""
    return _AddResidual.apply(h_TD, *parts_TD)
