"""The memory forecast against the allocator, on one GPU and on two."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from tests.helpers import ROOT
from tools.plan_layouts import configured, planned_memory, states_of
from training.config import load_config

# GPU memory that the forecast is for, from 3 to 90 GB; the last is Ling-mini's widths with every low-bit state.
ON_A_GPU = {
    "evidence, block": ("configs/evidence.yaml", ()),
    "small, block, stage 1": ("configs/small.yaml", ("fp8.activations=1", "train.micro_batch=4")),
    "small, block, stage 1, kept transposes": (
        "configs/small.yaml", ("fp8.activations=1", "train.micro_batch=4", "fp8.keep_transposed=true")),
    "small, bf16": ("configs/small.yaml", ("fp8.recipe=bf16", "train.micro_batch=4")),
    "ling_mini_1gpu cut to 6 layers": ("configs/ling_mini_1gpu.yaml", ("model.num_hidden_layers=6",)),
    "ling_mini cut to 5 layers, stage 3": (
        "configs/ling_mini.yaml", ("model.num_hidden_layers=5", "parallel.ep=1", "train.micro_batch=4", "fp8.activations=3")),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_A_GPU)
def test_forecast_matches_the_allocator_within_7_percent(case: str) -> None:
    from tools.plan_check import compare

    path, overrides = ON_A_GPU[case]
    config = load_config(path, overrides)
    needed = planned_memory(config, configured(config, 1), states_of(config)).peak
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 1.1 * needed:
        pytest.skip("this GPU, or what other processes leave of it, is too small")
    result = compare(config)
    print(f"\n== {case}", *result.lines(), sep="\n")
    assert abs(result.error) < 0.07, "\n".join(result.lines())


def _on_two_gpus(zero: int) -> None:
    """What torchrun starts; rank 0 prints its comparison."""
    config = ["--config", "configs/small.yaml", "fp8.activations=1", "train.micro_batch=2", f"parallel.zero={zero}"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tools.plan"]
    done = subprocess.run([*command, *config, "--compare-allocator"], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    print(f"\n== zero {zero}, two GPUs", done.stdout)
    error = float(re.search(r"^peak .* ([-+][\d.]+)%$", done.stdout, re.M)[1])
    assert abs(error) < 7, done.stdout


@pytest.mark.multi_gpu
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_forecast_of_sharded_states_matches_the_allocator(zero: int) -> None:
    _on_two_gpus(zero)
