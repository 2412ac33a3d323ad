"""`tools.bench gradients`: what recipes cost at the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tools.test_bench_operands import small_run
from tools.bench_gradients import compare, main
from training.errors import UserError


def test_noise_averages_out_and_a_bias_does_not() -> None:
    generator = torch.Generator().manual_seed(0)
    want = [{"layers.0.w": torch.ones(400), "layers.1.w": torch.ones(400)} for _ in range(16)]
    noisy = [{name: g + 0.1 * torch.randn(400, generator=generator) for name, g in batch.items()} for batch in want]
    short = [{name: 0.9 * g for name, g in batch.items()} for batch in want]
    (error, lasting, projection), (kind,) = compare(noisy, want)["layers.w"], compare(noisy, want)
    assert kind == "layers.w" and error == pytest.approx(0.1, rel=0.1)
    assert lasting == pytest.approx(0.025, rel=0.2) and projection == pytest.approx(1, abs=0.01)
    assert compare(short, want)["layers.w"] == pytest.approx((0.1, 0.1, 0.9), rel=1e-5)


def test_a_run_under_each_recipe(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = small_run(tmp_path)
    assert main(["--run", str(tmp_path), "--recipes", "fp32,block", "--batches", "2", "--sequences", "2"]) == 0
    text = capsys.readouterr().out
    losses = {line.split(":")[0]: float(line.split()[2]) for line in text.splitlines() if ": validation" in line}
    assert list(losses) == ["fp32", "block"] and losses["block"] == pytest.approx(losses["fp32"], rel=5e-3)
    errors = [float(line.split()[-3]) for line in text.splitlines() if line.startswith("  ") and "attention.qkv" in line]
    assert len(errors) == 2 and all(0.01 < e < 0.3 for e in errors)  # layers and MTP, which FP8 rounds
    assert model.training
    with pytest.raises(UserError, match="fp9 is none of"):
        main(["--run", str(tmp_path), "--recipes", "fp9"])
