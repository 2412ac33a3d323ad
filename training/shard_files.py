"""The bytes of a checkpoint's tensors on their way between devices and files: many at a time, through small buffers.

The files are torch.distributed.checkpoint's, each tensor as `torch.save` writes it. Its own writer and reader take one tensor
after the other, through a copy of it in pageable memory. Here each thread has a file and two pinned buffers, so host memory
stays at `threads() * 2 * BUFFER` bytes whatever the model's size. Checksums are of what was meant to be written, taken on the
way, so nothing is read back for them.
"""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch._utils import _element_size
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

BUFFER = 1 << 24  # bytes
STREAMED = 1 << 20  # smaller tensors pass through torch.save as they are
FILE_BYTES = 1 << 26  # at least so many a file, so that a small checkpoint is one file


def threads() -> int:
    """This process's share of the cores, 16 at most."""
    return max(1, min(16, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def flat_bytes(t: Tensor) -> Tensor:
    """A contiguous tensor as one row of bytes over the same memory."""
    return t.view(-1).view(torch.uint8)


# ---------------------------------------------------------------- writing


class StreamWriter(dcp.FileSystemWriter):
    """Writes this rank's tensors.

    Attributes:
        checksums: file name -> [length, CRC-32], once written.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=True)
        self.checksums: dict[str, list[int]] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        total = sum(map(_num_bytes, plan.items))
        files: list[list[WriteItem]] = [[] for _ in range(max(1, min(threads(), total // FILE_BYTES)))]
        sizes = [0] * len(files)
        for item in sorted(plan.items, key=_num_bytes, reverse=True):
            emptiest = sizes.index(min(sizes))
            files[emptiest].append(item)
            sizes[emptiest] += _num_bytes(item)

        def write(number: int, items: list[WriteItem]) -> list[WriteResult]:
            name = f"{plan.storage_data.prefix}{number}.distcp"
            with open(Path(self.path) / name, "wb") as file:
                found, out = [], _Output(file)
                for item in items:
                    start = out.position
                    out.save(planner.resolve_data(item).detach())
                    place = _StorageInfo(name, start, out.position - start)
                    found.append(WriteResult(index=item.index, size_in_bytes=place.length, storage_data=place))
                file.flush()
                os.fsync(file.fileno())
            self.checksums[name] = [out.position, out.crc]
            return found

        done: Future[list[WriteResult]] = Future()
        with _no_crc_in_zip(), ThreadPoolExecutor(len(files)) as pool:
            done.set_result([result for part in pool.map(write, count(), files) for result in part])
        return done


def _num_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None, "only tensors are written"
    return item.tensor_data.chunk.sizes.numel() * _element_size(item.tensor_data.properties.dtype)


@contextmanager
def _no_crc_in_zip() -> Iterator[None]:
    """`torch.save` would compute a second checksum, of bytes that it does not have."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class _Output(io.RawIOBase):
    """The stream that `torch.save` writes one tensor after the other to; counts and sums up what passes."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.position, self.crc = file, 0, 0
        self._tensor: Tensor | None = None
        self._buffers: list[Tensor] = []
        self._problem: OSError | None = None

    def save(self, tensor: Tensor) -> None:
        """Appends what `torch.save(tensor)` would write. Raises OSError: a full disk, of which torch says "unexpected pos"."""
        try:
            self._save(tensor)
        except RuntimeError as error:
            raise (self._problem or error) from None

    def _save(self, tensor: Tensor) -> None:
        if tensor.nbytes < STREAMED:
            torch.save(tensor.cpu().clone(memory_format=torch.contiguous_format), self)
            return
        # Memory that is never touched takes the tensor's place; `write` is given its bytes in one piece and takes the real ones.
        self._tensor = tensor.contiguous()
        torch.save(torch.empty(tensor.shape, dtype=tensor.dtype), self)
        assert self._tensor is None, "torch.save did not hand over a tensor's bytes in one piece"

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._tensor is not None and view.nbytes == self._tensor.nbytes:
            tensor, self._tensor = self._tensor, None
            for part in self._parts(flat_bytes(tensor)):
                self._put(part)
        else:
            self._put(view)
        return view.nbytes

    def writable(self) -> bool:
        return True

    def _put(self, part: memoryview) -> None:
        try:
            self.file.write(part)
        except OSError as error:
            self._problem = error
            raise
        self.crc = zlib.crc32(part, self.crc)
        self.position += part.nbytes

    def _parts(self, source: Tensor) -> Iterator[memoryview]:
        """A tensor's bytes on the host, part by part; the next part travels while the caller works on one."""
        if not source.is_cuda:
            yield from (memoryview(part.numpy()) for part in source.split(BUFFER))
            return
        self._buffers = self._buffers or pinned_pair()
        side, parts = side_stream(source.device), source.split(BUFFER)
        arrived: list[torch.cuda.Event] = []
        for i in range(len(parts) + 1):
            if i < len(parts):
                with torch.cuda.stream(side):
                    self._buffers[i % 2][: len(parts[i])].copy_(parts[i], non_blocking=True)
                    arrived.append(side.record_event())
            if i > 0:
                arrived[i - 1].synchronize()
                yield memoryview(self._buffers[(i - 1) % 2][: len(parts[i - 1])].numpy())


def pinned_pair() -> list[Tensor]:
    return [torch.empty(BUFFER, dtype=torch.uint8, pin_memory=True) for _ in range(2)]


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of this thread's own, behind all that was asked of the device so far."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.default_stream(device))
    return side


# ---------------------------------------------------------------- reading


def read_items(folder: Path, plan: LoadPlan, planner: LoadPlanner, places: dict[Any, _StorageInfo]) -> None:
    """Fills the tensors that `planner` has for the items of `plan`.

    Raises: whatever damaged bytes make `torch.load` raise; OSError.
    """

    def read(item: ReadItem) -> None:
        place = places[item.storage_index]
        with FilePart(folder / place.relative_path, place.offset, place.length) as part:
            _read_into(planner.resolve_tensor(item).detach(), part, item)

    with ThreadPoolExecutor(threads()) as pool:
        list(pool.map(read, sorted(plan.items, key=lambda item: -places[item.storage_index].length)))


class FilePart(io.RawIOBase):
    """A part of a file as a file of its own: one saved tensor, which `torch.load` reads without a copy of the part in memory."""

    def __init__(self, path: Path, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._position = open(path, "rb", buffering=0), offset, length, 0  # noqa: SIM115

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")[: max(self._length - self._position, 0)]
        size = os.preadv(self._file.fileno(), [view], self._offset + self._position) if view else 0
        self._position += size
        return size

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(start + offset, 0)
        return self._position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()


def _read_into(target: Tensor, part: FilePart, item: ReadItem) -> None:
    """target = the box of a saved tensor that `item` names; without the rest where the box is one run of bytes."""
    saved = _box(torch.load(part, map_location="meta", weights_only=True), item)  # shape and strides, no bytes
    if target.shape != saved.shape:
        raise ValueError(f"{item.storage_index.fqn}: {tuple(saved.shape)} in the file, {tuple(target.shape)} wanted")
    part.seek(0)
    if saved.nbytes < STREAMED or not saved.is_contiguous():
        target.copy_(_box(torch.load(part, map_location="cpu", weights_only=True), item))
        return
    direct = target.is_contiguous() and target.dtype == saved.dtype
    got = target if direct else torch.empty(saved.shape, dtype=saved.dtype, device=target.device)
    part.seek(_bytes_at(part, saved))
    _fill(flat_bytes(got), part)
    if not direct:
        target.copy_(got)


def _box(saved: Tensor, item: ReadItem) -> Tensor:
    for dim, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        saved = saved.narrow(dim, start, size)
    return saved


def _bytes_at(part: FilePart, saved: Tensor) -> int:
    """Where the bytes of `saved`, a view of the only tensor in the zip file `part`, begin."""
    with zipfile.ZipFile(part) as archive:
        (record,) = (info for info in archive.infolist() if info.filename.endswith("/data/0"))
        start = saved.storage_offset() * saved.element_size()
        if record.compress_type != zipfile.ZIP_STORED or start + saved.nbytes > record.file_size:
            raise ValueError(f"{record.filename} does not hold the tensor that its header describes")
    part.seek(record.header_offset)
    header = part.read(30)  # fixed part; its last two fields are the lengths of name and padding that follow
    return record.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little") + start


def _fill(target: Tensor, part: FilePart) -> None:
    """Reads a row of bytes; what is read goes to the device while the next is read."""
    if not target.is_cuda:
        _read_exactly(part, target)
        return
    buffers, side = pinned_pair(), side_stream(target.device)
    left: list[torch.cuda.Event] = []
    for i, piece in enumerate(target.split(BUFFER)):
        if i > 1:
            left[i - 2].synchronize()
        buffer = buffers[i % 2][: len(piece)]
        _read_exactly(part, buffer)
        with torch.cuda.stream(side):
            piece.copy_(buffer, non_blocking=True)
            left.append(side.record_event())
    side.synchronize()


def _read_exactly(part: FilePart, target: Tensor) -> None:
    view = memoryview(target.numpy())
    while view:
        size = part.readinto(view)
        if not size:
            raise OSError("a tensor's file ends too early")
        view = view[size:]
