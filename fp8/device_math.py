"""Device functions that the fused kernels share: rounding, FP8 codes, and the two forms of a 128x128 block.

The interpreter's own casts to BF16 and FP8 do not round to nearest even: under it (`HARDWARE` = False) integer arithmetic
stands in.
"""

import triton
import triton.language as tl

from fp8.quantize_device import decode, join4, max4, pack4, pow2_scale, split4


@triton.jit
def round_bf16(x, HARDWARE: tl.constexpr):
    """fp32 -> the nearest BF16 value, as fp32."""
    if HARDWARE:
        return x.to(tl.bfloat16).to(tl.float32)
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
def load_bf16x4(ptr, mask):
    """Four neighbouring BF16 columns of each row, as fp32 tensors; ptr to int64 words."""
    word = tl.load(ptr, mask=mask, other=0)
    low, high = word.to(tl.int32), (word >> 32).to(tl.int32)
    upper: tl.constexpr = -65536  # 0xFFFF0000
    return (
        (low << 16).to(tl.float32, bitcast=True),
        (low & upper).to(tl.float32, bitcast=True),
        (high << 16).to(tl.float32, bitcast=True),
        (high & upper).to(tl.float32, bitcast=True),
    )


@triton.jit
def _in_order(z):
    """[32, 2, 2] of `join4` -> [128], the four neighbours of each entry in order."""
    return tl.reshape(tl.permute(z, (0, 2, 1)), (128,))


@triton.jit
def store_rows(
    q_ptr, si_ptr, rb, words, word, ok, rows,
    a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Codes with 1x128 tiles of the block of rows 4i (a), 4i + 1 (b), ... and columns 4w (0), 4w + 1 (1), ...

    Args:
        q_ptr: int32 words, `words` a row; `word` [32] are the block's, valid where `ok`.
        si_ptr: inverse scales of this block of columns, one a row.
    """
    peaks = join4(max4(a0, a1, a2, a3), max4(b0, b1, b2, b3), max4(c0, c1, c2, c3), max4(d0, d1, d2, d3))
    multiplier, inverse = pow2_scale(tl.max(peaks, 1))
    row = rb * 128 + tl.arange(0, 128)
    tl.store(si_ptr + row, _in_order(inverse), mask=row < rows)
    m0, m1, m2, m3 = split4(multiplier)
    m0, m1, m2, m3 = m0[:, None], m1[:, None], m2[:, None], m3[:, None]
    row = rb * 128 + 4 * tl.arange(0, 32)
    q = q_ptr + row.to(tl.int64)[:, None] * words + word[None, :]
    tl.store(q, pack4(a0 * m0, a1 * m0, a2 * m0, a3 * m0, HARDWARE), mask=(row < rows)[:, None] & ok[None, :])
    q += words
    tl.store(q, pack4(b0 * m1, b1 * m1, b2 * m1, b3 * m1, HARDWARE), mask=(row + 1 < rows)[:, None] & ok[None, :])
    q += words
    tl.store(q, pack4(c0 * m2, c1 * m2, c2 * m2, c3 * m2, HARDWARE), mask=(row + 2 < rows)[:, None] & ok[None, :])
    q += words
    tl.store(q, pack4(d0 * m3, d1 * m3, d2 * m3, d3 * m3, HARDWARE), mask=(row + 3 < rows)[:, None] & ok[None, :])


@triton.jit
def store_columns(
    qt_ptr, sit_ptr, first_col, rb, cols, words_t,
    a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3, HARDWARE: tl.constexpr,
):  # fmt: skip
    """The same block transposed, with tiles along rows.

    Args:
        qt_ptr: int32 words, `words_t` a row of the transposed matrix; `first_col` is the block's first row of it.
        sit_ptr: inverse scales of this block of rows, one a column; columns past `cols` are not stored.
    """
    peaks = join4(max4(a0, b0, c0, d0), max4(a1, b1, c1, d1), max4(a2, b2, c2, d2), max4(a3, b3, c3, d3))
    multiplier, inverse = pow2_scale(tl.max(peaks, 0))
    col = first_col + tl.arange(0, 128)
    tl.store(sit_ptr + col, _in_order(inverse), mask=col < cols)
    m0, m1, m2, m3 = split4(multiplier)
    m0, m1, m2, m3 = m0[None, :], m1[None, :], m2[None, :], m3[None, :]
    w0 = pack4(a0 * m0, b0 * m0, c0 * m0, d0 * m0, HARDWARE)
    w1 = pack4(a1 * m1, b1 * m1, c1 * m1, d1 * m1, HARDWARE)
    w2 = pack4(a2 * m2, b2 * m2, c2 * m2, d2 * m2, HARDWARE)
    w3 = pack4(a3 * m3, b3 * m3, c3 * m3, d3 * m3, HARDWARE)
    offset = col.to(tl.int64)[:, None] * words_t + (rb * 32 + tl.arange(0, 32))[None, :]
    turned = tl.reshape(tl.permute(join4(w0, w1, w2, w3), (1, 3, 2, 0)), (128, 32))  # one trip through shared memory
    tl.store(qt_ptr + offset, turned, mask=(col < cols)[:, None])
