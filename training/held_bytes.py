"""Bytes that a model holds between steps, counted on the model itself, built without memory: weights, gradients, states.

The dry run's and the planner's bytes a parameter; a run counts its own tensors (fp8/optimizer.py), to the same end.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from fp8.optimizer import States
from fp8.recipe import Recipe
from fp8.state_codecs import new_state
from fp8.weight import weights
from model.config import ModelConfig
from model.transformer import Transformer
from parallel.mesh import Axis, Mesh

COUNTED = ("parameters", "weights", "transposes", "gradients", "states", "masters")


def unconnected_mesh(world: int, tp: int, ep: int) -> Mesh:
    """Axes of the right sizes, without process groups: enough to build a model."""
    sizes = dict(tp=tp, ep=ep, dp=world // tp, edp=world // ep, world=world)
    return Mesh(**{name: Axis(None, 0, size) for name, size in sizes.items()})


@functools.lru_cache(maxsize=1024)
def _count(config: ModelConfig, recipe: Recipe, states: States, tp: int, ep: int, gradients: torch.dtype) -> dict[str, int]:
    """Parameters, and bytes of weights, of transposes that may be kept, of gradients and of states: dense weights' and experts'.

    Masters are counted among the states and apart.
    """
    with torch.device("meta"):
        model = Transformer(config, recipe, unconnected_mesh(tp * ep, tp, ep))
    found = {f"{kind} {what}": 0 for kind in ("dense", "expert") for what in COUNTED}
    found["dense replicated"] = 0
    for _, weight in weights(model):
        kind = "expert" if weight.expert else "dense"
        codecs, own_master = states.codecs(weight), weight.data.dtype == torch.float32
        made = {role: new_state(codec, weight.data.shape, weight.data.device) for role, codec in codecs.items()}
        sizes = {role: sum(t.nbytes for t in parts.values()) for role, parts in made.items() if role != "master" or not own_master}
        found[f"{kind} parameters"] += weight.numel
        found["dense replicated"] += weight.numel * weight.tp_partial
        found[f"{kind} weights"] += weight.q.nbytes
        found[f"{kind} transposes"] += weight.q.nbytes if weight.scale_inv is not None and weight is not model.embedding else 0
        low = weight.data.dim() > 1 and weight.data.dtype != torch.float32 and weight not in (model.embedding, model.head)
        found[f"{kind} gradients"] += weight.numel * (gradients if low else torch.float32).itemsize
        found[f"{kind} states"] += sum(sizes.values())
        found[f"{kind} masters"] += sizes.get("master", 0)
    return found


def static(
    config: ModelConfig, recipe: Recipe, states: States, tp: int, ep: int, gradients: torch.dtype = torch.float32
) -> dict[str, int]:
    """`_count` of the whole model, from two of its sizes: all MoE layers are alike. tp splits what ep does not, and the reverse."""
    first, recipe = config.first_k_dense_replace, replace(recipe, overrides=())  # they name layers, and change little
    found = {}
    for own, t, e in (("dense", tp, 1), ("expert", 1, ep)):
        layers = config.num_hidden_layers - first
        sizes = [replace(config, num_hidden_layers=first + min(n, layers)) for n in (1, 2)]
        one, two = (_count(size, recipe, states, t, e, gradients) for size in sizes)
        found |= {k: n + (layers - 1) * (two[k] - n) for k, n in one.items() if k.startswith(own)}
    return found


def bytes_per_parameter(
    config: ModelConfig, recipe: Recipe, states: States, gradients: torch.dtype = torch.float32, keep_transposed: bool = False
) -> dict[str, float]:
    """Of the whole model on one rank, over all its parameters: every weight in its own format, scales included."""
    found = static(config, recipe, states, 1, 1, gradients)
    total = {what: found[f"dense {what}"] + found[f"expert {what}"] for what in COUNTED}
    turned = {"transpose": total["transposes"]} if keep_transposed and total["transposes"] else {}
    held = {"weight": total["weights"], **turned, "gradient": total["gradients"], "master": total["masters"]}
    held["moments"] = total["states"] - total["masters"]
    return {what: nbytes / total["parameters"] for what, nbytes in held.items()}
