"""Shells: Weights over the memory of some rows of another Weight. An owner updates its rows through them (shard.py).

A format is the whole weight's business, and so is a scale that rows of several owners share: a shell takes part in neither, and
its optimizer brings both about (sharded_optimizer.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8.recipe import TENSORWISE
from fp8.weight import Piece, Weight


class Shell(Weight):
    """`rows` of a weight: what it is set to, the other one holds.

    Attributes:
        whole: the other weight.
        rows: of its first dimension.
        is_cut: others hold rows of the same matrix.
    """

    whole: Weight
    rows: slice
    is_cut: bool

    @staticmethod
    def of(weight: Weight, rows: slice) -> Shell:
        """The shell of `rows`, which must not be empty."""
        with torch.device("meta"):
            shell = Shell(
                rows.stop - rows.start, *weight.data.shape[1:], recipe=weight.recipe, init_std=weight.init_std, decay=weight.decay,
                expert=weight.expert, tp_partial=weight.tp_partial, global_shape=tuple(weight.global_shape),
                pieces=tuple(_pieces(weight, rows)),
            )  # fmt: skip
        shell.name, shell.grad_dtype = weight.name, weight.grad_dtype
        shell.anchor.requires_grad_(weight.trainable)
        # a plain reference: as a submodule the other weight would be counted once more
        object.__setattr__(shell, "whole", weight)
        shell.rows, shell.is_cut = rows, weight.data.dim() == 2 and rows.stop - rows.start < weight.data.shape[0]
        shell.attach()
        return shell

    def attach(self) -> None:
        """Takes the other weight's format and memory, also after they have changed."""
        self.recipe, self.data = self.whole.recipe, self.whole.data[self.rows]
        scale_inv = self.whole.scale_inv
        self.scale_inv = None if scale_inv is None else scale_inv[scale_rows(self.whole, self.rows)]

    @property
    def shares_scale(self) -> bool:
        """Whether one scale is for rows of others too."""
        return self.is_cut and has_one_scale(self)

    @torch.no_grad()
    def set_(self, value: Tensor) -> None:
        """As `Weight.set_`; where a scale is shared nothing is written before it is known (`ShardedAdamW.publish`)."""
        if not self.shares_scale:
            super().set_(value)
        elif self.recipe.adaptive:
            self.keep_sample(value)

    def adopt(self, value: Tensor) -> None:
        self.keep_sample(value)

    def note_written(self) -> None:
        """Of the other weight's bytes too: they are the same."""
        super().note_written()
        self.whole.note_written()


def _pieces(weight: Weight, rows: slice) -> list[Piece]:
    found = []
    for p in weight.pieces:
        start = p.local[0].start or 0
        low, high = max(start, rows.start), min(p.local[0].stop, rows.stop)
        if low < high:
            local = (slice(low - rows.start, high - rows.start), *p.local[1:])
            found.append(Piece((p.offset[0] + low - start, *p.offset[1:]), local, p.replicas))
    return found


def has_one_scale(weight: Weight) -> bool:
    """Whether each matrix has one scale, from its own values."""
    return weight.spec.is_fp8 and weight.spec.tile == TENSORWISE and weight.spec.scaling != "static"


def scale_rows(weight: Weight, rows: slice) -> slice:
    """Rows of the scales that belong to `rows`."""
    edge = 1 if weight.data.dim() == 3 else weight.spec.tile[0]
    return slice(None) if edge == 0 else slice(rows.start // edge, -(-rows.stop // edge))
