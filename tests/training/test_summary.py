"""The dry run names what is not there yet, without refusing."""

from __future__ import annotations

from pathlib import Path

from tests.helpers import ROOT
from training.config import load_config
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
