"""The figures of a report. Each takes the runs and returns a matplotlib figure, or None when no run has what it shows."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.colors import ListedColormap  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from tools.report_data import Run, gap, smooth, some, thin  # noqa: E402
from training.errors import UserError  # noqa: E402
from training.heat_map import SCALES  # noqa: E402
from training.panels import Grid, Panel, health_grid, layer_of, load_grid, time_grid  # noqa: E402

WIDTH, HEIGHT = 9.0, 3.4  # inches
MAX_LAYERS_IN_LEGEND = 8
INK = "#2a3443"  # of text and axes; in the page it becomes the page's own colour, so that a dark page has light figures
PALETTE = ["#3d85c6", "#e0783c", "#3aa17e", "#b565b0", "#c79a1b", "#d1495b", "#7b8794", "#56b4d3"]  # on light and on dark paper
MAPS = {"sequential": "viridis", "warm": "magma", "diverging": "RdBu_r"}
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "axes.titlecolor")
STYLE: dict[str, Any] = dict.fromkeys(INKED, INK) | {
    "axes.grid": True, "grid.color": "#8a94a3", "grid.alpha": 0.25, "font.size": 9, "axes.spines.top": False,
    "axes.spines.right": False, "axes.facecolor": "none", "figure.facecolor": "none", "legend.frameon": False,
    "svg.fonttype": "none", "font.family": "sans-serif", "text.parse_math": False, "axes.titlesize": 9, "axes.titleweight": "bold",
    "axes.prop_cycle": plt.cycler(color=PALETTE), "figure.max_open_warning": 0,
}  # fmt: skip
plt.rcParams.update(STYLE)


def svg(figure: Figure, name: str) -> str:
    """The figure as inline SVG that takes the text colour of the page around it."""
    with plt.rc_context({"svg.hashsalt": name}):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = re.sub(r"<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.S)
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    return re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1), count=1)


def png(figure: Figure) -> bytes:
    """The figure on white paper; where its parts lie is settled by then."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, facecolor="white")
    figure.set_layout_engine("none")
    return buffer.getvalue()


def _axes(runs: list[Run], height: float = HEIGHT) -> tuple[Figure, list]:
    """A figure with one axis a run, side by side up to two."""
    columns = min(len(runs), 2)
    rows = -(-len(runs) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(WIDTH, height * rows), squeeze=False, layout="constrained")
    flat = list(axes.flat)
    for axis in flat[len(runs) :]:
        axis.set_visible(False)
    return figure, flat


def _plain_numbers(axis: Any) -> None:
    """1,000,000 instead of 1e6; powers of ten as they are read."""
    for line in (axis.xaxis, axis.yaxis):
        line.set_major_formatter(lambda value, _: f"{value:,.10g}")


def _curves(axis: Any, runs: list[Run], keys: list[tuple[str, str, str]], ylabel: str, log: bool = False) -> bool:
    """Every run in its own colour; `keys`: (metric, matplotlib style, suffix of the label). False where no run has any."""
    drawn = False
    for i, run in enumerate(runs):
        for key, style, suffix in keys:
            steps, values = thin(run.series(key))
            if steps:
                style = style if len(steps) > 1 else "o"
                axis.plot(steps, values, style, color=f"C{i % len(PALETTE)}", label=run.label + suffix, markersize=4, linewidth=1.3)
                drawn = True
    axis.set(xlabel="step", ylabel=ylabel, yscale="log" if log else "linear")
    _plain_numbers(axis)
    if drawn:
        axis.legend(fontsize=8)
    return drawn


def _lines(runs: list[Run], keys: list[tuple[str, str, str]], ylabel: str) -> Figure | None:
    """One axis of `_curves`."""
    figure, axis = plt.subplots(figsize=(WIDTH, HEIGHT), layout="constrained")
    if _curves(axis, runs, keys, ylabel):
        return figure
    plt.close(figure)
    return None


def loss(runs: list[Run], panel: Panel) -> Figure | None:
    """The whole run; beside it, of runs that are long enough, its second half, which the first losses would flatten."""
    keys = [("loss", "-", ""), ("val/loss", "o--", " (validation)")]
    if max((len(run.series("loss")[0]) for run in runs), default=0) < 20:
        return _lines(runs, keys, panel.unit)
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, HEIGHT), layout="constrained")
    _curves(axes[0], runs, keys, panel.unit)
    half = max(run.series("loss")[0][-1] for run in runs if run.series("loss")[0]) / 2
    _curves(axes[1], [run.after(half) for run in runs], keys, panel.unit)
    axes[1].set_title("second half")
    axes[1].get_legend().remove()
    return figure


def loss_gap(runs: list[Run], panel: Panel) -> Figure | None:
    """Relative difference of each run's loss to the first run's; of one run, to the one that it names (log.reference)."""
    if len(runs) < 2:
        keys = [("gap/loss", "-", " to log.reference"), ("gap/val_loss", "o--", " to log.reference (validation)")]
        return _lines(runs, keys, panel.unit)
    figure, axis = plt.subplots(figsize=(WIDTH, HEIGHT), layout="constrained")
    for i, run in enumerate(runs[1:], 1):
        colour = f"C{i % len(PALETTE)}"
        window = max(1, min(20, len(run.series("loss")[0]) // 10))
        steps, values = thin(smooth(gap(runs[0].series("loss"), run.series("loss")), window))
        axis.plot(steps, [100 * v for v in values], color=colour, label=f"{run.label}, mean of {window} logs", linewidth=1.3)
        steps, values = gap(runs[0].series("val/loss"), run.series("val/loss"))
        axis.plot(steps, [100 * v for v in values], "o--", color=colour, markersize=4, label=f"{run.label} (validation)")
    axis.axhline(0, color=INK, linewidth=0.8)
    axis.set(xlabel="step", ylabel=f"loss over that of {runs[0].label}, %")
    _plain_numbers(axis)
    axis.legend(fontsize=8)
    return figure


def optimisation(runs: list[Run], panel: Panel) -> Figure | None:
    """The norm (logarithmic) beside the rate."""
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, HEIGHT), layout="constrained")
    drawn = [_curves(axis, runs, [(key, "-", "")], name, log) for axis, (key, name, log) in zip(
        axes, (("grad_norm", "gradient norm", True), ("lr", "learning rate", False)), strict=True)]  # fmt: skip
    if any(drawn):
        return figure
    plt.close(figure)
    return None


def lines(runs: list[Run], panel: Panel) -> Figure | None:
    """The panel's first metric, of the runs in which it is not zero throughout."""
    return _lines([r for r in runs if any(r.series(panel.keys[0])[1])], [(panel.keys[0], "-", "")], panel.unit)


def stacked(runs: list[Run], panel: Panel) -> Figure | None:
    """Areas of the keys that match, one axis a run; as parts of their sum where the panel shows shares."""
    pattern = panel.keys[0]
    runs = [run for run in runs if run.keys(pattern)]
    if not runs:
        return None
    figure, axes = _axes(runs)
    for run, axis in zip(runs, axes, strict=False):
        keys = run.keys(pattern)
        tables = [dict(zip(*run.series(key), strict=True)) for key in keys]
        steps = some(sorted(set().union(*tables)))
        rows = [[table.get(s, 0.0) for s in steps] for table in tables]
        if panel.kind == "share":
            sums = [sum(column) or 1.0 for column in zip(*rows, strict=True)]
            rows = [[100 * v / total for v, total in zip(row, sums, strict=True)] for row in rows]
        labels = [re.sub(r"_gb$", "", key.partition("/")[2]) for key in keys]
        axis.stackplot(steps, rows, labels=labels, step="mid" if len(steps) > 1 else None, linewidth=0)
        axis.set(xlabel="step", ylabel=panel.unit, title=run.label, xlim=(steps[0], steps[-1]) if len(steps) > 1 else None)
        axis.set_ylim(0, 100 if panel.kind == "share" else None)
        _plain_numbers(axis)
    return figure


def _legends_below(figure: Figure | None) -> Figure | None:
    """A legend under each axis, in the order of the stack, where it hides nothing."""
    for axis in figure.axes if figure is not None else ():
        if axis.get_visible():
            axis.legend(fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=5, handlelength=1.2, columnspacing=1.2)
    return figure


def shares(runs: list[Run], panel: Panel) -> Figure | None:
    return _legends_below(stacked(runs, panel))


def memory(runs: list[Run], panel: Panel) -> Figure | None:
    """Classes stacked; the allocator's own peak as a line."""
    figure = stacked(runs, panel)
    if figure is None:
        keys = [("memory/allocated_gb", "-", " allocated"), ("memory/reserved_gb", "--", " reserved")]
        return _lines(runs, keys, panel.unit)
    shown = [run for run in runs if run.keys(panel.keys[0])]
    for run, axis in zip(shown, figure.axes, strict=False):
        steps, values = thin(run.series("memory/allocated_gb"))
        if steps:
            axis.plot(steps, values, color=INK, linewidth=1, label="peak allocated")
            axis.set_ylim(0, 1.05 * max(axis.get_ylim()[1], *values))
    return _legends_below(figure)


def _heat(axis: Any, grid: Grid, panel: Panel, title: str) -> None:
    scale = SCALES[panel.image]
    colours = plt.get_cmap(MAPS[scale.colours]).with_extremes(bad="#c3c9d1")
    image = axis.imshow(grid.values, cmap=colours, vmin=scale.low, vmax=scale.high, aspect="auto", interpolation="none")
    axis.grid(False)
    every = max(1, len(grid.rows) // 24)
    axis.set_yticks(range(0, len(grid.rows), every), grid.rows[::every], fontsize=7)
    names = grid.across == "tensor"
    every = 1 if names else max(1, math.ceil(len(grid.columns) / (16 if grid.across == "expert" else 6)))
    places = range(0, len(grid.columns), every)
    turned = {"rotation": 60, "ha": "right", "fontsize": 7} if names else {}
    axis.set_xticks(places, [grid.columns[i] for i in places], **turned)
    axis.set(ylabel="layer", xlabel="" if names else grid.across, title=title)
    axis.figure.colorbar(image, ax=axis, label=panel.unit, pad=0.01).outline.set_visible(False)


def over_time(runs: list[Run], panel: Panel) -> Figure | None:
    """Layer x step."""
    runs = [run for run in runs if run.keys(panel.keys[0])]
    if not runs:
        return None
    figure, axes = _axes(runs)
    for run, axis in zip(runs, axes, strict=False):
        series = {key: dict(zip(*run.series(key), strict=True)) for key in run.keys(panel.keys[0])}
        shown = some(sorted(set().union(*series.values())))
        _heat(axis, time_grid({key: {s: table[s] for s in shown if s in table} for key, table in series.items()}), panel, run.label)
    return figure


def load_by_expert(runs: list[Run], panel: Panel) -> Figure | None:
    """Load of each expert, layer x expert, at three moments of each run: first, middle, last."""
    chosen = []
    for run in runs:
        details = run.details("load", list)
        places = sorted({0, len(details) // 2, len(details) - 1}) if details else []
        chosen += [(f"{run.label}, step {details[i][0]:,}", load_grid(details[i][1])) for i in places]
    return _column(chosen, panel, 0.14)


def _column(chosen: list[tuple[str, Grid]], panel: Panel, a_row: float) -> Figure | None:
    """Heat maps under each other; `a_row`: inches that a layer takes."""
    if not chosen:
        return None
    heights = [max(1.2, a_row * len(grid.rows)) + (1.7 if grid.across == "tensor" else 0.75) for _, grid in chosen]
    size = WIDTH, sum(heights)
    figure, axes = plt.subplots(len(chosen), 1, figsize=size, height_ratios=heights, squeeze=False, layout="constrained")
    for (title, grid), axis in zip(chosen, axes[:, 0], strict=True):
        _heat(axis, grid, panel, title)
    return figure


def per_layer(runs: list[Run], panel: Panel) -> Figure | None:
    """A line a layer, coloured by depth."""
    runs = [run for run in runs if run.keys(panel.keys[0])]
    if not runs:
        return None
    figure, axes = _axes(runs)
    colours = ListedColormap(plt.get_cmap("viridis")(np.linspace(0.25, 0.95, 256)))  # whose ends show on dark and on light paper
    for run, axis in zip(runs, axes, strict=False):
        keys = run.keys(panel.keys[0])
        for i, key in enumerate(keys):
            axis.plot(*thin(run.series(key)), color=colours(i / max(len(keys) - 1, 1)), linewidth=1, label=f"layer {layer_of(key)}")
        axis.set(xlabel="step", ylabel=panel.unit, title=run.label)
        _plain_numbers(axis)
        if len(keys) <= MAX_LAYERS_IN_LEGEND:
            axis.legend(fontsize=7)
        else:
            bar = axis.figure.colorbar(plt.cm.ScalarMappable(plt.Normalize(0, 1), colours), ax=axis, label="layer", pad=0.01)
            bar.set_ticks([0, 1], labels=[layer_of(keys[0]), layer_of(keys[-1])])
            bar.outline.set_visible(False)
    return figure


def health(runs: list[Run], panel: Panel) -> Figure | None:
    """Layer x tensor class of a run's last measurement."""
    last = [(run, *run.details("fp8", float)[-1]) for run in runs if run.details("fp8", float)]
    found = [(f"{run.label}, step {step:,}", health_grid(table, panel.name)) for run, step, table in last]
    return _column([(title, grid) for title, grid in found if grid is not None], panel, 0.16)


DRAW: dict[str, Callable[[list[Run], Panel], Figure | None]] = {
    "loss": loss, "gap": loss_gap, "mtp": lines, "optimisation": optimisation, "throughput": lines, "phases": shares,
    "memory": memory, "wire": shares, "load": over_time, "experts": load_by_expert, "entropy": per_layer, "bias": per_layer,
    "cosine": health, "underflow": health,
}  # fmt: skip


def draw(runs: list[Run], panel: Panel) -> Figure | None:
    """The panel's figure, None where no run has its metrics. Raises UserError: a panel that nothing draws."""
    if panel.name not in DRAW:
        own = f'"{panel.name}": lines'
        raise UserError(f"nothing draws the panel {panel.name}: add {own}, or another function, to DRAW in tools/report_figures.py")
    return DRAW[panel.name](runs, panel)
