"""A run that goes on: which settings changed since its checkpoint, and whether there is anything left to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from parallel.mesh import Axis
from training.config import Config
from training.errors import UserError, counted
from training.metrics import read_metrics
from training.process import gather
from training.run_state import RunState, Warn, in_yaml, whole_checkpoints

# What decides the numbers that a run computes: sections, and keys of others. The rest is where, how fast, and how much is told.
SECTIONS = ("model", "optim", "fp8")
KEYS = ("train.seed", "train.global_batch", "data.seq_len", "data.isolate_documents")
ONLY_COST = ("fp8.activations", "fp8.health_every", "fp8.emulate", "optim.offload", "model.loss_chunk")


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        key = prefix + name
        found |= _flat(value, f"{key}.") if isinstance(value, dict) and not prefix else {key: value}
    return found


def changed_settings(before: dict[str, Any], config: Config) -> dict[str, tuple[Any, Any]]:
    """Key -> (value of a checkpoint's configuration, value now), of those that decide what a run computes.

    Keys that only one of the two has (another version's) do not count.
    """
    old, new = _flat(before), _flat(config.to_dict())
    decide = {key for key in new if key.partition(".")[0] in SECTIONS or key in KEYS} - set(ONLY_COST)
    return {key: (old[key], new[key]) for key in new if key in decide and key in old and old[key] != new[key]}


def finished(config: Config, state: RunState, world: Axis, warn: Warn, validates: bool) -> str | None:
    """What to say of a run that has done all its steps and validated them, or more steps; None where there is something to do.

    Every rank calls it; rank 0 reads the metrics. Changed settings of a run that goes on are a warning. A run that has no
    validation (`validates`) counts as validated.

    Raises:
        UserError: it is done, and the settings are not those that it was trained with.
    """
    changed = changed_settings(state.config, config)
    if state.step < config.train.steps:
        said = [f"{key} from {in_yaml(old)} to {in_yaml(new)}" for key, (old, new) in changed.items() if not _told(key)]
        warn(f"settings change with this resume: {'; '.join(said)}" if said else None)
        return None
    source = config.run.dir if whole_checkpoints(config.run.dir) else f"checkpoint.resume={config.checkpoint.resume}"
    done = f"{source} is finished: all {config.train.steps} steps are done"
    if state.step > config.train.steps:
        done = f"{source} has done {counted(state.step, 'step')}, more than train.steps={config.train.steps}"
    if changed:
        there = "; ".join(f"{key} is {in_yaml(old)} there and {in_yaml(new)} here" for key, (old, new) in changed.items())
        raise UserError(f"{done}, with other settings: {there}. Choose another run.dir; or a larger train.steps, to go on")
    validated = gather(world.rank == 0 and (not validates or _validated(config.run.dir, state.step)), world)[0]
    if state.step == config.train.steps and not validated:
        return None
    return f"{done}; nothing was trained or written. A larger train.steps goes on, another run.dir starts a new run"


def _told(key: str) -> bool:
    """Whether loading the checkpoint has said so already."""
    return key == "fp8.recipe" or key.startswith("model.")


def _validated(run_dir: str, step: int) -> bool:
    path = Path(run_dir) / "metrics.jsonl"
    return path.is_file() and any(r.get("step") == step and "val/loss" in r for r in read_metrics(path))
