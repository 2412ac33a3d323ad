"""Averaging checkpoints: the weights are the decay's, the arithmetic is on FP32 masters, the inputs stay."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from fp8.optimizer import AdamW, states_named
from fp8.recipe import Recipe
from fp8.weight import weights
from model.router import routers
from model.transformer import Transformer, initial_values
from parallel.mesh import Mesh
from tests.model.tiny import CONFIG
from tools import convert_hf, merge
from tools.merge import DECAYS, coefficients
from training.checkpoint import Checkpointer, load_masters
from training.config import CheckpointConfig, Config, RunConfig
from training.errors import exit_status
from training.run_state import locate, whole_checkpoints
from training.streaming import ShardReader

STEPS = (10, 20, 30, 40)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four checkpoints of different weights, masters in FP16."""
    root = tmp_path_factory.mktemp("merge")
    model = Transformer(CONFIG, Recipe.block(), dtype=torch.float32)
    optimizer = AdamW(weights(model), states=states_named("lean"))
    config = Config(run=RunConfig(dir=str(root / "run")), model=CONFIG, checkpoint=CheckpointConfig(keep=2, keep_for_merge=4))
    saver = Checkpointer(config, model, optimizer, Mesh.solo(), "t", "d")
    for step in STEPS:
        for name, _, value in initial_values(model, step):
            optimizer.set_master(name, value)
        for _, router in routers(model):
            router.expert_bias.fill_(step / 100)
        saver.save(step, step, None)
    return root / "run"


def call(*arguments: object) -> int:
    return exit_status(lambda: merge.main([str(a) for a in arguments]))


@pytest.mark.parametrize("decay", DECAYS)
def test_coefficients_are_a_decay_of_the_steps_between(decay: str) -> None:
    """Sum 1, none negative, and each gap counts what the decay says: w_j = sum of the coefficients from j on."""
    c = coefficients(5, decay)
    assert sum(c) == pytest.approx(1.0) and min(c) >= 0
    tails = [sum(c[j:]) for j in range(5)]
    assert tails == pytest.approx([DECAYS[decay](j / 5) for j in range(5)])
    assert coefficients(4, "linear") == pytest.approx([0.25] * 4)


def test_the_merge_is_the_average_of_decoded_masters(run: Path, tmp_path: Path) -> None:
    assert call(tmp_path / "merged", run, "--last", 3, "--decay", "sqrt") == 0
    merged = ShardReader(tmp_path / "merged")
    parts = [ShardReader(p) for p in whole_checkpoints(run)[-3:]]
    c = coefficients(3, "sqrt")
    assert "master.scale.head" in parts[0].names() and "master.scale.head" not in merged.names()
    for name in ("head", "layers.1.block.experts.gate_up", "layers.0.attention.q_norm"):
        expected = sum(w * p.master(name) for w, p in zip(c, parts, strict=True))
        torch.testing.assert_close(merged.master(name), expected, rtol=1e-5, atol=1e-7)
    bias = merged.read("expert_bias.layers.1.block.router")
    torch.testing.assert_close(bias, torch.full_like(bias, sum(w * s / 100 for w, s in zip(c, STEPS[1:], strict=True))))
    assert len(whole_checkpoints(run)) == 4


def test_a_merge_loads_and_exports(run: Path, tmp_path: Path) -> None:
    assert call(tmp_path / "merged", run, "--last", 4) == 0
    model = Transformer(CONFIG, Recipe.block(), dtype=torch.float32)
    load_masters(locate(str(tmp_path / "merged"), print), model, Mesh.solo())
    named, reader = dict(weights(model)), ShardReader(tmp_path / "merged")
    twin = Transformer(CONFIG, Recipe.block(), dtype=torch.float32)
    dict(weights(twin))["head"].set_(reader.master("head"))
    assert torch.equal(named["head"].data.view(torch.uint8), dict(weights(twin))["head"].data.view(torch.uint8))
    export = ["export", str(tmp_path / "merged"), str(tmp_path / "out"), "--tokenizer", "none"]
    assert exit_status(lambda: convert_hf.main(export)) == 0


def test_slabs_give_the_same_merge(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(tmp_path / "whole", run, "--last", 2) == 0
    monkeypatch.setattr("tools.merge.SLAB", 1000)
    assert call(tmp_path / "slabs", run, "--last", 2) == 0
    a, b = ShardReader(tmp_path / "whole"), ShardReader(tmp_path / "slabs")
    for name in ("head", "layers.1.block.experts.down"):
        assert torch.equal(a.master(name), b.master(name))


def test_fp16_masters_decode_in_any_box(run: Path) -> None:
    reader = ShardReader(whole_checkpoints(run)[0])
    whole = reader.master("layers.1.block.experts.gate_up")
    box = (slice(1, 3), slice(100, 230), slice(5, 128))
    assert torch.equal(reader.master("layers.1.block.experts.gate_up", box), whole[box])
    model = Transformer(CONFIG, Recipe.block(), dtype=torch.float32)
    load_masters(whole_checkpoints(run)[0], model, Mesh.solo())
    weight = dict(weights(model))["layers.1.block.experts.gate_up"]
    copy = weight.data.clone()
    weight.set_(whole)
    assert torch.equal(copy.view(torch.uint8), weight.data.view(torch.uint8))


def test_a_damaged_input_is_not_averaged(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(run, tmp_path / "run")
    file = next(whole_checkpoints(tmp_path / "run")[-1].glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    assert call(tmp_path / "merged", tmp_path / "run", "--last", 2) == 2
    assert f"{file.name} is corrupt" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(("arguments", "message"), [
    (["{run}", "--last", "9"], "has 4 checkpoints"),
    (["{run}"], "--last N"),
    (["{run}/checkpoints/step_00000010"], "at least two"),
    (["{run}/checkpoints/step_00000010", "{run}/checkpoints/step_00000010"], "the same step twice"),
    (["{run}/nothing", "{run}"], "neither a checkpoint nor a run"),
])  # fmt: skip
def test_mistakes_are_one_message(
    run: Path, arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(tmp_path / "out", *(a.format(run=run) for a in arguments)) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
