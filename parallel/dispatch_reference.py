"""Expert parallelism in plain torch: what parallel/dispatch.py must compute; a row for each (token, slot).

Shapes: T tokens here, k experts a token, E experts, n ranks, D features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.collectives import all_to_all
from parallel.mesh import Axis


@dataclass(frozen=True, eq=False)
class RefPlan:
    """What `combine_ref` needs: the order in which slots were sent, and rows of each (source rank, local expert)."""

    order: Tensor
    send: list[int]
    recv_ne: Tensor
    shape_Tk: torch.Size


def dispatch_ref(x_TD: Tensor, ids_Tk: Tensor, num_experts: int, axis: Axis) -> tuple[list[Tensor], RefPlan]:
    """Plain dispatch: a high-precision row for each (token, slot), sorted by expert, through `all_to_all`.

    Returns:
        ([rows, D] of each local expert in (source rank, token) order, the plan).
    """
    n, local, k = axis.size, num_experts // axis.size, ids_Tk.shape[1]
    order = torch.argsort(ids_Tk.flatten(), stable=True)
    sent_ne = torch.bincount(ids_Tk.flatten(), minlength=num_experts).view(n, local)
    recv_ne = all_to_all(sent_ne, axis, "ref", [1] * n, [1] * n)
    send = sent_ne.sum(1).tolist()
    rows = all_to_all(x_TD[order // k], axis, "ref", send, recv_ne.sum(1).tolist())
    parts = rows.split(recv_ne.flatten().tolist())  # (source rank, local expert) order
    return [torch.cat(parts[e::local]) for e in range(local)], RefPlan(order, send, recv_ne, ids_Tk.shape)


def combine_ref(y_e: list[Tensor], plan: RefPlan, axis: Axis) -> Tensor:
    """Rows of each local expert -> [T, D], summed over slots."""
    per_expert = [y.split(plan.recv_ne[:, e].tolist()) for e, y in enumerate(y_e)]
    rows = torch.cat([parts[source] for source in range(axis.size) for parts in per_expert])
    back = all_to_all(rows, axis, "ref", plan.recv_ne.sum(1).tolist(), plan.send)
    y_Tk = torch.empty_like(back)
    y_Tk[plan.order] = back
    return y_Tk.unflatten(0, plan.shape_Tk).sum(1)
