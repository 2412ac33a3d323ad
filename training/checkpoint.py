"""Checkpoints: what they hold, when one counts as whole, and which one a run resumes from.

    RUN/checkpoints/step_00000100/      whole: renamed into place after every file is on disk
        state.json                      step, consumed samples, identity of model, tokenizer and data, config, wandb id
        .metadata, __R_0.distcp         tensors (training/shards.py): masters, moments, expert bias, FP8 state, RNG
    RUN/checkpoints/step_00000200.tmp/  being written, or left by a crash: never read

Tensors are global, so another number of ranks or another layout can resume. On the same layout the continuation is bitwise.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8.optimizer import AdamW
from fp8.scaling import role_scales
from fp8.state_codecs import CODECS, new_state
from fp8.weight import weights
from model.router import routers
from parallel.mesh import Mesh
from training.config import Config
from training.errors import UserError
from training.run_state import RunState, Warn, resume_from, whole_checkpoints
from training.shards import Shard, ShardError, read_shards, tensor_names, write_shards


def tensors(model: nn.Module, optimizer: AdamW | None, rank: int) -> dict[str, Shard]:
    """Every tensor of a run by its global name, as this rank holds it.

    Modules may add their own (FP8 scale histories and the like) by a method `checkpoint_tensors() -> {name: Tensor}`.
    """
    found, states = {}, optimizer.state() if optimizer is not None else {}
    for name, weight in weights(model) if optimizer is not None else ():
        for kind, tensor in states[name].items():
            found[f"{kind}.{name}"] = Shard.like(weight, tensor, optimizer.tile_of(name, kind))
    for name, router in routers(model):
        found[f"expert_bias.{name}"] = Shard.whole(router.expert_bias)
    for name, module in model.named_modules():
        if hasattr(module, "checkpoint_tensors"):
            found |= {f"state.{name}.{key}": Shard.whole(t) for key, t in module.checkpoint_tensors().items()}
    if optimizer is not None:
        found |= {f"rng.{rank}.{device}": Shard.whole(state) for device, state in _rng_states().items()}
    return found


def _rng_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def is_fp8_state(name: str) -> bool:
    """Whether a tensor is state of an FP8 recipe (scale histories, `auto`'s choices): a checkpoint of another recipe has none."""
    return name.startswith("state.") and (".scales." in name or name.endswith(".choice"))


class Checkpointer:
    """Saves and loads one run. Every rank calls every method.

    Args:
        tokenizer, data: fingerprints, by which a checkpoint knows what it was trained on.
    """

    def __init__(
        self, config: Config, model: nn.Module, optimizer: AdamW, mesh: Mesh, tokenizer: str, data: str
    ) -> None:
        self.config, self.model, self.optimizer, self.mesh = config, model, optimizer, mesh
        self.tokenizer, self.data = tokenizer, data
        self.folder = Path(config.run.dir) / "checkpoints"

    def save(self, step: int, consumed: int, wandb_id: str | None) -> Path:
        """Writes the checkpoint of `step` and drops old ones beyond `checkpoint.keep`.

        Raises:
            UserError: nothing was saved (disk full, say). Earlier checkpoints are as they were.
        """
        values = self.config.to_dict()
        layout = {"world": self.mesh.world.size, "tp": self.mesh.tp.size, "ep": self.mesh.ep.size}
        state = RunState(
            step=step, consumed=consumed, num_steps=self.optimizer.num_steps, model=values["model"], config=values,
            tokenizer=self.tokenizer, data=self.data, wandb_id=wandb_id, layout=layout,
        )  # fmt: skip
        final = self.folder / f"step_{step:08d}"
        partial = final.with_suffix(".tmp")
        self._on_rank_zero(lambda: self._begin(partial, state))
        try:
            write_shards(partial, tensors(self.model, self.optimizer, self.mesh.world.rank), self.mesh.world)
        except ShardError as error:
            self._on_rank_zero(lambda: shutil.rmtree(partial, ignore_errors=True))
            raise UserError(f"checkpoint of step {step} not saved, {error}; earlier ones are intact") from error
        self._on_rank_zero(lambda: self._finish(partial, final))
        return final

    def _begin(self, partial: Path, state: RunState) -> None:
        for leftover in self.folder.glob("step_*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir(parents=True)
        with open(partial / "state.json", "w", encoding="utf-8") as file:
            json.dump(asdict(state), file, indent=1)
            file.flush()
            os.fsync(file.fileno())

    def _finish(self, partial: Path, final: Path) -> None:
        _sync(partial)
        if final.exists():  # the same step of an earlier attempt
            _remove(final)
        partial.rename(final)
        _sync(self.folder)
        keep = max(self.config.checkpoint.keep, self.config.checkpoint.keep_for_merge)
        for old in whole_checkpoints(self.folder.parent)[:-keep]:
            if old != final:
                _remove(old)

    def _on_rank_zero(self, action: Callable[[], Any]) -> None:
        """Runs `action` on rank 0; an OSError there becomes a UserError on every rank."""
        problem = None
        if self.mesh.world.rank == 0:
            try:
                action()
            except OSError as error:
                problem = f"cannot write {self.folder}: {error.strerror or error}; earlier checkpoints are intact"
        if self.mesh.world.size > 1:
            box = [problem]
            dist.broadcast_object_list(box, src=0, group=self.mesh.world.group)
            problem = box[0]
        if problem is not None:
            raise UserError(problem)

    def restore(self, warn: Warn) -> RunState | None:
        """Loads the checkpoint that `checkpoint.resume` asks for; None where the run starts anew.

        Raises:
            UserError: there is none, it is of another model or tokenizer, or it cannot be read.
        """
        path = resume_from(self.config.run.dir, self.config.checkpoint.resume, warn)
        if path is None:
            return None
        state = RunState.read(path)
        state.check(path, self.config.model, self.tokenizer, self.data, warn)
        for name, _ in weights(self.model):
            self.optimizer.allocate(name)
        self.load(path, state)
        before, now = state.config.get("fp8", {}).get("recipe"), self.config.fp8.recipe
        if before != now:
            warn(f"fp8.recipe changes from {before} to {now}: scales with a history start from each tensor's own amax")
        warn(f"resuming {path}, {state.step} steps done")
        return state

    def load(self, path: Path, state: RunState) -> None:
        """Puts the tensors of the checkpoint at `path` into model and optimizer, whose masters must exist.

        Raises:
            UserError: tensors are missing or cannot be read.
        """
        wanted = tensors(self.model, self.optimizer, self.mesh.world.rank)
        saved = tensor_names(path)
        # Ranks that did not exist at the save keep the generators that they were started with.
        wanted = {n: shard for n, shard in wanted.items() if n in saved or not (n.startswith("rng.") or is_fp8_state(n))}
        try:
            read_shards(path, wanted, self.mesh.world)
        except ShardError as error:
            raise UserError(f"cannot load checkpoint {path}: {error}") from error
        for scale in role_scales(self.model):
            scale.reset()
        for name, _ in weights(self.model):
            self.optimizer.refresh(name)
        self.optimizer.num_steps = state.num_steps
        rank = self.mesh.world.rank
        if f"rng.{rank}.cpu" in wanted:
            torch.set_rng_state(wanted[f"rng.{rank}.cpu"].tensor)
        if f"rng.{rank}.cuda" in wanted:
            torch.cuda.set_rng_state(wanted[f"rng.{rank}.cuda"].tensor)


def load_masters(
    path: Path, model: nn.Module, mesh: Mesh, take: Callable[[str, Tensor], None] | None = None, group_bytes: int = 2**31
) -> None:
    """Fills a model from the masters of a checkpoint: without an optimizer (evaluation, generation), or through one.

    Args:
        take: what to do with each (name, FP32 master of this rank), `AdamW.set_master` say; default: sets the weight.
        group_bytes: masters pass through memory this much at a time.

    Raises UserError as `Checkpointer.load`.
    """
    try:
        saved = tensor_names(path)
        state = {n: shard for n, shard in tensors(model, None, 0).items() if n in saved or not is_fp8_state(n)}
        read_shards(path, state, mesh.world)
        for group in _groups(weights(model), group_bytes):
            codecs = {name: CODECS["master"]["fp16" if f"master.scale.{name}" in saved else "fp32"] for name, _ in group}
            masters = {name: new_state(codecs[name], w.data.shape, w.data.device) for name, w in group}
            shards = {
                f"master.{name}" if part == "data" else f"master.{part}.{name}": Shard.like(w, t, codecs[name].parts[part][1])
                for name, w in group
                for part, t in masters[name].items()
            }
            read_shards(path, shards, mesh.world)
            for name, weight in group:
                value = codecs[name].decode(masters.pop(name))
                take(name, value) if take is not None else weight.set_(value)
    except ShardError as error:
        raise UserError(f"cannot load checkpoint {path}: {error}") from error


def _groups(named: Iterable[tuple[str, Any]], limit: int) -> Iterable[list[tuple[str, Any]]]:
    group, size = [], 0
    for name, weight in named:
        if group and size + 4 * weight.numel > limit:
            yield group
            group, size = [], 0
        group.append((name, weight))
        size += 4 * weight.numel
    if group:
        yield group


def _remove(folder: Path) -> None:
    """Deletes a checkpoint; renamed first, so that one half deleted is never taken for whole."""
    doomed = folder.with_name(f"{folder.name}.old.tmp")
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Makes renames inside `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
