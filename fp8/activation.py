"""The edge between two autograd Functions whose bytes are FP8.

Autograd casts an incoming gradient to the dtype of the forward's output: behind an FP8 output a gradient of 1000 arrives as 448. So
FP8 bytes are never differentiable. Beside them travels `carrier`, a tensor of the right shape without storage of its own: the
producer returns it as a differentiable output, each consumer takes it as an input, and its gradient is dX.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fp8.quantized import Quantized
from fp8.stash import Ticket


@dataclass(frozen=True, eq=False)
class Activation:
    """Quantised rows on their way from one Function to the next.

    Attributes:
        q: what a GEMM reads, [T, D].
        carrier: [T, D] without storage; differentiable; its gradient is dX.
        ticket: how a consumer's backward gets q again; `ticket.claim()` in forward, `pop()` in backward.
    """

    q: Quantized
    carrier: Tensor
    ticket: Ticket


def make_carrier(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """`shape` over a single element of like's dtype: something for autograd to hold, without memory."""
    return like.new_empty(1).expand(shape)
