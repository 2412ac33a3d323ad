"""Which recipe and which activation stage each part of the network has, from the few lines a config gives.

Names are module names: `head`, `layers.3`, `layers.-1.attention`, `mtp.block.experts.down`. What a stage frees: docs/numerics.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import nn

from fp8.recipe import Recipe, absolute_name
from fp8.weight import Weight, weights
from model.config import ModelConfig
from parallel.collectives import all_reduce
from parallel.mesh import Mesh

MAX_STAGE = 4
Stages = int | Mapping[str, int]


def layer_kind(config: ModelConfig, index: int) -> str:
    """ "dense" or "moe"."""
    return "dense" if index < config.first_k_dense_replace else "moe"


def stage_of(stages: Stages, name: str, kind: str, num_layers: int) -> int:
    """Activation stage of layer `name` (`layers.3`, `mtp`) of class `kind` (dense, moe, mtp): by name, by class, by "default"."""
    if isinstance(stages, int):
        return stages
    by_name = {absolute_name(key, num_layers): stage for key, stage in stages.items()}
    return by_name.get(name, by_name.get(kind, by_name.get("default", 0)))


def stage_problems(stages: Stages, config: ModelConfig) -> list[str]:
    """Stages that do not exist, and names of layers that do not."""
    n = config.num_hidden_layers
    known = {"default", "dense", "moe", "mtp", *(f"layers.{i}" for i in range(n))}
    table = {"default": stages} if isinstance(stages, int) else stages
    wrong = [(key, stage) for key, stage in table.items() if not 0 <= stage <= MAX_STAGE]
    found = [f"fp8.activations {key}: {stage} is not a stage from 0 to {MAX_STAGE}" for key, stage in wrong]
    return found + [
        f"fp8.activations names {key!r}; known: default, dense, moe, mtp, layers.0 .. layers.{n - 1}"
        for key in table
        if absolute_name(key, n) not in known
    ]


def unknown_overrides(recipe: Recipe, names: Iterable[str], num_layers: int) -> list[str]:
    """Overrides that match none of the weights `names`."""
    names = list(names)
    keys = [(key, absolute_name(key, num_layers)) for key, _ in recipe.overrides]
    return [key for key, prefix in keys if not any(n == prefix or n.startswith(prefix + ".") for n in names)]


def override_problems(recipe: Recipe, config: ModelConfig) -> list[str]:
    """The ValueError of `apply_recipe`, without building the model: its weights are made on the meta device."""
    from model.transformer import Transformer  # which imports this file

    try:
        with torch.device("meta"):
            Transformer(config, recipe)
    except ValueError as error:
        return [str(error)]
    return []


def apply_recipe(model: nn.Module, recipe: Recipe, num_layers: int) -> None:
    """Gives each weight that follows the model's recipe the one of its override. Part of construction: no values exist yet.

    Raises:
        ValueError: an override names nothing that a recipe applies to.
    """
    follow = {name: weight for name, weight in weights(model) if weight.recipe is recipe}
    unknown = unknown_overrides(recipe, follow, num_layers)
    if unknown:
        known = ", ".join(sorted({n.split(".")[0] + (".N" if n.startswith("layers") else "") for n in follow}))
        raise ValueError(f"fp8.overrides names {', '.join(map(repr, unknown))}, where no GEMM weight is; they lie in {known}")
    for name, weight in follow.items():
        weight.use(recipe.at(name, num_layers))


def share_scales(model: nn.Module, mesh: Mesh) -> None:
    """Rows that travel between ranks in a tensorwise recipe have one scale: its amax is the maximum over the ranks they meet on."""
    for _, weight in weights(model):
        # under tp the experts' input is gathered over tp too, for the shared expert
        axis = mesh.tp if not weight.expert else mesh.ep if mesh.tp.size == 1 else mesh.world
        if axis.size > 1 and weight.recipe.is_fp8:
            share_scale(weight, partial(all_reduce, axis=axis, kind="amax", op="max"))


def share_scale(weight: Weight, reduce: object) -> None:
    """`reduce` for the weight and for its scales with state."""
    weight.reduce = reduce
    for scale in weight.scales.values():
        scale.reduce = reduce
