"""Tensors on a GPU to files and back, through pinned buffers smaller than they are."""

from pathlib import Path

import pytest
import torch

from fp8.weight import Piece
from parallel.mesh import Mesh
from training import shard_files
from training.shards import Shard, read_shards, write_shards

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
WORLD = Mesh.solo().world


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_files, "BUFFER", 4096)
    monkeypatch.setattr(shard_files, "STREAMED", 3000)
    monkeypatch.setattr(shard_files, "FILE_BYTES", 100_000)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def test_round_trip_right_after_the_kernels_that_wrote_the_tensors(tmp_path: Path) -> None:
    for _ in range(5):
        values = {
            "half": torch.randn(7, 130, 50, device="cuda").half(),
            "codes": torch.randn(400, 90, device="cuda").to(torch.float8_e4m3fn),
            "column": torch.randn(60, 600, device="cuda")[:, ::2],
            "small": torch.randn(3, device="cuda"),
            "host": torch.randn(5000),
        }
        write_shards(tmp_path, {name: Shard.whole(t) for name, t in values.items()}, WORLD)
        back = {name: torch.empty_like(t).fill_(0) for name, t in values.items()}
        read_shards(tmp_path, {name: Shard.whole(t) for name, t in back.items()}, WORLD)
        assert all(same(back[name], values[name]) for name in values)


@pytest.mark.parametrize("box", [(slice(2, 5), slice(0, 130), slice(0, 50)), (slice(0, 7), slice(0, 130), slice(10, 40))])
def test_a_part_and_a_wider_type(tmp_path: Path, box: tuple[slice, ...]) -> None:
    value = torch.randn(7, 130, 50, device="cuda").bfloat16()
    write_shards(tmp_path, {"x": Shard.whole(value)}, WORLD)
    local = tuple(slice(0, s.stop - s.start) for s in box)
    part = torch.zeros([s.stop for s in local], device="cuda")
    read_shards(tmp_path, {"x": Shard(part, tuple(value.shape), (Piece(tuple(s.start for s in box), local),))}, WORLD)
    assert torch.equal(part, value[box].float())
