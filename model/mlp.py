"""Dense SwiGLU MLP: down(silu(gate(x)) * up(x)). Also the shared expert.

Shapes: T tokens, D features, f width of the MLP. gate and up are one weight [2f, D], gate first.
"""

from __future__ import annotations

from torch import Tensor, nn

from fp8.activation import Activation
from fp8.linear import linear
from fp8.recipe import Recipe
from fp8.stash import Stash
from fp8.swiglu import swiglu_quantize
from fp8.weight import Weight


class MLP(nn.Module):
    """x [T, D] quantised -> [T, D]."""

    def __init__(self, hidden: int, width: int, std: float, recipe: Recipe, stash: Stash, name: str, stage: int) -> None:
        super().__init__()
        self.stash, self.name, self.stage = stash, name, stage
        self.gate_up = Weight(2 * width, hidden, recipe=recipe, init_std=std)
        self.down = Weight(hidden, width, recipe=recipe, init_std=std)

    def forward(self, x: Activation) -> Tensor:
        h_T2f = linear(x, self.gate_up)
        return linear(swiglu_quantize(h_T2f, self.down, self.stash, f"{self.name}.swiglu", rebuild=self.stage >= 1), self.down)
