"""Sharded safetensors, read and written a tensor (or a slab of rows) at a time. No model knowledge here.

Format: 8 bytes little-endian length of the header, a JSON header {name: {dtype, shape, data_offsets}}, the bytes.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from training.errors import UserError
from training.streaming import close_synced

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
}
MAX_HEADER = 100 << 20  # what the safetensors library accepts


@dataclass(frozen=True)
class Entry:
    """One tensor of a file. `dtype` is safetensors' name of it; `start` the absolute offset of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int

    @property
    def row_bytes(self) -> int:
        size = DTYPES[self.dtype].itemsize
        for n in self.shape[1:]:
            size *= n
        return size


def read_json(path: Path) -> dict:
    """A JSON object. Raises UserError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} does not hold a JSON object")
    return value


def read_header(path: Path) -> dict[str, Entry]:
    """Entries of one file, checked against its length. Raises UserError: missing, truncated or damaged."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= MAX_HEADER or 8 + length > size:
                raise UserError(f"{path} is truncated or not a safetensors file ({size} bytes)")
            header = json.loads(file.read(length))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{path}: damaged header ({error})") from error
    entries, end, places = {}, 0, []
    try:
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                entries[name] = Entry(entry["dtype"], tuple(entry["shape"]), path, 8 + length + first)
                places.append((first, last, name))
                if entry["dtype"] in DTYPES and last - first != _nbytes(entries[name]):
                    raise UserError(f"{path}: {name} has {last - first} bytes, its shape wants {_nbytes(entries[name])}")
        for first, last, name in sorted(places):  # one behind the other, as the format asks
            if first != end or last < first:
                raise UserError(f"{path}: damaged header ({name} lies at {first} to {last}, the one before it ends at {end})")
            end = last
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise UserError(f"{path}: damaged header ({error!r})") from error
    if size != 8 + length + end:
        raise UserError(f"{path} is truncated: {size} bytes, its header wants {8 + length + end}")
    return entries


def _nbytes(entry: Entry) -> int:
    return entry.row_bytes * (entry.shape[0] if entry.shape else 1)


class TensorFiles:
    """All tensors of a folder of safetensors files, found through the index where there is one.

    Raises UserError: no such files, a missing or truncated shard, an index that does not match its shards.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.entries = folder, {}
        index = folder / INDEX
        if index.is_file():
            placed = read_json(index).get("weight_map")
            if not isinstance(placed, dict) or not placed:
                raise UserError(f"{index} has no weight_map")
            if strange := [s for s in placed.values() if not isinstance(s, str) or Path(s).name != s]:
                raise UserError(f"{index} places tensors in {strange[0]!r}, which is not the name of a file of {folder}")
            shards = sorted(set(placed.values()))
            missing = [name for name in shards if not (folder / name).is_file()]
            if missing:
                raise UserError(f"{folder} lacks {len(missing)} of the {len(shards)} shards of its index: {missing[0]}")
        elif (folder / SINGLE).is_file():
            placed, shards = None, [SINGLE]
        else:
            raise UserError(f"{folder} holds neither {INDEX} nor {SINGLE}")
        for shard in shards:
            found = read_header(folder / shard)
            for name in found:
                if placed is not None and placed.get(name) != shard:
                    raise UserError(f"{folder / shard} holds {name!r}, which {INDEX} does not place there")
            self.entries |= found
        lost = [name for name in placed or () if name not in self.entries]
        if lost:
            raise UserError(f"{folder / placed[lost[0]]} lacks {lost[0]!r}, which {INDEX} places there")

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """A tensor, or `rows` (start and stop) of it. Raises UserError."""
        entry = self.entries[name]
        shape, start = entry.shape, entry.start
        if rows is not None:
            shape, start = (rows.stop - rows.start, *shape[1:]), start + rows.start * entry.row_bytes
        out = torch.empty(shape, dtype=DTYPES[entry.dtype])
        view = memoryview(out.view(torch.uint8).reshape(-1).numpy()) if out.dim() else None
        try:
            with open(entry.path, "rb") as file:
                file.seek(start)
                if view is not None and file.readinto(view) != view.nbytes:
                    raise UserError(f"{entry.path} ends within {name!r}")
        except OSError as error:
            raise UserError(f"cannot read {name!r} from {entry.path}: {error.strerror or error}") from error
        return out


@dataclass(frozen=True)
class Planned:
    """A tensor to be written. `dtype` is safetensors' name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return _nbytes(Entry(self.dtype, self.shape, Path(), 0))


def plan_shards(tensors: Iterable[Planned], shard_bytes: int) -> list[list[Planned]]:
    """The tensors in their order, cut into shards of about `shard_bytes` at most (one tensor at least)."""
    shards: list[list[Planned]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


class TensorWriter:
    """Writes planned tensors in their order, slab by slab; `finish` writes the index, last.

    Raises (every method): OSError, when the disk is full, say.
    """

    def __init__(self, folder: Path, tensors: Sequence[Planned], shard_bytes: int) -> None:
        self.folder = folder
        self._shards = plan_shards(tensors, shard_bytes)
        self._order = [(i, t) for i, shard in enumerate(self._shards) for t in shard]
        self._next, self._left, self._file = 0, 0, None
        self._shard = -1

    def _name(self, shard: int) -> str:
        return f"model-{shard + 1:05d}-of-{len(self._shards):05d}.safetensors"

    def write(self, name: str, value: Tensor) -> None:
        """The next rows of tensor `name`; tensors come in the planned order."""
        shard, tensor = self._order[self._next]
        assert tensor.name == name, f"{name} instead of {tensor.name}"
        assert DTYPES[tensor.dtype] == value.dtype, f"{name}: {value.dtype} instead of {tensor.dtype}"
        if shard != self._shard:
            self._open(shard)
        if self._left == 0:
            self._left = tensor.nbytes
        assert value.nbytes <= self._left, f"{name} is longer than planned"
        self._file.write(memoryview(value.contiguous().view(torch.uint8).reshape(-1).numpy()))
        self._left -= value.nbytes
        if self._left == 0:
            self._next += 1

    def _open(self, shard: int) -> None:
        close_synced(self._file)
        header, end = {"__metadata__": {"format": "pt"}}, 0
        for tensor in self._shards[shard]:
            offsets = [end, end + tensor.nbytes]
            header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
            end = offsets[1]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the bytes of the tensors start aligned
        self._file, self._shard = open(self.folder / self._name(shard), "wb"), shard
        self._file.write(struct.pack("<Q", len(text)) + text)

    def finish(self) -> None:
        assert self._next == len(self._order), f"{len(self._order) - self._next} tensors were not written"
        close_synced(self._file)
        placed = {tensor.name: self._name(shard) for shard, tensor in self._order}
        total = sum(tensor.nbytes for _, tensor in self._order)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
        with open(self.folder / INDEX, "w", encoding="utf-8") as file:
            json.dump(index, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
