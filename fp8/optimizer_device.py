"""Device functions of the fused optimizer: each state's format loaded, rounded and stored as state_codecs.py defines it.

HARDWARE = True uses the GPU's conversions and approximate square root and reciprocal; False stands in under Triton's interpreter.
"""

import math

import triton
import triton.language as tl

from fp8.quantize_device import abs_bits, decode
from fp8.state_codecs import FIELDS, MIN_FP16

MASTER_BITS, V_BITS, M_BITS = (tl.constexpr(FIELDS[role]) for role in ("master", "exp_avg_sq", "exp_avg"))
MIN_FP16_BITS = tl.constexpr((127 + int(math.log2(MIN_FP16))) << 23)  # its bits


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def exp2(biased):
    """2^(biased - 127) for integers 1 .. 254."""
    return float_of(biased.to(tl.int32) << 23)


@triton.jit
def _max_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def row_amax(x, HARDWARE: tl.constexpr):
    """Bits of each row's largest magnitude, at least those of infinity where there is a NaN."""
    if HARDWARE:  # magnitudes cost nothing in a floating-point maximum
        return abs_bits(tl.reduce(tl.abs(x), 1, _max_or_nan))
    else:
        return tl.max(abs_bits(x), 1)


@triton.jit
def dither(word, FIELD: tl.constexpr, DROPPED: tl.constexpr):
    """See state_codecs.dither: the field's bits on top of `DROPPED`, and a half below."""
    rest: tl.constexpr = DROPPED - FIELD[1]
    mask: tl.constexpr = ((1 << FIELD[1]) - 1) << rest
    half: tl.constexpr = (1 << rest) >> 1
    if FIELD[0] >= rest:
        return ((word >> (FIELD[0] - rest)) & mask) | half
    else:
        return ((word << (rest - FIELD[0])) & mask) | half


@triton.jit
def cut(x, noise, DROPPED: tl.constexpr):
    mask: tl.constexpr = -(1 << DROPPED)
    return float_of((x.to(tl.int32, bitcast=True) + noise) & mask)


@triton.jit
def fp16_scale(amax_bits):
    """(biased exponent, multiplier) of a tile; the multiplier is 0 where the tile counts as zero."""
    kept = amax_bits >= MIN_FP16_BITS
    exponent = tl.where(amax_bits < 0x7F800000, (amax_bits >> 23) - 141, 0)
    exponent = tl.where(kept, exponent, -100)
    return exponent + 127, tl.where(kept, float_of((127 - exponent) << 23), 0.0)


@triton.jit
def round_bf16(x, HARDWARE: tl.constexpr):
    """fp32 -> the bits of the nearest BF16."""
    if HARDWARE:
        return x.to(tl.bfloat16).to(tl.int16, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)


@triton.jit
def quotient(m, v, rsqrt_correction2, eps, HARDWARE: tl.constexpr):
    """m / (sqrt(v) rsqrt_correction2 + eps)."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; sqrt.approx.ftz.f32 t, $2; fma.rn.f32 t, t, $3, $4; rcp.approx.ftz.f32 t, t; mul.f32 $0, $1, t; }",
            "=f,f,f,f,f", [m, v, rsqrt_correction2, eps], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return m / (tl.sqrt(v) * rsqrt_correction2 + eps)


@triton.jit
def store_scales(ptr, offset, scale, HARDWARE: tl.constexpr):
    """One byte a row. tl.store would first gather them through shared memory, with a barrier in the middle of each strip."""
    if HARDWARE:
        address = (ptr + offset).to(tl.int64)
        tl.inline_asm_elementwise(
            "st.global.u8 [$1], $2; mov.b32 $0, 0;", "=r,l,r", [address, scale], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.store(ptr + offset, scale.to(tl.uint8))


@triton.jit
def load_m(ptr, scale_ptr, offset, row_offset, factor, M: tl.constexpr, HARDWARE: tl.constexpr):
    """exp_avg * factor; a power-of-two scale may go into the factor without changing the product's rounding."""
    if M == "fp8":
        code = tl.load(ptr + offset)
        scale = exp2(tl.load(scale_ptr + row_offset)) * factor
        if HARDWARE:
            return code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, None]
        else:
            return decode(code.to(tl.int32)) * scale[:, None]
    else:
        return tl.load(ptr + offset).to(tl.float32) * factor


@triton.jit
def store_m(ptr, scale_ptr, offset, row_offset, m, word, M: tl.constexpr, HARDWARE: tl.constexpr):
    if M == "fp8":
        amax = row_amax(m, HARDWARE)
        exponent = (amax >> 23) - 135 + ((amax & 0x7FFFFF) > 0x600000).to(tl.int32)
        exponent = tl.minimum(tl.maximum(exponent, -120), 126)
        broken = amax >= 0x7F800000
        exponent = tl.where((amax > 0) & (broken == 0), exponent, 0)
        y = tl.abs(m) * float_of((127 - exponent) << 23)[:, None]
        # The code as a fixed-point number with 20 fraction bits; see state_codecs.E4M3Groups.
        steps = (y + 0.015625).to(tl.int32, bitcast=True) - (1 << 23)
        fixed = tl.maximum(steps, y.to(tl.int32, bitcast=True)) - (120 << 23)
        limit = tl.where(broken, 0x7F, 0x7E)
        code = tl.minimum((fixed + dither(word, M_BITS, 20)) >> 20, limit[:, None])
        code = code | ((m.to(tl.int32, bitcast=True) >> 24) & 0x80)
        tl.store(ptr + offset, code.to(tl.uint8))
        store_scales(scale_ptr, row_offset, exponent + 127, HARDWARE)
    elif M == "bf16":
        bits = m.to(tl.int32, bitcast=True) + dither(word, M_BITS, 16)
        tl.store(ptr + offset, (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True))
    else:
        tl.store(ptr + offset, m)


@triton.jit
def load_v(ptr, scale_ptr, offset, row_offset, V: tl.constexpr):
    """exp_avg_sq as fp32."""
    if V == "fp8":
        scale = tl.load(scale_ptr + row_offset).to(tl.int32)
        step, low = 1 << (20 - (scale >> 7)), (scale & 127) << 23
        return float_of(tl.load(ptr + offset).to(tl.int32) * step[:, None] + low[:, None])
    elif V == "fp16":
        return tl.load(ptr + offset).to(tl.float32) * exp2(tl.load(scale_ptr + row_offset))[:, None]
    else:
        return tl.load(ptr + offset).to(tl.float32)


@triton.jit
def store_v(ptr, scale_ptr, offset, row_offset, v, word, V: tl.constexpr, HARDWARE: tl.constexpr):
    if V == "fp8":
        bits = v.to(tl.int32, bitcast=True)  # v has no sign
        amax, amin = tl.max(bits, 1), tl.min(bits, 1)
        coarse = (amax >> 23) - 31 + ((amax & 0x7FFFFF) > 0x700000).to(tl.int32)
        fine = (amax >> 23) - 15 + ((amax & 0x7FFFFF) > 0x780000).to(tl.int32)
        is_fine = ((fine >= 1) & (fine <= 127) & (amin >= (fine << 23))).to(tl.int32)
        low = tl.where(is_fine > 0, fine, tl.minimum(tl.maximum(coarse, 1), 127))
        factor = is_fine + 1
        code = (bits * factor[:, None] + (dither(word, V_BITS, 20) - ((low << 23) * factor)[:, None])) >> 20
        tl.store(ptr + offset, tl.minimum(tl.maximum(code, 0), 255).to(tl.uint8))
        store_scales(scale_ptr, row_offset, low | (is_fine << 7), HARDWARE)
    elif V == "fp16":
        v = cut(v, dither(word, V_BITS, 13), 13)
        biased, multiplier = fp16_scale(tl.max(abs_bits(v), 1))
        code = (v * multiplier[:, None]).to(tl.float16).to(tl.int16, bitcast=True)
        tl.store(ptr + offset, tl.where(code == 0, 1, code).to(tl.int16).to(tl.float16, bitcast=True))
        store_scales(scale_ptr, row_offset, biased, HARDWARE)
    elif V == "bf16":
        bits = v.to(tl.int32, bitcast=True) + dither(word, V_BITS, 16)
        tl.store(ptr + offset, (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True))
    else:
        tl.store(ptr + offset, v)


@triton.jit
def store_master(
    ptr, weight_ptr, offset, x, multiplier, inverse,
    MASTER: tl.constexpr, WEIGHT: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Master and, unless it is FP8, the weight derived from what was stored."""
    if MASTER == "fp16":
        half = (x * multiplier).to(tl.float16)
        tl.store(ptr + offset, half)
        x = half.to(tl.float32) * inverse
    else:
        tl.store(ptr + offset, x)
    if WEIGHT == "bf16":
        tl.store(weight_ptr + offset, round_bf16(x, HARDWARE).to(tl.bfloat16, bitcast=True))
