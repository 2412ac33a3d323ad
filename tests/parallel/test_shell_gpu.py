"""Owners' rows on a GPU: the optimizer's kernels over shells write what they write over whole weights."""

from __future__ import annotations

import pytest
import torch

from fp8.optimizer import AdamW, states_named
from fp8.recipe import CANDIDATES, recipe_named
from fp8.weight import Weight
from parallel.mesh import Mesh
from parallel.sharded_optimizer import ShardedAdamW, make_reducer
from parallel.shell import Shell
from tests.parallel.layouts import bits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SHAPES = {"matrix": ((640, 256), (0, 128, 512, 640)), "experts": ((5, 256, 128), (0, 1, 5))}


def values(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda()


@pytest.mark.parametrize("states", ["fp32", "lean"])
@pytest.mark.parametrize("recipe", ["block", "bf16"])
@pytest.mark.parametrize("kind", SHAPES)
def test_shells_are_the_whole_weight(kind: str, recipe: str, states: str) -> None:
    """Stochastic rounding included: it is keyed by the place in the whole weight."""
    shape, cuts = SHAPES[kind]
    with torch.device("cuda"):
        whole, cut = (Weight(*shape, recipe=recipe_named(recipe), expert=kind == "experts") for _ in range(2))
    shells = [Shell.of(cut, slice(start, stop)) for start, stop in zip(cuts, cuts[1:], strict=False)]
    optimizers = [AdamW([("w", w)], states=states_named(states), seed=5) for w in (whole, *shells)]
    for step in range(3):
        for optimizer, weight in zip(optimizers, (whole, *shells), strict=True):
            rows = weight.rows if isinstance(weight, Shell) else slice(None)
            if step == 0:
                optimizer.set_master("w", values(shape, 0)[rows])
            weight.add_grad(values(shape, 1 + step)[rows])
            optimizer.step(1e-2)
        assert bits(cut.data) == bits(whole.data)
        assert whole.scale_inv is None or bits(cut.scale_inv) == bits(whole.scale_inv)


@pytest.mark.parametrize("offload", [False, True])
def test_auto_changes_formats_under_planned_launches(offload: bool) -> None:
    """A weight's memory is another one after each change: nothing may be written where it was before."""
    with torch.device("cuda"):
        ours, theirs = (Weight(256, 256, recipe=recipe_named("auto")) for _ in range(2))
    sharded, plain = ShardedAdamW([("w", ours)], Mesh.solo(), offload=offload), AdamW([("w", theirs)])
    reducer = make_reducer([("w", ours)], Mesh.solo(), sharded, zero=1)
    for optimizer in (sharded, plain):
        optimizer.set_master("w", values((256, 256), 0))
    for step, fmt in enumerate([*CANDIDATES, *CANDIDATES]):
        for weight in (ours, theirs):
            weight.choice.copy_(torch.tensor([*[CANDIDATES.index(fmt)] * 3, 1]))
            weight.add_grad(values((256, 256), step))
        reducer.finish()
        sharded.step(1e-2)
        plain.step(1e-2)
        assert ours.recipe == theirs.recipe and bits(ours.data) == bits(theirs.data), fmt
        assert ours.scale_inv is None or bits(ours.scale_inv) == bits(theirs.scale_inv), fmt
