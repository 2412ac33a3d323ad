"""What a checkpoint says of itself, when one counts as whole, and which one a run resumes from."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from model.config import ModelConfig
from training.errors import UserError
from training.shards import damage

FORMAT = 1
SEAL = "checksums.json"  # lengths and checksums of the other files (training/checkpoint_files.py)
# Fields of ModelConfig that may change between stages of one model; any other makes another model of it.
TUNABLE = {
    "mtp_loss_weight", "router_z_loss_weight", "head_z_loss_weight", "aux_loss_weight", "bias_update_rate",
    "initializer_range", "embedding_init_std", "loss_chunk", "max_position_embeddings", "rope_theta",
}  # fmt: skip
INITIAL = {"initializer_range", "embedding_init_std"}  # of them, those that only a start from random values reads
Warn = Callable[[str], None]
Check = Callable[[Path], str | None]  # reads a checkpoint's files; what is wrong with them


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Everything of a run that is not a tensor; state.json."""

    step: int  # optimizer steps done
    consumed: int  # samples taken from the data, over all ranks
    num_steps: int  # the optimizer's own count, for bias correction
    model: dict[str, Any]
    tokenizer: str  # fingerprint
    data: str  # fingerprint of the packed training file
    config: dict[str, Any]
    wandb_id: str | None = None
    layout: dict[str, int] = field(default_factory=dict)
    history: list[list[float]] = field(default_factory=list)  # (loss, gradient norm) of recent good steps
    torch: str = torch.__version__
    format: int = FORMAT

    @staticmethod
    def read(folder: Path) -> RunState:
        """Of the checkpoint in `folder`. Raises UserError."""
        try:
            fields = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            if fields["format"] != FORMAT:
                raise UserError(f"checkpoint {folder} has format {fields['format']}; this version reads {FORMAT}")
            state = RunState(**fields)
            _check_types(state)
            return state
        except OSError as error:
            raise UserError(f"cannot read checkpoint {folder}: {error.strerror or error}") from error
        except (ValueError, OverflowError, TypeError, KeyError, RecursionError) as error:
            raise UserError(f"checkpoint {folder}: state.json is damaged ({error})") from error

    def check(self, folder: Path, model: ModelConfig, tokenizer: str, data: str, warn: Warn) -> None:
        """Raises UserError for another model or tokenizer; warns of what may change but rarely should."""
        now = asdict(model)
        changed = {name: (self.model.get(name), now[name]) for name in now if self.model.get(name) != now[name]}
        changed = {name: (in_yaml(old), in_yaml(new)) for name, (old, new) in changed.items()}
        wrong = [f"model.{n} is {old} there and {new} here" for n, (old, new) in changed.items() if n not in TUNABLE]
        if wrong:
            found = f"checkpoint {folder} is of another model: {'; '.join(wrong)}"
            raise UserError(f"{found}. Set these keys as they are there, or another run.dir")
        if self.tokenizer != tokenizer:
            raise UserError(
                f"checkpoint {folder} was trained with another tokenizer: fingerprint {self.tokenizer[:12]} there, "
                f"{tokenizer[:12]} here (data.tokenizer)"
            )
        for name, (old, new) in changed.items():
            source = f", but no weight does: all come from {folder}" if name in INITIAL else f": {folder} has the former"
            warn(f"model.{name} changes from {old} to {new}{source}")
        if self.data != data:
            warn("the training data is not what the checkpoint was trained on; the data order goes on in the new data")


def in_yaml(value: object) -> str:
    """A value as a configuration writes it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _check_types(state: RunState) -> None:
    """Raises TypeError where JSON held something else than what is used as a number, a text or a mapping."""
    kinds = {"step": int, "consumed": int, "num_steps": int, "model": dict, "config": dict, "tokenizer": str, "data": str}
    for name, kind in kinds.items():
        value = getattr(state, name)
        if type(value) is not kind or (kind is int and value < 0):
            raise TypeError(f"{name} is {value!r:.40}")
    if not all(isinstance(h, list) and len(h) == 2 and all(isinstance(x, float | int) for x in h) for h in state.history):
        raise TypeError("history is no list of pairs")


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint itself: one of a run's, an import, a merge."""
    return (folder / "state.json").is_file()


def whole_checkpoints(run_dir: str | Path) -> list[Path]:
    """Renamed checkpoints of a run, oldest first."""
    folder = Path(run_dir) / "checkpoints"
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if re.fullmatch(r"step_\d{8,}", p.name) and p.is_dir())


def refuse_both(folder: Path) -> None:
    """Raises UserError where a folder is a checkpoint and a run's folder: its name does not say which of the two is meant."""
    if is_checkpoint(folder) and (of_run := whole_checkpoints(folder)):
        both = f"{folder} is a checkpoint (an import or a merge) and holds a run as well, at {of_run[-1]}"
        raise UserError(f"{both}: name that for the run; for the other, move {folder / 'checkpoints'} into a folder of its own")


def warn_unverified(folder: Path, warn: Warn) -> None:
    """Says so of a checkpoint whose files nothing can be compared with."""
    if not (folder / SEAL).is_file():
        warn(f"checkpoint {folder} has no {SEAL}: its files are read without being verified")


def newest_whole(run_dir: str | Path, warn: Warn, check: Check | None = None) -> Path | None:
    """The newest checkpoint that can be read; warns of each half-written or damaged one that it skips.

    Args:
        check: asked last, of a checkpoint that looks whole.
    """
    for half in sorted((Path(run_dir) / "checkpoints").glob("step_*.tmp")):
        warn(f"skipping {half}: a save that was interrupted")
    for path in reversed(whole_checkpoints(run_dir)):
        reason = damage(path)
        try:
            RunState.read(path)
        except UserError as error:
            reason = str(error).removeprefix(f"checkpoint {path}").lstrip(": ").replace(f"checkpoint {path}", "it")
        if reason is None and check is not None:
            reason = check(path)
        if reason is None:
            if check is not None:
                warn_unverified(path, warn)
            return path
        warn(f"skipping checkpoint {path}: {reason}")
    return None


def locate(path: str, warn: Warn, check: Check | None = None) -> Path:
    """The checkpoint that `path` means: itself, or the newest whole one of a run.

    Raises:
        UserError: it is neither, or could be either, or is damaged.
    """
    folder = Path(path)
    if is_checkpoint(folder):
        refuse_both(folder)
        reason = damage(folder)
        if reason is None and check is not None:
            reason = check(folder)
        if reason is not None:
            raise UserError(f"checkpoint {folder} is not whole: {reason}")
        if check is not None:
            warn_unverified(folder, warn)
        return folder
    newest = newest_whole(folder, warn, check)
    if newest is None:
        raise UserError(f"no checkpoint at {path}: neither a checkpoint nor a run that has one")
    return newest


def resume_from(run_dir: str, resume: str, warn: Warn, check: Check | None = None) -> Path | None:
    """Which checkpoint `checkpoint.resume` asks for; None to start anew.

    A run that began at the checkpoint or run that `resume` names goes on from its own checkpoints once it has some: that is how
    the same command, started again, finds its way.

    Raises:
        UserError: `resume` is "none" or names another start than the run's own, but the run has checkpoints already; or it names
            something that is not there.
    """
    own = newest_whole(run_dir, warn, check) if resume != "none" else None
    if resume == "none":
        if whole_checkpoints(run_dir):
            raise UserError(
                f"{run_dir} already holds a run (up to {whole_checkpoints(run_dir)[-1].name}); "
                "choose another run.dir, or checkpoint.resume=auto to continue it"
            )
        return None
    if own is not None or resume == "auto":
        if own is None and whole_checkpoints(run_dir):
            raise UserError(f"no checkpoint of {run_dir} can be read; move its checkpoints/ away to start anew")
        if resume != "auto" and Path(resume).resolve() not in (own.resolve(), Path(run_dir).resolve()):
            section = RunState.read(own).config.get("checkpoint")
            if not isinstance(section, dict) or section.get("resume") != resume:
                raise UserError(
                    f"checkpoint.resume={resume}, but {run_dir} has checkpoints of its own, up to {own.name}: choose another "
                    "run.dir to start from there, or checkpoint.resume=auto to continue the run's own"
                )
            warn(f"continuing {own}: the run began at checkpoint.resume={resume} and has checkpoints of its own since")
        return own
    return locate(resume, warn, check)
