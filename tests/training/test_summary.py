"""The dry run names what is not there yet, without refusing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fp8.optimizer import AdamW, bytes_report
from fp8.weight import weights
from model.loss import count_valid
from model.transformer import Transformer, initial_values
from parallel.mesh import Mesh
from tests.helpers import ROOT
from tools import plan
from training.config import load_config
from training.resources import classes
from training.start import set_gradient_format
from training.states import gradient_format, optimizer_states
from training.summary import describe, missing_files


def test_dry_run_names_missing_files(tmp_path: Path) -> None:
    overrides = [f"data.dir={tmp_path}", f"data.tokenizer={tmp_path}/t.model", "data.source=text", f"data.paths=[{tmp_path}/*.txt]"]
    config = load_config(ROOT / "configs" / "tiny.yaml", [*overrides, f"checkpoint.init_from={tmp_path}/other"])
    missing = "\n".join(missing_files(config))
    trained = "t.model: train one with `python -m tools.train_tokenizer"
    for name in (trained, "train.bin", "validation.bin", "*.txt: no file matches", "other"):
        assert name in missing, missing
    assert describe(config, 1).count("not there yet") == 5
    without = load_config(ROOT / "configs" / "tiny.yaml", [*overrides, "eval.samples=0"])
    assert not any("validation" in line for line in missing_files(without))
    (tmp_path / "train.bin").touch()
    assert any(f"{tmp_path}/train.json: python -m tools.prepare_data" in line for line in missing_files(config))
    ling = load_config(ROOT / "configs" / "ling_mini.yaml", [f"data.tokenizer={tmp_path}/tokenizer.json"])
    assert any("hf download inclusionAI/Ling-mini-2.0 tokenizer.json" in line for line in missing_files(ling))


def test_dry_run_is_silent_about_files_that_exist(tmp_path: Path) -> None:
    for name in ("t.model", "train.bin", "train.json", "validation.bin", "validation.json", "a.txt"):
        (tmp_path / name).touch()
    overrides = [f"data.dir={tmp_path}", f"data.tokenizer={tmp_path}/t.model", "data.source=text", f"data.paths=[{tmp_path}/*.txt]"]
    assert missing_files(load_config(ROOT / "configs" / "tiny.yaml", overrides)) == []


@pytest.mark.parametrize("overrides", [(), ("optim.states=lean", "optim.grad_dtype=bf16"), ("fp8.recipe=bf16",)], ids=str)
def test_the_dry_run_the_planner_and_a_model_hold_as_many_bytes_a_parameter(overrides: tuple[str, ...]) -> None:
    """The BF16 embedding, FP32 norms and routers among them."""
    config = load_config(ROOT / "configs" / "tiny.yaml", overrides)
    model = Transformer(config.model, config.fp8.build(), Mesh.solo(), torch.bfloat16)
    set_gradient_format(model, gradient_format(config.optim, config.fp8.level))
    optimizer = AdamW(weights(model), states=optimizer_states(config.optim, config.fp8.level))
    for name, _, value in initial_values(model, 0):
        optimizer.set_master(name, value)
    tokens = torch.randint(0, config.model.vocab_size, (1, 65), generator=torch.Generator().manual_seed(0))
    tokens, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    model(tokens, labels, count_valid(tokens, labels)).total.backward()
    measured = f" = {sum(classes(optimizer).values()) / bytes_report(optimizer)['parameters']:.3f};"
    for text in (describe(config, 1), "\n".join(plan.describe_model(config, optimizer.states))):
        assert measured in text
