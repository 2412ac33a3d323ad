"""Writing and reading global tensors with torch.distributed.checkpoint, from and into any layout.

Each rank says which parts of which global tensor it holds (`Shard`); the files know only global tensors and offsets, so
what one layout wrote every other can read. Nothing that is read may run code: tensors go through
`torch.load(weights_only=True)`, the metadata through an unpickler that knows only the checkpoint's own classes, and other
values are never stored here.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.futures import Future

from fp8.weight import Piece, Weight
from parallel.mesh import Axis
from training.shard_files import StreamWriter, read_items


@dataclass(frozen=True, eq=False)
class Shard:
    """The parts of one global tensor that a rank holds, by the protocol of torch.distributed._checkpointable.

    Attributes:
        tensor: the local tensor; reading writes into it.
        global_shape: of the whole tensor.
        pieces: which box of the global tensor each part of `tensor` is. Ranks may hold the same box: it is written once.
    """

    tensor: Tensor
    global_shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @staticmethod
    def whole(tensor: Tensor) -> Shard:
        """A tensor that every rank holds in full."""
        everything = Piece((0,) * tensor.dim(), tuple(slice(0, n) for n in tensor.shape))
        return Shard(tensor, tuple(tensor.shape), (everything,))

    @staticmethod
    def like(weight: Weight, tensor: Tensor, tile: tuple[int, int] = (1, 1)) -> Shard:
        """A tensor laid out as `weight` is: its master, a moment; or with one element for each `tile` of it: a scale."""
        edges = ((1,) * len(weight.global_shape) + tile)[-len(weight.global_shape) :]
        shape = tuple(-(-n // edge) for n, edge in zip(weight.global_shape, edges, strict=True))
        pieces = tuple(
            Piece(
                tuple(o // edge for o, edge in zip(p.offset, edges, strict=True)),
                tuple(slice((s.start or 0) // edge, -(-s.stop // edge)) for s, edge in zip(p.local, edges, strict=True)),
                p.replicas,
            )
            for p in weight.pieces
        )
        return Shard(tensor, shape, pieces)

    def size(self) -> torch.Size:
        return torch.Size(self.global_shape)

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(self.tensor), size=self.size()
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(p.offset), self.tensor[p.local].shape) for p in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        matches = [p for p in self.pieces if tuple(p.offset) == tuple(index.offset)]
        assert len(matches) == 1, f"{index.fqn}: {len(matches)} pieces at {tuple(index.offset)}"
        return self.tensor[matches[0].local]


class ShardError(Exception):
    """A checkpoint could not be written or read; the message says why, in one line."""


def write_shards(folder: Path, shards: Mapping[str, Shard], world: Axis) -> dict[str, list[int]]:
    """Writes this rank's shards of all tensors into `folder`; every rank of `world` calls it. Files are synced to disk.

    Returns:
        Name -> [length, CRC-32] of the files that this rank wrote, from the bytes that were meant.

    Raises:
        ShardError: on every rank, when any of them failed.
    """
    writer = StreamWriter(folder)
    _run(dcp.save, shards, world, storage_writer=writer, planner=_SavePlanner())
    return writer.checksums


def read_shards(folder: Path, shards: Mapping[str, Shard], world: Axis) -> None:
    """Fills `shards` in place from `folder`; every rank of `world` calls it.

    Raises:
        ShardError: a tensor is missing, has another global shape or format, or cannot be read.
    """
    try:
        saved = read_metadata(folder).state_dict_metadata
    except (OSError, pickle.UnpicklingError) as error:
        raise ShardError(_reason(error)) from error
    for name, shard in shards.items():
        dtype = getattr(getattr(saved.get(name), "properties", None), "dtype", shard.tensor.dtype)
        widens = (dtype, shard.tensor.dtype) == (torch.bfloat16, torch.float32)  # an imported model's masters
        if dtype != shard.tensor.dtype and not widens:  # copying would convert codes without their scales
            raise ShardError(f"{name} is stored as {dtype}, this run keeps it as {shard.tensor.dtype} (optim.states)")
        size = tuple(getattr(saved.get(name), "size", shard.size()))
        if size != tuple(shard.size()) and name.endswith(".history"):
            steps = f"a history of {size[0]} steps, this run of {shard.size()[0]}"
            raise ShardError(f"{name} is {steps} (fp8.amax_history; or another fp8.recipe, which needs a run of its own)")
    reader = _Reader(folder)
    _run(dcp.load, shards, world, storage_reader=reader, planner=_LoadPlanner())


def _run(call: Any, shards: Mapping[str, Shard], world: Axis, **options: Any) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "torch.distributed is disabled": a single process is fine
            call(dict(shards), process_group=world.group, no_dist=world.size == 1, **options)
    except CheckpointException as error:
        first = next(iter(error.failures.items()))
        raise ShardError(f"rank {first[0]}: {_reason(first[1][0])}") from error
    except Exception as error:  # torch.load of damaged bytes raises nearly anything
        raise ShardError(_reason(error)) from error


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f' ({error.filename})' if error.filename else ''}"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class _SavePlanner(dcp.DefaultSavePlanner):
    """The default planner finds parts only of Tensor subclasses; ours are plain objects."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index).detach()


class _LoadPlanner(dcp.DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        # The default one walks the values and drops those it does not know.
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} holds a pickled object; only tensors are read")


class _Unpickler(pickle.Unpickler):
    """Knows the classes of a checkpoint's metadata and nothing else, so that a foreign file cannot run code."""

    ALLOWED = {
        ("torch.distributed.checkpoint.metadata", name)
        for name in ("Metadata", "MetadataIndex", "ChunkStorageMetadata", "TensorProperties", "TensorStorageMetadata",
                     "BytesStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING")
    } | {
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in self.ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the checkpoint's metadata names {module}.{name}, which no checkpoint needs")


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if kwargs.get("rank") is not None:
            raise FileNotFoundError("per-rank metadata is not used")
        return read_metadata(Path(self.path))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        read_items(Path(self.path), plan, planner, self.storage_data)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def read_metadata(folder: Path) -> Metadata:
    """What the checkpoint in `folder` holds; runs no code from it. Raises OSError or pickle.UnpicklingError."""
    with open(folder / ".metadata", "rb") as file:
        try:
            found = _Unpickler(file).load()
        except pickle.UnpicklingError:
            raise
        except Exception as error:  # a damaged pickle raises nearly anything
            raise pickle.UnpicklingError(_reason(error)) from error
    tensors, places = getattr(found, "state_dict_metadata", None), getattr(found, "storage_data", None)
    if not (isinstance(found, Metadata) and isinstance(tensors, dict) and isinstance(places, dict)):
        raise pickle.UnpicklingError("the checkpoint's metadata is no Metadata")
    for place in places.values():
        if not re.fullmatch(r"__\d+_\d+\.distcp", str(place.relative_path)):  # a path must not lead out of the folder
            raise pickle.UnpicklingError(f"the checkpoint's metadata names the file {place.relative_path!r}")
    return found


def tensor_names(folder: Path) -> set[str]:
    """Names of the tensors in `folder`. Raises as `read_metadata`."""
    return set(read_metadata(folder).state_dict_metadata)


def damage(folder: Path) -> str | None:
    """Why the checkpoint in `folder` is not whole, or None: metadata, and files as long as it says."""
    try:
        sizes: dict[str, int] = {}
        for info in read_metadata(folder).storage_data.values():
            sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), info.offset + info.length)
        for name, size in sizes.items():
            if (folder / Path(name).name).stat().st_size < size:
                return f"{name} is shorter than {size} bytes"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except Exception as error:  # a damaged pickle raises nearly anything
        return f"its metadata cannot be read ({_reason(error)})"
    return None
