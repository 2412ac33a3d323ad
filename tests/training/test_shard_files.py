"""Checkpoint bytes: streamed, by threads, in torch's own format."""

import io
import re
import resource
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fp8.weight import Piece
from parallel.mesh import Mesh, build_mesh
from tests.helpers import run_ranks
from training import shard_files
from training.shards import Shard, ShardError, read_shards, write_shards

WORLD = Mesh.solo().world


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every path at a few kilobytes."""
    monkeypatch.setattr(shard_files, "BUFFER", 1000)
    monkeypatch.setattr(shard_files, "STREAMED", 3000)
    monkeypatch.setattr(shard_files, "FILE_BYTES", 20_000)
    monkeypatch.setattr(shard_files, "threads", lambda: 3)


def some() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "half": torch.randn(7, 30, 50).half(),
        "codes": torch.randn(40, 90).to(torch.float8_e4m3fn),
        "bytes": torch.randint(0, 255, (5000,), dtype=torch.uint8),
        "wide": torch.randn(64, 64),
        "small": torch.randn(3),
        "scalar": torch.tensor(3.5),
        "column": torch.randn(60, 60)[:, ::2],  # not contiguous
    }


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def test_what_is_written_is_read_and_the_checksums_are_the_files(tmp_path: Path, small: None) -> None:
    values = some()
    sums = write_shards(tmp_path, {name: Shard.whole(t) for name, t in values.items()}, WORLD)
    assert set(sums) == {p.name for p in tmp_path.glob("*.distcp")} and len(sums) == 2
    for name, (length, crc) in sums.items():
        data = (tmp_path / name).read_bytes()
        assert (len(data), zlib.crc32(data)) == (length, crc)
    back = {name: torch.zeros_like(t) for name, t in values.items()}
    read_shards(tmp_path, {name: Shard.whole(t) for name, t in back.items()}, WORLD)
    assert all(same(back[name], values[name]) for name in values)


def test_torchs_own_reader_and_writer_understand_the_files(tmp_path: Path, small: None) -> None:
    values = some()
    write_shards(tmp_path / "ours", {name: Shard.whole(t) for name, t in values.items()}, WORLD)
    back = {name: torch.zeros_like(t) for name, t in values.items()}
    dcp.load(back, storage_reader=dcp.FileSystemReader(tmp_path / "ours"), no_dist=True)
    assert all(same(back[name], values[name]) for name in values)
    dcp.save(
        {name: t.contiguous() for name, t in values.items()}, storage_writer=dcp.FileSystemWriter(tmp_path / "theirs"), no_dist=True
    )
    again = {name: torch.zeros_like(t) for name, t in values.items()}
    read_shards(tmp_path / "theirs", {name: Shard.whole(t) for name, t in again.items()}, WORLD)
    assert all(same(again[name], values[name]) for name in values)


BOXES = {
    "run": (slice(2, 5), slice(0, 30), slice(0, 50)),
    "rows of all": (slice(0, 7), slice(10, 20), slice(0, 50)),
    "rows of one": (slice(3, 4), slice(5, 30), slice(0, 50)),
    "columns": (slice(0, 7), slice(0, 30), slice(10, 40)),
}


@pytest.mark.parametrize("box", BOXES.values(), ids=BOXES)
def test_a_part_of_a_tensor(tmp_path: Path, small: None, box: tuple[slice, ...]) -> None:
    """One that is one run of bytes in the file, and ones that are not."""
    value = some()["half"]
    write_shards(tmp_path, {"x": Shard.whole(value)}, WORLD)
    local = tuple(slice(0, s.stop - s.start) for s in box)
    part = torch.zeros([s.stop for s in local]).half()
    piece = Piece(tuple(s.start for s in box), local)
    read_shards(tmp_path, {"x": Shard(part, tuple(value.shape), (piece,))}, WORLD)
    assert same(part, value[box])


def test_a_wider_type_is_filled_from_a_narrower_one(tmp_path: Path, small: None) -> None:
    value, wide = torch.randn(64, 64).bfloat16(), torch.zeros(64, 64)
    write_shards(tmp_path, {"x": Shard.whole(value)}, WORLD)
    read_shards(tmp_path, {"x": Shard.whole(wide)}, WORLD)
    assert torch.equal(wide, value.float())


def test_a_file_that_ends_early_or_lies_about_its_size_is_refused(tmp_path: Path, small: None) -> None:
    write_shards(tmp_path, {"x": Shard.whole(torch.randn(64, 64))}, WORLD)
    (file,) = tmp_path.glob("*.distcp")
    whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole.replace(b"data/0", b"data/1"), b"\0" * len(whole)):
        file.write_bytes(damaged)
        with pytest.raises(ShardError):
            read_shards(tmp_path, {"x": Shard.whole(torch.zeros(64, 64))}, WORLD)


def test_no_copy_of_a_tensor_is_made_on_the_host(tmp_path: Path) -> None:
    """Saving adds less than a tenth of the tensor's size to what the process holds."""
    tensor = torch.ones(1 << 27, dtype=torch.uint8)
    out = shard_files._Output(io.FileIO(tmp_path / "f", "wb"))
    before = _resident()
    with shard_files._no_crc_in_zip():
        peak = _peak_while(lambda: out.save(tensor))
    assert peak - before < tensor.nbytes / 10
    assert torch.equal(torch.load(tmp_path / "f", weights_only=True), tensor)


def _resident() -> int:
    from training.resources import resident_bytes

    return resident_bytes()


def _peak_while(action) -> int:  # noqa: ANN001
    """Largest resident size seen when a part is written."""
    seen, put = [], shard_files._Output._put

    def spy(own: shard_files._Output, part: memoryview) -> None:
        put(own, part)
        seen.append(_resident())

    shard_files._Output._put = spy
    try:
        action()
    finally:
        shard_files._Output._put = put
    return max(seen)


def _on_a_full_disk(rank: int, size: int, folder: str) -> str:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limit[1]))  # writing on is an OSError
    shards = {name: Shard.whole(torch.zeros(elements)) for name, elements in (("small", 100), ("large", 3000))}
    try:
        write_shards(Path(folder), shards, build_mesh(1, 1, torch.device("cpu")).world)
    except ShardError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    return "saved"


def test_an_error_of_the_disk_is_named_though_torch_save_hides_it(tmp_path: Path) -> None:
    """On the way to another rank an exception also loses what it was raised from."""
    messages = run_ranks(2, _on_a_full_disk, str(tmp_path))
    assert messages[0] == messages[1] and re.fullmatch("rank [01]: File too large", messages[0])
