"""Bare Weights with states of known values, to save and load: no model is trained here."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from fp8.optimizer import AdamW
from fp8.recipe import Recipe
from fp8.weight import Piece, Weight, weights
from parallel.mesh import Mesh
from training.checkpoint import Checkpointer
from training.config import CheckpointConfig, Config, RunConfig

Q, K, D = 8, 4, 6  # rows of q, k and v; columns


class Toy(nn.Module):
    """A fused [Q | K | V] weight split over tp ranks in three pieces, experts split over ep ranks, and a replicated norm."""

    def __init__(self, rank: int = 0, ranks: int = 1, recipe: Recipe | None = None) -> None:
        super().__init__()
        recipe = recipe or Recipe.fp32()
        q, k, e = Q // ranks, K // ranks, 4 // ranks
        starts = ((rank * q, 0), (Q + rank * k, 0), (Q + K + rank * k, 0))
        sizes, pieces, local = (q, k, k), [], 0
        for start, size in zip(starts, sizes, strict=True):
            pieces.append(Piece(start, (slice(local, local + size), slice(0, D))))
            local += size
        self.qkv = Weight(local, D, recipe=recipe, global_shape=(Q + 2 * K, D), pieces=tuple(pieces))
        experts = Piece((rank * e, 0, 0), (slice(0, e), slice(0, 3), slice(0, D)))
        self.experts = Weight(e, 3, D, recipe=recipe, expert=True, global_shape=(4, 3, D), pieces=(experts,))
        self.norm = Weight(D, recipe=recipe, init_std=None, decay=False)


def truth(name: str, kind: str) -> Tensor:
    """The global value of every tensor, different in each element."""
    shape = {"qkv": (Q + 2 * K, D), "experts": (4, 3, D), "norm": (D,)}[name]
    offset = {"master": 0.5, "exp_avg": 1000.5, "exp_avg_sq": 2000.5}[kind]
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + offset


def local(weight: Weight, value: Tensor) -> Tensor:
    out = torch.empty(weight.data.shape)
    for piece in weight.pieces:
        size = out[piece.local].shape
        out[piece.local] = value[tuple(slice(o, o + n) for o, n in zip(piece.offset, size, strict=True))]
    return out


def filled(model: Toy) -> AdamW:
    optimizer = AdamW(weights(model))
    for name, weight in weights(model):
        optimizer.set_master(name, local(weight, truth(name, "master")))
        for kind in ("exp_avg", "exp_avg_sq"):
            optimizer.state()[name][kind].copy_(local(weight, truth(name, kind)))
    optimizer.num_steps = 17
    return optimizer


def empty(model: Toy) -> AdamW:
    optimizer = AdamW(weights(model))
    for name, weight in weights(model):
        optimizer.set_master(name, torch.zeros(weight.data.shape))
    return optimizer


def mismatches(model: Toy, optimizer: AdamW) -> list[str]:
    return [
        f"{kind}.{name}"
        for name, weight in weights(model)
        for kind, tensor in optimizer.state()[name].items()
        if not torch.equal(tensor, local(weight, truth(name, kind)))
    ]


def config_in(folder: Path, keep: int = 2, resume: str = "auto") -> Config:
    return Config(run=RunConfig(dir=str(folder)), checkpoint=CheckpointConfig(keep=keep, resume=resume))


def checkpointer(folder: Path, keep: int = 2, resume: str = "auto", model: Toy | None = None, optimizer: AdamW | None = None,
                 mesh: Mesh | None = None, tokenizer: str = "tok", data: str = "data") -> Checkpointer:  # fmt: skip
    model = model or Toy()
    config = config_in(folder, keep, resume)
    return Checkpointer(config, model, optimizer or filled(model), mesh or Mesh.solo(), tokenizer, data)


def quiet(text: str) -> None:
    pass
