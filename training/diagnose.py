"""Names the first bad tensor of a step that came out not finite, by doing the step once more and looking.

Nothing watches ordinary steps: a bad one is repeated, micro-batch by micro-batch and without reduction, with a look at each
module's output and each rank's own gradients. Every rank calls it, because layers communicate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8.activation import Activation
from fp8.weight import Weight
from model.loss import NumValid
from model.router import Router
from parallel.mesh import Axis
from training.data import Batch
from training.process import gather

TRANSIENT = "the step repeated is finite: suspect the hardware"


def first_bad(
    model: nn.Module, weights: Sequence[tuple[str, Weight]], batches: Sequence[Batch], num_valid: NumValid, world: Axis
) -> str:
    """Text like "rank 1: output of layers.3.block in micro-batch 0; ...". Leaves gradients, counts and amax to be discarded."""
    own = _bad_weight(model, weights)
    replayed = _replay(model, weights, batches, num_valid)
    named = [f"rank {rank}: {part}" for rank, part in enumerate(gather(own or replayed, world)) if part]
    return "; ".join(named) or TRANSIENT


def _bad_weight(model: nn.Module, weights: Sequence[tuple[str, Weight]]) -> str | None:
    tensors = {f"weight {name}": w.data for name, w in weights} | {f"scales of {n}": w.scale_inv for n, w in weights}
    tensors |= {f"{n}.expert_bias": m.expert_bias for n, m in model.named_modules() if isinstance(m, Router)}
    return _first_of([(name, _finite(t)) for name, t in tensors.items() if t is not None])


def _finite(t: Tensor) -> Tensor:
    return (t.float() if t.element_size() == 1 else t).isfinite().all()


def _first_of(checks: Sequence[tuple[str, Tensor]]) -> str | None:
    """The first name whose flag is False; reads the device once."""
    if not checks:
        return None
    flags = torch.stack([flag for _, flag in checks]).tolist()
    return next((name for (name, _), fine in zip(checks, flags, strict=True) if not fine), None)


def _replay(model: nn.Module, weights: Sequence[tuple[str, Weight]], batches: Sequence[Batch], num_valid: NumValid) -> str | None:
    checks: list[tuple[str, Tensor]] = []
    with _watching(model, weights, checks):
        for place, batch in enumerate(batches):
            for _, weight in weights:
                weight.clear_grad()
                weight.last_microbatch = True
            start = len(checks)
            b = batch
            model(b.tokens_BS, b.labels_BS, num_valid, b.positions_BS, b.cu_seqlens, b.max_seqlen).total.backward()
            checks[start:] = [(f"{name} in micro-batch {place}", flag) for name, flag in checks[start:]]
    return _first_of(checks)


@contextmanager
def _watching(model: nn.Module, weights: Sequence[tuple[str, Weight]], checks: list[tuple[str, Tensor]]) -> Iterator[None]:
    """Notes each module's output and, instead of reducing it, each gradient as it gets ready."""

    def output(module: nn.Module, args: Any, result: Any, name: str) -> None:
        checks.extend((f"output of {name}", _finite(t)) for t in _tensors(result))

    loose = {w for _, w in weights if w.main_grad is None}  # ZeRO-2 has no room for all of them at a time

    def gradient(weight: Weight) -> None:
        checks.append((f"gradient of {weight.name}", _finite(weight.main_grad)))
        if weight in loose:
            weight.main_grad = None

    modules = [(n, m) for n, m in model.named_modules() if n and not isinstance(m, Weight) and not n.endswith("scales")]
    hooks = [m.register_forward_hook(partial(output, name=n)) for n, m in modules]
    before = [w.on_grad_ready for _, w in weights]
    try:
        for _, weight in weights:
            weight.on_grad_ready = gradient
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for (_, weight), old in zip(weights, before, strict=True):
            weight.on_grad_ready = old


def _tensors(value: Any) -> Iterator[Tensor]:
    """Floating-point tensors of a module's output. A carrier has no storage, so nothing in it counts."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.element_size() > 1:
            yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value) and not isinstance(value, Activation):
        yield from _tensors(list(vars(value).values()))
