"""The Triton kernel that takes a GEMM's BF16 result into the gradient buffer, at the copy rate."""

import triton
import triton.language as tl
from torch import Tensor

from fp8.device_math import round_bf16
from fp8.launch import cdiv
from fp8.quantize_kernels import INTERPRETED

SIZE = 8192


@triton.jit
def _take(y_ptr, out_ptr, count, ADD: tl.constexpr, ROUND: tl.constexpr, SIZE: tl.constexpr, HARDWARE: tl.constexpr):
    """out = [out +] y of SIZE elements, summed in FP32."""
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    value = tl.load(y_ptr + i, mask=i < count, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(out_ptr + i, mask=i < count, other=0.0).to(tl.float32)
    if ROUND:
        value = round_bf16(value, HARDWARE)
    tl.store(out_ptr + i, value, mask=i < count)


def take(y: Tensor, out: Tensor, accumulate: bool) -> None:
    """out (+)= y; contiguous, of one shape, y in BF16, out in BF16 or FP32."""
    count = y.numel()
    flags = dict(ADD=accumulate, ROUND=out.element_size() == 2, SIZE=SIZE, HARDWARE=not INTERPRETED)
    _take[(cdiv(count, SIZE),)](y, out, count, **flags, num_warps=8)
