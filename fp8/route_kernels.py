"""Triton kernels behind backward of route.py, and behind router_gemm.py.

Shapes: T tokens, E experts (a power of two), k chosen.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8.device_math import round_bf16
from fp8.launch import cdiv, next_power_of_2
from fp8.quantize_kernels import INTERPRETED

ROWS, WARPS = 4, 2  # of a program of the backward


@triton.jit
def _store_parts(at, x, E: tl.constexpr, mask, HARDWARE: tl.constexpr):
    """x = high + middle + low, each BF16, as columns [high | middle | high | low] of E each."""
    high = round_bf16(x, HARDWARE)
    middle = round_bf16(x - high, HARDWARE)
    tl.store(at, high, mask=mask)
    tl.store(at + E, middle, mask=mask)
    tl.store(at + 2 * E, high, mask=mask)
    tl.store(at + 3 * E, round_bf16(x - high - middle, HARDWARE), mask=mask)


@triton.jit
def _route_backward(
    logits_ptr, ids_ptr, lse_ptr, dweights_ptr, dlse_ptr, plus_ptr, out_ptr, rows, factor,
    E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr, PLUS: tl.constexpr, PARTS: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """dlogits = dlse * softmax + [chosen] factor / S * (dw - sum dw s / S) * s (1 - s) [+ plus], with S the sum of chosen scores;
    with PARTS as `_store_parts` has it."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_ok = row < rows
    slot, expert = tl.arange(0, KP)[None, :], tl.arange(0, E)[None, :]
    wide, narrow = row.to(tl.int64)[:, None] * E, row.to(tl.int64)[:, None] * K + slot
    ok = row_ok[:, None] & (slot < K)
    logit = tl.load(logits_ptr + wide + expert, mask=row_ok[:, None], other=0.0)
    ids = tl.load(ids_ptr + narrow, mask=ok, other=0).to(tl.int32)
    dw = tl.load(dweights_ptr + narrow, mask=ok, other=0.0)
    chosen = tl.load(logits_ptr + wide + ids, mask=ok, other=0.0)
    lse = tl.load(lse_ptr + row, mask=row_ok, other=0.0)[:, None]
    dlse = tl.load(dlse_ptr + row, mask=row_ok, other=0.0)[:, None]
    score = tl.where(ok, 1.0 / (1.0 + tl.exp(-chosen)), 0.0)
    total = tl.sum(score, 1)[:, None] + 1e-20
    ds = factor / total * (dw - tl.sum(dw * score, 1)[:, None] / total) * score * (1.0 - score)
    of_chosen = dlse * tl.exp(chosen - lse) + ds
    grad = dlse * tl.exp(logit - lse)
    for j in tl.static_range(K):
        here = slot == j
        id_ = tl.sum(tl.where(here, ids, 0), 1)[:, None]
        grad = tl.where(expert == id_, tl.sum(tl.where(here, of_chosen, 0.0), 1)[:, None], grad)
    if PLUS:
        grad += tl.load(plus_ptr + wide + expert, mask=row_ok[:, None], other=0.0)
    if PARTS:
        _store_parts(out_ptr + 4 * wide + expert, grad, E, row_ok[:, None], HARDWARE)
    else:
        tl.store(out_ptr + wide + expert, grad, mask=row_ok[:, None])


@triton.jit
def _split_bf16(
    x_ptr, out_ptr, count, cols, row_stride, part_stride,
    P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr, SIZE: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Four copies of parts of x = high + middle + low, each BF16; P0..P3 say which part (0, 1, 2) goes where."""
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    x = tl.load(x_ptr + i, mask=i < count, other=0.0)
    high = round_bf16(x, HARDWARE)
    middle = round_bf16(x - high, HARDWARE)
    low = round_bf16(x - high - middle, HARDWARE)
    out = out_ptr + i // cols * row_stride + i % cols
    tl.store(out, high if P0 == 0 else middle if P0 == 1 else low, mask=i < count)
    tl.store(out + part_stride, high if P1 == 0 else middle if P1 == 1 else low, mask=i < count)
    tl.store(out + 2 * part_stride, high if P2 == 0 else middle if P2 == 1 else low, mask=i < count)
    tl.store(out + 3 * part_stride, high if P3 == 0 else middle if P3 == 1 else low, mask=i < count)


@triton.jit
def _sum_parts(x_ptr, out_ptr, count, cols, row_stride, part_stride, SIZE: tl.constexpr):
    """out = (part 0 + part 1) + part 2 of SIZE elements."""
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    ok = i < count
    x = x_ptr + i // cols * row_stride + i % cols
    total = tl.load(x, mask=ok, other=0.0) + tl.load(x + part_stride, mask=ok, other=0.0)
    tl.store(out_ptr + i, total + tl.load(x + 2 * part_stride, mask=ok, other=0.0), mask=ok)


# ---------------------------------------------------------------- launchers


def route_backward(
    logits_TE: Tensor, ids_Tk: Tensor, lse_T: Tensor, dweights_Tk: Tensor, dlse_T: Tensor, factor: float,
    plus_TE: Tensor | None = None, parts: bool = False,
) -> Tensor:  # fmt: skip
    """dlogits [T, E] fp32, plus `plus_TE`; with `parts` in BF16 [T, 4E], as `split_bf16` splits it into columns (0, 1, 0, 2)."""
    (rows, experts), k, logits = logits_TE.shape, ids_Tk.shape[1], logits_TE.contiguous()
    shape, dtype = ((rows, 4 * experts), torch.bfloat16) if parts else ((rows, experts), torch.float32)
    out = torch.empty(shape, dtype=dtype, device=logits_TE.device)
    _route_backward[(cdiv(rows, ROWS),)](
        logits, ids_Tk, lse_T, dweights_Tk.contiguous(), dlse_T.contiguous(),
        logits if plus_TE is None else plus_TE.contiguous(), out, rows, factor, E=experts, K=k, KP=next_power_of_2(k),
        ROWS=ROWS, PLUS=plus_TE is not None, PARTS=parts, HARDWARE=not INTERPRETED, num_warps=WARPS,
        enable_fp_fusion=False,  # the same bits in every form
    )  # fmt: skip
    return out


def split_bf16(x_RC: Tensor, parts: tuple[int, int, int, int], along_rows: bool) -> Tensor:
    """fp32 [R, C] -> BF16 [4R, C] or [R, 4C]: the named parts (0 high, 1 middle, 2 low) stacked along rows or columns.

    high + middle + low = x to FP32's last bit (8 significant bits each).
    """
    x, (rows, cols) = x_RC.contiguous(), x_RC.shape
    out = torch.empty((4 * rows, cols) if along_rows else (rows, 4 * cols), dtype=torch.bfloat16, device=x.device)
    row_stride, part_stride = (cols, rows * cols) if along_rows else (4 * cols, cols)
    _split_bf16[(cdiv(x.numel(), 2048),)](
        x, out, x.numel(), cols, row_stride, part_stride, *parts, SIZE=2048, HARDWARE=not INTERPRETED, num_warps=4
    )
    return out


def sum_parts(x: Tensor, along_rows: bool) -> Tensor:
    """fp32 [3R, C] -> [R, C], or [R, 3C] -> [R, C]: the sum of three parts, smallest first as the callers order them."""
    rows, cols = (x.shape[0] // 3, x.shape[1]) if along_rows else (x.shape[0], x.shape[1] // 3)
    out = torch.empty((rows, cols), dtype=torch.float32, device=x.device)
    row_stride, part_stride = (cols, rows * cols) if along_rows else (3 * cols, cols)
    _sum_parts[(cdiv(out.numel(), 2048),)](x, out, out.numel(), cols, row_stride, part_stride, SIZE=2048, num_warps=4)
    return out
