"""Device functions of the quantise kernels: power-of-two scales, E4M3 codes, 4x4 transposes in registers.

Two habits carry the speed. Scales are powers of two, so scales are integer operations on the bits of amax. And whatever
transposes works on 32-bit words of four codes: a thread holds 4x4 codes, turns them in registers, and only whole words cross
shared memory (byte-wise transposes are bound by shared memory, not by the copy rate).

HARDWARE = True converts with inline PTX. False stands in under Triton's interpreter, whose float casts do not round to nearest
even: the same codes from integer arithmetic.
"""

import triton
import triton.language as tl

# ---------------------------------------------------------------- scales and codes


@triton.jit
def abs_bits(x):
    """Magnitude as int32: orders like the float, with inf and NaN on top."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def pow2_scale(bits):
    """(multiplier, inverse) from the bits of amax; see quantize.py's scale rule."""
    exponent = (bits >> 23) - 135 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, -126), 126)
    exponent = tl.where((bits > 0) & (bits < 0x7F800000), exponent, 0)
    multiplier = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    return multiplier, ((127 + exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def encode(x):
    """fp32 -> E4M3 code (int32) in integer arithmetic: nearest even, saturating, NaN kept."""
    bits = abs_bits(x)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    magnitude = tl.minimum(bits, 0x3C800000).to(tl.float32, bitcast=True)
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # ulp(2^14) = 2^-9, E4M3's smallest step
    code = tl.where(bits < 0x3C800000, subnormal, tl.minimum(normal, 0x7E))
    code = tl.where(bits > 0x7F800000, 0x7F, code)
    return code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def encode_bytes(x, HARDWARE: tl.constexpr):
    """fp32 -> E4M3 codes, one uint8 an element."""
    if HARDWARE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return encode(x).to(tl.uint8)


@triton.jit
def pack4(y0, y1, y2, y3, HARDWARE: tl.constexpr):
    """Four fp32 tensors -> one int32 tensor of four E4M3 codes, the first in the lowest byte."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; "
            "mov.b32 $0, {lo, hi}; }",
            "=r,f,f,f,f", [y0, y1, y2, y3], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return encode(y0) | (encode(y1) << 8) | (encode(y2) << 16) | (encode(y3) << 24)


@triton.jit
def decode(code):
    """E4M3 code (int32) -> fp32 in integer arithmetic."""
    magnitude = code & 0x7F
    bits = (magnitude << 20) + 0x3C000000
    subnormal = magnitude.to(tl.float32) * 0.001953125
    bits = tl.where(magnitude < 8, subnormal.to(tl.int32, bitcast=True), tl.where(magnitude == 0x7F, 0x7FC00000, bits))
    return (bits | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def unpack4(word, HARDWARE: tl.constexpr):
    """The four E4M3 codes of a word as fp32 tensors."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 lo, hi, h0, h1, h2, h3; .reg .b32 a, b; mov.b32 {lo, hi}, $4; "
            "cvt.rn.f16x2.e4m3x2 a, lo; cvt.rn.f16x2.e4m3x2 b, hi; mov.b32 {h0, h1}, a; mov.b32 {h2, h3}, b; "
            "cvt.f32.f16 $0, h0; cvt.f32.f16 $1, h1; cvt.f32.f16 $2, h2; cvt.f32.f16 $3, h3; }",
            "=f,=f,=f,=f,r", [word], dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low = decode(word & 0xFF), decode((word >> 8) & 0xFF)
        return low[0], low[1], decode((word >> 16) & 0xFF), decode((word >> 24) & 0xFF)


@triton.jit
def shift_code(code, k):
    """E4M3 code (int32) times 2^-k: significand shifted right, nearest even, NaN kept."""
    magnitude = code & 0x7F
    exponent = magnitude >> 3
    significand = tl.where(exponent > 0, (magnitude & 7) | 8, magnitude)
    binades = tl.maximum(exponent, 1) - 1  # down to the subnormal range
    drop = tl.minimum(tl.maximum(k - binades, 0), 8)
    exact = magnitude - (tl.minimum(k, binades) << 3)
    rounded = (significand + ((1 << drop) >> 1) - 1 + ((significand >> drop) & 1)) >> drop
    value = tl.where((drop > 0) & (magnitude != 0x7F), rounded, tl.where(magnitude == 0x7F, magnitude, exact))
    return tl.where(magnitude == 0, code, value | (code & 0x80))


@triton.jit
def shift_word(word, k, HARDWARE: tl.constexpr):
    """Four E4M3 codes times 2^-k (k >= 0, broadcast), rounded to nearest even. NaN codes keep their sign."""
    if HARDWARE:
        # 2^-k in FP16, twice: products that matter are exact there, anything under 2^-10 rounds to zero either way
        half = tl.where(k < 15, (15 - k) << 10, tl.where(k <= 24, 1 << (24 - tl.minimum(k, 24)), 0))
        shifted = tl.inline_asm_elementwise(
            "{ .reg .b16 lo, hi; .reg .b32 a, b; mov.b32 {lo, hi}, $1; cvt.rn.f16x2.e4m3x2 a, lo; "
            "cvt.rn.f16x2.e4m3x2 b, hi; mul.rn.f16x2 a, a, $2; mul.rn.f16x2 b, b, $2; "
            "cvt.rn.satfinite.e4m3x2.f16x2 lo, a; cvt.rn.satfinite.e4m3x2.f16x2 hi, b; mov.b32 $0, {lo, hi}; }",
            "=r,r,r", [word, half | (half << 16)], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        sign_bits: tl.constexpr = -2139062144  # 0x80808080
        return shifted | (word & ((word & 0x7F7F7F7F) + 0x01010101) & sign_bits)
    else:
        out = shift_code(word & 0xFF, k) | (shift_code((word >> 8) & 0xFF, k) << 8)
        return out | (shift_code((word >> 16) & 0xFF, k) << 16) | (shift_code((word >> 24) & 0xFF, k) << 24)


# ---------------------------------------------------------------- four neighbours at once


@triton.jit
def join4(a, b, c, d):
    """Four tensors side by side: [..., 2, 2] with tensor 2y + x at [..., x, y]. One reduction or transpose serves all four."""
    return tl.join(tl.join(a, b), tl.join(c, d))


@triton.jit
def split4(z):
    """The four tensors of `join4`."""
    low, high = tl.split(z)
    a, b = tl.split(low)
    c, d = tl.split(high)
    return a, b, c, d


@triton.jit
def flatten4(z, SIZE: tl.constexpr):
    """[SIZE, 2, 2] of `join4` -> [4 * SIZE], the four neighbours of each entry in order."""
    return tl.reshape(tl.permute(z, (0, 2, 1)), (4 * SIZE,))


@triton.jit
def transpose4(w0, w1, w2, w3, WORDS: tl.constexpr):
    """Words of four neighbouring columns, each [32 row groups, WORDS column groups] -> [4 * WORDS columns, 32 words of a row]."""
    return tl.reshape(tl.permute(join4(w0, w1, w2, w3), (1, 3, 2, 0)), (4 * WORDS, 32))


@triton.jit
def byte_column(w0, w1, w2, w3, J: tl.constexpr):
    """Byte J of four words, as one word: a row of the transposed 4x4 tile."""
    low = ((w0 >> (8 * J)) & 0xFF) | (((w1 >> (8 * J)) & 0xFF) << 8)
    return low | (((w2 >> (8 * J)) & 0xFF) << 16) | (((w3 >> (8 * J)) & 0xFF) << 24)


# ---------------------------------------------------------------- a block in and out


@triton.jit
def load_row(ptr, row, rows, words_ok):
    """Words of one of four neighbouring rows, zero past the matrix."""
    return tl.load(ptr, mask=(row < rows)[:, None] & words_ok[None, :], other=0)


@triton.jit
def store_transposed(ptr, cb, rb, cols, words_per_row_t, w0, w1, w2, w3, WORDS: tl.constexpr):
    """Stores the transposed block; w_j holds the words (four rows each) of columns 4w + j."""
    col = cb * (4 * WORDS) + tl.arange(0, 4 * WORDS)
    word = rb * 32 + tl.arange(0, 32)
    offset = col.to(tl.int64)[:, None] * words_per_row_t + word[None, :]
    mask = (col < cols)[:, None] & (word < words_per_row_t)[None, :]
    tl.store(ptr + offset, transpose4(w0, w1, w2, w3, WORDS), mask=mask)
