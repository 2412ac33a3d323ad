"""`train.py` with FP8 gradients, sharded states and FP8 weights on the wire: runs, resumes on other ranks, says its bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import train
from tests.helpers import run_train
from tests.training.runs import config_of, losses, tensors_of
from training.errors import UserError
from training.metrics import read_metrics
from training.run_state import whole_checkpoints


@pytest.mark.distributed
def test_resume_with_everything_sharded(base: Path, tmp_path: Path) -> None:
    """6 steps at once, and 3 + 3 with another process in between: the same losses bit for bit. Wires are the defaults.

    The parts keep their transposes, of weights that arrive under the next forward.
    """
    options = ["parallel.zero=2", "parallel.grad_rounding=stochastic", "optim.states=lean"]
    options += ["train.global_batch=4", "train.micro_batch=1", "eval.samples=0", "train.log_every=1", "checkpoint.every=3"]
    options += ["optim.schedule=constant", "optim.warmup_steps=0"]
    config, run = str(base / "run.yaml"), {}
    for name, steps in (("whole", 6), ("parts", 3), ("parts", 6)):
        last = [f"run.dir={tmp_path / name}", f"train.steps={steps}", f"fp8.keep_transposed={str(name == 'parts').lower()}"]
        done = run_train("--config", config, *options, *last, ranks=2)
        assert done.returncode == 0, done.stdout + done.stderr
        run[name] = losses(tmp_path / name)
    assert run["whole"] == run["parts"] and sorted(run["whole"]) == [1, 2, 3, 4, 5, 6]
    records = [r for r in read_metrics(tmp_path / "whole/metrics.jsonl") if "loss" in r]
    for record in records:
        assert record["wire_format/weights/e4m3_gb"] > 0
        assert record["step"] == 1 or record["wire_time/weights_s"] > 0  # waited for in the next step's forward
        assert "wire_format/gradients/fp32_gb" not in record
    # and on one process, unsharded, from the same files
    alone = [f"run.dir={tmp_path / 'alone'}", f"checkpoint.resume={tmp_path / 'parts'}", "train.steps=7"]
    done = run_train("--config", config, *options[2:], *alone)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(losses(tmp_path / "alone")) == [7]


@pytest.mark.distributed
def test_the_automatic_factor_is_in_the_checkpoint(base: Path, tmp_path: Path) -> None:
    options = [
        "parallel.grad_wire=fp8_lm",
        "eval.samples=0",
        "optim.schedule=constant",
        "optim.warmup_steps=0",
        f"run.dir={tmp_path}",
    ]
    options += ["checkpoint.every=2", "fp8.health_every=0"]
    for steps in (2, 3):
        done = run_train("--config", str(base / "run.yaml"), *options, f"train.steps={steps}", ranks=2)
        assert done.returncode == 0, done.stdout + done.stderr
        mu = tensors_of(whole_checkpoints(tmp_path)[-1])["state.grad_scale.scales.mu"].item()
        assert mu == pytest.approx(0.5 * 2 ** (steps / 1000), rel=1e-12)  # no step saturates


@pytest.mark.distributed
def test_a_run_of_simulated_ranks_is_the_run_of_so_many(base: Path, tmp_path: Path) -> None:
    """Two ranks, and one process that rounds as they do: the same masters in the end, bit for bit."""
    options = [
        "fp8.health_every=0",
        "eval.samples=0",
        "train.micro_batch=2",
        "train.steps=4",
        "optim.clip=0",
        "optim.warmup_steps=1",
    ]
    done = run_train("--config", str(base / "run.yaml"), *options, f"run.dir={tmp_path / 'two'}", ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert train.run(config_of(base, tmp_path / "one", *options, "parallel.simulated_ranks=2")) == 0
    two, one = (tensors_of(whole_checkpoints(tmp_path / name)[-1]) for name in ("two", "one"))
    assert [n for n in one if n.startswith(("master", "exp_avg", "expert_bias")) and not torch.equal(one[n], two[n])] == []
    assert losses(tmp_path / "one")[4][:3] == pytest.approx(losses(tmp_path / "two")[4][:3], rel=1e-6)
    with pytest.raises(UserError, match="parallel.simulated_ranks=2 needs one process .* 4"):
        config_of(base, tmp_path, "parallel.simulated_ranks=2", "train.micro_batch=1")


@pytest.mark.distributed
def test_a_resume_under_auto_has_the_formats_that_were_chosen(base: Path, tmp_path: Path) -> None:
    """Formats change at step 3, after the resume; two owners, the default wires."""
    options = ["fp8.recipe=auto", "fp8.auto.every=2", "eval.samples=0", "optim.schedule=constant", "optim.warmup_steps=0"]
    options += ["checkpoint.every=2", "fp8.health_every=0", "faults.compare_every=1"]
    said = {}
    for name, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
        last = [f"run.dir={tmp_path / name}", f"train.steps={steps}"]
        done = run_train("--config", str(base / "run.yaml"), *options, *last, ranks=2)
        assert done.returncode == 0, done.stdout + done.stderr
        said[name, steps] = [line for line in done.stdout.splitlines() if line.startswith("auto:")]
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    assert said["whole", 4] == said["parts", 2] + said["parts", 4] and any(", now" in line for line in said["parts", 4])
    ours, theirs = (tensors_of(whole_checkpoints(tmp_path / name)[-1]) for name in ("whole", "parts"))
    assert [n for n in ours if not torch.equal(ours[n], theirs[n])] == []
