"""docs/reliability.md names tests and settings: all of them exist."""

from __future__ import annotations

import re

from tests.helpers import ROOT
from training.config import Config
from training.config_loading import leaves

PAGE = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")


def test_every_test_that_the_page_names_exists() -> None:
    defined = set(re.findall(r"^def (test_\w+)", "\n".join(p.read_text() for p in (ROOT / "tests").rglob("test_*.py")), re.M))
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 60 and named <= defined, sorted(named - defined)


def test_every_complaint_has_its_row() -> None:
    rows = re.findall(r"^\| (\d+a?) .*`test_", PAGE, re.M)
    assert rows == [*map(str, range(15, 26)), *map(str, range(27, 32)), "32a", *map(str, range(32, 46))]


def test_every_setting_that_the_page_names_exists() -> None:
    sections = {key.partition(".")[0] for key in leaves(Config)}
    named = {k for k in re.findall(r"`(\w+\.\w+)(?:=\w+)?`", PAGE) if k.partition(".")[0] in sections} - {"train.py"}
    assert len(named) > 15 and named <= set(leaves(Config)), sorted(named - set(leaves(Config)))
