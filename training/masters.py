"""The tensors of a run by global name, and a model filled from the masters of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from fp8.optimizer import AdamW
from fp8.state_codecs import CODECS, new_state
from fp8.weight import weights
from model.router import routers
from parallel.mesh import Mesh
from training.errors import UserError
from training.shards import Shard, ShardError, read_shards, tensor_names


def tensors(model: nn.Module, optimizer: AdamW | None, rank: int) -> dict[str, Shard]:
    """Every tensor of a run by its global name, as this rank holds it.

    Modules may add their own (FP8 scale histories and the like) by a method `checkpoint_tensors() -> {name: Tensor}`.
    """
    found, states = {}, optimizer.state() if optimizer is not None else {}
    for name, weight in optimizer.weights.items() if optimizer is not None else ():
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
    except (ShardError, OSError, UnpicklingError) as error:
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
