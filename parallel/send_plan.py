"""Which tokens go to which rank, in which order, and what travels beside their rows. Reference, then the public function.

    count_tokens   ids -> how many tokens go to each rank, and how many rows that makes for each of its experts
    order_tokens   ids, weights -> the token of each row to send, and the slots (weights, local expert ids) that go with it
    own_slots      the slots of all tokens, for all ranks
    read_slots     the slots that came with rows

All on the device, without a host synchronisation; on a GPU one or two launches each (send_plan_kernels.py): between the counts'
arrival and the first byte on the wire the GPU waits for the host.

Shapes: T tokens here, k experts a token, E experts, e = E / n of a rank, n ranks, M rows sent, N received, X bytes of slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Counted:
    """What `count_tokens` found.

    Attributes:
        sent: int64 [n, 1 + e]: tokens for each rank, then rows for each of its experts.
        marks: what `order_tokens` needs of it: bool [T, n], whether a token goes to a rank; for the kernels int32 [blocks, n].
    """

    sent: Tensor
    marks: Tensor


@dataclass(frozen=True, eq=False)
class SendOrder:
    """Rows in (rank, token) order.

    Attributes:
        token_M: int64 token of each row. row_Tn: int64 row of token t's copy for each rank; -1 where it has none.
        slots_MX: uint8: k routing weights (fp32), k expert ids local to the receiver (int16; -1: on another rank), padding to X.
    """

    token_M: Tensor
    row_Tn: Tensor
    slots_MX: Tensor


def _kernels(t: Tensor) -> ModuleType | None:
    """The Triton kernels on a GPU, None for the reference."""
    if not t.is_cuda:
        return None
    from parallel import send_plan_kernels  # Triton comes with CUDA builds of torch only

    return send_plan_kernels


def slot_bytes(k: int) -> int:
    """X, a multiple of 4."""
    return 4 * k + 4 * -(-k // 2)


# ---------------------------------------------------------------- counts


def count_tokens_ref(ids_Tk: Tensor, num_experts: int, ranks: int) -> Counted:
    """The definition of `count_tokens`."""
    local = num_experts // ranks
    marks_Tn = (ids_Tk[:, :, None] // local == torch.arange(ranks, device=ids_Tk.device)).any(1)
    flat = ids_Tk.flatten()
    rows_E = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    rows_E.scatter_add_(0, flat, torch.ones_like(flat))
    return Counted(torch.cat([marks_Tn.sum(0)[:, None], rows_E.view(ranks, local)], dim=1), marks_Tn)


def count_tokens(ids_Tk: Tensor, num_experts: int, ranks: int) -> Counted:
    """How much goes where; ids [T, k] in [0, E)."""
    kernels = _kernels(ids_Tk)
    return kernels.count_tokens(ids_Tk, num_experts, ranks) if kernels else count_tokens_ref(ids_Tk, num_experts, ranks)


# ---------------------------------------------------------------- order


def order_ref(marks_Tn: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """(token_M, rank_M, row_Tn) from whether a token goes to a rank."""
    marks_nT = marks_Tn.t()
    place_nT = (marks_nT.flatten().cumsum(0) - 1).view(marks_nT.shape)
    target = torch.where(marks_nT, place_nT, num_rows)  # tokens that do not go write to the extra entry
    flat = torch.empty(num_rows + 1, dtype=torch.int64, device=marks_Tn.device)
    flat[target.flatten()] = torch.arange(target.numel(), device=flat.device)
    flat, tokens = flat[:-1], max(marks_Tn.shape[0], 1)
    return flat % tokens, flat // tokens, torch.where(marks_nT, place_nT, -1).t().contiguous()


def order_tokens_ref(ids_Tk: Tensor, weights_Tk: Tensor, counted: Counted, local: int, num_rows: int) -> SendOrder:
    """The definition of `order_tokens`."""
    token_M, rank_M, row_Tn = order_ref(counted.marks, num_rows)
    ids_Mk = ids_Tk[token_M] - (rank_M * local)[:, None]
    ids_Mk = torch.where((ids_Mk >= 0) & (ids_Mk < local), ids_Mk, -1).to(torch.int16)
    ids_Mk = F.pad(ids_Mk, (0, ids_Mk.shape[1] % 2), value=-1)
    weights_Mk = weights_Tk[token_M].float().contiguous()
    return SendOrder(token_M, row_Tn, torch.cat([weights_Mk.view(torch.uint8), ids_Mk.contiguous().view(torch.uint8)], dim=1))


def order_tokens(ids_Tk: Tensor, weights_Tk: Tensor, counted: Counted, local: int, num_rows: int) -> SendOrder:
    """The rows to send.

    Args:
        weights_Tk: routing weights; any value that expert e needs of (token, slot).
        local: e. num_rows: M, as the host has read it from the counts.
    """
    kernels = _kernels(ids_Tk)
    order = kernels.order_tokens if kernels else order_tokens_ref
    return order(ids_Tk, weights_Tk, counted, local, num_rows)


# ---------------------------------------------------------------- what came


def own_slots(ids_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
    """uint8 [T, X]: as in a SendOrder, the expert ids as they are."""
    tokens, k = ids_Tk.shape
    slots = torch.empty(tokens, slot_bytes(k), dtype=torch.uint8, device=ids_Tk.device)
    slots.view(torch.float32)[:, :k].copy_(weights_Tk)
    slots.view(torch.int16)[:, 2 * k : 3 * k].copy_(ids_Tk)
    if k % 2:
        slots.view(torch.int16)[:, 3 * k :].fill_(-1)
    return slots


def read_slots_ref(payload_NB: Tensor, start: int, k: int, first: int, local: int) -> tuple[Tensor, Tensor]:
    """The definition of `read_slots`."""
    end = start + 4 * k
    parts = payload_NB[:, start:end], payload_NB[:, end : start + slot_bytes(k)]
    weights, ids = (part.clone(memory_format=torch.contiguous_format) for part in parts)  # the payload's memory is used again
    ids_Nk = ids.view(torch.int16)[:, :k].long() - first
    return weights.view(torch.float32), torch.where((ids_Nk >= 0) & (ids_Nk < local), ids_Nk, -1)


def read_slots(payload_NB: Tensor, start: int, k: int, first: int, local: int) -> tuple[Tensor, Tensor]:
    """(weights [N, k] fp32, expert ids [N, k] int64) from byte `start` on of each packed row.

    Args:
        first, local: of the ids there, [first, first + local) are here; they count from `first`, others become -1.
    """
    kernels = _kernels(payload_NB)
    return (kernels.read_slots if kernels else read_slots_ref)(payload_NB, start, k, first, local)
