"""Bad steps where states and weights are sharded: all ranks see them, nothing moves, the run goes on as if they had not been."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8.weight import weights
from model.router import routers
from parallel.grad_auto_scale import attach_auto_scale
from parallel.mesh import Mesh, build_mesh
from parallel.sharded_optimizer import make_optimizer
from tests.helpers import ROOT, run_ranks, run_train
from tests.model import tiny
from tests.training.runs import losses, ragged_batches
from training.masters import tensors
from training.metrics import Phases
from training.run_state import whole_checkpoints
from training.schedule import OptimConfig
from training.step import TrainStep

STAGES = [(1, "fp32", "nearest"), (1, "fp8", "stochastic"), (2, "fp8", "nearest"), (2, "fp8_lm", "nearest")]


def everything(model: torch.nn.Module, optimizer: Any, rank: int) -> dict[str, Tensor]:
    """Weights, scales, this rank's states, biases, mu: whatever a bad step must leave alone."""
    optimizer.settle()
    found = {name: shard.tensor for name, shard in tensors(model, optimizer, rank).items() if not name.startswith("rng.")}
    for name, weight in weights(model):
        found |= {f"weight {name}": weight.data} | ({} if weight.scale_inv is None else {f"scale {name}": weight.scale_inv})
    found |= {f"counts {name}": router.counts for name, router in routers(model)}
    return {name: t.view(torch.uint8).clone() if t.element_size() == 1 else t.clone() for name, t in found.items()}


def trainer(mesh: Mesh, zero: int, wire: str, rounding: str) -> TrainStep:
    model = tiny.build(tiny.Recipe.block())
    values = {name: weight.q.dequantize(torch.float32) for name, weight in weights(model)}
    attach_auto_scale(model, mesh, wire)
    optimizer = make_optimizer(model, mesh, zero, "rows", True)
    for name, value in values.items():
        optimizer.set_master(name, value)
    options = dict(grad_wire=wire, grad_rounding=rounding, zero=zero)
    return TrainStep(model, optimizer, mesh, OptimConfig(), 1e-3, Phases(torch.device("cpu")), **options)


def spoil(step: TrainStep, mesh: Mesh, how: str) -> None:
    """NaN or inf in one micro-batch's gradient on rank 1, or a spike that only the guard sees."""
    if how == "spike":
        step.guard.spike = lambda loss, norm: "the loss is a spike"
    elif mesh.world.rank == 1:
        weight, calls = step.model.layers[0].attention.norm, []
        clean, place = weight.add_grad, int(how[-1])

        def bad(grad: Tensor) -> None:
            calls.append(1)
            clean(grad * (math.inf if how.startswith("inf") else math.nan) if (len(calls) - 1) % 2 == place else grad)

        weight.add_grad = bad


def mend(step: TrainStep) -> None:
    step.guard.__dict__.pop("spike", None)
    step.model.layers[0].attention.norm.__dict__.pop("add_grad", None)


def on_ranks(rank: int, size: int, how: str) -> list[dict[str, Any]]:
    mesh, seen = build_mesh(), []
    for zero, wire, rounding in STAGES:
        batches = [ragged_batches(4, rows=1, seed=s)[rank::size] for s in range(3)]
        hit, spared = (trainer(mesh, zero, wire, rounding) for _ in range(2))
        hit(1, batches[0], 1e-3)
        before = everything(hit.model, hit.optimizer, rank)
        spoil(hit, mesh, how)
        problem = hit(2, batches[1], 1e-3).problem
        mend(hit)
        held = [name for name, weight in weights(hit.model) if weight.main_grad is not None] if zero == 2 else []
        after = everything(hit.model, hit.optimizer, rank)
        norms = [hit(3, batches[2], 1e-3).grad_norm]
        spared(1, batches[0], 1e-3)
        norms.append(spared(3, batches[2], 1e-3).grad_norm)
        ends = [everything(step.model, step.optimizer, rank) for step in (hit, spared)]
        seen.append(
            {
                "problem": problem,
                "held": held,
                "moved": [n for n in before if not torch.equal(before[n], after[n])],
                "differ": [n for n in ends[0] if not torch.equal(ends[0][n], ends[1][n])],
                "went on": any(not torch.equal(before[n], ends[0][n]) for n in before if n.startswith("weight")),
                "norms": norms,
            }
        )
    return seen


@pytest.mark.distributed
@pytest.mark.parametrize("how", ["nan in micro-batch 0", "inf in micro-batch 1", "spike"])
def test_a_bad_step_moves_nothing_anywhere_and_leaves_no_trace(how: str) -> None:
    """The step after it is bit for bit that of a run which never had it: no sum, no gradient and no mu is left behind."""
    for by_rank in zip(*run_ranks(2, on_ranks, how), strict=True):
        for seen in by_rank:
            assert seen["moved"] == [] and seen["differ"] == [] and seen["went on"]
            assert seen["held"] == [], "gradients that ZeRO-2 has no room for"
            assert seen["norms"][0] == seen["norms"][1] and math.isfinite(seen["norms"][0])
            assert seen["problem"] == by_rank[0]["problem"]
            if how != "spike":
                assert "gradient norm is nan" in seen["problem"] or "gradient norm is inf" in seen["problem"]
                assert "rank 1: gradient of layers.0.attention.norm" in seen["problem"] and "rank 0:" not in seen["problem"]


@pytest.mark.distributed
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_policies_with_everything_sharded(base: Path, tmp_path: Path, policy: str) -> None:
    """`train.py` on two ranks, ZeRO-2, the default wires; a gradient of rank 1 is NaN once. Replicas are compared at every step."""
    script = tmp_path / "one.py"
    script.write_text(
        "import math, os, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import train\nfrom training.step import TrainStep\n"
        "call, left = TrainStep.__call__, [1]\n"
        "def poisoned(self, step, *args, **options):\n"
        "    weight = self.model.norm\n"
        "    if step == 4 and os.environ['RANK'] == '1' and left:\n"
        "        left.clear()\n"
        "        clean = weight.add_grad\n"
        "        weight.add_grad = lambda grad: clean(grad * math.nan)\n"
        "        try:\n"
        "            return call(self, step, *args, **options)\n"
        "        finally:\n"
        "            del weight.add_grad\n"
        "    return call(self, step, *args, **options)\n"
        "TrainStep.__call__ = poisoned\n"
        "sys.exit(train.main(sys.argv[1:]))\n"
    )
    options = ["parallel.zero=2", "optim.states=lean", "eval.samples=0", "fp8.health_every=0", "checkpoint.background=false"]
    options += [f"faults.policy={policy}", "faults.compare_every=1", f"run.dir={tmp_path / 'run'}", "train.micro_batch=1"]
    done = run_train("--config", str(base / "run.yaml"), *options, ranks=2, script=str(script))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 4: the gradient norm is nan" in done.stderr and "rank 1: gradient of norm" in done.stderr
    assert sorted(losses(tmp_path / "run")) == ([1, 2, 3, 5, 6] if policy == "skip" else [1, 2, 3, 4, 5, 6])
    state = json.loads((whole_checkpoints(tmp_path / "run")[-1] / "state.json").read_text())
    assert (state["num_steps"], state["consumed"]) == ((5, 24) if policy == "skip" else (6, 32))
