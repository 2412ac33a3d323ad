"""Reading compute-sanitizer's report, and its absence."""

from pathlib import Path

import pytest

from tools import sanitize
from training.errors import exit_status

REPORT = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at control_kernel+0x120 in sanitize_control.py:18
=========     and Read access at control_kernel+0x340 in sanitize_control.py:18 [12 hazards]
=========     and Write access at control_kernel+0x560 in sanitize_control.py:25 [3 hazards]
=========
========= Error: Race reported between Read access at control_kernel+0x340 in sanitize_control.py:18
=========     and Write access at control_kernel+0x120 in sanitize_control.py:18 [4 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""


def test_races_are_counted_by_their_two_places() -> None:
    places = "Read control_kernel+0x340 in sanitize_control.py:18 / Write control_kernel+0x120 in sanitize_control.py:18"
    others = "Write control_kernel+0x120 in sanitize_control.py:18 / Write control_kernel+0x560 in sanitize_control.py:25"
    assert sanitize.races_of(REPORT) == {places: 16, others: 3}
    assert sanitize.SUMMARY.search(REPORT)[1] == "2 hazards displayed (2 errors, 0 warnings)"


def test_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sanitize.shutil, "which", lambda _: None)
    assert exit_status(lambda: sanitize.main([])) == 2
    said = capsys.readouterr()
    assert "compute-sanitizer is not on the PATH: it comes with" in said.err and not said.out


def test_the_folder_that_keeps_its_output_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = sanitize.subprocess.CompletedProcess([], 0, "gemm ran\n========= ERROR SUMMARY: 0 errors\n", "")
    monkeypatch.setattr(sanitize.shutil, "which", lambda _: "compute-sanitizer")
    monkeypatch.setattr(sanitize.subprocess, "run", lambda *args, **kwargs: done)
    folder = tmp_path / "new" / "folder"
    assert sanitize.main(["--tools", "memcheck", "--subjects", "gemm", "--keep", str(folder)]) == 0
    assert "gemm ran" in (folder / "memcheck-gemm.txt").read_text()


@pytest.mark.parametrize("code, said, last", [(1, "", "boom"), (0, "gemm ran\n", "3 errors")])
def test_what_does_not_end_or_errs_is_told_and_hides_nothing(
    code: int, said: str, last: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str], **_: object) -> sanitize.subprocess.CompletedProcess:
        if command[-1] == "gemm":
            text = f"{said}========= ERROR SUMMARY: {'3 errors' if said else '0 errors'}\n"
            return sanitize.subprocess.CompletedProcess([], code, text, "boom")
        return sanitize.subprocess.CompletedProcess([], 0, "head ran\n========= ERROR SUMMARY: 0 errors\n", "")

    monkeypatch.setattr(sanitize.shutil, "which", lambda _: "compute-sanitizer")
    monkeypatch.setattr(sanitize.subprocess, "run", run)
    assert sanitize.main(["--tools", "memcheck", "--subjects", "gemm", "head"]) == 1
    told = capsys.readouterr().out
    assert last in told and told.endswith("memcheck   head      0 errors\n")


def test_every_subject_has_its_kernels() -> None:
    pytest.importorskip("triton")
    from tools import sanitize_subjects

    assert tuple(sanitize_subjects.SUBJECTS) == sanitize.SUBJECTS
