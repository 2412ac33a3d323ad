"""The transpose of a weight that dgrad reads: made for each use and dropped, or made once after each update and kept.

Made for each use, every micro-batch turns every weight: two bytes of traffic a parameter. Kept, a step's first backward does, and
weights take a byte a parameter more. The bytes are the same either way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fp8.quantize import transpose
from fp8.quantized import Quantized

if TYPE_CHECKING:
    from fp8.weight import Weight


class KeptTranspose:
    """Where one weight's transpose stays; its memory is taken by the first use and never moves, so CUDA graphs may read it."""

    def __init__(self) -> None:
        self._turned: Quantized | None = None
        self._version = -1

    @property
    def nbytes(self) -> int:
        """What it holds now: nothing before the first use."""
        return 0 if self._turned is None else self._turned.nbytes

    def of(self, weight: Weight) -> Quantized:
        """[..., D, F] of the weight's present values."""
        q, old = weight.q, self._turned
        if q.scale_inv is None:  # `auto` may have taken a format that needs no copy
            return transpose(q)
        if old is not None and (old.data.dtype, old.tile) != (q.data.dtype, q.tile):
            old, self._version = None, -1
        if self._version != weight.version:
            self._turned, self._version = transpose(q, old), weight.version
        return self._turned

    def refresh(self, weight: Weight) -> None:
        """Turns new values where somebody has asked before: ahead of a graph that reads them without asking."""
        if self._turned is not None:
            self.of(weight)


def transposed(weight: Weight) -> Quantized:
    """The exact transpose [..., D, F] of a weight [..., F, D], for dgrad."""
    return transpose(weight.q) if weight.kept_transpose is None else weight.kept_transpose.of(weight)


def keep_transposes(weights: Iterable[Weight]) -> None:
    """From now on these weights keep their transposes: those that something asks for."""
    for weight in weights:
        weight.kept_transpose = KeptTranspose()


def kept_bytes(weights: Iterable[Weight]) -> int:
    """What the kept transposes of these weights hold."""
    return sum(weight.kept_transpose.nbytes for weight in weights if weight.kept_transpose is not None)


def refresh_transposes(weights: Iterable[Weight]) -> None:
    """Brings kept transposes up to date with their weights."""
    for weight in weights:
        if weight.kept_transpose is not None:
            weight.kept_transpose.refresh(weight)
