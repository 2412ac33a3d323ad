"""The runs of a report: their metrics by key, and which of their settings differ."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from training.config_loading import Source, read_yaml
from training.errors import UserError

Series = tuple[list[int], list[float]]  # steps, values


@dataclass
class Run:
    """One run's records, the superseded ones of resumes left out."""

    path: Path
    label: str
    records: list[dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)  # dotted key -> value
    notes: list[str] = field(default_factory=list)

    def series(self, key: str) -> Series:
        """Steps and finite values of a key."""
        found = [(r["step"], float(r[key])) for r in self.records if isinstance(r.get(key), (int, float))]
        found = [(s, v) for s, v in found if math.isfinite(v)]
        return [s for s, _ in found], [v for _, v in found]

    def after(self, step: float) -> Run:
        """What was logged past a step."""
        return replace(self, records=[r for r in self.records if r["step"] > step])

    def keys(self, pattern: str) -> list[str]:
        """Keys that match a regular expression, layers in numeric order."""
        names = {k for r in self.records for k in r if re.fullmatch(pattern, k)}
        return sorted(names, key=lambda k: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", k)])

    def details(self, name: str, kind: type) -> list[tuple[int, dict[str, Any]]]:
        """(step, table) of every record with a `detail` of this name that is one: of lists (`kind`) of numbers, or of numbers."""
        found = [(r["step"], r["detail"]) for r in self.records if isinstance(r.get("detail"), dict)]
        return [(step, d[name]) for step, d in found if isinstance(d.get(name), dict) and _is_table(d[name], kind)]

    def last(self, key: str) -> float | None:
        values = self.series(key)[1]
        return values[-1] if values else None

    def best(self, key: str) -> float | None:
        return min(self.series(key)[1], default=None)


def _is_table(table: dict[str, Any], kind: type) -> bool:
    rows = [row if kind is list else [row] for row in table.values() if kind is not list or isinstance(row, list)]
    same_size = len({len(row) for row in rows}) == 1 and bool(rows[0])
    return len(rows) == len(table) and same_size and all(isinstance(v, int | float) for row in rows for v in row)


def parse_lines(text: str) -> tuple[list[dict[str, Any]], list[int]]:
    """(records, numbers of the lines that are unreadable). A last line without an end is still being written: left out unsaid."""
    records, bad = [], []
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                raise ValueError
        except ValueError:
            if number < len(lines):
                bad.append(number)
            continue
        if record.get("event") == "resume":
            records = [r for r in records if r["step"] <= record["step"]]
        else:
            records.append(record)
    return records, bad


def read_run(path: str) -> Run:
    """The run in a folder (or at its metrics.jsonl).

    Raises:
        UserError: there is no such file, or nothing readable in it.
    """
    folder = Path(path)
    file = folder if folder.is_file() else folder / "metrics.jsonl"
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from error
    records, bad = parse_lines(text)
    if not records:
        raise UserError(f"{file} holds no metrics" + (f"; line {bad[0]} is unreadable" if bad else ""))
    run = Run(file.parent, file.parent.name or str(file.parent), records)
    if bad:
        run.notes.append(f"{file}: {len(bad)} unreadable line(s) left out, first line {bad[0]}")
    config = file.parent / "config.yaml"
    if config.is_file():
        source = Source()
        try:
            read_yaml(str(config), source, _Everything())
            run.settings = {key: entry.value for key, entry in source.entries.items()}
        except UserError as error:
            run.notes.append(str(error))
    return run


class _Everything(set):
    """Sections of a file whose shape is not known: whatever has no dot is one."""

    def __contains__(self, key: object) -> bool:
        return "." not in str(key)


def read_runs(paths: list[str]) -> list[Run]:
    """All runs, with labels that differ. Raises UserError."""
    runs, seen = [read_run(path) for path in paths], defaultdict(int)
    for run in runs:
        name = run.settings.get("run.name") or run.label
        seen[name] += 1
        run.label = str(name) if seen[name] == 1 else f"{name} ({run.path})"
    return runs


def differences(runs: list[Run]) -> list[tuple[str, list[Any]]]:
    """Settings in which the runs differ, with each run's value; not where they write and log."""
    keys = sorted({key for run in runs for key in run.settings if not key.startswith(("run.", "log."))})
    rows = [(key, [run.settings.get(key) for run in runs]) for key in keys]
    return [(key, values) for key, values in rows if any(v != values[0] for v in values)]


def smooth(series: Series, window: int) -> Series:
    """Trailing mean over `window` points."""
    steps, values = series
    means = []
    for i in range(len(values)):
        part = values[max(0, i - window + 1) : i + 1]
        means.append(sum(part) / len(part))
    return steps, means


def thin(series: Series, limit: int = 2000) -> Series:
    """At most about `limit` points of a long series: of each stretch its lowest and its highest, so that no spike is lost."""
    steps, values = series
    if len(steps) <= limit:
        return series
    size, chosen = -(-2 * len(steps) // limit), []
    for start in range(0, len(steps), size):
        stretch = range(start, min(start + size, len(steps)))
        chosen += sorted({min(stretch, key=values.__getitem__), max(stretch, key=values.__getitem__)})
    return [steps[i] for i in chosen], [values[i] for i in chosen]


def some(steps: list[int], limit: int = 800) -> list[int]:
    """At most about `limit` of the steps, evenly, the last one among them."""
    every = -(-len(steps) // limit)
    return steps[::-1][::every][::-1]


def gap(reference: Series, other: Series) -> Series:
    """(other - reference) / reference at the steps that both have."""
    base = dict(zip(*reference, strict=True))
    pairs = [(s, v / base[s] - 1) for s, v in zip(*other, strict=True) if base.get(s)]
    return [s for s, _ in pairs], [v for _, v in pairs]
