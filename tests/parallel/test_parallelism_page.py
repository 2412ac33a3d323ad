"""docs/parallelism.md maps the known bugs of other trainers to tests, and names settings: all of them exist."""

from __future__ import annotations

import re

from tests.helpers import ROOT
from training.config import Config
from training.config_loading import leaves

PAGE = (ROOT / "docs/parallelism.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (\d+) [^|]+\|[^|]*\|([^|]+)\|$", PAGE, re.M)


def test_every_known_bug_has_its_row() -> None:
    assert [number for number, _ in ROWS] == [str(n) for n in range(19, 32)]


def test_every_test_that_the_table_names_exists() -> None:
    named = [(file, test) for _, tests in ROWS for file, test in re.findall(r"`([\w/]+\.py)::(test_\w+)`", tests)]
    missing = [(file, test) for file, test in named if not re.search(rf"^ *def {test}\(", (ROOT / file).read_text(), re.M)]
    assert len(named) >= len(ROWS) and not missing, missing
    assert all("::test_" in tests for _, tests in ROWS)


def test_tests_that_carry_a_number_are_in_its_row() -> None:
    """A numbered test that nobody can find from its number helps nobody."""
    found = {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for numbers, test in re.findall(r"^ *def (?:test_)((?:\d+_)+)(\w+)\(", file.read_text(), re.M):
            for number in numbers.strip("_").split("_"):
                found.setdefault(number, []).append(f"test_{numbers}{test}")
    for number, tests in ROWS:
        assert all(test in tests for test in found.get(number, [])), (number, found[number])


def test_every_setting_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`(parallel\.\w+)", PAGE))
    assert len(named) > 8 and named <= set(leaves(Config)), sorted(named - set(leaves(Config)))
