"""Routed experts: any number of rows an expert, and rows that belong to nobody."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import model.experts
from fp8.grouped_gemm import Groups, grouped_gemm_nt, padded_rows
from fp8.linear import quantize_activation
from fp8.quantized import Quantized
from fp8.recipe import Recipe
from fp8.stash import Stash
from fp8.weight import Weight
from model.experts import RoutedExperts, routed_experts_ref
from model.loss import count_valid
from parallel.memory import ExpertMemoryError
from parallel.mesh import Axis
from tests.model.tiny import CONFIG, batch, build, grads, relative_error

# Two E4M3 roundings (2^-4 at worst each) meet in a product; FP32 sums in another order differ by some epsilon.
BOUND = {"fp32": 1e-5, "block": 2**-3}


def experts_of(recipe: Recipe, stash: Stash) -> RoutedExperts:
    experts = RoutedExperts(CONFIG, recipe, Axis.solo(), stash, "e", 0)
    for seed, weight in enumerate((experts.gate_up, experts.down)):
        weight.set_(torch.randn(weight.data.shape, generator=torch.Generator().manual_seed(seed)) * 0.1)
    return experts


def inputs(counts: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x, ids, weights, dy): one slot a token, counts[e] tokens for expert e, in mixed order."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.cat([torch.full((n,), e) for e, n in enumerate(counts)])
    ids = ids[torch.randperm(len(ids), generator=generator)][:, None]
    x, dy = (torch.randn(len(ids), 128, generator=generator) for _ in range(2))
    return x, ids, torch.rand(ids.shape, generator=generator), dy


def gradients(experts: RoutedExperts, stash: Stash, counts: list[int]) -> list[Tensor]:
    """Output and gradients of x, routing weights and both expert weights."""
    x, ids, w, dy = inputs(counts)
    x.requires_grad_(), w.requires_grad_()
    y = experts(experts.work(quantize_activation(x, experts.gate_up, stash), experts.start(ids), w))
    y.backward(dy)
    for weight in (experts.gate_up, experts.down):
        weight.clear_grad()
    return [y.detach(), x.grad, w.grad, experts.gate_up.main_grad.clone(), experts.down.main_grad.clone()]


@pytest.mark.parametrize("name", ["fp32", "block"])
@pytest.mark.parametrize("count", [1, 15, 16, 17, 127, 128, 129])
def test_ragged_counts_match_a_loop_over_experts(name: str, count: int) -> None:
    stash, counts = Stash(), [count, 0, 3, 0, 0, count, 1, 0]
    experts = experts_of(getattr(Recipe, name)(), stash)
    got = gradients(experts, stash, counts)
    x, ids, w, dy = inputs(counts)
    leaves = [x, w, experts.gate_up.q.dequantize(), experts.down.q.dequantize()]
    y = routed_experts_ref(x.requires_grad_(), ids, *(t.requires_grad_() for t in leaves[1:]))
    y.backward(dy)
    for value, want in zip(got, [y.detach(), *(leaf.grad for leaf in leaves)], strict=True):
        assert relative_error(value, want) < BOUND[name]
    assert not got[3][[1, 3, 4, 7]].any() and not got[4][[1, 3, 4, 7]].any(), "an expert without rows has gradient zero"


def test_an_idle_expert_leaves_an_accumulated_gradient_alone() -> None:
    stash = Stash()
    experts = experts_of(Recipe.block(), stash)
    x, ids, w, dy = inputs([5, 5, 0, 0, 0, 0, 0, 0])
    experts(experts.work(quantize_activation(x, experts.gate_up, stash), experts.start(ids), w.requires_grad_())).backward(dy)
    first = experts.down.main_grad.clone()
    x, ids, w, dy = inputs([0, 9, 9, 0, 0, 0, 0, 0])
    experts(experts.work(quantize_activation(x, experts.gate_up, stash), experts.start(ids), w.requires_grad_())).backward(dy)
    assert torch.equal(experts.down.main_grad[0], first[0]) and not torch.equal(experts.down.main_grad[1], first[1])


@pytest.mark.parametrize("name", ["fp32", "block", "mx", "tensorwise_current", "tensorwise_delayed"])
def test_rows_past_the_last_group_are_never_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU kernels leave them unwritten: poisoned with NaN, three steps give the same bits."""

    def poisoned(a: Quantized, b: Quantized, groups: Groups, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        y = grouped_gemm_nt(a, b, groups, dtype)
        y[int(groups.ends_E[-1]) :] = float("nan")
        return y

    stash, counts = Stash(), [3, 0, 130, 1, 0, 0, 20, 0]
    experts = experts_of(getattr(Recipe, name)(), stash)
    clean = gradients(experts, stash, counts)
    monkeypatch.setattr(model.experts, "grouped_gemm_nt", poisoned)
    experts = experts_of(getattr(Recipe, name)(), stash)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(gradients(experts, stash, counts), clean, strict=True))


def test_wgrad_tiles_never_straddle_two_experts() -> None:
    """An expert's gradient does not move when its neighbour's rows grow by a factor of a million."""
    stash, counts = Stash(), [100, 100, 0, 0, 0, 0, 0, 0]
    experts = experts_of(Recipe.block(), stash)
    x, ids, w, dy = inputs(counts)
    found = []
    for factor in (1.0, 1e6):
        grown = torch.where(ids == 1, factor, 1.0)
        rows = quantize_activation(x * grown, experts.gate_up, stash)
        y = experts(experts.work(rows, experts.start(ids), w.clone().requires_grad_()))
        y.backward(dy * grown)
        found.append([weight.main_grad[0].clone() for weight in (experts.gate_up, experts.down)])
        for weight in (experts.gate_up, experts.down):
            weight.clear_grad()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("step", ["grouped_gemm_nt", "dispatch", "quantize_swiglu_backward"])
def test_out_of_memory_says_what_the_rows_need(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In dispatch, in the GEMMs and in backward; 1000 rows of one expert, and what their buffers take."""

    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 99 GiB")

    stash, rows = Stash(), padded_rows(1000, CONFIG.num_experts)
    experts = experts_of(Recipe.block(), stash)
    monkeypatch.setattr(model.experts, step, fail)
    hidden, width = CONFIG.hidden_size, CONFIG.moe_intermediate_size
    need = rows * (hidden + 3 * width + 4 * (2 * width + hidden)) / 2**30  # FP8 kept, an FP32 stream
    with pytest.raises(ExpertMemoryError) as caught:
        gradients(experts, stash, [1000])
    where = f"e, {CONFIG.num_experts} experts of ep rank 0"
    assert str(caught.value).startswith(f"{where}: out of memory: {rows} rows need {need:.2f} GiB")


def quantised_dy(recipe: Recipe, same: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], dict[str, Tensor]]:
    """What the two down projections of an MoE block were asked to do with their dY, and the gradients."""
    model, asked = build(recipe), []
    block = model.layers[1].block
    names = {id(block.experts.down): "experts", id(block.shared.down): "shared"}

    def counted(form: str) -> Callable[[Weight, Tensor], object]:
        real = getattr(Weight, form)

        def ask(weight: Weight, dy: Tensor) -> object:
            asked.extend([f"{names[id(weight)]} {form}"] if id(weight) in names else [])
            return real(weight, dy)

        return ask

    with monkeypatch.context() as patch:
        if not same:
            patch.setattr(type(block), "_same_dy", lambda _: None)
        for form in ("quantize_grad", "quantize_grad_both"):
            patch.setattr(Weight, form, counted(form))
        tokens, labels = batch()
        model(tokens, labels, count_valid(tokens, labels)).total.backward()
    return asked, grads(model)


@pytest.mark.parametrize("name", ["block", "bf16", "tensorwise_current"])
def test_dy_of_experts_and_shared_expert_is_quantised_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the recipe allows it, and with the bits of quantising it twice."""
    recipe = getattr(Recipe, name)()
    once, got = quantised_dy(recipe, True, monkeypatch)
    twice, want = quantised_dy(recipe, False, monkeypatch)
    assert all(torch.equal(got[key], want[key]) for key in want)
    assert twice[0] == "experts quantize_grad" and "shared quantize_grad_both" in twice
    assert once == (twice if name == "tensorwise_current" else ["experts quantize_grad_both"])  # whose scales are each weight's own
