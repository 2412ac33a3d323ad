"""A run that changes its layout at every resume is the run that never did: weights, both moments, biases, losses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fp8.optimizer import AdamW
from fp8.recipe import recipe_named
from fp8.weight import weights
from model.router import routers, update_expert_bias
from model.transformer import Transformer, initial_values
from parallel.grad_reduce import GradReducer, global_grad_norm
from parallel.mesh import Mesh, build_mesh
from tests.helpers import largest, run_ranks
from tests.parallel.layouts import ADAM, CLIP, CONFIG, backward, errors
from tests.parallel.sharding import Run
from tests.parallel.sharding import on_ranks as steps_on_ranks
from tests.parallel.sharding import sail as take_steps
from training.checkpoint import tensors
from training.shards import read_shards, write_shards


@dataclass(frozen=True)
class Leg:
    """Steps under one layout, from a checkpoint (or from the start) to a checkpoint."""

    tp: int
    ep: int
    sequence: bool
    first: int
    last: int
    source: str = ""
    target: str = ""


def sail(leg: Leg, mesh: Mesh, folder: Path) -> tuple[list[float], Transformer, AdamW]:
    """Takes the leg's steps; returns its losses and what it ends with."""
    model = Transformer(CONFIG, recipe_named("fp32"), mesh, dtype=torch.float32).train()
    named = list(weights(model))
    optimizer, reducer = AdamW(named, eps=ADAM["eps"]), GradReducer(named, mesh)
    for name, _, value in initial_values(model, seed=5):
        optimizer.set_master(name, torch.zeros_like(value) if leg.source else value)
    if leg.source:
        wanted = {k: v for k, v in tensors(model, optimizer, mesh.world.rank).items() if not k.startswith("rng.")}
        read_shards(folder / leg.source, wanted, mesh.world)
        optimizer.num_steps = leg.first
        for name, weight in named:
            weight.set_(optimizer.state()[name]["master"])
    losses = []
    for _ in range(leg.first, leg.last):
        losses.append(backward(model, mesh, parts=1)[0])
        reducer.finish()
        optimizer.step(ADAM["lr"], CLIP / global_grad_norm(named, mesh).clamp(min=CLIP))
        update_expert_bias(model, mesh.world, 1e-3)
    if leg.target:
        write_shards(folder / leg.target, tensors(model, optimizer, mesh.world.rank), mesh.world)
    return losses, model, optimizer


def on_ranks(rank: int, size: int, leg: Leg, folder: str, truth: str) -> tuple[list[float], float, float]:
    """(losses, worst error of master and moments, worst error of a bias) at the end of the leg."""
    mesh = build_mesh(leg.tp, leg.ep, sequence_parallel=leg.sequence)
    losses, model, optimizer = sail(leg, mesh, Path(folder))
    want = torch.load(truth)
    worst = 0.0
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        got = {name: state[kind] for name, state in optimizer.state().items()}
        worst = largest([worst, *errors(model, got, {n: want[leg.last][n][kind] for n in got}).values()])
    bias = largest((r.expert_bias - want[leg.last][n]).abs().max().item() for n, r in routers(model))
    return losses, worst, bias


def truth_of(last: int) -> tuple[list[float], dict]:
    losses, model, optimizer = sail(Leg(1, 1, True, 0, last), Mesh.solo(), Path())
    state = {name: {k: v.clone() for k, v in s.items()} for name, s in optimizer.state().items()}
    return losses, state | {name: r.expert_bias for name, r in routers(model)}


@pytest.mark.distributed
def test_resharded_resume_on_4_2_1_and_4_ranks(tmp_path: Path) -> None:
    """dp, tp and ep all change at once, twice; every global weight, moment and bias stays what one process has."""
    torch.set_num_threads(1)
    truth = {last: truth_of(last) for last in (2, 3, 4)}
    losses = truth[4][0]
    torch.save({last: state for last, (_, state) in truth.items()}, tmp_path / "truth.pt")
    legs = [
        (4, Leg(2, 2, True, 0, 2, "", "a")),
        (2, Leg(1, 2, True, 2, 3, "a", "")),
        (2, Leg(2, 1, False, 2, 3, "a", "b")),
        (1, Leg(1, 1, True, 3, 4, "b", "")),
        (4, Leg(4, 2, False, 3, 4, "b", "")),
    ]
    for ranks, leg in legs:
        if ranks == 1:
            found = [on_ranks(0, 1, leg, str(tmp_path), str(tmp_path / "truth.pt"))]
        else:
            found = run_ranks(ranks, on_ranks, leg, str(tmp_path), str(tmp_path / "truth.pt"))
        for got, worst, bias in found:
            assert got == pytest.approx(losses[leg.first : leg.last], rel=1e-6), leg
            assert worst < 1e-5 and bias < 1e-8, leg


@pytest.mark.distributed
def test_states_reshard_to_other_numbers_of_ranks(tmp_path: Path) -> None:
    """FP8 moments and fp16 masters with their scales, and mu: trained by 4 owners, then 2, 4 under tp and ep, 3, and one process.

    Every leg loads and saves; in the end each byte of each state is what the first leg wrote, and one more step is the same.
    """
    torch.set_num_threads(1)
    still = dict(states="lean", first=2, wire="fp8_lm")
    legs = [
        (4, Run(1, states="lean", last=2, target="a", ep=2, wire="fp8_lm")),
        (2, Run(1, last=2, source="a", target="b", **still)),
        (4, Run(2, last=2, source="b", target="c", tp=2, ep=2, **still)),
        (3, Run(1, last=2, source="c", target="d", partition="tensors", **still)),
        (2, Run(1, last=3, source="d", **still | dict(wire="fp32"))),
    ]
    factors = set()
    for ranks, run in legs:
        found = run_ranks(ranks, steps_on_ranks, [run], str(tmp_path))
        factors |= {seen["last mu"] for [seen] in found if run.wire == "fp8_lm"}
    assert factors == {0.25 * 2 ** (1 / 1000) * 2 ** (1 / 1000)}  # of the four ranks that began
    still["wire"] = "fp32"
    first, last = (take_steps(Run(last=3, source=source, **still), Mesh.solo(), tmp_path) for source in "ad")
    assert first == last and first["states"] > 0
    assert [seen["losses"] for [seen] in found] == [pytest.approx(first["losses"], rel=1e-6)] * 2


@pytest.mark.distributed
@pytest.mark.parametrize("recipe", ["tensorwise_current", "auto"])
def test_loaded_shards_have_the_scales_of_what_was_loaded(recipe: str, tmp_path: Path) -> None:
    """One scale of several owners, and formats that were chosen, come with the masters; ranks had zeros before."""
    torch.set_num_threads(1)
    still = dict(recipe=recipe, first=2, last=2, source="a")
    [whole], *_ = run_ranks(2, steps_on_ranks, [Run(1, recipe=recipe, last=2, target="a")], str(tmp_path))
    assert recipe != "auto" or any("now" in line for lines in whole["choices"] for line in lines), "a format has changed"
    for ranks, run in ((3, Run(1, **still)), (2, Run(2, partition="tensors", **still)), (2, Run(**still))):
        for [seen] in run_ranks(ranks, steps_on_ranks, [run], str(tmp_path)):
            assert seen["weights"] == whole["weights"] and seen["scales"] == whole["scales"], (ranks, run)
