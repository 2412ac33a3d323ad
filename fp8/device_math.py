"""Device functions that the fused kernels share: rounding, FP8 codes, exponentials.

The interpreter's own casts to BF16 and FP8 do not round to nearest even: under it (`HARDWARE` = False) integer arithmetic
stands in.
"""

import triton
import triton.language as tl

from fp8.quantize_device import decode

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def round_bf16(x, HARDWARE: tl.constexpr):
    """fp32 -> the nearest BF16 value, as fp32."""
    if HARDWARE:  # pairs: a single conversion goes through the slow pipe that exponentials share
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xFFFF0000; }",
            "=f,=f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, x, rounded.to(tl.float32, bitcast=True))


@triton.jit
def decode_bytes(code, HARDWARE: tl.constexpr):
    """E4M3 codes, one uint8 an element -> fp32."""
    if HARDWARE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        return decode(code.to(tl.int32))


@triton.jit
def exp2(x, HARDWARE: tl.constexpr):
    """2^x in one instruction (2 ulp; subnormal results become zero). Triton's own spends four more on them."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def sigmoid(x, HARDWARE: tl.constexpr):
    """1 / (1 + e^-x) in four instructions, a few ulp."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; "
            "rcp.approx.ftz.f32 $0, t; }",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def reciprocal_of_1_plus_exp2(x, HARDWARE: tl.constexpr):
    """1 / (1 + 2^x): the sigmoid of -x ln 2, in three instructions."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; ex2.approx.ftz.f32 t, $1; add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return 1.0 / (1.0 + tl.exp2(x))
