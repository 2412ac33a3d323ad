"""The command line of train.py: its dry run, and what it refuses before any work."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import train
from tests.helpers import ROOT
from tests.training.runs import losses
from training.command_line import tell_torchrun
from training.config import load_config
from training.errors import UserError
from training.idle_keys import idle_keys
from training.snapshot import HostCopy


def call_main(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["train.py", *args])
    return train.main()


def test_dry_run_prints_the_plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    assert call_main(monkeypatch, "--config", "configs/ling_mini.yaml", "train.steps=10", "--dry-run", "optim.warmup_steps=1") == 0
    out = capsys.readouterr().out
    for part in ("steps: 10", "16,255,638,528 total", "9.941e+09 (6 x matrix", "18,022,400 = 4,400 sequences x 4096", " = 17.018;",
                 "8 = dp 8 x tp 1"):  # fmt: skip
        assert part in out, part


def test_a_dry_run_refuses_what_no_run_could_use(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    cases = {
        "no checkpoint at nope": ["checkpoint.resume=nope"],
        "log.reference=nope: cannot read nope/metrics.jsonl": ["log.reference=nope"],
        f"cannot write in run.dir={tmp_path}/file/run: {tmp_path}/file is not a folder": [f"run.dir={tmp_path}/file/run"],
        "run.dir is empty": ["run.dir="],
        "profile.start=7 is after the last step, train.steps=6": ["profile.start=7"],
        "2 problems": ["checkpoint.resume=nope", "log.reference=nope"],
        "start it with torchrun --nproc-per-node 2 ": ["parallel.ep=2", "--world-size", "1"],
        "error: --world-size 0 must be at least 1": ["--world-size", "0"],
    }
    for part, args in cases.items():
        assert train.main(["--config", str(base / "run.yaml"), "--dry-run", f"run.dir={tmp_path}/run", *args]) == 2, part
        said = capsys.readouterr()
        assert part in said.err and said.err.count("error:") == 1 and not said.out, said


def test_keys_that_change_nothing_are_noted(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a dry run, and as warnings of the run."""
    cases = {
        "fp8.activation is set, but fp8.recipe=bf16 does not read it": "fp8.activation=e5m2",
        "fp8.margin is set, but": "fp8.margin=2",
        "train.cuda_graphs is for GPUs": "train.cuda_graphs=true",
        "parallel.peer_copies is for GPUs at parallel.ep=2": "parallel.peer_copies=true",
        "profile.start=0 opens no window": "profile.steps=2",
        "optim.decay_steps is set, but optim.schedule=cosine": "optim.decay_steps=2",
        "no room for optim.warmup_steps": "optim.warmup_steps=8",
        "parallel.tp_wire is set, but parallel.tp=1 does not read it": "parallel.tp_wire=fp8",
        "parallel.dispatch is set, but parallel.ep=1 does not read it": "parallel.dispatch=gathered",
        "parallel.zero, parallel.zero_partition, parallel.grad_rounding are set, but one rank": "parallel.zero=0",
        "data.hub_split, data.streaming, data.text_key are set, but data.source=text": "data.streaming=true",
        "model.mtp_loss_weight is set, but model.num_nextn_predict_layers=0": "model.mtp_loss_weight=0.2",
        "faults.max_streak is set, but faults.policy=stop": "faults.max_streak=2",
    }
    args = ["--config", str(base / "run.yaml"), f"run.dir={tmp_path}", "train.device=cpu", "fp8.recipe=bf16"]
    args += ["optim.schedule=cosine", "parallel.zero=0", "model.num_nextn_predict_layers=0"]
    more = ["parallel.zero_partition=tensors", "parallel.grad_rounding=stochastic", "data.hub_split=test", "data.text_key=body"]
    assert train.main([*args, *more, *cases.values(), "--dry-run"]) == 0
    dry = capsys.readouterr().out
    assert dry.count("\nnote  ") == len(cases) and all(part in dry for part in cases)
    assert train.main([*args, *more, *cases.values(), "train.steps=1", "eval.samples=0", "checkpoint.every=0"]) == 0
    err = capsys.readouterr().err
    assert err.count("warning: ") == len(cases) and all(part in err for part in cases), err
    args += ["optim.decay_steps=0", "--dry-run"]
    assert train.main([*args, "--world-size", "2"]) == 0
    assert "\nnote  " not in capsys.readouterr().out
    assert train.main([*args, *more[:2], "--world-size", "2"]) == 0
    dry = capsys.readouterr().out
    assert "parallel.zero_partition is set, but parallel.zero=0 does not" in dry
    assert "parallel.grad_rounding is set, but parallel.grad_wire=auto, which is fp32 here, does not read it" in dry
    alone = ["parallel.simulated_ranks=2", "parallel.zero=2", "parallel.grad_wire=fp8", *more[:2]]  # one process reads the rest
    assert train.main([*args, *alone]) == 0
    dry = capsys.readouterr().out
    assert dry.count("\nnote  ") == 1 and "parallel.zero_partition is set, but one rank does not read it" in dry


def test_the_files_here_set_hardly_a_key_that_changes_nothing() -> None:
    """On one rank too, where those for several have nothing to share."""
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        config = load_config(str(path))
        assert idle_keys(config, "cuda", config.fewest_ranks) == [], path
        alone = load_config(str(path), ["parallel.ep=1", "parallel.tp=1", "parallel.dispatch=auto", "parallel.peer_copies=false"])
        assert len(idle_keys(alone, "cuda", 1)) <= 1, path


def test_a_dry_run_under_torchrun_speaks_once_and_for_its_ranks(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert train.main(["--config", str(base / "run.yaml"), "--dry-run"]) == 0
        assert capsys.readouterr().out.count("2 = dp 2 x tp 1") == (rank == "0")


def test_a_config_without_a_model_is_told_to_be_ling_mini(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "empty.yaml").write_text("")
    assert call_main(monkeypatch, "--config", str(tmp_path / "empty.yaml"), "--dry-run") == 0
    note = "note              no model.* key is set, so this is Ling-mini-2.0, the default (16,255,638,528 parameters)"
    assert note in capsys.readouterr().out
    assert call_main(monkeypatch, "--config", "configs/tiny.yaml", "--dry-run") == 0
    assert "the default" not in capsys.readouterr().out


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
        "checkpoint.resume is auto, none, or the path": (*config, "checkpoint.resume=never"),
        "finds no GPU on this machine; train.device=cpu needs none": (*config, "train.device=cuda"),
        "the model's vocabulary holds only 128": (*config, "model.vocab_size=128", "data.vocab_size=128"),
    }
    if torch.cuda.is_available():
        del cases["finds no GPU on this machine; train.device=cpu needs none"]
    for part, args in cases.items():
        assert call_main(monkeypatch, *args) == 2, part
        err = capsys.readouterr().err
        assert part in err and "Traceback" not in err, err
        assert err.count("error:") == 1


def test_torchrun_ends_with_the_reason(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """As torchrun itself reads and words it; rank 1, which says nothing on a host that rank 0 is on, may be the first to end."""
    config = ("--config", str(base / "run.yaml"), f"run.dir={tmp_path / 'run'}")
    for rank in ("0", "1"):
        for name, value in {"TORCHELASTIC_ERROR_FILE": tmp_path / "error.json", "RANK": rank, "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, str(value))
        assert call_main(monkeypatch, *config, "optim.lrr=1") == 2
        assert capsys.readouterr().err.count("error: ") == (rank == "0")
        shown = str(ChildFailedError("train.py", {int(rank): ProcessFailure(int(rank), 1, 2, str(tmp_path / "error.json"))}))
        assert re.search(r"Root Cause.*traceback : error: .*optim.lrr is not a key; did you mean optim.lr\?\n=+$", shown, re.DOTALL)
        (tmp_path / "error.json").unlink()


def test_a_rank_without_its_neighbour_is_not_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchrun names the rank that ended first: another's own reason, or its signal, is told before "another rank is gone"."""
    stamps = []
    for later in (0, 3600):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"{later}.json"))
        tell_torchrun("error: ...", later)
        stamps.append(ProcessFailure(0, 1, 1, str(tmp_path / f"{later}.json")).timestamp)
    killed = ProcessFailure(1, 2, -9, str(tmp_path / "none.json")).timestamp
    assert killed < stamps[1] and stamps[1] - stamps[0] >= 3600


def test_a_run_that_began_elsewhere_goes_on_without_that(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same command again, after the folder that it began at is gone; another beginning is refused."""
    args = ["--config", str(base / "run.yaml"), "eval.samples=0", "fp8.health_every=0", "optim.schedule=constant"]
    first = [*args, f"run.dir={tmp_path}/a", "train.steps=1"]
    assert train.main([*first, "optim.warmup_steps=0", "optim.decay_steps=0"]) == 0
    second = [*args, f"run.dir={tmp_path}/b", f"checkpoint.resume={tmp_path}/a", "optim.warmup_steps=0", "optim.decay_steps=0"]
    assert train.main([*second, "train.steps=2", "profile.start=1"]) == 0
    assert "profile.start=1 is behind this run, which goes on after step 1: no window" in capsys.readouterr().err
    (tmp_path / "a").rename(tmp_path / "c")
    assert train.main([*second, "train.steps=3"]) == 0
    assert "continuing" in capsys.readouterr().err and sorted(losses(tmp_path / "b")) == [2, 3]
    assert train.main([*second, "train.steps=4", f"checkpoint.resume={tmp_path}/c"]) == 2
    assert "has checkpoints of its own, up to step_00000003: choose another run.dir" in capsys.readouterr().err
    # A dry run judges the same without having to start.
    for resume, said in {f"{tmp_path}/c": "of its own, up to", "nope": "of its own, up to", "none": "already holds a run"}.items():
        assert train.main([*second, "train.steps=4", f"checkpoint.resume={resume}", "--dry-run"]) == 2
        assert said in capsys.readouterr().err
    for resume in (f"{tmp_path}/a", f"{tmp_path}/b", "auto"):
        assert train.main([*second, "train.steps=4", f"checkpoint.resume={resume}", "--dry-run"]) == 0


def test_ctrl_c_before_the_run_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("training.command_line.load_config", interrupted)
    assert train.main(["--config", "configs/tiny.yaml", "--dry-run"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_dry_run_counts_kept_transposes(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for value in ("false", "true"):
        assert train.main(["--config", str(base / "run.yaml"), "--dry-run", f"fp8.keep_transposed={value}"]) == 0
        said.append(next(line for line in capsys.readouterr().out.splitlines() if line.startswith("bytes/parameter")))
    totals = [float(re.search(r"= ([\d.]+);", line)[1]) for line in said]
    turned = float(re.search(r"([\d.]+) transpose", said[1])[1])
    assert "transpose" not in said[0] and 17.0 < totals[0] < 17.5
    assert turned > 0.5 and totals[1] - totals[0] == pytest.approx(turned, abs=2e-3)


def test_keys_for_gpus_are_noted_where_a_run_would_find_none(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """train.device=auto is what a run on this machine would take."""
    args = ["--config", str(base / "run.yaml"), "--dry-run", "train.device=auto", "optim.offload=true"]
    for gpus in (0, 1):
        monkeypatch.setattr("torch.cuda.device_count", lambda gpus=gpus: gpus)
        assert train.main(args) == 0
        said = "optim.offload is for GPUs: it changes nothing on a CPU, and this machine has no GPU"
        assert (said in capsys.readouterr().out) == (not gpus)


def test_a_run_that_is_refused_while_memory_is_being_pinned_leaves_no_thread(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A thread inside torch when the interpreter ends would end the process with SIGABRT instead of status 2."""

    def refuse(*_: object) -> None:
        raise UserError("cannot write")

    original, made = HostCopy._buffer, []

    def slow(copy: HostCopy, name: str, like: torch.Tensor) -> torch.Tensor:
        made.append(name)
        time.sleep(0.2)
        return original(copy, name, like)

    monkeypatch.setattr(HostCopy, "_buffer", slow)
    for where in ("training.metrics.Metrics.start", "train.compare_replicas"):  # before the first step, and after it
        with monkeypatch.context() as patch:
            patch.setattr(where, refuse)
            made.clear()
            assert train.main(["--config", str(base / "run.yaml"), f"run.dir={tmp_path}/{where}"]) == 2
        assert "error: cannot write" in capsys.readouterr().err
        assert made and not [thread for thread in threading.enumerate() if thread.name == "pinning"]
        before = len(made)
        time.sleep(0.3)
        assert len(made) == before


def test_a_save_that_outlasts_its_run_does_not_change_the_status() -> None:
    """Ten threads multiply while the interpreter would end: without `leave` the process aborts."""
    code = """
import sys, threading, time
import torch
from training.process import SAVING, leave
def work():
    while True:
        torch.mm(torch.ones(99, 99), torch.ones(99, 99))
for _ in range(10):
    threading.Thread(target=work, daemon=True, name=SAVING).start()
time.sleep(0.2)
print("last words", end="")
leave(3)
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "last words", "")
