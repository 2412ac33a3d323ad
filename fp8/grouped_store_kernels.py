"""The Triton kernel that takes F.grouped_mm's BF16 gradients into the gradient buffer, in one pass.

Shapes: E experts, N x K the weight of each.
"""

import triton
import triton.language as tl
from torch import Tensor

from fp8.launch import cdiv

SIZE = 8192


@triton.jit
def _store_groups(y_ptr, counts_ptr, out_ptr, size, ACCUMULATE: tl.constexpr, SIZE: tl.constexpr):
    """out[e] (+)= y[e]; without rows y[e] was never written: zeros, or nothing to add."""
    e = tl.program_id(1)
    used = tl.load(counts_ptr + e) > 0
    if ACCUMULATE:
        if not used:
            return
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    at = e.to(tl.int64) * size + i
    value = tl.load(y_ptr + at, mask=i < tl.where(used, size, 0), other=0.0).to(tl.float32)
    if ACCUMULATE:
        value += tl.load(out_ptr + at, mask=i < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, value, mask=i < size)


def store_groups(y_ENK: Tensor, counts_E: Tensor, out_ENK: Tensor, accumulate: bool) -> None:
    """out (+)= y of the experts that have rows; the others become zero (or stay, when accumulating)."""
    assert y_ENK.is_contiguous() and out_ENK.is_contiguous()
    size = y_ENK[0].numel()
    grid = (cdiv(size, SIZE), y_ENK.shape[0])
    _store_groups[grid](y_ENK, counts_E, out_ENK, size, ACCUMULATE=accumulate, SIZE=SIZE, num_warps=8)
