"""Bad steps and what is done about them, warnings, replicas, determinism. Whole runs are those of test_train_loop.py."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from fp8.weight import weights
from model.router import routers
from parallel.mesh import Mesh, build_mesh
from tests.helpers import run_ranks
from tests.model import tiny
from tests.training.runs import config_of, losses, ragged_batches, snapshot, tensors_of
from training.data import Batch
from training.faults import BadStepError, FaultConfig, Guard, slowest, unhealthy, worst_of
from training.metrics import Phases
from training.replicas import DesyncError, compare_replicas, fingerprint
from training.run_state import whole_checkpoints
from training.schedule import OptimConfig
from training.step import Report, TrainStep

QUICK = ("eval.samples=0", "fp8.health_every=0", "checkpoint.background=false")


class Poison:
    """Makes the gradient of one weight NaN at chosen steps, `times` times each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: dict[int, int]) -> None:
        original, left = TrainStep.__call__, dict(steps)

        def call(take_step: TrainStep, step: int, batches: list[Batch], *args: Any, **options: Any) -> Any:
            weight = take_step.model.layers[1].attention.out
            if left.get(step, 0) > 0:
                left[step] -= 1
                clean = weight.quantize_grad_both
                weight.quantize_grad_both = lambda dy: clean(dy * math.nan)
                try:
                    return original(take_step, step, batches, *args, **options)
                finally:
                    del weight.quantize_grad_both
            return original(take_step, step, batches, *args, **options)

        monkeypatch.setattr(TrainStep, "__call__", call)


# ---------------------------------------------------------------- bad steps


def one_step(model: torch.nn.Module, guard: Guard | None = None, **options: Any) -> tuple[TrainStep, Any]:
    optimizer = tiny.optimizer_of(model)
    return TrainStep(model, optimizer, Mesh.solo(), OptimConfig(), 1e-3, Phases(torch.device("cpu")), guard=guard), optimizer


def test_the_first_bad_tensor_is_named_and_nothing_moves() -> None:
    model = tiny.build(tiny.Recipe.tensorwise_delayed(history=2))
    step, optimizer = one_step(model)
    step(1, ragged_batches(1, rows=2), 1e-3)
    before = {name: t.clone() for name, t in snapshot(model, optimizer).items() if not name.startswith("grad.")}
    out = model.layers[1].attention.out
    clean = out.quantize_activation
    out.quantize_activation = lambda x: clean(x * math.nan)
    problem = step(2, ragged_batches(2, rows=1), 1e-3).problem
    assert problem.startswith("step 2: the loss is not finite on rank 0; rank 0: output of layers.1.attention in micro-batch 0;")
    del out.quantize_activation
    both = out.quantize_grad_both
    out.quantize_grad_both = lambda dy: both(dy * math.nan)
    problem = step(2, ragged_batches(1, rows=2), 1e-3).problem
    assert "gradient norm is nan" in problem and "rank 0: gradient of layers.1.attention.out in micro-batch 0" in problem
    after = snapshot(model, optimizer)
    assert [n for n in before if not torch.equal(before[n], after[n])] == []
    assert optimizer.num_steps == 1


def test_a_bad_step_that_is_fine_when_repeated_points_at_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build(tiny.Recipe.fp32())
    step, _ = one_step(model)
    report = TrainStep._report

    def flipped(self: TrainStep, *args: Any) -> Report:
        return report(self, *args)._replace(grad_norm=math.inf)

    monkeypatch.setattr(TrainStep, "_report", flipped)
    assert "suspect the hardware" in step(1, ragged_batches(1, rows=1), 1e-3).problem


def test_skip_passes_over_the_step_and_the_data_goes_on(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    Poison(monkeypatch, {3: 1})
    assert train.run(config_of(base, tmp_path, *QUICK, "faults.policy=skip")) == 0
    assert sorted(losses(tmp_path)) == [1, 2, 4, 5, 6]
    assert all(math.isfinite(v) for values in losses(tmp_path).values() for v in values)
    assert "step 3: the gradient norm is nan" in capsys.readouterr().err
    state = json.loads((whole_checkpoints(tmp_path)[-1] / "state.json").read_text())
    assert state["consumed"] == 24 and state["num_steps"] == 5, "six batches were taken, five updates made"


def test_a_streak_of_bad_steps_ends_the_run_and_keeps_the_good_checkpoint(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    Poison(monkeypatch, dict.fromkeys(range(3, 7), 1))
    with pytest.raises(BadStepError, match="step 5: .* 3 bad steps in a row"):
        train.run(config_of(base, tmp_path, *QUICK, "faults.policy=skip", "faults.max_streak=2", "checkpoint.keep=1"))
    assert all(t.float().isfinite().all() for name, t in tensors_of(whole_checkpoints(tmp_path)[-1]).items() if "master" in name)


def test_stop_is_status_3_and_leaves_the_last_checkpoint(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    Poison(monkeypatch, {4: 9})
    assert train.main(["--config", str(base / "run.yaml"), f"run.dir={tmp_path}", *QUICK]) == 3
    err = capsys.readouterr().err
    assert "error: step 4: the gradient norm is nan" in err and "gradient of layers.1.attention.out in micro-batch 0" in err
    assert whole_checkpoints(tmp_path)[-1].name == "step_00000002"


def test_rollback_returns_to_the_checkpoint_and_leaves_the_data_behind(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Poison(monkeypatch, {4: 1})
    assert train.run(config_of(base, tmp_path, "eval.samples=0", "fp8.health_every=0", "faults.policy=rollback")) == 0
    assert sorted(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]
    state = json.loads((whole_checkpoints(tmp_path)[-1] / "state.json").read_text())
    assert state["num_steps"] == 6 and state["consumed"] == 32, "two batches were left behind"


def test_rollback_has_a_limit_and_needs_a_checkpoint(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Poison(monkeypatch, {4: 9})
    with pytest.raises(BadStepError, match="step 2 has been returned to 2 times"):
        train.run(config_of(base, tmp_path / "a", *QUICK, "faults.policy=rollback", "faults.max_streak=2"))
    with pytest.raises(BadStepError, match="no checkpoint to go back to"):
        Guard(FaultConfig(policy="rollback")).bad("step 1: bad", None)


def test_spikes_are_judged_by_the_median_and_the_history_survives_a_resume() -> None:
    guard = Guard(FaultConfig(spike_loss=1.0, spike_norm=10.0))
    for i in range(9):
        guard.good(3.0 + i / 100, 0.5)
    assert guard.spike(99.0, 99.0) is None, "too early to say"
    guard.good(3.0, 0.5)
    assert guard.spike(3.9, 4.9) is None
    assert "above its median" in guard.spike(4.2, 0.5) and "times its median" in guard.spike(3.0, 5.1)
    assert Guard(guard.config, [list(h) for h in guard.history]).history == guard.history
    assert Guard(FaultConfig(), guard.history).spike(99.0, 99.0) is None, "off by default"


def test_a_spike_updates_nothing() -> None:
    model = tiny.build(tiny.Recipe.fp32())
    step, optimizer = one_step(model, Guard(FaultConfig(spike_loss=0.5), [(1.0, 1.0)] * 10))
    before = {n: t.clone() for n, t in snapshot(model, optimizer).items()}
    result = step(11, ragged_batches(1, rows=1), 1e-3)
    assert "faults.spike_loss" in result.problem and optimizer.num_steps == 0
    after = snapshot(model, optimizer)
    assert [n for n in before if not torch.equal(before[n], after[n])] == []


# ---------------------------------------------------------------- warnings


def test_fp8_loss_is_named_by_layer_and_class() -> None:
    measured = {"layers.3.attention.qkv/grad/underflow": 0.4, "layers.0.x/activation/saturation": 0.05, "head/grad/cosine": 0.9}
    text = unhealthy(measured, FaultConfig())
    assert "layers.3.attention.qkv (grad): underflow 40.0%; layers.0.x (activation): saturation 5.0%" in text and "auto" in text
    assert unhealthy({"head/grad/underflow": 0.01, "head/grad/cosine": 0.99}, FaultConfig()) is None


def test_the_worst_rank_decides_about_health() -> None:
    ranks = [{"head/grad/underflow": 0.0, "head/grad/cosine": 0.9}, {"head/grad/underflow": 0.4, "head/grad/cosine": 0.8}]
    assert worst_of(ranks) == {"head/grad/underflow": 0.4, "head/grad/cosine": 0.9}
    assert "head (grad): underflow 40.0%" in unhealthy(worst_of(ranks), FaultConfig()) and worst_of([]) == {}


def test_a_warning_about_health_makes_auto_measure_at_the_next_step(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Every share is beyond a limit of nothing, so the health of step 3 warns; step 4 is not among those of measurement."""
    options = ["fp8.recipe=auto", "fp8.auto.every=100", "fp8.health_every=3", "faults.underflow=0", "parallel.zero=0"]
    train.run(config_of(base, tmp_path, "eval.samples=0", "checkpoint.every=0", "optim.decay_steps=1", "train.steps=4", *options))
    said = capsys.readouterr()
    assert "FP8 loses much in" in said.err
    measured = [line for line in said.out.splitlines() if line.startswith("auto: head: ")]
    assert len(measured) == 2, said.out


def test_the_slow_rank_and_its_phase_are_named() -> None:
    usual = {"data": 0.1, "forward": 2.0, "reduce": 4.0}
    values, warning = slowest([usual, usual, usual | {"data": 5.1, "reduce": 0.0}], limit=1.5)
    assert values["ranks/slowest"] == 2 and "rank 2 is slow" in warning and "'data' (+5.00 s)" in warning
    assert slowest([usual, usual], 1.5)[1] is None and slowest([usual], 1.5) == ({}, None)


def test_a_model_without_any_gradient_is_said_once(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Steps of 1e7 leave a finite loss that no weight can change, at steps 2 and 3."""
    fatal = ("optim.lr=1e7", "optim.schedule=constant", "optim.warmup_steps=0", "train.steps=3")
    assert train.run(config_of(base, tmp_path, *QUICK, *fatal)) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "gradient norm is exactly 0" in line]
    assert len(said) == 1 and said[0].startswith("warning: step 2: "), said


# ---------------------------------------------------------------- replicas


def test_a_fingerprint_sees_every_bit_and_its_place() -> None:
    x = torch.randn(3, 40)
    assert fingerprint(x) == fingerprint(x.clone()) == fingerprint(x.t().t())
    flipped = x.clone()
    flipped.view(torch.int32)[1, 7] ^= 1
    assert fingerprint(flipped) != fingerprint(x) != fingerprint(x.flip(0))
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        y = x.to(dtype)[:, :39]
        assert fingerprint(y) == fingerprint(y.contiguous()) and fingerprint(y) != fingerprint(x.neg().to(dtype)[:, :39])


def _desync(rank: int, size: int) -> list[str]:
    mesh, said = build_mesh(), []
    model = tiny.build(tiny.Recipe.block())

    def check() -> None:
        try:
            compare_replicas(model, mesh, 7)
            said.append("")
        except DesyncError as error:
            said.append(str(error))

    check()
    name, router = next(routers(model))
    if rank == 2:
        router.expert_bias[3] += 1e-6
    check()
    router.expert_bias.zero_()
    if rank == 1:
        weight = dict(weights(model))["layers.0.attention.out"]
        weight.data.view(torch.uint8)[5, 5] ^= 1
    check()
    return said


def test_a_replica_that_differs_in_one_bit_is_named_with_its_rank() -> None:
    results = run_ranks(3, _desync)
    assert results[0] == results[1] == results[2]
    assert results[0][0] == "" and results[0][2] == "step 7: replicas differ: layers.0.attention.out on rank 1"
    assert results[0][1].endswith("router.expert_bias on rank 2")


# ---------------------------------------------------------------- determinism


def test_two_deterministic_runs_are_bitwise_equal(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    try:
        for name in ("a", "b"):
            train.run(config_of(base, tmp_path / name, *QUICK, "train.deterministic=true", "train.steps=3", "optim.decay_steps=1"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert losses(tmp_path / "a") == losses(tmp_path / "b") and "deterministic: " in capsys.readouterr().out
    ours, theirs = (tensors_of(whole_checkpoints(tmp_path / name)[-1]) for name in ("a", "b"))
    assert [n for n in ours if not torch.equal(ours[n], theirs[n])] == []
