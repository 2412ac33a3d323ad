"""Being asked to stop: SIGTERM, SIGINT or SIGUSR1 to any one rank, at any moment.

The first signal only raises a flag; ranks agree on it at the next step, batch of an evaluation, or end of start-up, save and
leave. A second one (more than a second later: torchrun passes on what the terminal has already sent) leaves at once. So does the
deadline, which counts from the first signal: torchrun and Slurm kill about 30 s after theirs.

A thread reads the signals from a pipe, because a handler in Python waits until the main thread is back from C, which in a
collective that hangs is never.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch

from parallel.collectives import all_reduce
from parallel.mesh import Axis
from training.errors import UNSAVED, counted

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SAME_S = 1.0


def steps_lost(done: int, last: int | None) -> str:
    """What a run of `done` steps would lose by ending now, with its newest checkpoint at step `last` (None: there is none)."""
    saved = "nothing has been saved" if last is None else f"the newest checkpoint is of step {last}"
    lost = done - (last or 0)
    return f"{saved}; {counted(lost, 'step is', 'steps are')} lost"


class StopRequest:
    """Listens from construction to `close`. In the main thread only.

    Attributes:
        requested: whether a signal has come to this process.
        loss: says what an exit without saving would lose; for the message.
    """

    def __init__(self, within_s: float, leave: Callable[[int], None] = os._exit) -> None:
        self.within_s, self.requested, self.loss = within_s, False, lambda: "nothing was saved"
        self._leave, self._first, self._timer = leave, 0.0, None
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._old = {s: signal.signal(s, lambda *_: None) for s in SIGNALS}
        self._old_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, daemon=True, name="signals").start()

    def _listen(self) -> None:
        while number := os.read(self._read, 1):
            if number[0] not in SIGNALS:
                continue
            if not self.requested:
                self._first, self.requested = time.monotonic(), True
                self.arm()
            elif time.monotonic() - self._first > SAME_S:
                self._give_up(f"second signal ({signal.Signals(number[0]).name})")
        os.close(self._read)

    def arm(self) -> bool:
        """Starts the deadline, if it does not run yet. Returns True."""
        if self._timer is None:
            self._timer = threading.Timer(self.within_s, self._give_up, [f"{self.within_s:g} s after the signal"])
            self._timer.daemon = True
            self._timer.start()
        return True

    def agreed(self, world: Axis) -> bool:
        """Whether any rank has been asked to stop; every rank calls it and gets the same answer."""
        flag = torch.tensor([int(self.requested)])
        stop = bool(all_reduce(flag, world, "report", "max"))
        if stop:
            self.arm()
        return stop

    def _give_up(self, why: str) -> None:
        print(f"stopping at once, {why}: {self.loss()}", file=sys.stderr, flush=True)
        self._leave(UNSAVED)

    def close(self) -> None:
        """Back to the handlers from before."""
        if self._timer is not None:
            self._timer.cancel()
        signal.set_wakeup_fd(self._old_fd)
        for number, handler in self._old.items():
            signal.signal(number, handler)
        os.close(self._write)  # ends the thread
