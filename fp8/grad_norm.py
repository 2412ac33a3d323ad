"""The squared norm of many gradients: one read of each, few launches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fp8.weight import Weight

SMALL = 1 << 22  # elements; below, launching a norm takes longer than the norm


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of all elements, 0-dim fp64.

    On a GPU each norm is summed in FP32 by a tree, without a copy of the tensor, and small tensors of one type share a launch; on
    a CPU in FP64 (its plain FP32 sum would be off by 1e-6).
    """
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    small: dict[torch.dtype, list[Tensor]] = {}
    norms = []
    for t in tensors:
        if t.is_cuda and t.numel() <= SMALL:
            small.setdefault(t.dtype, []).append(t)
        else:
            norms.append(torch.linalg.vector_norm(t, dtype=torch.float32 if t.is_cuda else torch.float64))
    for group in small.values():
        norms += torch._foreach_norm(group, 2, torch.float32)
    return torch.stack(norms).double().square().sum()


def grad_norm_squared(named_weights: Iterable[tuple[str, Weight]]) -> Tensor:
    """Of this rank's gradients; weights without a gradient count zero."""
    return sum_of_squares([w.main_grad for _, w in named_weights if w.has_grad and w.trainable])
