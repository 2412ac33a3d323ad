"""ZeRO: optimizer states (1), and gradients too (2), live with one owner among the replicas of a weight.

    backward     each bucket: every rank sends each owner its part (grad_wire.py); the owner has the FP32 sum of its part
    norm         every owner counts its parts, one all-reduce over the world
    step         AdamW on shells: Weights whose bytes are this rank's rows of the whole weight, so the owner quantises them, once
    publish      rows travel as they are stored, FP8 bytes and 128x128 scales; every rank then has the owner's bits

Parts are cut between 128-row blocks of a matrix, between the experts of a stack; a vector stays whole. Parts may be uneven and
empty. Where rows of several owners share one scale (tensorwise), the owners first take the maximum of their amax. ZeRO: arXiv
1910.02054; whole tensors by size: FP8-LM, arXiv 2310.18313, section 2.3.

Shapes: n ranks of an axis; rows are of dimension 0 of the local tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fp8.grad_norm import sum_of_squares
from fp8.recipe import BLOCK
from fp8.weight import SAMPLE_ROWS, Weight, weights
from parallel.collectives import Pending, all_reduce, start_all_gather
from parallel.grad_reduce import reduce_axis
from parallel.grad_wire import starts_of
from parallel.mesh import Axis, Mesh
from parallel.shell import Shell, has_one_scale, scale_rows
from parallel.traffic import FORMAT_NAMES

ALIGN = 16  # bytes; parts of a gather start at multiples of it


def unit_rows(weight: Weight) -> int:
    """Rows that stay together. Parts consist of whole 128-element tiles, which FP8 gradients need."""
    if weight.data.dim() == 3 and weight.data[0].numel() % BLOCK == 0:
        return 1
    return BLOCK if weight.data.dim() == 2 else weight.data.shape[0]


def cut_evenly(weights: Sequence[Weight], size: int) -> list[list[int]]:
    """For each weight the n + 1 rows between the parts of consecutive ranks; parts of a group are as even as units allow."""
    places = []  # (elements before it, weight, row) of every place where a cut may be
    total = 0
    for i, weight in enumerate(weights):
        rows, unit = weight.data.shape[0], unit_rows(weight)
        places += [(total + row * (weight.numel // rows), i, row) for row in range(0, rows, unit)]
        total += weight.numel
    places.append((total, len(weights), 0))
    chosen = [places[0]]
    for rank in range(1, size):
        chosen.append(max(chosen[-1], min(places, key=lambda p: abs(p[0] * size - rank * total))))
    chosen.append(places[-1])
    return [[row if i == at else (w.data.shape[0] if i > at else 0) for _, i, row in chosen] for at, w in enumerate(weights)]


def give_whole(weights: Sequence[Weight], loads: list[int]) -> tuple[list[Weight], list[list[int]]]:
    """FP8-LM's partition: the largest weight first, each to the rank with the fewest elements so far (`loads`, in place).

    Returns the weights ordered by owner, and their cuts as `cut_evenly` does.
    """
    owner: dict[Weight, int] = {}
    for weight in sorted(weights, key=lambda w: -w.numel):
        owner[weight] = loads.index(min(loads))
        loads[owner[weight]] += weight.numel
    ordered = sorted(weights, key=owner.__getitem__)
    return ordered, [[0 if r <= owner[w] else w.data.shape[0] for r in range(len(loads) + 1)] for w in ordered]


@dataclass(eq=False)
class Group:
    """Weights of one axis and format whose gradients are reduced, and whose bytes are gathered, together.

    Attributes:
        cuts: for each weight the n + 1 rows between the parts of consecutive ranks.
        shells: this rank's part of each weight; None where it has none.
    """

    axis: Axis
    names: list[str]
    weights: list[Weight]
    cuts: list[list[int]]
    shells: list[Shell | None] = field(init=False)
    _pending: dict[torch.dtype, Pending] = field(default_factory=dict, repr=False)
    views: dict[tuple[int, torch.dtype], tuple[tuple[int, ...], list[Tensor]]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        own = [slice(*cut[self.axis.rank : self.axis.rank + 2]) for cut in self.cuts]
        self.shells = [Shell.of(w, s) if s.start < s.stop else None for w, s in zip(self.weights, own, strict=True)]

    @property
    def bounds(self) -> list[int]:
        """n + 1 places in the bucket of gradients between the parts of consecutive ranks."""
        starts, found = starts_of(self.weights), []
        for rank in range(self.axis.size + 1):
            place = 0
            for weight, start, end, cut in zip(self.weights, starts, starts[1:], self.cuts, strict=False):
                if cut[rank] == weight.data.shape[0]:
                    place = end
                elif cut[rank]:
                    place = start + cut[rank] * (weight.numel // weight.data.shape[0])
            found.append(place)
        return found

    def parts(self, rank: int, dtype: torch.dtype) -> list[Tensor]:
        """The bytes of a rank's part of the weights of a format, as views of them: made anew only where a weight has moved."""
        own = [w for w in self.weights if w.data.dtype == dtype]
        here = tuple(t.data_ptr() for w in own for t in (w.data, w.scale_inv) if t is not None)
        known = self.views.get((rank, dtype))
        if known is None or known[0] != here:
            known = self.views[rank, dtype] = here, self._parts(rank, dtype)
        return known[1]

    def _parts(self, rank: int, dtype: torch.dtype) -> list[Tensor]:
        found = []
        for weight, cut in zip(self.weights, self.cuts, strict=True):
            rows = slice(cut[rank], cut[rank + 1])
            if rows.start < rows.stop and weight.data.dtype == dtype:
                tensors = [weight.data[rows]]
                if weight.scale_inv is not None:
                    tensors.append(weight.scale_inv[scale_rows(weight, rows)])
                found += [t.reshape(-1).view(torch.uint8) for t in tensors]
        return found

    def send(self) -> None:
        """Starts to send this rank's rows to all, padded to the largest part; one collective for each format."""
        for dtype in dict.fromkeys(w.data.dtype for w in self.weights):
            parts = [self.parts(rank, dtype) for rank in range(self.axis.size)]
            size = max(sum(-(-p.numel() // ALIGN) * ALIGN for p in own) for own in parts)
            buffer = torch.empty(1, size, dtype=torch.uint8, device=self.weights[0].data.device)
            own = parts[self.axis.rank]
            copy_bytes(places_of(own, buffer[0]), own)
            self._pending[dtype] = start_all_gather(buffer, self.axis, "weights", FORMAT_NAMES[dtype])

    def receive(self) -> None:
        """Until every rank's rows are in the weights."""
        while self._pending:
            dtype, pending = self._pending.popitem()
            arrived = pending.wait()
            for rank in range(self.axis.size):
                if rank != self.axis.rank:
                    parts = self.parts(rank, dtype)
                    copy_bytes(parts, places_of(parts, arrived[rank]))
            for weight in (w for w in self.weights if w.data.dtype == dtype):
                weight.note_written()


def _receive(groups: list[Group], module: nn.Module, args: Any) -> None:
    for group in groups:
        group.receive()


def places_of(parts: list[Tensor], buffer: Tensor) -> list[Tensor]:
    """Where the parts lie in a buffer of bytes."""
    sizes = [size for part in parts for size in (part.numel(), -part.numel() % ALIGN)]
    return list(buffer.split([*sizes, buffer.numel() - sum(sizes)])[: 2 * len(parts) : 2])


def copy_bytes(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies flat byte tensors in one launch for many: a group has some dozens, and the host would be slower than the wire."""
    if not targets:
        return
    if all(t.numel() % 4 == 0 for t in targets):  # parts of whole words, which FP8 blocks, scales and FP32 are
        targets, sources = [t.view(torch.int32) for t in targets], [t.view(torch.int32) for t in sources]
    torch._foreach_copy_(targets, sources)


class Shards:
    """Who owns what: groups in about the order in which backward finishes weights, the same on every rank.

    Args:
        named_weights: all weights of the model, their gradient formats final.
        bucket_bytes: gradient bytes of a group. A larger weight has a group of its own.
        whole: no weight is cut (stacks of experts are, between experts).
    """

    def __init__(
        self, named_weights: Iterable[tuple[str, Weight]], mesh: Mesh, bucket_bytes: int = 64 << 20, whole: bool = False
    ) -> None:
        self.mesh, self.groups, self.all = mesh, [], dict(named_weights)
        self._whole, self._loads, self._rows = whole, {}, {}
        self.lazy = False
        open_groups: dict[tuple[Any, ...], list[tuple[str, Weight]]] = {}
        for name, weight in reversed(self.all.items()):
            axis = reduce_axis(weight, mesh)
            fmt = "auto" if weight.recipe.adaptive else weight.data.dtype  # what may change must not part weights
            key = (id(axis), weight.grad_dtype, fmt, weight.trainable)
            group = open_groups.setdefault(key, [])
            if group and sum(w.numel for _, w in [*group, (name, weight)]) * weight.grad_dtype.itemsize > bucket_bytes:
                self._close(axis, group)
                group.clear()
            group.append((name, weight))
        for group in open_groups.values():
            self._close(reduce_axis(group[0][1], mesh), group)

    def _close(self, axis: Axis, group: list[tuple[str, Weight]]) -> None:
        named, members = {w: n for n, w in group}, [w for _, w in group]
        if self._whole and members[0].data.dim() < 3:
            members, cuts = give_whole(members, self._loads.setdefault(id(axis), [0] * axis.size))
        else:
            cuts = cut_evenly(members, axis.size)
        self.groups.append(Group(axis, [named[w] for w in members], members, cuts))
        self._rows |= {w: slice(*cut[axis.rank : axis.rank + 2]) for w, cut in zip(members, cuts, strict=True)}

    def named(self) -> dict[str, Weight]:
        """This rank's parts by name, in the model's order."""
        found = {n: s for g in self.groups for n, s in zip(g.names, g.shells, strict=True) if s is not None}
        return {name: found[name] for name in self.all if name in found}

    def rows_of(self, weight: Weight) -> slice:
        """This rank's rows of a weight."""
        return self._rows[weight]

    def publish(self) -> None:
        """Every rank gets every owner's rows: at once, or, after `overlap`, by the time that they are used."""
        groups = [g for g in reversed(self.groups) if g.axis.size > 1]  # about in the order of forward
        for place, group in enumerate(groups):
            if place > 1 and not self.lazy:  # what arrives is a copy of the weights: not of all at once
                groups[place - 2].receive()
            group.send()
        if not self.lazy:
            self.settle()

    def settle(self) -> None:
        """Until all rows have arrived: before weights are read outside the model's forward."""
        for group in self.groups:
            group.receive()

    def forget(self) -> None:
        """Weights have taken other formats: views would hold their old memory."""
        for group in self.groups:
            group.views.clear()

    def sharing_scales(self) -> list[tuple[Axis, dict[str, Weight]]]:
        """By axis, the matrices whose one scale is for the rows of several owners; the same on every rank."""
        found: dict[int, tuple[Axis, dict[str, Weight]]] = {}
        for group in self.groups:
            for name, weight, cut in zip(group.names, group.weights, group.cuts, strict=True):
                owners = sum(start < stop for start, stop in pairwise(cut))
                if owners > 1 and weight.data.dim() == 2 and has_one_scale(weight):
                    found.setdefault(id(group.axis), (group.axis, {}))[1][name] = weight
        return list(found.values())

    def share_samples(self) -> None:
        """`auto`: every rank gets the sample of each weight from the owner of its first rows, and the largest magnitude of all."""
        for group in self.groups:
            chosen = [(w, s) for w, s in zip(group.weights, group.shells, strict=True) if w.recipe.adaptive]
            if not chosen:
                continue
            device = chosen[0][0].data.device
            sizes = [min(w.data.shape[-2], SAMPLE_ROWS) * w.data.shape[-1] for w, _ in chosen]
            rows, amax = torch.zeros(sum(sizes), dtype=torch.bfloat16, device=device), torch.zeros(len(chosen), device=device)
            for (weight, shell), part, largest in zip(chosen, rows.split(sizes), amax, strict=True):
                first = shell is not None and shell.rows.start == 0
                if first:
                    part.copy_(shell.sample.reshape(-1))
                if first or (shell is not None and weight.data.dim() == 2):
                    largest.copy_(shell.sample_amax)
            all_reduce(rows, group.axis, "samples")
            all_reduce(amax, group.axis, "samples", "max")
            for (weight, _), part, largest in zip(chosen, rows.split(sizes), amax, strict=True):
                weight.sample, weight.sample_amax = part.view(-1, weight.data.shape[-1]), largest

    def overlap(self, model: nn.Module) -> None:
        """Lets rows arrive under the next forward: each layer waits for the groups of its own weights, in whatever order it runs.

        Weights of the model itself (embedding, last norm, head) are waited for when it starts. Waiting starts no collective, so
        ranks may run layers in different orders.
        """
        self.lazy = True
        group_of = {w: g for g in self.groups for w in g.weights}
        units = [m for child in model.children() for m in (child if isinstance(child, nn.ModuleList) else [child])]
        for unit in units:
            if not isinstance(unit, Weight):
                unit.register_forward_pre_hook(partial(_receive, [group_of[w] for _, w in weights(unit)]))
        own = [group_of[child] for child in model.children() if isinstance(child, Weight)]
        model.register_forward_pre_hook(partial(_receive, own))

    def norm(self) -> Tensor:
        """As `global_grad_norm`, each part counted by its owner."""
        parts, tp, device = [], self.mesh.tp, next(iter(self.all.values())).data.device
        for group in self.groups:
            for weight, shell in zip(group.weights, group.shells, strict=True):
                if shell is None or not (shell.trainable and shell.has_grad):
                    continue
                split = tuple(weight.data.shape) != tuple(weight.global_shape)
                for p in shell.pieces:
                    if weight.expert or weight.tp_partial or (tp.rank % p.replicas == 0 if split else tp.rank == 0):
                        parts.append(shell.main_grad[p.local])
        return all_reduce(sum_of_squares(parts).to(device), self.mesh.world, "norm").sqrt().float()
