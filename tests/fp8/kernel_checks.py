"""What the tests of fused kernels share. They run on a GPU, or (TRITON_INTERPRET=1) in Triton's interpreter on a CPU."""

from __future__ import annotations

import os

import pytest
import torch

from fp8.quantized import Quantized, expand_scales
from fp8.recipe import Spec

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
ROW = Spec("e4m3", (1, 128), "block")
marks = (
    []
    if INTERPRETED
    else [
        pytest.mark.gpu,
        pytest.mark.skipif(
            not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with FP8"
        ),
    ]
)


def assert_quantized(got: Quantized, want: torch.Tensor, slack: float = 1e-5, atol: float = 0.0) -> None:
    """`got` is `want` (float64 [R, C]) rounded once to E4M3 with the power-of-two scale of each tile.

    Args:
        slack, atol: relative and absolute error that the kernel's fp32 arithmetic may have made before it rounded.
    """
    r, c = got.tile
    rows, cols = want.shape
    padded = torch.nn.functional.pad(want.abs(), (0, -cols % c, 0, -rows % r))
    amax = padded.unflatten(0, (-1, r)).unflatten(2, (-1, c)).amax((1, 3))
    scale = got.scale_inv.double()
    low, high = amax * (1 - slack) - atol, 2 * (amax * (1 + slack) + atol)
    ok = (448 * scale >= low) & (448 * scale < high) | (amax == 0) & (scale == 1)
    assert ok.all(), f"{(~ok).sum()} of {ok.numel()} scales are off, first at {(~ok).nonzero()[0].tolist()}"
    step = torch.maximum(want.abs() * 2**-4, expand_scales(scale, got.tile, want.shape) * 2**-10)  # half an E4M3 step
    error = (got.data.double() * expand_scales(scale, got.tile, want.shape) - want).abs()
    over = error > step * (1 + 1e-3) + slack * want.abs() + atol
    assert not over.any(), f"{over.sum()} of {over.numel()} values are off, first at {over.nonzero()[0].tolist()}"


def same_bytes(a: Quantized, b: Quantized, rows: int | None = None) -> bool:
    """Whether codes and scales (of the first rows) are bitwise equal."""
    data = torch.equal(a.data.view(torch.uint8)[:rows], b.data.view(torch.uint8)[:rows])
    return data and torch.equal(a.scale_inv[:rows], b.scale_inv[:rows])


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)
