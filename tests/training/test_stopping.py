"""Hangs, and being asked to stop by a signal: at any moment, on any one rank."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from parallel.mesh import build_mesh
from tests.helpers import ROOT, run_ranks, run_train
from tests.training.runs import config_of, losses
from training.errors import ALONE, STOPPED, UNSAVED
from training.process import lost_contact
from training.run_state import whole_checkpoints
from training.stopping import StopRequest
from training.watchdog import Watchdog

QUICK = ("eval.samples=0", "fp8.health_every=0", "checkpoint.background=false")


# ---------------------------------------------------------------- hangs


def test_the_watchdog_prints_phase_and_stacks_once(tmp_path: Path) -> None:
    with open(tmp_path / "out", "w+") as out:
        dog = Watchdog(3, 0.1, out)
        dog.note("reduce of step 12")
        time.sleep(0.5)
        dog.note("forward of step 13")
        dog.close()
        out.seek(0)
        text = out.read()
    assert text.count("rank 3: nothing new for") == 1 and "in reduce of step 12" in text
    assert "test_the_watchdog_prints_phase_and_stacks_once" in text


def test_a_collective_that_timed_out_ends_the_rank(tmp_path: Path) -> None:
    """torch's flight recorder says so; a file that an earlier run has left says nothing."""
    trace, left = tmp_path / "nccl_trace_rank_1", []
    trace.write_bytes(b"old")
    with open(tmp_path / "out", "w+") as out:
        dog = Watchdog(1, 0.2, out, str(trace), left.append)
        dog.note("backward of step 7")
        time.sleep(0.1)
        assert left == []
        os.utime(trace, ns=(1, 1))
        assert wait_for(lambda: left == [ALONE])
        dog.close()
        out.seek(0)
        text = out.read()
    assert text.count("in backward of step 7; stacks:") == 1 and "test_a_collective_that_timed_out_ends_the_rank" in text
    assert "error on rank 1: NCCL timed out: a rank is gone, or hangs where its stacks are in no collective; " in text
    assert f"the last collectives are in {trace}" in text


def test_a_quiet_report_just_before_does_not_replace_that_of_the_timeout(tmp_path: Path) -> None:
    trace, left = tmp_path / "nccl_trace_rank_1", []
    with open(tmp_path / "out", "w+") as out:
        dog = Watchdog(1, 0.1, out, str(trace), left.append)
        dog.note("backward of step 7")
        assert wait_for(lambda: dog._said)
        trace.write_bytes(b"new")
        assert wait_for(lambda: left == [ALONE])
        dog.close()
        out.seek(0)
        text = out.read()
    assert text.count("in backward of step 7; stacks:") == 2


def _late_rank(rank: int, size: int) -> str:
    import torch.distributed as dist

    mesh = build_mesh(timeout_s=1.0)
    if rank == 1:
        time.sleep(2.5)
        return "late"
    try:
        dist.all_reduce(torch.ones(1), group=mesh.world.group)
    except RuntimeError as error:
        return str(lost_contact(error))
    return "waited"


def test_process_groups_keep_to_the_timeout() -> None:
    said = run_ranks(2, _late_rank)
    assert said == ["another rank is gone or hangs (timed out)", "late"]
    assert lost_contact(RuntimeError("shapes differ")) is None


# ---------------------------------------------------------------- being asked to stop


@pytest.fixture()
def stop() -> Any:
    left: list[int] = []
    request = StopRequest(0.3, left.append)
    request.left = left
    yield request
    request.close()


def wait_for(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 5
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_is_a_request_and_has_a_deadline(stop: StopRequest, number: int, capfd: pytest.CaptureFixture) -> None:
    stop.loss = lambda: "2 steps are lost"
    os.kill(os.getpid(), number)
    assert wait_for(lambda: stop.requested) and stop.left == []
    assert wait_for(lambda: stop.left == [UNSAVED])
    assert "0.3 s after the signal: 2 steps are lost" in capfd.readouterr().err


def test_a_second_signal_leaves_at_once_even_from_a_hanging_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.stopping.SAME_S", 0.05)
    left: list[int] = []
    request = StopRequest(60.0, left.append)
    try:
        for delay in (0.1, 0.3):
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGTERM)).start()
        lock = threading.Lock()
        lock.acquire()
        lock.acquire(timeout=0.8)  # the main thread is in C meanwhile
        assert left == [UNSAVED]
    finally:
        request.close()


def test_two_signals_at_once_are_one(stop: StopRequest) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    assert wait_for(lambda: stop.requested)
    time.sleep(0.1)
    assert stop.left == []


def signalled(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Each call of `place` first gets a signal."""
    module, _, name = place.rpartition(".")
    owner = __import__(module, fromlist=[name])
    original = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.05)
        return original(*args, **options)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("moment", ["start-up", "evaluation", "saving"])
def test_stopped_at_any_moment_saves_and_says_143(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    signalled(
        monkeypatch,
        {
            "start-up": "train.load_tokenizer",
            "evaluation": "training.evaluate.forward",
            "saving": "training.checkpoint.write_shards",
        }[moment],
    )
    config = config_of(base, tmp_path, "fp8.health_every=0", "eval.every=3", "checkpoint.every=4", "checkpoint.background=false")
    assert train.run(config) == STOPPED
    names = [p.name for p in whole_checkpoints(tmp_path)]
    assert names == {"start-up": [], "evaluation": ["step_00000003"], "saving": ["step_00000004", "step_00000005"]}[moment]


@pytest.mark.parametrize(("moment", "lost"), [
    ("train.load_tokenizer", 0),
    ("training.step.forward", 2),  # agreed on in the step after
    ("training.evaluate.forward", 6),
])  # fmt: skip
def test_without_checkpoints_a_stop_saves_nothing_and_says_so(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, moment: str, lost: int
) -> None:
    signalled(monkeypatch, moment)
    config = config_of(base, tmp_path, "fp8.health_every=0", "eval.every=0", "checkpoint.every=0")
    assert train.run(config) == (UNSAVED if lost else STOPPED)
    said = capfd.readouterr()
    assert f"wrote {tmp_path}/: config.yaml, metrics.jsonl (step {lost})\n" in said.out and not whole_checkpoints(tmp_path)
    assert (f"(checkpoint.every=0): nothing has been saved; {lost} steps are lost" in said.err) == (lost > 0)


def signalling_script(folder: Path, when: str, name: str, then: str) -> Path:
    """A script that trains as train.py does, sends itself the signal `name` before a step `when`, and does `then` with `status`."""
    script = folder / "one.py"
    script.write_text(
        "import os, signal, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import train\nfrom training.step import TrainStep\n"
        "call = TrainStep.__call__\n"
        "def signalled(self, step, *args, **options):\n"
        f"    if {when}:\n"
        f"        os.kill(os.getpid(), signal.{name})\n"
        "    return call(self, step, *args, **options)\n"
        "TrainStep.__call__ = signalled\n"
        "status = train.main(sys.argv[1:])\n"
        f"{then}\n"
    )
    return script


def test_a_signal_to_one_rank_stops_both_at_the_same_step(base: Path, tmp_path: Path) -> None:
    """As torchrun starts them; rank 1 is told by itself."""
    status = f"open({str(tmp_path)!r} + '/status' + os.environ['RANK'], 'w').write(str(status))"
    script = signalling_script(tmp_path, "step == 3 and os.environ['RANK'] == '1'", "SIGTERM", status)
    config = ("--config", str(base / "run.yaml"), f"run.dir={tmp_path / 'run'}", *QUICK, "train.steps=60")
    done = run_train(*config, ranks=2, script=str(script))
    assert [(tmp_path / f"status{r}").read_text() for r in (0, 1)] == ["143", "143"], done.stderr
    assert whole_checkpoints(tmp_path / "run")[-1].name in ("step_00000003", "step_00000004")


@pytest.mark.slow
def test_torchrun_restarts_killed_ranks_and_they_go_on(base: Path, tmp_path: Path) -> None:
    first = "os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'"
    script = signalling_script(tmp_path, f"step == 4 and os.environ['RANK'] == '1' and {first}", "SIGKILL", "sys.exit(status)")
    config = ("--config", str(base / "run.yaml"), f"run.dir={tmp_path / 'run'}", *QUICK)
    done = run_train(*config, ranks=2, script=str(script), env={"PET_MAX_RESTARTS": "1"})
    assert done.returncode == 0, done.stderr
    assert "step_00000002, 2 steps done" in done.stderr and sorted(losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]
