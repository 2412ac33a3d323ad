"""Kept transposes: the same bytes as those made for each use, never those of other values, and made once a step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fp8.transposed as module
from fp8.linear import linear, quantize_activation
from fp8.optimizer import AdamW, States
from fp8.quantize import transpose
from fp8.quantized import Quantized
from fp8.recipe import RECIPES, Recipe
from fp8.stash import Stash
from fp8.transposed import keep_transposes, refresh_transposes, transposed
from fp8.weight import Weight

RECIPE_NAMES = [name for name in RECIPES if name != "auto"]


def weight_of(recipe: Recipe, kept: bool, seed: int = 0) -> Weight:
    weight = Weight(256, 128, recipe=recipe)
    weight.name = "w"
    weight.set_(torch.randn(256, 128, generator=torch.Generator().manual_seed(seed)))
    if kept:
        keep_transposes([weight])
    return weight


def micro_batch(weight: Weight, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx, what has been added up of dw)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(128, 128, generator=generator).to(torch.bfloat16).requires_grad_()
    y = linear(quantize_activation(x, weight, Stash()), weight)
    y.backward(torch.randn(128, 256, generator=generator).to(y.dtype))
    return x.grad, weight.main_grad.clone()


def same(a: Quantized, b: Quantized) -> bool:
    """Bitwise, scales included."""
    pairs = [(a.data, b.data)] if a.scale_inv is None else [(a.data, b.data), (a.scale_inv, b.scale_inv)]
    return all(torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)) for x, y in pairs)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[Quantized]:
    """Every weight that is turned from now on."""
    seen: list[Quantized] = []

    def counted(q: Quantized, out: Quantized | None = None) -> Quantized:
        seen.append(q)
        return transpose(q, out)

    monkeypatch.setattr(module, "transpose", counted)
    return seen


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_gradients_are_bitwise_those_without(name: str) -> None:
    plain, kept = (weight_of(RECIPES[name](), keep) for keep in (False, True))
    for step in range(3):
        for part in range(2):
            for a, b in zip(micro_batch(plain, 10 * step + part), micro_batch(kept, 10 * step + part), strict=True):
                assert torch.equal(a, b)
        for weight in (plain, kept):
            weight.set_(torch.randn(256, 128, generator=torch.Generator().manual_seed(step + 1)))
            weight.clear_grad()


def test_one_turn_an_optimizer_step(turns: list[Quantized]) -> None:
    weight = weight_of(Recipe.block(), True)
    optimizer = AdamW([("w", weight)], states=States())
    optimizer.set_master("w", torch.randn(256, 128))
    for step in range(3):
        for part in range(4):
            micro_batch(weight, part)
        assert len(turns) == step + 1, "one before the first update, one after each"
        before = transposed(weight).data.view(torch.uint8).clone()
        address = transposed(weight).data.data_ptr()
        optimizer.step(0.1)
        assert same(transposed(weight), transpose(weight.q)), "of the weights before the update"
        assert not torch.equal(transposed(weight).data.view(torch.uint8), before), "the update changed nothing"
        assert transposed(weight).data.data_ptr() == address, "a CUDA graph would read the old place"


def by_set(weight: Weight, optimizer: AdamW) -> None:
    weight.set_(torch.randn(256, 128) + 1)


def by_hand(weight: Weight, optimizer: AdamW) -> None:
    weight.data.copy_(torch.randn(256, 128).to(weight.data.dtype))
    weight.note_written()


def by_step(weight: Weight, optimizer: AdamW) -> None:
    weight.add_grad(torch.randn(256, 128))
    optimizer.step(0.5)


def by_set_master(weight: Weight, optimizer: AdamW) -> None:
    optimizer.set_master("w", torch.randn(256, 128))


def by_load(weight: Weight, optimizer: AdamW) -> None:
    """A checkpoint's reader fills the stored states (an FP32 weight is one), then weights are made from them."""
    optimizer.state()["w"]["master"].copy_(torch.randn(256, 128))
    optimizer.refresh("w")


@pytest.mark.parametrize("name", ["block", "tensorwise_current", "bf16", "fp32"])
@pytest.mark.parametrize("write", [by_set, by_hand, by_step, by_set_master, by_load])
def test_new_values_are_seen(write: Callable[[Weight, AdamW], None], name: str) -> None:
    """Whoever writes the bytes, also where an FP32 weight is its own master and nothing quantises it."""
    weight = weight_of(RECIPES[name](), True)
    optimizer = AdamW([("w", weight)])
    optimizer.set_master("w", torch.randn(256, 128))
    old, version = transposed(weight).data.contiguous().view(torch.uint8).clone(), weight.version
    write(weight, optimizer)
    refresh_transposes([weight])
    assert weight.version != version
    assert same(transposed(weight), transpose(weight.q))
    assert not torch.equal(transposed(weight).data.contiguous().view(torch.uint8), old)


def test_what_writes_no_value_leaves_transposes_alone(turns: list[Quantized]) -> None:
    """Gradients come and go: in micro-batches, between those of ZeRO-2, and with a step that is refused."""
    weight = weight_of(Recipe.block(), True)
    micro_batch(weight, 0)
    version = weight.version
    weight.clear_grad()
    micro_batch(weight, 1)
    assert len(turns) == 1 and weight.version == version


def test_refresh_turns_what_was_asked_for_and_is_old(turns: list[Quantized]) -> None:
    used, unused = weight_of(Recipe.block(), True), weight_of(Recipe.block(), True)
    transposed(used)
    used.note_written()
    for _ in range(2):
        refresh_transposes([used, unused, weight_of(Recipe.block(), False)])
    assert len(turns) == 2, "the first use and one refresh"


def test_another_format(turns: list[Quantized]) -> None:
    """`auto` changes a weight's format between steps."""
    weight = weight_of(Recipe.block(), True)
    transposed(weight)
    for recipe in (Recipe.tensorwise_current(), Recipe.bf16(), Recipe.block()):
        weight.use(recipe)
        weight.set_(torch.randn(256, 128))
        assert same(transposed(weight), transpose(weight.q)), recipe.name
