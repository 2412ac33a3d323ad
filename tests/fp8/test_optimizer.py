"""AdamW: equality with torch's, low-bit states that neither freeze nor drift, independence of sharding, bitwise resume."""

import pytest
import torch

from fp8.optimizer import PRESETS, AdamW, States
from fp8.quantize import quantize
from fp8.recipe import Recipe
from fp8.weight import Piece, Weight
from tests.fp8.optimizers import as_bytes, one, same, snapshot, step_with

LOW = [PRESETS["fp8_lm"], PRESETS["lean"]]


# ---------------------------------------------------------------- the reference


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(7,), (30, 50)])
def test_fp32_equals_torch(shape: tuple[int, ...], decay: float) -> None:
    value, clip = torch.randn(shape) * 0.02, 0.7
    weight, optimizer = one(value, PRESETS["fp32"], Recipe.fp32(), weight_decay=decay)
    parameter = torch.nn.Parameter(value.clone())
    theirs = torch.optim.AdamW([parameter], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay)
    for _ in range(20):
        grad = torch.randn(shape) * 1e-3
        parameter.grad = grad * clip
        theirs.step()
        step_with(weight, optimizer, grad, 1e-3, clip)
    torch.testing.assert_close(weight.data, parameter.detach(), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(optimizer.state()["w"]["exp_avg_sq"], theirs.state[parameter]["exp_avg_sq"], rtol=1e-6, atol=0)


def test_fp32_weight_is_its_own_master_and_low_bit_formats_leave_it_alone() -> None:
    weight, optimizer = one(torch.randn(128, 128), PRESETS["lean"], Recipe.fp32())
    assert optimizer.state()["w"]["master"] is weight.data
    assert set(optimizer.state()["w"]) == {"master", "exp_avg", "exp_avg_sq"}
    norm, optimizer = one(torch.ones(256), PRESETS["lean"], Recipe.bf16())
    assert {t.dtype for t in optimizer.state()["w"].values()} == {torch.float32}


@pytest.mark.parametrize("states", [*PRESETS.values(), States("fp16", "coat", "coat"), States("fp16", "bf16", "bf16")], ids=str)
def test_low_bit_states_follow_fp32(states: States) -> None:
    """After 100 steps of noisy gradients masters are within 4% of the distance moved, in the mean square."""
    value = torch.randn(128, 256) * 0.02
    weight, optimizer = one(value, states)
    exact, reference = one(value, PRESETS["fp32"])
    pull = torch.randn(128, 256) * torch.exp(torch.randn(256)) * 1e-3
    start = optimizer.master("w").clone()
    for _ in range(100):
        grad = pull + torch.randn(128, 256) * 1e-3
        step_with(weight, optimizer, grad)
        step_with(exact, reference, grad)
    error = (optimizer.master("w") - reference.master("w")).square().mean().sqrt()
    moved = (reference.master("w") - start).square().mean().sqrt()
    assert error < 0.04 * moved


# ---------------------------------------------------------------- what must not move


@pytest.mark.parametrize("states", LOW, ids=str)
def test_zero_gradient_for_500_steps_moves_nothing_but_decay(states: States) -> None:
    value = torch.randn(128, 128) * 0.02
    weight, optimizer = one(value, states, weight_decay=0.0)
    before, stored = as_bytes(weight.data), optimizer.master("w").clone()
    for _ in range(500):
        step_with(weight, optimizer, torch.zeros(128, 128))
    assert torch.equal(as_bytes(weight.data), before) and torch.equal(optimizer.master("w"), stored)
    decayed, optimizer = one(value, states, weight_decay=0.1)
    start = optimizer.master("w").clone()
    for _ in range(200):
        step_with(decayed, optimizer, torch.zeros(128, 128))
    shrunk = (optimizer.master("w").double() / start)[start.abs() > 1e-3]
    assert abs(shrunk.mean() / (1 - 1e-4) ** 200 - 1) < 2e-4  # a step of 1e-4 is a tenth of fp16's


@pytest.mark.parametrize("states", LOW, ids=str)
def test_an_expert_that_no_token_reaches_only_decays(states: States) -> None:
    weight, optimizer = one(torch.randn(3, 128, 128) * 0.02, states)
    start = optimizer.master("w").clone()
    for _ in range(500):
        grad = torch.randn(3, 128, 128) * 1e-3
        grad[1] = 0
        step_with(weight, optimizer, grad)
    master = optimizer.master("w")
    assert master.isfinite().all() and weight.q.dequantize().isfinite().all()
    ratio = (master[1].double() / start[1])[start[1].abs() > 1e-3]
    assert abs(ratio.mean() / (1 - 1e-4) ** 500 - 1) < 5e-4
    assert (optimizer.moments("w")[0][1] == 0).all() and optimizer.moments("w")[1][1].max() < 1e-30


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("states", PRESETS.values(), ids=str)
def test_a_scale_that_is_not_finite_changes_nothing(states: States, value: float) -> None:
    weight, optimizer = one(torch.randn(128, 128), states)
    step_with(weight, optimizer, torch.randn(128, 128))
    before = snapshot(weight, optimizer)
    weight.add_grad(torch.full((128, 128), float("nan")))
    optimizer.step(1e-3, torch.tensor(value))
    assert same(before, snapshot(weight, optimizer))


# ---------------------------------------------------------------- small numbers


@pytest.mark.parametrize("size", [1e-12, 1e-20, 1e-38])
@pytest.mark.parametrize("states", LOW, ids=str)
def test_tiny_gradients_stay_finite(states: States, size: float) -> None:
    weight, optimizer = one(torch.randn(128, 128) * 0.02, states, weight_decay=0.0)
    start = optimizer.master("w").clone()
    for _ in range(5):
        step_with(weight, optimizer, torch.randn(128, 128) * size)
    assert optimizer.master("w").isfinite().all()
    assert (optimizer.master("w") - start).abs().max() < 5 * 1e-3 * min(size / 1e-9, 1) + 2.0**-15


@pytest.mark.parametrize("states", LOW, ids=str)
def test_the_first_step_is_the_sign_of_the_gradient_times_lr(states: States) -> None:
    weight, optimizer = one(torch.zeros(128, 128), states)
    grad = torch.randn(128, 128) * 1e-4
    step_with(weight, optimizer, grad, lr=1e-3)
    live = grad.abs() > 1e-5  # against eps
    move = -optimizer.master("w")[live] / grad.sign()[live]
    assert move.min() > 0.99e-3 and move.max() < 1.01e-3  # fp16 masters: 2^-11


@pytest.mark.parametrize("states", LOW, ids=str)
def test_a_learning_rate_of_1e_6_still_moves_an_fp16_master(states: States) -> None:
    """Half a step of fp16 at 0.02 is 7.6e-6: rounded to nearest the master would never move."""
    weight, optimizer = one(torch.full((128, 128), 0.02), states, weight_decay=0.0)
    grad = torch.full((128, 128), 1e-3)
    for _ in range(300):
        step_with(weight, optimizer, grad, lr=1e-6)
    moved = 0.02 - optimizer.master("w")
    assert abs(moved.mean() / 300e-6 - 1) < 0.02
    frozen = (torch.full((1,), 0.02).half().float() - 1e-6).half()
    assert frozen == torch.full((1,), 0.02).half()


# ---------------------------------------------------------------- weight, sharding, resume


@pytest.mark.parametrize("recipe", [Recipe.block(), Recipe.bf16(), Recipe.mx(), Recipe.tensorwise_current()], ids=lambda r: r.name)
@pytest.mark.parametrize("states", PRESETS.values(), ids=str)
def test_the_weight_is_what_the_stored_master_gives(states: States, recipe: Recipe) -> None:
    """So checkpoints leave weights out."""
    weight, optimizer = one(torch.randn(256, 128) * 0.02, states, recipe)
    for _ in range(3):
        step_with(weight, optimizer, torch.randn(256, 128))
        want = quantize(optimizer.master("w"), weight.spec)
        assert torch.equal(as_bytes(weight.data), as_bytes(want.data))
        assert want.scale_inv is None or torch.equal(weight.scale_inv, want.scale_inv)
    again, other = one(optimizer.master("w").clone(), states, recipe)  # a master that passed through fp32
    assert torch.equal(as_bytes(again.data), as_bytes(weight.data))
    assert torch.equal(other.master("w"), optimizer.master("w"))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("states", LOW, ids=str)
def test_results_do_not_depend_on_expert_sharding(states: States, ranks: int) -> None:
    value, grads = torch.randn(4, 128, 128) * 0.02, [torch.randn(4, 128, 128) for _ in range(3)]
    whole, optimizer = one(value, states, seed=5)
    for grad in grads:
        step_with(whole, optimizer, grad)
    share = 4 // ranks
    for rank in range(ranks):
        mine = slice(rank * share, (rank + 1) * share)
        piece = Piece((mine.start, 0, 0), (slice(0, share), slice(0, 128), slice(0, 128)))
        part = Weight(share, 128, 128, recipe=Recipe.block(), global_shape=(4, 128, 128), pieces=(piece,))
        other = AdamW([("w", part)], states=states, seed=5)
        other.set_master("w", value[mine])
        for grad in grads:
            step_with(part, other, grad[mine])
        assert torch.equal(as_bytes(part.data), as_bytes(whole.data[mine]))
        for kind, tensor in other.state()["w"].items():
            assert torch.equal(as_bytes(tensor), as_bytes(optimizer.state()["w"][kind][mine])), kind


def test_results_do_not_depend_on_row_and_column_sharding() -> None:
    value, grad = torch.randn(256, 256) * 0.02, torch.randn(256, 256)
    whole, optimizer = one(value, PRESETS["lean"])
    step_with(whole, optimizer, grad)
    for rows, cols in ((slice(128, 256), slice(0, 256)), (slice(0, 256), slice(128, 256))):
        shape = (rows.stop - rows.start, cols.stop - cols.start)
        piece = Piece((rows.start, cols.start), (slice(0, shape[0]), slice(0, shape[1])))
        part = Weight(*shape, recipe=Recipe.block(), global_shape=(256, 256), pieces=(piece,))
        other = AdamW([("w", part)], states=PRESETS["lean"])
        other.set_master("w", value[rows, cols])
        step_with(part, other, grad[rows, cols])
        assert torch.equal(as_bytes(part.data), as_bytes(whole.data[rows, cols]))


def test_shards_that_cut_a_tile_are_refused() -> None:
    piece = Piece((64, 0), (slice(0, 64), slice(0, 128)))
    part = Weight(64, 128, recipe=Recipe.bf16(), global_shape=(128, 128), pieces=(piece,))
    with pytest.raises(ValueError, match="64..128 of dimension 0 cuts the 128-wide tiles"):
        AdamW([("w", part)], states=PRESETS["lean"])
    AdamW([("w", part)])


@pytest.mark.parametrize("states", [*PRESETS.values(), States("fp32", "coat", "coat")], ids=str)
def test_resume_is_bitwise(states: States) -> None:
    grads = [torch.randn(128, 256) for _ in range(6)]
    weight, optimizer = one(torch.randn(128, 256) * 0.02, states)
    for grad in grads[:3]:
        step_with(weight, optimizer, grad)
    kept = {kind: tensor.clone() for kind, tensor in optimizer.state()["w"].items()}
    for grad in grads[3:]:
        step_with(weight, optimizer, grad)
    other_weight, other = one(torch.zeros(128, 256), states)
    for kind, tensor in other.state()["w"].items():
        tensor.copy_(kept[kind])
    other.refresh("w")
    other.num_steps = 3
    for grad in grads[3:]:
        step_with(other_weight, other, grad)
    assert same(snapshot(weight, optimizer), snapshot(other_weight, other))


def test_another_seed_rounds_otherwise_and_the_same_one_does_not() -> None:
    value, grad, results = torch.randn(128, 128), torch.randn(128, 128), []
    for seed in (1, 1, 2):
        weight, optimizer = one(value, PRESETS["lean"], seed=seed)
        step_with(weight, optimizer, grad)
        results.append(snapshot(weight, optimizer))
    assert same(results[0], results[1]) and not same(results[0], results[2])
