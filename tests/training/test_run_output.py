"""What a run leaves for people: metrics, wandb, no secrets."""

from __future__ import annotations

import itertools
import json
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from fp8.weight import weights
from model.transformer import Transformer
from parallel.mesh import Mesh
from tests.helpers import ROOT, run_train
from tests.training.runs import config_of, losses
from training.errors import UserError
from training.metrics import Metrics, Throughput, read_metrics


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


def test_the_last_line_names_what_there_is(straight: dict[str, Any], base: Path) -> None:
    metrics = Metrics(config_of(base, straight["dir"]), active=True)
    assert metrics.written() == f"{straight['dir']}/: config.yaml, metrics.jsonl, checkpoints/"  # log.wandb=off
    (straight["dir"] / "profile").mkdir()
    assert metrics.written().endswith("checkpoints/, profile/")
    (straight["dir"] / "profile").rmdir()


def test_the_head_of_a_run_is_short_and_leads_to_what_its_lines_mean() -> None:
    """The page explains the formula, `load` and `peak`."""
    head = Throughput(1, 4.411e7, 1, torch.device("cpu")).formula()
    page, _, anchor = re.search(r"docs/\S+?(?=[;)\s])", head)[0].partition("#")
    title = "### What a run prints\n"
    section = (ROOT / page).read_text(encoding="utf-8").partition(title)[2].partition("\n## ")[0]
    assert len(head) < 200 and anchor == title[4:-1].lower().replace(" ", "-")
    assert "`load 2.54x`" in section and "6 * layers * seq_len * heads * head_dim" in section and "`peak`" in section


@pytest.mark.parametrize(("settings", "warned"), [
    (["eval.samples=0"], False),
    (["data.validation_fraction=0"], True),
])  # fmt: skip
def test_training_needs_no_validation(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: list[str], warned: bool
) -> None:
    """None asked for: the file may be absent. None there: a warning. Either way a finished run stays finished."""
    for name in ("train.bin", "train.json"):
        (tmp_path / name).write_bytes((base / name).read_bytes())
    if warned:
        described = json.loads((base / "validation.json").read_text()) | {"num_tokens": 0, "num_documents": 0, "text_bytes": 0}
        (tmp_path / "validation.json").write_text(json.dumps(described))
        (tmp_path / "validation.bin").write_bytes(b"")
    args = ["--config", str(base / "run.yaml"), f"run.dir={tmp_path}/run", f"data.dir={tmp_path}", "train.steps=2", *settings]
    for said in ("wrote", "is finished"):
        assert train.main([*args, "eval.every=1", "fp8.health_every=0"]) == 0
        told = capsys.readouterr()
        assert said in told.out and ("no validation in this run" in told.err) == warned
    assert not any("val/loss" in r for r in read_metrics(tmp_path / "run/metrics.jsonl"))
    (tmp_path / "train.json").unlink()
    assert train.main(args) == 2 and f"packed data {tmp_path}/train.json does not exist" in capsys.readouterr().err


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
    module = types.SimpleNamespace(init=init, Settings=lambda **options: options, Image=lambda picture, caption: caption)
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
    train.main(["--config", str(base / "run.yaml"), "--dry-run"])
    said = "".join(capfd.readouterr()).encode()
    written = b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    assert len(written) > 10_000 and not [name for name, value in SECRETS.items() if value.encode() in written + said]


def test_idle_openmp_threads_sleep_before_torch_starts_them() -> None:
    """OpenMP reads the policy when torch loads it: a second later it changes nothing."""
    for name in ("train.py", "tools/compare.py"):
        source = (ROOT / name).read_text(encoding="utf-8")
        assert source.index('setdefault("OMP_WAIT_POLICY", "passive")') < source.index("\nimport torch"), name


def test_run_dir_that_is_a_file(base: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write in run.dir"):
        Metrics(config_of(base, tmp_path / "file/run"), active=True).start(0, None)


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
