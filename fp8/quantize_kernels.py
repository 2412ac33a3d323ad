"""Triton kernels behind quantize.py: bit-exact with the references there, and bound by memory.

Shapes: R rows, C columns (a multiple of 16), Rp = R rounded up to 128, E stacked matrices. Blocks of 128x128 are read as
32 groups of 4 rows x 32 words of 4 columns. How the work is laid out: quantize_device.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8.block_forms import both_halves, pack_bf16, store_column_form, store_row_form, times
from fp8.launch import cdiv, in_words
from fp8.quantize_device import abs_bits, encode_bytes, load_row, pow2_scale, unpack4
from fp8.quantized import Quantized

BLOCK = 128
INTERPRETED = triton.knobs.runtime.interpret
LAUNCH = {  # (words, num_warps, registers) of the transposing kernels: what keeps enough blocks in flight (tools.bench kernels)
    "transposed": (32, 4, None),
    "both": (32, 4, 96),
    "retile": (16, 4, None),
}

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
    multiplier, inverse = pow2_scale(tl.max(abs_bits(x), 1))
    tl.store(q_ptr + offset, encode_bytes(x * multiplier[:, None], HARDWARE), mask=mask)
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
    multiplier, inverse = pow2_scale(tl.max(tl.max(abs_bits(x), 1), 0))
    tl.store(q_ptr + offset, encode_bytes(x * multiplier, HARDWARE), mask=mask)
    tl.store(si_ptr + (e * tl.num_programs(1) + rb) * tl.num_programs(0) + cb, inverse)


@triton.jit(do_not_specialize=["rows"])
def _quantize_transposed(
    x_ptr, q_ptr, si_ptr, qt_ptr, sit_ptr, live_ptr, rows, cols, words_per_row_t,
    BOTH: tl.constexpr, WORDS: tl.constexpr, LIVE: tl.constexpr, FULL: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """128 rows x 4 * WORDS columns (128 with BOTH): the transposed form, tiles along rows, and with BOTH the row form.

    x as int64 words of four BF16, q and qt as int32 words of four codes. The data stays in BF16 pairs until it is encoded: as
    fp32 it would fill the registers of half a multiprocessor.
    """
    cb, rb = tl.program_id(0), tl.program_id(1)
    if LIVE:
        if tl.load(live_ptr + rb) < 0:
            return
    words = cols // 4
    word = cb * WORDS + tl.arange(0, WORDS)
    ok = word < words
    row = rb * 128 + 4 * tl.arange(0, 32)
    offset = row.to(tl.int64)[:, None] * words + word[None, :]
    x = x_ptr + offset
    if FULL:
        x0, x1, x2, x3 = tl.load(x), tl.load(x + words), tl.load(x + 2 * words), tl.load(x + 3 * words)
    else:
        x0, x1 = load_row(x, row, rows, ok), load_row(x + words, row + 1, rows, ok)
        x2, x3 = load_row(x + 2 * words, row + 2, rows, ok), load_row(x + 3 * words, row + 3, rows, ok)
    a0, a1, a2, a3 = x0.to(tl.int32), x1.to(tl.int32), x2.to(tl.int32), x3.to(tl.int32)  # columns 4w, 4w + 1
    b0, b1, b2, b3 = (x0 >> 32).to(tl.int32), (x1 >> 32).to(tl.int32), (x2 >> 32).to(tl.int32), (x3 >> 32).to(tl.int32)
    if BOTH:
        store_row_form(
            q_ptr, si_ptr + cb.to(tl.int64) * rows, rb, rows, words, word, a0, b0, a1, b1, a2, b2, a3, b3, FULL, HARDWARE
        )
    store_column_form(
        qt_ptr, sit_ptr + rb.to(tl.int64) * cols, cb * (4 * WORDS), rb, cols, words_per_row_t,
        a0, b0, a1, b1, a2, b2, a3, b3, WORDS, FULL, HARDWARE,
    )  # fmt: skip


@triton.jit
def scaled_pairs(word, scale, HARDWARE: tl.constexpr):
    """Words of four E4M3 codes times their row's scale, as two pairs of BF16: exact, since a code has four significant bits."""
    x0, x1, x2, x3 = unpack4(word, HARDWARE)
    scale = both_halves(scale)[:, None]
    return times(pack_bf16(x0, x1, HARDWARE), scale, HARDWARE), times(pack_bf16(x2, x3, HARDWARE), scale, HARDWARE)


@triton.jit(do_not_specialize=["rows"])
def _retile_transposed(
    q_ptr, si_ptr, qt_ptr, sit_ptr, live_ptr, rows, cols, words_per_row_t,
    WORDS: tl.constexpr, LIVE: tl.constexpr, FULL: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """128 rows x 4 * WORDS columns of row-tiled codes (int32 words), quantised anew in tiles along rows, transposed."""
    cb, rb = tl.program_id(0), tl.program_id(1)
    if LIVE:
        if tl.load(live_ptr + rb) < 0:
            return
    words = cols // 4
    word = cb * WORDS + tl.arange(0, WORDS)
    row = rb * 128 + 4 * tl.arange(0, 32)
    q = q_ptr + row.to(tl.int64)[:, None] * words + word[None, :]
    si = si_ptr + (cb * WORDS // 32).to(tl.int64) * rows + row
    if FULL:
        w0, w1, w2, w3 = tl.load(q), tl.load(q + words), tl.load(q + 2 * words), tl.load(q + 3 * words)
        s0, s1, s2, s3 = tl.load(si), tl.load(si + 1), tl.load(si + 2), tl.load(si + 3)
    else:
        ok = word < words
        w0, w1 = load_row(q, row, rows, ok), load_row(q + words, row + 1, rows, ok)
        w2, w3 = load_row(q + 2 * words, row + 2, rows, ok), load_row(q + 3 * words, row + 3, rows, ok)
        s0, s1 = tl.load(si, mask=row < rows, other=0.0), tl.load(si + 1, mask=row + 1 < rows, other=0.0)
        s2, s3 = tl.load(si + 2, mask=row + 2 < rows, other=0.0), tl.load(si + 3, mask=row + 3 < rows, other=0.0)
    lo0, hi0 = scaled_pairs(w0, s0, HARDWARE)
    lo1, hi1 = scaled_pairs(w1, s1, HARDWARE)
    lo2, hi2 = scaled_pairs(w2, s2, HARDWARE)
    lo3, hi3 = scaled_pairs(w3, s3, HARDWARE)
    store_column_form(
        qt_ptr, sit_ptr + rb.to(tl.int64) * cols, cb * (4 * WORDS), rb, cols, words_per_row_t,
        lo0, hi0, lo1, hi1, lo2, hi2, lo3, hi3, WORDS, FULL, HARDWARE,
    )  # fmt: skip


# ---------------------------------------------------------------- launchers


def _empty_fp8(*shape: int, like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=torch.float8_e4m3fn, device=like.device)


def _row_scales(rows: int, cols: int, like: Tensor) -> Tensor:
    """[rows, ceil(cols / 128)] fp32, strides (1, rows)."""
    return torch.empty_strided((rows, cdiv(cols, BLOCK)), (1, rows), dtype=torch.float32, device=like.device)


def quantize_rows(x_RC: Tensor) -> Quantized:
    """[R, C] BF16 or fp32, contiguous -> E4M3 with 1x128 tiles."""
    rows, cols = x_RC.shape
    q, si = _empty_fp8(rows, cols, like=x_RC), _row_scales(rows, cols, x_RC)
    tile_rows = 64
    grid = (cdiv(cols, BLOCK), cdiv(rows, tile_rows))
    _quantize_rows[grid](x_RC, q.view(torch.uint8), si, rows, cols, ROWS=tile_rows, HARDWARE=not INTERPRETED, num_warps=4)
    return Quantized(q, si, (1, BLOCK))


def quantize_blocks(w: Tensor) -> Quantized:
    """[..., R, C] BF16 or fp32, contiguous -> E4M3 with 128x128 tiles."""
    rows, cols = w.shape[-2:]
    stack = w.numel() // (rows * cols)
    q = torch.empty_like(w, dtype=torch.float8_e4m3fn)
    nr, nc = cdiv(rows, BLOCK), cdiv(cols, BLOCK)
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
    rows_p = cdiv(rows, BLOCK) * BLOCK
    q_t = _empty_fp8(cols, rows_p, like=x_RC)
    si_t = torch.empty((rows_p // BLOCK, cols), dtype=torch.float32, device=x_RC.device)
    q = _empty_fp8(rows, cols, like=x_RC) if both else q_t
    si = _row_scales(rows, cols, x_RC) if both else si_t
    words, warps, registers = LAUNCH["both" if both else "transposed"]
    _quantize_transposed[(cdiv(cols, 4 * words), rows_p // BLOCK)](
        in_words(x_RC, torch.int64), q.view(torch.int32), si, q_t.view(torch.int32), si_t, si_t if live_B is None else live_B,
        rows, cols, rows_p // 4, BOTH=both, WORDS=words, LIVE=live_B is not None,
        FULL=rows % BLOCK == 0 and cols % BLOCK == 0, HARDWARE=not INTERPRETED, num_warps=warps, maxnreg=registers,
    )  # fmt: skip
    return (Quantized(q, si, (1, BLOCK)) if both else None), Quantized(q_t, si_t.t(), (1, BLOCK))


def retile_transposed(q_RC: Quantized, live_B: Tensor | None = None) -> Quantized:
    """[R, C] with 1x128 tiles -> its transpose [C, Rp] with 1x128 tiles along R: a gradient that arrived in FP8."""
    rows, cols = q_RC.shape
    rows_p = cdiv(rows, BLOCK) * BLOCK
    q_t = _empty_fp8(cols, rows_p, like=q_RC.data)
    si_t = torch.empty((rows_p // BLOCK, cols), dtype=torch.float32, device=q_RC.device)
    words, warps, registers = LAUNCH["retile"]
    _retile_transposed[(cdiv(cols, 4 * words), rows_p // BLOCK)](
        in_words(q_RC.data, torch.int32), q_RC.scale_inv, q_t.view(torch.int32), si_t, si_t if live_B is None else live_B,
        rows, cols, rows_p // 4, WORDS=words, LIVE=live_B is not None,
        FULL=rows % BLOCK == 0 and cols % BLOCK == 0, HARDWARE=not INTERPRETED, num_warps=warps, maxnreg=registers,
    )  # fmt: skip
    return Quantized(q_t, si_t.t(), (1, BLOCK))
