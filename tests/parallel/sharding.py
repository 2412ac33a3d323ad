"""What each rank runs for test_shard.py and its neighbours: some steps under a wire and a ZeRO stage, from and to checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fp8.auto import AutoFP8
from fp8.config import AutoConfig
from fp8.optimizer import states_named
from fp8.recipe import recipe_named
from fp8.weight import weights
from model.router import update_expert_bias
from model.transformer import Transformer, initial_values
from parallel.collectives import all_reduce
from parallel.grad_auto_scale import attach_auto_scale
from parallel.mesh import Mesh, build_mesh
from parallel.sharded_optimizer import make_optimizer, make_reducer
from tests.parallel.layouts import ADAM, CLIP, CONFIG, backward, bits
from training.masters import tensors
from training.shards import read_shards, write_shards


@dataclass(frozen=True)
class Run:
    """Some steps; from a checkpoint, to one."""

    zero: int = 0
    wire: str = "fp32"
    recipe: str = "block"
    states: str = "fp32"
    tp: int = 1
    ep: int = 1
    partition: str = "rows"
    rounding: str = "nearest"
    first: int = 0
    last: int = 2
    source: str = ""
    target: str = ""
    parts: int = 1
    overlap: bool = False

    @property
    def plain(self) -> Run:
        """The same sums under states that are not sharded."""
        return Run(wire=self.wire, recipe=self.recipe, states=self.states, tp=self.tp, ep=self.ep, last=self.last)

    def __str__(self) -> str:
        return ",".join(f"{k}={v}" for k, v in vars(self).items() if v != getattr(Run, k)) or "plain"


def sail(run: Run, mesh: Mesh, folder: Path) -> dict[str, Any]:
    """Takes the steps; what the ranks end with, in digests and norms."""
    model = Transformer(CONFIG, recipe_named(run.recipe), mesh, dtype=torch.float32).train()
    named = list(weights(model))
    adamw = 0.9, 0.95, ADAM["eps"], 0.1, states_named(run.states), 3
    optimizer = make_optimizer(model, mesh, run.zero, run.partition, run.overlap, *adamw)
    attach_auto_scale(model, mesh, run.wire)
    mu = getattr(model, "grad_scale", None)
    reducer = make_reducer(named, mesh, optimizer, run.wire, run.rounding, run.zero, mu)
    auto = AutoFP8(model, AutoConfig(every=1), lambda x: all_reduce(x, mesh.world, "amax", "max"))
    for name, _, value in initial_values(model, seed=5):
        optimizer.set_master(name, torch.zeros_like(value) if run.source else value)
    if run.source:
        wanted = {k: v for k, v in tensors(model, optimizer, mesh.world.rank).items() if not k.startswith("rng.")}
        read_shards(folder / run.source, wanted, mesh.world)
        optimizer.num_steps = run.first
        for name in optimizer.all_weights:
            optimizer.refresh(name)
        optimizer.publish()
    seen: dict[str, Any] = {"losses": [], "norms": [], "mu": [], "choices": []}
    for step in range(run.first, run.last):
        mesh.traffic.reset()
        auto.begin(step + 1)
        if auto.observing:
            optimizer.share_samples()
        seen["losses"].append(backward(model, mesh, run.parts)[0])
        reducer.finish()
        norm = reducer.norm()
        seen["norms"].append(norm.item())
        seen["choices"].append(auto.end())
        optimizer.step(ADAM["lr"], CLIP / norm.clamp(min=CLIP))
        update_expert_bias(model, mesh.world, 1e-3)
        seen["mu"] += [] if mu is None else [mu.mu.item()]
    optimizer.settle()
    seen["sent"], seen["last mu"] = dict(mesh.traffic.sent), None if mu is None else mu.mu.item()
    if run.target:
        write_shards(folder / run.target, tensors(model, optimizer, mesh.world.rank), mesh.world)
    seen["weights"] = {(n, p.offset): bits(w.data[p.local]) for n, w in named for p in w.pieces}
    seen["scales"] = {n: bits(w.scale_inv) for n, w in named if w.scale_inv is not None and run.tp == run.ep == 1}
    seen["owned"] = sum(w.numel for w in optimizer.weights.values())
    seen["states"] = sum(t.nbytes for s in optimizer.state().values() for t in s.values())
    return seen


def on_ranks(rank: int, size: int, runs: list[Run], folder: str) -> list[dict[str, Any]]:
    """`sail` for each run, on this rank."""
    meshes: dict[tuple[int, int], Mesh] = {}
    found = []
    for run in runs:
        if (run.tp, run.ep) not in meshes:
            meshes[run.tp, run.ep] = build_mesh(run.tp, run.ep)
        found.append(sail(run, meshes[run.tp, run.ep], Path(folder)))
    return found
