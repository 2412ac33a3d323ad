"""docs/reliability.md names tests and settings: all of them exist."""

from __future__ import annotations

import re

from tests.helpers import ROOT
from training.config import Config
from training.config_loading import leaves

PAGE = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")


def test_every_test_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE))
    missing = [(f, t) for f, t in named if not (ROOT / f).is_file() or not re.search(rf"^def {t}\(", (ROOT / f).read_text(), re.M)]
    alone = set(re.findall(r"`(test_\w+)`", PAGE))
    defined = set(re.findall(r"^def (test_\w+)", "\n".join(p.read_text() for p in (ROOT / "tests").rglob("test_*.py")), re.M))
    assert len(named) > 80 and not missing and alone <= defined, (missing, alone - defined)


def test_every_fault_has_a_test() -> None:
    header = "| fault elsewhere | tests, or why not applicable |\n| --- | --- |\n"
    rows = [re.findall(r"^\| ([^|]+) \| (.+) \|$", part.partition("\n\n")[0], re.M) for part in PAGE.split(header)[1:]]
    assert [len(part) for part in rows] == [12, 20]
    assert all(re.match(r"\D\D", fault) or fault.startswith("256 + 1") for part in rows for fault, _ in part), "a number is no name"
    assert all("::test_" in tests or "not applicable" in tests for part in rows for _, tests in part)


def test_every_setting_that_the_page_names_exists() -> None:
    sections = {key.partition(".")[0] for key in leaves(Config)}
    named = {k for k in re.findall(r"`(\w+\.\w+)(?:=\w+)?`", PAGE) if k.partition(".")[0] in sections} - {"train.py"}
    assert len(named) > 15 and named <= set(leaves(Config)), sorted(named - set(leaves(Config)))
