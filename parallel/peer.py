"""Copies between the two GPUs of an axis on one host by their copy engines: GEMMs that run beside keep every multiprocessor.

torch's symmetric memory maps a buffer of each rank into the other's address space. A copy on a stream of its own:

    barrier    the other has read what lay in its buffer
    copy       into it
    barrier    both have written

Barriers are kernels of one small block that wait for each other. A buffer serves one kind of rows, so what `start` gives is valid
until the next `start` of that kind: whoever waits copies it out or sums it at once. NVLink multicast is not used.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class _Copying:
    """Work whose `wait` makes the current stream wait. Holds what is being read, and its memory should nobody wait."""

    def __init__(self, source: Tensor, stream: torch.cuda.Stream) -> None:
        self._source, self._stream = source, stream
        if not torch.cuda.is_current_stream_capturing():  # memory noted in a capture serves nobody else until that ends
            source.record_stream(stream)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)


@dataclass(eq=False)
class _Buffer:
    memory: Tensor
    handle: Any
    channel: int


class Peer:
    """What this rank shares with the other one. Every method is called by both, in the same order."""

    def __init__(self, group: Any, rank: int, device: torch.device) -> None:
        self._group, self._rank, self._device = group, rank, device
        self._stream = torch.cuda.Stream(device)
        self._buffers: dict[tuple[object, ...], _Buffer] = {}
        self._outgrown: list[_Buffer] = []  # CUDA graphs may still use them

    def _buffer(self, key: tuple[object, ...], nbytes: int) -> _Buffer:
        found = self._buffers.get(key)
        if found is None or found.memory.numel() < nbytes:
            if torch.cuda.is_current_stream_capturing():
                held = 0 if found is None else found.memory.numel()
                raise RuntimeError(f"peer copies {key}: {nbytes} bytes in a CUDA graph, {held} in the calls before its capture")
            os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
            from torch.distributed import _symmetric_memory as symmetric

            memory = symmetric.empty(nbytes, dtype=torch.uint8, device=self._device)
            handle = symmetric.rendezvous(memory, self._group.group_name)
            if found is not None:
                self._outgrown.append(found)
            channel = len(self._buffers) if found is None else found.channel
            self._buffers[key] = found = _Buffer(memory, handle, channel)
        return found

    def start(self, x: Tensor, kind: str, gather: bool) -> tuple[Tensor, _Copying]:
        """(the other's x, or with `gather` both in rank order; what to wait for before it is read).

        The tensor is this rank's buffer of `kind`, shape and dtype, and the next `start` of those overwrites it: kernels that read
        it must be queued on the current stream by then, and nothing may keep it or a view of it.

        Raises:
            RuntimeError: the buffer would have to be made, or to grow, while a CUDA graph is captured.
        """
        source, parts = x.contiguous(), 1 + gather
        flat = source.view(-1).view(torch.uint8)
        nbytes, main = flat.numel(), torch.cuda.current_stream()
        buffer = self._buffer((kind, gather, x.shape[1:], x.dtype), parts * nbytes)
        start = self._rank * nbytes * gather
        if gather:
            buffer.memory[start : start + nbytes].copy_(flat)
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            buffer.handle.barrier(channel=buffer.channel)
            buffer.handle.get_buffer(1 - self._rank, (nbytes,), torch.uint8, start).copy_(flat)
            buffer.handle.barrier(channel=buffer.channel)
        shape = (parts * x.shape[0], *x.shape[1:])
        return buffer.memory[: parts * nbytes].view(x.dtype).view(shape), _Copying(source, self._stream)
