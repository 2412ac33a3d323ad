"""Checkpoints: what they hold, when one counts as whole, and which one a run resumes from.

    RUN/checkpoints/step_00000100/      whole: renamed into place after every file is on disk
        state.json                      step, consumed samples, identity of model, tokenizer and data, config, wandb id
        .metadata, __R_N.distcp         tensors (training/shards.py): masters, moments, expert bias, FP8 state, RNG
        checksums.json                  length and CRC-32 of each of them, verified before anything is loaded
    RUN/checkpoints/step_00000200.tmp/  being written, or left by a crash: never read

Tensors are global, so another number of ranks or another layout can resume. On the same layout the continuation is bitwise.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fp8.optimizer import AdamW
from fp8.scaling import role_scales
from parallel.mesh import Axis, Mesh
from training import checkpoint_files as files
from training.config import Config
from training.errors import UserError
from training.masters import is_fp8_state, tensors
from training.masters import load_masters as load_masters  # its other way to be read
from training.process import SAVING, gather
from training.run_state import RunState, Warn, resume_from, whole_checkpoints
from training.shards import Shard, ShardError, read_shards, tensor_names, write_shards
from training.snapshot import HostCopy

WRITE_TIMEOUT = timedelta(hours=1)  # ranks wait so long for each other's files; one that dies is noticed at once


class Checkpointer:
    """Saves and loads one run. Every rank calls every method.

    Args:
        tokenizer, data: fingerprints, by which a checkpoint knows what it was trained on.

    Attributes:
        last: step of the newest checkpoint that is on disk, as far as this process knows.
        seconds: how long the last save took.
    """

    def __init__(self, config: Config, model: nn.Module, optimizer: AdamW, mesh: Mesh, tokenizer: str, data: str) -> None:
        self.config, self.model, self.optimizer, self.mesh = config, model, optimizer, mesh
        self.tokenizer, self.data = tokenizer, data
        self.folder = Path(config.run.dir) / "checkpoints"
        self.last: int | None = None
        self.seconds = 0.0
        self._world, self._copy = _own_axis(mesh.world), HostCopy()
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None

    def save(
        self, step: int, consumed: int, wandb_id: str | None, history: tuple[tuple[float, float], ...] = (), wait: bool = True
    ) -> Path:
        """Saves `step` and drops old checkpoints (`checkpoint.keep`, `keep_every`); the path at which it will be whole.

        Args:
            history: what the guard against spikes remembers (training/faults.py).
            wait: until it is on disk; otherwise only until all tensors are copied to the host, and `wait` reports.

        Raises:
            UserError: nothing was saved (disk full, a tensor that is not finite), or the one before failed in the background.
                Earlier checkpoints are as they were.
        """
        self.wait()
        values = self.config.to_dict()
        layout = {"world": self.mesh.world.size, "tp": self.mesh.tp.size, "ep": self.mesh.ep.size}
        state = RunState(
            step=step, consumed=consumed, num_steps=self.optimizer.num_steps, model=values["model"], config=values,
            tokenizer=self.tokenizer, data=self.data, wandb_id=wandb_id, layout=layout, history=[list(h) for h in history],
        )  # fmt: skip
        shards = tensors(self.model, self.optimizer, self.mesh.world.rank)
        self._refuse_bad(step, shards)
        final = self.folder / f"step_{step:08d}"
        if wait:
            self._write(final, state, shards)
        else:
            job = final, state, self._copy.take(shards)
            self._thread = threading.Thread(target=self._write_aside, args=job, daemon=True, name=SAVING)
            self._thread.start()
        return final

    def prepare(self) -> None:
        """Once masters exist: makes room for background saves while the first steps run."""
        settings = self.config.checkpoint
        if settings.background and settings.every:
            self._copy.prepare(tensors(self.model, self.optimizer, self.mesh.world.rank))

    def try_save(self, *state: Any, must: bool, warn: Warn, **named: Any) -> None:
        """`save`; a failure is only a warning unless it `must` succeed: a full disk may have room again at the next one."""
        self.settle(warn)
        try:
            self.save(*state, **named)
        except UserError as error:
            if must:
                raise
            warn(str(error))

    def settle(self, warn: Warn) -> None:
        """`wait`, with a warning where that save failed; then every rank has the same `last`."""
        try:
            self.wait()
        except UserError as error:
            warn(str(error))

    def wait(self) -> None:
        """Until nothing is being written. Raises UserError when the last background save failed."""
        if self._thread is not None:
            self._thread.join()
        self._thread, problem, self._problem = None, self._problem, None
        if problem is not None:
            raise problem

    def close(self) -> None:
        """At the end, whatever has happened: lets a save in the background finish."""
        if self._thread is not None:
            self._thread.join(self.config.faults.stop_within_s)
        self._copy.close()
        if self._world.group is not None:
            dist.destroy_process_group(self._world.group)
        self._world = Axis.solo()  # a group that outlives the interpreter aborts the process

    def _write_aside(self, *args: Any) -> None:
        try:
            self._write(*args)
        except BaseException as error:
            self._problem = error

    def _write(self, final: Path, state: RunState, shards: dict[str, Shard]) -> None:
        began, world, aside = time.monotonic(), self._world, final.with_suffix(".tmp")
        self._on_rank_zero(lambda: files.begin(aside, state))
        try:
            sums = write_shards(aside, shards, world)
        except ShardError as error:
            self._on_rank_zero(lambda: files.shutil.rmtree(aside, ignore_errors=True))
            raise UserError(f"checkpoint of step {state.step} not saved, {error}; {self._earlier()}") from error
        parts = gather(sums | files.checksums_beside(aside, world.rank), world)
        self._on_rank_zero(lambda: files.seal(aside, parts))
        self._on_rank_zero(lambda: files.finish(aside, final))
        self.last, self.seconds = state.step, time.monotonic() - began
        keep = max(self.config.checkpoint.keep, self.config.checkpoint.keep_for_merge)
        self._on_rank_zero(lambda: files.rotate(final, keep, self.config.checkpoint.keep_every))

    def _refuse_bad(self, step: int, shards: dict[str, Shard]) -> None:
        """A state that is not finite must neither be saved nor take the place of one that is."""
        names = [n for n, s in shards.items() if n.startswith(("master.", "expert_bias.")) and s.tensor.is_floating_point()]
        fine = [shards[name].tensor.isfinite().all().cpu() for name in names]  # of a rank that owns no state, none
        flags = torch.stack(fine).tolist() if fine else []
        own = next((name for name, ok in zip(names, flags, strict=True) if not ok), None)
        for rank, bad in enumerate(gather(own, self._world)):
            if bad is not None:
                raise UserError(f"checkpoint of step {step} not saved: {bad} on rank {rank} is not finite; {self._earlier()}")

    def _earlier(self) -> str:
        """What a save that failed has left."""
        return "earlier checkpoints are intact" if whole_checkpoints(self.folder.parent) else "there is no earlier checkpoint"

    def _on_rank_zero(self, action: Callable[[], Any]) -> None:
        """Runs `action` on rank 0; an OSError there becomes a UserError on every rank."""
        problem = None
        if self._world.rank == 0:
            try:
                action()
            except OSError as error:
                problem = f"cannot write {self.folder}: {error.strerror or error}; {self._earlier()}"
        problem = _from_rank_zero(problem, self._world)
        if problem is not None:
            raise UserError(problem)

    # ---------------------------------------------------------------- loading

    def restore(self, warn: Warn, rollback: bool = False) -> RunState | None:
        """Loads the checkpoint that `checkpoint.resume` asks for; None where the run starts anew.

        Args:
            rollback: the newest one of this run instead, wherever it started from.

        Raises:
            UserError: there is none, it is of another model or tokenizer, or it cannot be read.
        """
        path = self._choose("auto" if rollback else self.config.checkpoint.resume, warn)
        if path is None:
            return None
        state = RunState.read(path)
        state.check(path, self.config.model, self.tokenizer, self.data, warn)
        for name in self.optimizer.weights if not rollback else ():
            self.optimizer.allocate(name)
        self.load(path, state)
        section, now = state.config.get("fp8"), self.config.fp8.recipe
        before = section.get("recipe") if isinstance(section, dict) else None
        if before != now:
            warn(f"fp8.recipe changes from {before} to {now}: scales with a history start from each tensor's own amax")
        warn(f"{'back to' if rollback else 'resuming'} {path}, {state.step} steps done")
        self.last = state.step
        return state

    def _choose(self, resume: str, warn: Warn) -> Path | None:
        """What rank 0 chooses: only one rank looks at the folders, all of them together read the files of a candidate."""
        world = self._world

        def check(path: Path) -> str | None:
            _from_rank_zero(("verify", path), world)
            return self._verify(path)

        if world.rank == 0:
            try:
                answer = "use", resume_from(self.config.run.dir, resume, warn, check)
            except UserError as error:
                answer = "refuse", error
            _from_rank_zero(answer, world)
        while world.rank != 0:
            answer = _from_rank_zero(None, world)
            if answer[0] != "verify":
                break
            self._verify(answer[1])
        if answer[0] == "refuse":
            raise answer[1]
        return answer[1]

    def _verify(self, path: Path) -> str | None:
        found = gather(files.verify(path, self._world.rank, self._world.size), self._world)
        return "; ".join(problem for part in found for problem in part) or None

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
            read_shards(path, wanted, self._world)
        except ShardError as error:
            raise UserError(f"cannot load checkpoint {path}: {error}") from error
        for scale in role_scales(self.model):
            scale.reset()
        for name in self.optimizer.all_weights:
            self.optimizer.refresh(name)
        self.optimizer.publish()
        self.optimizer.num_steps = state.num_steps
        rank = self.mesh.world.rank
        if f"rng.{rank}.cpu" in wanted:
            torch.set_rng_state(wanted[f"rng.{rank}.cpu"].tensor)
        if f"rng.{rank}.cuda" in wanted:
            torch.cuda.set_rng_state(wanted[f"rng.{rank}.cuda"].tensor)


def _own_axis(world: Axis) -> Axis:
    """The same ranks with a group of their own: a save in the background must not mix with the collectives of training."""
    if world.size == 1:
        return world
    return Axis(dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT), world.rank, world.size)


def _from_rank_zero(value: Any, world: Axis) -> Any:
    box = [value]
    if world.size > 1:
        dist.broadcast_object_list(box, src=0, group=world.group)
    return box[0]
