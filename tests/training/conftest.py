"""The data and the undisturbed run that the tests of this folder share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import train
from tests.training.runs import YAML, Recorder, config_of, losses
from training.config import load_config
from training.packing import pack_corpus
from training.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with run.yaml, a tokenizer and packed data."""
    folder = tmp_path_factory.mktemp("loop")
    lines = [f"def f{i}(x):\n    return x + {i * 7 % 31}\n" for i in range(40)]
    for i in range(60):
        (folder / f"{i:03}.txt").write_text("".join(lines[i % 7 :: 1 + i % 5]))
    (folder / "run.yaml").write_text(YAML.replace("FOLDER", str(folder)))
    config = load_config(str(folder / "run.yaml"))
    texts = [p.read_text() for p in sorted(folder.glob("*.txt"))]
    pack_corpus(config.data, train_tokenizer(texts, 300, config.data.tokenizer))
    return folder


@pytest.fixture(scope="session")
def straight(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An undisturbed run of six steps: folder, losses, samples."""
    run_dir = tmp_path_factory.mktemp("straight")
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch)
        assert train.run(config_of(base, run_dir)) == 0
    return {"dir": run_dir, "losses": losses(run_dir), "samples": recorder.samples}
