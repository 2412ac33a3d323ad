"""Kept transposes of weights that other ranks own rows of: new values arrive without a step, and a step has several arrivals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fp8.transposed as module
from fp8.linear import linear, quantize_activation
from fp8.quantize import transpose
from fp8.quantized import Quantized
from fp8.recipe import Recipe, recipe_named
from fp8.stash import Stash
from fp8.transposed import keep_transposes, transposed
from fp8.weight import Weight, weights
from parallel.mesh import Mesh, build_mesh
from parallel.sharded_optimizer import ShardedAdamW, make_reducer
from tests.helpers import run_ranks
from tests.parallel.layouts import bits


class Layer(nn.Module):
    """A matrix that both ranks own rows of, one that is a single rank's, and with ep = 2 a stack of experts without replicas."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.w = Weight(384, 128, recipe=recipe)
        self.e = Weight(2, 128, 128, recipe=recipe, expert=True)
        self.small = Weight(128, 128, recipe=recipe)
        for name in ("w", "small", "e"):
            getattr(self, name).name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(quantize_activation(x, self.w, Stash()), self.w)


class Trainee:
    def __init__(self, mesh: Mesh, recipe: Recipe, zero: int, lazy: bool, kept: bool) -> None:
        outer = nn.Module()
        outer.layer = Layer(recipe)
        self.layer, named = outer.layer, list(weights(outer))
        self.optimizer = ShardedAdamW(named, mesh)
        if lazy:
            self.optimizer.shards.overlap(outer)
        if kept:
            keep_transposes(w for _, w in named)
        self.reducer = make_reducer(named, mesh, self.optimizer, "fp32", zero=zero)
        for place, (name, weight) in enumerate(named):
            shape, seed = weight.data.shape, torch.Generator().manual_seed(place)
            self.optimizer.set_master(name, torch.randn(shape, generator=seed))

    def micro_batch(self, seed: int, last: bool = True) -> list[int]:
        """Digests of dx and of the transposes. The same rows on both ranks."""
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(128, 128, generator=draw).bfloat16().requires_grad_()
        for _, weight in weights(self.layer):
            weight.last_microbatch = last
        self.layer(x).backward(torch.randn(128, 384, generator=draw).bfloat16())
        for weight in (self.layer.small, self.layer.e):
            weight.add_grad(torch.randn(weight.data.shape, generator=draw))
        return [bits(x.grad), *self.turned()]

    def turned(self) -> list[int]:
        """Digests of the transposes."""
        return [bits(t) for w in self.layer.children() for t in (transposed(w).data, transposed(w).scale_inv)]

    def step(self, seed: int) -> list[int]:
        found = self.micro_batch(seed)
        self.reducer.finish()
        self.optimizer.step(0.3)
        return found

    def masters(self) -> dict[str, torch.Tensor]:
        return {name: state["master"].clone() for name, state in self.optimizer.state().items()}

    def restore(self, masters: dict[str, torch.Tensor]) -> None:
        """As after a checkpoint was read: states are written, then weights are made from them, and nothing else says so."""
        for name, state in self.optimizer.state().items():
            state["master"].copy_(masters[name])
        for name in self.optimizer.all_weights:
            self.optimizer.refresh(name)
        self.optimizer.publish()


def back_again(rank: int, size: int, recipe: str, ep: int) -> dict[tuple[int, bool], list[bool]]:
    """Per (ZeRO stage, rows arrive under forward): dx and transposes after a rollback are a fresh start's; each transpose was
    another before; new values by hand are seen too.
    """
    mesh, found = build_mesh(1, ep), {}
    for zero, lazy in ((1, False), (2, True)):
        one, fresh = (Trainee(mesh, recipe_named(recipe), zero, lazy, kept) for kept in (True, False))
        one.step(1)
        saved = one.masters()
        one.step(2)
        one.optimizer.settle()
        bad = one.turned()  # a step that is undone has asked for them
        one.restore(saved)
        fresh.restore(saved)
        after, want = one.micro_batch(3), fresh.micro_batch(3)
        one.optimizer.set_master("layer.w", torch.ones(384, 128))
        one.optimizer.publish()
        one.optimizer.settle()
        given = transposed(one.layer.w).dequantize()
        moved = [a != b for a, b in zip(bad, want[1:], strict=True)][::2]  # bytes; scales may be the same
        found[zero, lazy] = [after == want, *moved, bool((given - 1).abs().max() < 1e-2)]
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("recipe", ["block", "tensorwise_current"])
def test_a_rollback_turns_the_weights_it_brings_back(recipe: str, ep: int) -> None:
    for seen in run_ranks(2, back_again, recipe, ep):
        assert seen == {(1, False): [True] * 5, (2, True): [True] * 5}


def turns(rank: int, size: int) -> list[Any]:
    """How often the matrix has been turned after each of 3 steps of 2 micro-batches under ZeRO-2."""
    counts, seen = [], 0
    trainee = Trainee(build_mesh(), recipe_named("block"), 2, True, True)

    def counted(q: Quantized, out: Quantized | None = None) -> Quantized:
        nonlocal seen
        seen += q.data.data_ptr() == trainee.layer.w.data.data_ptr()
        return transpose(q, out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "transpose", counted)
        for step in range(3):
            trainee.micro_batch(2 * step, last=True)
            before = [w.version for w in trainee.layer.children()]
            trainee.reducer.finish(last=False)
            assert [w.version for w in trainee.layer.children()] == before
            assert not trainee.layer.w.has_grad
            trainee.step(2 * step + 1)
            counts.append(seen)
    return counts


@pytest.mark.distributed
def test_a_gradient_that_leaves_between_micro_batches_is_no_new_step() -> None:
    """ZeRO-2 clears gradients after each micro-batch; the values stay, and so do the transposes."""
    assert run_ranks(2, turns) == [[1, 2, 3]] * 2
