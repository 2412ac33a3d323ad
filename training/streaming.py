"""Reading and writing checkpoints a piece at a time, for tools that handle models larger than their memory.

The files are those of `training/shards.py`. Its own writer is not used here because torch's keeps the last piece of each
tensor until a file is closed: gigabytes, for a model of thousands of experts.
"""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fp8.recipe import BLOCK
from training.errors import UserError
from training.shard_files import FilePart
from training.shards import damage, read_metadata

Box = tuple[slice, ...]  # one slice with start and stop for each dimension


def whole_box(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor."""
    return tuple(slice(0, n) for n in shape)


def row_boxes(box: Box, max_elements: int) -> list[Box]:
    """`box` cut along its largest dimension among the leading ones into boxes of about `max_elements` at most."""
    sizes = [s.stop - s.start for s in box]
    numel = 1
    for n in sizes:
        numel *= n
    if numel <= max_elements or len(box) < 2:
        return [box]
    dim = max(range(len(box) - 1), key=lambda d: sizes[d])
    step = max(1, max_elements // (numel // sizes[dim]))
    cuts = range(box[dim].start, box[dim].stop, step)
    return [(*box[:dim], slice(a, min(a + step, box[dim].stop)), *box[dim + 1 :]) for a in cuts]


def close_synced(file: BinaryIO | None) -> None:
    """Closes a file, if there is one, once the disk has its bytes. Raises OSError."""
    if file is not None:
        file.flush()
        os.fsync(file.fileno())
        file.close()


class ShardWriter:
    """Writes a checkpoint's tensor files; `finish` writes the metadata, without which nothing reads them.

    Raises (every method): OSError, when the disk is full, say.
    """

    def __init__(self, folder: Path, max_file_bytes: int = 32 << 30) -> None:
        self.folder, self.max_file_bytes = folder, max_file_bytes
        self._chunks: dict[str, list[ChunkStorageMetadata]] = {}
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self._file: BinaryIO | None = None
        self._num_files = 0

    def add(self, name: str, global_shape: Sequence[int], offset: Sequence[int], value: Tensor) -> None:
        """One piece of the global tensor `name`, which begins at `offset`."""
        if self._file is None or self._file.tell() >= self.max_file_bytes:
            close_synced(self._file)
            self._file = open(self.folder / f"__{self._num_files}_0.distcp", "wb")
            self._num_files += 1
        value = value.detach().cpu().contiguous()
        if value.untyped_storage().nbytes() != value.nbytes:
            value = value.clone()  # torch.save would write the whole storage
        start = self._file.tell()
        torch.save(value, self._file)
        chunk = ChunkStorageMetadata(torch.Size(offset), value.shape)
        properties = TensorProperties.create_from_tensor(value)
        tensor = self._tensors.setdefault(name, TensorStorageMetadata(properties, torch.Size(global_shape), []))
        assert tensor.size == torch.Size(global_shape), f"{name}: {tensor.size} and {tuple(global_shape)}"
        index = MetadataIndex(name, chunk.offsets, len(tensor.chunks))
        tensor.chunks.append(chunk)
        place = os.path.basename(self._file.name)
        self._places[index] = _StorageInfo(place, start, self._file.tell() - start)

    def finish(self) -> None:
        """Makes the checkpoint readable."""
        close_synced(self._file)
        with open(self.folder / ".metadata", "wb") as file:
            pickle.dump(Metadata(dict(self._tensors), storage_data=self._places), file)
            file.flush()
            os.fsync(file.fileno())


class ShardReader:
    """Reads boxes of the global tensors of a checkpoint, holding `cache_bytes` of the pieces read last.

    Raises:
        UserError: the checkpoint is not whole.
    """

    def __init__(self, folder: Path, cache_bytes: int = 4 << 30) -> None:
        reason = damage(folder)
        if reason is not None:
            raise UserError(f"checkpoint {folder} is not whole: {reason}")
        metadata = read_metadata(folder)
        self.folder = folder
        self._tensors = {
            name: entry for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)
        }
        self._places = metadata.storage_data
        self._cache: OrderedDict[MetadataIndex, Tensor] = OrderedDict()
        self._cache_bytes = cache_bytes

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Global shape. Raises UserError when there is no such tensor."""
        if name not in self._tensors:
            raise UserError(f"checkpoint {self.folder} has no tensor {name!r}")
        return tuple(self._tensors[name].size)

    def read(self, name: str, box: Box | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """The part `box` (default: all) of a tensor, as a new tensor.

        Raises:
            UserError: there is no such tensor, or pieces of it are missing or damaged.
        """
        box = whole_box(self.shape(name)) if box is None else box
        out = torch.empty([s.stop - s.start for s in box], dtype=dtype)
        filled = 0
        for i, chunk in enumerate(self._tensors[name].chunks):
            low = [max(s.start, o) for s, o in zip(box, chunk.offsets, strict=True)]
            high = [min(s.stop, o + n) for s, o, n in zip(box, chunk.offsets, chunk.sizes, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            source = self._piece(MetadataIndex(name, chunk.offsets, i))
            into = tuple(slice(a - s.start, b - s.start) for a, b, s in zip(low, high, box, strict=True))
            part = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, chunk.offsets, strict=True))
            out[into] = source[part].to(dtype)
            filled += out[into].numel()
        if filled != out.numel():
            raise UserError(f"checkpoint {self.folder}: {name} has {filled} of {out.numel()} values; pieces are missing")
        return out

    def raw(self, name: str, box: Box | None = None) -> Tensor:
        """`read` in the dtype that is stored."""
        self.shape(name)
        return self.read(name, box, self._tensors[name].properties.dtype)

    def master(self, name: str, box: Box | None = None) -> Tensor:
        """FP32 values of (a part of) the master of weight `name`, decoded where it is stored in FP16. Raises as `read`."""
        value = self.read(f"master.{name}", box)
        scale = f"master.scale.{name}"
        if scale not in self._tensors:
            return value
        box = whole_box(self.shape(f"master.{name}")) if box is None else box
        tiles = (*box[:-2], *(slice(s.start // BLOCK, -(-s.stop // BLOCK)) for s in box[-2:]))
        exponent = self.read(scale, tiles, torch.int32) - 127
        wide = torch.ldexp(torch.ones(exponent.shape), exponent)
        for dim in (-2, -1):
            start = box[dim].start % BLOCK
            wide = wide.repeat_interleave(BLOCK, dim).narrow(dim, start, box[dim].stop - box[dim].start)
        return value * wide

    def _piece(self, index: MetadataIndex) -> Tensor:
        if index in self._cache:
            self._cache.move_to_end(index)
            return self._cache[index]
        place = self._places[index]
        try:
            with FilePart(self.folder / Path(place.relative_path).name, place.offset, place.length) as part:
                value = torch.load(part, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise UserError(f"checkpoint {self.folder}: {index.fqn} cannot be read ({str(error).splitlines()[0]})") from error
        self._cache[index] = value
        while len(self._cache) > 1 and sum(t.nbytes for t in self._cache.values()) > self._cache_bytes:
            self._cache.popitem(last=False)
        return value
