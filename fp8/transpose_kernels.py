"""Triton kernels that turn FP8 matrices: the exact transpose, and the re-tile from row scales to block scales.

Shapes: R rows, C columns (a multiple of 16), Rp = R rounded up to 128, E stacked matrices; see quantize_kernels.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8.launch import cdiv, in_words
from fp8.quantize_device import byte_column, join4, load_row, shift_word, split4, store_transposed
from fp8.quantized import Quantized

BLOCK = 128
INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def _either(a, b):
    """Bits of one or the other."""
    return a | b


@triton.jit
def rescaled(w0, w1, w2, w3, s0, s1, s2, s3, HARDWARE: tl.constexpr):
    """A block's words brought from the inverse scales of rows 4i .. 4i + 3 to the largest of them, and that scale.

    A row of zeros has scale 1 and takes no part in the maximum.
    """
    used = (tl.reduce(join4(w0, w1, w2, w3), 1, _either) & 0x7F7F7F7F) != 0
    bits = tl.where(used, join4(s0, s1, s2, s3).to(tl.int32, bitcast=True), 0)
    target = tl.max(tl.reshape(bits, (128,)), 0)
    target = tl.where(target > 0, target, 0x3F800000)  # an all-zero block has scale 1
    k0, k1, k2, k3 = split4((target - bits) >> 23)
    w0, w1 = shift_word(w0, k0[:, None], HARDWARE), shift_word(w1, k1[:, None], HARDWARE)
    w2, w3 = shift_word(w2, k2[:, None], HARDWARE), shift_word(w3, k3[:, None], HARDWARE)
    return w0, w1, w2, w3, target.to(tl.float32, bitcast=True)


@triton.jit
def turned_words(w0, w1, w2, w3, HARDWARE: tl.constexpr):
    """Words of four columns of rows 4i .. 4i + 3 -> words of four rows of columns 4w .. 4w + 3: 4x4 bytes, turned by eight prmt."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, c, d; prmt.b32 a, $4, $5, 0x5140; prmt.b32 b, $6, $7, 0x5140; prmt.b32 c, $4, $5, 0x7362; "
            "prmt.b32 d, $6, $7, 0x7362; prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, a, b, 0x7632; prmt.b32 $2, c, d, 0x5410; "
            "prmt.b32 $3, c, d, 0x7632; }",
            "=&r,=&r,=&r,=&r,r,r,r,r", [w0, w1, w2, w3], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        t0, t1 = byte_column(w0, w1, w2, w3, 0), byte_column(w0, w1, w2, w3, 1)
        return t0, t1, byte_column(w0, w1, w2, w3, 2), byte_column(w0, w1, w2, w3, 3)


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
    words = cols // 4
    word = cb * 32 + tl.arange(0, 32)
    ok = word < words
    row = rb * 128 + 4 * tl.arange(0, 32)
    src = q_ptr + e.to(tl.int64) * rows * words + row.to(tl.int64)[:, None] * words + word[None, :]
    w0 = load_row(src, row, rows, ok)
    w1 = load_row(src + words, row + 1, rows, ok)
    w2 = load_row(src + 2 * words, row + 2, rows, ok)
    w3 = load_row(src + 3 * words, row + 3, rows, ok)
    if RESCALE:
        si = si_ptr + cb.to(tl.int64) * rows + row
        s0 = tl.load(si, mask=row < rows, other=0.0)
        s1 = tl.load(si + 1, mask=row + 1 < rows, other=0.0)
        s2 = tl.load(si + 2, mask=row + 2 < rows, other=0.0)
        s3 = tl.load(si + 3, mask=row + 3 < rows, other=0.0)
        w0, w1, w2, w3, inverse = rescaled(w0, w1, w2, w3, s0, s1, s2, s3, HARDWARE)
        tl.store(sit_ptr + cb * tl.num_programs(1) + rb, inverse)
    t0, t1, t2, t3 = turned_words(w0, w1, w2, w3, HARDWARE)
    dst = qt_ptr + e.to(tl.int64) * cols * words_per_row_t
    store_transposed(dst, cb, rb, cols, words_per_row_t, t0, t1, t2, t3, 32)


# ---------------------------------------------------------------- launchers


def requantize_transposed(q_RC: Quantized, live_B: Tensor | None = None) -> Quantized:
    """[R, C] with 1x128 tiles -> [C, Rp] with 128x128 tiles; see quantize.requantize_t_ref."""
    rows, cols = q_RC.shape
    nr, nc = cdiv(rows, BLOCK), cdiv(cols, BLOCK)
    q_t = torch.empty(cols, nr * BLOCK, dtype=q_RC.data.dtype, device=q_RC.device)
    si_t = torch.empty((nc, nr), dtype=torch.float32, device=q_RC.device)
    _transpose_words[(nc, nr, 1)](
        in_words(q_RC.data, torch.int32), q_RC.scale_inv, q_t.view(torch.int32), si_t, si_t if live_B is None else live_B,
        rows, cols, nr * BLOCK // 4, RESCALE=True, LIVE=live_B is not None, HARDWARE=not INTERPRETED,
        num_warps=4,
    )  # fmt: skip
    return Quantized(q_t, si_t, (BLOCK, BLOCK))


def transpose_codes(w: Tensor, out: Tensor | None = None) -> Tensor:
    """[..., R, C] FP8 -> [..., C, R], contiguous (written to `out` where given); R and C multiples of 4."""
    rows, cols = w.shape[-2:]
    out = torch.empty((*w.shape[:-2], cols, rows), dtype=w.dtype, device=w.device) if out is None else out
    words, words_t = in_words(w, torch.int32), out.view(torch.int32)
    grid = (cdiv(cols, BLOCK), cdiv(rows, BLOCK), w.numel() // (rows * cols))
    _transpose_words[grid](
        words, words, words_t, words_t, words, rows, cols, rows // 4,
        RESCALE=False, LIVE=False, HARDWARE=not INTERPRETED, num_warps=4,
    )  # fmt: skip
    return out
