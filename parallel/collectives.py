"""Collectives of tensors and of Quantized on an Axis; each returns its input on a solo axis.

FP8 travels as uint8 views (gloo refuses float8). A row-tiled Quantized travels as one buffer: each row's bytes and,
behind them, its scales, one byte each: a power of two is its exponent (E8M0), so nothing is lost.

Shapes: R rows, C columns, B bytes of one packed row, n ranks of the axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from fp8.quantize import quantize
from fp8.quantized import Quantized
from fp8.recipe import Spec
from parallel.mesh import Axis
from parallel.payload import RowFormat, pack, sum_packed, unpack
from parallel.traffic import FORMAT_NAMES

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# torch 2.13 renames these two; 2.11 knows the old names only
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _wire(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 and x.is_floating_point() else x


class Pending:
    """A collective in flight. `wait()` returns its result; on CUDA only the stream waits.

    On an axis with a peer the result is the peer's buffer: read it at once (peer.py).
    """

    def __init__(self, result: Tensor, work: dist.Work | None, axis: Axis, kind: str) -> None:
        self._result, self._work, self._axis, self._kind = result, work, axis, kind

    def wait(self) -> Tensor:
        """The result. The time counted is what compute has not hidden."""
        if self._work is not None:
            with self._axis.traffic.clock(self._kind, self._result.device):
                self._work.wait()
            self._work = None
        return self._result


# ---------------------------------------------------------------- tensors


def start_all_reduce(x: Tensor, axis: Axis, kind: str, op: str = "sum") -> Pending:
    """Reduces `x` in place; the same bits arrive on every rank."""
    if axis.size == 1:
        return Pending(x, None, axis, kind)
    axis.traffic.add(kind, FORMAT_NAMES[x.dtype], 2 * x.nbytes * (axis.size - 1) // axis.size)
    return Pending(x, dist.all_reduce(x, OPS[op], group=axis.group, async_op=True), axis, kind)


def all_reduce(x: Tensor, axis: Axis, kind: str, op: str = "sum") -> Tensor:
    """`start_all_reduce`, waited for."""
    return start_all_reduce(x, axis, kind, op).wait()


def start_all_gather(x: Tensor, axis: Axis, kind: str, fmt: str | None = None) -> Pending:
    """[m, ...] -> [n * m, ...], parts in rank order. `fmt` names what the bytes of a packed buffer are."""
    if axis.size == 1:
        return Pending(x, None, axis, kind)
    axis.traffic.add(kind, fmt or FORMAT_NAMES[x.dtype], x.nbytes * (axis.size - 1))
    if axis.peer is not None:
        return Pending(*axis.peer.start(x, kind, gather=True), axis, kind)
    x = x.contiguous()
    out = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    return Pending(out, _gather(_wire(out), _wire(x), group=axis.group, async_op=True), axis, kind)


def all_gather(x: Tensor, axis: Axis, kind: str, fmt: str | None = None) -> Tensor:
    """`start_all_gather`, waited for."""
    return start_all_gather(x, axis, kind, fmt).wait()


def start_reduce_scatter(x: Tensor, axis: Axis, kind: str) -> Pending:
    """[n * m, ...] -> this rank's [m, ...] of the sum over ranks, in x's dtype."""
    if axis.size == 1:
        return Pending(x, None, axis, kind)
    assert x.shape[0] % axis.size == 0, f"{x.shape[0]} rows do not split over {axis.size} ranks"
    out = x.new_empty(x.shape[0] // axis.size, *x.shape[1:])
    axis.traffic.add(kind, FORMAT_NAMES[x.dtype], x.nbytes * (axis.size - 1) // axis.size)
    return Pending(out, _scatter(out, x.contiguous(), group=axis.group, async_op=True), axis, kind)


def reduce_scatter(x: Tensor, axis: Axis, kind: str, wire: Spec | None = None) -> Tensor:
    """[n * m, ...] -> this rank's [m, ...] of the sum over ranks.

    Args:
        wire: an FP8 spec sends FP8 and sums in FP32 (one rounding for any number of ranks); None reduces in x's dtype.
    """
    if axis.size == 1 or wire is None or not wire.is_fp8:
        return start_reduce_scatter(x, axis, kind).wait()
    each, q = [x.shape[0] // axis.size] * axis.size, quantize(x, wire)
    form = RowFormat.of(q)
    arrived = all_to_all(pack(q), axis, kind, each, each, FORMAT_NAMES[form.dtype])
    return sum_packed(arrived, form, rows_of_ranks(each[0], axis.size, x.device), x.dtype)


@cache
def rows_of_ranks(rows: int, ranks: int, device: torch.device) -> Tensor:
    """int64 [rows, n]: where row t of each rank stands among `rows` of every rank, behind each other: r * rows + t."""
    return torch.arange(rows * ranks, device=device).view(ranks, rows).t().contiguous()


def start_all_to_all(x: Tensor, axis: Axis, kind: str, send: Sequence[int], recv: Sequence[int], fmt: str | None = None) -> Pending:
    """[sum(send), ...] -> [sum(recv), ...]: rows in rank order; counts may be uneven and zero."""
    if axis.size == 1:
        return Pending(x, None, axis, kind)
    x = x.contiguous()
    assert x.shape[0] == sum(send), f"{x.shape[0]} rows, but the counts to send sum to {sum(send)}"
    out = x.new_empty(sum(recv), *x.shape[1:])
    row_bytes = x[0].nbytes if x.shape[0] else 0
    axis.traffic.add(kind, fmt or FORMAT_NAMES[x.dtype], row_bytes * (sum(send) - send[axis.rank]))
    work = dist.all_to_all_single(_wire(out), _wire(x), list(recv), list(send), group=axis.group, async_op=True)
    return Pending(out, work, axis, kind)


def all_to_all(x: Tensor, axis: Axis, kind: str, send: Sequence[int], recv: Sequence[int], fmt: str | None = None) -> Tensor:
    """`start_all_to_all`, waited for."""
    return start_all_to_all(x, axis, kind, send, recv, fmt).wait()


def start_swap(x: Tensor, axis: Axis, kind: str) -> Pending:
    """The other rank's x [m, ...], on an axis of two."""
    if axis.peer is not None:
        axis.traffic.add(kind, FORMAT_NAMES[x.dtype], x.nbytes)
        return Pending(*axis.peer.start(x, kind, gather=False), axis, kind)
    there = [x.shape[0] * (rank != axis.rank) for rank in range(2)]
    return start_all_to_all(x, axis, kind, there, there)


# ---------------------------------------------------------------- rows of a Quantized


class PendingRows:
    """Rows of a Quantized in flight."""

    def __init__(self, pending: Pending, form: RowFormat, scale_inv: Tensor | None) -> None:
        self._pending, self._form, self._scale_inv = pending, form, scale_inv

    def wait(self) -> Quantized:
        """The arrived rows."""
        return unpack(self._pending.wait(), self._form, self._scale_inv)


class _Arrived:
    def __init__(self, q: Quantized) -> None:
        self._q = q

    def wait(self) -> Quantized:
        return self._q


def start_all_gather_rows(q: Quantized, axis: Axis, kind: str) -> PendingRows | _Arrived:
    """q [m, C] -> [n * m, C], payload and scales in one collective. A tensorwise scale must be common to the axis."""
    if axis.size == 1:
        return _Arrived(q)
    form = RowFormat.of(q)
    return PendingRows(start_all_gather(pack(q), axis, kind, FORMAT_NAMES[form.dtype]), form, q.scale_inv)


def all_gather_rows(q: Quantized, axis: Axis, kind: str) -> Quantized:
    """`start_all_gather_rows`, waited for."""
    return start_all_gather_rows(q, axis, kind).wait()
