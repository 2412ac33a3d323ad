"""Triton kernels behind send_plan.py: integers only, so the interpreter is exact too.

Shapes: as there; B blocks of TOKENS tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8.launch import cdiv, next_power_of_2
from parallel.send_plan import Counted, SendOrder, slot_bytes


@triton.jit
def _goes(ids_ptr, token, tokens, K: tl.constexpr, LOCAL: tl.constexpr, RANKS: tl.constexpr):
    """int32 [TOKENS, RANKS]: 1 where a token has an expert on a rank."""
    rank = tl.arange(0, RANKS)
    goes = tl.zeros((token.shape[0], RANKS), tl.int32)
    for slot in tl.static_range(K):
        expert = tl.load(ids_ptr + token * K + slot, mask=token < tokens, other=-1).to(tl.int32)
        owner = tl.where(expert < 0, -1, expert // LOCAL)
        goes |= (owner[:, None] == rank[None, :]).to(tl.int32)
    return goes


@triton.jit(do_not_specialize=["tokens"])
def _count_tokens(
    ids_ptr, sent_ptr, marks_ptr, tokens, ranks, experts,
    K: tl.constexpr, LOCAL: tl.constexpr, RANKS: tl.constexpr, EXPERTS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """marks[b, r] = tokens of block b that go to rank r; sent[r, 0] and sent[r, 1 + e] add up over blocks."""
    b = tl.program_id(0)
    token = b * TOKENS + tl.arange(0, TOKENS)
    rank, expert = tl.arange(0, RANKS), tl.arange(0, EXPERTS)
    found = tl.sum(_goes(ids_ptr, token, tokens, K, LOCAL, RANKS), 0)
    tl.store(marks_ptr + b * ranks + rank, found, mask=rank < ranks)
    tl.atomic_add(sent_ptr + rank * (LOCAL + 1), found.to(tl.int64), mask=rank < ranks)
    rows = tl.zeros((EXPERTS,), tl.int32)
    for slot in tl.static_range(K):  # past the last token: the bin behind the last expert
        chosen = tl.load(ids_ptr + token * K + slot, mask=token < tokens, other=experts).to(tl.int32)
        rows += tl.histogram(chosen, EXPERTS)
    place = expert // LOCAL * (LOCAL + 1) + 1 + expert % LOCAL
    tl.atomic_add(sent_ptr + place, rows.to(tl.int64), mask=(expert < experts) & (rows > 0))


@triton.jit(do_not_specialize=["tokens"])
def _order_tokens(
    ids_ptr, weights_ptr, sent_ptr, marks_ptr, token_ptr, row_ptr, wout_ptr, iout_ptr, tokens, ranks, blocks,
    K: tl.constexpr, LOCAL: tl.constexpr, RANKS: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The rows of TOKENS tokens: behind those for earlier ranks, and behind those of earlier blocks for the same rank."""
    b = tl.program_id(0)
    rank = tl.arange(0, RANKS)
    total = tl.load(sent_ptr + rank * (LOCAL + 1), mask=rank < ranks, other=0).to(tl.int32)
    before = tl.cumsum(total, 0) - total
    for first in range(0, b, BLOCKS):
        other = first + tl.arange(0, BLOCKS)
        ok = (other < b)[:, None] & (rank < ranks)[None, :]
        before += tl.sum(tl.load(marks_ptr + other[:, None] * ranks + rank[None, :], mask=ok, other=0), 0)
    token = b * TOKENS + tl.arange(0, TOKENS)
    goes = _goes(ids_ptr, token, tokens, K, LOCAL, RANKS)
    row = before[None, :] + tl.cumsum(goes, 0) - 1
    there = goes > 0
    at = row_ptr + token.to(tl.int64)[:, None] * ranks + rank[None, :]
    tl.store(at, tl.where(there, row, -1).to(tl.int64), mask=(token < tokens)[:, None] & (rank < ranks)[None, :])
    tl.store(token_ptr + row, tl.zeros((TOKENS, RANKS), tl.int64) + token.to(tl.int64)[:, None], mask=there)
    wide = row.to(tl.int64)
    for slot in tl.static_range(K):
        w = tl.load(weights_ptr + token * K + slot, mask=token < tokens, other=0.0)
        tl.store(wout_ptr + wide * WORDS + slot, tl.zeros((TOKENS, RANKS), tl.float32) + w[:, None], mask=there)
        expert = tl.load(ids_ptr + token * K + slot, mask=token < tokens, other=-1).to(tl.int32)
        mine = (expert[:, None] >= rank[None, :] * LOCAL) & (expert[:, None] < (rank[None, :] + 1) * LOCAL)
        value = tl.where(mine, expert[:, None] - rank[None, :] * LOCAL, -1)
        tl.store(iout_ptr + wide * (2 * WORDS) + 2 * K + slot, value.to(tl.int16), mask=there)
    if K % 2 == 1:
        tl.store(iout_ptr + wide * (2 * WORDS) + 3 * K, tl.full((TOKENS, RANKS), -1, tl.int16), mask=there)


@triton.jit(do_not_specialize=["count"])
def _read_slots(
    w_ptr, i_ptr, weights_ptr, ids_ptr, count, start, first, local, K: tl.constexpr, WORDS: tl.constexpr, SIZE: tl.constexpr
):
    """weights[i], ids[i] of slot i = row * K + place; packed rows have WORDS words, slots from word `start` on."""
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    ok = i < count
    row, slot = (i // K).to(tl.int64), i % K
    tl.store(weights_ptr + i, tl.load(w_ptr + row * WORDS + start + slot, mask=ok), mask=ok)
    expert = tl.load(i_ptr + row * (2 * WORDS) + 2 * (start + K) + slot, mask=ok).to(tl.int32) - first
    tl.store(ids_ptr + i, tl.where((expert >= 0) & (expert < local), expert, -1).to(tl.int64), mask=ok)


def _block(ranks: int) -> tuple[int, int]:
    """(TOKENS, RANKS): about 2048 places a program, which registers hold."""
    padded = next_power_of_2(max(ranks, 2))
    return max(16, min(128, 2048 // padded)), padded


def count_tokens(ids_Tk: Tensor, num_experts: int, ranks: int) -> Counted:
    """As send_plan.count_tokens_ref; `marks` are counts of blocks."""
    (tokens, k), local = ids_Tk.shape, num_experts // ranks
    size, padded = _block(ranks)
    blocks = cdiv(tokens, size)
    sent = torch.zeros(ranks, 1 + local, dtype=torch.int64, device=ids_Tk.device)
    marks = torch.empty(blocks, ranks, dtype=torch.int32, device=ids_Tk.device)
    if tokens:
        _count_tokens[(blocks,)](
            ids_Tk.contiguous(), sent, marks, tokens, ranks, num_experts,
            K=k, LOCAL=local, RANKS=padded, EXPERTS=next_power_of_2(num_experts + 1), TOKENS=size, num_warps=4,
        )  # fmt: skip
    return Counted(sent, marks)


def order_tokens(ids_Tk: Tensor, weights_Tk: Tensor, counted: Counted, local: int, num_rows: int) -> SendOrder:
    """As send_plan.order_tokens_ref."""
    (tokens, k), ranks, device = ids_Tk.shape, counted.sent.shape[0], ids_Tk.device
    size, padded = _block(ranks)
    token = torch.empty(num_rows, dtype=torch.int64, device=device)
    row = torch.empty(tokens, ranks, dtype=torch.int64, device=device)
    slots = torch.empty(num_rows, slot_bytes(k), dtype=torch.uint8, device=device)
    if tokens:
        blocks = cdiv(tokens, size)
        _order_tokens[(blocks,)](
            ids_Tk.contiguous(), weights_Tk.float().contiguous(), counted.sent, counted.marks, token, row,
            slots.view(torch.float32), slots.view(torch.int16), tokens, ranks, blocks,
            K=k, LOCAL=local, RANKS=padded, TOKENS=size, BLOCKS=max(16, 2048 // padded), WORDS=slot_bytes(k) // 4, num_warps=4,
        )  # fmt: skip
    return SendOrder(token, row, slots)


def read_slots(payload_NB: Tensor, start: int, k: int, first: int, local: int) -> tuple[Tensor, Tensor]:
    """As send_plan.read_slots_ref; rows and `start` in whole words."""
    rows, device = payload_NB.shape[0], payload_NB.device
    weights = torch.empty(rows, k, dtype=torch.float32, device=device)
    ids = torch.empty(rows, k, dtype=torch.int64, device=device)
    if rows:
        words = payload_NB.shape[1] // 4
        _read_slots[(cdiv(rows * k, 1024),)](
            payload_NB.view(torch.float32), payload_NB.view(torch.int16), weights, ids, rows * k, start // 4, first, local,
            K=k, WORDS=words, SIZE=1024, num_warps=4,
        )  # fmt: skip
    return weights, ids
