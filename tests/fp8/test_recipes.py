"""Recipes as users name them, layers built with them, and whole models trained in each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8.config import Fp8Config
from fp8.linear import linear, linear_ref, quantize_activation
from fp8.optimizer import AdamW
from fp8.recipe import (
    ALIASES,
    RECIPES,
    TENSORWISE,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Recipe,
    Spec,
    recipe_named,
)
from fp8.scaling import update_scales
from fp8.stash import Stash
from fp8.weight import Weight, weights
from model.config import ModelConfig
from model.loss import Losses, count_valid
from model.policy import override_problems, stage_of, stage_problems
from model.transformer import Transformer, initial_values

TINY = ModelConfig(
    vocab_size=256, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=64,
    intermediate_size=256, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, n_group=2, topk_group=1,
    num_nextn_predict_layers=1, initializer_range=0.02, loss_chunk=128,
)  # fmt: skip
FP8 = [name for name in RECIPES if name not in ("bf16", "fp32")]
# rms rounding error of E4M3 is 2.65 %, of E5M2 twice that; a product has sqrt(a^2 + b^2): E4M3 . E4M3 3.7 %, E4M3 . E5M2 5.9 %
E4M3_PRODUCT, HYBRID_PRODUCT, SLACK = 0.0375, 0.0593, 1.25
HALF_STEP = {"e4m3": 1 / 16, "e5m2": 1 / 8, "bf16": 1 / 256}


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 256, (2, 65), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def build(recipe: Recipe | str, config: ModelConfig = TINY) -> tuple[Transformer, AdamW]:
    recipe = recipe_named(recipe) if isinstance(recipe, str) else recipe
    model = Transformer(config, recipe, dtype=torch.float32).train()
    optimizer = AdamW(weights(model), weight_decay=0.0)
    for name, _, value in initial_values(model, 0):
        optimizer.set_master(name, value)
    return model, optimizer


def backward(model: Transformer, seed: int = 1) -> Losses:
    losses = model(*batch(seed), count_valid(*batch(seed)))
    losses.total.backward()
    return losses


# ---------------------------------------------------------------- names and formats


def test_names_of_fp8_autocast_build_the_same_recipes() -> None:
    assert DelayedScaling() == recipe_named("DelayedScaling") == Recipe.tensorwise_delayed()
    assert Float8CurrentScaling() == recipe_named("Float8CurrentScaling") == Recipe.tensorwise_current()
    assert Float8BlockScaling() == recipe_named("Float8BlockScaling") == Recipe.block()
    assert MXFP8BlockScaling() == recipe_named("MXFP8BlockScaling") == Recipe.mx()
    spec = DelayedScaling(margin=1, amax_history_len=16, amax_compute_algo="most_recent", fp8_format="E4M3").gradient
    assert (spec.fmt, spec.history, spec.algo, spec.margin) == ("e4m3", 16, "most_recent", 1)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match="known: block, .*DelayedScaling"):
        recipe_named("delayd")
    with pytest.raises(ValueError, match="hybrid"):
        Recipe.block("e3m4")


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "hybrid"])
@pytest.mark.parametrize("name", [name for name in FP8 if name != "auto"])
def test_another_format_is_the_recipe_made_with_it(name: str, fmt: str) -> None:
    assert RECIPES[name]().with_format(fmt) == RECIPES[name](fmt=fmt)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_frozen_and_hashable(name: str) -> None:
    recipe = recipe_named(name)
    with pytest.raises(AttributeError):
        recipe.name = "other"
    assert hash(recipe) == hash(recipe_named(name))


def test_default_formats() -> None:
    for name in ("tensorwise_current", "tensorwise_delayed", "static"):
        recipe = recipe_named(name)
        assert (recipe.activation.fmt, recipe.weight.fmt, recipe.gradient.fmt) == ("e4m3", "e4m3", "e5m2")
    for name in ("block", "mx"):
        recipe = recipe_named(name)
        assert {recipe.activation.fmt, recipe.weight.fmt, recipe.gradient.fmt, recipe.wire.fmt} == {"e4m3"}


def test_formats_per_role_are_config() -> None:
    recipe = Fp8Config(recipe="block", format="hybrid", wire="e5m2").build()
    assert (recipe.activation.fmt, recipe.gradient.fmt, recipe.wire.fmt) == ("e4m3", "e5m2", "e5m2")
    recipe = Fp8Config(recipe="tensorwise_delayed", gradient="e4m3", amax_history=8, amax_algo="most_recent", margin=2).build()
    assert recipe.gradient == Spec("e4m3", TENSORWISE, "delayed", 8, "most_recent", 2)
    assert recipe.weight.scaling == "current" and recipe.weight.margin == 2


@pytest.mark.parametrize("spec", [("e4m3", None, "none"), ("bf16", (1, 128), "block"), ("e4m3", TENSORWISE, "block"),
                                  ("e4m3", (1, 128), "current"), ("e9", None, "none")])  # fmt: skip
def test_contradictory_specs_are_refused(spec: tuple) -> None:
    with pytest.raises(AssertionError):
        Spec(*spec)


def test_config_reports_every_mistake() -> None:
    config = Fp8Config(recipe="blok", overrides={"head": "bf61"}, amax_history=0)
    assert len(config.problems()) == 3
    assert Fp8Config(overrides={"head": "fp32"}).problems() and not Fp8Config(overrides={"head": "bf16"}).problems()
    for alias in ALIASES:
        assert not Fp8Config(recipe=alias).problems()


# ---------------------------------------------------------------- one layer, without the trainer


@pytest.mark.parametrize("name", RECIPES)
def test_a_forker_builds_one_layer(name: str) -> None:
    """Output, input gradient and weight gradient against float64, bounds from the formats."""
    recipe, generator = recipe_named(name), torch.Generator().manual_seed(0)
    x = torch.randn(200, 256, generator=generator, requires_grad=True)
    w, dy = 0.05 * torch.randn(128, 256, generator=generator), 1e-4 * torch.randn(200, 128, generator=generator)
    weight = Weight(128, 256, recipe=recipe, init_std=0.05)
    weight.set_(w)
    y = linear(quantize_activation(x, weight, Stash()), weight)
    y.backward(dy)
    x64 = x.detach().double().requires_grad_()
    w64 = w.double().requires_grad_()
    y64 = linear_ref(x64, w64)
    y64.backward(dy.double())
    forward = {"fp32": 1e-6, "bf16": 2**-8, "auto": 2**-8}.get(name, E4M3_PRODUCT * SLACK)
    back = HYBRID_PRODUCT * SLACK if recipe.gradient.fmt == "e5m2" else forward
    for got, want, bound in ((y, y64, forward), (x.grad, x64.grad, back), (weight.main_grad, w64.grad, back)):
        assert (got.double() - want).norm() <= bound * want.norm()


# ---------------------------------------------------------------- whole models


@pytest.mark.parametrize("name", FP8)
def test_first_gradients_are_close_to_fp32(name: str) -> None:
    """Cosine of each matrix's gradient. Router choices may flip on rounding: experts are judged together, loosely."""
    exact, _ = build("fp32")
    model, _ = build(name)
    loss, want = backward(model).total.item(), backward(exact).total.item()
    assert abs(loss / want - 1) < 1e-3
    grads = {n: w.main_grad for n, w in weights(exact)}
    for n, w in weights(model):
        got, want = w.main_grad.flatten(), grads[n].flatten()
        cosine = torch.dot(got, want) / (got.norm() * want.norm())
        assert cosine > (0.95 if w.data.dim() > 1 and "block" not in n else 0.9), (n, cosine)


@pytest.mark.parametrize("name", FP8)
def test_one_sgd_step_moves_weights_as_fp32_does(name: str) -> None:
    """SGD shows the size of gradients, which Adam would hide.

    At the start all labels' dlogits are nearly the same number, so its rounding error does not average out: half a step, 1/16 for
    E4M3 and 1/8 for E5M2, is the bound.
    """
    exact, _ = build("fp32")
    model, _ = build(name)
    backward(exact), backward(model)
    for (n, got), (_, want) in zip(weights(model), weights(exact), strict=True):
        if "expert" not in n and "router" not in n:
            ratio = got.main_grad.norm() / want.main_grad.norm()
            assert abs(ratio - 1) < HALF_STEP[model.recipe.gradient.fmt], (n, ratio)


@pytest.mark.parametrize("name", FP8)
def test_loss_falls_like_bf16s(name: str) -> None:
    finals = {}
    for recipe in ("bf16", name):
        model, optimizer = build(recipe)
        for _ in range(8):
            loss = backward(model)
            update_scales(model)
            optimizer.step(3e-3)
        finals[recipe] = (loss.ce_sum / loss.num_ce).item()
    assert finals["bf16"] < 4.8 and finals[name] < finals["bf16"] + 0.2, finals


@pytest.mark.parametrize("name", ["tensorwise_delayed", "static", "block", "mx"])
def test_evaluation_and_generation_change_nothing(name: str) -> None:
    model, optimizer = build(name)
    backward(model)
    update_scales(model)
    optimizer.step(1e-3)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    rng = torch.get_rng_state()
    model.eval()
    with torch.no_grad():
        model(*batch(3), count_valid(*batch(3)))
        model.logits(batch(4)[0])
    model.train()
    assert torch.equal(torch.get_rng_state(), rng)
    for key, value in model.state_dict().items():
        assert torch.equal(value.reshape(-1).view(torch.uint8), before[key].reshape(-1).view(torch.uint8)), key


@pytest.mark.parametrize("name", ["block", "tensorwise_delayed"])
def test_same_seed_twice_is_bitwise_the_same(name: str) -> None:
    results = []
    for _ in range(2):
        model, optimizer = build(name)
        for _ in range(2):
            losses = backward(model)
            update_scales(model)
            optimizer.step(1e-3)
        results.append((losses.total, {n: w.data for n, w in weights(model)}))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(a.view(torch.uint8), results[1][1][n].view(torch.uint8)) for n, a in results[0][1].items())


@pytest.mark.parametrize("name", ["tensorwise_current", "block", "mx"])
def test_two_micro_batches_add_up(name: str) -> None:
    """Each micro-batch alone, and both into the same main_grad."""
    parts = []
    for seed in (1, 2):
        model, _ = build(name)
        backward(model, seed)
        parts.append({n: w.main_grad.clone() for n, w in weights(model)})
    both, _ = build(name)
    backward(both, 1)
    backward(both, 2)
    for n, w in weights(both):
        torch.testing.assert_close(w.main_grad, parts[0][n] + parts[1][n], rtol=1e-5, atol=1e-6)


def test_zero_gradient_leaves_everything_finite() -> None:
    """A batch without a label: gradients are zero, in every recipe."""
    tokens, labels = batch()
    for name in FP8:
        model, _ = build(name)
        model(tokens, torch.full_like(labels, -100), count_valid(tokens, torch.full_like(labels, -100))).total.backward()
        for n, w in weights(model):
            assert w.main_grad is None or w.main_grad.isfinite().all(), (name, n)
        update_scales(model)


# ---------------------------------------------------------------- overrides and stages by name


def test_overrides_are_resolved_at_construction() -> None:
    recipe = Fp8Config(overrides={"head": "bf16", "layers.0": "bf16", "layers.-1.attention.out": "mx"}).build()
    model, _ = build(recipe)
    kinds = {n: w.recipe.name for n, w in weights(model) if w.data.dim() > 1 and "router" not in n and n != "embedding"}
    assert kinds["head"] == "bf16" and kinds["layers.0.block.mlp.down"] == "bf16" and kinds["layers.1.attention.qkv"] == "block"
    assert kinds["layers.1.attention.out"] == "mx" and kinds["mtp.eh_proj"] == "block"
    assert model.head.data.dtype == torch.bfloat16 and not model.head.recipe.overrides
    assert backward(model).total.isfinite()


@pytest.mark.parametrize("name", ["headd", "layers.7", "layers.0.norm", "embedding", "layer"])
def test_override_of_what_does_not_exist_is_refused(name: str) -> None:
    recipe = Fp8Config(overrides={name: "bf16"}).build()
    with pytest.raises(ValueError, match=name):
        build(recipe)
    assert override_problems(recipe, TINY) and not override_problems(Fp8Config(overrides={"layers.-1": "bf16"}).build(), TINY)


def test_prefix_is_a_whole_component_and_the_longest_wins() -> None:
    recipe = Fp8Config(overrides={"layers.1": "bf16", "layers.1.attention": "mx"}).build()
    assert recipe.at("layers.1.attention.qkv").name == "mx" and recipe.at("layers.1.block.mlp.down").name == "bf16"
    assert recipe.at("layers.11.attention.qkv").name == "block"


def test_stages_by_name_class_and_default() -> None:
    stages = {"default": 1, "moe": 3, "layers.-1": 4}
    assert [stage_of(stages, f"layers.{i}", k, 3) for i, k in enumerate(("dense", "moe", "moe"))] == [1, 3, 4]
    assert stage_of(2, "mtp", "mtp", 3) == 2 and stage_of({}, "mtp", "mtp", 3) == 0
    assert stage_problems({"moee": 1, "dense": 7}, TINY) and not stage_problems(stages, TINY)
