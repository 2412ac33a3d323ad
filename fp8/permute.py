"""Rows sorted by expert, each group padded to the GEMM's tile; and the sum back. Reference, then the public function.

Shapes: T tokens, k experts a token, E experts, R rows of the padded buffer, D features.
Row order inside a group is the order of (token, slot): deterministic, and the same under every layout.
An id of -1 is a slot whose expert lives on another rank: it gets no row and adds nothing to a sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from fp8.fused import ROW
from fp8.grouped_gemm import Groups, make_groups, padded_rows
from fp8.quantize import requantize_t, retile_t
from fp8.quantized import Quantized
from fp8.recipe import BLOCK, TENSORWISE, Spec


@dataclass(frozen=True, eq=False)
class Permutation:
    """Where each (token, slot) goes and where each row comes from; made on the device, no host synchronisation.

    Attributes:
        row_Tk: int64 row of each (token, slot); -1 where there is none.
        slot_R: int64 flat (token * k + slot) of each row; -1 for padding.
        groups: layout of the rows.
    """

    row_Tk: Tensor
    slot_R: Tensor
    groups: Groups


@dataclass(frozen=True, eq=False)
class BlockCounts:
    """How often each expert was chosen, by blocks of slots: the first half of building a permutation.

    Attributes:
        before_BE: int32 slots of expert e in blocks before b.
        counts_E: int32 slots of e.
        block_slots: slots of a block.
    """

    before_BE: Tensor
    counts_E: Tensor
    block_slots: int


def _kernels(t: Tensor) -> ModuleType | None:
    """The Triton kernels on a GPU, None for the reference."""
    if not t.is_cuda:
        return None
    from fp8 import permute_kernels  # Triton comes with CUDA builds of torch only

    return permute_kernels


def _index_kernels(ids_Tk: Tensor) -> ModuleType | None:
    """The Triton kernels on a GPU, None for the reference."""
    if not ids_Tk.is_cuda:
        return None
    from fp8 import index_kernels  # Triton comes with CUDA builds of torch only

    return index_kernels


def count_slots(ids_Tk: Tensor, num_experts: int, sums_E: Tensor | None = None) -> BlockCounts | None:
    """Counts of expert ids [T, k]; None where the reference builds permutations, which needs none.

    Args:
        sums_E: int64, gains the number of slots of each expert; no id is -1 then.
    """
    kernels = _index_kernels(ids_Tk)
    if kernels:
        return BlockCounts(*kernels.count(ids_Tk.contiguous(), num_experts, sums_E))
    if sums_E is not None:
        sums_E.scatter_add_(0, ids_Tk.flatten(), torch.ones_like(ids_Tk).flatten())
    return None


def build_permutation(
    ids_Tk: Tensor, num_experts: int, max_rows: int | None = None, counted: BlockCounts | None = None
) -> Permutation:
    """Permutation from expert ids [T, k] (-1: no expert here), without a host synchronisation.

    Args:
        max_rows: rows of the buffer, a multiple of 128, where the caller knows how many it needs; else the worst case.
        counted: `count_slots` of these ids, where somebody has them.
    """
    max_rows = padded_rows(ids_Tk.numel(), num_experts) if max_rows is None else max_rows
    kernels = _index_kernels(ids_Tk)
    if kernels is None:
        return build_permutation_ref(ids_Tk, num_experts, max_rows)
    c = counted or count_slots(ids_Tk, num_experts)
    return Permutation(*kernels.place(ids_Tk.contiguous(), c.before_BE, c.counts_E, c.block_slots, max_rows))


def build_permutation_ref(ids_Tk: Tensor, num_experts: int, max_rows: int) -> Permutation:
    """The definition: one stable sort."""
    flat = ids_Tk.flatten().long()
    flat = torch.where(flat < 0, num_experts, flat)  # slots without an expert sort behind the last one
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    groups = make_groups(counts[:-1], max_rows)
    order = torch.argsort(flat, stable=True)
    sorted_expert = flat[order]
    shift = torch.cat([groups.starts_E.long(), groups.starts_E.new_zeros(1).long()]) - (counts.cumsum(0) - counts)
    rows = torch.arange(flat.numel(), device=flat.device) + shift[sorted_expert]
    present = sorted_expert < num_experts
    slot_R = torch.full((groups.max_rows + 1,), -1, dtype=torch.int64, device=flat.device)  # absent slots: the last
    slot_R[torch.where(present, rows, groups.max_rows)] = order
    row = torch.empty_like(flat)
    row[order] = torch.where(present, rows, -1)
    return Permutation(row.view(ids_Tk.shape), slot_R[:-1], groups)


def _gather_rows(x: Tensor, index_R: Tensor, fill: float) -> Tensor:
    """x[index], with `fill` where the index is negative; FP8 moves as bytes."""
    pad = (index_R < 0).view(-1, *([1] * (x.dim() - 1)))
    raw = x.view(torch.uint8) if x.element_size() == 1 else x
    if raw.shape[0] == 0:  # nothing to read: every index is negative
        raw = raw.new_zeros(1, *raw.shape[1:])
    return raw[index_R.clamp(min=0)].masked_fill(pad, fill).view(x.dtype)


def gather_rows_ref(x: Quantized, index_R: Tensor) -> Quantized:
    """y[r] = x[index[r]], the definition."""
    data = _gather_rows(x.data, index_R, 0)
    if x.scale_inv is None or x.tile == TENSORWISE:
        return Quantized(data, x.scale_inv, x.tile)
    scale_inv = _gather_rows(x.scale_inv.t().contiguous().t(), index_R, 1.0)
    return Quantized(data, scale_inv.t().contiguous().t(), x.tile)


def permute(x: Quantized, perm: Permutation) -> Quantized:
    """[T, D] (row-tiled, tensorwise or unscaled) -> [R, D]: every token's row copied to its places.

    Padding rows are zero with scale 1. Rows past the last group are undefined on a GPU.
    """
    kernels = _kernels(x.data)
    if kernels and x.data.shape[1] * x.data.element_size() % 4 == 0 and x.tile in (None, TENSORWISE, (1, BLOCK)):
        return kernels.scatter_rows(x, perm.row_Tk, perm.slot_R, perm.groups.block_expert_B)
    k = perm.row_Tk.shape[1]
    return gather_rows_ref(x, torch.where(perm.slot_R >= 0, perm.slot_R // k, perm.slot_R))


def _turning_kernels(x: Quantized, spec: Spec | None = None) -> ModuleType | None:
    """The kernels that gather and turn in one pass (E4M3 in 1x128 tiles), None where that takes two."""
    if not x.data.is_cuda or spec not in (None, ROW):
        return None
    from fp8 import permute_turn_kernels  # Triton comes with CUDA builds of torch only

    return permute_turn_kernels if permute_turn_kernels.fits(x) else None


def permute_both(x: Quantized, perm: Permutation, spec: Spec) -> tuple[Quantized, Quantized]:
    """(rows, columns) of [T, D]: `permute(x)` [R, D] and, from the same read, its `retile_t` under `spec` [D, R]: what dgrad and
    wgrad want of dY."""
    kernels = _turning_kernels(x, spec)
    if kernels:
        return kernels.permute_both(x, perm.slot_R, perm.row_Tk.shape[1], perm.groups.block_expert_B)
    rows = permute(x, perm)
    return rows, retile_t(rows, spec, perm.groups.block_expert_B)


def permute_requantize_t(x: Quantized, perm: Permutation) -> Quantized:
    """[T, D] -> [D, R]: `requantize_t(permute(x))` in one pass, without the permuted rows: what wgrad wants of X."""
    kernels = _turning_kernels(x)
    if kernels:
        return kernels.permute_square(x, perm.slot_R, perm.row_Tk.shape[1], perm.groups.block_expert_B)
    return requantize_t(permute(x, perm), perm.groups.block_expert_B)


def permute_slots(w_Tk: Tensor, perm: Permutation) -> Tensor:
    """[T, k] -> [R]: a value of each (token, slot), zero on padding."""
    kernels = _kernels(w_Tk)
    flat = w_Tk.reshape(-1)
    return kernels.gather_values(flat, perm.slot_R) if kernels else _gather_rows(flat, perm.slot_R, 0.0)


def unpermute_slots(w_R: Tensor, perm: Permutation) -> Tensor:
    """[R] -> [T, k]; zero where a slot has no row."""
    kernels = _kernels(w_R)
    if kernels:
        return kernels.gather_values(w_R, perm.row_Tk)
    return _gather_rows(w_R, perm.row_Tk.flatten(), 0.0).view(perm.row_Tk.shape)


def sum_rows(y_RD: Tensor, row_Tk: Tensor) -> Tensor:
    """[R, D] -> [T, D]: the sum of rows row_Tk[t] (negative: none), in FP32 and slot order."""
    kernels = _kernels(y_RD)
    if kernels and y_RD.dtype in (torch.bfloat16, torch.float32):
        return kernels.sum_rows(y_RD, row_Tk)
    return sum_rows_ref(y_RD, row_Tk)


def sum_rows_ref(y_RD: Tensor, row_Tk: Tensor) -> Tensor:
    """The definition of `sum_rows`."""
    out = _gather_rows(y_RD, row_Tk[:, 0], 0.0).float()
    for slot in range(1, row_Tk.shape[1]):
        out += _gather_rows(y_RD, row_Tk[:, slot], 0.0).float()
    return out.to(y_RD.dtype)


def unpermute_sum(y_RD: Tensor, perm: Permutation) -> Tensor:
    """[R, D] -> [T, D]: the sum over a token's rows, in FP32 and slot order."""
    return sum_rows(y_RD, perm.row_Tk)
