"""A window of steps under torch's profiler, and a snapshot of what holds the GPU's memory.

    profile.start=20 profile.steps=3    RUN/profile/trace_rank0.json.gz: open in https://ui.perfetto.dev
    profile.memory=true                 RUN/profile/memory_rank0.pickle: open in https://docs.pytorch.org/memory_viz

Phases (forward, backward, ...) appear in the trace, and as NVTX ranges under Nsight Systems whether or not a window is open.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """What to record, and when."""

    start: int = 0  # first step of the window (from 1); 0: no window
    steps: int = 3
    memory: bool = False  # also record allocations in the window (CUDA)
    ranks: int = 1  # the first so many ranks record


class ProfileWindow:
    """Records steps [start, start + steps) of this rank. `begin` and `end` enclose each step and do nothing outside of it."""

    def __init__(self, profile: ProfileConfig, run_dir: str, rank: int, device: torch.device) -> None:
        self.profile, self.rank, self.cuda = profile, rank, device.type == "cuda"
        self.folder = Path(run_dir) / "profile"
        self.active = profile.start > 0 and rank < profile.ranks
        self._profiler: torch.profiler.profile | None = None

    def missed(self, done: int) -> str | None:
        """What to say of a window that would have begun in the `done` steps before a resume."""
        start = self.profile.start
        behind = f"profile.start={start} is behind this run, which goes on after step {done}: no window"
        return behind if 0 < start <= done else None

    def begin(self, step: int) -> None:
        """Before step `step`."""
        if not self.active or step != self.profile.start:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            if self.profile.memory:
                torch.cuda.memory._record_memory_history(max_entries=1_000_000)
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
        self._profiler.start()

    def end(self, step: int, last: bool) -> list[Path]:
        """After step `step`; the files written, when the window (or the run) ends here."""
        if self._profiler is None or not (last or step >= self.profile.start + self.profile.steps - 1):
            return []
        if self.cuda:
            torch.cuda.synchronize()
        self._profiler.stop()
        files = [self.folder / f"trace_rank{self.rank}.json.gz"]
        self._profiler.export_chrome_trace(str(files[0]))
        self._profiler = None
        if self.cuda and self.profile.memory:
            files.append(self.folder / f"memory_rank{self.rank}.pickle")
            torch.cuda.memory._dump_snapshot(str(files[1]))
            torch.cuda.memory._record_memory_history(enabled=None)
        return files
