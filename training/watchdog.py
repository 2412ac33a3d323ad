"""A thread that notices when a rank stands still and prints where: step, phase, and the stack of every thread.

When one rank hangs, the others hang in the collective that waits for it, so each prints its own: the one that is not in a
collective is the culprit. Afterwards the process groups' timeout (`train.timeout_s`) ends the run. On NCCL torch's flight recorder
keeps the last collectives and writes them then.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from typing import TextIO

FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


def record_collectives(folder: str) -> None:
    """Turns NCCL's flight recorder on, unless the environment decides itself; before process groups are made."""
    for name, value in FLIGHT_RECORDER.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", os.path.join(folder, "nccl_trace_rank_"))


class Watchdog:
    """Watches one process. `note` says what it does now; silence for `quiet_s` prints the report, once for each silence."""

    def __init__(self, rank: int, quiet_s: float, out: TextIO | None = None) -> None:
        self.rank, self.quiet_s, self._out = rank, quiet_s, out
        self._where, self._since, self._said = "starting", time.monotonic(), False
        self._done = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    def note(self, where: str) -> None:
        """`where` begins now."""
        self._where, self._since, self._said = where, time.monotonic(), False

    def _watch(self) -> None:
        while not self._done.wait(min(self.quiet_s / 4, 10.0)):
            quiet = time.monotonic() - self._since
            if quiet > self.quiet_s and not self._said:
                self._said = True
                self.report(quiet)

    def report(self, quiet: float) -> None:
        """Prints where this rank stands."""
        out = self._out or sys.stderr
        print(f"rank {self.rank}: nothing new for {quiet:.0f} s, in {self._where}; stacks:", file=out, flush=True)
        faulthandler.dump_traceback(out, all_threads=True)

    def close(self) -> None:
        self._done.set()
