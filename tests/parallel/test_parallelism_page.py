"""docs/parallelism.md maps the known bugs of other trainers to tests, and names settings: all of them exist."""

from __future__ import annotations

import re

from tests.helpers import ROOT
from training.config import Config
from training.config_loading import leaves

PAGE = (ROOT / "docs/parallelism.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("| fault elsewhere | here | tests |\n| --- | --- | --- |\n")[2].partition("\n\n")[0]
ROWS = re.findall(r"^\| ([^|]+) \|[^|]*\|([^|]+)\|$", TABLE, re.M)


def test_every_known_bug_has_its_row() -> None:
    assert len(ROWS) == len(TABLE.splitlines()) == 13
    assert all(not fault[0].isdigit() for fault, _ in ROWS), "a number is no name"


def test_every_test_that_the_table_names_exists() -> None:
    named = [(file, test) for _, tests in ROWS for file, test in re.findall(r"`([\w/]+\.py)::(test_\w+)`", tests)]
    missing = [(file, test) for file, test in named if not re.search(rf"^ *def {test}\(", (ROOT / file).read_text(), re.M)]
    assert len(named) >= len(ROWS) and not missing, missing
    assert all("::test_" in tests for _, tests in ROWS)


def test_no_test_is_named_by_a_number() -> None:
    """The list that numbers come from is nobody's but its author's."""
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        assert not re.findall(r"^ *def test_\d+_", file.read_text(), re.M), file


def test_every_setting_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`(parallel\.\w+)", PAGE))
    assert len(named) > 8 and named <= set(leaves(Config)), sorted(named - set(leaves(Config)))
