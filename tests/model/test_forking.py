"""docs/forking.md, run as it stands: a block of a forker's own and a changed recipe train without the trainer."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fp8 import hardware
from fp8.config import Fp8Config
from fp8.hardware import Machine
from fp8.optimizer import AdamW
from fp8.recipe import RECIPES, Recipe, Spec
from fp8.stash import Stash
from fp8.weight import weights
from model import transformer
from model.loss import NumValid, count_valid
from model.transformer import initial_values
from tests.model.tiny import batch, build, optimizer_of
from tools.hf_import import global_shapes
from training.errors import UserError

PAGE = (Path(__file__).parents[2] / "docs" / "forking.md").read_text()


@pytest.fixture(scope="module")
def page() -> dict[str, object]:
    """Names that the page's code blocks define."""
    names: dict[str, object] = {"__name__": "forking"}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "docs/forking.md", "exec"), names)  # the page is ours; running it is the test
    return names


@pytest.mark.parametrize("recipe", ["block", "wide_gradients", "bf16"])
def test_the_block_of_the_page_learns(page: dict[str, object], recipe: str) -> None:
    chosen = page["wide_gradients"]() if recipe == "wide_gradients" else getattr(Recipe, recipe)()
    block = page["SquaredReluMLP"](128, 256, chosen, Stash())
    optimizer = AdamW(weights(block), weight_decay=0.0)
    for name, _, value in initial_values(block, seed=0):
        optimizer.set_master(name, 2 * value)
    gen = torch.Generator().manual_seed(0)
    x, target = torch.randn(64, 128, generator=gen), torch.randn(64, 128, generator=gen)
    losses = []
    for _ in range(30):
        loss = (block(x) - target).square().mean()
        loss.backward()
        optimizer.step(lr=1e-2)
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0], losses


def test_the_block_of_the_page_trains_inside_the_model(page: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer, "DenseBlock", page["SquaredReluBlock"])
    model = build(Recipe.block(), num_nextn_predict_layers=0)
    assert isinstance(model.layers[0].block, page["SquaredReluBlock"])
    optimizer = optimizer_of(model)
    tokens, labels = batch()
    losses = []
    for _ in range(8):
        result = model(tokens, labels, count_valid(tokens, labels))
        result.total.backward()
        optimizer.step(lr=1e-2)
        losses.append(result.total.item())
    assert losses[-1] < 0.8 * losses[0], losses
    assert "layers.0.block.mlp.up" in dict(weights(model))
    with pytest.raises(UserError, match=r"BailingMoeV2, has no weight for layers\.0\.block\.mlp\.up.*layer of your own"):
        global_shapes(model.config)  # where the export of such a model ends


def test_the_changed_recipe_uses_e5m2_for_gradients_only(page: dict[str, object]) -> None:
    recipe = page["wide_gradients"]()
    assert recipe.gradient.dtype == torch.float8_e5m2 and recipe.activation.dtype == torch.float8_e4m3fn


def test_a_recipe_named_in_a_config_needs_a_row_of_the_matrix(page: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "wide_gradients", page["wide_gradients"])
    config, h200 = Fp8Config(recipe="wide_gradients"), Machine((9, 0), (12, 9))
    assert config.problems() == [] and config.admit(Machine(None)) == ""
    with pytest.raises(ValueError, match="MATRIX in fp8/hardware.py has no row"):
        config.admit(h200)
    assert replace(config, emulate=True).admit(h200) == "[emulated wide_gradients] "
    monkeypatch.setitem(hardware.MATRIX, "wide_gradients", hardware._BLOCK)
    assert config.admit(h200) == ""
    built = replace(config, format="e4m3", activation="e5m2").build()
    assert built == replace(Recipe.block(), name="wide_gradients", activation=Spec("e5m2", (1, 128), "block"))


def test_the_extra_loss_is_independent_of_micro_batching(page: dict[str, object]) -> None:
    h = torch.randn(8, 16)
    valid = NumValid(*(torch.tensor(8),) * 3)
    whole = page["logit_free_penalty"](h, valid)
    parts = sum(page["logit_free_penalty"](part, valid) for part in h.chunk(4))
    torch.testing.assert_close(whole, parts)
