"""A copy of all tensors of a checkpoint in host memory, so that training goes on while it is written."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from training.shards import Shard


class HostCopy:
    """Buffers that are allocated once (pinned where tensors live on a GPU) and filled by each `take`.

    Pinning is slow (3.7 s at the first save of 83M parameters on an H200's host, 12 ms at later ones): `prepare` does it beside
    the first steps.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._preparing: threading.Thread | None = None
        self._closed = False

    def prepare(self, shards: Mapping[str, Shard]) -> None:
        """Allocates the buffers of these shards in a thread of its own; the next `take` waits for it."""
        like = {name: shard.tensor for name, shard in shards.items()}
        self._preparing = threading.Thread(target=self._allocate, args=(like,), daemon=True, name="pinning")
        self._preparing.start()

    def _allocate(self, like: dict[str, Tensor]) -> None:
        try:
            for name, tensor in like.items():
                if self._closed:
                    return
                self._buffer(name, tensor)
        except RuntimeError:
            pass  # no host memory: `take` meets it again, where a save can fail with a message

    def take(self, shards: Mapping[str, Shard]) -> dict[str, Shard]:
        """The same shards over copies; valid until the next `take`. Waits for the copies, not for anything else."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        copies, on_device = {}, False
        for name, shard in shards.items():
            copy = self._buffer(name, shard.tensor)
            copy.copy_(shard.tensor.detach(), non_blocking=True)
            copies[name], on_device = replace(shard, tensor=copy), on_device or shard.tensor.is_cuda
        if on_device:
            torch.cuda.current_stream().synchronize()
        return copies

    def close(self) -> None:
        """Ends the thread, after the buffer that it is at: inside torch when the interpreter ends, it would abort the process."""
        self._closed = True
        if self._preparing is not None:
            self._preparing.join()

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        held = self._buffers.get(name)
        if held is None or held.shape != like.shape or held.dtype != like.dtype:
            held = self._buffers[name] = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
        return held
