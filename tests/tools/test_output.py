"""How tools end: one line for a mistake, a missing GPU and Ctrl-C."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers import ROOT
from tools import bench, drill
from training.errors import exit_status

SCRIPTS = [p for p in sorted((ROOT / "tools").glob("*.py")) if "__main__" in p.read_text(encoding="utf-8")]


def test_every_tool_ends_through_exit_status() -> None:
    """It alone turns a UserError into one line and Ctrl-C into status 130."""
    ends = {p.name: re.search(r'if __name__ == "__main__":\n    (.*)\n$', p.read_text(encoding="utf-8")) for p in SCRIPTS}
    assert len(ends) >= 10
    assert not [name for name, end in ends.items() if end is None or end[1] != "sys.exit(exit_status(main))"]


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_has_had_enough_is_no_bug(lines: int) -> None:
    """Whether it goes while we print or before the last flush."""
    code = f"import sys; from training.errors import exit_status; sys.exit(exit_status(lambda: print('line\\n' * {lines})))"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_so_it_is_with_train_py(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "train.py", "--config", "configs/tiny.yaml", "--dry-run", f"run.dir={tmp_path / 'run'}"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_another_broken_pipe_is_not_passed_over() -> None:
    def main() -> int:
        raise BrokenPipeError("a worker is gone")

    with pytest.raises(BrokenPipeError, match="a worker is gone"):
        exit_status(main)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")
@pytest.mark.parametrize("arguments", ["fused", "kernels", "layer", "optimizer", "memory --device cuda"])
def test_a_benchmark_that_needs_a_gpu_says_so(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *arguments.split()])
    assert exit_status(bench.main) == 2
    said = capsys.readouterr().err
    assert "needs a CUDA GPU" in said and said.count("\n") == 1


@pytest.mark.parametrize(("arguments", "message"), [
    ("numerics --run nope", "no checkpoint at nope"),
    ("reduction --config configs/tiny.yaml --ranks 7", "parallel.simulated_ranks=7 needs one process"),
])  # fmt: skip
def test_a_mistake_in_a_benchmark_is_one_message(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *arguments.split()])
    assert exit_status(bench.main) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ["--ranks 0", "--kills -1", "--steps 0", "--per-run 0", "--ranks two"])
def test_the_drill_refuses_what_are_no_counts(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        drill.main(arguments.split())
    assert end.value.code == 2 and f"error: argument {arguments.split()[0]}" in capsys.readouterr().err
