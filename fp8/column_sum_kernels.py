"""The Triton kernel that sums what each program has of a norm weight's gradient, in a fixed order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8.launch import cdiv

ROWS, COLS = 128, 32


@triton.jit
def _sum_columns(x_ptr, out_ptr, rows, cols, group, stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    """out[c] = sum over r < rows of x[r // group * stride + r % group, c]."""
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        at = (row // group * stride + row % group)[:, None] * cols + col[None, :]
        total += tl.load(x_ptr + at, mask=(row < rows)[:, None] & (col < cols)[None, :], other=0.0)
    tl.store(out_ptr + col, tl.sum(total, 0), mask=col < cols)


def sum_columns(x: Tensor) -> Tensor:
    """[P, D] or [P, H, D] fp32 -> [D]; the last two dimensions may be a slice of rows of a contiguous tensor."""
    parts, heads = x.shape[0], 1 if x.dim() == 2 else x.shape[1]
    cols = x.shape[-1]
    assert x.stride(-1) == 1 and (heads == 1 or x.stride(-2) == cols), f"strides {x.stride()}"
    out = torch.empty(cols, dtype=torch.float32, device=x.device)
    grid = (cdiv(cols, COLS),)
    _sum_columns[grid](x, out, parts * heads, cols, heads, x.stride(0) // cols, ROWS=ROWS, COLS=COLS, num_warps=4)
    return out
