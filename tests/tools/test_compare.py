"""Comparisons that ran side by side, in one table."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tools import compare
from tools.compare import Outcome
from training.config import Config
from training.errors import STOPPED, UNSAVED, UserError, exit_status


def outcome(name: str, seed: int, last: float) -> Outcome:
    """100 logged steps: losses of 5, and `last` from step 51 on."""
    losses = [(step, 5.0 if step <= 50 else last) for step in range(1, 101)]
    return Outcome(name, seed, 0, last, last + 1, 1.0, 100.0, 2.0, losses)


def write(folder: Path, *outcomes: Outcome) -> str:
    folder.mkdir()
    (folder / "compare.json").write_text(json.dumps([asdict(o) for o in outcomes]))
    return str(folder)


def test_joined_runs_are_measured_against_the_base_of_their_own_seed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    one = write(tmp_path / "1", outcome("fp32", 1, 2.0), outcome("lean", 1, 2.02))
    two = write(tmp_path / "2", outcome("fp32", 2, 4.0), outcome("lean", 2, 4.12))
    compare.main(["--join", one, two])
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| lean"))
    assert "| 2 | 3.0700 | +2.000% (± 1.41) |" in row  # 1% and 3%
    compare.main(["--join", one, two, "--tail", "1", "--base", "fp32"])
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| lean"))
    assert "| 4.0350 | +0.810% (± 0.74) |" in row  # 3.51 against 3.5, 4.56 against 4.5


def test_a_comparison_without_validation_has_no_numbers_for_it(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    none = [replace(outcome(name, 1, 2.0), val=float("nan")) for name in ("a", "b")]
    compare.main(["--join", write(tmp_path / "1", *none)])
    assert "| b | 1 | 2.0000 | +0.000% | - | - | 100 |" in capsys.readouterr().out


@pytest.mark.parametrize("unmeasured", [None, 0.0], ids=["now", "as once written"])
def test_what_was_not_measured_is_no_number(tmp_path: Path, capsys: pytest.CaptureFixture, unmeasured: float | None) -> None:
    """A CPU has no device memory, and a run of one logged step no rate after the first."""
    one = replace(outcome("a", 1, 2.0), memory_gb=unmeasured, tokens_per_s=unmeasured)
    compare.main(["--join", write(tmp_path / "1", one, outcome("b", 1, 2.0))])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].endswith("| - | - |") and lines[3].endswith("| 100 | 2.00 |")


def test_comparisons_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """The same command twice, and once more with another config: each says where it is, and --join takes all."""
    config = Path("configs/tiny.yaml").absolute()
    (tmp_path / "mine.yaml").write_bytes(config.read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "one_run", lambda args, name, settings, seed: outcome(name, seed, 2.0))
    with pytest.raises(UserError, match="did you mean"):
        compare.main(["--config", str(config), "--set", "a:optim.lrr=1"])
    for seed, path in enumerate((config, config, "mine.yaml")):
        compare.main(["--config", str(path), "--recipes", "block", "--seeds", str(seed)])
    folders = ["runs/compare-tiny", "runs/compare-tiny-2", "runs/compare-mine"]
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("in ")]
    assert said == [f"in {folder}/compare.md" for folder in folders]
    compare.main(["--join", *folders])
    assert "| block | 3 |" in capsys.readouterr().out
    with pytest.raises(UserError, match="runs/compare-tiny holds a comparison already"):
        compare.main(["--config", str(config), "--recipes", "block", "--out", folders[0]])
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write file"):
        compare.main(["--config", str(config), "--recipes", "block", "--out", "file"])


def test_a_folder_without_a_comparison_is_named(tmp_path: Path) -> None:
    (tmp_path / "compare.json").write_text('[{"name": "x"}]')
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match=f"{folder} holds no comparison"):
            compare.main(["--join", str(folder)])
    with pytest.raises(UserError, match="--config names"):
        compare.main([])


@pytest.mark.parametrize(("arguments", "message"), [
    (["--recipes", "block,fp9"], "fp8.recipe=fp9 is unknown"),
    (["--recipes", "block", "--base", "bf16"], "--base bf16 is none of the settings: block"),
    (["--set", "fast"], "is not of the form"),
    (["--recipes", "block", "--tail", "0"], "--tail 0 is no share"),
    (["--recipes", "block", "--tail", "1.5"], "--tail 1.5 is no share"),
    (["--set", "fast:optim.lrr=1"], "did you mean optim.lr"),
    (["--set", "good:optim.lr=0.1", "--set", "x:optim.lr=abc"], "^setting x: configs/tiny.yaml: .*\n  - optim.lr='abc': input"),
    (["--set", "x:", "optim.lr=abc"], "^configs/tiny.yaml: .*\n  - command line: optim.lr='abc'"),
    (["--set", "h:", "--set", "h:optim.lr=1"], "two settings are named h"),
    (["--recipes", "bf16", "--set", "bf16:"], "two settings are named bf16"),
    (["--set", "a:run.dir=runs/zz"], "run.dir is the comparison's own"),
    (["--recipes", "bf16", "train.seed=3"], "train.seed is the comparison's own for each run; --seeds says it"),
    (["--set", "../a:"], "is not of the form"),
])  # fmt: skip
def test_mistakes_are_told_before_anything_runs(arguments: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        compare.main(["--config", "configs/tiny.yaml", "--out", str(tmp_path / "out"), *arguments])
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_settings_that_break_do_not_take_the_others_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def run(args: object, name: str, settings: list[str], seed: int) -> Outcome:
        if name == "bad":
            raise RuntimeError("broke")
        return outcome(name, seed, 2.0)

    monkeypatch.setattr(compare, "one_run", run)
    command = ["--config", "configs/tiny.yaml", "--out", str(tmp_path), "--seeds", "1,2", "--set", "bad:"]
    compare.main([*command, "--set", "good:optim.lr=1e-3"])
    said = capsys.readouterr()
    written = (tmp_path / "compare.md").read_text()
    assert said.err.count("bad, seed") == 2 and "| good | 2 |" in written
    assert "| bad, seed 1 | 0 | stopped: RuntimeError: broke |" in written and "| good | 2 | 2.0000 | - |" in written
    compare.main(["--join", str(tmp_path)])
    assert capsys.readouterr().out.count("stopped: ") == 2
    with pytest.raises(UserError, match="no run came to its end"):
        compare.main([*command, "--out", str(tmp_path / "other")])
    with pytest.raises(UserError, match="holds a comparison already"):
        compare.main([*command, "--set", "good:"])
    assert (tmp_path / "compare.md").read_text() == written


@pytest.mark.parametrize(("text", "settings"), [
    ("", []),
    ("optim.lr=4e-3,optim.warmup_steps=5", ["optim.lr=4e-3", "optim.warmup_steps=5"]),
    ("fp8.overrides={head: bf16, layers.0: bf16}", ["fp8.overrides={head: bf16, layers.0: bf16}"]),
    ("a=[x,y],b={c: {q: 1}, r: 2},d=3", ["a=[x,y]", "b={c: {q: 1}, r: 2}", "d=3"]),
])  # fmt: skip
def test_settings_are_split_outside_braces_and_brackets(text: str, settings: list[str]) -> None:
    assert compare.settings_in(text) == settings


def test_a_run_is_not_counted_twice(tmp_path: Path) -> None:
    one = write(tmp_path / "1", outcome("fp32", 1, 2.0))
    both = write(tmp_path / "2", outcome("fp32", 1, 2.0), outcome("fp32", 2, 2.0))
    with pytest.raises(UserError, match="has runs that a folder before it has too: fp32, seed 1$"):
        compare.main(["--join", one, both])
    with pytest.raises(UserError, match="--base bf16 is none of the settings: fp32"):
        compare.main(["--join", one, "--base", "bf16"])


@pytest.mark.parametrize("first_ended", [True, False])
def test_a_signal_ends_the_comparison_without_a_false_row(
    first_ended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A run that a signal stops returns a status; its few losses are no result, and nothing is started after it."""
    started = []

    def run(config: Config) -> int:
        started.append(config.run.dir)
        Path(config.run.dir).mkdir()
        stopped = len(started) == 1 + first_ended
        lines = ['{"step": 1, "loss": 5.0}', '{"step": 2, "loss": 2.0}'][: 2 - stopped]
        (Path(config.run.dir) / "metrics.jsonl").write_text("\n".join(lines))
        return (UNSAVED, STOPPED)[first_ended] if stopped else 0

    monkeypatch.setattr(compare, "run", run)
    command = ["--config", "configs/tiny.yaml", "--out", str(tmp_path), "--recipes", "bf16,block,static"]
    assert exit_status(lambda: compare.main(command)) == 130
    said = capsys.readouterr()
    assert len(started) == 1 + first_ended and "was interrupted and is left out" in said.err
    assert said.out.count("| 1 |") == first_ended and (tmp_path / "compare.md").exists() == first_ended
