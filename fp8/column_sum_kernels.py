"""The Triton kernel that sums what each program has of a norm weight's gradient, in a fixed order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8.launch import cdiv

ROWS, COLS, WARPS = 1024, 8, 8  # few columns, 32 bytes of a row: programs enough that their loads take one latency, not ten


@triton.jit
def _sum_columns(x_ptr, out_ptr, split, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """out[0] = the sum of the rows before `split`; out[1], a second row of programs, of the others."""
    part = tl.program_id(1)
    first, end = tl.where(part == 0, 0, split), tl.where(part == 0, split, rows)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(first, end, ROWS):
        row = start + tl.arange(0, ROWS)
        total += tl.load(x_ptr + row[:, None] * cols + col[None, :], mask=(row < end)[:, None] & (col < cols)[None, :], other=0.0)
    tl.store(out_ptr + part * cols + col, tl.sum(total, 0), mask=col < cols)


def sum_columns(x_PD: Tensor, split: int | None = None) -> Tensor:
    """[P, D] fp32, contiguous -> [1, D]; with `split` [2, D]: the sums of the rows before it and of the others."""
    rows, cols = x_PD.shape
    out = torch.empty((1 if split is None else 2, cols), dtype=torch.float32, device=x_PD.device)
    split = rows if split is None else split
    _sum_columns[(cdiv(cols, COLS), out.shape[0])](x_PD, out, split, rows, cols, ROWS=ROWS, COLS=COLS, num_warps=WARPS)
    return out
