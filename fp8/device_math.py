"""Device functions that the fused kernels share: rounding and FP8 codes, equal to torch's on the GPU and in Triton's interpreter.

The interpreter's own casts to BF16 and FP8 do not round to nearest even, so under it (`HARDWARE` = False) integer arithmetic stands in.
"""

import triton
import triton.language as tl

from fp8.quantize_kernels import _decode, _encode


@triton.jit
def round_bf16(x, HARDWARE: tl.constexpr):
    """fp32 -> the nearest BF16 value, as fp32. The interpreter's own cast truncates."""
    if HARDWARE:
        return x.to(tl.bfloat16).to(tl.float32)
    else:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, x, rounded.to(tl.float32, bitcast=True))


@triton.jit
def to_code(x, HARDWARE: tl.constexpr):
    """fp32 within +-448 -> E4M3 code, uint8."""
    if HARDWARE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return _encode(x).to(tl.uint8)


@triton.jit
def from_code(code, HARDWARE: tl.constexpr):
    """E4M3 code, uint8 -> fp32."""
    if HARDWARE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        return _decode(code.to(tl.int32))
