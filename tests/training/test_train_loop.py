"""The whole run on a model of seconds: resume is the same run, tokens weigh the same, evaluation leaves no trace."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import shutil
import signal
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import train
from fp8.weight import weights
from model.router import routers
from model.transformer import Transformer
from parallel.mesh import Mesh, build_mesh
from tests.helpers import ROOT, run_ranks, run_train
from tests.model import tiny
from training.config import Config, load_config
from training.data import IGNORED, Batch, PackedDataset, make_batch
from training.errors import UserError
from training.evaluate import evaluate
from training.metrics import Metrics, Phases, read_metrics
from training.packing import pack_corpus, packed_path
from training.run_state import whole_checkpoints
from training.sample import generate
from training.schedule import OptimConfig
from training.shards import Shard, read_metadata, read_shards
from training.step import TrainStep
from training.tokenizer import load_tokenizer, train_tokenizer

YAML = """
model: {vocab_size: 512, hidden_size: 128, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2, head_dim: 64,
  intermediate_size: 128, num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 128, n_group: 2, topk_group: 2,
  num_nextn_predict_layers: 1, max_position_embeddings: 64, initializer_range: 0.05, loss_chunk: 128}
data: {source: text, paths: [FOLDER/*.txt], dir: FOLDER, tokenizer: FOLDER/tok.model, vocab_size: 512, seq_len: 64,
  validation_fraction: 0.2, isolate_documents: true}
train: {steps: 6, global_batch: 4, micro_batch: 2, log_every: 1, device: cpu}
optim: {lr: 3.0e-3, schedule: wsd, warmup_steps: 2, decay_steps: 2}
checkpoint: {every: 2, keep: 9}
eval: {samples: 6, every: 3, prompt: "def ", sample_tokens: 8}
fp8: {health_every: 4}
log: {wandb: off, progress: false}
"""


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with run.yaml, a tokenizer and packed data."""
    folder = tmp_path_factory.mktemp("loop")
    lines = [f"def f{i}(x):\n    return x + {i * 7 % 31}\n" for i in range(40)]
    for i in range(60):
        (folder / f"{i:03}.txt").write_text("".join(lines[i % 7 :: 1 + i % 5]))
    (folder / "run.yaml").write_text(YAML.replace("FOLDER", str(folder)))
    config = load_config(str(folder / "run.yaml"))
    texts = [p.read_text() for p in sorted(folder.glob("*.txt"))]
    pack_corpus(config.data, train_tokenizer(texts, 300, config.data.tokenizer))
    return folder


def config_of(base: Path, run_dir: Path, *overrides: str, world_size: int = 1) -> Config:
    return load_config(str(base / "run.yaml"), [f"run.dir={run_dir}", *overrides], world_size)


class Crash(Exception):
    """Stands for kill -9 between two steps."""


class Recorder:
    """Wraps TrainStep: notes the samples of each step, and does something at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int = 0, action: Callable[[], None] = lambda: None) -> None:
        self.samples: dict[int, list[int]] = {}
        original = TrainStep.__call__

        def call(take_step: TrainStep, step: int, batches: list[Batch], *args: Any, **options: Any) -> Any:
            if step == at:
                action()
            self.samples[step] = [i for batch in batches for i in batch.sample_ids]
            return original(take_step, step, batches, *args, **options)

        monkeypatch.setattr(TrainStep, "__call__", call)


def crash() -> None:
    raise Crash


def losses(run_dir: Path) -> dict[int, tuple[float, ...]]:
    keys = ("loss", "mtp_loss", "grad_norm", "lr", "z_loss")
    return {r["step"]: tuple(r[k] for k in keys) for r in read_metrics(run_dir / "metrics.jsonl") if "loss" in r}


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    saved = read_metadata(checkpoint).state_dict_metadata
    shards = {name: Shard.whole(torch.zeros(md.size, dtype=md.properties.dtype)) for name, md in saved.items()}
    read_shards(checkpoint, shards, Mesh.solo().world)
    return {name: shard.tensor for name, shard in shards.items()}


# ---------------------------------------------------------------- resume


@pytest.fixture(scope="session")
def straight(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An undisturbed run of six steps: folder, losses, samples."""
    run_dir = tmp_path_factory.mktemp("straight")
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch)
        assert train.run(config_of(base, run_dir)) == 0
    return {"dir": run_dir, "losses": losses(run_dir), "samples": recorder.samples}


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


# ---------------------------------------------------------------- the step


def ragged_batches(num: int, rows: int, seed: int = 0) -> list[Batch]:
    """Micro-batches with very different numbers of labels; the second has none."""
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(num):
        data = torch.randint(3, 512, (rows, 65), generator=g).numpy()
        batch = make_batch(data, range(rows), eos_id=2, isolate_documents=False)
        keep = torch.rand(rows, 64, generator=g) < (0.7, 0.0, 1.0, 0.3)[i % 4]
        batches.append(dataclasses.replace(batch, labels_BS=batch.labels_BS.masked_fill(~keep, IGNORED)))
    return batches


def joined(batches: list[Batch]) -> Batch:
    together = {f: torch.cat([getattr(b, f) for b in batches]) for f in ("tokens_BS", "labels_BS", "positions_BS")}
    return dataclasses.replace(batches[0], **together, sample_ids=sum((b.sample_ids for b in batches), ()))


def take_step(batches: list[Batch], mesh: Mesh | None = None, poison: bool = False) -> tuple[Any, dict[str, Tensor], Any]:
    """(result, gradients, model) of one step of a seeded fp32 model."""
    model = tiny.build(tiny.Recipe.fp32())
    if poison:
        model.layers[1].attention.norm.data.fill_(math.nan)
    optimizer = tiny.optimizer_of(model) if not poison else tiny.AdamW(weights(model))
    step = TrainStep(model, optimizer, mesh or Mesh.solo(), OptimConfig(clip=1e-3), 1e-3, Phases(torch.device("cpu")))
    return step(1, batches, 1e-3, want_counts=True), tiny.grads(model), model


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


# ---------------------------------------------------------------- evaluation, sampling


def snapshot(model: torch.nn.Module, optimizer: Any) -> dict[str, Tensor]:
    found = {f"buffer.{name}": b.view(torch.uint8) if b.element_size() == 1 else b for name, b in model.named_buffers()}
    found |= {f"grad.{n}": w.main_grad for n, w in weights(model) if w.main_grad is not None}
    found |= {f"{kind}.{n}": t for n, state in optimizer.state().items() for kind, t in state.items()}
    return found | {"rng": torch.get_rng_state()}


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


def test_validation_mean_weighs_tokens_not_batches(base: Path) -> None:
    """Five samples in micro-batches of 2 (one row is padding) and of 1 give one mean."""
    model = tiny.build(tiny.Recipe.fp32())
    data, cpu = PackedDataset(packed_path(str(base), "validation"), 64), torch.device("cpu")
    by_two, by_one = (evaluate(model, data, Mesh.solo(), cpu, n, 5, True) for n in (2, 1))
    assert by_two.num_tokens == by_one.num_tokens
    assert by_two.nats == pytest.approx(by_one.nats, rel=1e-5)
    assert by_two.mtp_nats == pytest.approx(by_one.mtp_nats, rel=1e-5)
    assert by_two.bits_per_byte == pytest.approx(data.bits_per_byte(by_one.nats), rel=1e-5)


# ---------------------------------------------------------------- metrics and wandb


def test_metrics_file_has_what_people_plot(straight: dict[str, Any]) -> None:
    records = read_metrics(straight["dir"] / "metrics.jsonl")
    keys = set(itertools.chain.from_iterable(records))
    wanted = {"loss", "mtp_loss", "z_loss", "lr", "grad_norm", "tokens_per_s", "tflops", "epoch", "load/max_over_mean", "load/dead",
              "val/loss", "val/bits_per_byte", "load/layers.1.block.router/entropy", "bias/mtp.block.router/range",
              "fp8/attention.qkv/activation/underflow", "fp8/head/activation/cosine_worst"}  # fmt: skip
    wanted |= {f"time/{phase}" for phase in ("data", "forward", "backward", "reduce", "optimizer", "eval", "checkpoint")}
    assert wanted <= keys, wanted - keys
    first = next(r for r in records if "load/dead" in r)
    assert first["load/max_over_mean"] >= 1 and 0 <= first["load/layers.1.block.router/entropy"] <= 1


def test_superseded_and_half_written_records_are_left_out(tmp_path: Path) -> None:
    lines = [{"step": 1, "loss": 1}, {"step": 2, "loss": 2}, {"event": "resume", "step": 1}, {"step": 2, "loss": 3}]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 3, "lo')
    assert [r["loss"] for r in read_metrics(tmp_path / "m.jsonl")] == [1, 3]


def test_a_record_that_a_kill_cut_off_does_not_swallow_the_resume(base: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1}\n{"step": 2, "loss": 2}\n{"step": 3, "lo')
    metrics = Metrics(config_of(base, tmp_path, "log.wandb=off"), active=True)
    metrics.start(1, None)
    metrics.close()
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1]


class FakeRun:
    def __init__(self, log: list, options: dict) -> None:
        self.rows, self.options = log, options

    def define_metric(self, *_: object, **__: object) -> None:
        pass

    def log(self, values: dict) -> None:
        self.rows.append(values)

    def finish(self) -> None:
        pass


def fake_wandb(monkeypatch: pytest.MonkeyPatch, init: Callable[..., Any]) -> None:
    module = types.SimpleNamespace(init=init, Settings=lambda **options: options)
    monkeypatch.setitem(sys.modules, "wandb", module)
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_wandb_has_one_run_over_resumes_and_one_step_axis(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[FakeRun] = []
    rows: list[dict] = []

    def init(**options: Any) -> FakeRun:
        runs.append(FakeRun(rows, options))
        return runs[-1]

    fake_wandb(monkeypatch, init)
    train.run(config_of(base, tmp_path, "log.wandb=online", "train.steps=4", "log.project=p"))
    train.run(config_of(base, tmp_path, "log.wandb=online", "train.steps=6", "log.project=p"))
    assert len(runs) == 2 and runs[0].options["id"] == runs[1].options["id"]
    assert runs[1].options["resume"] == "allow" and runs[0].options["project"] == "p"
    assert all("step" in row for row in rows) and {r["step"] for r in rows} == {1, 2, 3, 4, 5, 6}
    assert json.loads((tmp_path / "checkpoints/step_00000006/state.json").read_text())["wandb_id"] == runs[0].options["id"]


@pytest.mark.parametrize("failing", ["init", "log", "import"])
def test_a_failing_wandb_never_stops_training(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, failing: str
) -> None:
    modes = []

    def init(**options: Any) -> FakeRun:
        modes.append(options["mode"])
        if failing == "init":
            raise RuntimeError("server is down\nlong traceback")
        run = FakeRun([], options)
        run.log = lambda _: 1 / 0
        return run

    fake_wandb(monkeypatch, init)
    if failing == "import":
        monkeypatch.setitem(sys.modules, "wandb", None)
    train.run(config_of(base, tmp_path, "log.wandb=online", "train.steps=4", "eval.samples=0"))
    assert len(losses(tmp_path)) == 4
    err = capsys.readouterr().err
    said = {"init": "wandb (online) failed: server is down", "log": "wandb stopped", "import": "wandb is not installed"}
    assert said[failing] in err
    assert modes == {"init": ["online", "offline"], "log": ["online"], "import": []}[failing]
    assert err.count("wandb") <= 3


def test_wandb_really_runs_offline(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("training.wandb_log.has_key", lambda: False)
    train.run(config_of(base, tmp_path, "log.wandb=auto", "train.steps=4", "eval.samples=0"))
    train.run(config_of(base, tmp_path, "log.wandb=auto", "train.steps=5", "optim.decay_steps=1", "eval.samples=0"))
    folders = sorted(p.name for p in (tmp_path / "wandb").glob("offline-run-*"))
    assert len({name.rpartition("-")[2] for name in folders}) == 1


SECRETS = {"WANDB_API_KEY": "k3y-of-wandb-0123456789", "HF_TOKEN": "hf_t0ken0123456789", "HUGGING_FACE_HUB_TOKEN": "hf_0ther012345"}


def test_no_secret_reaches_a_file_or_the_console(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """Not when wandb refuses the key either."""

    def init(**_: object) -> None:
        raise RuntimeError("permission denied")

    fake_wandb(monkeypatch, init)
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    train.run(config_of(base, tmp_path, "log.wandb=online", "train.steps=2", "optim.decay_steps=1", "optim.warmup_steps=1"))
    call_main(monkeypatch, "--config", str(base / "run.yaml"), "--dry-run")
    said = "".join(capfd.readouterr()).encode()
    written = b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    assert len(written) > 10_000 and not [name for name, value in SECRETS.items() if value.encode() in written + said]


# ---------------------------------------------------------------- the command line


def call_main(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["train.py", *args])
    return train.main()


def test_dry_run_prints_the_plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    assert call_main(monkeypatch, "--config", "configs/ling_mini.yaml", "train.steps=10", "--dry-run", "optim.warmup_steps=1") == 0
    out = capsys.readouterr().out
    for part in ("steps: 10", "16,255,638,528 total", "FLOPs/token = 6", "18,022,400 = 4400 sequences x 4096", "17.0002",
                 "8 = dp 8 x tp 1"):  # fmt: skip
        assert part in out, part


def test_a_config_without_a_model_is_told_to_be_ling_mini(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "empty.yaml").write_text("")
    assert call_main(monkeypatch, "--config", str(tmp_path / "empty.yaml"), "--dry-run") == 0
    note = "note              no model.* key is set, so this is Ling-mini-2.0, the default (16,255,638,528 parameters)"
    assert note in capsys.readouterr().out
    assert call_main(monkeypatch, "--config", "configs/tiny.yaml", "--dry-run") == 0
    assert "the default" not in capsys.readouterr().out


def test_idle_openmp_threads_sleep_before_torch_starts_them() -> None:
    """OpenMP reads the policy when torch loads it: a second later it changes nothing."""
    source = (ROOT / "train.py").read_text(encoding="utf-8")
    assert source.index('setdefault("OMP_WAIT_POLICY", "passive")') < source.index("\nimport torch")


def test_mistakes_are_one_message_without_traceback(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    config = ("--config", str(base / "run.yaml"), f"run.dir={tmp_path / 'run'}")
    cases = {
        "did you mean optim.lr?": (*config, "optim.lrr=1"),
        "cannot read config nope.yaml": ("--config", "nope.yaml"),
        "tokenizer nope does not exist": (*config, "data.tokenizer=nope"),
        "packed data /nope/train.bin does not exist": (*config, "data.dir=/nope"),
        "fewer than one global batch": (*config, "train.global_batch=100000"),
        "no checkpoint at nope": (*config, "checkpoint.resume=nope"),
        "finds no GPU on this machine": (*config, "train.device=cuda"),
        "the model's vocabulary holds only 128": (*config, "model.vocab_size=128", "data.vocab_size=128"),
    }
    if torch.cuda.is_available():
        del cases["finds no GPU on this machine"]
    for part, args in cases.items():
        assert call_main(monkeypatch, *args) == 2, part
        err = capsys.readouterr().err
        assert part in err and "Traceback" not in err, err
        assert err.count("error:") == 1


def test_run_dir_that_is_a_file(base: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write in run.dir"):
        Metrics(config_of(base, tmp_path / "file/run"), active=True).start(0, None)


# ---------------------------------------------------------------- several ranks


def test_the_log_shows_what_each_kind_of_collective_sends_and_how_long_it_takes(base: Path, tmp_path: Path) -> None:
    """Bytes and seconds by kind in metrics.jsonl, from a run of two ranks that split the experts."""
    overrides = [f"run.dir={tmp_path}", "parallel.ep=2", "train.steps=2", "eval.samples=0", "checkpoint.every=0"]
    done = run_train("--config", str(base / "run.yaml"), *overrides, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [r for r in read_metrics(tmp_path / "metrics.jsonl") if "loss" in r]
    assert [r["step"] for r in records] == [1, 2]
    for record in records:
        for kind in ("gradients", "dispatch", "combine"):
            assert record[f"wire/{kind}_gb"] > 0 and record[f"wire_time/{kind}_s"] > 0, kind
        config = config_of(base, tmp_path, "parallel.ep=2", world_size=2)
        with torch.device("meta"):
            model = Transformer(config.model, config.fp8.build(), Mesh.solo())
        # by default a rank sends the other one's half of the dense gradients as FP8 tiles, and its own half of the new weights
        dense = sum(w.numel for _, w in weights(model) if not w.expert)
        assert record["wire_format/gradients/e4m3_gb"] == pytest.approx(132 / 128 * dense / 2 / 1e9, rel=0.1)
        assert record["wire/gradients_gb"] == record["wire_format/gradients/e4m3_gb"]
        assert record["wire_format/weights/e4m3_gb"] > 0 and record["wire/weights_gb"] < record["wire/gradients_gb"] * 2


def test_experts_without_memory_end_the_run_with_a_message(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("model.experts.grouped_gemm_nt", fail)
    assert train.main(["--config", str(base / "run.yaml"), f"run.dir={tmp_path}", "train.steps=1"]) == 2
    shown = capsys.readouterr().err
    assert "error: layers.1.block.experts, 4 experts of ep rank 0: out of memory: 640 rows need" in shown
    assert "Traceback" not in shown
