"""How gradients travel when an owner sums them: each rank sends every owner its part, the owner adds in FP32, in rank order.

    fp8       E4M3, 1x128 tiles with power-of-two scales; a tile never straddles two weights
    bf16      rounded to BF16; fp32: as they are

Without sharded states the owners round their sums to FP8 and send them to everybody, the owner's own copy included: two
roundings for any number of ranks, and the same bits everywhere. FP8 is rounded to nearest, or stochastically with Philox words
that depend on seed, step, weight, global element and sending rank.

Shapes: flat [F] a bucket's gradients one behind the other, each weight from a multiple of 128 on; T tiles of 128; n ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8.optimizer import chunks
from fp8.philox import weight_words
from fp8.quantize import column_major, quantize
from fp8.quantized import Quantized
from fp8.recipe import BLOCK, E4M3, FORMATS, Spec
from fp8.state_codecs import CODECS, pow2
from fp8.weight import Weight
from parallel.collectives import Pending, start_all_gather, start_all_to_all
from parallel.mesh import Axis
from parallel.payload import RowFormat, pack, unpack
from parallel.shell import Shell
from parallel.traffic import FORMAT_NAMES

KIND = "gradients"
TILES = Spec("e4m3", (1, BLOCK), "block")
PACKED = RowFormat(E4M3, BLOCK, TILES.tile)  # a tile on the wire: 128 codes, the exponent of their scale, padding
# Philox streams (0 and 1 are the optimizer's, fp8/philox.py): what a rank sends, and what an owner sends on
SENT, SUMMED = 2, 3
PART = 1 << 23  # elements that are rounded stochastically at a time: the unfused passes need some 60 bytes each


def starts_of(weights: Sequence[Weight], unit: int = BLOCK) -> list[int]:
    """Where each weight begins in a bucket, and where the bucket ends: multiples of `unit`."""
    starts = [0]
    for weight in weights:
        starts.append(starts[-1] + -(-weight.numel // unit) * unit)
    return starts


def quantize_tiles(x_F: Tensor, word_F: Tensor | None = None) -> Quantized:
    """[F] -> E4M3 [T, 128], one scale a tile. What is not finite becomes NaN: FP8 has no inf, and 448 would hide it.

    Args:
        word_F: random words to round by; None rounds to nearest.
    """
    x_T = x_F.view(-1, BLOCK).float()
    if word_F is None:
        x_T = torch.where(x_T.isfinite(), x_T, float("nan"))
        wide = 16 if len(x_T) % 16 == 0 else 1  # tiles in a row: a CUDA grid has no room for 4M rows
        q = quantize(x_T.view(-1, wide * BLOCK), TILES)
        return Quantized(q.data.view(-1, BLOCK), q.scale_inv.reshape(-1, 1), TILES.tile)
    fine = x_T.isfinite()  # the codec is the optimizer's, which meets nothing else
    parts = CODECS["exp_avg"]["fp8"].encode(torch.where(fine, x_T, 0.0), word_F.view(-1, BLOCK))
    data = torch.where(fine, parts["data"].view(torch.uint8), 0x7F).view(E4M3)
    return Quantized(data, column_major(pow2(parts["scale"].long() - 127)), TILES.tile)


def _kernels(t: Tensor) -> ModuleType | None:
    """The Triton kernels on a GPU, None for the reference."""
    if not t.is_cuda:
        return None
    from parallel import grad_wire_kernels  # Triton comes with CUDA builds of torch only

    return grad_wire_kernels


def pack_tiles(x_F: Tensor, word_F: Tensor | None = None) -> Tensor:
    """[F] -> uint8 [T, 132]: `quantize_tiles` as it travels. One pass on a GPU, unless words are given."""
    kernels = _kernels(x_F) if word_F is None else None
    return kernels.pack_tiles(x_F) if kernels else pack(quantize_tiles(x_F, word_F))


def sum_tiles(packed: Tensor, size: int, out_F: Tensor, add: bool = False) -> None:
    """Packed tiles of `size` ranks behind each other: their FP32 sum, in rank order, into (or added to) out_F [F / size]."""
    if kernels := _kernels(packed):
        return kernels.sum_tiles(packed, size, out_F, add)
    total = sum_of_ranks(unpack(packed, PACKED), size)
    out_F.copy_(out_F + total if add else total)


@dataclass(eq=False)
class OwnerBucket:
    """Gradients that travel together, and who sums which part of them.

    Attributes:
        bounds: n + 1 places: rank r sums flat[bounds[r] : bounds[r + 1]]. Multiples of 128 where FP8 travels.
        wire: "fp8", "bf16" or "fp32".
        stochastic: how FP8 is rounded.
        shared: the sums go back to all ranks; otherwise only the owner has them.
        transient: gradients are let go as soon as they are sent, and `own` adds up over micro-batches in FP32 (ZeRO-2).
        flat: [F]; `main_grad` of each weight is a view of it. None between steps when transient.
        own: what this rank sums; a part of `flat` unless transient.
        round: micro-batches of the step that have been sent before.
    """

    axis: Axis
    weights: list[Weight]
    bounds: list[int]
    wire: str = "fp8"
    stochastic: bool = False
    shared: bool = True
    transient: bool = False
    missing: int = 0
    round: int = 0
    flat: Tensor | None = field(init=False, default=None, repr=False)
    own: Tensor = field(init=False, repr=False)
    _arriving: Pending | None = field(default=None, repr=False)
    _returning: Pending | None = field(default=None, repr=False)
    _sent: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        low, high = self.bounds[self.axis.rank], self.bounds[self.axis.rank + 1]
        if self.transient:
            self.own = torch.zeros(high - low, device=self.weights[0].data.device)
        else:
            self.flat = self._collect()
            for weight, start in zip(self.weights, starts_of(self.weights), strict=False):
                weight.main_grad = self.flat[start : start + weight.numel].view(weight.data.shape)
            self.own = self.flat[low:high]

    def _collect(self) -> Tensor:
        """The gradients as they are, in one piece."""
        first = self.weights[0]
        flat = torch.zeros(self.bounds[-1], dtype=first.grad_dtype, device=first.data.device)
        for weight, start in zip(self.weights, starts_of(self.weights), strict=False):
            if weight.main_grad is not None:
                flat[start : start + weight.numel].copy_(weight.main_grad.reshape(-1))
        return flat

    def _take(self) -> None:
        """Transient: the gradients move into `flat`; otherwise they have always been there."""
        if self.transient:
            self.flat = self._collect()
            for weight in self.weights:
                weight.main_grad = None

    def launch(self) -> None:
        """Sends each owner its part."""
        self._take()
        send = [end - start for start, end in pairwise(self.bounds)]
        if self.wire == "fp8":
            on_wire = self._pack(self.flat, 0, SENT, self.axis.rank + self.round * self.axis.size)
            send = [elements // BLOCK for elements in send]
        else:
            on_wire = self.flat.to(FORMATS[self.wire])
        recv = [send[self.axis.rank]] * self.axis.size
        self._arriving = start_all_to_all(on_wire, self.axis, KIND, send, recv, self._format)
        self._sent = on_wire  # alive until it has arrived
        if self.transient:
            self.flat = None

    def proceed(self) -> None:
        """Once parts have arrived: sums them and, if they are shared, sends the sums on."""
        if self._arriving is None:
            return
        arrived, self._arriving, self._sent = self._arriving.wait(), None, None
        if self.shared:
            low, high = self.bounds[self.axis.rank], self.bounds[self.axis.rank + 1]
            total = torch.empty(high - low, device=arrived.device)
            self._add_up(arrived, total)
            self._returning = start_all_gather(self._pack(total, low, SUMMED, 0), self.axis, KIND, self._format)
        else:
            self._add_up(arrived, self.own, add=self.round > 0)

    def _add_up(self, arrived: Tensor, out: Tensor, add: bool = False) -> None:
        if self.wire == "fp8":
            return sum_tiles(arrived, self.axis.size, out, add)
        total = sum_of_ranks(arrived, self.axis.size)
        out.copy_(out + total if add else total)

    def finish(self) -> None:
        """Until `flat` (or this rank's part of it) holds the sums."""
        self.proceed()
        if self._returning is not None:
            sum_tiles(self._returning.wait(), 1, self.flat)
            self._returning = None

    @property
    def _format(self) -> str:
        return FORMAT_NAMES[E4M3 if self.wire == "fp8" else FORMATS[self.wire]]

    def _pack(self, values: Tensor, low: int, stream: int, rank: int) -> Tensor:
        """Packed tiles of `values`, which are those of the bucket from `low` on; random words are drawn for some rows at a time."""
        if not self.stochastic:
            return pack_tiles(values)
        high, packed = low + values.numel(), []
        for weight, start in zip(self.weights, starts_of(self.weights), strict=False):
            draw = replace(weight.gradient_draw(rank), stream=stream)
            for first, last, part in weight_parts(weight):
                a, b = max(start + first, low), min(start + last, high)
                if a < b:
                    words = pad(weight_words(draw, part).view(-1), (0, last - first - part.numel))
                    packed.append(pack_tiles(values[a - low : b - low], words[a - start - first : b - start - first]))
        padding = values[max(starts_of(self.weights)[-1] - low, 0) :]
        return torch.cat([*packed, pack_tiles(padding)])


def weight_parts(weight: Weight) -> Iterator[tuple[int, int, Weight]]:
    """(first element, end, Weight) of parts of about PART elements, from and to multiples of 128."""
    each = weight.numel // weight.data.shape[0]
    parts = list(chunks(weight.data.shape, PART))
    if any(rows.start * each % BLOCK for rows in parts):
        parts = [slice(0, weight.data.shape[0])]
    for rows in parts:
        yield rows.start * each, -(-rows.stop * each // BLOCK) * BLOCK, weight if len(parts) == 1 else Shell.of(weight, rows)


def sum_of_ranks(arrived: Quantized | Tensor, size: int) -> Tensor:
    """Parts of `size` ranks behind each other -> their FP32 sum [F / size], added in rank order."""
    is_tensor = isinstance(arrived, Tensor)
    rows, total = arrived.shape[0] // size, None
    for start in range(0, size * rows, max(rows, 1)):
        part = slice(start, start + rows)
        value = (arrived[part].float() if is_tensor else arrived.rows(part).dequantize()).reshape(-1)
        total = value.clone() if total is None else total.add_(value)
    return torch.zeros(0, device=arrived.device) if total is None else total


def even_bounds(size: int, tiles: int) -> list[int]:
    """Equal parts of a bucket of `tiles` tiles, a multiple of `size`."""
    assert tiles % size == 0, f"{tiles} tiles do not split over {size} ranks"
    return [rank * (tiles // size) * BLOCK for rank in range(size + 1)]
