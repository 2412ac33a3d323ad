"""Device functions of the fused optimizer: each state's format loaded, rounded and stored as state_codecs.py defines it.

HARDWARE = True uses the GPU's conversions and approximate square root and reciprocal; False stands in under Triton's interpreter.
"""

import math

import triton
import triton.language as tl

from fp8.quantize_device import abs_bits, decode, encode, encode_bytes
from fp8.state_codecs import FIELDS, MIN_FP16

MASTER_BITS, V_BITS, M_BITS = (tl.constexpr(FIELDS[role]) for role in ("master", "exp_avg_sq", "exp_avg"))
KEPT = tl.constexpr(-(1 << 13))  # of fp32 bits: what fp16 has a place for
MIN_FP16_BITS = tl.constexpr((127 + int(math.log2(MIN_FP16))) << 23)  # its bits


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def exp2(biased):
    """2^(biased - 127) for integers 1 .. 254."""
    return float_of(biased.to(tl.int32) << 23)


@triton.jit
def max_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def row_amax(x, HARDWARE: tl.constexpr):
    """Bits of each row's largest magnitude, at least those of infinity where there is a NaN."""
    if HARDWARE:  # magnitudes cost nothing in a floating-point maximum
        return abs_bits(tl.reduce(tl.abs(x), 1, max_or_nan))
    else:
        return tl.max(abs_bits(x), 1)


@triton.jit
def run_amax(x, ROWS: tl.constexpr, HARDWARE: tl.constexpr):
    """[ROWS, 128] -> [ROWS, 8]: the same of each run of 16 neighbours, which one thread holds."""
    x = tl.reshape(x, (ROWS, 8, 16))
    if HARDWARE:
        return abs_bits(tl.reduce(tl.abs(x), 2, max_or_nan))
    else:
        return tl.max(abs_bits(x), 2)


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
def half_toward_zero(x, HARDWARE: tl.constexpr):
    """fp32 -> fp16, the neighbour nearer to zero."""
    if HARDWARE:
        return tl.inline_asm_elementwise("cvt.rz.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.float16, is_pure=True, pack=2)
    else:
        x = float_of(x.to(tl.int32, bitcast=True) & KEPT)
        small = (x * 16777216.0).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # steps of 2^-24
        return tl.where(tl.abs(x) < 0.00006103515625, small, x).to(tl.float16)


@triton.jit
def codes_of_halves(half, multiplier, HARDWARE: tl.constexpr):
    """E4M3 codes of half * multiplier; a power of two that leaves no more than 448."""
    if HARDWARE:
        pair = multiplier.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) * 0x10001
        return tl.inline_asm_elementwise(
            "{ .reg .b16 lo, hi; .reg .b32 a, b; mul.rn.f16x2 a, $1, $3; mul.rn.f16x2 b, $2, $3; "
            "cvt.rn.satfinite.e4m3x2.f16x2 lo, a; cvt.rn.satfinite.e4m3x2.f16x2 hi, b; mov.b32 $0, {lo, hi}; }",
            "=r,r,r,r,r,r,r", [half, pair], dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return encode(half.to(tl.float32) * multiplier).to(tl.uint8)


@triton.jit
def decode_m(code, scale, factor, HARDWARE: tl.constexpr):
    """exp_avg * factor of E4M3 codes [R, C]. A power-of-two scale may go into the factor: the product rounds as before."""
    if HARDWARE:
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        value = decode(code.to(tl.int32))
    return value * (exp2(scale) * factor)[:, None]


@triton.jit
def load_m(ptr, scale_ptr, offset, row_offset, factor, M: tl.constexpr, HARDWARE: tl.constexpr):
    """exp_avg * factor."""
    if M == "fp8":
        return decode_m(tl.load(ptr + offset), tl.load(scale_ptr + row_offset), factor, HARDWARE)
    else:
        return tl.load(ptr + offset).to(tl.float32) * factor


@triton.jit
def m_scale(amax):
    """(exponent of a group's scale, multiplier to FP16's form of E4M3)."""
    exponent = (amax >> 23) - 135 + ((amax & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.where(amax > 0, tl.maximum(exponent, -120), 0)
    exponent = tl.where(amax < 0x7F800000, exponent, 128)
    return exponent, tl.where(exponent < 128, float_of((127 - exponent) << 23) * 0.00390625, 0.0)


@triton.jit
def m_codes(m, multiplier, word, HARDWARE: tl.constexpr):
    """E4M3 codes; see state_codecs.E4M3Groups."""
    if HARDWARE:  # two halves a word: twice their bits put codes into bytes 1 and 3, signs fall off the top
        return tl.inline_asm_elementwise(
            "{ .reg .f32 a, b, c, d; .reg .b32 h, k, s, r; "
            "mul.f32 a, $1, $5; mul.f32 b, $2, $6; mul.f32 c, $3, $7; mul.f32 d, $4, $8; "
            "cvt.rn.f16x2.f32 h, b, a; cvt.rn.f16x2.f32 k, d, c; prmt.b32 s, h, k, 0x7531; "
            "prmt.b32 r, $9, $10, 0x4400; and.b32 r, r, 0x00FE00FE; add.s32 h, h, h; add.s32 h, h, r; "
            "prmt.b32 r, $11, $12, 0x4400; and.b32 r, r, 0x00FE00FE; add.s32 k, k, k; add.s32 k, k, r; "
            "prmt.b32 h, h, k, 0x7531; lop3.b32 $0, s, 0x80808080, h, 0xEA; }",
            "=r,f,f,f,f,f,f,f,f,r,r,r,r", [m, multiplier, word], dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        half = (m * multiplier).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        code = ((half & 0x7FFF) + dither(word, M_BITS, 7)) >> 7
        return (code | ((half >> 8) & 0x80)).to(tl.uint8)


@triton.jit
def v_codes(bits, factor, base, word, HARDWARE: tl.constexpr):
    """(bits * factor + base + noise) >> 20, clamped to a byte; see state_codecs.UnsignedGroups."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, c, d, n; mad.lo.s32 a, $1, $5, $9; mad.lo.s32 b, $2, $6, $10; mad.lo.s32 c, $3, $7, $11; "
            "mad.lo.s32 d, $4, $8, $12; and.b32 n, $13, 0x7FF00; shl.b32 n, n, 1; add.s32 a, a, n; "
            "and.b32 n, $14, 0x7FF00; shl.b32 n, n, 1; add.s32 b, b, n; and.b32 n, $15, 0x7FF00; shl.b32 n, n, 1; add.s32 c, c, n; "
            "and.b32 n, $16, 0x7FF00; shl.b32 n, n, 1; add.s32 d, d, n; "
            "shr.s32 a, a, 20; shr.s32 b, b, 20; shr.s32 c, c, 20; shr.s32 d, d, 20; "
            "cvt.pack.sat.u8.s32.b32 n, d, c, 0; cvt.pack.sat.u8.s32.b32 $0, b, a, n; }",
            "=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r", [bits, factor, base, word], dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        code = (bits * factor + (base + (dither(word, V_BITS, 20) - (1 << (19 - V_BITS[1]))))) >> 20
        return tl.minimum(tl.maximum(code, 0), 255).to(tl.uint8)


@triton.jit
def store_m(ptr, scale_ptr, offset, row_offset, m, word, M: tl.constexpr, HARDWARE: tl.constexpr):
    if M == "fp8":
        exponent, multiplier = m_scale(row_amax(m, HARDWARE))
        tl.store(ptr + offset, m_codes(m, multiplier[:, None], word, HARDWARE))
        store_scales(scale_ptr, row_offset, exponent + 127, HARDWARE)
    elif M == "bf16":
        bits = m.to(tl.int32, bitcast=True) + dither(word, M_BITS, 16)
        tl.store(ptr + offset, (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True))
    else:
        tl.store(ptr + offset, m)


@triton.jit
def decode_v(code, scale, V: tl.constexpr):
    """exp_avg_sq as fp32 from FP8 or FP16 codes [R, C]."""
    if V == "fp8":
        scale = scale.to(tl.int32)
        step = 0x100000 - ((scale >> 7) << 19)  # 2^20 or 2^19, but a factor to the compiler: one multiply-add, no shift
        low = (scale & 127) << 23
        return float_of(code.to(tl.int32) * step[:, None] + low[:, None])
    else:
        return code.to(tl.float32) * exp2(scale)[:, None]


@triton.jit
def load_v(ptr, scale_ptr, offset, row_offset, V: tl.constexpr):
    """exp_avg_sq as fp32."""
    if (V == "fp8") | (V == "fp16"):
        return decode_v(tl.load(ptr + offset), tl.load(scale_ptr + row_offset), V)
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
        base = (1 << (19 - V_BITS[1])) - (low << 23) * factor
        tl.store(ptr + offset, v_codes(bits, factor[:, None], base[:, None], word, HARDWARE))
        store_scales(scale_ptr, row_offset, low | (is_fine << 7), HARDWARE)
    elif V == "fp16":
        v = float_of(v.to(tl.int32, bitcast=True) + dither(word, V_BITS, 13))
        biased, multiplier = fp16_scale(row_amax(v, HARDWARE) & KEPT)
        code = half_toward_zero(v * multiplier[:, None], HARDWARE).to(tl.int16, bitcast=True)
        tl.store(ptr + offset, tl.where(code == 0, 1, code).to(tl.int16).to(tl.float16, bitcast=True))
        store_scales(scale_ptr, row_offset, biased, HARDWARE)
    elif V == "bf16":
        bits = v.to(tl.int32, bitcast=True) + dither(word, V_BITS, 16)
        tl.store(ptr + offset, (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True))
    else:
        tl.store(ptr + offset, v)


@triton.jit
def store_master(ptr, weight_ptr, offset, x, factors, MASTER: tl.constexpr, WEIGHT: tl.constexpr, HARDWARE: tl.constexpr):
    """Master and the weight derived from what was stored. factors: of x to the stored master and back, and on to the weight."""
    multiplier, inverse, weight_multiplier = factors
    if MASTER == "fp16":
        half = half_toward_zero(x * multiplier, HARDWARE)
        tl.store(ptr + offset, half)
        if WEIGHT == "fp8":
            tl.store(weight_ptr + offset, codes_of_halves(half, weight_multiplier, HARDWARE))
        x = half.to(tl.float32) * inverse
    else:
        tl.store(ptr + offset, x)
        if WEIGHT == "fp8":
            tl.store(weight_ptr + offset, encode_bytes(x * weight_multiplier, HARDWARE))
    if WEIGHT == "bf16":
        tl.store(weight_ptr + offset, round_bf16(x, HARDWARE).to(tl.bfloat16, bitcast=True))
