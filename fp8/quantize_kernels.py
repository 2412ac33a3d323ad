"""Triton kernels behind quantize.py: bit-exact with the references there, and bound by memory.

Shapes: R rows, C columns (a multiple of 16), Rp = R rounded up to 128, E stacked matrices.

Two habits carry the speed. Scales are powers of two, so amax and scale are integer operations on the bits of a float.
And whatever transposes works on 32-bit words of four FP8 codes: a thread holds 4x4 codes, turns them in registers, and only
whole words cross shared memory (byte-wise transposes are bound by shared memory, not by the copy rate).

Conversions use the hardware's rounding through inline PTX; under Triton's interpreter, whose float casts do not round to
nearest even, an integer encoder stands in (`HARDWARE` = False). Both give the same codes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8.quantized import Quantized

BLOCK = 128
INTERPRETED = triton.knobs.runtime.interpret
NO_LIVE = -1  # entry of `live_B` that marks a 128-row block past the last group


# ---------------------------------------------------------------- device functions


@triton.jit
def _abs_bits(x):
    """Magnitude as int32: orders like the float, with inf and NaN on top."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _pow2_scale(bits):
    """(multiplier, inverse) from the bits of amax; see quantize.py's scale rule."""
    exponent = (bits >> 23) - 135 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, -126), 126)
    exponent = tl.where((bits > 0) & (bits < 0x7F800000), exponent, 0)
    multiplier = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    return multiplier, ((127 + exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _encode(x):
    """fp32 -> E4M3 code (int32) in integer arithmetic: nearest even, saturating, NaN kept."""
    bits = _abs_bits(x)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    magnitude = tl.minimum(bits, 0x3C800000).to(tl.float32, bitcast=True)
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # ulp(2^14) = 2^-9, E4M3's smallest step
    code = tl.where(bits < 0x3C800000, subnormal, tl.minimum(normal, 0x7E))
    code = tl.where(bits > 0x7F800000, 0x7F, code)
    return code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def _pack4(y0, y1, y2, y3, HARDWARE: tl.constexpr):
    """Four fp32 tensors -> one int32 tensor of four E4M3 codes, the first in the lowest byte."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; "
            "mov.b32 $0, {lo, hi}; }",
            "=r,f,f,f,f", [y0, y1, y2, y3], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return _encode(y0) | (_encode(y1) << 8) | (_encode(y2) << 16) | (_encode(y3) << 24)


@triton.jit
def _shift_code(code, k):
    """E4M3 code (int32) times 2^-k: significand shifted right, nearest even, NaN kept."""
    magnitude = code & 0x7F
    exponent = magnitude >> 3
    significand = tl.where(exponent > 0, (magnitude & 7) | 8, magnitude)
    floor_k = tl.maximum(exponent, 1) - 1  # binades down to the subnormal range
    drop = tl.minimum(tl.maximum(k - floor_k, 0), 8)
    exact = magnitude - (tl.minimum(k, floor_k) << 3)
    rounded = (significand + ((1 << drop) >> 1) - 1 + ((significand >> drop) & 1)) >> drop
    value = tl.where((drop > 0) & (magnitude != 0x7F), rounded, tl.where(magnitude == 0x7F, magnitude, exact))
    return tl.where(magnitude == 0, code, value | (code & 0x80))


@triton.jit
def _shift_word(word, k, HARDWARE: tl.constexpr):
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
        out = _shift_code(word & 0xFF, k) | (_shift_code((word >> 8) & 0xFF, k) << 8)
        return out | (_shift_code((word >> 16) & 0xFF, k) << 16) | (_shift_code((word >> 24) & 0xFF, k) << 24)


@triton.jit
def _byte_column(w0, w1, w2, w3, J: tl.constexpr):
    """Byte J of four words, as one word: a row of the transposed 4x4 tile."""
    low = ((w0 >> (8 * J)) & 0xFF) | (((w1 >> (8 * J)) & 0xFF) << 8)
    return low | (((w2 >> (8 * J)) & 0xFF) << 16) | (((w3 >> (8 * J)) & 0xFF) << 24)


@triton.jit
def _load_bf16x4(ptr, mask):
    """Four neighbouring BF16 columns of each row, as fp32 tensors."""
    word = tl.load(ptr, mask=mask, other=0)
    low, high = word.to(tl.int32), (word >> 32).to(tl.int32)
    mask_high: tl.constexpr = -65536  # 0xFFFF0000
    return (
        (low << 16).to(tl.float32, bitcast=True),
        (low & mask_high).to(tl.float32, bitcast=True),
        (high << 16).to(tl.float32, bitcast=True),
        (high & mask_high).to(tl.float32, bitcast=True),
    )


@triton.jit
def _decode(code):
    """E4M3 code (int32) -> fp32 in integer arithmetic."""
    magnitude = code & 0x7F
    bits = (magnitude << 20) + 0x3C000000
    subnormal = magnitude.to(tl.float32) * 0.001953125
    bits = tl.where(magnitude < 8, subnormal.to(tl.int32, bitcast=True), tl.where(magnitude == 0x7F, 0x7FC00000, bits))
    return (bits | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _load_fp8x4(ptr, si_ptr, row, rows, words_ok, HARDWARE: tl.constexpr):
    """Four neighbouring E4M3 columns of each row, times the row's inverse scale, as fp32 tensors."""
    word = tl.load(ptr, mask=(row < rows)[:, None] & words_ok[None, :], other=0)
    scale = tl.load(si_ptr + row, mask=row < rows, other=0.0)[:, None]
    if HARDWARE:
        x0, x1, x2, x3 = tl.inline_asm_elementwise(
            "{ .reg .b16 lo, hi, h0, h1, h2, h3; .reg .b32 a, b; mov.b32 {lo, hi}, $4; "
            "cvt.rn.f16x2.e4m3x2 a, lo; cvt.rn.f16x2.e4m3x2 b, hi; mov.b32 {h0, h1}, a; mov.b32 {h2, h3}, b; "
            "cvt.f32.f16 $0, h0; cvt.f32.f16 $1, h1; cvt.f32.f16 $2, h2; cvt.f32.f16 $3, h3; }",
            "=f,=f,=f,=f,r", [word], dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        x0, x1 = _decode(word & 0xFF), _decode((word >> 8) & 0xFF)
        x2, x3 = _decode((word >> 16) & 0xFF), _decode((word >> 24) & 0xFF)
    return x0 * scale, x1 * scale, x2 * scale, x3 * scale


@triton.jit
def _max4(a, b, c, d):
    return tl.maximum(tl.maximum(_abs_bits(a), _abs_bits(b)), tl.maximum(_abs_bits(c), _abs_bits(d)))


@triton.jit
def _store_row(q_ptr, si_ptr, row, words_ok, offset, rows, a, b, c, d, HARDWARE: tl.constexpr):
    """Row codes and inverse scales of 32 rows (`row` of each) x 32 words."""
    multiplier, inverse = _pow2_scale(tl.max(_max4(a, b, c, d), 1))
    m = multiplier[:, None]
    ok = row < rows
    tl.store(q_ptr + offset, _pack4(a * m, b * m, c * m, d * m, HARDWARE), mask=ok[:, None] & words_ok[None, :])
    tl.store(si_ptr + row, inverse, mask=ok)


@triton.jit
def _store_column(qt_ptr, sit_ptr, col, col_ok, row_words, words_per_row, a, b, c, d, HARDWARE: tl.constexpr):
    """Transposed codes and inverse scales of 32 columns (`col` of each): a..d hold four neighbouring rows."""
    multiplier, inverse = _pow2_scale(tl.max(_max4(a, b, c, d), 0))
    m = multiplier[None, :]
    packed = tl.trans(_pack4(a * m, b * m, c * m, d * m, HARDWARE))
    offset = col.to(tl.int64)[:, None] * words_per_row + row_words[None, :]
    tl.store(qt_ptr + offset, packed, mask=col_ok[:, None])
    tl.store(sit_ptr + col, inverse, mask=col_ok)


# ---------------------------------------------------------------- kernels


@triton.jit(do_not_specialize=["rows"])
def _quantize_rows(x_ptr, q_ptr, si_ptr, rows, cols, ROWS: tl.constexpr, HARDWARE: tl.constexpr):
    """1x128 tiles of `ROWS` rows x 128 columns. q as bytes; inverse scales column-major."""
    cb = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    col = cb * 128 + tl.arange(0, 128)
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    offset = row.to(tl.int64)[:, None] * cols + col[None, :]
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    multiplier, inverse = _pow2_scale(tl.max(_abs_bits(x), 1))
    y = x * multiplier[:, None]
    if HARDWARE:
        code = y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = _encode(y).to(tl.uint8)
    tl.store(q_ptr + offset, code, mask=mask)
    tl.store(si_ptr + cb.to(tl.int64) * rows + row, inverse, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _quantize_blocks(x_ptr, q_ptr, si_ptr, rows, cols, HARDWARE: tl.constexpr):
    """One 128x128 tile of one matrix of the stack."""
    cb, rb, e = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = rb * 128 + tl.arange(0, 128)
    col = cb * 128 + tl.arange(0, 128)
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    offset = e.to(tl.int64) * rows * cols + row.to(tl.int64)[:, None] * cols + col[None, :]
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    multiplier, inverse = _pow2_scale(tl.max(tl.max(_abs_bits(x), 1), 0))
    y = x * multiplier
    if HARDWARE:
        code = y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = _encode(y).to(tl.uint8)
    tl.store(q_ptr + offset, code, mask=mask)
    tl.store(si_ptr + (e * tl.num_programs(1) + rb) * tl.num_programs(0) + cb, inverse)


@triton.jit(do_not_specialize=["rows"])
def _quantize_transposed(
    x_ptr, q_ptr, si_ptr, qt_ptr, sit_ptr, live_ptr, rows, cols, words_per_row_t,
    BOTH: tl.constexpr, LIVE: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One 128x128 block: the transposed form (tiles along rows) and, with BOTH, the row form, from one read.

    x as int64 words of four BF16, q and qt as int32 words of four codes.
    """
    cb, rb = tl.program_id(0), tl.program_id(1)
    if LIVE:
        if tl.load(live_ptr + rb) < 0:
            return
    group = tl.arange(0, 32)
    word = cb * 32 + tl.arange(0, 32)
    words = cols // 4
    words_ok = word < words
    row = rb * 128 + 4 * group
    offset = row.to(tl.int64)[:, None] * words + word[None, :]
    a0, a1, a2, a3 = _load_bf16x4(x_ptr + offset, (row < rows)[:, None] & words_ok[None, :])
    b0, b1, b2, b3 = _load_bf16x4(x_ptr + offset + words, (row + 1 < rows)[:, None] & words_ok[None, :])
    c0, c1, c2, c3 = _load_bf16x4(x_ptr + offset + 2 * words, (row + 2 < rows)[:, None] & words_ok[None, :])
    d0, d1, d2, d3 = _load_bf16x4(x_ptr + offset + 3 * words, (row + 3 < rows)[:, None] & words_ok[None, :])
    if BOTH:
        si = si_ptr + cb.to(tl.int64) * rows
        _store_row(q_ptr, si, row, words_ok, offset, rows, a0, a1, a2, a3, HARDWARE)
        _store_row(q_ptr, si, row + 1, words_ok, offset + words, rows, b0, b1, b2, b3, HARDWARE)
        _store_row(q_ptr, si, row + 2, words_ok, offset + 2 * words, rows, c0, c1, c2, c3, HARDWARE)
        _store_row(q_ptr, si, row + 3, words_ok, offset + 3 * words, rows, d0, d1, d2, d3, HARDWARE)
    sit = sit_ptr + rb.to(tl.int64) * cols
    row_word = rb * 32 + group
    _store_column(qt_ptr, sit, 4 * word, words_ok, row_word, words_per_row_t, a0, b0, c0, d0, HARDWARE)
    _store_column(qt_ptr, sit, 4 * word + 1, words_ok, row_word, words_per_row_t, a1, b1, c1, d1, HARDWARE)
    _store_column(qt_ptr, sit, 4 * word + 2, words_ok, row_word, words_per_row_t, a2, b2, c2, d2, HARDWARE)
    _store_column(qt_ptr, sit, 4 * word + 3, words_ok, row_word, words_per_row_t, a3, b3, c3, d3, HARDWARE)


@triton.jit(do_not_specialize=["rows"])
def _retile_transposed(
    q_ptr, si_ptr, qt_ptr, sit_ptr, live_ptr, rows, cols, words_per_row_t, LIVE: tl.constexpr, HARDWARE: tl.constexpr
):
    """One 128x128 block of row-tiled codes (int32 words), quantised anew in tiles along rows, transposed."""
    cb, rb = tl.program_id(0), tl.program_id(1)
    if LIVE:
        if tl.load(live_ptr + rb) < 0:
            return
    group = tl.arange(0, 32)
    word = cb * 32 + tl.arange(0, 32)
    words = cols // 4
    words_ok = word < words
    row = rb * 128 + 4 * group
    src = q_ptr + row.to(tl.int64)[:, None] * words + word[None, :]
    si = si_ptr + cb.to(tl.int64) * rows
    a0, a1, a2, a3 = _load_fp8x4(src, si, row, rows, words_ok, HARDWARE)
    b0, b1, b2, b3 = _load_fp8x4(src + words, si, row + 1, rows, words_ok, HARDWARE)
    c0, c1, c2, c3 = _load_fp8x4(src + 2 * words, si, row + 2, rows, words_ok, HARDWARE)
    d0, d1, d2, d3 = _load_fp8x4(src + 3 * words, si, row + 3, rows, words_ok, HARDWARE)
    sit = sit_ptr + rb.to(tl.int64) * cols
    row_word = rb * 32 + group
    _store_column(qt_ptr, sit, 4 * word, words_ok, row_word, words_per_row_t, a0, b0, c0, d0, HARDWARE)
    _store_column(qt_ptr, sit, 4 * word + 1, words_ok, row_word, words_per_row_t, a1, b1, c1, d1, HARDWARE)
    _store_column(qt_ptr, sit, 4 * word + 2, words_ok, row_word, words_per_row_t, a2, b2, c2, d2, HARDWARE)
    _store_column(qt_ptr, sit, 4 * word + 3, words_ok, row_word, words_per_row_t, a3, b3, c3, d3, HARDWARE)


@triton.jit
def _row_scale_bits(si_ptr, row, rows, word):
    """Bits of each row's inverse scale, 0 where the row holds only zeros (it takes no part in the block's maximum)."""
    bits = tl.load(si_ptr + row, mask=row < rows, other=0.0).to(tl.int32, bitcast=True)
    return tl.where(tl.max(word & 0x7F7F7F7F, 1) > 0, bits, 0)


@triton.jit(do_not_specialize=["rows"])
def _transpose_words(
    q_ptr, si_ptr, qt_ptr, sit_ptr, live_ptr, rows, cols, words_per_row_t,
    RESCALE: tl.constexpr, LIVE: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One 128x128 block of codes, transposed; with RESCALE brought to one scale, the largest of its rows."""
    cb, rb, e = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if LIVE:
        if tl.load(live_ptr + rb) < 0:
            return
    group = tl.arange(0, 32)
    word = cb * 32 + tl.arange(0, 32)
    words = cols // 4
    words_ok = word < words
    row = rb * 128 + 4 * group
    src = q_ptr + e.to(tl.int64) * rows * words + row.to(tl.int64)[:, None] * words + word[None, :]
    w0 = tl.load(src, mask=(row < rows)[:, None] & words_ok[None, :], other=0)
    w1 = tl.load(src + words, mask=(row + 1 < rows)[:, None] & words_ok[None, :], other=0)
    w2 = tl.load(src + 2 * words, mask=(row + 2 < rows)[:, None] & words_ok[None, :], other=0)
    w3 = tl.load(src + 3 * words, mask=(row + 3 < rows)[:, None] & words_ok[None, :], other=0)
    if RESCALE:
        si = si_ptr + cb.to(tl.int64) * rows
        s0 = _row_scale_bits(si, row, rows, w0)
        s1 = _row_scale_bits(si, row + 1, rows, w1)
        s2 = _row_scale_bits(si, row + 2, rows, w2)
        s3 = _row_scale_bits(si, row + 3, rows, w3)
        target = tl.max(tl.maximum(tl.maximum(s0, s1), tl.maximum(s2, s3)), 0)
        target = tl.where(target > 0, target, 0x3F800000)  # an all-zero block has scale 1
        w0 = _shift_word(w0, ((target - s0) >> 23)[:, None], HARDWARE)
        w1 = _shift_word(w1, ((target - s1) >> 23)[:, None], HARDWARE)
        w2 = _shift_word(w2, ((target - s2) >> 23)[:, None], HARDWARE)
        w3 = _shift_word(w3, ((target - s3) >> 23)[:, None], HARDWARE)
        tl.store(sit_ptr + cb * tl.num_programs(1) + rb, target.to(tl.float32, bitcast=True))
    col = 4 * word
    dst = qt_ptr + e.to(tl.int64) * cols * words_per_row_t + col.to(tl.int64)[:, None] * words_per_row_t
    dst = dst + (rb * 32 + group)[None, :]
    ok = words_ok[:, None] & ((rb * 32 + group) < words_per_row_t)[None, :]
    tl.store(dst, tl.trans(_byte_column(w0, w1, w2, w3, 0)), mask=ok)
    tl.store(dst + words_per_row_t, tl.trans(_byte_column(w0, w1, w2, w3, 1)), mask=ok)
    tl.store(dst + 2 * words_per_row_t, tl.trans(_byte_column(w0, w1, w2, w3, 2)), mask=ok)
    tl.store(dst + 3 * words_per_row_t, tl.trans(_byte_column(w0, w1, w2, w3, 3)), mask=ok)


# ---------------------------------------------------------------- launchers


def _empty_fp8(*shape: int, like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=torch.float8_e4m3fn, device=like.device)


def _row_scales(rows: int, cols: int, like: Tensor) -> Tensor:
    """[rows, ceil(cols / 128)] fp32, strides (1, rows)."""
    return torch.empty((triton.cdiv(cols, BLOCK), rows), dtype=torch.float32, device=like.device).t()


def quantize_rows(x_RC: Tensor) -> Quantized:
    """[R, C] BF16 or fp32, contiguous -> E4M3 with 1x128 tiles."""
    rows, cols = x_RC.shape
    q, si = _empty_fp8(rows, cols, like=x_RC), _row_scales(rows, cols, x_RC)
    tile_rows = 64
    grid = (triton.cdiv(cols, BLOCK), triton.cdiv(rows, tile_rows))
    _quantize_rows[grid](x_RC, q.view(torch.uint8), si, rows, cols, ROWS=tile_rows, HARDWARE=not INTERPRETED, num_warps=4)
    return Quantized(q, si, (1, BLOCK))


def quantize_blocks(w: Tensor) -> Quantized:
    """[..., R, C] BF16 or fp32, contiguous -> E4M3 with 128x128 tiles."""
    rows, cols = w.shape[-2:]
    stack = w.numel() // (rows * cols)
    q = torch.empty_like(w, dtype=torch.float8_e4m3fn)
    nr, nc = triton.cdiv(rows, BLOCK), triton.cdiv(cols, BLOCK)
    si = torch.empty((*w.shape[:-2], nr, nc), dtype=torch.float32, device=w.device)
    _quantize_blocks[(nc, nr, stack)](w, q.view(torch.uint8), si, rows, cols, HARDWARE=not INTERPRETED, num_warps=8)
    return Quantized(q, si, (BLOCK, BLOCK))


def quantize_transposed(
    x_RC: Tensor, both: bool, live_B: Tensor | None = None
) -> tuple[Quantized | None, Quantized]:
    """[R, C] BF16, contiguous -> (row form if `both`, transposed form [C, Rp] with tiles along R), from one read.

    Args:
        live_B: int32 [Rp / 128]; blocks with a negative entry are neither read nor written.
    """
    rows, cols = x_RC.shape
    rows_p = triton.cdiv(rows, BLOCK) * BLOCK
    q_t = _empty_fp8(cols, rows_p, like=x_RC)
    si_t = torch.empty((rows_p // BLOCK, cols), dtype=torch.float32, device=x_RC.device)
    q = _empty_fp8(rows, cols, like=x_RC) if both else q_t
    si = _row_scales(rows, cols, x_RC) if both else si_t
    _quantize_transposed[(triton.cdiv(cols, BLOCK), rows_p // BLOCK)](
        x_RC.view(torch.int64), q.view(torch.int32), si, q_t.view(torch.int32), si_t, si_t if live_B is None else live_B,
        rows, cols, rows_p // 4, BOTH=both, LIVE=live_B is not None, HARDWARE=not INTERPRETED, num_warps=8,
    )  # fmt: skip
    return (Quantized(q, si, (1, BLOCK)) if both else None), Quantized(q_t, si_t.t(), (1, BLOCK))


def retile_transposed(q_RC: Quantized, live_B: Tensor | None = None) -> Quantized:
    """[R, C] with 1x128 tiles -> its transpose [C, Rp] with 1x128 tiles along R: a gradient that arrived in FP8."""
    rows, cols = q_RC.shape
    rows_p = triton.cdiv(rows, BLOCK) * BLOCK
    q_t = _empty_fp8(cols, rows_p, like=q_RC.data)
    si_t = torch.empty((rows_p // BLOCK, cols), dtype=torch.float32, device=q_RC.device)
    _retile_transposed[(triton.cdiv(cols, BLOCK), rows_p // BLOCK)](
        q_RC.data.view(torch.int32), q_RC.scale_inv, q_t.view(torch.int32), si_t, si_t if live_B is None else live_B,
        rows, cols, rows_p // 4, LIVE=live_B is not None, HARDWARE=not INTERPRETED, num_warps=8,
    )  # fmt: skip
    return Quantized(q_t, si_t.t(), (1, BLOCK))


def requantize_transposed(q_RC: Quantized, live_B: Tensor | None = None) -> Quantized:
    """[R, C] with 1x128 tiles -> [C, Rp] with 128x128 tiles; see quantize.requantize_t_ref."""
    rows, cols = q_RC.shape
    nr, nc = triton.cdiv(rows, BLOCK), triton.cdiv(cols, BLOCK)
    q_t = _empty_fp8(cols, nr * BLOCK, like=q_RC.data)
    si_t = torch.empty((nc, nr), dtype=torch.float32, device=q_RC.device)
    _transpose_words[(nc, nr, 1)](
        q_RC.data.view(torch.int32), q_RC.scale_inv, q_t.view(torch.int32), si_t, si_t if live_B is None else live_B,
        rows, cols, nr * BLOCK // 4, RESCALE=True, LIVE=live_B is not None, HARDWARE=not INTERPRETED, num_warps=4,
    )  # fmt: skip
    return Quantized(q_t, si_t, (BLOCK, BLOCK))


def transpose_codes(w: Tensor) -> Tensor:
    """[..., R, C] FP8 -> [..., C, R], contiguous; R and C multiples of 4."""
    rows, cols = w.shape[-2:]
    out = torch.empty((*w.shape[:-2], cols, rows), dtype=w.dtype, device=w.device)
    words, words_t = w.view(torch.int32), out.view(torch.int32)
    grid = (triton.cdiv(cols, BLOCK), triton.cdiv(rows, BLOCK), w.numel() // (rows * cols))
    _transpose_words[grid](
        words, words, words_t, words_t, words, rows, cols, rows // 4,
        RESCALE=False, LIVE=False, HARDWARE=not INTERPRETED, num_warps=4,
    )  # fmt: skip
    return out
