"""Bytes and seconds on the wire, by kind ("dispatch", "combine", "tp", "gradients") and format ("e4m3", "bf16").

Bytes are what this rank sends: payload with its scales and padding; what a rank hands to itself is left out. Reductions
count as the bandwidth-optimal ring does: (n - 1) / n of the buffer for a reduce-scatter, twice that for an all-reduce.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

FORMAT_NAMES = {
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "uint8",
}


class Traffic:
    """Counts one rank's traffic. A mesh owns one and all its axes write into it; nothing in the numerics reads it.

    Attributes:
        sent: (kind, format) -> bytes since the last `reset`.
        timed: also measure time. On CUDA by events read in `seconds()`, so that no collective waits for the host.
    """

    def __init__(self, timed: bool = False) -> None:
        self.timed = timed
        self.sent: dict[tuple[str, str], int] = defaultdict(int)
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def add(self, kind: str, fmt: str, nbytes: int) -> None:
        """Counts `nbytes` sent to other ranks."""
        if nbytes:
            self.sent[kind, fmt] += int(nbytes)

    def by_kind(self) -> dict[str, int]:
        """Bytes by kind, formats summed."""
        total: dict[str, int] = defaultdict(int)
        for (kind, _), nbytes in self.sent.items():
            total[kind] += nbytes
        return dict(total)

    @contextmanager
    def clock(self, kind: str, device: torch.device) -> Iterator[None]:
        """Adds the enclosed time to `kind`: wall time on CPU, the stream's on CUDA. Free when `timed` is off."""
        if not self.timed:
            yield
        elif device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._events.append((kind, start, end))
        else:
            began = time.perf_counter()
            yield
            self._seconds[kind] += time.perf_counter() - began

    @contextmanager
    def set_aside(self) -> Iterator[dict[tuple[str, str], int]]:
        """What is sent inside is counted in the dictionary that it yields, and not timed: for the capture of a CUDA graph."""
        before, timed = self.sent, self.timed
        self.sent, self.timed = defaultdict(int), False
        try:
            yield self.sent
        finally:
            self.sent, self.timed = before, timed

    def seconds(self) -> dict[str, float]:
        """Seconds by kind since the last `reset`. Waits for the device if CUDA events are open."""
        for kind, start, end in self._events:
            end.synchronize()
            self._seconds[kind] += start.elapsed_time(end) / 1e3
        self._events.clear()
        return dict(self._seconds)

    def reset(self) -> None:
        """Starts the next step's count."""
        self.sent.clear()
        self._seconds.clear()
        self._events.clear()
