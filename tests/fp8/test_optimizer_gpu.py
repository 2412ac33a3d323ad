"""The fused AdamW kernels against `update_ref`, on a GPU."""

import copy

import pytest
import torch

from fp8.gradient import add_stochastic_, add_stochastic_ref
from fp8.optimizer import PRESETS, AdamW, Hyper, States, update_ref
from fp8.philox import GRADIENT, Draw, random_words, weight_words
from fp8.recipe import Recipe
from fp8.weight import Piece, Weight

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
HYPER = Hyper(0.9, 0.95, 1e-8, 1 - 1e-3 * 0.1, 1e-3 / (1 - 0.9**3), 1 / (1 - 0.95**3) ** 0.5)
MIXED = States("fp32", "fp8", "bf16"), States("fp16", "bf16", "fp16")


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


def steps_apart(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How many representable values lie between two tensors of one floating-point format."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return (a.contiguous().view(kind).long() - b.contiguous().view(kind).long()).abs()


def make(recipe: Recipe, states: States, shape: tuple[int, ...], grad_dtype: torch.dtype, **kwargs) -> tuple[Weight, AdamW]:
    with torch.device("cuda"):
        weight = Weight(*shape, recipe=recipe, **kwargs)
    weight.grad_dtype = grad_dtype
    optimizer = AdamW([("w", weight)], states=states, seed=7)
    optimizer.set_master("w", torch.randn(shape, device="cuda") * 0.02)
    spread = torch.randn(shape[-1], device="cuda").exp() * 1e-3
    for _ in range(2):  # moments of an ordinary run
        weight.add_grad((torch.randn(shape, device="cuda") * spread).to(grad_dtype))
        optimizer.step(1e-3)
    weight.add_grad((torch.randn(shape, device="cuda") * spread).to(grad_dtype))
    return weight, optimizer


def one() -> torch.Tensor:
    return torch.ones((), device="cuda")


def twin(weight: Weight, optimizer: AdamW) -> tuple[Weight, dict]:
    other = copy.deepcopy(weight)
    state = {role: {p: t.clone() for p, t in parts.items()} for role, parts in optimizer._state["w"].items()}
    if optimizer._state["w"]["master"]["data"] is weight.data:
        state["master"] = {"data": other.data}
    return other, state


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", [Recipe.block(), Recipe.bf16()], ids=lambda r: r.name)
@pytest.mark.parametrize("states", [*PRESETS.values(), *MIXED], ids=str)
def test_kernel_equals_reference(states: States, recipe: Recipe, grad_dtype: torch.dtype) -> None:
    from fp8 import optimizer_launch

    weight, optimizer = make(recipe, states, (3, 256, 384), grad_dtype)
    other, state = twin(weight, optimizer)
    codecs, scale, draw = optimizer._codecs["w"], torch.tensor(0.7, device="cuda"), Draw(7, 3, 0)
    assert optimizer_launch.covers(weight, codecs)
    optimizer_launch.Plan(weight, optimizer._state["w"], codecs)(HYPER, draw, scale)
    update_ref(other, state, codecs, HYPER, draw, scale)
    for role in ("exp_avg", "exp_avg_sq"):  # additions and products only: every bit
        for part, want in state[role].items():
            assert torch.equal(as_bytes(optimizer._state["w"][role][part]), as_bytes(want)), (role, part)
    # The update itself is within a few units in the last place; a rounding may tip over.
    got, want = optimizer.master("w"), codecs["master"].decode(state["master"])
    if states.master == "fp32":
        assert (got - want).abs().max() <= 2.0**-20 * 1e-2 + 2.0**-23 * 0.1
    else:
        apart = steps_apart(optimizer._state["w"]["master"]["data"], state["master"]["data"])
        assert (apart > 0).float().mean() < 1e-4
        assert ((got - want).abs() <= want.abs() * 2.0**-10 + 2e-8).all()  # 2e-8 where the update cancels the master
        assert torch.equal(optimizer._state["w"]["master"]["scale"], state["master"]["scale"])
    assert (steps_apart(weight.data, other.data) > 0).float().mean() < 1e-3
    # And the weight is exactly what the stored master gives.
    stored, scales = weight.data.clone(), None if weight.scale_inv is None else weight.scale_inv.clone()
    optimizer.refresh("w")
    assert torch.equal(as_bytes(stored), as_bytes(weight.data))
    assert scales is None or torch.equal(scales, weight.scale_inv)


@pytest.mark.parametrize("neighbours", [8, 16])
@pytest.mark.parametrize("preset", ["lean", "fp8_lm"])
def test_pipelined_kernel_gives_the_bits_of_the_plain_one(preset: str, neighbours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More blocks than programs; scales that stay, that change, that are garbage; blocks that are zero."""
    from fp8 import optimizer_launch

    if not optimizer_launch.hopper_sms(torch.device("cuda", 0)):
        pytest.skip("for Hopper")
    results = []
    for pipelined in (False, True):
        torch.manual_seed(0)
        weight, optimizer = make(Recipe.block(), PRESETS[preset], (60, 256, 384), torch.bfloat16)
        state, taken = optimizer._state["w"], []
        launches = {fmt: launch | {"NEIGHBOURS": neighbours} for fmt, launch in optimizer_launch.PIPELINED.items()}
        with monkeypatch.context() as patch:
            patch.setattr(optimizer_launch, "PIPELINED", launches if pipelined else {})
            plan = optimizer_launch.Plan(weight, state, optimizer._codecs["w"])
        assert bool(plan.programs) == pipelined
        for step in range(4):
            if step == 1:
                state["master"]["scale"][:20] += 3
                weight.scale_inv.view(-1)[1::2] = float("nan")
                state["master"]["data"][-1, :128], state["exp_avg"]["data"].view(torch.uint8)[-1, :128] = 0, 0
            hyper = Hyper(0.9, 0.95, 1e-8, 0.2, 1e-3, 2.0) if step == 1 else HYPER
            plan(hyper, Draw(7, 3 + step, 0), one() * (0 if step == 1 else 0.7))
            parts = [t for role in state.values() for t in role.values()]
            taken += [as_bytes(t).clone() for t in (weight.data, weight.scale_inv, *parts)]
        results.append(taken)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("shape", [(128,), (2048,), (5, 7), (256, 2048)])
def test_elementwise_kernel_equals_torch(shape: tuple[int, ...]) -> None:
    weight, optimizer = make(Recipe.fp32(), PRESETS["lean"], shape, torch.float32)
    other, state = twin(weight, optimizer)
    optimizer.num_steps = 2
    optimizer.step(1e-3, 0.5)
    update_ref(other, state, optimizer._codecs["w"], HYPER, Draw(7, 3, 0), one() / 2)
    torch.testing.assert_close(weight.data, other.data, rtol=1e-6, atol=1e-9)
    assert torch.equal(optimizer._state["w"]["exp_avg"]["data"], state["exp_avg"]["data"])


def test_pieces_of_a_sharded_weight_draw_the_bits_of_the_whole() -> None:
    from fp8 import optimizer_launch

    whole, optimizer = make(Recipe.block(), PRESETS["lean"], (4, 256, 256), torch.bfloat16)
    optimizer_launch.Plan(whole, optimizer._state["w"], optimizer._codecs["w"])(HYPER, Draw(7, 3, 0), one())
    before, again = make_again((4, 256, 256))
    for first in (0, 2):
        place = (Piece((first, 0, 0), (slice(0, 2), slice(0, 256), slice(0, 256))),)
        with torch.device("cuda"):
            part = Weight(2, 256, 256, recipe=Recipe.block(), global_shape=(4, 256, 256), pieces=place)
        part.main_grad = before.main_grad[first : first + 2].clone()
        state = {r: {p: t[first : first + 2].clone() for p, t in s.items()} for r, s in again._state["w"].items()}
        optimizer_launch.Plan(part, state, optimizer._codecs["w"])(HYPER, Draw(7, 3, 0), one())
        assert torch.equal(as_bytes(part.data), as_bytes(whole.data[first : first + 2]))
        for role, parts in state.items():
            for name, t in parts.items():
                assert torch.equal(as_bytes(t), as_bytes(optimizer._state["w"][role][name][first : first + 2]))


def make_again(shape: tuple[int, ...]) -> tuple[Weight, AdamW]:
    torch.manual_seed(0)
    return make(Recipe.block(), PRESETS["lean"], shape, torch.bfloat16)


def test_gradient_that_is_not_finite_changes_nothing_and_outputs_are_all_written() -> None:
    from fp8 import optimizer_launch

    weight, optimizer = make(Recipe.block(), PRESETS["lean"], (2, 128, 256), torch.bfloat16)
    other, state = twin(weight, optimizer)
    plan, args = optimizer_launch.Plan(weight, optimizer._state["w"], optimizer._codecs["w"]), (HYPER, Draw(7, 3, 0))
    plan(*args, torch.tensor(float("nan"), device="cuda"))
    assert torch.equal(as_bytes(weight.data), as_bytes(other.data))
    for role, parts in state.items():
        for name, t in parts.items():
            assert torch.equal(as_bytes(t), as_bytes(optimizer._state["w"][role][name]))
    weight.data.view(torch.uint8).fill_(0x7F)  # poison: the update derives the weight from the master alone
    weight.scale_inv.fill_(float("nan"))
    plan(*args, one())
    optimizer_launch.Plan(other, state, optimizer._codecs["w"])(*args, one())
    assert torch.equal(as_bytes(weight.data), as_bytes(other.data)) and weight.scale_inv.isfinite().all()


def test_plans_and_tables_follow_new_tensors() -> None:
    """What is worked out once must not outlive the tensors that it is of: a gradient that is another tensor, a reloaded state."""
    from fp8.optimizer import adamw_ref

    shapes = (256, 256), (128,), (5,)
    recipes = Recipe.block(), Recipe.fp32(), Recipe.fp32()
    with torch.device("cuda"):
        named = {str(i): Weight(*s, recipe=r) for i, (s, r) in enumerate(zip(shapes, recipes, strict=True))}
    optimizer = AdamW(named.items(), weight_decay=0.0)
    want = {}
    for name, weight in named.items():
        value = torch.randn(weight.data.shape, device="cuda")
        optimizer.set_master(name, value)
        want[name] = value, torch.zeros_like(value), torch.zeros_like(value)
    for step in range(1, 5):
        hyper = Hyper(0.9, 0.95, 1e-8, 1.0, 1e-3 / (1 - 0.9**step), 1 / (1 - 0.95**step) ** 0.5)
        for name, weight in named.items():
            weight.main_grad = None if step == 3 else weight.main_grad
            weight.add_grad(torch.randn(weight.data.shape, device="cuda"))
            want[name] = adamw_ref(*want[name], weight.main_grad, hyper)
            if step == 2:
                optimizer._state[name] = {role: {p: t.clone() for p, t in s.items()} for role, s in optimizer._state[name].items()}
                if weight.data.dtype == torch.float32:
                    optimizer._state[name]["master"] = {"data": weight.data}
        optimizer.step(1e-3)
    for name in named:
        torch.testing.assert_close(optimizer.master(name), want[name][0], rtol=1e-5, atol=1e-6)


def test_same_step_twice_gives_the_same_bits() -> None:
    results = []
    for _ in range(2):
        weight, optimizer = make_again((2, 256, 256))
        optimizer.step(1e-3)
        results.append([as_bytes(weight.data).clone(), *(as_bytes(t) for t in optimizer.state()["w"].values())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_philox_on_the_gpu_equals_the_reference() -> None:
    from fp8 import philox_kernels

    draw = Draw(seed=0xDEADBEEFCAFEF00D, step=3_000_000_000, parameter=77, stream=1, micro_batch=60_000)
    for start in (0, 4096, (1 << 36) - 512):
        got = philox_kernels.random_words(draw, start, 5000, torch.device("cuda"))
        assert torch.equal(got.cpu(), random_words(draw, torch.arange(start, start + 5000)))


def test_bf16_gradient_sum_equals_the_reference() -> None:
    weight, _ = make(Recipe.block(), PRESETS["lean"], (3, 256, 384), torch.bfloat16)
    x, total, draw = torch.randn(3, 256, 384, device="cuda").bfloat16(), weight.main_grad.clone(), Draw(7, 3, 0, GRADIENT, 5)
    add_stochastic_(weight, x, draw)
    assert torch.equal(weight.main_grad, add_stochastic_ref(total, x, weight_words(draw, weight)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm_of_small_and_large_gradients(dtype: torch.dtype) -> None:
    from fp8.grad_norm import sum_of_squares

    tensors = [torch.randn(n, device="cuda").to(dtype) * 1e-3 for n in (1, 5, 4096, 1 << 20, (1 << 22) + 8)]
    tensors += [torch.randn(3, device="cuda"), torch.randn(64, 64, device="cuda").to(dtype)[:, :32]]
    want = sum(t.double().square().sum() for t in tensors)
    assert abs(sum_of_squares(tensors) / want - 1) < 1e-5
    tensors[2][7] = float("nan")
    assert sum_of_squares(tensors).isnan()


def test_step_reads_nothing_back() -> None:
    """No host synchronisation with a 0-dim grad_scale."""
    weight, optimizer = make(Recipe.block(), PRESETS["lean"], (2, 128, 256), torch.bfloat16)
    scale = torch.tensor(0.5, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step(1e-3, scale)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_bytes_agree_with_the_allocator() -> None:
    from fp8.optimizer import bytes_report

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        weight = Weight(16, 1024, 2048, recipe=Recipe.block())
    weight.grad_dtype = torch.bfloat16
    optimizer = AdamW([("w", weight)], states=PRESETS["lean"])
    optimizer.set_master("w", torch.randn(16, 1024, 2048, device="cuda"))
    weight.add_grad(torch.ones(1, device="cuda").expand(16, 1024, 2048))
    optimizer.step(1e-3)
    held = torch.cuda.memory_allocated() - before
    report = bytes_report(optimizer)
    counted = sum(size for name, size in report.items() if name != "parameters")
    assert abs(held - counted) < 4096 * 16
    assert counted / report["parameters"] < 7.02
