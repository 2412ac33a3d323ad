"""Triton kernels behind cross_entropy.py: two reads of the BF16 logits, the second writes dlogits in FP8; no FP32 [C, V] tensor.

Shapes: C tokens of a chunk (a multiple of 128 is not needed), V vocabulary of this rank.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8.block_forms import UPPER, high_half, low_half, pack_bf16, store_column_form, store_row_form
from fp8.device_math import LOG2_E, exp2
from fp8.launch import cdiv, in_words, next_power_of_2
from fp8.quantize_kernels import BLOCK, INTERPRETED, _empty_fp8, _row_scales
from fp8.quantized import Quantized

STATISTICS_COLS, STATISTICS_WARPS = 2048, 8
GRADIENT_WARPS = 4
MINUS_INF = tl.constexpr(-35747867511423104)  # four of BF16: past the last column no probability may count for a scale
NO_LABEL = -1  # column of a row whose label is ignored or lives on another rank


@triton.jit
def _softmax_statistics(x_ptr, label_ptr, peak_ptr, total_ptr, picked_ptr, cols, COLS: tl.constexpr, HARDWARE: tl.constexpr):
    """Of one row: max, sum of exp(x - max), and the logit at `label` (0 where it is negative). One read."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * cols
    peak = tl.full((COLS,), float("-inf"), tl.float32)
    total = tl.zeros((COLS,), tl.float32)
    for start in range(0, cols, 4 * COLS):  # four tiles a round: five exponentials for four logits, and four loads in flight
        col = start + tl.arange(0, COLS)
        x0 = tl.load(x_ptr + col, mask=col < cols, other=float("-inf")).to(tl.float32)
        x1 = tl.load(x_ptr + col + COLS, mask=col + COLS < cols, other=float("-inf")).to(tl.float32)
        x2 = tl.load(x_ptr + col + 2 * COLS, mask=col + 2 * COLS < cols, other=float("-inf")).to(tl.float32)
        x3 = tl.load(x_ptr + col + 3 * COLS, mask=col + 3 * COLS < cols, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(tl.maximum(peak, tl.maximum(x0, x1)), tl.maximum(x2, x3))
        base = tl.where(higher == float("-inf"), 0.0, higher * LOG2_E)
        total *= exp2(peak * LOG2_E - base, HARDWARE)
        total += exp2(x0 * LOG2_E - base, HARDWARE) + exp2(x1 * LOG2_E - base, HARDWARE)
        total += exp2(x2 * LOG2_E - base, HARDWARE) + exp2(x3 * LOG2_E - base, HARDWARE)
        peak = higher
    top = tl.max(peak, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(peak_ptr + row, top)
    tl.store(total_ptr + row, tl.sum(total * tl.exp(peak - base), 0))
    label = tl.load(label_ptr + row)
    picked = tl.load(x_ptr + tl.maximum(label, 0)).to(tl.float32)
    tl.store(picked_ptr + row, tl.where(label >= 0, picked, 0.0))


@triton.jit
def _with_label(lo, hi, at_label, label, word, HARDWARE: tl.constexpr):
    """The pairs with the value at_label [32] in column `label` [32] of each row, if it is among them."""
    half = pack_bf16(at_label, at_label, HARDWARE)[:, None]
    offset = label[:, None] - 4 * word[None, :]
    lo = tl.where(offset == 0, (lo & UPPER) | (half & 0xFFFF), tl.where(offset == 1, (lo & 0xFFFF) | (half & UPPER), lo))
    hi = tl.where(offset == 2, (hi & UPPER) | (half & 0xFFFF), tl.where(offset == 3, (hi & 0xFFFF) | (half & UPPER), hi))
    return lo, hi


@triton.jit
def _probability(x, lse, factor, HARDWARE: tl.constexpr):
    """factor * softmax of a logit. x - lse first: scaled and rounded apart, they would cost p - 1 of a confident row 1e-6."""
    return exp2((x - lse) * LOG2_E, HARDWARE) * factor


@triton.jit
def _pair_of_probabilities(pair, base, factor, HARDWARE: tl.constexpr):
    """The same of two logits, rounded to BF16: base = -lse / ln 2 apart is exact enough away from the label."""
    first, second = tl.fma(low_half(pair), LOG2_E, base), tl.fma(high_half(pair), LOG2_E, base)
    return pack_bf16(exp2(first, HARDWARE) * factor, exp2(second, HARDWARE) * factor, HARDWARE)


@triton.jit
def _gradient_rows(x_ptr, lse_ptr, factor_ptr, scale, row, rows, words, word, FULL: tl.constexpr, HARDWARE: tl.constexpr):
    """Pairs of scale * factor * softmax of four neighbouring columns (one word) of 32 rows x 32 words."""
    at, ok = x_ptr + row.to(tl.int64)[:, None] * words + word[None, :], row < rows
    if FULL:  # evict-first: the logits are not read again, and what is written should stay in L2 until its lines are whole
        x = tl.load(at, eviction_policy="evict_first")
    else:
        x = tl.load(at, mask=ok[:, None] & (word < words)[None, :], other=MINUS_INF, eviction_policy="evict_first")
    base = (tl.load(lse_ptr + row, mask=ok, other=0.0) * -LOG2_E)[:, None]
    factor = (tl.load(factor_ptr + row, mask=ok, other=0.0) * scale)[:, None]
    low, high = x.to(tl.int32), (x >> 32).to(tl.int32)
    return _pair_of_probabilities(low, base, factor, HARDWARE), _pair_of_probabilities(high, base, factor, HARDWARE)


@triton.jit
def _label_rows(lse_ptr, factor_ptr, label_ptr, picked_ptr, scale, row, rows, HARDWARE: tl.constexpr):
    """(label, gradient at the label) of 32 rows."""
    ok = row < rows
    lse, factor = tl.load(lse_ptr + row, mask=ok, other=0.0), tl.load(factor_ptr + row, mask=ok, other=0.0) * scale
    p = _probability(tl.load(picked_ptr + row, mask=ok, other=0.0), lse, factor, HARDWARE)
    return tl.load(label_ptr + row, mask=ok, other=-1).to(tl.int32), p - scale


@triton.jit
def _softmax_gradient(
    x_ptr, lse_ptr, factor_ptr, label_ptr, picked_ptr, scale_ptr, q_ptr, si_ptr, qt_ptr, sit_ptr, rows, cols, words_per_row_t,
    FULL: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One 128x128 block of scale * (factor * softmax - onehot), in row form and transposed form (tiles along rows).

    x as int64 words of four BF16, q and qt as int32 words of four codes. Rows past the end are zero in the transposed form. Few
    blocks hold a label, so its column is put in afterwards, in those alone.
    """
    rb, cb = tl.program_id(0), tl.program_id(1)
    word, row = cb * 32 + tl.arange(0, 32), rb * 128 + 4 * tl.arange(0, 32)
    words, scale = cols // 4, tl.load(scale_ptr)
    lo0, hi0 = _gradient_rows(x_ptr, lse_ptr, factor_ptr, scale, row, rows, words, word, FULL, HARDWARE)
    lo1, hi1 = _gradient_rows(x_ptr, lse_ptr, factor_ptr, scale, row + 1, rows, words, word, FULL, HARDWARE)
    lo2, hi2 = _gradient_rows(x_ptr, lse_ptr, factor_ptr, scale, row + 2, rows, words, word, FULL, HARDWARE)
    lo3, hi3 = _gradient_rows(x_ptr, lse_ptr, factor_ptr, scale, row + 3, rows, words, word, FULL, HARDWARE)
    every = rb * 128 + tl.arange(0, 128)
    column = tl.load(label_ptr + every, mask=every < rows, other=-1) - cb * 128
    if tl.max(((column >= 0) & (column < 128)).to(tl.int32), 0) > 0:
        label, value = _label_rows(lse_ptr, factor_ptr, label_ptr, picked_ptr, scale, row, rows, HARDWARE)
        lo0, hi0 = _with_label(lo0, hi0, value, label, word, HARDWARE)
        label, value = _label_rows(lse_ptr, factor_ptr, label_ptr, picked_ptr, scale, row + 1, rows, HARDWARE)
        lo1, hi1 = _with_label(lo1, hi1, value, label, word, HARDWARE)
        label, value = _label_rows(lse_ptr, factor_ptr, label_ptr, picked_ptr, scale, row + 2, rows, HARDWARE)
        lo2, hi2 = _with_label(lo2, hi2, value, label, word, HARDWARE)
        label, value = _label_rows(lse_ptr, factor_ptr, label_ptr, picked_ptr, scale, row + 3, rows, HARDWARE)
        lo3, hi3 = _with_label(lo3, hi3, value, label, word, HARDWARE)
    store_row_form(q_ptr, si_ptr + cb.to(tl.int64) * rows, rb, rows, words, word,
                   lo0, hi0, lo1, hi1, lo2, hi2, lo3, hi3, FULL, HARDWARE)  # fmt: skip
    store_column_form(qt_ptr, sit_ptr + rb.to(tl.int64) * cols, cb * 128, rb, cols, words_per_row_t,
                      lo0, hi0, lo1, hi1, lo2, hi2, lo3, hi3, 32, FULL, HARDWARE)  # fmt: skip


@triton.jit
def _softmax_gradient_plain(x_ptr, lse_ptr, factor_ptr, label_ptr, scale_ptr, cols, COLS: tl.constexpr):
    """The unquantised recipes: logits of part of a row become their own gradient, in place."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    scale = tl.load(scale_ptr)
    x = tl.load(x_ptr + row * cols + col, mask=col < cols, other=0.0).to(tl.float32)
    onehot = tl.where(col == tl.load(label_ptr + row), scale, 0.0)
    grad = tl.exp(x - tl.load(lse_ptr + row)) * (tl.load(factor_ptr + row) * scale) - onehot
    tl.store(x_ptr + row * cols + col, grad, mask=col < cols)


# ---------------------------------------------------------------- launchers


def statistics(logits_CV: Tensor, label_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(max, sum exp(x - max), logit at label) of each row, fp32 [C]; label: column of this rank or `NO_LABEL`."""
    rows, cols = logits_CV.shape
    peak, total, picked = torch.empty((3, rows), dtype=torch.float32, device=logits_CV.device)
    _softmax_statistics[(rows,)](
        logits_CV, label_C, peak, total, picked, cols,
        COLS=min(STATISTICS_COLS, next_power_of_2(cols)), HARDWARE=not INTERPRETED, num_warps=STATISTICS_WARPS,
    )  # fmt: skip
    return peak, total, picked


def gradient(
    logits_CV: Tensor, lse_C: Tensor, factor_C: Tensor, label_C: Tensor, picked_C: Tensor, scale: Tensor
) -> tuple[Quantized, Quantized]:
    """scale * (factor * softmax - onehot(label)) of BF16 logits: ([C, V], transposed [V, Cp] tiled along rows), E4M3.

    factor is zero (and label `NO_LABEL`) where the row is ignored; picked is the logit at the label, from `statistics`.
    """
    rows, cols = logits_CV.shape
    assert cols % 4 == 0, f"vocabulary {cols} is not a multiple of 4"
    rows_p = cdiv(rows, BLOCK) * BLOCK
    q, si = _empty_fp8(rows, cols, like=logits_CV), _row_scales(rows, cols, logits_CV)
    q_t = _empty_fp8(cols, rows_p, like=logits_CV)
    si_t = torch.empty((rows_p // BLOCK, cols), dtype=torch.float32, device=logits_CV.device)
    _softmax_gradient[(rows_p // BLOCK, cdiv(cols, BLOCK))](
        in_words(logits_CV, torch.int64), lse_C, factor_C, label_C, picked_C, scale, q.view(torch.int32), si, q_t.view(torch.int32),
        si_t, rows, cols, rows_p // 4, FULL=rows % BLOCK == 0 and cols % BLOCK == 0, HARDWARE=not INTERPRETED,
        num_warps=GRADIENT_WARPS,
    )  # fmt: skip
    return Quantized(q, si, (1, BLOCK)), Quantized(q_t, si_t.t(), (1, BLOCK))


def gradient_in_place(logits_CV: Tensor, lse_C: Tensor, factor_C: Tensor, label_C: Tensor, scale: Tensor) -> Tensor:
    """As `gradient`, unquantised, over the logits themselves."""
    rows, cols = logits_CV.shape
    block = min(STATISTICS_COLS, next_power_of_2(cols))
    grid = (rows, cdiv(cols, block))
    _softmax_gradient_plain[grid](logits_CV, lse_C, factor_C, label_C, scale, cols, COLS=block, num_warps=8)
    return logits_CV
