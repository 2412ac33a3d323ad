"""Recipes: which format, tile and scale rule each role of a GEMM uses.

A role is what a matrix is to the GEMM: activation, weight or gradient, plus `wire`, the form in which rows travel between ranks.
Sources: 1x128 and 128x128 tiles, E4M3 in both passes: DeepSeek-V3 (arXiv 2412.19437, section 3.3).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


E4M3, E5M2, BF16, FP32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32
FORMATS = {"e4m3": E4M3, "e5m2": E5M2, "bf16": BF16, "fp32": FP32}
FP8_MAX = {E4M3: 448.0, E5M2: 57344.0}
BLOCK = 128  # edge of a scale block and of the GEMM's K step


@dataclass(frozen=True)
class Spec:
    """Format, tile and scale rule of one role.

    Attributes:
        fmt: "e4m3", "e5m2", "bf16" or "fp32".
        tile: (rows, columns) that share one scale; None when unscaled.
        scaling: "none" | "block" (power of two from the tile's own amax).
    """

    fmt: str
    tile: tuple[int, int] | None = None
    scaling: str = "none"

    def __post_init__(self) -> None:
        assert self.fmt in FORMATS, f"unknown format {self.fmt!r}; known: {', '.join(FORMATS)}"
        assert (self.scaling == "none") == (self.tile is None) == (not self.is_fp8), f"{self} mixes scaled and unscaled"

    @property
    def dtype(self) -> torch.dtype:
        return FORMATS[self.fmt]

    @property
    def is_fp8(self) -> bool:
        return self.fmt in ("e4m3", "e5m2")


@dataclass(frozen=True)
class Recipe:
    """How the three GEMMs of a layer and the wires between ranks represent numbers. Frozen: a layer keeps it for life."""

    name: str
    activation: Spec
    weight: Spec
    gradient: Spec
    wire: Spec = field(default=Spec("bf16"))

    @staticmethod
    def block() -> Recipe:
        """E4M3 everywhere; activations and gradients 1x128, weights 128x128, power-of-two scales."""
        row = Spec("e4m3", (1, BLOCK), "block")
        return Recipe("block", activation=row, weight=Spec("e4m3", (BLOCK, BLOCK), "block"), gradient=row, wire=row)

    @staticmethod
    def bf16() -> Recipe:
        """Operands in BF16, products accumulated in FP32."""
        return Recipe("bf16", Spec("bf16"), Spec("bf16"), Spec("bf16"), Spec("bf16"))

    @staticmethod
    def fp32() -> Recipe:
        """Operands as they come, in FP32: the reference of every parity test."""
        return Recipe("fp32", Spec("fp32"), Spec("fp32"), Spec("fp32"), Spec("fp32"))

    @property
    def is_fp8(self) -> bool:
        return self.weight.is_fp8


RECIPES = {"block": Recipe.block, "bf16": Recipe.bf16, "fp32": Recipe.fp32}


def recipe_named(name: str) -> Recipe:
    """The recipe a config names.

    Raises:
        ValueError: the name is unknown; the message lists the known ones.
    """
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}; known: {', '.join(RECIPES)}")
    return RECIPES[name]()


