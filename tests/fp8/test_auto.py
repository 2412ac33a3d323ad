"""AutoFP8: measures what it says, chooses the cheapest that fits, the same on every rank, and remembers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fp8.auto import PAIRS, AutoFP8, Sample, decide, measure, tensor_class
from fp8.config import AutoConfig
from fp8.linear import linear, quantize_activation
from fp8.optimizer import AdamW
from fp8.recipe import CANDIDATES, Recipe
from fp8.stash import Stash
from fp8.weight import Weight, weights
from tests.helpers import run_ranks

CONFIG = AutoConfig(every=3)


def sample(x: Tensor) -> Sample:
    return Sample.of(x, expert=False)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def table(**numbers: tuple[float, float]) -> list[list[list[float]]]:
    """measure()'s numbers with (error, underflow) of `tensorwise` and `block`, the same for all roles; BF16 is exact."""
    healthy = {"tensorwise": (0.037, 0.0), "block": (0.037, 0.0), "bf16": (0.0, 0.0)} | numbers
    return [[list(healthy[f]), list(healthy[g]), list(healthy[g])] for f, g in PAIRS]


class Toy(nn.Module):
    """One linear layer under the name of a layer of the model."""

    def __init__(self, expert: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"qkv": Weight(128, 256, recipe=Recipe.auto(), expert=expert)})])
        self.stash = Stash()

    @property
    def weight(self) -> Weight:
        return self.layers[0]["qkv"]

    def step(self, x: Tensor, dy: Tensor) -> None:
        x = x.clone().requires_grad_()
        linear(quantize_activation(x, self.weight, self.stash), self.weight).backward(dy)


def toy() -> tuple[Toy, AdamW]:
    model = Toy()
    optimizer = AdamW(weights(model), weight_decay=0.0)
    optimizer.set_master("layers.0.qkv", 0.05 * normal(128, 256))
    return model, optimizer


# ---------------------------------------------------------------- measuring


def test_healthy_tensors_have_the_error_of_two_e4m3_roundings() -> None:
    numbers = measure(sample(normal(256, 256)), sample(normal(256, 128, seed=1)), sample(0.05 * normal(128, 256, seed=2)))
    for (f, g), rows in zip(PAIRS, numbers.tolist(), strict=True):
        for error, underflow in rows:
            assert error == 0 or 0.02 < error < 0.042, (f, g)
            assert underflow < 0.005
    assert numbers[PAIRS.index(("bf16", "bf16"))].max() == 0


def test_outlier_tokens_underflow_tensorwise_but_not_in_blocks() -> None:
    dy = 1e-6 * normal(256, 128, seed=1)
    dy[0] *= 1e6
    numbers = dict(zip(PAIRS, measure(sample(normal(256, 256)), sample(dy), sample(normal(128, 256))).tolist(), strict=True))
    assert numbers["tensorwise", "tensorwise"][1][1] > 0.5 and numbers["block", "block"][1][1] < 0.01


def test_scale_comes_from_the_whole_tensor_not_the_sample() -> None:
    x = normal(1024, 128)
    x[300] = 1e6  # not among the sampled rows
    assert sample(x).amax == 1e6 and sample(x).rows.shape == (256, 128)


def test_classes_are_groups_of_layers() -> None:
    assert tensor_class("layers.5.attention.qkv", 4) == "layers.4-7.attention.qkv"
    assert tensor_class("layers.5.attention.qkv", 1) == "layers.5.attention.qkv"
    assert tensor_class("layers.5.block.shared.gate_up", 4) == tensor_class("layers.6.block.experts.gate_up", 4)
    assert tensor_class("head", 4) == "head"


# ---------------------------------------------------------------- deciding


def test_cheapest_that_fits() -> None:
    assert decide(table(), None, CONFIG, False)[0] == ("tensorwise",) * 3
    assert decide(table(tensorwise=(0.037, 0.02)), None, CONFIG, False)[0] == ("block",) * 3
    assert decide(table(tensorwise=(0.05, 0.0), block=(0.046, 0.0)), None, CONFIG, False)[0] == ("bf16",) * 3


def test_experts_have_no_tensorwise_kernel_so_block_is_cheaper() -> None:
    assert decide(table(), None, CONFIG, True)[0] == ("block",) * 3


def test_one_bad_role_costs_only_itself() -> None:
    numbers = table(tensorwise=(0.037, 0.02))
    numbers[PAIRS.index(("block", "block"))][1] = [0.2, 0.0]
    choice, reason = decide(numbers, None, CONFIG, False)
    assert choice == ("block", "bf16", "block") and "not block: error 0.2000" in reason and "underflow 2.000%" in reason


def test_bf16_always_fits() -> None:
    assert decide(table(), None, AutoConfig(max_error=0.0, max_underflow=0.0), False)[0] == ("bf16",) * 3


def test_hysteresis_keeps_a_choice_that_is_only_just_beaten() -> None:
    near = table(tensorwise=(0.043, 0.0))  # under 0.045, over 0.9 * 0.045
    assert decide(near, None, CONFIG, False)[0] == ("tensorwise",) * 3
    assert decide(near, ("tensorwise",) * 3, CONFIG, False)[0] == ("tensorwise",) * 3, "no margin to stay"
    assert decide(near, ("block",) * 3, CONFIG, False)[0] == ("block",) * 3, "a margin to become cheaper"
    assert decide(table(), ("block",) * 3, CONFIG, False)[0] == ("tensorwise",) * 3


# ---------------------------------------------------------------- in training


def test_starts_in_bf16_measures_at_once_and_every_n_steps() -> None:
    model, optimizer = toy()
    auto, seen = AutoFP8(model, CONFIG), []
    assert model.weight.data.dtype == torch.bfloat16
    for step in range(1, 8):
        auto.begin(step)
        model.step(normal(256, 256), 1e-4 * normal(256, 128, seed=1))
        lines = auto.end()
        seen.append(len(lines))
        optimizer.step(1e-4)
    assert seen == [1, 0, 0, 1, 0, 0, 1]
    assert model.weight.recipe.weight.scaling == "current" and model.weight.data.dtype == torch.float8_e4m3fn
    assert auto.choices() == {"layers.0-3.qkv": ("tensorwise",) * 3}
    assert model.weight.observer is None


def test_measures_more_often_at_the_start() -> None:
    model, _ = toy()
    auto, steps = AutoFP8(model, AutoConfig(every=200)), []
    for step in range(1, 402):
        auto.begin(step)
        steps += [step] if model.weight.observer is not None else []
        auto.end()
    assert steps == [1, 10, 30, 100, 201, 401]


def test_a_warning_about_health_raises_the_precision_at_the_next_step() -> None:
    """Steps 2 and 3 are not among those of measurement; tensors turn bad after the first choice, and a warning asks."""
    model, optimizer = toy()
    auto, bad = AutoFP8(model, AutoConfig(every=1000)), 1e-6 * normal(256, 128, seed=1)
    bad[0] *= 1e6
    chosen = []
    for step, dy in ((1, 1e-4 * normal(256, 128)), (2, bad), (3, bad), (4, bad)):
        auto.begin(step)
        model.step(normal(256, 256), dy)
        auto.end()
        chosen.append(auto.choices()["layers.0-3.qkv"])
        optimizer.step(1e-4)
        if step == 2:
            auto.measure_next()
    assert chosen == [("tensorwise",) * 3] * 2 + [("block", "block", "bf16")] * 2
    assert model.weight.observer is None, "asked once, measured once"


def test_the_log_says_what_and_why() -> None:
    model, _ = toy()
    auto = AutoFP8(model, CONFIG)
    dy = 1e-6 * normal(256, 128, seed=1)
    dy[0] *= 1e6
    auto.begin(1)
    model.step(normal(256, 256), dy)
    (line,) = auto.end()
    # an outlier token costs its own row tile in dgrad, but in wgrad the 128 tokens that share its column tile
    assert line.startswith("auto: layers.0-3.qkv: was bf16/bf16/bf16, now block/block/bf16")
    assert "not tensorwise: underflow" in line and "not block: underflow" in line


def test_choice_changes_back_when_tensors_turn_bad() -> None:
    model, optimizer = toy()
    auto = AutoFP8(model, AutoConfig(every=1))
    bad = 1e-6 * normal(256, 128, seed=1)
    bad[0] *= 1e6
    for step, dy in ((1, 1e-4 * normal(256, 128)), (2, bad), (3, bad)):
        auto.begin(step)
        model.step(normal(256, 256), dy)
        auto.end()
        optimizer.step(1e-4)
    assert model.weight.recipe.activation.tile == (1, 128)


def test_values_survive_a_change_of_format() -> None:
    model, optimizer = toy()
    model.weight.choice.copy_(torch.tensor([CANDIDATES.index("block")] * 3 + [1]))
    master = optimizer.state()["layers.0.qkv"]["master"].clone()
    model.weight.set_(master)
    assert model.weight.data.dtype == torch.float8_e4m3fn
    assert (model.weight.q.dequantize() - master).norm() < 0.03 * master.norm()


def test_choices_are_in_the_checkpoint_and_adopted_at_load() -> None:
    one, _ = toy()
    auto = AutoFP8(one, CONFIG)
    auto.begin(1)
    one.step(normal(256, 256), 1e-4 * normal(256, 128, seed=1))
    auto.end()
    saved = one.weight.checkpoint_tensors()["choice"].clone()
    two, optimizer = toy()
    two.weight.checkpoint_tensors()["choice"].copy_(saved)  # as training/checkpoint.py fills them, before masters are set
    two.weight.set_(optimizer.state()["layers.0.qkv"]["master"])
    assert AutoFP8(two, CONFIG).choices() == auto.choices() == {"layers.0-3.qkv": ("tensorwise",) * 3}
    assert two.weight.recipe.weight.scaling == "current"


def test_other_recipes_are_left_alone() -> None:
    model = nn.ModuleList([Weight(128, 128, recipe=Recipe.block())])
    auto = AutoFP8(model, CONFIG)
    auto.begin(1)
    assert model[0].observer is None and auto.end() == []


def test_a_class_that_saw_nothing_keeps_its_choice() -> None:
    model, _ = toy()
    auto = AutoFP8(model, CONFIG)
    auto.begin(1)
    assert "no tensors" in auto.end()[0] and auto.choices() == {"layers.0-3.qkv": ("bf16",) * 3}


def _rank_choices(rank: int, size: int) -> tuple[dict, list[str]]:
    """Only rank 1 sees gradients that need blocks."""
    from functools import partial

    from parallel.collectives import all_reduce
    from parallel.mesh import build_mesh

    mesh, (model, _) = build_mesh(), toy()
    auto = AutoFP8(model, CONFIG, partial(all_reduce, axis=mesh.world, kind="auto", op="max"))
    dy = 1e-6 * normal(256, 128, seed=rank)
    dy[0] *= 1e6 if rank == 1 else 1
    auto.begin(1)
    model.step(normal(256, 256, seed=rank), dy)
    return auto.end(), auto.choices()


@pytest.mark.distributed
def test_choices_are_equal_on_all_ranks() -> None:
    results = run_ranks(2, _rank_choices)
    assert results[0] == results[1] and results[0][1] == {"layers.0-3.qkv": ("block", "block", "bf16")}
