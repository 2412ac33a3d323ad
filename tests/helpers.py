"""Runs a function on several ranks (gloo, CPU), and `train.py` as a user would.

Ranks are forked from one server that has already imported torch, so a launch costs tenths of a second instead of the
seconds that an import takes; still, put many checks into one launch.
"""

from __future__ import annotations

import io
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]

_ranks = multiprocessing.get_context("forkserver")
_ranks.set_forkserver_preload(["torch", "torch.distributed", "torch.distributed.checkpoint", "fp8.linear"])


def run_ranks(num_ranks: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Calls `fn(rank, num_ranks, *args)` on each rank with the default process group initialised.

    Returns the results in rank order. `fn` must stand at the top level of a module; arguments and results must pickle.

    Raises:
        AssertionError: a rank raised (its traceback is in the message), died, or did not answer in `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(num_ranks):
            ours, theirs = _ranks.Pipe(duplex=False)
            rank_args = (rank, num_ranks, f"{folder}/store", theirs, fn, args)
            process = _ranks.Process(target=_rank_main, args=rank_args, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _rank_main(rank: int, size: int, store: str, pipe: Connection, fn: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60))
        # Pickled by the plain pickler: tensors travel as bytes, not as shared memory that dies with the rank.
        pipe.send((True, _to_bytes(fn(rank, size, *args))))
        dist.barrier()  # a rank that leaves early takes its connections with it
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def _to_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _collect(pipes: Sequence[Connection], deadline: float) -> list[Any]:
    results, waiting = [None] * len(pipes), dict(enumerate(pipes))
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
        assert ready, f"ranks {sorted(waiting)} did not answer in time"
        for rank in [r for r, p in waiting.items() if p in ready]:
            try:
                ok, value = waiting.pop(rank).recv()
            except EOFError:
                raise AssertionError(f"rank {rank} died without a word") from None
            assert ok, f"rank {rank} raised:\n{value}"
            results[rank] = _from_bytes(value)
    return results


def _from_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def largest(errors: Iterable[float]) -> float:
    """The largest error. `max` passes over a NaN that does not come first: here one that is not finite is infinite."""
    return max(e if math.isfinite(e) else math.inf for e in errors)


def run_train(
    *args: str, ranks: int = 1, env: dict[str, str] | None = None, timeout: float = 240.0, script: str = "train.py"
) -> subprocess.CompletedProcess:
    """Runs `train.py args` (or another `script`), under torchrun when `ranks` > 1; returns exit code, stdout and stderr as text."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*launcher, script, *args],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def run_gpu_tests_interpreted(files: Iterable[str]) -> None:
    """GPU tests of Triton kernels, in Triton's interpreter on the CPU and in a process of its own: all must pass."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
