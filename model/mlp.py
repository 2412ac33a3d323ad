"""Dense SwiGLU MLP: down(silu(gate(x)) * up(x)). Also the shared expert.

Shapes: T tokens, D features, f width of the MLP. gate and up are one weight [2f, D], gate first.
"""

from __future__ import annotations

from torch import Tensor, nn

from fp8.activation import Activation
from fp8.linear import SharedGradient
from fp8.linear_swiglu import linear_swiglu
from fp8.recipe import Recipe
from fp8.stash import Stash
from fp8.swiglu import swiglu_quantize
from parallel.linear import column_linear, row_linear
from parallel.mesh import Axis
from parallel.split import split_weight


class MLP(nn.Module):
    """x [t, D] quantised -> [t, D]; the width is split over `tp`."""

    def __init__(self, hidden: int, width: int, std: float, recipe: Recipe, tp: Axis, stash: Stash, name: str, stage: int) -> None:
        super().__init__()
        self.tp, self.stash, self.name, self.stage = tp, stash, name, stage
        self.gate_up = split_weight((2 * width, hidden), 0, tp, recipe, [(width, 1), (width, 1)], init_std=std)
        self.down = split_weight((hidden, width), 1, tp, recipe, init_std=std)

    def forward(self, x: Activation, shared: SharedGradient | None = None) -> Tensor:
        """`shared`: where another layer gets the same dY."""
        to = self.down, self.stash, f"{self.name}.swiglu", self.stage >= 1
        if self.tp.size == 1:
            a = linear_swiglu(x, self.gate_up, *to)
        else:
            a = swiglu_quantize(column_linear(x, self.gate_up, self.tp), *to)
        return row_linear(a, self.down, self.tp, shared)
