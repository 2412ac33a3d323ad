"""Expert parallelism: tokens travel to the ranks that own their experts; how the results come back: combine.py.

A token goes once to each rank that owns one of its experts, however many it owns there; that rank copies the row to
its experts and sums their outputs before sending one row back. So a token costs at most min(k, n) rows each way.

    dispatch          x_q [T, D] + weights [T, k]  ->  rows [R, D] grouped by local expert, weights [R], and the plan
    dispatch_rows     the same trip for other rows
    dispatch_both     for dY in backward: rows, and columns for wgrad
    dispatch_turned   for x again, turned for wgrad

Rows of one expert are in (source rank, token) order. Dropless: buffers are sized from counts that the ranks exchange,
which is the one host synchronisation of a layer, started by `start_plan` and waited for in `dispatch`. With ep = 1
there is none; nor with `axis.gathers`, where every rank gets every token, ids and all, and picks what its experts want: the same
rows in the same order, buffers for any routing (n * T * k rows), and no counts.

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
    BlockCounts,
    Permutation,
    build_permutation,
    permute,
    permute_both,
    permute_requantize_t,
    permute_slots,
)
from fp8.quantize import requantize_t, retile_t
from fp8.quantized import Quantized
from fp8.recipe import BLOCK, Spec
from parallel.collectives import (
    Pending,
    PendingRows,
    all_to_all,
    rows_of_ranks,
    start_all_gather,
    start_all_gather_rows,
    start_all_to_all,
)
from parallel.mesh import Axis
from parallel.payload import RowFormat, pack, unpack
from parallel.send_plan import Counted, count_tokens, order_tokens, own_slots, read_slots
from parallel.traffic import FORMAT_NAMES

KIND = "dispatch"


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """How tokens went, so that results find their way back; what `dispatch` returns.

    Attributes:
        perm: from the rows received here to the rows of this rank's experts. `perm.groups` is what the grouped GEMMs take.
        send, recv: tokens to and from each rank; empty on a solo axis, where tokens are permuted in place.
        token_M: int64 token of each row sent, in (rank, token) order; None: all tokens go to each rank.
        row_Tn: int64 row, among what comes back, of token t's sum on each rank; -1 where it has none.
        tokens: [n * T, D], gathered: what the rows were made from.
    """

    axis: Axis
    perm: Permutation
    send: tuple[int, ...] = ()
    recv: tuple[int, ...] = ()
    token_M: Tensor | None = None
    row_Tn: Tensor | None = None
    tokens: Quantized | None = None

    @property
    def whole(self) -> bool:
        """Whether this rank has all tokens of the axis, so that rows are made from those in one pass, and need not be kept."""
        return self.axis.size == 1 or self.axis.gathers


@dataclass(frozen=True, eq=False)
class PlanStart:
    """Counts on their way to the host: `counts` is a host tensor that is valid once `ready` has passed.

    Gathered there are none: `tokens` are under way, and so are their `slots` (routing weights and expert ids).
    """

    axis: Axis
    ids_Tk: Tensor
    num_experts: int
    counted: Counted | None = None
    counts: Tensor | None = None
    ready: torch.cuda.Event | None = None
    tokens: PendingRows | None = None
    slots: Pending | None = None
    block_counts: BlockCounts | None = None  # of ids_Tk, where no rank but this one matters


def send_tokens(x_q: Quantized, axis: Axis) -> PendingRows | None:
    """Where the axis gathers: sends the tokens to every rank, which needs no router. Give it to `start_plan`."""
    return start_all_gather_rows(x_q, axis, KIND) if axis.gathers and axis.size > 1 else None


def start_plan(
    ids_Tk: Tensor, num_experts: int, axis: Axis, weights_Tk: Tensor | None = None, tokens: PendingRows | None = None,
    block_counts: BlockCounts | None = None,
) -> PlanStart:  # fmt: skip
    """Starts the exchange of counts; call it as soon as the expert ids exist, and do other work before `dispatch`.

    Each rank learns from every other how many tokens come, and how many rows for each of its experts. Gathered, it is the routing
    weights and ids that leave, if weights are given (those that `dispatch` will be called with), behind the tokens.
    """
    if axis.size == 1:
        return PlanStart(axis, ids_Tk, num_experts, block_counts=block_counts)
    assert num_experts % axis.size == 0, f"{num_experts} experts do not split over ep = {axis.size}"
    if axis.gathers:
        slots = None if weights_Tk is None else _gather_slots(ids_Tk, weights_Tk, axis)
        return PlanStart(axis, ids_Tk, num_experts, tokens=tokens, slots=slots)
    counted = count_tokens(ids_Tk, num_experts, axis.size)
    one_each = [1] * axis.size
    received = all_to_all(counted.sent, axis, KIND, one_each, one_each)
    counts = torch.stack([counted.sent, received])
    if not counts.is_cuda:
        return PlanStart(axis, ids_Tk, num_experts, counted, counts)
    host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
    host.copy_(counts, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return PlanStart(axis, ids_Tk, num_experts, counted, host, ready)


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
        plan = DispatchPlan(axis, build_permutation(start.ids_Tk, start.num_experts, counted=start.block_counts))
        return permute(x_q, plan.perm), permute_slots(weights_Tk, plan.perm), plan
    if axis.gathers:
        return _dispatch_gathered(x_q, weights_Tk, start)
    local, k = start.num_experts // axis.size, start.ids_Tk.shape[1]
    send, recv = _token_counts(start)
    with _beside_later_work(start) as hand_over:
        order = order_tokens(start.ids_Tk, weights_Tk, start.counted, local, sum(send))
        form, payload = RowFormat.of(x_q, order.slots_MX.shape[1]), pack(x_q, order.token_M, order.slots_MX)
        arrived = all_to_all(payload, axis, KIND, send, recv, FORMAT_NAMES[form.dtype])
        hand_over(order.token_M, order.row_Tn, arrived)
    weights_Nk, ids_Nk = read_slots(arrived, form.data_bytes, k, 0, local)
    perm = build_permutation(ids_Nk, local, buffer_rows(start))
    rows, w_R = _unpack_rows(arrived, form, x_q, perm), permute_slots(weights_Nk, perm)
    return rows, w_R, DispatchPlan(axis, perm, tuple(send), tuple(recv), order.token_M, order.row_Tn)


def _gather_slots(ids_Tk: Tensor, weights_Tk: Tensor, axis: Axis) -> Pending:
    return start_all_gather(own_slots(ids_Tk, weights_Tk), axis, KIND, "slots")


def _dispatch_gathered(x_q: Quantized, weights_Tk: Tensor, start: PlanStart) -> tuple[Quantized, Tensor, DispatchPlan]:
    axis, (tokens, k) = start.axis, start.ids_Tk.shape
    local, coming = start.num_experts // axis.size, start.tokens or send_tokens(x_q, axis)
    slots = (start.slots or _gather_slots(start.ids_Tk, weights_Tk, axis)).wait()
    weights_Nk, ids_Nk = read_slots(slots, 0, k, axis.rank * local, local)
    perm, each = build_permutation(ids_Nk, local, buffer_rows(start)), (tokens,) * axis.size
    w_R, back, tokens_q = permute_slots(weights_Nk, perm), rows_of_ranks(tokens, axis.size, x_q.device), coming.wait()
    return permute(tokens_q, perm), w_R, DispatchPlan(axis, perm, each, each, None, back, tokens_q)


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
    return tuple(start.counts[:, :, 0].tolist())


def buffer_rows(start: PlanStart) -> int:
    """Rows of the padded buffer, once counts are known: each expert's rounded up to a block; without counts, for any routing."""
    axis = start.axis
    if axis.size == 1 or axis.gathers:
        return padded_rows(axis.size * start.ids_Tk.numel(), start.num_experts // axis.size)
    rows_e = start.counts[1, :, 1:].sum(0)
    return max(BLOCK, int(((rows_e + BLOCK - 1) // BLOCK * BLOCK).sum()))


def start_dispatch_rows(x_q: Quantized, plan: DispatchPlan) -> Callable[[], Quantized]:
    """[T, D] -> [R, D] along an existing plan: dY in backward (quantised once, here), x again under recompute.

    Returns a function that waits and gives the rows; work queued before it is called runs beside the wire.
    """
    if plan.whole:
        arriving = _start_tokens(x_q, plan.axis)
        return lambda: permute(arriving(), plan.perm)
    form, payload = RowFormat.of(x_q), pack(x_q, plan.token_M)
    flight = start_all_to_all(payload, plan.axis, KIND, plan.send, plan.recv, FORMAT_NAMES[form.dtype])
    return lambda: _unpack_rows(flight.wait(), form, x_q, plan.perm)


def _start_tokens(x_q: Quantized, axis: Axis) -> Callable[[], Quantized]:
    """[T, D] -> [n * T, D], where the axis gathers."""
    return start_all_gather_rows(x_q, axis, KIND).wait


def dispatch_rows(x_q: Quantized, plan: DispatchPlan) -> Quantized:
    """`start_dispatch_rows`, waited for."""
    return start_dispatch_rows(x_q, plan)()


def start_dispatch_both(
    x_q: Quantized, plan: DispatchPlan, columns: Spec | None
) -> Callable[[], tuple[Quantized, Quantized | None]]:
    """`start_dispatch_rows` of dY, whose function also gives the rows re-tiled and transposed under `columns` [D, R], if any."""
    if plan.whole and columns is not None:
        tokens = _start_tokens(x_q, plan.axis)
        return lambda: permute_both(tokens(), plan.perm, columns)
    arriving = start_dispatch_rows(x_q, plan)

    def wait() -> tuple[Quantized, Quantized | None]:
        rows = arriving()
        return rows, None if columns is None else retile_t(rows, columns, plan.perm.groups.block_expert_B)

    return wait


def dispatch_turned(x_q: Quantized, plan: DispatchPlan) -> Quantized:
    """[T, D] -> [D, R] with square tiles: x along an existing plan once more, as wgrad reads it."""
    if plan.whole:
        return turn_tokens(_start_tokens(x_q, plan.axis)(), plan)
    return requantize_t(dispatch_rows(x_q, plan), plan.perm.groups.block_expert_B)


def turn_tokens(tokens: Quantized, plan: DispatchPlan) -> Quantized:
    """All tokens of the axis [n * T, D] -> [D, R] with square tiles."""
    return permute_requantize_t(tokens, plan.perm)


def turns_tokens(x_q: Quantized, plan: DispatchPlan) -> bool:
    """Whether `dispatch_turned` of [T, D] reads less than turning the rows [R, D], so that nobody need keep those."""
    return plan.axis.size == 1 and x_q.tile == (1, BLOCK)


def _unpack_rows(arrived_NB: Tensor, form: RowFormat, sent: Quantized, perm: Permutation) -> Quantized:
    """Packed rows [N, B] -> [R, D], each where `perm` puts it."""
    k, live_B = perm.row_Tk.shape[1], perm.groups.block_expert_B
    return unpack(arrived_NB, form, sent.scale_inv, perm.slot_R, k, live_B)
