"""Rows sorted by expert, each group padded to the GEMM's tile; and the sum back. Reference, then the public function.

Shapes: T tokens, k experts a token, E experts, R rows of the padded buffer, D features.
Row order inside a group is the order of (token, slot): deterministic, and the same under every layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8.grouped_gemm import Groups, make_groups, padded_rows
from fp8.quantized import Quantized


@dataclass(frozen=True, eq=False)
class Permutation:
    """Where each (token, slot) goes and where each row comes from; made on the device, no host synchronisation.

    Attributes:
        row_Tk: int64 row of each (token, slot).
        slot_R: int64 flat (token * k + slot) of each row; -1 for padding.
        groups: layout of the rows.
    """

    row_Tk: Tensor
    slot_R: Tensor
    groups: Groups


def build_permutation(ids_Tk: Tensor, num_experts: int) -> Permutation:
    """Permutation from expert ids [T, k]; one stable sort."""
    flat = ids_Tk.flatten().long()
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
    groups = make_groups(counts, padded_rows(flat.numel(), num_experts))
    order = torch.argsort(flat, stable=True)
    first = counts.cumsum(0) - counts
    sorted_expert = flat[order]
    rows = groups.starts_E.long()[sorted_expert] + torch.arange(flat.numel(), device=flat.device) - first[sorted_expert]
    slot_R = torch.full((groups.max_rows,), -1, dtype=torch.int64, device=flat.device)
    slot_R[rows] = order
    row = torch.empty_like(flat)
    row[order] = rows
    return Permutation(row.view(ids_Tk.shape), slot_R, groups)


def _gather_rows(x: Tensor, index_R: Tensor, fill: float) -> Tensor:
    """x[index], with `fill` where the index is negative; FP8 moves as bytes."""
    pad = (index_R < 0).view(-1, *([1] * (x.dim() - 1)))
    raw = x.view(torch.uint8) if x.element_size() == 1 else x
    return raw[index_R.clamp(min=0)].masked_fill(pad, fill).view(x.dtype)


def permute(x: Quantized, perm: Permutation) -> Quantized:
    """[T, D] -> [R, D]: every token's row copied to its k places; padding rows are zero with scale 1."""
    k = perm.row_Tk.shape[1]
    token_R = torch.where(perm.slot_R >= 0, perm.slot_R // k, perm.slot_R)
    data = _gather_rows(x.data, token_R, 0)
    if x.scale_inv is None or x.tile == (0, 0):
        return Quantized(data, x.scale_inv, x.tile)
    scale_inv = _gather_rows(x.scale_inv.t().contiguous().t(), token_R, 1.0)
    return Quantized(data, scale_inv.t().contiguous().t(), x.tile)


def permute_slots(w_Tk: Tensor, perm: Permutation) -> Tensor:
    """[T, k] -> [R]: a value of each (token, slot), zero on padding."""
    return _gather_rows(w_Tk.reshape(-1), perm.slot_R, 0.0)


def unpermute_slots(w_R: Tensor, perm: Permutation) -> Tensor:
    """[R] -> [T, k]."""
    return w_R[perm.row_Tk]


def unpermute_sum(y_RD: Tensor, perm: Permutation) -> Tensor:
    """[R, D] -> [T, D]: the sum over a token's k rows, in FP32 and slot order."""
    out = y_RD[perm.row_Tk[:, 0]].float()
    for slot in range(1, perm.row_Tk.shape[1]):
        out += y_RD[perm.row_Tk[:, slot]].float()
    return out.to(y_RD.dtype)
