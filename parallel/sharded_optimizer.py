"""AdamW whose states live with their owners, and the reducer that brings owners their gradients; see shard.py."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8.offload import on_device
from fp8.optimizer import AdamW, chunks
from fp8.quantize import quantize
from fp8.recipe import FORMATS, TENSORWISE
from fp8.scaling import amax_scale_inv, tensor_amax
from fp8.weight import Weight, weights
from parallel.collectives import all_reduce
from parallel.grad_auto_scale import AutoScale
from parallel.grad_reduce import GradReducer, owner_bucket
from parallel.grad_simulated import SimulatedReducer, SimulatedSums
from parallel.grad_wire import OwnerBucket, starts_of
from parallel.mesh import Mesh
from parallel.shard import Group, Shards
from parallel.shell import Shell


class ShardedAdamW(AdamW):
    """AdamW on this rank's parts; `publish` brings every rank the weights of the others.

    `weights` and `state()` hold this rank's parts only, as Weights with pieces: what a checkpoint writes. A rank may own no
    part of a weight. Results do not depend on who owns what: rounding is keyed by the weight's place in the whole model.

    Args:
        named_weights: all weights of the model, gradient formats final.
        whole: no weight is cut.
        options: for `AdamW`.
    """

    def __init__(
        self,
        named_weights: Iterable[tuple[str, Weight]],
        mesh: Mesh,
        *options: Any,
        whole: bool = False,
        bucket_bytes: int = 64 << 20,
        **named: Any,
    ) -> None:
        self.shards = Shards(named_weights, mesh, bucket_bytes, whole)
        super().__init__(self.shards.named().items(), *options, **named)
        self.all_weights = self.shards.all
        self._parameter = {name: place for place, name in enumerate(self.all_weights)}
        for name, weight in self.all_weights.items():
            weight.gradient_draw = partial(self._gradient_draw, self._parameter[name])

    def allocate(self, name: str) -> None:
        if name in self.weights:
            super().allocate(name)

    def set_master(self, name: str, value: Tensor) -> None:
        """`value` is the whole of this rank's weight (the same on all replicas), so nothing has to travel."""
        weight = self.all_weights[name]
        self._adopt(name)
        if name in self.weights:
            super().set_master(name, value[self.shards.rows_of(weight)])
        codec, value = self.states.codecs(weight)["master"], value.to(weight.data.device)
        whole = weight.spec.is_fp8 and weight.spec.tile == TENSORWISE
        for rows in (slice(0, value.shape[0]),) if whole else chunks(value.shape):
            Shell.of(weight, rows).set_(codec.decode(codec.encode(value[rows].float(), None)))

    def refresh(self, name: str) -> None:
        """After loading, for every weight on every rank; then `publish`."""
        self._adopt(name)
        if name in self.weights:
            super().refresh(name)

    def _adopt(self, name: str) -> None:
        """`auto`: the formats that have been chosen, for the weight and for this rank's part of it."""
        weight = self.all_weights[name]
        if weight.recipe.adaptive and weight.adopt_choice():
            self.shards.forget()
            if name in self.weights:
                self.weights[name].attach()

    def _share_scales(self) -> None:
        """Quantises this rank's rows of matrices that have one scale for the rows of several owners: from the maximum of all."""
        for axis, shared in self.shards.sharing_scales():
            zero = torch.zeros((), device=next(iter(shared.values())).data.device)
            own = [tensor_amax(self._live_master(name)) if name in self.weights else zero for name in shared]
            for (name, weight), amax in zip(shared.items(), all_reduce(torch.stack(own), axis, "amax", "max"), strict=True):
                weight.scale_inv.copy_(amax_scale_inv(amax, weight.spec))
                if name in self.weights:
                    q = quantize(self._live_master(name), weight.spec, weight.scale_inv)
                    self.weights[name].data.copy_(q.data)
                weight.note_written()

    def _live_master(self, name: str) -> Tensor:
        master = on_device(self._state[name]["master"], self.weights[name].data.device)
        return self._codecs[name]["master"].decode(master)

    @torch.no_grad()
    def publish(self) -> None:
        """Every rank gets every owner's rows. Every rank calls it."""
        self._share_scales()
        self.shards.publish()

    def settle(self) -> None:
        self.shards.settle()

    def share_samples(self) -> None:
        self.shards.share_samples()

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor | float = 1.0) -> None:
        self.settle()  # of weights that no layer has read since the last step
        for name, weight in self.all_weights.items():
            if weight.trainable:
                self._adopt(name)
        super().step(lr, grad_scale)
        for weight in self.all_weights.values():
            weight.clear_grad()
        self.publish()


class ShardedReducer(GradReducer):
    """Sums gradients at the owners of their parts, and hands them to the owners' shells.

    Args:
        wire: "fp32", "bf16" or "fp8"; `auto`: FP8-LM's sums instead.
        transient: ZeRO-2: gradients leave in every micro-batch and are then let go.
    """

    def __init__(
        self,
        shards: Shards,
        wire: str = "fp32",
        stochastic: bool = False,
        transient: bool = False,
        auto: AutoScale | None = None,
    ) -> None:
        self.each_microbatch, self._shards, self._auto = transient, shards, auto
        self._begin(shards.all.items(), shards.mesh)
        self._sums: list[tuple[Shell, Tensor]] = []  # made once: an optimizer plans its launches for the tensors that it knows
        self._alone: list[Shell] = []  # of weights without replicas
        for group in (g for g in shards.groups if g.weights[0].trainable):
            if group.axis.size == 1:
                self._alone += group.shells
                continue
            options = group.axis, group.weights, group.bounds, wire, stochastic, False, transient
            bucket = owner_bucket(*options, auto=auto)
            self._add(bucket)
            self._sums += _owned_sums(group, bucket)
        self._restart()

    def finish(self, last: bool = True) -> None:
        """As for a GradReducer; only owners have the sums. `last`: of the step's micro-batches."""
        super().finish(last)
        for bucket in self._buckets:
            bucket.round = 0 if last else bucket.round + 1
        if not last:
            for weight in self._bucket_of:
                weight.clear_grad()
            return
        for shell, total in [*self._sums, *((s, s.whole.main_grad) for s in self._alone)]:
            shell.main_grad = total
            shell.note_replayed_uses()

    def norm(self) -> Tensor:
        return self._shards.norm()


def _owned_sums(group: Group, bucket: OwnerBucket) -> list[tuple[Shell, Tensor]]:
    """This rank's parts of a group's weights, and where in the bucket's sums their gradients are."""
    rank, found = group.axis.rank, []
    for weight, shell, start, cut in zip(group.weights, group.shells, starts_of(group.weights), group.cuts, strict=False):
        if shell is not None:
            place = start + cut[rank] * (weight.numel // weight.data.shape[0]) - bucket.bounds[rank]
            found.append((shell, bucket.own[place : place + shell.numel].view(shell.data.shape)))
    return found


def wire_for(wire: str, is_fp8: bool) -> str:
    """What "auto" stands for: gradients travel as FP8 in models that compute in FP8; references keep FP32."""
    return wire if wire != "auto" else "fp8" if is_fp8 else "fp32"


def make_reducer(
    named_weights: Iterable[tuple[str, Weight]],
    mesh: Mesh,
    optimizer: AdamW,
    wire: str = "fp32",
    rounding: str = "nearest",
    zero: int = 0,
    auto: AutoScale | None = None,
    simulated_ranks: int = 0,
) -> GradReducer:
    """The reducer that `parallel.grad_wire`, `grad_rounding`, `zero` and `simulated_ranks` name; "fp8_lm" needs `auto`."""
    named_weights, stochastic = list(named_weights), rounding == "stochastic"
    wire = wire_for(wire, any(weight.recipe.is_fp8 for _, weight in named_weights))
    if simulated_ranks:
        return SimulatedReducer(named_weights, simulated_ranks, SimulatedSums(wire, stochastic, zero > 0, auto))
    if isinstance(optimizer, ShardedAdamW):
        return ShardedReducer(optimizer.shards, wire, stochastic, zero == 2, auto)
    if wire in ("fp8", "fp8_lm"):
        return GradReducer(named_weights, mesh, fp8=True, stochastic=stochastic, auto=auto)
    return GradReducer(named_weights, mesh, wire_dtype=FORMATS[wire])


def make_optimizer(model: nn.Module, mesh: Mesh, zero: int, partition: str, overlap: bool, *options: Any, **named: Any) -> AdamW:
    """AdamW, sharded where `parallel.zero` asks for it and there are ranks to share with. `options` and `named` are AdamW's."""
    if zero == 0 or mesh.world.size == 1:
        return AdamW(weights(model), *options, **named)
    optimizer = ShardedAdamW(weights(model), mesh, *options, whole=partition == "tensors", **named)
    if overlap:
        optimizer.shards.overlap(model)
    return optimizer
