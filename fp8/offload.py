"""Optimizer states in pinned host memory: each visits the GPU for its update while its neighbours are on the way.

Trades time for memory: every step moves all states over PCIe in both directions (16.3B parameters with lean states: 65 GB each
way, about 2 s; tools/plan_offload.py has the reckoning). Off by default.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch

from fp8.state_codecs import State


def to_host(state: dict[str, State]) -> dict[str, State]:
    """The same state in pinned memory."""
    return {role: {part: t.cpu().pin_memory() for part, t in parts.items()} for role, parts in state.items()}


def on_device(parts: State, device: torch.device) -> State:
    """Parts of one state as the device can read them."""
    return {part: t.to(device, non_blocking=True) for part, t in parts.items()}


def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Two streams for good: the allocator keeps each stream's memory apart, so new ones every step would each hoard their own."""
    return _pair(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _pair(index: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    return torch.cuda.Stream(index), torch.cuda.Stream(index)


def visiting(states: Sequence[dict[str, State]], device: torch.device) -> Iterator[dict[str, State]]:
    """Device copies of host states, one after the other; what the caller writes into one goes back when it asks for the next.

    The next one travels while the caller works, and the host waits until the one before the last is back: at most three are on
    the device, however far ahead of it the host could run. All are back when the iterator ends; closed before that, as
    after an error, it still waits for those on their way.
    """
    if not states:
        return
    (coming, going), main = _streams(device), torch.cuda.current_stream(device)
    coming.wait_stream(main)

    def fetch(state: dict[str, State]) -> tuple[dict[str, State], torch.cuda.Event]:
        with torch.cuda.stream(coming):
            return {role: on_device(parts, device) for role, parts in state.items()}, coming.record_event()

    ahead, back = fetch(states[0]), []
    try:
        for i, state in enumerate(states):
            here, arrived = ahead
            if i >= 2:
                back[i - 2].synchronize()
            ahead = fetch(states[i + 1]) if i + 1 < len(states) else None
            main.wait_event(arrived)
            yield here
            going.wait_stream(main)
            with torch.cuda.stream(going):
                for role, parts in state.items():
                    for part, host in parts.items():
                        visitor = here[role][part]
                        host.copy_(visitor, non_blocking=True)
                        for stream in (main, going):
                            visitor.record_stream(stream)
                back.append(going.record_event())
    finally:
        going.synchronize()  # a checkpoint may read the host's copies next
