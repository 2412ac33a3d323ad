"""Bytes and seconds on the wire, by kind ("dispatch", "combine", "tp", "gradients") and format ("e4m3", "bf16").

Bytes are what this rank sends: payload with its scales and padding; what a rank hands to itself is left out. Reductions
count as the bandwidth-optimal ring does: (n - 1) / n of the buffer for a reduce-scatter, twice that for an all-reduce.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

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


Wait = tuple[str, torch.cuda.Event, torch.cuda.Event]  # kind, before and after


@dataclass(frozen=True)
class Captured:
    """What one replay of a CUDA graph sends, and the events that it records around its waits, if any."""

    sent: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    waits: list[Wait] = field(default_factory=list)


class Traffic:
    """Counts one rank's traffic. A mesh owns one and all its axes write into it; nothing in the numerics reads it.

    Attributes:
        sent: (kind, format) -> bytes since the last `reset`.
        timed: also measure time. On CUDA by events read in `seconds()`, so that no collective waits for the host.
        times_graphs: CUDA graphs captured from now on can be timed, for which they hold two more nodes a wait.
    """

    def __init__(self, timed: bool = False) -> None:
        self.timed = timed
        self.sent: dict[tuple[str, str], int] = defaultdict(int)
        self._seconds: dict[str, float] = defaultdict(float)
        self.times_graphs = False
        self._capturing: Captured | None = None
        self._events: list[Wait] = []

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
        if not (self.timed or self._capturing is not None and self.times_graphs):
            yield
        elif device.type == "cuda":
            # an external event becomes a node of the graph that is being captured
            options = dict(enable_timing=True, **({"external": True} if self._capturing is not None else {}))
            start, end = torch.cuda.Event(**options), torch.cuda.Event(**options)
            start.record()
            yield
            end.record()
            (self._events if self._capturing is None else self._capturing.waits).append((kind, start, end))
        else:
            began = time.perf_counter()
            yield
            self._seconds[kind] += time.perf_counter() - began

    @contextmanager
    def capture(self) -> Iterator[Captured]:
        """While a CUDA graph is captured: what is sent inside counts whenever the graph is `replayed`, not now."""
        before, timed = self.sent, self.timed
        self._capturing = Captured()
        self.sent, self.timed = self._capturing.sent, False
        try:
            yield self._capturing
        finally:
            self.sent, self.timed, self._capturing = before, timed, None

    def replayed(self, captured: Captured) -> None:
        """Counts one replay. Of several before `seconds` each has the times of the last."""
        for (kind, fmt), nbytes in captured.sent.items():
            self.add(kind, fmt, nbytes)
        if self.timed:
            self._events += captured.waits

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
