"""Gradients in FP32 and BF16, bytes a parameter, names of states."""

import pytest
import torch

from fp8.optimizer import PRESETS, States, bytes_report, states_named
from fp8.recipe import Recipe
from fp8.weight import Weight
from tests.fp8.optimizers import one, same, snapshot, step_with


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
