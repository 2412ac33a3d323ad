"""A rank that hangs: how a run of train.py ends, on gloo and on NCCL, and what torch's flight recorder writes there.

Ranks are started without torchrun, whose import would cost as long as theirs, so that each one's exit status is seen. What they
print goes to files, with the second in which each phase began, and is shown whatever happens; they are killed in the end.
"""

from __future__ import annotations

import os
import pickle
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import ROOT
from training.errors import ALONE

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
LIMIT_S = 60.0  # for what takes 20 to 40 s

# two collectives; one rank does not come to the second, whose group waits 3 s (NCCL's own start may take longer on a cold machine)
HANG = """
import os, resource, time
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
began = time.time()
def phase(name):
    print(f"{time.time() - began:6.1f} s  {name}", flush=True)
import torch
import torch.distributed as dist
from datetime import timedelta
from training.watchdog import record_collectives
phase("torch is imported")
record_collectives(os.environ["FOLDER"])
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
device = torch.device("cuda", rank)
dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=60))
one = torch.ones(1, device=device)
dist.all_reduce(one)
torch.cuda.synchronize()
phase("NCCL is there")
group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
dist.all_reduce(one, group=group)
torch.cuda.synchronize()
phase("first collective")
if rank == 1:
    time.sleep(60)
dist.all_reduce(one, group=group)
phase("second collective is queued")
torch.cuda.synchronize()
phase("it has ended")
"""

# train.py whose rank 1 stands still before step 3
STALL = """
import os, sys, time
began = time.time()
import train
from training.metrics import Phases
from training.step import TrainStep
print(f"{time.time() - began:6.1f} s  imported", flush=True)
call = TrainStep.__call__
def stalling(self, step, *args, **options):
    print(f"{time.time() - began:6.1f} s  step {step}", flush=True)
    if step == 3 and os.environ["RANK"] == "1":
        stand_still()
    return call(self, step, *args, **options)
def stand_still():
    time.sleep(60)
TrainStep.__call__ = stalling
sys.exit(train.main(sys.argv[1:]))
"""


@contextmanager
def ranks(folder: Path, script: str, *arguments: str, **env: str) -> Iterator[list[subprocess.Popen]]:
    """Two processes of a script, each writing to folder/said<rank>; killed at the end, and what they said printed."""
    (folder / "script.py").write_text(script)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    common = {**os.environ, "PYTHONPATH": paths, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **env}
    running: list[subprocess.Popen] = []
    try:
        for rank in (0, 1):
            with open(folder / f"said{rank}", "w") as said:
                command = [sys.executable, "-u", str(folder / "script.py"), *arguments]
                own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                running.append(subprocess.Popen(command, env=own, stdout=said, stderr=subprocess.STDOUT))
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()
        for rank in (0, 1):
            lines = (folder / f"said{rank}").read_text().splitlines()
            kept = [line[:160] for line in lines if " s  " in line[:12] or "rank " in line[:9] or "error" in line[:6]]
            print(f"-- rank {rank}, status {running[rank].returncode}", *kept[:24], sep="\n   ", flush=True)


def until(what: Any, began: float) -> bool:
    """Waits until `what()` is true; False after LIMIT_S."""
    while not what() and time.monotonic() - began < LIMIT_S:
        time.sleep(0.2)
    return bool(what())


def collectives(folder: Path, rank: int) -> Sequence[dict[str, Any]]:
    """What the flight recorder has written; our own file."""
    return pickle.loads((folder / f"nccl_trace_rank_{rank}").read_bytes())["entries"]


def whole(folder: Path, rank: int) -> bool:
    try:
        return bool(collectives(folder, rank))
    except (OSError, EOFError, pickle.UnpicklingError):
        return False


@pytest.mark.multi_gpu
@TWO_GPUS
def test_the_flight_recorder_writes_when_a_rank_hangs(tmp_path: Path) -> None:
    """torch's own end, SIGABRT, comes four times TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC later: a minute, unless that is set."""
    began = time.monotonic()
    with ranks(tmp_path, HANG, FOLDER=str(tmp_path), TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC="1000") as (first, _):
        assert until(lambda: whole(tmp_path, 0) and whole(tmp_path, 1), began), "no recording"
        print(f"recordings after {time.monotonic() - began:.1f} s", flush=True)
        assert until(lambda: first.poll() is not None, began), "rank 0 waits for ever"
        print(f"rank 0 ended after {time.monotonic() - began:.1f} s", flush=True)
    last, other = collectives(tmp_path, 0)[-1], collectives(tmp_path, 1)[-1]
    print("flight recorder:", last["profiling_name"], last["state"], "; rank 1:", other["profiling_name"], other["state"])
    assert first.returncode == -6
    assert "all_reduce" in last["profiling_name"] and last["state"] != "completed" and other["state"] == "completed"


@pytest.mark.parametrize("device", [
    pytest.param("cpu", marks=pytest.mark.distributed), pytest.param("cuda", marks=[pytest.mark.multi_gpu, TWO_GPUS])
])  # fmt: skip
def test_a_run_in_which_a_rank_stalls_ends_and_says_where(base: Path, tmp_path: Path, device: str) -> None:
    """On FP32 tensors, which few kernels need compiling for. On NCCL even the rank that stands still leaves with status 5."""
    began, run_dir, nccl = time.monotonic(), tmp_path / "run", device == "cuda"
    overrides = [
        f"run.dir={run_dir}", f"train.device={device}", "fp8.recipe=fp32", "fp8.health_every=0", "data.isolate_documents=false",
        f"train.timeout_s={10 if nccl else 4}", "faults.quiet_s=2", "eval.samples=0", "checkpoint.every=0", "train.steps=9",
    ]  # fmt: skip
    with ranks(tmp_path, STALL, "--config", str(base / "run.yaml"), *overrides) as running:
        ending = running if nccl else running[:1]
        assert until(lambda: all(process.poll() is not None for process in ending), began), "the run has not ended"
        print(f"ended after {time.monotonic() - began:.1f} s", flush=True)
    said = [(tmp_path / f"said{rank}").read_text() for rank in (0, 1)]
    assert [process.returncode for process in ending] == [ALONE] * len(ending)
    assert "in data of step 3; stacks" in said[1] and "in stand_still" in said[1]
    waiting = r"in (counts|forward|backward|reduce) of step 3; stacks"  # on a GPU the host runs ahead of the collective
    assert re.search(waiting, said[0]) and "in stand_still" not in said[0]
    for rank in range(len(ending)):
        why = "NCCL timed out: a rank is gone, or hangs" if nccl else "another rank is gone or hangs ("
        assert f"error on rank {rank}: {why}" in said[rank]
        assert not nccl or whole(run_dir, rank)
