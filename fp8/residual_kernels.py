"""The Triton kernel behind residual.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8.device_math import round_bf16
from fp8.launch import cdiv
from fp8.quantize_kernels import INTERPRETED

SIZE = 4096


@triton.jit
def _add(h_ptr, a_ptr, b_ptr, out_ptr, count, TWO: tl.constexpr, SIZE: tl.constexpr, HARDWARE: tl.constexpr):
    """out = h + a [+ b] of SIZE elements."""
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    ok = i < count
    total = tl.load(h_ptr + i, mask=ok, other=0.0).to(tl.float32) + tl.load(a_ptr + i, mask=ok, other=0.0).to(tl.float32)
    if TWO:
        total += tl.load(b_ptr + i, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + i, round_bf16(total, HARDWARE), mask=ok)


def add(h: Tensor, a: Tensor, b: Tensor | None = None) -> Tensor:
    """h + a [+ b], BF16 of one shape."""
    h, out = h.contiguous(), torch.empty(h.shape, dtype=h.dtype, device=h.device)
    second = a if b is None else b
    _add[(cdiv(h.numel(), SIZE),)](
        h, a.contiguous(), second.contiguous(), out, h.numel(), TWO=b is not None, SIZE=SIZE, HARDWARE=not INTERPRETED, num_warps=8
    )
    return out
