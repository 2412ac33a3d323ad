"""Triton kernels behind permute.py: token rows gathered by expert and turned in the same pass, for wgrad.

A token's row is read once for each of its experts, mostly from L2 (T rows fit there, R rows do not), so that the turned form costs
little more than writing it; programs take a few blocks of columns of all rows before the next few, which keeps those columns
there. Shapes: T tokens, k slots a token, R rows of the buffer (a multiple of 128), D features (a multiple of
128). How a block is laid out: block_forms.py, quantize_device.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8.block_forms import store_column_form
from fp8.launch import in_words
from fp8.quantize_device import flatten4, join4, store_transposed
from fp8.quantize_kernels import BLOCK, INTERPRETED, _empty_fp8, _row_scales, scaled_pairs
from fp8.quantized import Quantized
from fp8.transpose_kernels import rescaled, turned_words

LAUNCH = {"both": (16, 2, 4), "square": (32, 4, 4)}  # (words of a block, num_warps, blocks of columns that go together)


@triton.jit
def _block(across, down, GROUP: tl.constexpr):
    """(block of columns, block of rows) of a program: all rows of GROUP blocks of columns, then of the next ones."""
    pid = tl.program_id(0)
    group, inside = pid // (GROUP * down), pid % (GROUP * down)
    width = tl.minimum(across - group * GROUP, GROUP)
    return group * GROUP + inside % width, inside // width


@triton.jit
def _gather(q_ptr, si_ptr, index_ptr, row, words, word, K: tl.constexpr):
    """(words of the token rows of 32 buffer rows, their inverse scales); padding is zero with scale 1."""
    index = tl.load(index_ptr + row).to(tl.int32)
    present, source = index >= 0, tl.maximum(index, 0) // K
    at = q_ptr + source.to(tl.int64)[:, None] * words + word[None, :]
    q = tl.load(at, mask=present[:, None], other=0, eviction_policy="evict_last")  # read K times, unlike what is written
    return q, tl.load(si_ptr + source, mask=present, other=1.0)


@triton.jit
def _permute_both(
    q_ptr, si_ptr, index_ptr, live_ptr, y_ptr, ysi_ptr, qt_ptr, sit_ptr, tokens, rows, cols, words_t,
    K: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """128 buffer rows x 4 * WORDS columns: the rows as they are, and transposed, quantised anew in tiles along rows."""
    cb, rb = _block(cols // (4 * WORDS), rows // 128, GROUP)
    if tl.load(live_ptr + rb) < 0:
        return
    words, block = cols // 4, (cb * WORDS // 32).to(tl.int64)
    word, row = cb * WORDS + tl.arange(0, WORDS), rb * 128 + 4 * tl.arange(0, 32)
    si_ptr += block * tokens
    w0, s0 = _gather(q_ptr, si_ptr, index_ptr, row, words, word, K)
    w1, s1 = _gather(q_ptr, si_ptr, index_ptr, row + 1, words, word, K)
    w2, s2 = _gather(q_ptr, si_ptr, index_ptr, row + 2, words, word, K)
    w3, s3 = _gather(q_ptr, si_ptr, index_ptr, row + 3, words, word, K)
    y = y_ptr + row.to(tl.int64)[:, None] * words + word[None, :]
    tl.store(y, w0)
    tl.store(y + words, w1)
    tl.store(y + 2 * words, w2)
    tl.store(y + 3 * words, w3)
    if cb * WORDS % 32 == 0:
        tl.store(ysi_ptr + block * rows + rb * 128 + tl.arange(0, 128), flatten4(join4(s0, s1, s2, s3), 32))
    lo0, hi0 = scaled_pairs(w0, s0, HARDWARE)
    lo1, hi1 = scaled_pairs(w1, s1, HARDWARE)
    lo2, hi2 = scaled_pairs(w2, s2, HARDWARE)
    lo3, hi3 = scaled_pairs(w3, s3, HARDWARE)
    store_column_form(
        qt_ptr, sit_ptr + rb.to(tl.int64) * cols, cb * (4 * WORDS), rb, cols, words_t,
        lo0, hi0, lo1, hi1, lo2, hi2, lo3, hi3, WORDS, True, HARDWARE,
    )  # fmt: skip


@triton.jit
def _permute_square(
    q_ptr, si_ptr, index_ptr, live_ptr, qt_ptr, sit_ptr, tokens, rows, cols,
    K: tl.constexpr, GROUP: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One 128x128 block of buffer rows, transposed, with one scale: the largest of its rows."""
    cb, rb = _block(cols // 128, rows // 128, GROUP)
    if tl.load(live_ptr + rb) < 0:
        return
    words, word, row = cols // 4, cb * 32 + tl.arange(0, 32), rb * 128 + 4 * tl.arange(0, 32)
    si_ptr += cb.to(tl.int64) * tokens
    w0, s0 = _gather(q_ptr, si_ptr, index_ptr, row, words, word, K)
    w1, s1 = _gather(q_ptr, si_ptr, index_ptr, row + 1, words, word, K)
    w2, s2 = _gather(q_ptr, si_ptr, index_ptr, row + 2, words, word, K)
    w3, s3 = _gather(q_ptr, si_ptr, index_ptr, row + 3, words, word, K)
    w0, w1, w2, w3, inverse = rescaled(w0, w1, w2, w3, s0, s1, s2, s3, HARDWARE)
    tl.store(sit_ptr + cb * (rows // 128) + rb, inverse)
    t0, t1, t2, t3 = turned_words(w0, w1, w2, w3, HARDWARE)
    store_transposed(qt_ptr, cb, rb, cols, rows // 4, t0, t1, t2, t3, 32)


# ---------------------------------------------------------------- launchers


def fits(x: Quantized) -> bool:
    """Whether the kernels take x [T, D]: E4M3 in 1x128 tiles, column-major scales, D in whole blocks."""
    codes = x.data.dtype == torch.float8_e4m3fn and x.tile == (1, BLOCK) and x.shape[1] % BLOCK == 0
    return codes and x.shape[0] > 0 and x.data.is_contiguous() and (x.shape[0] == 1 or x.scale_inv.stride() == (1, x.shape[0]))


def permute_both(x: Quantized, slot_R: Tensor, k: int, live_B: Tensor) -> tuple[Quantized, Quantized]:
    """(rows slot // k of x [R, D], the same turned [D, R] with 1x128 tiles along R); see permute.permute_both."""
    (tokens, cols), rows = x.shape, slot_R.numel()
    y, si = _empty_fp8(rows, cols, like=x.data), _row_scales(rows, cols, x.data)
    y_t = _empty_fp8(cols, rows, like=x.data)
    si_t = torch.empty((rows // BLOCK, cols), dtype=torch.float32, device=x.device)
    words, warps, group = LAUNCH["both"]
    _permute_both[(cols // (4 * words) * (rows // BLOCK),)](
        in_words(x.data, torch.int32), x.scale_inv, slot_R, live_B, y.view(torch.int32), si, y_t.view(torch.int32), si_t,
        tokens, rows, cols, rows // 4, K=k, WORDS=words, GROUP=group, HARDWARE=not INTERPRETED, num_warps=warps,
    )  # fmt: skip
    return Quantized(y, si, (1, BLOCK)), Quantized(y_t, si_t.t(), (1, BLOCK))


def permute_square(x: Quantized, slot_R: Tensor, k: int, live_B: Tensor) -> Quantized:
    """Rows slot // k of x, turned [D, R], with 128x128 tiles; see permute.permute_requantize_t."""
    (tokens, cols), rows = x.shape, slot_R.numel()
    y_t = _empty_fp8(cols, rows, like=x.data)
    si_t = torch.empty((cols // BLOCK, rows // BLOCK), dtype=torch.float32, device=x.device)
    _, warps, group = LAUNCH["square"]
    _permute_square[(cols // BLOCK * (rows // BLOCK),)](
        in_words(x.data, torch.int32), x.scale_inv, slot_R, live_B, y_t.view(torch.int32), si_t, tokens, rows, cols,
        K=k, GROUP=group, HARDWARE=not INTERPRETED, num_warps=warps,
    )  # fmt: skip
    return Quantized(y_t, si_t, (BLOCK, BLOCK))
