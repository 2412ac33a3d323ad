"""Triton kernels behind permute.build_permutation: where every (token, slot) goes, without a sort and without the host.

Three launches. Shapes: T tokens, k slots a token, N = T * k slots in B blocks, E experts, R rows of the buffer.

    hist[b, e]      slots of block b that chose expert e
    before[b, e]    those in earlier blocks, in hist's place: one scan, which also adds to the router's counts
    row[slot]       start of its group + slots of its expert in earlier blocks + those before it in its own
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8.grouped_gemm import Groups
from fp8.launch import cdiv, next_power_of_2

SLOTS = 128  # of a block: their ranks are found by comparing all pairs
SCAN_EXPERTS, SCAN_BLOCKS = 8, 256  # of a step of a program that scans
ROW_BLOCKS = 2  # blocks of 128 rows that a program lays out at a time


@triton.jit
def _expert_ids(ids_ptr, slot, count, experts):
    """Expert of each slot, `experts` where there is none (or no slot)."""
    e = tl.load(ids_ptr + slot, mask=slot < count, other=-1).to(tl.int32)
    return tl.where(e < 0, experts, e)


@triton.jit
def _count_slots(ids_ptr, hist_ptr, count, experts, SLOTS: tl.constexpr, EXPERTS: tl.constexpr):
    """hist[b, e]."""
    b = tl.program_id(0)
    e = _expert_ids(ids_ptr, b * SLOTS + tl.arange(0, SLOTS), count, experts)
    bins = tl.arange(0, EXPERTS)
    tl.store(hist_ptr + b.to(tl.int64) * experts + bins, tl.histogram(e, EXPERTS), mask=bins < experts)


@triton.jit
def _scan_blocks(
    hist_ptr, counts_ptr, sums_ptr, blocks, experts, BLOCKS: tl.constexpr, EXPERTS: tl.constexpr, ADD: tl.constexpr
):
    """hist[b, e] becomes before[b, e]; counts[e] their total, which with ADD int64 sums[e] gain."""
    e = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    before = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, blocks, BLOCKS):
        b = start + tl.arange(0, BLOCKS)
        at = hist_ptr + b.to(tl.int64)[:, None] * experts + e[None, :]
        ok = (b < blocks)[:, None] & (e < experts)[None, :]
        hist = tl.load(at, mask=ok, other=0)
        tl.store(at, tl.cumsum(hist, 0) - hist + before[None, :], mask=ok)
        before += tl.sum(hist, 0)
    tl.store(counts_ptr + e, before, mask=e < experts)
    if ADD:
        tl.store(sums_ptr + e, tl.load(sums_ptr + e, mask=e < experts) + before, mask=e < experts)


@triton.jit
def _lay_out(
    pid, programs, count, starts, ends, order_ptr, block_expert_ptr, slot_ptr, experts, row_blocks,
    EXPERTS: tl.constexpr, ROW_BLOCKS: tl.constexpr,
):  # fmt: skip
    """A program's share of: experts by falling count (ties by id), the expert of each 128-row block, -1 where no slot is."""
    e = tl.arange(0, EXPERTS)
    known = e < experts
    for one in range(pid, experts, programs):
        own = tl.sum(tl.where(e == one, count, 0), 0)
        ahead = known & ((count > own) | ((count == own) & (e < one)))
        tl.store(order_ptr + tl.sum(ahead.to(tl.int32), 0), one)
    for first in range(pid * ROW_BLOCKS, row_blocks, programs * ROW_BLOCKS):
        b = first + tl.arange(0, ROW_BLOCKS)
        finished = (ends[None, :] <= (b * 128)[:, None]) & known[None, :]
        expert = tl.sum(finished.to(tl.int32), 1)
        filled = tl.sum(tl.where(e[None, :] == expert[:, None], (starts + count)[None, :], 0), 1)
        tl.store(block_expert_ptr + b, tl.where(expert < experts, expert, -1), mask=b < row_blocks)
        row = b.to(tl.int64)[:, None] * 128 + tl.arange(0, 128)[None, :]
        empty = (b < row_blocks)[:, None] & (row >= filled[:, None])
        tl.store(slot_ptr + row, tl.full((ROW_BLOCKS, 128), -1, tl.int64), mask=empty)


@triton.jit
def _place_slots(
    ids_ptr, before_ptr, counts_ptr, starts_ptr, ends_ptr, order_ptr, block_expert_ptr, row_ptr, slot_ptr,
    slots, experts, block_slots, row_blocks, SLOTS: tl.constexpr, EXPERTS: tl.constexpr, ROW_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Rows of one block of slots and the inverse, and a share of what describes the groups."""
    pid, e = tl.program_id(0), tl.arange(0, EXPERTS)
    i, j = tl.arange(0, SLOTS), tl.arange(0, SLOTS)
    first = pid * block_slots
    end = tl.minimum(first + block_slots, slots)
    mine, other = _expert_ids(ids_ptr, first + i, end, experts), _expert_ids(ids_ptr, first + j, end, experts)
    present = mine < experts
    row = tl.load(before_ptr + pid.to(tl.int64) * experts + mine, mask=present, other=0)
    count = tl.load(counts_ptr + e, mask=e < experts, other=0)
    row += tl.sum(((mine[None, :] == other[:, None]) & (j[:, None] < i[None, :])).to(tl.int32), 0)  # over what a thread holds
    padded = (count + 127) // 128 * 128
    ends = tl.cumsum(padded, 0)
    starts = ends - padded
    row += tl.gather(starts, tl.minimum(mine, EXPERTS - 1), 0)
    tl.store(row_ptr + first + i, tl.where(present, row, -1).to(tl.int64), mask=first + i < end)
    tl.store(slot_ptr + row, (first + i).to(tl.int64), mask=present)
    if pid == 0:
        tl.store(starts_ptr + e, starts, mask=e < experts)
        tl.store(ends_ptr + e, ends, mask=e < experts)
    _lay_out(
        pid, tl.num_programs(0), count, starts, ends, order_ptr, block_expert_ptr, slot_ptr, experts, row_blocks,
        EXPERTS, ROW_BLOCKS,
    )  # fmt: skip


# ---------------------------------------------------------------- launchers


def count(ids_Tk: Tensor, num_experts: int, sums_E: Tensor | None = None) -> tuple[Tensor, Tensor, int]:
    """What `permute.BlockCounts` holds; int64 `sums_E` gains the counts."""
    blocks = cdiv(ids_Tk.numel(), SLOTS)
    hist = torch.empty((blocks, num_experts), dtype=torch.int32, device=ids_Tk.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=ids_Tk.device)
    bins = next_power_of_2(num_experts + 1)
    _count_slots[(blocks,)](ids_Tk, hist, ids_Tk.numel(), num_experts, SLOTS=SLOTS, EXPERTS=bins, num_warps=4)
    _scan_blocks[(cdiv(num_experts, SCAN_EXPERTS),)](
        hist, counts, counts if sums_E is None else sums_E, blocks, num_experts, BLOCKS=SCAN_BLOCKS, EXPERTS=SCAN_EXPERTS,
        ADD=sums_E is not None, num_warps=4,
    )  # fmt: skip
    return hist, counts, SLOTS


def place(
    ids_Tk: Tensor, before_BE: Tensor, counts_E: Tensor, block_slots: int, max_rows: int
) -> tuple[Tensor, Tensor, Groups]:
    """What `permute.Permutation` holds."""
    experts, row_blocks, device = counts_E.numel(), max_rows // 128, ids_Tk.device
    starts, ends, order = torch.empty((3, experts), dtype=torch.int32, device=device)
    block_expert = torch.empty(row_blocks, dtype=torch.int32, device=device)
    row = torch.empty(ids_Tk.shape, dtype=torch.int64, device=device)
    slot = torch.empty(max_rows, dtype=torch.int64, device=device)
    programs = max(before_BE.shape[0], cdiv(row_blocks, 4 * ROW_BLOCKS))  # few slots or none have as many groups
    _place_slots[(programs,)](
        ids_Tk, before_BE, counts_E, starts, ends, order, block_expert, row, slot, ids_Tk.numel(), experts, block_slots, row_blocks,
        SLOTS=next_power_of_2(block_slots), EXPERTS=next_power_of_2(experts), ROW_BLOCKS=ROW_BLOCKS, num_warps=4,
    )  # fmt: skip
    return row, slot, Groups(counts_E, starts, ends, block_expert, max_rows, order)
