"""AdamW: equality with torch's, low-bit states that neither freeze nor drift, independence of sharding, bitwise resume."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fp8.optimizer import PRESETS, AdamW, States, bytes_report, states_named
from fp8.quantize import quantize
from fp8.recipe import Recipe
from fp8.weight import Piece, Weight

ROOT = Path(__file__).parents[2]
LOW = [PRESETS["fp8_lm"], PRESETS["lean"]]


def one(value: torch.Tensor, states: States, recipe: Recipe | None = None, **options) -> tuple[Weight, AdamW]:
    weight = Weight(*value.shape, recipe=recipe or Recipe.block())
    optimizer = AdamW([("w", weight)], states=states, **options)
    optimizer.set_master("w", value)
    return weight, optimizer


def step_with(weight: Weight, optimizer: AdamW, grad: torch.Tensor, lr: float = 1e-3, scale: float = 1.0) -> None:
    weight.add_grad(grad)
    optimizer.step(lr, scale)


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    return t.detach().clone().contiguous().view(torch.uint8)


def snapshot(weight: Weight, optimizer: AdamW) -> dict[str, torch.Tensor]:
    return {"data": as_bytes(weight.data)} | {k: as_bytes(t) for k, t in optimizer.state()["w"].items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


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


# ---------------------------------------------------------------- gradients, bytes, names


def test_fp32_gradients_keep_a_one_beside_256() -> None:
    """256 + 1 = 257; BF16 would give 256 (ISEEKYAN/Megatron-LM#146)."""
    weight = Weight(2, recipe=Recipe.fp32())
    weight.add_grad(torch.full((2,), 256.0))
    weight.add_grad(torch.ones(2))
    assert (weight.main_grad == 257).all()


def test_bf16_gradients_keep_small_contributions_in_the_mean() -> None:
    """512 uses of 1/1024 after a 1: rounded to nearest the sum stays 1."""
    weight, optimizer = one(torch.zeros(128, 128), PRESETS["lean"])
    weight.grad_dtype = torch.bfloat16
    weight.add_grad(torch.ones(128, 128))
    for _ in range(512):
        weight.add_grad(torch.full((128, 128), 2.0**-10))
    assert abs(weight.main_grad.float().mean() - 1.5) < 0.005
    first = weight.main_grad.clone()
    weight.clear_grad()
    weight.add_grad(torch.ones(128, 128))
    for _ in range(512):
        weight.add_grad(torch.full((128, 128), 2.0**-10))
    assert torch.equal(weight.main_grad, first), "the same step draws the same bits"
    optimizer.step(1e-3)
    weight.add_grad(torch.ones(128, 128))
    for _ in range(512):
        weight.add_grad(torch.full((128, 128), 2.0**-10))
    assert not torch.equal(weight.main_grad, first), "the next step draws others"


def test_a_step_ends_the_accumulation_and_leaves_unused_weights_alone() -> None:
    weight, optimizer = one(torch.ones(128, 128), PRESETS["fp32"])
    step_with(weight, optimizer, torch.full((128, 128), 5.0))
    weight.add_grad(torch.full((128, 128), 2.0))
    assert (weight.main_grad == 2).all()
    weight.clear_grad()
    before = snapshot(weight, optimizer)
    optimizer.step(1e-3)
    assert same(before, snapshot(weight, optimizer))


@pytest.mark.parametrize("preset, want", [("fp32", 13.0), ("fp8_lm", 6.0), ("lean", 5.0)])
def test_bytes_per_parameter(preset: str, want: float) -> None:
    weight, optimizer = one(torch.zeros(4, 256, 512), PRESETS[preset])
    report = bytes_report(optimizer)
    held = sum(size for kind, size in report.items() if kind != "parameters") / report["parameters"]
    assert want <= held < want + 0.02  # scales
    weight.grad_dtype = torch.bfloat16
    weight.add_grad(torch.zeros(4, 256, 512))
    assert bytes_report(optimizer)["grad"] == 2 * weight.numel


def test_presets_take_single_replacements_and_unknown_names_are_listed() -> None:
    assert states_named("lean", exp_avg_sq="bf16", master=None) == States("fp16", "fp8", "bf16")
    with pytest.raises(ValueError, match="known: fp32, fp8_lm, lean"):
        states_named("FP8")
    with pytest.raises(ValueError, match="no format 'fp8' for master; known: fp32, fp16"):
        states_named("lean", master="fp8")


# ---------------------------------------------------------------- the kernel, interpreted

INTERPRETED = """
import torch
from fp8 import optimizer_launch, philox_kernels
from fp8.optimizer import PRESETS, AdamW, Hyper, States, update_ref
from fp8.gradient import add_stochastic_ref
from fp8.philox import GRADIENT, Draw, random_words, weight_words
from fp8.recipe import Recipe
from fp8.weight import Piece, Weight

draw = Draw(seed=0xDEADBEEFCAFEF00D, step=3_000_000_000, parameter=77, stream=1, micro_batch=60_000)
for start in (0, (1 << 36) - 512):
    got = philox_kernels.random_words(draw, start, 3001, torch.device("cpu"))
    assert torch.equal(got, random_words(draw, torch.arange(start, start + 3001)))

hyper = Hyper(0.9, 0.95, 1e-8, 1 - 1e-4, 3e-3, 2.6)
place = Piece((1, 128, 256), (slice(0, 1), slice(0, 128), slice(0, 256)))
cases = [(Recipe.block(), s) for s in (*PRESETS.values(), States("fp16", "bf16", "fp16"), States("fp32", "fp8", "bf16"))]
for recipe, states in [*cases, (Recipe.bf16(), PRESETS["lean"])]:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        weight = Weight(1, 128, 256, recipe=recipe, global_shape=(2, 256, 512), pieces=(place,))
        weight.grad_dtype = torch.bfloat16
        optimizer = AdamW([("w", weight)], states=states)
        optimizer.set_master("w", torch.randn(1, 128, 256) * 0.02)
        for _ in range(2):
            weight.add_grad(torch.randn(1, 128, 256) * torch.randn(256).exp() * 1e-3)
            optimizer.step(1e-3)
        weight.add_grad(torch.randn(1, 128, 256) * 1e-3)
        made.append((weight, optimizer._state["w"], optimizer._codecs["w"]))
    (weight, state, codecs), (other, want, _) = made
    assert optimizer_launch.covers(weight, codecs)
    optimizer_launch.Plan(weight, state, codecs)(hyper, Draw(7, 3, 0), torch.tensor(0.7))
    update_ref(other, want, codecs, hyper, Draw(7, 3, 0), torch.tensor(0.7))
    for role in ("exp_avg", "exp_avg_sq"):
        for part, tensor in want[role].items():
            assert torch.equal(state[role][part].view(torch.uint8), tensor.view(torch.uint8)), (states, role, part)
    # torch's square root is one unit off in places: a master may round to the neighbour.
    apart = (codecs["master"].decode(state["master"]) - codecs["master"].decode(want["master"])).abs()
    assert apart.max() <= 2.0**-15 and (apart > 1e-7).float().mean() < 1e-3, (states, apart.max())
    assert (weight.data.view(torch.uint8) != other.data.view(torch.uint8)).float().mean() < 1e-3

made = []
for _ in range(2):
    torch.manual_seed(1)
    group = [Weight(*shape, recipe=Recipe.fp32(), decay=len(shape) > 1) for shape in ((5,), (1500,), (3, 700))]
    optimizer = AdamW([(str(i), w) for i, w in enumerate(group)], states=PRESETS["lean"])
    for name, w in optimizer.weights.items():
        optimizer.set_master(name, torch.randn(w.data.shape))
        w.add_grad(torch.randn(w.data.shape))
        for role in ("exp_avg", "exp_avg_sq"):
            optimizer._state[name][role]["data"].copy_(torch.rand(w.data.shape))
    made.append((optimizer, group))
(together, group), (alone, others) = made
holders = [(w, together._state[name]) for name, w in together.weights.items()]
assert all(optimizer_launch.in_table(*holder) for holder in holders)
optimizer_launch.Table(holders)(hyper, torch.tensor(0.7))
for (name, w), mine in zip(alone.weights.items(), group):
    one = hyper if w.decay else Hyper(0.9, 0.95, 1e-8, 1.0, 3e-3, 2.6)
    optimizer_launch.Plan(w, alone._state[name], alone._codecs[name])(one, Draw(7, 3, 0), torch.tensor(0.7))
    assert torch.equal(w.data, mine.data)
    for role in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(alone._state[name][role]["data"], together._state[name][role]["data"])

x, total = torch.randn(1, 128, 256).bfloat16(), weight.main_grad.clone()
optimizer_launch.add_stochastic_(weight, x, Draw(7, 3, 0, GRADIENT, 5))
want = add_stochastic_ref(total, x, weight_words(Draw(7, 3, 0, GRADIENT, 5), weight))
assert torch.equal(weight.main_grad.view(torch.int16), want.view(torch.int16))
print("ok")
"""


def test_interpreted_kernel_equals_the_reference() -> None:
    pytest.importorskip("triton")
    env = dict(os.environ, TRITON_INTERPRET="1", PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=env, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "ok", done.stderr[-3000:]
