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
    for name in ("t.model: python -m tools.train_tokenizer", "train.bin", "validation.bin", "*.txt: no file matches", "other"):
        assert name in missing, missing
    assert describe(config, 1).count("not there yet") == 5


def test_dry_run_is_silent_about_files_that_exist(tmp_path: Path) -> None:
    for name in ("t.model", "train.bin", "validation.bin", "a.txt"):
        (tmp_path / name).touch()
    overrides = [f"data.dir={tmp_path}", f"data.tokenizer={tmp_path}/t.model", "data.source=text", f"data.paths=[{tmp_path}/*.txt]"]
    assert missing_files(load_config(ROOT / "configs" / "tiny.yaml", overrides)) == []
