"""Device functions: the row form and the column form of a 128x128 block, from values held as pairs of BF16.

A block is 32 groups of 4 rows x 32 words of 4 columns. Word w of row 4i + j lies in `lo_j` (columns 4w, 4w + 1) and `hi_j`
(4w + 2, 4w + 3), int32 tensors [32, words]. As pairs a block takes half of FP32's registers, and maxima and shuffles do two values
at a time; values are BF16 before they are quantised, as in the references.
"""

import triton
import triton.language as tl

from fp8.quantize_device import flatten4, join4, pack4, pow2_scale, split4, transpose4

MAGNITUDES = tl.constexpr(0x7FFF7FFF)
UPPER = tl.constexpr(-65536)  # 0xFFFF0000


@triton.jit
def low_half(pair):
    """The first BF16 of a pair, as fp32."""
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def high_half(pair):
    """The second BF16 of a pair, as fp32."""
    return (pair & UPPER).to(tl.float32, bitcast=True)


@triton.jit
def _nearest(x):
    """Bits of fp32 rounded to BF16, in the lower half; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, rounded) & 0xFFFF


@triton.jit
def pack_bf16(first, second, HARDWARE: tl.constexpr):
    """Two fp32 tensors, rounded to BF16, as pairs."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return _nearest(first) | (_nearest(second) << 16)


@triton.jit
def _larger(a, b):
    """Larger magnitude in each half, NaN wins; its sign means nothing."""
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def larger(a, b, HARDWARE: tl.constexpr):
    """Larger magnitude in each half of two tensors of pairs, NaN wins; its sign means nothing."""
    if HARDWARE:
        return _larger(a, b)
    else:
        a, b = a & MAGNITUDES, b & MAGNITUDES
        return tl.maximum(a & 0xFFFF, b & 0xFFFF) | (tl.maximum(a >> 16, b >> 16) << 16)


@triton.jit
def peaks(pairs, AXIS: tl.constexpr, HARDWARE: tl.constexpr):
    """Largest magnitude in each half along an axis, signs cleared."""
    if HARDWARE:
        return tl.reduce(pairs, AXIS, _larger) & MAGNITUDES
    else:
        pairs = pairs & MAGNITUDES
        return tl.max(pairs & 0xFFFF, AXIS) | (tl.max(pairs >> 16, AXIS) << 16)


@triton.jit
def times(pairs, factors, HARDWARE: tl.constexpr):
    """Products of the halves of two tensors of pairs, as BF16: exact for powers of two, and half of fp32's registers."""
    if HARDWARE:
        return tl.inline_asm_elementwise(  # plus -0: mul.bf16x2 is there from sm_90 on only, and is the same instruction
            "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }", "=r,r,r", [pairs, factors],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return pack_bf16(low_half(pairs) * low_half(factors), high_half(pairs) * high_half(factors), HARDWARE)


@triton.jit
def both_halves(x):
    """An fp32 tensor of powers of two as pairs of equal BF16."""
    bits = x.to(tl.int32, bitcast=True)
    return bits | (bits >> 16)


@triton.jit
def row_scales(lo, hi, HARDWARE: tl.constexpr):
    """(multiplier as pairs of equal halves, inverse) of each row [.., words of four] of values held as two pairs."""
    peak = peaks(larger(lo, hi, HARDWARE), len(lo.shape) - 1, HARDWARE)
    multiplier, inverse = pow2_scale(tl.maximum(peak << 16, peak & UPPER))
    return both_halves(multiplier), inverse


@triton.jit
def encode_pairs(lo, hi, multiplier, HARDWARE: tl.constexpr):
    """Four neighbours times `multiplier`, a pair of equal halves -> a word of four codes."""
    lo, hi = times(lo, multiplier, HARDWARE), times(hi, multiplier, HARDWARE)
    return pack4(low_half(lo), high_half(lo), low_half(hi), high_half(hi), HARDWARE)


@triton.jit
def store_row_form(
    q_ptr, si_ptr, rb, rows, words, word, lo0, hi0, lo1, hi1, lo2, hi2, lo3, hi3, FULL: tl.constexpr, HARDWARE: tl.constexpr
):
    """Codes with 1x128 tiles.

    Args:
        q_ptr: int32 words of four codes, `words` a row; `word` [32] are the block's.
        si_ptr: inverse scales of this block of columns, one a row.
        FULL: the block lies in the matrix as a whole; otherwise what is past its last row or word is not stored.
    """
    joined = join4(larger(lo0, hi0, HARDWARE), larger(lo1, hi1, HARDWARE), larger(lo2, hi2, HARDWARE), larger(lo3, hi3, HARDWARE))
    peak = peaks(joined, 1, HARDWARE)
    multiplier, inverse = pow2_scale(tl.maximum(peak << 16, peak & UPPER))
    m0, m1, m2, m3 = split4(both_halves(multiplier))
    row = rb * 128 + 4 * tl.arange(0, 32)
    every = rb * 128 + tl.arange(0, 128)
    q = q_ptr + row.to(tl.int64)[:, None] * words + word[None, :]
    q0, q1 = encode_pairs(lo0, hi0, m0[:, None], HARDWARE), encode_pairs(lo1, hi1, m1[:, None], HARDWARE)
    q2, q3 = encode_pairs(lo2, hi2, m2[:, None], HARDWARE), encode_pairs(lo3, hi3, m3[:, None], HARDWARE)
    if FULL:
        tl.store(si_ptr + every, flatten4(inverse, 32))
        tl.store(q, q0)
        tl.store(q + words, q1)
        tl.store(q + 2 * words, q2)
        tl.store(q + 3 * words, q3)
    else:
        ok = (word < words)[None, :]
        tl.store(si_ptr + every, flatten4(inverse, 32), mask=every < rows)
        tl.store(q, q0, mask=(row < rows)[:, None] & ok)
        tl.store(q + words, q1, mask=(row + 1 < rows)[:, None] & ok)
        tl.store(q + 2 * words, q2, mask=(row + 2 < rows)[:, None] & ok)
        tl.store(q + 3 * words, q3, mask=(row + 3 < rows)[:, None] & ok)


@triton.jit
def store_column_form(
    qt_ptr, sit_ptr, first, rb, cols, words_t, lo0, hi0, lo1, hi1, lo2, hi2, lo3, hi3,
    WORDS: tl.constexpr, FULL: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """The transposed codes, tiles along rows.

    Args:
        qt_ptr: int32 words, `words_t` a row of the transposed matrix, which has a multiple of 128 columns; `first` is the block's
            first row of it.
        sit_ptr: inverse scales of this block of rows, one a column.
        WORDS: words of four columns in the block, 32 or fewer.
        FULL: no column is past `cols`.
    """
    lo = larger(larger(lo0, lo1, HARDWARE), larger(lo2, lo3, HARDWARE), HARDWARE)
    hi = larger(larger(hi0, hi1, HARDWARE), larger(hi2, hi3, HARDWARE), HARDWARE)
    lo, hi = tl.split(peaks(tl.join(lo, hi), 0, HARDWARE))
    multiplier, inverse = pow2_scale(join4(lo << 16, lo & UPPER, hi << 16, hi & UPPER))
    m0, m1, m2, m3 = split4(multiplier.to(tl.int32, bitcast=True))
    m_lo, m_hi = (m1 | (m0 >> 16))[None, :], (m3 | (m2 >> 16))[None, :]  # powers of two are BF16
    lo0, hi0 = times(lo0, m_lo, HARDWARE), times(hi0, m_hi, HARDWARE)
    lo1, hi1 = times(lo1, m_lo, HARDWARE), times(hi1, m_hi, HARDWARE)
    lo2, hi2 = times(lo2, m_lo, HARDWARE), times(hi2, m_hi, HARDWARE)
    lo3, hi3 = times(lo3, m_lo, HARDWARE), times(hi3, m_hi, HARDWARE)
    w0 = pack4(low_half(lo0), low_half(lo1), low_half(lo2), low_half(lo3), HARDWARE)
    w1 = pack4(high_half(lo0), high_half(lo1), high_half(lo2), high_half(lo3), HARDWARE)
    w2 = pack4(low_half(hi0), low_half(hi1), low_half(hi2), low_half(hi3), HARDWARE)
    w3 = pack4(high_half(hi0), high_half(hi1), high_half(hi2), high_half(hi3), HARDWARE)
    col = first + tl.arange(0, 4 * WORDS)
    out = qt_ptr + col.to(tl.int64)[:, None] * words_t + (rb * 32 + tl.arange(0, 32))[None, :]
    if FULL:
        tl.store(sit_ptr + col, flatten4(inverse, WORDS))
        tl.store(out, transpose4(w0, w1, w2, w3, WORDS))
    else:
        tl.store(sit_ptr + col, flatten4(inverse, WORDS), mask=col < cols)
        tl.store(out, transpose4(w0, w1, w2, w3, WORDS), mask=(col < cols)[:, None])
