"""What parallel/peer.py asks of streams and of symmetric memory, in order; both are recorded here instead of being there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric

from parallel.collectives import start_all_gather, start_swap
from parallel.mesh import Axis
from parallel.peer import Peer

CPU = torch.device("cpu")


class Fake:
    """Streams by name, and memory whose other side is a tensor here. `seen`: what was queued, behind its stream."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.at, self.capturing = "main", False
        self.theirs: dict[int, torch.Tensor] = {}  # the other rank's buffers, by place of their making
        self.held: list[tuple[torch.Tensor, str]] = []

    def stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, wait_stream=lambda other: self.seen.append((name, "waits for", other.name)))

    @contextmanager
    def on(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.at = self.at, stream.name
        yield
        self.at = before

    def empty(self, nbytes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=dtype, device=device)

    def rendezvous(self, memory: torch.Tensor, group: str) -> SimpleNamespace:
        number = len(self.theirs)
        self.theirs[number] = torch.zeros_like(memory)
        self.seen.append((self.at, "rendezvous", number, memory.numel(), group))

        def get_buffer(rank: int, sizes: tuple[int], dtype: torch.dtype, start: int) -> torch.Tensor:
            self.seen.append((self.at, "writes", number, rank, start, *sizes))
            return self.theirs[number][start : start + sizes[0]].view(dtype)

        return SimpleNamespace(get_buffer=get_buffer, barrier=lambda channel: self.seen.append((self.at, "barrier", channel)))

    def taken(self) -> list[tuple[Any, ...]]:
        found, self.seen = self.seen, []
        return found


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.stream("copies"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: made.stream("main"))
    monkeypatch.setattr(torch.cuda, "stream", made.on)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: made.held.append((self, stream.name)))
    monkeypatch.setattr(symmetric, "empty", made.empty)
    monkeypatch.setattr(symmetric, "rendezvous", made.rendezvous)
    return made


def peer_of(rank: int) -> Peer:
    return Peer(SimpleNamespace(group_name="pair"), rank, CPU)


def copying(number: int, channel: int, rank: int, start: int, nbytes: int) -> list[tuple[Any, ...]]:
    """What one `start` queues, in order."""
    return [
        ("copies", "waits for", "main"),
        ("copies", "barrier", channel),
        ("copies", "writes", number, 1 - rank, start, nbytes),
        ("copies", "barrier", channel),
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_gathered_rows_stand_in_rank_order(fake: Fake, rank: int) -> None:
    peer, x = peer_of(rank), torch.randn(3, 4)
    out, work = peer.start(x, "dispatch", gather=True)
    assert fake.taken() == [("main", "rendezvous", 0, 96, "pair"), *copying(0, 0, rank, 48 * rank, 48)]
    assert out.shape == (6, 4) and torch.equal(out[3 * rank : 3 * rank + 3], x)
    assert torch.equal(fake.theirs[0][48 * rank : 48 * rank + 48].view(torch.float32).view(3, 4), x)
    assert fake.theirs[0].count_nonzero() == x.view(torch.uint8).count_nonzero(), "bytes of the other's own part"
    work.wait()
    assert fake.taken() == [("main", "waits for", "copies")]


@pytest.mark.parametrize("rank", [0, 1])
def test_swapped_rows_lie_at_the_start(fake: Fake, rank: int) -> None:
    x = torch.randn(4, 3).t()  # not contiguous
    out, _ = peer_of(rank).start(x, "combine", gather=False)
    assert fake.taken()[1:] == copying(0, 0, rank, 0, 48)
    assert out.shape == x.shape and torch.equal(fake.theirs[0].view(torch.float32).view(3, 4), x)
    source, stream = fake.held[-1]
    assert stream == "copies" and torch.equal(source, x) and source.is_contiguous(), "not the memory that is read"


def test_a_buffer_for_each_kind_shape_and_dtype(fake: Fake) -> None:
    peer, x = peer_of(0), torch.randn(2, 4)
    calls = [(x, "a", True), (x, "b", True), (x, "a", False), (x.bfloat16(), "a", True), (x[:, :2], "a", True)]
    for channel, call in enumerate(calls):
        peer.start(*call)
        assert [e for e in fake.taken() if e[1] == "barrier"] == [("copies", "barrier", channel)] * 2
    places = {peer.start(*call)[0].data_ptr() for call in calls}
    assert len(places) == len(calls) == len(fake.theirs), "made anew, or shared"


def test_more_rows_take_a_larger_buffer_and_fewer_do_not(fake: Fake) -> None:
    peer = peer_of(1)
    first, _ = peer.start(torch.ones(2, 4), "a", gather=True)
    fewer, _ = peer.start(torch.ones(1, 4), "a", gather=True)
    assert fewer.data_ptr() == first.data_ptr() and fewer.shape == (2, 4) and len(fake.theirs) == 1
    fake.taken()
    more, _ = peer.start(torch.ones(5, 4), "a", gather=True)
    assert fake.taken() == [("main", "rendezvous", 1, 160, "pair"), *copying(1, 0, 1, 80, 80)], "the channel stays"
    assert more.data_ptr() != first.data_ptr() and [b.memory.data_ptr() for b in peer._outgrown] == [first.data_ptr()]


def test_a_graph_takes_no_new_buffer(fake: Fake) -> None:
    peer = peer_of(0)
    peer.start(torch.ones(2, 4), "a", gather=True)
    fake.capturing, held = True, len(fake.held)
    peer.start(torch.ones(2, 4), "a", gather=True)
    assert len(fake.held) == held, "its memory would be kept until the capture ends"
    with pytest.raises(RuntimeError, match="96 bytes in a CUDA graph, 64 in the calls before"):
        peer.start(torch.ones(3, 4), "a", gather=True)
    with pytest.raises(RuntimeError, match="in a CUDA graph, 0 in"):
        peer.start(torch.ones(2, 4), "b", gather=True)
    assert len(fake.theirs) == 1


def test_collectives_take_the_peer_and_count_the_same_bytes(fake: Fake) -> None:
    axis, x = Axis(None, 0, 2, peer=peer_of(0)), torch.randn(3, 4)
    gathered, swapped = start_all_gather(x, axis, "dispatch").wait(), start_swap(x, axis, "combine").wait()
    assert torch.equal(gathered[:3], x) and swapped.shape == x.shape
    assert [e[2] for e in fake.taken() if e[:2] == ("main", "waits for")] == ["copies"] * 2
    assert axis.traffic.by_kind() == {"dispatch": x.nbytes, "combine": x.nbytes}
