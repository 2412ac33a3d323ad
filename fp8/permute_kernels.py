"""Triton kernels behind permute.py: rows are read once and move as words.

Shapes: T tokens, k slots a token, R rows of the buffer, D features.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8.device_math import round_bf16
from fp8.launch import cdiv, in_words, next_power_of_2
from fp8.quantize_kernels import INTERPRETED, _row_scales
from fp8.quantized import Quantized

TOKENS, WORDS, SCATTER_WARPS = 1, 512, 1  # of a program that scatters
SUM_COLS = 2048


@triton.jit
def _scales_and_padding(
    si_ptr, slot_ptr, y_ptr, ysi_ptr, rb, word, tokens, rows, words, scales,
    K: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """What no token writes of 128 rows of the buffer: scales, which lie in columns, and the zeros of padding, which comes last."""
    row = rb * 128 + tl.arange(0, 128)
    index = tl.load(slot_ptr + row).to(tl.int32)
    present = index >= 0
    if SCALES > 0:
        if tl.program_id(1) == 0:
            source, block = tl.where(present, index, 0) // K, tl.arange(0, SCALES).to(tl.int64)
            ok = (block < scales)[:, None]
            si = tl.load(si_ptr + block[:, None] * tokens + source[None, :], mask=present[None, :] & ok, other=1.0)
            tl.store(ysi_ptr + block[:, None] * rows + row[None, :], si, mask=ok)
    y = y_ptr + rb.to(tl.int64) * 128 * words + word
    for padding in range(tl.sum(present.to(tl.int32), 0), 128):
        tl.store(y + padding * words, tl.zeros((WORDS,), tl.int32), mask=word < words)


@triton.jit
def _scatter_rows(
    x_ptr, si_ptr, row_ptr, slot_ptr, live_ptr, y_ptr, ysi_ptr, tokens, rows, words, scales,
    K: tl.constexpr, TOKENS: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """WORDS 32-bit words of TOKENS tokens: read once, stored in all their rows. The first programs do the rest of the buffer."""
    pid, blocks = tl.program_id(0), rows // 128
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    if pid < blocks:
        if tl.load(live_ptr + pid) >= 0:
            _scales_and_padding(si_ptr, slot_ptr, y_ptr, ysi_ptr, pid, word, tokens, rows, words, scales, K, WORDS, SCALES)
    else:
        token = (pid - blocks) * TOKENS + tl.arange(0, TOKENS)
        token_ok, word_ok = token < tokens, (word < words)[None, :]
        at = x_ptr + token.to(tl.int64)[:, None] * words + word[None, :]
        x = tl.load(at, mask=token_ok[:, None] & word_ok, other=0)
        for slot in tl.static_range(K):
            row = tl.load(row_ptr + token * K + slot, mask=token_ok, other=-1)
            tl.store(y_ptr + row[:, None] * words + word[None, :], x, mask=(row >= 0)[:, None] & word_ok)


@triton.jit
def _sum_rows(
    y_ptr, row_ptr, plus_ptr, out_ptr, cols,
    K: tl.constexpr, COLS: tl.constexpr, PLUS: tl.constexpr, ROUND: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over K slots of y[row[t, slot]] (negative: none) [+ plus[t]], FP32, in slot order."""
    t = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    col_ok = col < cols
    total = tl.zeros((COLS,), tl.float32)
    for slot in tl.static_range(K):
        row = tl.load(row_ptr + t * K + slot).to(tl.int64)
        present = tl.where(row >= 0, cols, 0)
        total += tl.load(y_ptr + row * cols + col, mask=col < present, other=0.0).to(tl.float32)
    if PLUS:
        total += tl.load(plus_ptr + t * cols + col, mask=col_ok, other=0.0).to(tl.float32)
    if ROUND:
        total = round_bf16(total, HARDWARE)
    tl.store(out_ptr + t * cols + col, total, mask=col_ok)


@triton.jit
def _gather_values(x_ptr, index_ptr, out_ptr, count, SIZE: tl.constexpr):
    """out[i] = x[index[i]]; zero where the index is negative."""
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    index = tl.load(index_ptr + i, mask=i < count, other=-1)
    tl.store(out_ptr + i, tl.load(x_ptr + index, mask=index >= 0, other=0.0), mask=i < count)


# ---------------------------------------------------------------- launchers


def scatter_rows(x: Quantized, row_Tk: Tensor, slot_R: Tensor, live_B: Tensor) -> Quantized:
    """Every token of x [T, D], rows of whole words, in its rows of the buffer [R, D]; padding is zero with scale 1."""
    (tokens, k), rows = row_Tk.shape, slot_R.numel()
    words = x.data.shape[1] * x.data.element_size() // 4
    y = torch.empty((rows, x.data.shape[1]), dtype=x.data.dtype, device=x.device)
    tiled = x.scale_inv is not None and x.tile[0] == 1
    if tiled and tokens > 1 and x.scale_inv.stride() != (1, tokens):
        assert x.scale_inv.shape[1] == 1 and x.scale_inv.stride(0) == 1, f"scales with strides {x.scale_inv.stride()}"
    si = _row_scales(rows, x.data.shape[1], y) if tiled else x.scale_inv
    scales = x.scale_inv.shape[1] if tiled else 0
    programs = rows // 128 + cdiv(tokens, TOKENS)
    _scatter_rows[(programs, cdiv(words, WORDS))](
        in_words(x.data, torch.int32), x.scale_inv if tiled else y.view(torch.int32), row_Tk, slot_R, live_B, y.view(torch.int32),
        si if tiled else y.view(torch.int32), tokens, rows, words, scales,
        K=k, TOKENS=TOKENS, WORDS=WORDS, SCALES=next_power_of_2(scales) if tiled else 0, num_warps=SCATTER_WARPS,
    )  # fmt: skip
    return Quantized(y, si, x.tile)


def sum_rows(y_RD: Tensor, row_Tk: Tensor, plus_TD: Tensor | None = None) -> Tensor:
    """[R, D] -> [T, D] in y's dtype: FP32 sum of rows row[t] (negative: none), plus `plus_TD`."""
    (tokens, k), cols = row_Tk.shape, y_RD.shape[1]
    out = torch.empty((tokens, cols), dtype=y_RD.dtype, device=y_RD.device)
    block = min(SUM_COLS, next_power_of_2(cols))
    _sum_rows[(tokens, cdiv(cols, block))](
        y_RD, row_Tk, y_RD if plus_TD is None else plus_TD.contiguous(), out, cols, K=k, COLS=block, PLUS=plus_TD is not None,
        ROUND=out.dtype == torch.bfloat16, HARDWARE=not INTERPRETED, num_warps=4,
    )  # fmt: skip
    return out


def gather_values(x: Tensor, index: Tensor) -> Tensor:
    """x[index] of two flat tensors, zero where the index is negative."""
    out = torch.empty(index.shape, dtype=x.dtype, device=x.device)
    _gather_values[(cdiv(index.numel(), 1024),)](x, index, out, index.numel(), SIZE=1024, num_warps=4)
    return out
