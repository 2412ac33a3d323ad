"""Checkpoints: whole or not at all, any layout, nothing runs code, clear refusals."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import resource
import shutil
from pathlib import Path

import pytest
import torch

from fp8.recipe import Recipe
from fp8.weight import weights
from parallel.mesh import Mesh, build_mesh
from tests.helpers import run_ranks
from tests.training.toy import Toy, checkpointer, empty, mismatches, quiet, truth
from training.checkpoint import load_masters
from training.config import Config
from training.errors import UserError
from training.run_state import RunState, newest_whole, resume_from, whole_checkpoints
from training.shards import Shard, ShardError, damage, read_shards, write_shards


def test_everything_comes_back_bitwise(tmp_path: Path) -> None:
    torch.manual_seed(5)
    checkpointer(tmp_path).save(3, 12, "wid")
    drawn = torch.rand(4)
    model = Toy()
    other = checkpointer(tmp_path, model=model, optimizer=empty(model))
    versions = {name: weight.version for name, weight in weights(model)}
    state = other.restore(quiet)
    assert (state.step, state.consumed, state.wandb_id, other.optimizer.num_steps) == (3, 12, "wid", 17)
    assert mismatches(model, other.optimizer) == []
    assert [name for name, weight in weights(model) if weight.version == versions[name]] == [], "FP32 weights that were read"
    assert torch.equal(torch.rand(4), drawn), "the random generator goes on where it was"


def test_low_precision_weights_are_derived_from_their_masters(tmp_path: Path) -> None:
    checkpointer(tmp_path).save(1, 1, None)
    model = Toy(recipe=Recipe.bf16())
    other = checkpointer(tmp_path, model=model, optimizer=empty(model))
    other.restore(quiet)
    assert torch.equal(model.qkv.data, truth("qkv", "master").bfloat16())
    assert mismatches(model, other.optimizer) == []
    bare = Toy(recipe=Recipe.bf16())
    load_masters(whole_checkpoints(tmp_path)[-1], bare, Mesh.solo(), group_bytes=100)
    assert all(torch.equal(a.data, b.data) for (_, a), (_, b) in zip(weights(bare), weights(model), strict=True))


def _save_on_rank(rank: int, size: int, folder: str) -> None:
    model = Toy(rank, size)
    checkpointer(Path(folder), model=model, mesh=build_mesh(tp=size, ep=size)).save(1, 4, None)


def _load_on_rank(rank: int, size: int, folder: str) -> list[str]:
    model = Toy(rank, size)
    other = checkpointer(Path(folder), model=model, optimizer=empty(model), mesh=build_mesh(tp=size, ep=size))
    other.restore(quiet)
    return mismatches(model, other.optimizer)


def test_any_layout_reads_what_any_other_wrote(tmp_path: Path) -> None:
    for writers, readers in ((1, 2), (2, 1), (2, 4), (4, 2)):
        folder = str(tmp_path / f"{writers}to{readers}")
        run_ranks(writers, _save_on_rank, folder)
        assert run_ranks(readers, _load_on_rank, folder) == [[]] * readers


def test_keep_drops_the_oldest_only(tmp_path: Path) -> None:
    saver = checkpointer(tmp_path, keep=2)
    for step in (1, 2, 3):
        saver.save(step, step, None)
    assert [p.name for p in whole_checkpoints(tmp_path)] == ["step_00000002", "step_00000003"]
    # Saving a step that lies before the newest (a run that went back) must not delete what it has just written.
    checkpointer(tmp_path, keep=1).save(1, 1, None)
    assert "step_00000001" in [p.name for p in whole_checkpoints(tmp_path)]
    assert "step_00000003" in [p.name for p in whole_checkpoints(tmp_path)]


def test_same_step_can_be_saved_again(tmp_path: Path) -> None:
    saver = checkpointer(tmp_path)
    saver.save(1, 1, None)
    saver.save(1, 2, None)
    assert RunState.read(whole_checkpoints(tmp_path)[0]).consumed == 2


def test_half_written_and_damaged_ones_are_skipped_with_a_warning(tmp_path: Path) -> None:
    saver = checkpointer(tmp_path, keep=9)
    for step in (1, 2, 3, 4):
        saver.save(step, step, None)
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "step_00000004", folder / "step_00000005.tmp")
    (folder / "step_00000004/state.json").write_text("{")
    shard = folder / "step_00000003/__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-10])
    (folder / "step_00000002/.metadata").unlink()
    warnings: list[str] = []
    assert newest_whole(tmp_path, warnings.append).name == "step_00000001"
    text = "\n".join(warnings)
    for part in ("step_00000005.tmp: a save that was", "state.json is damaged", "is shorter than", ".metadata is missing"):
        assert part in text
    assert all(line.count("checkpoint ") <= 1 for line in warnings), text


def test_interrupted_save_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = checkpointer(tmp_path)
    saver.save(1, 1, None)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("training.checkpoint_files.os.fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        saver.save(2, 2, None)
    monkeypatch.undo()
    assert newest_whole(tmp_path, quiet).name == "step_00000001"
    saver.save(2, 2, None)  # the leftover is cleared away
    assert not list((tmp_path / "checkpoints").glob("*.tmp"))


@pytest.mark.parametrize("place", ["training.shards.dcp.save", "training.checkpoint_files.json.dump"])
def test_disk_full_is_one_message_and_older_ones_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    saver = checkpointer(tmp_path)
    saver.save(1, 1, None)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(place, full)
    with pytest.raises(UserError, match="No space left on device.*earlier.* intact"):
        saver.save(2, 2, None)
    assert newest_whole(tmp_path, quiet).name == "step_00000001"


def _disk_full_on_one_rank(rank: int, size: int, folder: str) -> str:
    import training.shards as shards

    class Full(shards.StreamWriter):
        def write_data(self, *_: object) -> None:
            raise OSError(28, "No space left on device")

    model = Toy(rank, size)
    saver = checkpointer(Path(folder), model=model, mesh=build_mesh(tp=size, ep=size))
    if rank == 1:
        shards.StreamWriter = Full
    with pytest.raises(UserError) as caught:
        saver.save(1, 4, None)
    return str(caught.value)


def test_a_failure_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    messages = run_ranks(2, _disk_full_on_one_rank, str(tmp_path))
    assert messages[0] == messages[1] and "rank 1: No space left on device" in messages[0]
    assert whole_checkpoints(tmp_path) == [] and not list((tmp_path / "checkpoints").glob("*.tmp"))


def _disk_full_at_times(rank: int, size: int, folder: str) -> list[str]:
    model = Toy(rank, size)
    saver, said = checkpointer(Path(folder), model=model, mesh=build_mesh(tp=size, ep=size)), []
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in (1, 2, 3):
        if rank == 1 and step != 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (300, limit[1]))  # writing on is an OSError, as on a full disk
        try:
            saver.save(step, 4, None)
        except UserError as error:
            said.append(str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    return said


def test_a_save_that_failed_says_whether_there_is_an_earlier_one(tmp_path: Path) -> None:
    messages = run_ranks(2, _disk_full_at_times, str(tmp_path))
    assert messages[0] == messages[1] == [
        "checkpoint of step 1 not saved, rank 1: File too large; there is no earlier checkpoint",
        "checkpoint of step 3 not saved, rank 1: File too large; earlier checkpoints are intact",
    ]  # fmt: skip
    assert newest_whole(tmp_path, quiet).name == "step_00000002"


def test_another_model_or_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    saver = checkpointer(tmp_path)
    path = saver.save(1, 1, None)
    state, model = RunState.read(path), Config().model
    with pytest.raises(UserError, match="another model: model.hidden_size is 2048 there and 4096 here; model.num_experts is 256"):
        state.check(path, dataclasses.replace(model, hidden_size=4096, num_experts=8), "tok", "data", quiet)
    with pytest.raises(UserError, match="Set these keys as they are there, or another run.dir$"):
        state.check(path, dataclasses.replace(model, hidden_size=4096), "tok", "data", quiet)
    with pytest.raises(UserError, match="another tokenizer: fingerprint tok there, other here"):
        state.check(path, model, "other", "data", quiet)
    warnings: list[str] = []
    state.check(path, dataclasses.replace(model, bias_update_rate=1e-4), "tok", "new data", warnings.append)
    assert "bias_update_rate changes from 0.001 to 0.0001" in warnings[0] and "training data is not" in warnings[1]
    warnings.clear()  # what only random weights read
    state.check(path, dataclasses.replace(model, embedding_init_std=0.5), "tok", "data", warnings.append)
    assert warnings == [f"model.embedding_init_std changes from null to 0.5, but no weight does: all come from {path}"]


def test_which_checkpoint_a_run_resumes(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    assert resume_from(str(b), "auto", quiet) is None and resume_from(str(b), "none", quiet) is None
    saver = checkpointer(a, keep=5)
    first, second = saver.save(1, 1, None), saver.save(2, 2, None)
    assert resume_from(str(a), "auto", quiet) == second
    assert resume_from(str(b), str(a), quiet) == second
    assert resume_from(str(b), str(first), quiet) == first
    with pytest.raises(UserError, match="already holds a run"):
        resume_from(str(a), "none", quiet)
    with pytest.raises(UserError, match="no checkpoint at nowhere"):
        resume_from(str(b), "nowhere", quiet)
    own = checkpointer(b, resume=str(a)).save(7, 7, None)
    warnings: list[str] = []
    assert resume_from(str(b), str(a), warnings.append) == own, "a restarted job goes on with its own"
    assert "continuing" in warnings[0]
    assert resume_from(str(b), str(own), quiet) == resume_from(str(b), str(b), quiet) == own
    with pytest.raises(UserError, match=f"resume={first}, but {b} has checkpoints of its own, up to step_00000007: choose"):
        resume_from(str(b), str(first), quiet)  # not where it began
    for path in whole_checkpoints(b):
        (path / ".metadata").write_bytes(b"")
    with pytest.raises(UserError, match="no checkpoint of .* can be read"):
        resume_from(str(b), "auto", quiet)


def test_missing_tensor_and_wrong_shape_are_named(tmp_path: Path) -> None:
    mesh = Mesh.solo()
    write_shards(tmp_path / "c", {"x": Shard.whole(torch.ones(3))}, mesh.world)
    with pytest.raises(ShardError, match="Missing key.*: y"):
        read_shards(tmp_path / "c", {"y": Shard.whole(torch.ones(3))}, mesh.world)
    with pytest.raises(ShardError, match="Size mismatch.*x"):
        read_shards(tmp_path / "c", {"x": Shard.whole(torch.ones(4))}, mesh.world)


class _Evil:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.target),)


def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path) -> None:
    path = checkpointer(tmp_path).save(1, 1, None)
    (path / ".metadata").write_bytes(pickle.dumps(_Evil(tmp_path / "ran")))
    assert "which no checkpoint needs" in damage(path)
    path = checkpointer(tmp_path / "other").save(1, 1, None)
    for shard in path.glob("*.distcp"):
        length = shard.stat().st_size
        shard.write_bytes(pickle.dumps(_Evil(tmp_path / "ran")).ljust(length, b"\0"))
    (path / "checksums.json").unlink()  # an attacker could write one that fits
    model = Toy()
    with pytest.raises(UserError, match="cannot load checkpoint"):
        checkpointer(tmp_path / "other", model=model, optimizer=empty(model)).restore(quiet)
    assert not (tmp_path / "ran").exists()


def test_state_is_plain_json(tmp_path: Path) -> None:
    path = checkpointer(tmp_path).save(1, 5, "abc")
    state = json.loads((path / "state.json").read_text())
    assert state["consumed"] == 5 and state["config"]["checkpoint"]["keep"] == 2 and state["format"] == 1
