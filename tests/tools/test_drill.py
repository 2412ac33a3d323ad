"""The short form of the fault drill: two ranks, some kills, nothing older than the last checkpoint lost, bitwise the same run."""

from __future__ import annotations

from pathlib import Path

from tools.drill import drill


def test_killed_ranks_resume_and_are_the_undisturbed_run(tmp_path: Path) -> None:
    report = drill(tmp_path, kills=2, rank_counts=[2], steps=9, per_run=2, seed=5)
    assert report.failures == [] and report.kills == 2, report
    assert max(report.steps_lost) <= 6 and report.while_saving == 1 and report.one_rank == 1, report
    assert report.survivors == {"5": 1}, "the rank that was left alone said so and ended"
