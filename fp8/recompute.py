"""Recompute of a part of the network in backward: what lies between its inputs and outputs is not kept.

Ours instead of torch.utils.checkpoint, which sees saved tensors only: FP8 bytes that a Function holds on its ctx would stay. The
second run is bitwise the first (the scales of a step do not change within it, there is no random number in a layer), and its
caller must not count anything twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fp8.activation import Activation, make_carrier
from fp8.stash import Stash

Run = Callable[..., Tensor | tuple[Tensor, ...]]


def _through(outputs: Tensor | tuple[Tensor, ...], grads: Sequence[Tensor | None]) -> None:
    """Backward through the second run's graph."""
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    pairs = [(y, dy) for y, dy in zip(outputs, grads, strict=True) if y.requires_grad and dy is not None]
    torch.autograd.backward([y for y, _ in pairs], [dy for _, dy in pairs])


class _Recompute(torch.autograd.Function):
    """forward  y = run(x), keeping x only;  backward  y = again(x) with a graph, then dx = dy through it."""

    @staticmethod
    def forward(ctx: FunctionCtx, anchor: Tensor, run: Run, again: Run, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        ctx.again = again
        ctx.save_for_backward(*inputs)
        return run(*inputs)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[3:]
        inputs = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            outputs = ctx.again(*inputs)
        _through(outputs, grads)
        return None, None, None, *(x.grad for x in inputs)


def recompute(run: Run, again: Run, anchor: Tensor, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
    """run(*inputs), keeping only `inputs` for backward.

    Args:
        run, again: the same function for forward and for backward; `again` leaves counters alone.
        anchor: of any trainable weight inside, so that backward comes here even when no input needs a gradient.
    """
    return _Recompute.apply(anchor, run, again, *inputs)


class _RecomputeFrom(torch.autograd.Function):
    """`_Recompute` of a part whose input is quantised: keeps a claim on its bytes."""

    @staticmethod
    def forward(ctx: FunctionCtx, carrier: Tensor, anchor: Tensor, x: Activation, run: Run, stash: Stash) -> Tensor:
        ctx.ticket, ctx.run, ctx.stash, ctx.like = x.ticket.claim(), run, stash, carrier.new_empty(0)
        return run(Activation(x.q, carrier, stash.put(x.ticket.name, x.q)))  # without a graph, nobody pops

    @staticmethod
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor | None, ...]:
        q = ctx.ticket.pop()
        with torch.enable_grad():
            carrier = make_carrier(q.shape, ctx.like).requires_grad_(ctx.needs_input_grad[0])
            y = ctx.run(Activation(q, carrier, ctx.stash.put(ctx.ticket.name, q)))
        del q
        _through(y, (dy,))
        return carrier.grad, None, None, None, None


def recompute_from(run: Run, x: Activation, anchor: Tensor, stash: Stash) -> Tensor:
    """run(x) for a function of one quantised input, keeping only its bytes (or the way to make them again)."""
    return _RecomputeFrom.apply(x.carrier, anchor, x, run, stash)
