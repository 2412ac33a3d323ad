"""All routed experts of a layer: dispatch, two grouped GEMMs with SwiGLU between, combine.

One autograd Function does it. Behind it a second one, `_Arrive`, stands where the trip ends: in forward it waits for the sums, in
backward, which begins there, it sends dy. What is queued between the two (the shared expert) runs beside the wire both times.

Shapes: T tokens, k experts a token, R rows of the padded buffer of this rank, E experts, D features, f width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from fp8.activation import Activation
from fp8.fused import fuses_format
from fp8.grouped_gemm import (
    Groups,
    clear_unused,
    grouped_gemm_nt,
    grouped_gemm_quantized,
    grouped_wgrad,
    quantizes_output,
)
from fp8.linear import SharedGradient
from fp8.permute import BlockCounts
from fp8.quantize import requantize_t
from fp8.quantized import Quantized
from fp8.recipe import Recipe
from fp8.stash import Stash
from fp8.swiglu import quantize_pre_activation, quantize_swiglu, quantize_swiglu_backward, swiglu_ref
from fp8.transposed import transposed
from fp8.weight import Weight
from model.config import ModelConfig
from parallel.collectives import PendingRows
from parallel.combine import start_combine_rows, start_combine_slots
from parallel.dispatch import (
    DispatchPlan,
    PlanStart,
    buffer_rows,
    dispatch,
    dispatch_turned,
    send_tokens,
    start_dispatch_both,
    start_plan,
    turn_tokens,
    turns_tokens,
)
from parallel.memory import explained
from parallel.mesh import Axis
from parallel.split import split_weight


def routed_experts_ref(x_TD: Tensor, ids_Tk: Tensor, weights_Tk: Tensor, w1_E2fD: Tensor, w2_EDf: Tensor) -> Tensor:
    """The differentiable definition: a loop over experts, everything in the dtype of x."""
    y_TD = torch.zeros_like(x_TD)
    for e in range(w1_E2fD.shape[0]):
        tokens, slots = (ids_Tk == e).nonzero(as_tuple=True)
        a = swiglu_ref(x_TD[tokens] @ w1_E2fD[e].t(), weights_Tk[tokens, slots]).to(x_TD.dtype)
        y_TD = y_TD.index_add(0, tokens, a @ w2_EDf[e].t())
    return y_TD


@dataclass(eq=False)
class _Trip:
    """What is under way between the two Functions: sums in forward, dy in backward. Each is taken once."""

    sums: Callable[[], Tensor] | None = None
    send_dy: Callable[[Tensor], Callable[[], tuple[Quantized, Quantized | None]]] | None = None
    dy: Callable[[], tuple[Quantized, Quantized | None]] | None = None


@dataclass(frozen=True)
class _Call:
    """What the Function needs beside tensors."""

    x: Activation | None
    start: PlanStart | None
    w1: Weight
    w2: Weight
    stash: Stash
    name: str
    stage: int
    same_dy: SharedGradient | None

    def in_memory(self, axis: Axis, rows: Callable[[], int], dtype: torch.dtype) -> AbstractContextManager[None]:
        """Where what is done inside does not fit, the error says what the layer needs."""
        local, hidden, width = self.w2.data.shape
        kept, wide = self.w2.data.element_size(), dtype.itemsize
        row_bytes = kept * (hidden + 3 * width) + wide * (2 * width + hidden)  # x, pre-activation and activation; h, y
        return explained(f"{self.name}, {local} experts of ep rank {axis.rank}", rows, row_bytes)


def _activate(
    rows_q: Quantized, w_R: Tensor, w1: Weight, w2: Weight, groups: Groups, dtype: torch.dtype
) -> tuple[Quantized, Quantized]:
    """(x . w1^T as it is stored [R, 2f], SwiGLU of those bytes times the routing weight [R, f])."""
    if fuses_format(dtype, w2) and quantizes_output(rows_q, w1.q):
        h_q = grouped_gemm_quantized(rows_q, w1.q, groups)
        return h_q, quantize_swiglu(h_q, w_R, w2, dtype, groups.block_expert_B)
    h_R2f = grouped_gemm_nt(rows_q, w1.q, groups, dtype)
    if w2.is_watched:
        clear_unused(h_R2f, groups)
    return quantize_pre_activation(h_R2f, w_R, w2, groups.block_expert_B)


def _keep_for_wgrad(call: _Call, rows_q: Quantized, plan: DispatchPlan) -> Callable[[], Quantized]:
    """Keeps the tokens, or the rows where turning those is cheaper (stage 0 and 1); returns what makes x for wgrad from them."""
    if call.stage < 2 and plan.tokens is not None:
        gathered = call.stash.put(f"{call.name}.rows", plan.tokens).claim()
        return lambda: turn_tokens(gathered.pop(), plan)
    if call.stage >= 2 or turns_tokens(call.x.q, plan):
        tokens = call.x.ticket.claim()
        return lambda: dispatch_turned(tokens.pop(), plan)
    rows = call.stash.put(f"{call.name}.rows", rows_q).claim()
    return lambda: requantize_t(rows.pop(), plan.perm.groups.block_expert_B)


class _RoutedExperts(torch.autograd.Function):
    """forward   h = x[row] . w1^T,  a = silu(h_gate) * h_up * weight,  y = a . w2^T,  out[t] = sum of y over t's rows
    dgrad     da = dy . w2,  (dh, dweight) = swiglu'(h, da),  dx[t] = sum over t's rows of dh . w1
    wgrad     dw2 += dy^T . a,  dw1 += dh^T . x, per expert

    dy is quantised once, before it is dispatched (by `_Arrive`); its row and its column form both come from those bytes.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, carrier_TD: Tensor, weights_Tk: Tensor, anchor1: Tensor, anchor2: Tensor, call: _Call, trip: _Trip
    ) -> Tensor:
        x, w1, w2, stash, name = call.x, call.w1, call.w2, call.stash, call.name
        rows_q, w_R, plan = dispatch(x.q, weights_Tk, call.start)
        groups, dtype = plan.perm.groups, carrier_TD.dtype
        h_q, a_q = _activate(rows_q, w_R, w1, w2, groups, dtype)
        y_RD = grouped_gemm_nt(a_q, w2.q, groups, dtype)

        # x and the start of the plan must not live on with the graph: what backward needs of them is claimed below
        ctx.turned_x = _keep_for_wgrad(call, rows_q, plan) if w1.trainable else None
        ctx.call, ctx.plan, ctx.dtype = replace(call, x=None, start=None), replace(plan, tokens=None), dtype
        ctx.w_R = stash.put(f"{name}.weights", w_R).claim()
        ctx.h = stash.put(f"{name}.pre", h_q).claim()
        ctx.a = stash.put(f"{name}.out", a_q).claim() if call.stage < 1 else None
        trip.sums, trip.send_dy, ctx.trip = start_combine_rows(y_RD, plan), partial(_send_dy, ctx.call, ctx.plan), trip
        return carrier_TD.new_empty(1).expand(carrier_TD.shape)  # stands for the output until that has arrived

    @staticmethod
    def backward(ctx: FunctionCtx, _: Tensor) -> tuple[Tensor | None, ...]:
        call, plan, groups = ctx.call, ctx.plan, ctx.plan.perm.groups
        with call.in_memory(plan.axis, lambda: groups.max_rows, ctx.dtype):
            w1, w2 = call.w1, call.w2
            arriving, ctx.trip.dy = ctx.trip.dy, None
            w2_t = transposed(w2)  # while dy travels
            w_R, h_q, live_B = ctx.w_R.pop(), ctx.h.pop(), groups.block_expert_B
            dy_q, dy_t = arriving()
            del arriving
            da_Rf = grouped_gemm_nt(dy_q, w2_t, groups, ctx.dtype)
            del w2_t
            if w1.is_watched:
                clear_unused(da_Rf, groups)
            a_q = ctx.a.pop() if ctx.a is not None else quantize_swiglu(h_q, w_R, w2, ctx.dtype, live_B)
            if w2.trainable:
                a_t = requantize_t(a_q, live_B)
                w2.accumulate(lambda out, acc: grouped_wgrad(dy_t, a_t, groups, out, acc))
                del dy_t, a_t
            del dy_q, a_q
            dh_q, dh_t, dw_R = quantize_swiglu_backward(h_q, w_R, da_Rf, w1, live_B)
            del h_q, da_Rf
            weights_back = start_combine_slots(dw_R, plan)
            dx_RD = grouped_gemm_nt(dh_q, transposed(w1), groups, ctx.dtype)
            leaving = start_combine_rows(dx_RD, plan)  # dx travels while w1's gradient is made
            del dh_q, dx_RD
            if w1.trainable:
                x_t = ctx.turned_x()
                w1.accumulate(lambda out, acc: grouped_wgrad(dh_t, x_t, groups, out, acc))
            return leaving(), weights_back(), None, None, None, None


def _send_dy(call: _Call, plan: DispatchPlan, dout_TD: Tensor) -> Callable[[], tuple[Quantized, Quantized | None]]:
    w2 = call.w2
    with call.in_memory(plan.axis, lambda: plan.perm.groups.max_rows, dout_TD.dtype):
        forms = None if call.same_dy is None else call.same_dy.forms(dout_TD)
        dy_q = forms[0] if forms else w2.quantize_grad(dout_TD)
        return start_dispatch_both(dy_q, plan, w2.gradient_t if w2.trainable else None)


class _Arrive(torch.autograd.Function):
    """forward: the output of `_RoutedExperts`, arrived; backward: dy leaves."""

    @staticmethod
    def forward(ctx: FunctionCtx, stand_in_TD: Tensor, trip: _Trip) -> Tensor:
        sums, trip.sums, ctx.trip = trip.sums, None, trip
        return sums()

    @staticmethod
    def backward(ctx: FunctionCtx, dout_TD: Tensor) -> tuple[Tensor | None, ...]:
        ctx.trip.dy = ctx.trip.send_dy(dout_TD)
        return dout_TD, None


@dataclass(frozen=True, eq=False)
class Leaving:
    """The experts' output, under way to `RoutedExperts.forward`."""

    stand_in_TD: Tensor
    trip: _Trip


class RoutedExperts(nn.Module):
    """E SwiGLU experts, split over `ep`: `send` x and `start` with the router's ids, `work`, and call for the output.

    What is queued between `work` and the call runs beside the wire, in forward and in backward. Raises ExpertMemoryError where the
    rows that came do not fit, from `work` and from backward.
    """

    def __init__(self, config: ModelConfig, recipe: Recipe, ep: Axis, stash: Stash, name: str, stage: int) -> None:
        super().__init__()
        c = config
        self.num_experts, self.ep, self.stash, self.name, self.stage = c.num_experts, ep, stash, name, stage
        width, hidden, std = c.moe_intermediate_size, c.hidden_size, c.initializer_range
        options = dict(init_std=std, expert=True)
        self.gate_up = split_weight((c.num_experts, 2 * width, hidden), 0, ep, recipe, **options)
        self.down = split_weight((c.num_experts, hidden, width), 0, ep, recipe, **options)

    def send(self, x: Activation) -> PendingRows | None:
        """Sends x to all ranks, where nobody needs to know the ids for it."""
        return send_tokens(x.q, self.ep)

    def start(
        self, ids_Tk: Tensor, weights_Tk: Tensor | None = None, tokens: PendingRows | None = None,
        counted: BlockCounts | None = None,
    ) -> PlanStart:  # fmt: skip
        """Tells the ranks how many tokens will come, or their weights and ids. Other work may follow before `work`.

        Args:
            counted: of these ids, where the router has it.
        """
        weights = None if weights_Tk is None else weights_Tk.detach()
        return start_plan(ids_Tk, self.num_experts, self.ep, weights, tokens, counted)

    def forward(self, leaving: Leaving) -> Tensor:
        """The output of `work` [T, D]."""
        return _Arrive.apply(leaving.stand_in_TD, leaving.trip)

    def work(self, x: Activation, start: PlanStart, weights_Tk: Tensor, same_dy: SharedGradient | None = None) -> Leaving:
        """x [T, D] quantised, weights [T, k] of the ids that `start` got; `same_dy` where another layer gets dY too."""
        call = _Call(x, start, self.gate_up, self.down, self.stash, self.name, self.stage, same_dy)
        trip = _Trip()
        with call.in_memory(self.ep, lambda: buffer_rows(start), x.carrier.dtype):
            stand_in_TD = _RoutedExperts.apply(x.carrier, weights_Tk, self.gate_up.anchor, self.down.anchor, call, trip)
        return Leaving(stand_in_TD, trip)
