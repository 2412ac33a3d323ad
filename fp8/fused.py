"""Where the fused kernels apply. Everywhere else the reference runs, through the same public functions."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8.recipe import BLOCK, Spec
from fp8.weight import Weight

ROW = Spec("e4m3", (1, BLOCK), "block")  # what the fused kernels write: E4M3, one power-of-two scale a 1x128 tile


def fuses_activation(x: Tensor, weight: Weight) -> bool:
    """Whether a kernel may quantise x for `weight` while it makes x."""
    return x.is_cuda and fuses_format(x.dtype, weight)


def fuses_format(dtype: torch.dtype, weight: Weight) -> bool:
    """`fuses_activation` of values of this dtype on a GPU."""
    return dtype == torch.bfloat16 and weight.recipe.activation == ROW and not weight.is_watched


def fuses_gradient(dy: Tensor, weight: Weight) -> bool:
    """Whether a kernel may quantise dy for `weight`, in row and column form, while it makes dy."""
    rows = weight.recipe.gradient == ROW and weight.gradient_t == ROW
    return dy.is_cuda and dy.dtype == torch.bfloat16 and rows and not weight.is_watched
