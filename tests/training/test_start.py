"""Starting from another checkpoint's weights, and the profiler window: one short run, in this process."""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train
from fp8.weight import weights
from model.huggingface import parts
from parallel.mesh import Mesh
from tests.tools.published import GOLDEN
from tools import convert_hf, merge, prepare_data, train_tokenizer
from training.config import CheckpointConfig, Config, load_config
from training.errors import UserError
from training.run_state import RunState, locate, whole_checkpoints
from training.start import first_loss_problem, set_starting_values
from training.streaming import ShardReader


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden checkpoint imported, some text packed for it, and six steps trained from it in FP32."""
    root = tmp_path_factory.mktemp("start")
    convert_hf.main(["import", str(GOLDEN), str(root / "in")])
    for name in ("train", "validation"):
        text = "".join(f"def f_{i}(x):\n    return x + {i}\n\n\n" for i in range(600))
        (root / f"{name}.txt").write_text(text)
    config = ["--config", f"{root}/in/train.yaml", f"run.dir={root}/run", f"data.dir={root}/data", "data.source=text"]
    config += [f"data.paths=[{root}/train.txt]", f"data.validation_paths=[{root}/validation.txt]"]
    config += [f"data.tokenizer={root}/t.model", "data.vocab_size=300", "data.seq_len=64"]
    train_tokenizer.main(config)
    prepare_data.main(config)
    config += ["train.steps=6", "train.global_batch=2", "train.micro_batch=2", "fp8.recipe=fp32", "model.loss_chunk=128"]
    config += ["log.wandb=off", "eval.samples=2", "checkpoint.every=1", "checkpoint.keep=2", "checkpoint.keep_for_merge=4"]
    config += ["profile.start=2", "profile.steps=2", "optim.lr=1e-30"]
    with open(root / "stderr", "w") as said, contextlib.redirect_stderr(said):
        assert train.main(config) == 0
    return root


def test_a_run_starts_from_the_imported_weights(folder: Path) -> None:
    """With a learning rate of nothing the run's last masters are the published tensors."""
    reader, tensors = ShardReader(locate(str(folder / "run"), print)), load_file(GOLDEN / "model.safetensors")
    config = load_config(f"{folder}/in/train.yaml", [])
    for part in parts(config.model):
        box = part.box(reader.shape(f"master.{part.name}"))
        value = reader.read(f"master.{part.name}", box).view(tensors[part.hf_name].shape)
        torch.testing.assert_close(value, tensors[part.hf_name].float(), rtol=0, atol=1e-20)
    assert RunState.read(locate(str(folder / "run"), print)).step == 6


def test_a_run_and_the_import_that_it_begins_from_are_told_apart(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither does a run begin in an import, nor is a folder taken for one of the two that it is by other means."""
    monkeypatch.chdir(tmp_path)
    for place, run_dir in (("runs/golden", "runs/golden_trained"), ("data/golden", "runs/golden")):
        convert_hf.main(["import", str(GOLDEN), place])
        config = load_config(f"{place}/train.yaml", [])
        assert config.run.dir == run_dir and config.checkpoint.init_from == place
    said: list[str] = []
    assert locate("runs/golden", said.append) == Path("runs/golden") and not said
    into = ["--config", "runs/golden/train.yaml", "run.dir=runs/golden"]
    refused = "run.dir=runs/golden is itself a checkpoint, an import or a merge: choose another run.dir"
    assert train.main(into) == 2 and capsys.readouterr().err == f"error: {refused}\n"
    shutil.copytree(folder / "run/checkpoints", "runs/golden/checkpoints")
    with pytest.raises(UserError, match="holds a run as well, at runs/golden/checkpoints/step_00000006: name that for the run"):
        locate("runs/golden", said.append)
    with pytest.raises(UserError, match="holds a run as well"):
        merge.chosen(["runs/golden"], last=2)
    assert train.main([*into, "--dry-run"]) == 2
    assert f"{refused}; move its checkpoints/ and metrics.jsonl there to go on" in capsys.readouterr().err
    assert locate("runs/golden/checkpoints/step_00000006", said.append) == Path("runs/golden/checkpoints/step_00000006")


def test_no_run_begins_among_the_checkpoints_of_another(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = ["--config", f"{folder}/in/train.yaml", "--dry-run"]
    among = folder / "run/checkpoints"
    for place in (among, among / "mine", among / "step_00000006/mine/deeper"):
        assert train.main([*config, f"run.dir={place}"]) == 2
        assert f"run.dir={place} is where {folder / 'run'} keeps its checkpoints: choose another" in capsys.readouterr().err


def test_an_implausible_first_loss_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The golden model is random, so the run had to say so."""
    assert "warning: the first loss" in (folder / "stderr").read_text()
    config = load_config(f"{folder}/in/train.yaml", [])
    assert "no better than a random model's (ln 512 = 6.24)" in first_loss_problem(config, 6.3)
    assert first_loss_problem(config, 3.0) is None
    assert first_loss_problem(Config(), 100.0) is None


def test_inputs_of_a_merge_stay(folder: Path) -> None:
    assert [p.name for p in whole_checkpoints(folder / "run")] == [f"step_{i:08d}" for i in (3, 4, 5, 6)]


def test_the_profile_holds_the_phases_of_its_window(folder: Path) -> None:
    trace = json.loads(gzip.decompress((folder / "run/profile/trace_rank0.json.gz").read_bytes()))
    names = [e.get("name") for e in trace["traceEvents"]]
    assert names.count("forward") == names.count("backward") == 2


def test_another_model_or_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    from fp8.optimizer import AdamW
    from fp8.recipe import Recipe
    from model.transformer import Transformer

    config = load_config(f"{folder}/in/train.yaml", ["model.routed_scaling_factor=1.0"])
    model = Transformer(config.model, Recipe.fp32(), dtype=torch.float32)
    optimizer = AdamW(weights(model))
    with pytest.raises(UserError, match="routed_scaling_factor is 2.5 there and 1.0 here"):
        set_starting_values(config, model, optimizer, Mesh.solo(), "t", "d", print)
    elsewhere = Config(model=config.model, checkpoint=CheckpointConfig(init_from=str(tmp_path)))
    with pytest.raises(UserError, match="no checkpoint at"):
        set_starting_values(elsewhere, model, optimizer, Mesh.solo(), "t", "d", print)
    same = load_config(f"{folder}/in/train.yaml", [f"checkpoint.init_from={folder}/run"])
    with pytest.raises(UserError, match="another tokenizer"):
        set_starting_values(same, model, optimizer, Mesh.solo(), "t", "d", print)
