"""Where tokens live between layers: under sequence parallel each tp rank has t = T / n consecutive tokens.

    gather_activation    forward gather (quantised rows), backward reduce-scatter: before a layer that splits its output
    split_tokens         forward own part, backward gather: replicated tokens into the MoE block
    join_tokens          forward gather, backward own part: and back (sequence parallel off)
    vocab_embedding      vocabulary rows split over the axis, output reduce-scattered

Shapes: T tokens of the micro-batch, t of this rank, D features, v vocabulary rows of this rank, n ranks of the axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fp8.activation import Activation, make_carrier
from fp8.cross_entropy import VocabAxis
from fp8.embedding import add_rows, embedding
from fp8.rms_norm import Normed
from fp8.stash import Ticket
from fp8.weight import Weight
from parallel.collectives import (
    Pending,
    all_gather,
    all_gather_rows,
    all_reduce,
    reduce_scatter,
    start_all_reduce,
    start_reduce_scatter,
)
from parallel.mesh import Axis

KIND = "tp"


def own_rows(axis: Axis, rows: int) -> slice:
    """This rank's part of `rows` tokens.

    Raises:
        AssertionError: the tokens do not split evenly.
    """
    assert rows % axis.size == 0, f"{rows} tokens do not split over tp = {axis.size}"
    part = rows // axis.size
    return slice(axis.rank * part, (axis.rank + 1) * part)


def sum_tokens(partial_TD: Tensor, axis: Axis) -> Tensor:
    """Partial sums [T, D] of each rank -> the total: this rank's [t, D] under sequence parallel, else all of it."""
    if axis.sequence:
        return reduce_scatter(partial_TD, axis, KIND, axis.wire)
    return all_reduce(partial_TD, axis, KIND)


def start_sum_tokens(partial_TD: Tensor, axis: Axis) -> Pending:
    """`sum_tokens` in flight, for work that does not need it yet."""
    if not axis.sequence:
        return start_all_reduce(partial_TD, axis, KIND)
    if axis.wire is not None:
        return Pending(reduce_scatter(partial_TD, axis, KIND, axis.wire), None, axis, KIND)
    return start_reduce_scatter(partial_TD, axis, KIND)


class _DerivedTicket(Ticket):
    """A claim on `make(source)`: holds nothing itself, claims the source when it is claimed, makes the value when popped."""

    def __init__(self, source: Ticket, make: Callable[[Any], Any]) -> None:
        super().__init__(source.name, None, lambda: make(source.pop()), None)
        self._source = source

    def claim(self) -> Ticket:
        if self._uses == 0:
            self._source.claim()
        return super().claim()


def sum_value(x: Tensor, axis: Axis) -> Tensor:
    """The sum of a 0-dim x over the axis, for the log; its gradient stays this rank's own part."""
    return x if axis.size == 1 else x + (all_reduce(x.detach().clone(), axis, KIND) - x.detach())


# ---------------------------------------------------------------- quantised rows, whole again


class _GatherCarrier(torch.autograd.Function):
    """forward: carrier [t, D] -> carrier [T, D]; backward: dx_tD = this rank's part of the sum of dx_TD over ranks."""

    @staticmethod
    def forward(ctx: FunctionCtx, carrier_tD: Tensor, rows: int, axis: Axis) -> Tensor:
        ctx.axis = axis
        return make_carrier((rows, carrier_tD.shape[1]), carrier_tD)

    @staticmethod
    def backward(ctx: FunctionCtx, dx_TD: Tensor) -> tuple[Tensor, None, None]:
        return sum_tokens(dx_TD, ctx.axis), None, None


def gather_activation(x: Activation, axis: Axis) -> Activation:
    """x [t, D] -> [T, D] for a consumer whose weight is split over the axis; backward sums dX over the ranks.

    Keeps this rank's rows only; a consumer that pops the ticket gathers again.
    """
    if axis.size == 1:
        return x
    gather = (lambda q: all_gather_rows(q, axis, KIND)) if axis.sequence else (lambda q: q)
    q = gather(x.q)
    return Activation(q, _GatherCarrier.apply(x.carrier, q.shape[0], axis), _DerivedTicket(x.ticket, gather))


# ---------------------------------------------------------------- replicated tokens, each handled once


class _Split(torch.autograd.Function):
    """forward: x_tD = x_TD[own]; backward: dx_TD = gather of dx_tD."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_TD: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x_TD[own_rows(axis, x_TD.shape[0])]

    @staticmethod
    def backward(ctx: FunctionCtx, dx_tD: Tensor) -> tuple[Tensor, None]:
        return all_gather(dx_tD, ctx.axis, KIND), None


class _Join(torch.autograd.Function):
    """forward: y_TD = gather of y_tD; backward: dy_tD = dy_TD[own] (dy_TD is the same on every rank)."""

    @staticmethod
    def forward(ctx: FunctionCtx, y_tD: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_gather(y_tD, axis, KIND)

    @staticmethod
    def backward(ctx: FunctionCtx, dy_TD: Tensor) -> tuple[Tensor, None]:
        return dy_TD[own_rows(ctx.axis, dy_TD.shape[0])], None


def split_tokens(x_TD: Tensor, axis: Axis) -> Tensor:
    """Replicated [T, ...] -> this rank's [t, ...]; under sequence parallel the tokens are split already."""
    return x_TD if axis.size == 1 or axis.sequence else _Split.apply(x_TD, axis)


def join_tokens(y_tD: Tensor, axis: Axis) -> Tensor:
    """Undoes `split_tokens`."""
    return y_tD if axis.size == 1 or axis.sequence else _Join.apply(y_tD, axis)


def split_activation(x: Activation, axis: Axis) -> Activation:
    """`split_tokens` of quantised rows."""
    if axis.size == 1 or axis.sequence:
        return x
    own = own_rows(axis, x.q.shape[0])
    ticket = _DerivedTicket(x.ticket, lambda q: q.rows(own))
    return Activation(x.q.rows(own), _Split.apply(x.carrier, axis), ticket)


def split_normed(x: Normed, axis: Axis) -> Normed:
    """`split_tokens` of all that a norm hands out."""
    if axis.size == 1 or axis.sequence:
        return x
    own = own_rows(axis, x.x_TD.shape[0])
    ticket = _DerivedTicket(x.x_ticket, lambda x_TD: x_TD[own])
    return Normed(split_activation(x.edge, axis), split_tokens(x.x_TD, axis), ticket, x.h_TD, x.second)


# ---------------------------------------------------------------- vocabulary


class _VocabEmbedding(torch.autograd.Function):
    """forward  h_TD = w_vD[tokens], rows of other ranks' tokens zero, summed over the axis
    wgrad    dw_vD[tokens] += dh_TD
    """

    @staticmethod
    def forward(ctx: FunctionCtx, anchor: Tensor, tokens_T: Tensor, weight: Weight, axis: Axis, dtype: torch.dtype) -> Tensor:
        local_T = tokens_T - axis.rank * weight.data.shape[0]
        mine_T = (local_T >= 0) & (local_T < weight.data.shape[0])
        index_T = torch.where(mine_T, local_T, torch.zeros_like(local_T))
        ctx.save_for_backward(index_T, mine_T)
        ctx.weight, ctx.axis = weight, axis
        # one rank has the row, so the sum is exact in any dtype
        h_TD = weight.data[index_T].to(dtype).masked_fill_(~mine_T[:, None], 0)
        return reduce_scatter(h_TD, axis, KIND) if axis.sequence else all_reduce(h_TD, axis, KIND)

    @staticmethod
    def backward(ctx: FunctionCtx, dh_tD: Tensor) -> tuple[Tensor | None, ...]:
        index_T, mine_T = ctx.saved_tensors
        dh_TD = all_gather(dh_tD, ctx.axis, KIND) if ctx.axis.sequence else dh_tD
        dh_TD = torch.where(mine_T[:, None], dh_TD, torch.zeros_like(dh_TD))
        ctx.weight.accumulate(lambda out, acc: add_rows(out, index_T, dh_TD, acc))
        return None, None, None, None, None


def vocab_embedding(tokens_T: Tensor, weight: Weight, axis: Axis, dtype: torch.dtype) -> Tensor:
    """tokens [T] -> rows of `weight` in `dtype`: [t, D] under sequence parallel, else [T, D].

    weight holds rows [rank * v, (rank + 1) * v) of the vocabulary; the whole of it on a solo axis.
    """
    if axis.size == 1:
        return embedding(tokens_T, weight, dtype)
    return _VocabEmbedding.apply(weight.anchor, tokens_T, weight, axis, dtype)


def vocab_axis(weight: Weight, axis: Axis) -> VocabAxis:
    """What the head's loss needs to know of a vocabulary split over `axis`: the first id here and two reductions."""
    return VocabAxis(
        offset=axis.rank * weight.data.shape[0],
        all_max=lambda x: all_reduce(x, axis, KIND, "max"),
        all_sum=lambda x: all_reduce(x, axis, KIND),
    )
