"""Expert parallelism: tokens travel to the ranks that own their experts, and the results back.

A token goes once to each rank that owns one of its experts, however many it owns there; that rank copies the row to
its experts and sums their outputs before sending one row back. So a token costs at most min(k, n) rows each way.

    dispatch          x_q [T, D] + weights [T, k]  ->  rows [R, D] grouped by local expert, weights [R], and the plan
    dispatch_rows     the same trip for other rows: dY in backward, x again under recompute
    combine_rows      y [R, D] -> [T, D], summed over each token's experts: the output, and dX in backward
    combine_slots     dweights [R] -> [T, k]

Rows of one expert are in (source rank, token) order. Dropless: buffers are sized from counts that the ranks exchange,
which is the one host synchronisation of a layer, started by `start_plan` and waited for in `dispatch`. With ep = 1
there is none.

Shapes: T tokens here, k experts a token, E experts, e = E / n of this rank, n ranks, M rows sent, N rows received, R
rows of the padded buffer, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from fp8.grouped_gemm import padded_rows
from fp8.permute import (
    Permutation,
    build_permutation,
    permute,
    permute_slots,
    sum_rows,
    unpermute_slots,
    unpermute_sum,
)
from fp8.quantize import quantize
from fp8.quantized import Quantized
from fp8.recipe import BLOCK
from parallel.collectives import all_to_all, start_all_to_all, start_exchange
from parallel.mesh import Axis
from parallel.payload import RowFormat, extra_of, pack, unpack
from parallel.traffic import FORMAT_NAMES

DISPATCH, COMBINE = "dispatch", "combine"


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """How tokens went, so that results find their way back; what `dispatch` returns.

    Attributes:
        perm: from the rows received here to the rows of this rank's experts. `perm.groups` is what the grouped GEMMs
        take. send, recv: tokens to and from each rank; empty on a solo axis, where tokens are permuted in place.
        token_M: int64 token of each row sent, in (rank, token) order. row_Tn: int64 row of M of token t's copy for
        each rank; -1 where it has none.
    """

    axis: Axis
    perm: Permutation
    send: tuple[int, ...] = ()
    recv: tuple[int, ...] = ()
    token_M: Tensor | None = None
    row_Tn: Tensor | None = None


@dataclass(frozen=True, eq=False)
class PlanStart:
    """Counts on their way to the host: `counts` is a host tensor that is valid once `ready` has passed."""

    axis: Axis
    ids_Tk: Tensor
    num_experts: int
    to_rank_Tn: Tensor | None = None
    counts: Tensor | None = None
    ready: torch.cuda.Event | None = None


def start_plan(ids_Tk: Tensor, num_experts: int, axis: Axis) -> PlanStart:
    """Starts the exchange of counts; call it as soon as the expert ids exist, and do other work before `dispatch`.

    Each rank learns from every other how many tokens come, and how many rows for each of its experts.
    """
    if axis.size == 1:
        return PlanStart(axis, ids_Tk, num_experts)
    assert num_experts % axis.size == 0, f"{num_experts} experts do not split over ep = {axis.size}"
    local = num_experts // axis.size
    owner_Tk = ids_Tk // local
    ranks = torch.arange(axis.size, device=ids_Tk.device)
    to_rank_Tn = (owner_Tk[:, :, None] == ranks).any(1)
    flat = ids_Tk.flatten()
    rows_E = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    rows_E.scatter_add_(0, flat, torch.ones_like(flat))
    sent = torch.cat([to_rank_Tn.sum(0)[:, None], rows_E.view(axis.size, local)], dim=1)  # [n, 1 + e]
    one_each = [1] * axis.size
    received = all_to_all(sent, axis, DISPATCH, one_each, one_each)
    counts = torch.stack([sent, received])
    if not counts.is_cuda:
        return PlanStart(axis, ids_Tk, num_experts, to_rank_Tn, counts)
    host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
    host.copy_(counts, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return PlanStart(axis, ids_Tk, num_experts, to_rank_Tn, host, ready)


def send_order(to_rank_Tn: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """(token_M, rank_M, row_Tn): rows in (rank, token) order, without a host synchronisation."""
    to_rank_nT = to_rank_Tn.t()
    place_nT = (to_rank_nT.flatten().cumsum(0) - 1).view(to_rank_nT.shape)
    target = torch.where(to_rank_nT, place_nT, num_rows)  # tokens that do not go write to the extra entry
    flat = torch.empty(num_rows + 1, dtype=torch.int64, device=to_rank_Tn.device)
    flat[target.flatten()] = torch.arange(target.numel(), device=flat.device)
    flat, tokens = flat[:-1], max(to_rank_Tn.shape[0], 1)
    return flat % tokens, flat // tokens, torch.where(to_rank_nT, place_nT, -1).t().contiguous()


def _pack_slots(weights_Mk: Tensor, ids_Mk: Tensor) -> Tensor:
    """Routing weights (fp32) and local expert ids (int16, -1: not on that rank) as bytes [M, X], X a multiple of 4."""
    ids = ids_Mk.to(torch.int16)
    if ids.shape[1] % 2:
        ids = torch.nn.functional.pad(ids, (0, 1), value=-1)
    return torch.cat([weights_Mk.float().contiguous().view(torch.uint8), ids.contiguous().view(torch.uint8)], dim=1)


def _unpack_slots(extra_NX: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Undoes `_pack_slots`: (weights [N, k] fp32, ids [N, k] int64)."""
    weights, ids = extra_NX[:, : 4 * k].contiguous(), extra_NX[:, 4 * k :].contiguous()
    return weights.view(torch.float32), ids.view(torch.int16)[:, :k].long()


def dispatch(x_q: Quantized, weights_Tk: Tensor, start: PlanStart) -> tuple[Quantized, Tensor, DispatchPlan]:
    """Sends tokens to their experts: row bytes, scales, routing weights and expert ids in one all-to-all.

    On CUDA that runs beside what was queued since `start_plan` (the shared expert): it waits for no later work, so x_q and
    weights_Tk must have been made before `start_plan`.

    Args:
        x_q: [T, D], row-tiled, unscaled, or tensorwise with a scale that is common to the axis.
        weights_Tk: routing weights; any value that expert e needs of (token, slot).

    Returns:
        (rows [R, D] padded and grouped by local expert, weights [R] with zeros on padding, the plan).
    """
    axis = start.axis
    if axis.size == 1:
        plan = DispatchPlan(axis, build_permutation(start.ids_Tk, start.num_experts))
        return permute(x_q, plan.perm), permute_slots(weights_Tk, plan.perm), plan
    local, k = start.num_experts // axis.size, start.ids_Tk.shape[1]
    send, recv = _token_counts(start)
    with _beside_later_work(start) as hand_over:
        token_M, rank_M, row_Tn = send_order(start.to_rank_Tn, sum(send))
        ids_Mk = start.ids_Tk[token_M] - (rank_M * local)[:, None]
        extra = _pack_slots(weights_Tk[token_M], torch.where((ids_Mk >= 0) & (ids_Mk < local), ids_Mk, -1))
        form, payload = RowFormat.of(x_q, extra.shape[1]), pack(x_q, token_M, extra)
        arrived = all_to_all(payload, axis, DISPATCH, send, recv, FORMAT_NAMES[form.dtype])
        hand_over(token_M, row_Tn, arrived)
    weights_Nk, ids_Nk = _unpack_slots(extra_of(arrived, form), k)
    perm = build_permutation(ids_Nk, local, buffer_rows(start))
    rows, w_R = _unpack_rows(arrived, form, x_q, perm), permute_slots(weights_Nk, perm)
    return rows, w_R, DispatchPlan(axis, perm, tuple(send), tuple(recv), token_M, row_Tn)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def _beside_later_work(start: PlanStart) -> Iterator[Callable[..., None]]:
    """On CUDA, a side stream that waits for what was queued before `start_plan` returned, and for nothing since.

    Yields a function that hands tensors made inside over to the stream outside.
    """
    if start.ready is None:
        yield lambda *tensors: None
        return
    main = torch.cuda.current_stream()
    side = _side_stream(main.device)
    side.wait_event(start.ready)
    with torch.cuda.stream(side):
        yield lambda *tensors: [t.record_stream(main) for t in tensors]
    main.wait_stream(side)


def _token_counts(start: PlanStart) -> tuple[list[int], list[int]]:
    """Tokens to and from each rank. The one host synchronisation of a layer."""
    if start.ready is not None:
        start.ready.synchronize()
    sent, received = start.counts[:, :, 0].tolist()
    return sent, received


def buffer_rows(start: PlanStart) -> int:
    """Rows of the padded buffer, once counts are known: each expert's rounded up to a block. At ep = 1 what holds any routing."""
    if start.axis.size == 1:
        return padded_rows(start.ids_Tk.numel(), start.num_experts)
    rows_e = start.counts[1, :, 1:].sum(0)
    return max(BLOCK, int(((rows_e + BLOCK - 1) // BLOCK * BLOCK).sum()))


def start_dispatch_rows(x_q: Quantized, plan: DispatchPlan) -> Callable[[], Quantized]:
    """[T, D] -> [R, D] along an existing plan: dY in backward (quantised once, here), x again under recompute.

    Returns a function that waits and gives the rows; work queued before it is called runs beside the wire.
    """
    if plan.axis.size == 1:
        return lambda: permute(x_q, plan.perm)
    form, payload = RowFormat.of(x_q), pack(x_q, plan.token_M)
    flight = start_all_to_all(payload, plan.axis, DISPATCH, plan.send, plan.recv, FORMAT_NAMES[form.dtype])
    return lambda: _unpack_rows(flight.wait(), form, x_q, plan.perm)


def dispatch_rows(x_q: Quantized, plan: DispatchPlan) -> Quantized:
    """`start_dispatch_rows`, waited for."""
    return start_dispatch_rows(x_q, plan)()


def _unpack_rows(arrived_NB: Tensor, form: RowFormat, sent: Quantized, perm: Permutation) -> Quantized:
    """Packed rows [N, B] -> [R, D], each where `perm` puts it."""
    k, live_B = perm.row_Tk.shape[1], perm.groups.block_expert_B
    return unpack(arrived_NB, form, sent.scale_inv, perm.slot_R, k, live_B)


def start_combine_rows(y_RD: Tensor, plan: DispatchPlan) -> Callable[[], Tensor]:
    """[R, D] -> [T, D]: the sum over each token's experts, in FP32; on the wire in y's dtype or `axis.wire`.

    The experts of one rank are summed there, so one row a (token, rank) comes back. Returns a function that waits and gives
    the sum.
    """
    axis, partial_ND = plan.axis, unpermute_sum(y_RD, plan.perm)
    if axis.size == 1:
        return lambda: partial_ND
    if axis.wire is None:
        flight = start_all_to_all(partial_ND, axis, COMBINE, plan.recv, plan.send)
        return lambda: sum_rows(flight.wait(), plan.row_Tn)
    exchange, dtype = start_exchange(quantize(partial_ND, axis.wire), axis, COMBINE, plan.recv, plan.send), y_RD.dtype
    return lambda: sum_rows(exchange.wait().dequantize(dtype), plan.row_Tn)


def combine_rows(y_RD: Tensor, plan: DispatchPlan) -> Tensor:
    """`start_combine_rows`, waited for."""
    return start_combine_rows(y_RD, plan)()


def combine_slots(dw_R: Tensor, plan: DispatchPlan) -> Tensor:
    """[R] -> [T, k]: a value of each (token, slot), back from the rank of its expert. Exact: each has one source."""
    dw_Nk = unpermute_slots(dw_R, plan.perm)
    if plan.axis.size == 1:
        return dw_Nk
    return sum_rows(all_to_all(dw_Nk, plan.axis, COMBINE, plan.recv, plan.send), plan.row_Tn)


# ---------------------------------------------------------------- reference


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
