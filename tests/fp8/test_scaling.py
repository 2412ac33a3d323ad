"""Delayed, current and static scales: histories, and everything that must leave them alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fp8.linear import linear, quantize_activation
from fp8.recipe import DelayedScaling, Recipe
from fp8.scaling import RoleScale, role_scales, tensor_amax, tensor_rms, unit_scale_inv, update_scales
from fp8.stash import Stash
from fp8.weight import Weight
from tests.helpers import run_ranks

HISTORY = 4


def delayed(**options: object) -> Recipe:
    return Recipe.tensorwise_delayed(history=HISTORY, **options)


def weight_of(recipe: Recipe, rows: int = 128, cols: int = 128) -> Weight:
    weight = Weight(rows, cols, recipe=recipe, init_std=0.02)
    weight.set_(0.02 * torch.randn(rows, cols, generator=torch.Generator().manual_seed(0)))
    return weight


def rows(amax: float, seed: int = 0) -> Tensor:
    x = torch.rand(16, 128, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return x / x.abs().max() * amax


def scale_for(amax: float, limit: float = 448.0) -> float:
    """The smallest power of two that maps `amax` into the format."""
    return 2.0 ** torch.tensor(amax / limit).log2().ceil().item()


def test_first_use_is_scaled_by_its_own_amax() -> None:
    """No calibration run, and no saturation at step 1 (or after a change of recipe at a resume)."""
    weight = weight_of(delayed())
    q = weight.quantize_activation(rows(3e4))
    assert q.scale_inv.item() == scale_for(3e4) and q.dequantize().abs().max() > 2.9e4


def test_scale_comes_from_earlier_steps_only() -> None:
    weight = weight_of(delayed())
    weight.quantize_activation(rows(8.0))
    update_scales(weight)
    q = weight.quantize_activation(rows(1e5))  # larger than anything seen: saturates, by design of delayed scaling
    assert q.scale_inv.item() == scale_for(8.0) and q.dequantize().abs().max() == 448 * scale_for(8.0)
    update_scales(weight)
    assert weight.quantize_activation(rows(1.0)).scale_inv.item() == scale_for(1e5)


@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_max_and_most_recent(algo: str) -> None:
    weight = weight_of(delayed(algo=algo))
    for amax in (100.0, 1.0):
        weight.quantize_activation(rows(amax))
        update_scales(weight)
    assert weight.scales["activation"].scale_inv.item() == scale_for(100.0 if algo == "max" else 1.0)


def test_history_forgets_after_its_length() -> None:
    weight = weight_of(delayed())
    for amax in (100.0, *[1.0] * HISTORY):
        weight.quantize_activation(rows(amax))
        update_scales(weight)
    assert weight.scales["activation"].history.tolist() == [1.0] * HISTORY
    assert weight.scales["activation"].scale_inv.item() == scale_for(1.0)


def test_margin() -> None:
    weight = weight_of(delayed(margin=2))
    weight.quantize_activation(rows(8.0))
    update_scales(weight)
    assert weight.scales["activation"].scale_inv.item() == 4 * scale_for(8.0)


def test_gradient_history_is_its_own_and_in_e5m2() -> None:
    weight = weight_of(delayed())
    weight.quantize_activation(rows(8.0))
    dy_q, dy_t = weight.quantize_grad(rows(1e-4)), weight.quantize_grad_t(rows(1e-4))
    assert dy_q.data.dtype == dy_t.data.dtype == torch.float8_e5m2 and torch.equal(dy_q.scale_inv, dy_t.scale_inv)
    update_scales(weight)
    assert weight.scales["gradient"].scale_inv.item() == scale_for(1e-4, 57344.0)


def test_history_takes_the_max_over_micro_batches() -> None:
    weight = weight_of(delayed())
    for amax in (1.0, 50.0, 2.0):
        weight.quantize_activation(rows(amax))
    update_scales(weight)
    assert weight.scales["activation"].history.tolist() == [50.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("steps", [1, 2])
def test_unused_weight_keeps_history_and_scale(steps: int) -> None:
    weight = weight_of(delayed())
    weight.quantize_activation(rows(8.0))
    update_scales(weight)
    before = [t.clone() for t in weight.scales["activation"].checkpoint_tensors().values()]
    for _ in range(steps):
        update_scales(weight)
    assert all(torch.equal(a, b) for a, b in zip(before, weight.scales["activation"].checkpoint_tensors().values(), strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_amax_that_is_not_finite_leaves_the_history_alone(bad: float) -> None:
    weight = weight_of(delayed())
    weight.quantize_activation(rows(8.0))
    update_scales(weight)
    x = rows(8.0)
    x[0, 0] = bad
    weight.quantize_activation(x)
    update_scales(weight)
    assert weight.scales["activation"].history.tolist() == [8.0, 0.0, 0.0, 0.0]


def test_nan_counts_as_inf_before_any_reduction() -> None:
    """NCCL's maximum may drop a NaN."""
    assert tensor_amax(torch.tensor([[1.0, float("nan")]])).item() == float("inf")
    assert tensor_amax(torch.empty(0, 128)).item() == 0


def test_evaluation_leaves_no_trace() -> None:
    weight = weight_of(delayed())
    weight.quantize_activation(rows(8.0))
    update_scales(weight)
    weight.eval()
    weight.quantize_activation(rows(1e4))
    assert weight.scales["activation"].seen.item() == 0
    weight.train()
    update_scales(weight)
    assert weight.scales["activation"].history.tolist() == [8.0, 0.0, 0.0, 0.0]


def test_evaluation_before_the_first_step_leaves_no_trace_either() -> None:
    weight = weight_of(delayed()).eval()
    weight.quantize_activation(rows(8.0))
    update_scales(weight)
    assert not any(t.any() for t in weight.scales["activation"].checkpoint_tensors().values())


def test_scale_does_not_move_within_a_step() -> None:
    """So recompute is bitwise the first forward, and seeing a tensor again changes nothing."""
    weight = weight_of(delayed())
    weight.quantize_activation(rows(8.0))
    update_scales(weight)
    first = weight.quantize_activation(rows(64.0))
    seen = weight.scales["activation"].seen.clone()
    again = weight.quantize_activation(rows(64.0))
    assert torch.equal(first.data.view(torch.uint8), again.data.view(torch.uint8)) and torch.equal(first.scale_inv, again.scale_inv)
    assert torch.equal(weight.scales["activation"].seen, seen)


def test_new_weights_are_never_clipped_by_an_old_scale() -> None:
    """Loading weights into FP8 parameters refreshes their scale: it is always their own."""
    weight = weight_of(delayed())
    weight.set_(torch.full((128, 128), 300.0))
    assert weight.q.dequantize().eq(300.0).all() or (weight.q.dequantize() - 300).abs().max() <= 300 * 2.0**-4


def test_state_survives_a_round_trip_and_then_decides() -> None:
    one, two = weight_of(delayed()), weight_of(delayed())
    one.quantize_activation(rows(1000.0))
    update_scales(one)
    for (_, a), (_, b) in zip(one.scales["activation"].checkpoint_tensors().items(),
                              two.scales["activation"].checkpoint_tensors().items(), strict=True):  # fmt: skip
        b.copy_(a)
    two.set_(one.q.dequantize())  # what loading does after it has filled the tensors
    x = rows(1.0)
    assert torch.equal(one.quantize_activation(x).data.view(torch.uint8), two.quantize_activation(x).data.view(torch.uint8))


def test_static_scales_are_set_by_the_first_step_and_then_frozen() -> None:
    weight = weight_of(Recipe.static())
    x = rows(8.0)
    first = weight.quantize_activation(x).scale_inv.item()
    update_scales(weight)
    assert weight.scales["activation"].scale_inv.item() == first == unit_scale_inv(tensor_rms(x)).item()
    weight.quantize_activation(rows(1e4))
    update_scales(weight)
    assert weight.scales["activation"].scale_inv.item() == first
    assert weight.scale_inv.item() == unit_scale_inv(torch.tensor(0.02)).item(), "weights: by their initial deviation"


def test_static_rms_does_not_see_padding() -> None:
    x = torch.cat([torch.full((4, 8), 3.0), torch.zeros(60, 8)])
    assert tensor_rms(x).item() == 3.0


def test_unit_scale_gives_unit_variance_to_the_nearest_power_of_two() -> None:
    for rms in (1e-6, 0.02, 0.7, 1.0, 33.0):
        assert 2**-0.5 <= rms / unit_scale_inv(torch.tensor(rms)).item() <= 2**0.5
    assert unit_scale_inv(torch.tensor([0.0, float("inf")])).tolist() == [1.0, 1.0]


def test_whole_layer_trains_without_a_trainer_and_histories_follow() -> None:
    weight = weight_of(DelayedScaling(amax_history_len=2))
    for step in range(3):
        x = rows(2.0**step, seed=step).requires_grad_()
        linear(quantize_activation(x, weight, Stash()), weight).sum().backward()
        update_scales(weight)
        weight.clear_grad()
    assert weight.scales["activation"].history.tolist() == [4.0, 2.0]
    assert weight.scales["gradient"].history.tolist() == [1.0, 1.0]


def test_update_is_one_reduction_for_the_whole_model() -> None:
    model, calls = nn.ModuleList([weight_of(delayed()) for _ in range(3)]), []
    for weight in model:
        weight.quantize_activation(rows(8.0))

    def reduce(x: Tensor) -> Tensor:
        calls.append(x.clone())
        return x

    update_scales(model, reduce)
    assert len(calls) == 1 and calls[0].numel() == len(role_scales(model)) == 6


def _rank_histories(rank: int, size: int) -> list[list[float]]:
    """Two tp x two dp ranks, each with another maximum; one rank does not use the second weight at all."""
    from functools import partial

    from parallel.collectives import all_reduce
    from parallel.mesh import build_mesh

    mesh = build_mesh(tp=2)
    model = nn.ModuleList([weight_of(delayed()) for _ in range(2)])
    model[0].quantize_activation(rows(10.0 * (rank + 1)))
    if rank == 0:
        model[1].quantize_activation(rows(3.0))
    update_scales(model, partial(all_reduce, axis=mesh.world, kind="amax", op="max"))
    return [scale.history.tolist() for scale in role_scales(model)]


@pytest.mark.distributed
def test_amax_is_reduced_over_tp_and_dp_and_equal_everywhere() -> None:
    results = run_ranks(4, _rank_histories)
    assert all(r == results[0] for r in results)
    assert results[0][0][0] == 40.0 and results[0][2][0] == 3.0 and results[0][1][0] == 0.0


def _rank_current_scale(rank: int, size: int) -> tuple[float, float]:
    """Rows of ranks that will meet in one GEMM have one scale."""
    from functools import partial

    from model.policy import share_scale
    from parallel.collectives import all_reduce
    from parallel.mesh import build_mesh

    mesh, found = build_mesh(tp=2), []
    for recipe in (Recipe.tensorwise_current(), delayed()):
        weight = weight_of(recipe)
        share_scale(weight, partial(all_reduce, axis=mesh.tp, kind="amax", op="max"))
        found.append(weight.quantize_activation(rows(7.0 * 10**rank)).scale_inv.item())
    return tuple(found)


@pytest.mark.distributed
def test_rows_that_travel_share_the_largest_scale_of_their_ranks() -> None:
    assert run_ranks(2, _rank_current_scale) == [(scale_for(70.0),) * 2] * 2


def test_role_scale_counts_no_rank_and_needs_no_group() -> None:
    scale = RoleScale(delayed().activation)
    assert scale(rows(8.0), record=True).item() == scale_for(8.0) and scale.seen.item() == 8.0


def test_the_device_is_read_until_a_scale_is_known_and_never_again() -> None:
    """Neither a step nor new weights make the host ask again: that would be a synchronisation a role and step."""
    weight = weight_of(delayed())
    scale = weight.scales["activation"]
    weight.quantize_activation(rows(8.0))
    update_scales(weight)
    assert scale.known
    weight.set_(torch.zeros(128, 128))
    scale.scale_inv.zero_()  # what the host would now see, if it looked
    assert scale.known
    scale.reset()
    assert not scale.known
