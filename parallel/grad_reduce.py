"""Gradient reduction over replicas, overlapped with backward; and the one global gradient norm.

    dense weights            summed over dp
    expert weights           summed over edp: dispatch has already brought the tokens of the whole ep axis
    tp_partial weights       summed over world: norms, router, QK-norm see only their tp rank's tokens or heads
    replicated pieces        KV heads shared by several tp ranks: summed over those ranks first, then over dp

The loss is normalised by the global count of valid tokens, so sums are right and nothing is divided by the number of
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fp8.grad_norm import sum_of_squares
from fp8.recipe import BLOCK
from fp8.weight import Piece, Weight
from parallel.collectives import Pending, all_reduce, start_all_reduce
from parallel.grad_auto_scale import AutoScale, SharedScaleBucket
from parallel.grad_wire import KIND, OwnerBucket, even_bounds, starts_of
from parallel.mesh import Axis, Mesh


def reduce_axis(weight: Weight, mesh: Mesh) -> Axis:
    """The ranks over which a weight's gradient is summed."""
    if weight.expert:
        return mesh.edp
    return mesh.world if weight.tp_partial else mesh.dp


def sum_replicas(weight: Weight, tp: Axis) -> None:
    """Sums the pieces that several tp ranks hold (`piece.replicas` consecutive ones) over their holders, in place.

    One all-reduce over tp of a buffer with a slot for each distinct piece: no process group of its own for a few rows.
    """
    for piece in weight.pieces:
        if piece.replicas > 1:
            own = weight.main_grad[piece.local]
            slots = own.new_zeros(tp.size // piece.replicas, *own.shape)
            slots[tp.rank // piece.replicas] = own
            own.copy_(all_reduce(slots, tp, KIND)[tp.rank // piece.replicas])


@dataclass(eq=False)
class _Bucket:
    """Gradients of one axis and dtype that travel in one all-reduce. `main_grad` of each weight is a view of `flat`."""

    axis: Axis
    flat: Tensor
    weights: list[Weight]
    wire_dtype: torch.dtype
    missing: int = 0
    pending: Pending | None = None
    on_wire: Tensor | None = field(default=None, repr=False)

    def launch(self) -> None:
        self.on_wire = self.flat if self.wire_dtype == self.flat.dtype else self.flat.to(self.wire_dtype)
        self.pending = start_all_reduce(self.on_wire, self.axis, KIND)

    def proceed(self) -> None:
        """An all-reduce has no second leg."""

    def finish(self) -> None:
        self.pending.wait()
        if self.on_wire is not self.flat:
            self.flat.copy_(self.on_wire)
        self.pending = self.on_wire = None


class GradReducer:
    """Sums gradients over replicas while backward still runs.

    Buckets are built once, in reverse construction order (about the order in which backward finishes weights), and
    launched strictly in that order, so that every rank issues the same collectives whatever order its gradients come
    in.

    Args:
        named_weights: all weights of the model; frozen ones are left out.
        bucket_bytes: gradient bytes of one all-reduce. A larger weight has a bucket of its own.
        wire_dtype: FP32, or BF16 for half the bytes (rounded once before the sum, and by the sum).
        fp8: E4M3 to an owner that sums in FP32 and sends the sum on in E4M3 (parallel/grad_wire.py), instead of `wire_dtype`.
        stochastic: how `fp8` rounds; the optimizer of the weights must exist (it numbers the steps).
        auto: FP8-LM's sums under a shared scale instead (parallel/grad_auto_scale.py).
    """

    each_microbatch = False  # gradients leave after the last micro-batch of a step

    def __init__(
        self,
        named_weights: Iterable[tuple[str, Weight]],
        mesh: Mesh,
        bucket_bytes: int = 64 << 20,
        wire_dtype: torch.dtype = torch.float32,
        fp8: bool = False,
        stochastic: bool = False,
        auto: AutoScale | None = None,
    ) -> None:
        self._fp8, self._stochastic, self._auto = fp8, stochastic, auto
        self._begin(named_weights, mesh)
        open_buckets: dict[tuple[int, torch.dtype], list[Weight]] = {}
        for weight in reversed(self._weights):
            axis = reduce_axis(weight, mesh)
            if axis.size == 1:
                continue
            key = (id(axis), weight.grad_dtype)
            group = open_buckets.setdefault(key, [])
            if group and _grad_bytes([*group, weight]) > bucket_bytes:
                self._close(group, axis, wire_dtype)
                group.clear()
            group.append(weight)
        for group in open_buckets.values():
            self._close(group, reduce_axis(group[0], mesh), wire_dtype)
        self._restart()

    def _begin(self, named_weights: Iterable[tuple[str, Weight]], mesh: Mesh) -> None:
        self._mesh, self._named = mesh, list(named_weights)
        self._weights = [w for _, w in self._named if w.trainable]
        self._buckets: list[_Bucket | OwnerBucket] = []
        self._bucket_of: dict[Weight, _Bucket | OwnerBucket] = {}
        self._done: set[Weight] = set()
        self._next = 0
        for weight in self._weights:
            weight.on_grad_ready = self._ready

    def _add(self, bucket: _Bucket | OwnerBucket) -> None:
        self._buckets.append(bucket)
        self._bucket_of |= dict.fromkeys(bucket.weights, bucket)

    def _close(self, group: Sequence[Weight], axis: Axis, wire_dtype: torch.dtype) -> None:
        if self._fp8 or self._auto is not None:
            bounds = even_bounds(axis.size, -(-starts_of(group)[-1] // (BLOCK * axis.size)) * axis.size)
            return self._add(owner_bucket(axis, list(group), bounds, "fp8", self._stochastic, auto=self._auto))
        first, start = group[0], 0
        flat = torch.zeros(sum(w.numel for w in group), dtype=first.grad_dtype, device=first.data.device)
        for weight in group:
            view = flat[start : start + weight.numel].view(weight.data.shape)
            if weight.main_grad is not None:
                view.copy_(weight.main_grad)
            weight.main_grad = view
            start += weight.numel
        self._add(_Bucket(axis, flat, list(group), wire_dtype))

    def _restart(self) -> None:
        self._done.clear()
        self._next = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.weights)

    def _ready(self, weight: Weight) -> None:
        assert weight not in self._done, f"{weight.name}: more uses in a step than num_uses = {weight.num_uses}"
        self._done.add(weight)
        if any(piece.replicas > 1 for piece in weight.pieces):
            sum_replicas(weight, self._mesh.tp)
        bucket = self._bucket_of.get(weight)
        if bucket is not None:
            bucket.missing -= 1
            self._launch_complete()

    def _launch_complete(self) -> None:
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._buckets[self._next].launch()
            if self._next:  # the one before has had a bucket's time to arrive; the order is the same on every rank
                self._buckets[self._next - 1].proceed()
            self._next += 1

    def finish(self, last: bool = True) -> None:
        """Waits for all sums; every trainable weight then holds its global gradient.

        A weight that this rank did not use in the step counts as zero: all ranks issue the same collectives, and the
        optimizer treats the weight the same on every rank. `last`: of the step's micro-batches, where each sends its own.
        """
        for weight in reversed(self._weights):
            if weight not in self._done:
                if not weight.has_grad:
                    weight.accumulate(_write_zeros)
                if weight not in self._done:
                    self._ready(weight)
        for bucket in self._buckets:  # sums of all first, then what is still on its way back
            bucket.proceed()
        for bucket in self._buckets:
            bucket.finish()
        self._restart()
        if self._auto is not None and last:
            self._auto.update(self._mesh.world)

    def abandon(self) -> None:
        """The step whose sums `finish` has made is refused: mu is what it was."""
        if self._auto is not None:
            self._auto.undo()

    def norm(self) -> Tensor:
        """L2 norm of the whole model's gradient, after `finish`; the same bits on every rank."""
        return global_grad_norm(self._named, self._mesh)


def _write_zeros(out: Tensor, accumulate: bool) -> None:
    if not accumulate:
        out.zero_()


def owner_bucket(*args: Any, auto: AutoScale | None, **named: Any) -> OwnerBucket:
    """An OwnerBucket, or the one with shared scales where there is a mu for them."""
    return OwnerBucket(*args, **named) if auto is None else SharedScaleBucket(*args, **named, auto=auto)


def _grad_bytes(group: Sequence[Weight]) -> int:
    return sum(w.numel * w.grad_dtype.itemsize for w in group)


def _owned(weight: Weight, mesh: Mesh) -> Callable[[Piece], bool]:
    """Whether this rank is the one that counts a piece; each distinct part of the model has exactly one such rank."""
    if weight.expert:
        return lambda piece: mesh.edp.rank == 0
    sharded = tuple(weight.data.shape) != tuple(weight.global_shape)
    return lambda piece: mesh.dp.rank == 0 and (mesh.tp.rank % piece.replicas == 0 if sharded else mesh.tp.rank == 0)


def global_grad_norm(named_weights: Iterable[tuple[str, Weight]], mesh: Mesh) -> Tensor:
    """L2 norm of the whole model's gradient after `GradReducer.finish`: 0-dim fp32, the same bits on every rank.

    Each distinct part of a weight is counted by one rank, then one all-reduce over the world: replicas count once,
    shards add up, and a rank without a token contributes its zeros.
    """
    parts, device = [], None
    for _, weight in named_weights:
        device = weight.data.device
        if weight.trainable and weight.has_grad:
            owned = _owned(weight, mesh)
            parts += [weight.main_grad[p.local] for p in weight.pieces if owned(p)]
    return all_reduce(sum_of_squares(parts).to(device), mesh.world, "norm").sqrt().float()
