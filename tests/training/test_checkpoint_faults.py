"""Checkpoints under faults: corrupt bytes, states that are not finite, saves in the background, files that lead elsewhere."""

from __future__ import annotations

import json
import math
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from fp8.weight import weights
from parallel.mesh import Mesh, build_mesh
from tests.helpers import run_ranks
from tests.training.toy import Toy, config_in, empty, filled, mismatches, quiet
from training.checkpoint import Checkpointer
from training.checkpoint_files import corruption, rotate, seal_alone, verify
from training.config import CheckpointConfig, Config, RunConfig
from training.errors import UserError
from training.run_state import locate, newest_whole, whole_checkpoints
from training.shards import damage, read_metadata
from training.start import set_starting_values


def saver_in(folder: Path, model: Toy | None = None, **checkpoint: Any) -> Checkpointer:
    model = model or Toy()
    config = Config(run=RunConfig(dir=str(folder)), checkpoint=CheckpointConfig(**checkpoint))
    return Checkpointer(config, model, filled(model), Mesh.solo(), "tok", "data")


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json", "checksums.json"])
def test_a_flipped_bit_is_named_and_the_one_before_is_used(tmp_path: Path, name: str) -> None:
    saver = saver_in(tmp_path, keep=5)
    saver.save(1, 1, None)
    flip(saver.save(2, 2, None) / name, 300)
    warnings: list[str] = []
    model = Toy()
    other = saver_in(tmp_path, model)
    other.optimizer = empty(model)
    state = other.restore(warnings.append)
    assert state.step == 1 and mismatches(model, other.optimizer) == []
    assert any("step_00000002" in w and (name in w or "metadata" in w) for w in warnings), warnings


def test_a_checkpoint_that_nothing_can_be_compared_with_is_loaded_with_a_warning(tmp_path: Path) -> None:
    path = saver_in(tmp_path).save(1, 1, None)
    for sealed in (True, False):
        if not sealed:
            (path / "checksums.json").unlink()
        resumed, named = [], []
        assert saver_in(tmp_path).restore(resumed.append).step == 1
        assert locate(str(path), named.append, corruption) == path
        said = f"checkpoint {path} has no checksums.json: its files are read without being verified"
        assert (said in resumed) == (not sealed) and named == [said] * (not sealed)


def _verify_on_rank(rank: int, size: int, folder: str) -> tuple[int, list[str]]:
    model, warnings = Toy(rank, size), []
    mesh = build_mesh(tp=size, ep=size)
    saver = Checkpointer(config_in(Path(folder)), model, filled(model), mesh, "tok", "data")
    for step in (1, 2):
        path = saver.save(step, step, None)
    if rank == 0:
        flip(path / "__1_0.distcp", 500)
    torch.distributed.barrier()
    return saver.restore(warnings.append).step, warnings


def test_ranks_verify_together_and_agree(tmp_path: Path) -> None:
    first, second = run_ranks(2, _verify_on_rank, str(tmp_path))
    assert first[0] == second[0] == 1
    assert "__1_0.distcp is corrupt" in first[1][0] and len(second[1]) == 1, "only rank 0 looks for a checkpoint"


def test_nothing_is_loaded_when_the_only_checkpoint_is_corrupt(tmp_path: Path) -> None:
    path = saver_in(tmp_path).save(1, 1, None)
    flip(path / "__0_0.distcp", 1000)
    assert verify(path) == ["__0_0.distcp is corrupt (its checksum is another)"]
    with pytest.raises(UserError, match="no checkpoint of .* can be read"):
        saver_in(tmp_path).restore(quiet)


def test_keep_every_keeps_milestones_for_ever(tmp_path: Path) -> None:
    saver = saver_in(tmp_path, keep=1, keep_every=4)
    for step in range(1, 11):
        saver.save(step, step, None)
    assert [p.name for p in whole_checkpoints(tmp_path)] == ["step_00000004", "step_00000008", "step_00000010"]
    rotate(whole_checkpoints(tmp_path)[0], keep=1, keep_every=0)
    assert [p.name for p in whole_checkpoints(tmp_path)] == ["step_00000004", "step_00000010"]


def test_a_state_that_is_not_finite_neither_is_saved_nor_rotates_a_good_one_out(tmp_path: Path) -> None:
    saver = saver_in(tmp_path, keep=1)
    saver.save(1, 1, None)
    saver.optimizer.state()["experts"]["master"][2, 1, 3] = math.inf
    with pytest.raises(UserError, match="step 2 not saved: master.experts on rank 0 is not finite"):
        saver.save(2, 2, None)
    assert [p.name for p in whole_checkpoints(tmp_path)] == ["step_00000001"]
    warnings: list[str] = []
    saver.try_save(2, 2, None, must=False, warn=warnings.append)
    assert "not finite" in warnings[0]


# ---------------------------------------------------------------- in the background


def test_a_background_save_holds_the_moment_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, original = threading.Event(), Checkpointer._write
    monkeypatch.setattr(Checkpointer, "_write", lambda self, *args: [gate.wait(10), original(self, *args)])
    saver = saver_in(tmp_path)
    saver.save(1, 1, None, wait=False)
    assert whole_checkpoints(tmp_path) == [], "not written yet"
    for name, _ in weights(saver.model):
        for tensor in saver.optimizer.state()[name].values():
            tensor.zero_()  # training goes on
    gate.set()
    saver.wait()
    assert saver.last == 1 and saver.seconds > 0
    model = Toy()
    other = saver_in(tmp_path, model)
    other.optimizer = empty(model)
    other.restore(quiet)
    assert mismatches(model, other.optimizer) == []


def test_background_copies_reuse_their_memory(tmp_path: Path) -> None:
    saver = saver_in(tmp_path)
    saver.save(1, 1, None, wait=False)
    saver.wait()
    before = {name: t.data_ptr() for name, t in saver._copy._buffers.items()}
    saver.save(2, 2, None, wait=False)
    saver.wait()
    assert {name: t.data_ptr() for name, t in saver._copy._buffers.items()} == before


def test_memory_for_copies_is_made_beside_the_first_steps(tmp_path: Path) -> None:
    saver = saver_in(tmp_path)
    saver.prepare()
    saver._copy._preparing.join()
    before = {name: t.data_ptr() for name, t in saver._copy._buffers.items()}
    saver.save(1, 1, None, wait=False)
    saver.wait()
    assert len(before) > 5 and {name: t.data_ptr() for name, t in saver._copy._buffers.items()} == before


def test_a_background_failure_is_reported_by_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = saver_in(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("training.shards.dcp.save", full)
        saver.save(1, 1, None, wait=False)
        saver.close()
    warnings: list[str] = []
    saver.try_save(2, 2, None, must=True, warn=warnings.append)
    assert "step 1 not saved, No space left on device" in warnings[0]
    assert [p.name for p in whole_checkpoints(tmp_path)] == ["step_00000002"]


def _background_on_rank(rank: int, size: int, folder: str) -> list[str]:
    """Saves in the background while the default group is busy with other collectives."""
    model = Toy(rank, size)
    mesh = build_mesh(tp=size, ep=size)
    saver = Checkpointer(config_in(Path(folder)), model, filled(model), mesh, "tok", "data")
    for step in range(1, 4):
        saver.save(step, step, None, wait=False)
        for _ in range(50):
            torch.distributed.all_reduce(torch.ones(1000), group=mesh.world.group)
    saver.wait()
    other = Toy(rank, size)
    reader = Checkpointer(config_in(Path(folder)), other, empty(other), mesh, "tok", "data")
    assert reader.restore(quiet).step == 3
    return mismatches(other, reader.optimizer)


def test_background_saves_do_not_mix_with_other_collectives(tmp_path: Path) -> None:
    assert run_ranks(2, _background_on_rank, str(tmp_path)) == [[], []]


# ---------------------------------------------------------------- files that lead elsewhere


def test_paths_in_metadata_cannot_leave_the_checkpoint(tmp_path: Path) -> None:
    path = saver_in(tmp_path).save(1, 1, None)
    clean = read_metadata(path)
    (tmp_path / "secret.distcp").write_bytes((path / "__0_0.distcp").read_bytes())
    for bad in ("../../secret.distcp", str(tmp_path / "secret.distcp"), "sub/__0_0.distcp", "__0_0.distcp\0", ""):
        for info in clean.storage_data.values():
            info.relative_path = bad
        (path / ".metadata").write_bytes(pickle.dumps(clean))
        (path / "checksums.json").unlink(missing_ok=True)
        assert "names the file" in damage(path), bad
    assert newest_whole(tmp_path, quiet) is None


def test_names_in_checksums_cannot_leave_the_checkpoint(tmp_path: Path) -> None:
    path = saver_in(tmp_path).save(1, 1, None)
    (path / "checksums.json").write_text(json.dumps({"../../outside": [4, 5]}))
    (tmp_path / "outside").write_text("text")
    assert "No such file" in verify(path)[0], "looked for inside of the checkpoint only"


@pytest.mark.parametrize("number", ["1e999", "NaN", "-Infinity", '"many"', "null"])
def test_numbers_that_are_none_are_named(tmp_path: Path, number: str) -> None:
    """JSON as Python reads it knows infinity, which is no integer."""
    path = saver_in(tmp_path).save(1, 1, None)
    (path / "checksums.json").write_text(f'{{".metadata": [{number}, 5]}}')
    assert "checksums.json cannot be read" in verify(path)[0]


class _Evil:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.target),)


def test_a_malicious_pickle_anywhere_does_not_run(tmp_path: Path) -> None:
    """As the metadata itself, inside an honest Metadata, and as JSON."""
    target = tmp_path / "ran"
    path = saver_in(tmp_path).save(1, 1, None)
    honest = read_metadata(path)
    for payload in (_Evil(target), Metadata({"x": _Evil(target)}, storage_data=honest.storage_data)):
        (path / ".metadata").write_bytes(pickle.dumps(payload))
        assert "mkdir, which no checkpoint needs" in damage(path)
    (path / ".metadata").write_bytes(pickle.dumps(honest))
    for name in ("state.json", "checksums.json"):
        (path / name).write_bytes(pickle.dumps(_Evil(target)))
        with pytest.raises(UserError):
            saver_in(tmp_path).restore(quiet)
    assert not target.exists()


def test_starting_values_are_verified_too(tmp_path: Path) -> None:
    """What tools.merge and tools.convert_hf write is sealed as well; `checkpoint.init_from` reads nothing that is damaged."""
    path = saver_in(tmp_path / "a").save(1, 1, None)
    (path / "checksums.json").unlink()
    seal_alone(path)
    assert verify(path) == []
    flip(path / "__0_0.distcp", 700)
    config = Config(run=RunConfig(dir=str(tmp_path / "b")), checkpoint=CheckpointConfig(init_from=str(path)))
    model = Toy()
    with pytest.raises(UserError, match="is not whole: __0_0.distcp is corrupt"):
        set_starting_values(config, model, filled(model), Mesh.solo(), "tok", "data", quiet)
