"""Weights of which a rank holds a part: which part, and where it belongs in the whole.

A weight is cut along one dimension. Where that dimension is several matrices behind each other ([Q | K | V], [gate | up]), each
section is cut on its own, so that every rank gets its share of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fp8.recipe import Recipe
from fp8.weight import Piece, Weight
from parallel.mesh import Axis


def section_part(size: int, unit: int, axis: Axis) -> tuple[int, int, int]:
    """(first row, rows, replicas) of this rank in a section of `size` rows made of units (heads) that stay whole.

    Fewer units than ranks: consecutive ranks share a unit.

    Raises:
        ValueError: units and ranks divide neither way.
    """
    units = size // unit
    if units % axis.size == 0:
        rows = size // axis.size
        return axis.rank * rows, rows, 1
    if axis.size % units == 0:
        replicas = axis.size // units
        return axis.rank // replicas * unit, unit, replicas
    raise ValueError(f"{units} units of {unit} rows cannot be split over {axis.size} ranks")


def split_weight(
    global_shape: Sequence[int],
    dim: int,
    axis: Axis,
    recipe: Recipe,
    sections: Sequence[tuple[int, int]] | None = None,
    **options: Any,
) -> Weight:
    """This rank's part of a weight [..., F, D]; the whole of it on a solo axis.

    Args:
        dim: the dimension that is cut.
        sections: (size, unit) of each section along `dim`, sizes summing to it; None: one section of single rows.
        options: for `Weight`.
    """
    pieces, whole_start, start = [], 0, 0
    for size, unit in sections or [(global_shape[dim], 1)]:
        first, rows, replicas = section_part(size, unit, axis)
        offset, local = [0] * len(global_shape), [slice(0, n) for n in global_shape]
        offset[dim], local[dim] = whole_start + first, slice(start, start + rows)
        pieces.append(Piece(tuple(offset), tuple(local), replicas))
        whole_start, start = whole_start + size, start + rows
    assert whole_start == global_shape[dim], f"sections sum to {whole_start}, the dimension is {global_shape[dim]}"
    shape = [start if d == dim else n for d, n in enumerate(global_shape)]
    if axis.size == 1:
        return Weight(*global_shape, recipe=recipe, **options)
    return Weight(*shape, recipe=recipe, global_shape=tuple(global_shape), pieces=tuple(pieces), **options)
