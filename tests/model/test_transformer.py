"""The whole model: gradients reach what they must, in the right amount, and the FP8 recipe stays near FP32."""

from __future__ import annotations

import pytest
import torch

from fp8.recipe import Recipe
from fp8.weight import weights
from model.loss import NumValid, count_valid
from model.transformer import Transformer, initial_values
from tests.model.tiny import batch, build, grads, optimizer_of, relative_error


def step(model: Transformer, tokens: torch.Tensor, labels: torch.Tensor, parts: int = 1) -> float:
    """Accumulates the gradient of one global batch cut into `parts` micro-batches; returns the loss."""
    total = count_valid(tokens, labels)
    loss = 0.0
    for t, y in zip(tokens.chunk(parts), labels.chunk(parts), strict=True):
        losses = model(t, y, total)
        losses.total.backward()
        loss += losses.total.item()
    return loss


@pytest.mark.parametrize("parts", [2, 4])
def test_accumulation_equals_one_batch(parts: int) -> None:
    tokens, labels = batch(rows=4)
    labels[0, 5:] = -100  # micro-batches with unequal counts of valid tokens: each token must weigh the same
    whole, cut = build(Recipe.fp32()), build(Recipe.fp32())
    assert step(whole, tokens, labels) == pytest.approx(step(cut, tokens, labels, parts), rel=1e-6)
    for name, grad in grads(whole).items():
        assert relative_error(grads(cut)[name], grad) < 1e-5, name


@pytest.mark.parametrize("parts", [1, 4])
def test_head_gradient_with_mtp_is_the_sum_of_both_uses(parts: int) -> None:
    tokens, labels = batch(rows=4)
    both, trunk, mtp = (build(Recipe.fp32(), mtp_loss_weight=w, router_z_loss_weight=0.0) for w in (0.3, 0.0, 0.3))
    step(both, tokens, labels, parts)
    step(trunk, tokens, labels, parts)
    valid = count_valid(tokens, labels)
    for t, y in zip(tokens.chunk(parts), labels.chunk(parts), strict=True):  # CE off: its count is infinite
        mtp(t, y, NumValid(torch.tensor(float("inf")), valid.mtp, valid.tokens)).total.backward()
    for name in ("head", "embedding"):
        want = grads(trunk)[name] + grads(mtp)[name]
        assert grads(mtp)[name].norm() > 0.01 * want.norm(), "the MTP use contributes nothing: the test would be empty"
        assert relative_error(grads(both)[name], want) < 1e-5, name


def test_grad_ready_fires_once_after_the_last_use() -> None:
    model, fired = build(Recipe.fp32()), []
    for _, weight in weights(model):
        weight.on_grad_ready = lambda w: fired.append((w.name, w.main_grad.clone()))
    tokens, labels = batch(rows=4)
    for _, weight in weights(model):
        weight.last_microbatch = False
    valid = count_valid(tokens, labels)
    model(tokens[:2], labels[:2], valid).total.backward()
    assert not fired
    for _, weight in weights(model):
        weight.last_microbatch = True
    model(tokens[2:], labels[2:], valid).total.backward()
    assert sorted(name for name, _ in fired) == sorted(name for name, _ in weights(model))
    final = grads(model)
    assert all(torch.equal(grad, final[name]) for name, grad in fired), "a gradient grew after it was reported ready"


def test_frozen_embedding_still_trains_the_layers() -> None:
    model, free = build(Recipe.fp32()), build(Recipe.fp32())
    model.embedding.anchor.requires_grad_(False)
    tokens, labels = batch()
    step(model, tokens, labels)
    step(free, tokens, labels)
    assert model.embedding.main_grad is None
    for name, grad in grads(free).items():
        if name != "embedding":
            assert torch.equal(dict(weights(model))[name].main_grad, grad), name


def test_block_recipe_stays_near_fp32() -> None:
    """Each E4M3 product carries about 3.7 % relative error; a gradient passes a dozen and the router's rare flips."""
    tokens, labels = batch(rows=4)
    exact, fp8 = build(Recipe.fp32()), build(Recipe.block())
    assert step(fp8, tokens, labels) == pytest.approx(step(exact, tokens, labels), rel=1e-2)
    for name in ("head", "layers.1.attention.out", "mtp.eh_proj", "layers.0.block.mlp.down"):
        assert relative_error(grads(fp8)[name], grads(exact)[name]) < 0.3, name


@pytest.mark.parametrize("recipe, bound", [("fp32", 0.01), ("block", 0.1)])
def test_moving_along_the_gradient_changes_the_loss_as_it_says(recipe: str, bound: float) -> None:
    """(loss(w + lr g) - loss(w - lr g)) / 2 lr = |g|^2: a wrong scale in any gradient shows here, where Adam would hide it."""
    tokens, labels = batch()
    model, exact = build(getattr(Recipe, recipe)()), build(Recipe.fp32())
    step(model, tokens, labels)
    direction = grads(model)
    masters = {name: weight.q.dequantize() for name, weight in weights(model)}
    lr = 5e-4 / sum(g.double().square().sum() for g in direction.values()).item()
    losses = []
    for sign in (1, -1):
        for name, weight in weights(exact):
            weight.set_(masters[name] + sign * lr * direction[name])
        losses.append(exact(tokens, labels, count_valid(tokens, labels)).total.item())
    assert (losses[0] - losses[1]) / (2 * 5e-4) == pytest.approx(1.0, abs=bound)


def test_stages_are_bitwise_equal_and_keep_less() -> None:
    tokens, labels = batch()
    kept = []
    first = None
    for stage in (0, 1, 2):
        model = build(Recipe.block(), stage=stage)
        losses = model(tokens, labels, count_valid(tokens, labels))
        kept.append(model.stash.account.total)
        losses.total.backward()
        assert model.stash.account.total == 0, "backward left something in the stash"
        first = first or grads(model)
        for name, grad in grads(model).items():
            assert torch.equal(grad, first[name]), (stage, name)
    assert kept[0] > kept[1] > kept[2] > 0


def test_second_backward_raises() -> None:
    model = build(Recipe.block())
    tokens, labels = batch()
    total = model(tokens, labels, count_valid(tokens, labels)).total
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="freed at its last use"):
        total.backward()


def test_evaluation_changes_nothing() -> None:
    model = build(Recipe.block())
    tokens, labels = batch()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    rng = torch.get_rng_state()
    with torch.no_grad():
        model.eval()(tokens, labels, count_valid(tokens, labels))
        model.logits(tokens)
    after = model.state_dict()
    assert torch.equal(rng, torch.get_rng_state())
    for name, value in before.items():
        assert torch.equal(value.view(torch.uint8), after[name].view(torch.uint8)), name
    assert model.stash.account.total == 0 and all(w.main_grad is None for _, w in weights(model))


def test_two_runs_are_bitwise_equal() -> None:
    results = []
    for _ in range(2):
        model = build(Recipe.block())
        optimizer = optimizer_of(model)
        tokens, labels = batch()
        for _ in range(3):
            loss = step(model, tokens, labels)
            optimizer.step(1e-2)
        results.append((loss, {n: w.data.clone() for n, w in weights(model)}))
    assert results[0][0] == results[1][0]
    for name, data in results[0][1].items():
        assert torch.equal(data.view(torch.uint8), results[1][1][name].view(torch.uint8)), name


def test_initial_deviations_are_those_of_the_configuration() -> None:
    model = build(Recipe.fp32(), initializer_range=0.05, embedding_init_std=0.7)
    spread = {name: value.std().item() for name, _, value in initial_values(model, 0)}
    assert spread["embedding"] == pytest.approx(0.7, rel=0.02)
    assert spread["head"] == pytest.approx(0.05, rel=0.02) == spread["layers.0.attention.out"]
