"""The whole run on a model of seconds: resume is the same run, tokens weigh the same, evaluation leaves no trace."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import train
from fp8.weight import weights
from model.router import routers
from model.transformer import Transformer, initial_values
from parallel.mesh import Mesh, build_mesh
from tests.helpers import run_ranks, run_train
from tests.model import tiny
from tests.training.runs import Crash, Recorder, config_of, crash, joined, losses, ragged_batches, snapshot, take_step, tensors_of
from training.data import PackedDataset
from training.errors import UserError
from training.evaluate import evaluate
from training.metrics import Phases, read_metrics
from training.packing import packed_path
from training.run_state import whole_checkpoints
from training.sample import generate
from training.schedule import OptimConfig
from training.step import TrainStep
from training.tokenizer import load_tokenizer


def test_two_crashes_and_resumes_are_the_uninterrupted_run_bitwise(
    base: Path, straight: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = {}
    for crash_at in (4, 5):  # after the checkpoints of steps 2 and 4
        with monkeypatch.context() as patch:
            recorder = Recorder(patch, crash_at, crash)
            with pytest.raises(Crash):
                train.run(config_of(base, tmp_path))
        samples |= recorder.samples
    with monkeypatch.context() as patch:
        recorder = Recorder(patch)
        train.run(config_of(base, tmp_path))
    samples |= recorder.samples
    assert sorted(recorder.samples) == [5, 6], "the last resume began after step 4"
    assert samples == straight["samples"]
    assert losses(tmp_path) == straight["losses"]
    ours, theirs = (tensors_of(whole_checkpoints(d)[-1]) for d in (tmp_path, straight["dir"]))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert any(name.startswith("expert_bias") and t.any() for name, t in ours.items()), "the bias has moved"


def test_kept_transposes_change_no_bit(base: Path, straight: dict[str, Any], tmp_path: Path) -> None:
    """Two micro-batches a step, a step that measures, an evaluation between steps."""
    assert train.run(config_of(base, tmp_path, "fp8.keep_transposed=true")) == 0
    assert losses(tmp_path) == straight["losses"]
    ours, theirs = (tensors_of(whole_checkpoints(d)[-1]) for d in (tmp_path, straight["dir"]))
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_one_rank_to_two(base: Path, tmp_path: Path) -> None:
    """One process for 2 steps and two for 4 more, against one process for 6, in fp32."""
    overrides = ("fp8.recipe=fp32", "fp8.health_every=0", "eval.samples=0")
    train.run(config_of(base, tmp_path / "one", *overrides))
    shutil.copytree(whole_checkpoints(tmp_path / "one")[0], tmp_path / "two/checkpoints/step_00000002")
    done = run_train("--config", str(base / "run.yaml"), f"run.dir={tmp_path / 'two'}", *overrides, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    want, got = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert sorted(got) == [3, 4, 5, 6]
    for step, values in got.items():
        assert values == pytest.approx(want[step], rel=2e-5), f"step {step}"
    ours, theirs = (tensors_of(whole_checkpoints(tmp_path / d)[-1]) for d in ("two", "one"))
    for name in (n for n in theirs if n.startswith("master.")):
        assert tiny.relative_error(ours[name], theirs[name]) < 1e-4, name


def test_a_finished_run_says_so_and_is_left_as_it_is(base: Path, straight: dict[str, Any], capsys: pytest.CaptureFixture) -> None:
    """Not with another recipe either: its config.yaml would tell of a run that never was."""
    run_dir = straight["dir"]
    before = {p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file()}
    assert train.run(config_of(base, run_dir, "log.project=other", "train.micro_batch=4")) == 0
    assert f"{run_dir} is finished: all 6 steps are done; nothing was trained" in capsys.readouterr().out
    with pytest.raises(UserError, match="is finished.* other settings: fp8.recipe is block there and bf16 here"):
        train.run(config_of(base, run_dir, "fp8.recipe=bf16"))
    with pytest.raises(UserError, match="has done 6 steps, more than train.steps=4, with other settings: optim.lr is 0.003"):
        train.run(config_of(base, run_dir, "train.steps=4", "optim.lr=1"))
    assert {p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file()} == before


def test_a_finished_run_that_was_killed_before_its_validation_has_it_made_up(base: Path, tmp_path: Path) -> None:
    short = ("train.steps=2", "optim.warmup_steps=1", "optim.decay_steps=1")
    train.run(config_of(base, tmp_path, *short, "eval.samples=0"))
    assert not [r for r in read_metrics(tmp_path / "metrics.jsonl") if "val/loss" in r]
    train.run(config_of(base, tmp_path, *short))
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl") if "val/loss" in r] == [2]


def test_fewer_steps_than_are_done_leave_a_run_as_it_is(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that was stopped on its way has no validation yet; its configuration keeps the steps that it was to take."""
    short = ("optim.warmup_steps=1", "optim.decay_steps=1")
    train.run(config_of(base, tmp_path, *short, "train.steps=3", "eval.samples=0"))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert train.run(config_of(base, tmp_path, *short, "train.steps=2")) == 0
    assert "has done 3 steps, more than train.steps=2; nothing was trained or written" in capsys.readouterr().out
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_changed_settings_are_said_when_a_run_goes_on(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    short = ("optim.warmup_steps=1", "optim.decay_steps=1", "eval.samples=0")
    train.run(config_of(base, tmp_path, *short, "train.steps=2"))
    capsys.readouterr()
    train.run(config_of(base, tmp_path, *short, "train.steps=4", "optim.lr=1e-3", "train.global_batch=2", "fp8.activations=2"))
    said = [line for line in capsys.readouterr().err.splitlines() if "settings change" in line]
    assert said == ["warning: settings change with this resume: train.global_batch from 4 to 2; optim.lr from 0.003 to 0.001"]


def test_sigterm_saves_and_stops(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = signal.getsignal(signal.SIGTERM)
    try:
        Recorder(monkeypatch, at=3, action=lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert train.run(config_of(base, tmp_path)) == 143
    finally:
        signal.signal(signal.SIGTERM, old)
    assert whole_checkpoints(tmp_path)[-1].name in ("step_00000003", "step_00000004")


def assert_same_gradients(got: dict[str, Tensor], want: dict[str, Tensor], bound: float = 1e-5) -> None:
    errors = {name: tiny.relative_error(got[name], want[name]) for name in want}
    assert max(errors.values()) < bound, max(errors.items(), key=lambda item: item[1])


def test_accumulation_and_unequal_batches_are_one_big_batch() -> None:
    batches = ragged_batches(4, rows=1)
    want, want_grads, big = take_step([joined(batches)])
    got, got_grads, small = take_step(batches)
    assert_same_gradients(got_grads, want_grads)
    assert (got.num_tokens, got.interrupted) == (want.num_tokens, False)
    for name in ("loss", "mtp_loss", "z_loss", "aux_loss", "grad_norm"):
        assert getattr(got, name) == pytest.approx(getattr(want, name), rel=1e-5), name
    assert torch.equal(got.counts_LE, want.counts_LE) and int(want.counts_LE[0].sum()) == 4 * 64 * 2
    for (_, a), (_, b) in zip(routers(small), routers(big), strict=True):
        assert torch.equal(a.expert_bias, b.expert_bias) and a.expert_bias.any() and not a.counts.any()


def _step_on_rank(rank: int, size: int) -> dict[str, Any]:
    mesh = build_mesh()
    batches = ragged_batches(4, rows=1)
    result, grads, model = take_step(batches[rank::size], mesh)
    found = {"result": dataclasses.asdict(result), "grads": grads, "bias": [r.expert_bias for _, r in routers(model)]}
    found["problem"] = take_step(batches[rank::size], mesh, poison=rank == 1)[0].problem
    return found


def test_two_ranks_with_unequal_tokens_are_one_big_batch_and_name_the_rank_of_a_nan() -> None:
    want, want_grads, model = take_step([joined(ragged_batches(4, rows=1))])
    ranks = run_ranks(2, _step_on_rank)
    for found in ranks:
        assert_same_gradients(found["grads"], want_grads)
        assert found["result"]["grad_norm"] == pytest.approx(want.grad_norm, rel=1e-5)
        assert found["result"]["loss"] == pytest.approx(want.loss, rel=1e-5)
        assert all(torch.equal(a, r.expert_bias) for a, (_, r) in zip(found["bias"], routers(model), strict=True))
        assert found["problem"] == (
            "step 1: the loss is not finite on rank 1; rank 1: weight layers.1.attention.norm; nothing was updated"
        )


def test_nothing_is_updated_when_the_loss_is_not_finite() -> None:
    model = tiny.build(tiny.Recipe.fp32())
    optimizer = tiny.optimizer_of(model)
    model.norm.data[0] = math.inf
    before = {name: t.clone() for name, t in snapshot(model, optimizer).items()}
    step = TrainStep(model, optimizer, Mesh.solo(), OptimConfig(), 1e-3, Phases(torch.device("cpu")))
    problem = step(9, ragged_batches(1, rows=2), 1e-3).problem
    assert problem.startswith("step 9: the loss is not finite on rank 0; rank 0: weight norm")
    after = snapshot(model, optimizer)
    assert optimizer.num_steps == 0
    assert [n for n in before if not torch.equal(before[n], after[n])] == []


def test_clipping_scales_the_whole_gradient() -> None:
    """With plain moments the first AdamW step hides the scale, so the moment itself is looked at."""
    model = tiny.build(tiny.Recipe.fp32())
    optimizer = tiny.optimizer_of(model)
    step = TrainStep(model, optimizer, Mesh.solo(), OptimConfig(clip=0.25), 1e-3, Phases(torch.device("cpu")))
    norm = step(1, ragged_batches(1, rows=2), 1e-3).grad_norm
    assert norm > 0.25
    total = math.sqrt(sum(float(s["exp_avg"].double().square().sum()) for s in optimizer.state().values()))
    assert total == pytest.approx(0.25 * (1 - optimizer.beta1), rel=1e-4)


def test_evaluation_and_sampling_leave_everything_bitwise_unchanged(base: Path) -> None:
    model = tiny.build(tiny.Recipe.block())
    optimizer = tiny.optimizer_of(model)
    step = TrainStep(model, optimizer, Mesh.solo(), OptimConfig(), 1e-3, Phases(torch.device("cpu")))
    step(1, ragged_batches(1, rows=2), 1e-3)
    for _, router in routers(model):
        router.counts.fill_(3)
    before = {name: t.clone() for name, t in snapshot(model, optimizer).items()}
    data, cpu = PackedDataset(packed_path(str(base), "validation"), 64), torch.device("cpu")
    first = evaluate(model, data, Mesh.solo(), cpu, 2, 5, True)
    text = generate(model, load_tokenizer(str(base / "tok.model")), "def f", 5, seed=1)
    after = snapshot(model, optimizer)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert model.training and all(w.has_grad is False for _, w in weights(model))
    assert evaluate(model, data, Mesh.solo(), cpu, 2, 5, True) == first
    assert generate(model, load_tokenizer(str(base / "tok.model")), "def f", 5, seed=1) == text and text.startswith("def f")


def test_tensor_parallel_ranks_write_the_text_of_one_process(base: Path) -> None:
    """Prompts of odd and even lengths, then a token a step: fewer tokens than ranks."""
    (want,) = run_ranks(1, _texts, 1, True, str(base))
    assert len({text for _, text in want}) == len(want) and all(len(text) > len(prompt) for prompt, text in want)
    for ranks, sequence in ((2, True), (2, False), (4, True)):
        assert run_ranks(ranks, _texts, ranks, sequence, str(base)) == [want] * ranks


def _texts(rank: int, size: int, tp: int, sequence: bool, base: str) -> list[tuple[str, str]]:
    """(prompt, greedy continuation) under a layout, in fp32."""
    config = dataclasses.replace(tiny.CONFIG, num_key_value_heads=4)
    model = Transformer(config, tiny.Recipe.fp32(), build_mesh(tp, 1, torch.device("cpu"), sequence), torch.float32)
    for _, weight, value in initial_values(model, 0):
        weight.set_(value)
    tokenizer = load_tokenizer(f"{base}/tok.model")
    return [(prompt, generate(model, tokenizer, prompt, 6, temperature=0)) for prompt in ("d", "def f", "return x + 7\n")]


def test_validation_mean_weighs_tokens_not_batches(base: Path) -> None:
    """Five samples in micro-batches of 2 (one row is padding) and of 1 give one mean."""
    model = tiny.build(tiny.Recipe.fp32())
    data, cpu = PackedDataset(packed_path(str(base), "validation"), 64), torch.device("cpu")
    by_two, by_one = (evaluate(model, data, Mesh.solo(), cpu, n, 5, True) for n in (2, 1))
    assert by_two.num_tokens == by_one.num_tokens
    assert by_two.nats == pytest.approx(by_one.nats, rel=1e-5)
    assert by_two.mtp_nats == pytest.approx(by_one.mtp_nats, rel=1e-5)
    assert by_two.bits_per_byte == pytest.approx(data.bits_per_byte(by_one.nats), rel=1e-5)
