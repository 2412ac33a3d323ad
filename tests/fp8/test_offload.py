"""Streams of states that visit; without a GPU, so what is asked of streams is recorded. Bits: test_offload_gpu.py."""

from __future__ import annotations

from contextlib import closing, nullcontext
from types import SimpleNamespace

import pytest
import torch

from fp8 import offload


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []

    def stream(index: int) -> SimpleNamespace:
        event = SimpleNamespace(synchronize=lambda: None)
        notes = {name: (lambda *_, name=name: seen.append(name)) for name in ("wait_stream", "wait_event", "synchronize")}
        return SimpleNamespace(index=index, record_event=lambda: event, **notes)

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream(0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    offload._pair.cache_clear()
    yield seen
    offload._pair.cache_clear()


def states(count: int) -> list[dict]:
    return [{"m": {"data": torch.full((4,), float(i))}} for i in range(count)]


def test_a_device_has_one_pair_of_streams_by_whatever_name(asked: list[str]) -> None:
    assert offload._streams(torch.device("cuda")) is offload._streams(torch.device("cuda:3"))
    assert offload._streams(torch.device("cuda:1")) is not offload._streams(torch.device("cuda:3"))


def test_the_host_waits_for_the_last_one(asked: list[str]) -> None:
    assert len(list(offload.visiting(states(4), torch.device("cpu")))) == 4
    assert asked[-1] == "synchronize" and asked.count("synchronize") == 1
    assert list(offload.visiting([], torch.device("cpu"))) == [] and asked.count("synchronize") == 1


def test_the_host_waits_after_an_error_too(asked: list[str]) -> None:
    """Otherwise a checkpoint of what is left could read a state that is still on its way."""
    with pytest.raises(ZeroDivisionError), closing(offload.visiting(states(4), torch.device("cpu"))) as visitors:
        for place, _ in enumerate(visitors):
            1 // (1 - place)
    assert asked[-1] == "synchronize" and asked.count("synchronize") == 1
