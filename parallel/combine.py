"""The way back from the experts (their way there: dispatch.py).

    combine_rows      y [R, D] -> [T, D], summed over each token's experts: the output, and dX in backward
    combine_slots     dweights [R] -> [T, k]

The experts of one rank are summed there, so one row a (token, rank) comes back.

Shapes: T tokens here, k experts a token, n ranks, N rows that have come here, R rows of the padded buffer, D features.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fp8.permute import sum_rows, unpermute_slots, unpermute_sum
from fp8.quantize import quantize
from parallel.collectives import start_all_to_all, start_swap
from parallel.dispatch import DispatchPlan
from parallel.payload import RowFormat, pack, sum_packed
from parallel.traffic import FORMAT_NAMES

KIND = "combine"


def start_combine_rows(y_RD: Tensor, plan: DispatchPlan) -> Callable[[], Tensor]:
    """[R, D] -> [T, D]: the sum over each token's experts, in FP32; on the wire in y's dtype or `axis.wire`.

    Returns a function that waits and gives the sum.
    """
    axis = plan.axis
    if axis.gathers and axis.size == 2 and axis.wire is None:
        return _start_swap(y_RD, plan)
    partial_ND = unpermute_sum(y_RD, plan.perm)
    if axis.size == 1:
        return lambda: partial_ND
    if axis.wire is None:
        flight = start_all_to_all(partial_ND, axis, KIND, plan.recv, plan.send)
        return lambda: sum_rows(flight.wait(), plan.row_Tn)
    q, dtype = quantize(partial_ND, axis.wire), y_RD.dtype
    form = RowFormat.of(q)
    flight = start_all_to_all(pack(q), axis, KIND, plan.recv, plan.send, FORMAT_NAMES[form.dtype])
    return lambda: sum_packed(flight.wait(), form, plan.row_Tn, dtype)


def _start_swap(y_RD: Tensor, plan: DispatchPlan) -> Callable[[], Tensor]:
    """Two ranks with each other's tokens: the other's sums first, so that they travel while this rank's are made. The same bits."""
    axis, tokens = plan.axis, plan.send[0]
    row_rTk = plan.perm.row_Tk.view(2, tokens, -1)
    flight = start_swap(sum_rows(y_RD, row_rTk[1 - axis.rank]), axis, KIND)
    own_TD = sum_rows(y_RD, row_rTk[axis.rank])
    return lambda: own_TD.add_(flight.wait())


def combine_rows(y_RD: Tensor, plan: DispatchPlan) -> Tensor:
    """`start_combine_rows`, waited for."""
    return start_combine_rows(y_RD, plan)()


def start_combine_slots(dw_R: Tensor, plan: DispatchPlan) -> Callable[[], Tensor]:
    """[R] -> [T, k]: a value of each (token, slot), back from the rank of its expert. Exact: each has one source."""
    dw_Nk = unpermute_slots(dw_R, plan.perm)
    if plan.axis.size == 1:
        return lambda: dw_Nk
    flight = start_all_to_all(dw_Nk, plan.axis, KIND, plan.recv, plan.send)
    return lambda: sum_rows(flight.wait(), plan.row_Tn)


def combine_slots(dw_R: Tensor, plan: DispatchPlan) -> Tensor:
    """`start_combine_slots`, waited for."""
    return start_combine_slots(dw_R, plan)()
