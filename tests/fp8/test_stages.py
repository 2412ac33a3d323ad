"""Activation stages: bitwise the same training, fewer bytes kept, each tensor freed at its last use."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from fp8.activation import Activation
from fp8.linear import linear, quantize_activation
from fp8.optimizer import AdamW
from fp8.recipe import Recipe, recipe_named
from fp8.recompute import recompute, recompute_from
from fp8.rms_norm import rms_norm_quantize
from fp8.scaling import update_scales
from fp8.stash import Stash
from fp8.weight import Weight, weights
from model.config import ModelConfig
from model.loss import count_valid
from model.mlp import MLP
from model.router import routers
from model.transformer import Transformer, initial_values
from parallel.mesh import Axis
from tools.bench_memory import Account, build, measure, sample_tokens
from tools.memory_account import LiveBytes

TINY = ModelConfig(
    vocab_size=256, hidden_size=128, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    intermediate_size=256, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, n_group=2, topk_group=1,
    num_nextn_predict_layers=1, initializer_range=0.02, loss_chunk=128,
)  # fmt: skip
STAGES = (0, 1, 2, 3, 4)
CPU = torch.device("cpu")


def train(stage: object, recipe: Recipe | str, steps: int = 2) -> dict[str, torch.Tensor]:
    """Everything that two steps leave behind: losses, gradients, weights, scales, counts."""
    recipe = recipe_named(recipe) if isinstance(recipe, str) else recipe
    model = Transformer(TINY, recipe, dtype=torch.float32, stage=stage).train()
    optimizer = AdamW(weights(model), weight_decay=0.0)
    for name, _, value in initial_values(model, 0):
        optimizer.set_master(name, value)
    found = {}
    for step in range(steps):
        tokens, labels = sample_tokens(TINY, 2, 64, CPU)
        losses = model(tokens, labels, count_valid(tokens, labels))
        losses.total.backward()
        found[f"loss.{step}"] = losses.total.detach()
        found |= {f"grad.{step}.{n}": w.main_grad.clone() for n, w in weights(model)}
        found |= {f"counts.{n}": r.counts.clone() for n, r in routers(model)}
        update_scales(model)
        optimizer.step(1e-3)
    return found | {f"state.{k}": v for k, v in model.state_dict().items()}


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.fixture(scope="module")
def kept_everything() -> dict[str, dict[str, torch.Tensor]]:
    return {name: train(0, name) for name in ("block", "tensorwise_delayed", "bf16", "mx")}


@pytest.mark.parametrize("stage", [1, 2, 3, 4, {"dense": 1, "moe": 3, "mtp": 4}, {"default": 4, "layers.2": 0}], ids=str)
@pytest.mark.parametrize("name", ["block", "tensorwise_delayed"])
def test_recompute_is_bitwise_counts_once_and_appends_no_amax(name: str, stage: object, kept_everything: dict) -> None:
    got = train(stage, name)
    for key, want in kept_everything[name].items():
        assert equal(got[key], want), key


@pytest.mark.parametrize("name", ["bf16", "mx"])
def test_recompute_is_bitwise_in_other_recipes(name: str, kept_everything: dict) -> None:
    for stage in (3, 4):
        got = train(stage, name)
        assert all(equal(got[key], want) for key, want in kept_everything[name].items())


@pytest.mark.parametrize("stage", [3, 4])
def test_recompute_touches_no_random_numbers(stage: int) -> None:
    model = build(TINY, "block", stage, CPU)
    tokens, labels = sample_tokens(TINY, 1, 64, CPU)
    before = torch.get_rng_state()
    model(tokens, labels, count_valid(tokens, labels)).total.backward()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_embedding_still_trains_the_layers(stage: int) -> None:
    model = build(TINY, "block", stage, CPU)
    model.embedding.anchor.requires_grad_(False)
    tokens, labels = sample_tokens(TINY, 1, 64, CPU)
    model(tokens, labels, count_valid(tokens, labels)).total.backward()
    assert model.embedding.main_grad is None
    assert all(w.main_grad.norm() > 0 for n, w in weights(model) if n.endswith(("qkv", "down")))


@pytest.mark.parametrize("stage", STAGES)
def test_everything_is_freed_after_backward(stage: int) -> None:
    model = build(TINY, "block", stage, CPU)
    tokens, labels = sample_tokens(TINY, 1, 64, CPU)
    model(tokens, labels, count_valid(tokens, labels)).total.backward()
    assert model.stash.account.total == 0


# ---------------------------------------------------------------- bytes


@pytest.fixture(scope="module")
def accounts() -> dict[int, Account]:
    tokens = sample_tokens(TINY, 1, 128, CPU)
    return {stage: measure(build(TINY, "block", stage, CPU), *tokens) for stage in STAGES}


def test_kept_bytes_fall_with_every_stage(accounts: dict[int, Account]) -> None:
    kept = [accounts[s].kept for s in STAGES]
    assert all(later < earlier for earlier, later in zip(kept[:-1], kept[1:], strict=True)), kept
    assert kept[4] < 0.25 * kept[0]


def test_peak_in_backward_falls_with_every_stage(accounts: dict[int, Account]) -> None:
    peak = [accounts[s].peak for s in STAGES]
    assert all(later < earlier for earlier, later in zip(peak[:-1], peak[1:], strict=True)), peak


def test_each_stage_frees_the_class_it_names(accounts: dict[int, Account]) -> None:
    def fell(stage: int) -> set[str]:
        before, after = accounts[stage - 1].classes, accounts[stage].classes
        return {name for name in before if after.get(name, 0) < before[name]}

    assert fell(1) == {"SwiGLU"}
    assert fell(2) == {"norm"}  # on one rank permuted rows are kept at no stage: wgrad's X is turned from the tokens
    assert fell(3) == {"attention", "GEMM outputs"}
    assert fell(4) >= {"SwiGLU", "attention", "residual stream", "permuted rows and routing"}


def test_whole_layers_keep_only_their_input(accounts: dict[int, Account]) -> None:
    """Stage 4: BF16 rows of the residual stream, 2 bytes a value, and what belongs to no layer."""
    more = ModelConfig(**{**TINY.__dict__, "num_hidden_layers": TINY.num_hidden_layers + 1})
    larger = measure(build(more, "block", 4, CPU), *sample_tokens(TINY, 1, 128, CPU))
    assert larger.kept - accounts[4].kept == 128 * TINY.hidden_size * 2


def test_more_flops_are_what_less_memory_costs(accounts: dict[int, Account]) -> None:
    flops = [accounts[s].flops for s in STAGES]
    assert flops[0] == flops[1] == flops[2] < flops[3] < flops[4] < 1.34 * flops[0]


def test_fp8_storage_keeps_less_than_bf16(accounts: dict[int, Account]) -> None:
    plain = measure(build(TINY, "bf16", 0, CPU), *sample_tokens(TINY, 1, 128, CPU))
    assert accounts[0].kept < 0.85 * plain.kept


def test_classes_add_up_to_the_total(accounts: dict[int, Account]) -> None:
    for account in accounts.values():
        assert sum(account.classes.values()) == account.kept and account.stash <= account.kept


def test_layers_are_freed_last_to_first(accounts: dict[int, Account]) -> None:
    """At stage 4 the inputs of the layers, all of one size, go one by one as backward passes."""
    size = 128 * TINY.hidden_size * 2
    order = [i for i, (name, n) in enumerate(accounts[4].freed) if name == "residual stream" and n == size]
    assert len(order) >= TINY.num_hidden_layers and order[-1] - order[0] > 0.5 * len(accounts[4].freed)


def test_order_of_freeing_inside_a_layer() -> None:
    """Each tensor goes at its last use: first what the down projection reads, last what the qkv projection reads."""
    model = build(TINY, "block", 0, CPU)
    tokens, labels = sample_tokens(TINY, 1, 64, CPU)
    total = model(tokens, labels, count_valid(tokens, labels)).total
    account, order = model.stash.account, []
    add = account.add

    def record(name: str, size: int) -> None:
        if size < 0 and name.startswith("layers.1."):
            order.append(name)
        add(name, size)

    account.add = record
    total.backward()
    last = {name: i for i, name in enumerate(order)}
    chain = ["block.experts.out", "block.norm", "attention.core", "attention.norm"]
    places = [last[f"layers.1.{name}"] for name in chain]
    assert places == sorted(places), order


@pytest.mark.parametrize("stage", [0, 2])
def test_no_growth_over_200_steps(stage: int) -> None:
    stash, recipe = Stash(), Recipe.block()
    norm = Weight(128, recipe=Recipe.fp32(), init_std=None)
    mlp = MLP(128, 128, 0.02, recipe, Axis.solo(), stash, "mlp", stage)
    for weight, value in ((norm, torch.ones(128)), (mlp.gate_up, torch.ones(256, 128)), (mlp.down, torch.ones(128, 128))):
        weight.set_(value)
    h, sizes = torch.ones(4, 128), []
    with LiveBytes() as live:
        for step in range(200):
            x = rms_norm_quantize(h, norm, 1e-6, mlp.gate_up, stash, "norm", rebuild=stage >= 2)
            mlp(x.edge).sum().backward()
            del x
            sizes += [live.total] if step in (1, 199) else []
    assert sizes[1] <= sizes[0] and stash.account.total == 0


@pytest.mark.parametrize("stage", [3, 4])
def test_evaluation_keeps_nothing(stage: int) -> None:
    model = build(TINY, "block", stage, CPU).eval()
    tokens, labels = sample_tokens(TINY, 1, 64, CPU)
    with torch.no_grad(), LiveBytes() as live:
        losses = model(tokens, labels, count_valid(tokens, labels))
        gc.collect()
    assert live.total < 1000 and losses.total.isfinite()


# ---------------------------------------------------------------- the pieces


def test_second_pop_raises_and_bytes_are_counted() -> None:
    stash = Stash()
    ticket = stash.put("x", torch.ones(100)).claim()
    assert stash.account.total == 400
    ticket.pop()
    assert stash.account.total == 0
    with pytest.raises(RuntimeError, match="freed at its last use"):
        ticket.pop()


def test_value_lives_until_the_last_of_two_claims() -> None:
    stash, value = Stash(), torch.ones(4)
    ticket, alive = stash.put("x", value), weakref.ref(value)
    ticket.claim(), ticket.claim()
    del value
    ticket.pop()
    assert alive() is not None
    ticket.pop()
    assert alive() is None


def test_a_part_recomputed_from_its_input_can_run_backward_again() -> None:
    """Nothing is freed by it; a part with FP8 bytes in the stash raises (tests/model/test_transformer.py)."""
    x = torch.ones(3, requires_grad=True)
    y = recompute(lambda t: t * 2, lambda t: t * 2, x, x).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert x.grad.tolist() == [4.0] * 3


def test_recompute_runs_the_second_function_in_backward_only() -> None:
    calls: list[str] = []

    def run(tag: str) -> object:
        def inner(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            calls.append(tag)
            return t.square(), t.detach() + 1

        return inner

    x, anchor = torch.tensor([3.0], requires_grad=True), torch.empty(0, requires_grad=True)
    y, _ = recompute(run("first"), run("again"), anchor, x)
    assert calls == ["first"]
    y.backward()
    assert calls == ["first", "again"] and x.grad.item() == 6


def test_recompute_from_quantised_input_gives_its_carrier_the_gradient() -> None:
    grads = []
    for whole in (False, True):
        weight, stash = Weight(128, 128, recipe=Recipe.block()), Stash()
        weight.set_(torch.eye(128))
        x = torch.linspace(-1, 1, 16 * 128).view(16, 128).requires_grad_()
        edge: Activation = quantize_activation(x, weight, stash)
        run = lambda a, weight=weight: linear(a, weight).square()  # noqa: E731
        y = recompute_from(run, edge, weight.anchor, stash) if whole else run(edge)
        y.sum().backward()
        grads.append((x.grad, weight.main_grad))
        assert stash.account.total == 0
    assert equal(grads[0][0], grads[1][0]) and equal(grads[0][1], grads[1][1])
