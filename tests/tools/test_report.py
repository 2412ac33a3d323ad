"""The page of a run: what it holds, what it escapes, what it says of bad input; and how a browser shows it."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import subprocess
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from tools import report, report_figures
from tools.report_data import differences, gap, parse_lines, read_run, read_runs, smooth, some, thin
from tools.wandb_workspace import plots
from training.errors import UserError, exit_status
from training.panels import PANELS, Panel

LAYERS, EXPERTS = 3, 8


def write_run(folder: Path, shift: float = 0.0, name: str = "run", recipe: str = "block") -> Path:
    """A run of 40 steps with every kind of record that training writes."""
    rng, lines = random.Random(0), []
    routers = [f"layers.{i}.block.router" for i in range(1, LAYERS)] + ["mtp.block.router"]
    for step in range(1, 41):
        values = {"step": step, "loss": 8 / step**0.3 + shift + rng.gauss(0, 0.02), "mtp_loss": 8.5 / step**0.3, "lr": 1e-3}
        values |= {
            "grad_norm": 1 + 1 / step,
            "tokens_per_s": 1e5,
            "time/forward": 0.1,
            "time/backward": 0.2,
            "time/optimizer": 0.05,
        }
        values |= {"memory/weights_gb": 1.0, "memory/gradients_gb": 4.0, "memory/states_gb": 12.0, "memory/activations_gb": 3.0}
        values |= {"memory/allocated_gb": 21.0, "wire/dispatch_gb": 0.5, "wire/gradients_gb": 1.5}
        for router in routers:
            values |= {f"load/{router}/max_over_mean": 1 + 3 / step, f"load/{router}/entropy": 1 - 0.5 / step}
            values |= {f"bias/{router}/range": 0.001 * step}
        if step % 10 == 0:
            counts = {r: [rng.randint(50, 150) for _ in range(EXPERTS)] for r in routers}
            names = [f"layers.{i}.attention.qkv/activation" for i in range(LAYERS)] + ["mtp.eh_proj/grad", "head/grad_t"]
            health = {f"{n}/{m}": v for n in names for m, v in (("cosine", 0.999), ("underflow", 0.01), ("saturation", 0.0))}
            values["detail"] = {"load": counts, "fp8": health}
            lines.append({"step": step, "val/loss": values["loss"] + 0.1, "val/bits_per_byte": 2.0})
        lines.append(values)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(f"run:\n  dir: x\n  name: {json.dumps(name)}\nfp8:\n  recipe: {recipe}\n")
    return folder


def call(*arguments: object) -> int:
    return exit_status(lambda: report.main([str(a) for a in arguments]))


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first of two runs, with the report of both."""
    root = tmp_path_factory.mktemp("report")
    a, b = write_run(root / "a", name="first"), write_run(root / "b", 0.01, "second", "bf16")
    assert call(a, b) == 0
    return a


@pytest.fixture
def one_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.report.PANELS", PANELS[:1])  # the others take seconds to draw


def test_one_page_with_every_panel_and_nothing_from_outside(compared: Path) -> None:
    a = compared
    page = (a / "report/report.html").read_text()
    ids = re.findall(r'<section id="(\w+)"', page)
    assert ids == ["summary", "settings", "loss", "gap", "mtp", "optimisation", "throughput", "phases", "memory", "wire", "load",
                   "experts", "entropy", "bias", "cosine", "underflow"]  # fmt: skip
    assert [name for name in ids[2:]] == [panel.name for panel in PANELS]
    assert page.count("<svg") == len(ids) - 2 and page.count('href="data:image/png;base64,') >= 6  # heat maps' cells
    assert not re.search(r"(?:src|href)=\"(?!data:|#)|<script|@import|url\((?!#)", page)
    assert "<td>fp8.recipe</td><td>block</td><td>bf16</td>" in page
    assert {p.name for p in (a / "report").glob("*.png")} == {f"{i}.png" for i in ids[2:]}


def test_a_run_without_details_still_has_its_page(tmp_path: Path) -> None:
    odd = '{"step": 3, "loss": 2.0, "lr": "x", "detail": {"load": {"a": 3, "b": [1]}, "fp8": {"head/x/cosine": "y"}}}'
    lines = ['{"step": 1, "loss": 3.0}', '{"step": 2, "loss": NaN, "detail": {"fp8": {}}}', odd, ""]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert call(tmp_path, "--out", tmp_path / "out") == 0
    assert re.findall(r'<section id="(\w+)"', (tmp_path / "out/report.html").read_text()) == ["summary", "loss"]


def test_a_panel_of_ones_own_is_in_the_report_and_in_wandbs_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/forking.md says: a Panel, and a name in DRAW."""
    own = Panel("rms", "Mine", "Size of the hidden states", "Root mean square.", ("head/rms",), "RMS")
    monkeypatch.setattr("tools.report.PANELS", (*PANELS[:1], own))
    monkeypatch.setattr("tools.wandb_workspace.PANELS", (*PANELS[:1], own))
    monkeypatch.setitem(report_figures.DRAW, "rms", report_figures.lines)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0, "head/rms": 1.5}\n{"step": 2, "head/rms": 1.25}\n')
    assert call(tmp_path) == 0
    page = (tmp_path / "report/report.html").read_text()
    assert re.findall(r'<section id="(\w+)"', page) == ["summary", "loss", "rms"] and "Root mean square." in page
    assert plots()["Mine"] == [{"title": "Size of the hidden states", "unit": "RMS", "keys": ["head/rms"]}]


def test_a_panel_that_nothing_draws_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Panel without its entry in DRAW; those of octet have theirs."""
    assert set(report_figures.DRAW) == {panel.name for panel in PANELS}
    own = Panel("rms", "Mine", "Size of the hidden states", "Root mean square.", ("head/rms",), "RMS")
    monkeypatch.setattr("tools.report.PANELS", (*PANELS[:1], own))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "head/rms": 1.25}\n')
    assert call(tmp_path) == 2
    assert 'add "rms": lines' in (said := capsys.readouterr().err) and "Traceback" not in said


@pytest.mark.usefixtures("one_panel")
def test_text_of_a_run_is_escaped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "<b>x", name='<script>alert("1")</script>& $\\frac{')  # no formula either
    assert call(run, write_run(tmp_path / "b", recipe="'<img src=x>'"), "--out", tmp_path / "out") == 0
    page = (tmp_path / "out/report.html").read_text()
    assert "<script" not in page and "<img src=x" not in page
    assert "&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;&amp;" in page and "&lt;img src=x&gt;" in page


@pytest.mark.usefixtures("one_panel")
def test_unreadable_lines_are_said_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[4], lines[7] = "{broken", '"text"'
    (run / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 41, "lo')
    assert call(run) == 0
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "2 unreadable line(s) left out, first line 5" in said
    assert "2 unreadable line(s)" in (run / "report/report.html").read_text()


def test_what_cannot_be_reported_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(tmp_path / "none") == 2
    assert f"cannot read {tmp_path}/none/metrics.jsonl" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text("not json\n")
    assert call(tmp_path) == 2
    assert "holds no metrics; line 1 is unreadable" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n')
    assert call(tmp_path, "--out", tmp_path / "metrics.jsonl") == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_resume_supersedes_what_was_logged_past_it() -> None:
    text = '{"step": 1}\n{"step": 2, "a": 1}\n{"event": "resume", "step": 1}\n{"step": 2, "a": 2}\n'
    assert parse_lines(text) == ([{"step": 1}, {"step": 2, "a": 2}], [])


def test_gap_and_smoothing() -> None:
    assert gap(([1, 2, 4], [2.0, 4.0, 1.0]), ([2, 3, 4], [5.0, 9.0, 1.0])) == ([2, 4], [0.25, 0.0])
    assert smooth(([1, 2, 3], [3.0, 1.0, 2.0]), 2) == ([1, 2, 3], [3.0, 2.0, 1.5])


def test_a_long_run_is_thinned_without_losing_a_spike() -> None:
    steps, values = list(range(1, 50_001)), [1.0] * 50_000
    values[31_234], values[44_444] = 9.0, -9.0
    few = thin((steps, values))
    assert len(few[0]) <= 2100 and max(few[1]) == 9.0 and min(few[1]) == -9.0 and few[0] == sorted(set(few[0]))
    assert thin((steps[:100], values[:100])) == (steps[:100], values[:100])
    assert len(some(steps)) <= 800 and some(steps)[-1] == 50_000 and some([1, 2, 3]) == [1, 2, 3]


def test_runs_of_one_name_are_told_apart_and_their_settings_compared(tmp_path: Path) -> None:
    runs = read_runs([str(write_run(tmp_path / n, name="same", recipe=n)) for n in ("block", "bf16")])
    assert runs[0].label == "same" and runs[1].label == f"same ({tmp_path}/bf16)"
    assert differences(runs) == [("fp8.recipe", ["block", "bf16"])]
    assert math.isclose(read_run(str(tmp_path / "block")).best("val/bits_per_byte"), 2.0)


def chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for path in map(shutil.which, names) if path), None)


def look(page: Path, folder: Path, dark: bool) -> np.ndarray:
    """What headless chromium paints of a page: [4200, 1100, 3], 0 to 1."""
    shot = folder / f"dark{dark}.png"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    flags += ["--disable-sync", "--hide-scrollbars", "--window-size=1100,4200", f"--user-data-dir={folder / 'profile'}"]
    flags += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--screenshot={shot}"]
    subprocess.run([chromium(), *flags, page.as_uri()], check=True, capture_output=True, timeout=90)
    return matplotlib.image.imread(shot)[..., :3]


@pytest.mark.skipif(chromium() is None, reason="needs chromium to look at the page")
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_shows_every_figure_on_light_and_on_dark_paper(compared: Path, tmp_path: Path, dark: bool) -> None:
    """Margins of the page's paper, figures painted in colours, and letters that stand out from what is behind them."""
    pixels = look(compared / "report/report.html", tmp_path, dark)
    assert pixels.shape == (4200, 1100, 3)
    margin = pixels[:, 10].mean(0)
    assert (margin < 0.15).all() if dark else (margin > 0.9).all()
    colours = {tuple(c) for c in (pixels[::5, 100:1000:5].reshape(-1, 3) * 255).astype(int).tolist()}
    assert len(colours) > 150, "figures are painted"
    card, strip = pixels[:, 985].mean(0), pixels[400:4200, 84:100].reshape(-1, 3)  # the strip holds the axes' own words
    contrast = abs(strip.mean(1) - card.mean()).max()
    assert contrast > 0.6, "labels can be read"


def test_unknown_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="metrics.jsonl"):
        read_run(str(tmp_path))
