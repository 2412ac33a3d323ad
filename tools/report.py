"""A run (or several, compared) as one self-contained page and as PNGs, from metrics.jsonl alone.

    python -m tools.report runs/tiny [runs/other ...] [--out report]

Writes OUT/report.html and OUT/*.png; OUT is RUN/report by default.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path
from typing import Any

from tools.arguments import make_parser
from tools.report_data import Run, differences, read_runs
from training.errors import UserError, exit_status
from training.panels import PANELS
from training.tokenizer import write_whole

STYLE = """
:root { color-scheme: light dark; --ink: #1f2937; --soft: #5b6675; --paper: #f5f6f8; --card: #fff; --line: #e2e6ec; --link: #2457a6;
  --note: #8a4b00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e7ee; --soft: #a0aabb; --paper: #14171c; --card: #1d2128; --line: #323944;
  --link: #8ab4f8; --note: #f0b429; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0; }
main { max-width: 980px; margin: 0 auto; padding: 24px; }
h1 { font-size: 24px; margin: 0 0 4px; overflow-wrap: anywhere; } h2 { font-size: 18px; margin: 0 0 2px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 16px 18px; margin: 16px 0; }
p { margin: 0 0 10px; color: var(--soft); } svg { width: 100%; height: auto; display: block; color: var(--ink); }
svg text { font-family: system-ui, sans-serif !important; } svg image { image-rendering: pixelated; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; padding: 4px 10px 4px 0; border-bottom: 1px solid var(--line); }
th, td { vertical-align: top; overflow-wrap: anywhere; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.note { color: var(--note); } nav a { margin-right: 12px; color: var(--link); text-decoration: none; font-size: 13px; }
"""
SUMMARY = (
    ("loss", "last", "loss"), ("val/loss", "best", "best validation"), ("val/bits_per_byte", "best", "bits/byte"),
    ("tokens_per_s", "last", "tokens/s"), ("mfu", "last", "MFU"), ("memory/allocated_gb", "last", "GB peak"),
)  # fmt: skip


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _row(cells: list[Any], tag: str = "td", numbers: bool = True) -> str:
    first, *rest = (escape(str(c)) for c in cells)
    kind = ' class="n"' if numbers else ""
    return f"<tr><{tag}>{first}</{tag}>" + "".join(f"<{tag}{kind}>{c}</{tag}>" for c in rest) + "</tr>"


def summary(runs: list[Run]) -> str:
    """Table of the runs' last and best numbers."""
    rows = [_row(["run", "steps", *(title for _, _, title in SUMMARY)], "th")]
    for run in runs:
        values = [_number(getattr(run, kind)(key)) for key, kind, _ in SUMMARY]
        rows.append(_row([run.label, f"{run.records[-1]['step']:,}", *values]))
    return f"<table>{''.join(rows)}</table>"


def settings(runs: list[Run]) -> str:
    """Table of what differs between the runs; empty for one run."""
    rows = differences(runs) if len(runs) > 1 else []
    if not rows:
        return ""
    body = "".join(_row([key, *values], numbers=False) for key, values in rows)
    head = _row(["setting", *(run.label for run in runs)], "th", numbers=False)
    return f'<section id="settings"><h2>What differs</h2><table>{head}{body}</table></section>'


def build(runs: list[Run]) -> tuple[str, dict[str, bytes]]:
    """(page, PNG by name). Everything that comes from a run is escaped."""
    import matplotlib.pyplot as plt

    from tools.report_figures import draw, png, svg

    images, sections, links = {}, [], []
    for panel in PANELS:
        figure = draw(runs, panel)
        if figure is None:
            continue
        images[panel.name] = png(figure)
        drawing = svg(figure, panel.name).replace("<svg", f'<svg role="img" aria-label="{escape(panel.title)}"', 1)
        plt.close(figure)
        links.append(f'<a href="#{panel.name}">{escape(panel.title)}</a>')
        text = f"<h2>{escape(panel.title)}</h2><p>{escape(panel.text)}</p>"
        sections.append(f'<section id="{panel.name}">{text}{drawing}</section>')
    title = escape(", ".join(run.label for run in runs))
    notes = "".join(f'<p class="note">{escape(note)}</p>' for run in runs for note in run.notes)
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body><main>'
        f"<h1>{title}</h1><nav>{''.join(links)}</nav>"
        f'<section id="summary"><h2>Summary</h2>{notes}{summary(runs)}</section>{settings(runs)}'
        f"{''.join(sections)}</main></body></html>"
    )
    return page, images


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser("report", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run; the first is what others are compared with")
    parser.add_argument("--out", type=Path, help="folder for the page and the PNGs; default RUN/report")
    options = parser.parse_args(arguments)
    runs = read_runs(options.runs)
    for run in runs:
        for note in run.notes:
            print(f"warning: {note}", file=sys.stderr)
    try:
        page, images = build(runs)
    except ImportError as error:
        raise UserError(f"the report needs matplotlib ({error}): pip install matplotlib") from error
    out = options.out or runs[0].path / "report"
    for name, data in images.items():
        write_whole(str(out / f"{name}.png"), data)
    write_whole(str(out / "report.html"), page.encode("utf-8"))
    print(f"wrote {out}/report.html and {len(images)} PNGs")


if __name__ == "__main__":
    sys.exit(exit_status(main))
