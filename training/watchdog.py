"""A thread that notices when a rank stands still and prints where: step, phase, and the stack of every thread.

When one rank hangs, the others hang in the collective that waits for it, so each prints its own: the one that is not in a
collective is the culprit. Afterwards the process groups' timeout (`train.timeout_s`) ends the run: on gloo as an error where the
rank waits. On NCCL the rank waits on the GPU, and torch's watchdog would kill it with SIGABRT, but not before a minute, which it
leaves for its flight recorder (the last collectives of each rank) to be written. That file, which takes a second, is what this
thread looks for: torch writes it on every rank as soon as a collective of any rank has taken too long.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from training.errors import ALONE

FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
FILE = "TORCH_FR_DUMP_TEMP_FILE"
PIPES = ("TORCH_FR_DEBUG_INFO_PIPE_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
WRITTEN_S = 3.0  # until the file is whole, and other ranks have heard of it


def record_collectives(folder: str) -> None:
    """Turns NCCL's flight recorder on, unless the environment decides itself; before process groups are made."""
    for name, value in FLIGHT_RECORDER.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault(FILE, os.path.join(folder, "nccl_trace_rank_"))


def recording(rank: int) -> str | None:
    """Where `record_collectives` has a rank's collectives written; None where a pipe may ask for that at any time."""
    return None if any(pipe in os.environ for pipe in PIPES) else f"{os.environ[FILE]}{rank}"


class Watchdog:
    """Watches one process. `note` says what it does now; silence for `quiet_s` prints the report, once for each silence.

    Args:
        recording: file that torch writes when a collective has timed out: the report is printed and the process left, with ALONE.
    """

    def __init__(
        self,
        rank: int,
        quiet_s: float,
        out: TextIO | None = None,
        recording: str | None = None,
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        self.rank, self.quiet_s, self._out, self._recording, self._leave = rank, quiet_s, out, recording, leave
        self._where, self._since, self._said = "starting", time.monotonic(), False
        self._before, self._done = self._written(), threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    def note(self, where: str) -> None:
        """`where` begins now."""
        self._where, self._since, self._said = where, time.monotonic(), False

    def _written(self) -> int | None:
        """When the recording was last written; None: there is none."""
        try:
            return os.stat(self._recording).st_mtime_ns if self._recording else None
        except OSError:
            return None

    def _watch(self) -> None:
        while not self._done.wait(min(self.quiet_s / 4, 5.0)):
            quiet, timed_out = time.monotonic() - self._since, self._written() != self._before
            if timed_out or (quiet > self.quiet_s and not self._said):
                self._said = True
                self.report(quiet)
            if timed_out:
                return self._end()

    def report(self, quiet: float) -> None:
        """Prints where this rank stands."""
        out = self._out or sys.stderr
        print(f"rank {self.rank}: nothing new for {quiet:.0f} s, in {self._where}; stacks:", file=out, flush=True)
        faulthandler.dump_traceback(out, all_threads=True)

    def _end(self) -> None:
        if self._done.wait(WRITTEN_S):
            return
        culprit = "a rank is gone, or hangs where its stacks are in no collective"
        why = f"NCCL timed out: {culprit}; the last collectives are in {self._recording}"
        print(f"error on rank {self.rank}: {why}", file=self._out or sys.stderr, flush=True)
        self._leave(ALONE)

    def close(self) -> None:
        self._done.set()
