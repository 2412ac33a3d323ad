"""One weight with its optimizer, for the tests of optimizer states."""

import torch

from fp8.optimizer import AdamW, States
from fp8.recipe import Recipe
from fp8.weight import Weight


def one(value: torch.Tensor, states: States, recipe: Recipe | None = None, **options) -> tuple[Weight, AdamW]:
    weight = Weight(*value.shape, recipe=recipe or Recipe.block())
    optimizer = AdamW([("w", weight)], states=states, **options)
    optimizer.set_master("w", value)
    return weight, optimizer


def step_with(weight: Weight, optimizer: AdamW, grad: torch.Tensor, lr: float = 1e-3, scale: float = 1.0) -> None:
    weight.add_grad(grad)
    optimizer.step(lr, scale)


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    return t.detach().clone().contiguous().view(torch.uint8)


def snapshot(weight: Weight, optimizer: AdamW) -> dict[str, torch.Tensor]:
    return {"data": as_bytes(weight.data)} | {k: as_bytes(t) for k, t in optimizer.state()["w"].items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
