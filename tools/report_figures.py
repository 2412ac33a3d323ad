"""The figures of a report. Each takes the runs and returns a matplotlib figure, or None when no run has what it shows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from tools.report_data import Run, gap, smooth  # noqa: E402

WIDTH, HEIGHT = 9.0, 3.4  # inches
MAX_LAYERS_IN_LEGEND = 8
plt.rcParams.update({"axes.grid": True, "grid.alpha": 0.25, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})


@dataclass(frozen=True)
class Panel:
    """A figure's place in the page."""

    name: str  # of its PNG
    title: str
    text: str  # what it shows and how to read it
    draw: Callable[[list[Run]], Figure | None]


def _axes(runs: list[Run], height: float = HEIGHT) -> tuple[Figure, list]:
    """A figure with one axis a run, side by side up to two."""
    columns = min(len(runs), 2)
    rows = -(-len(runs) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(WIDTH, height * rows), squeeze=False, layout="constrained")
    flat = list(axes.flat)
    for axis in flat[len(runs) :]:
        axis.set_visible(False)
    return figure, flat


def _lines(runs: list[Run], keys: list[tuple[str, str, str]], ylabel: str, log: bool = False) -> Figure | None:
    """One axis, every run in its own colour; `keys`: (metric, matplotlib style, suffix of the label)."""
    figure, axis = plt.subplots(figsize=(WIDTH, HEIGHT), layout="constrained")
    drawn = False
    for i, run in enumerate(runs):
        for key, style, suffix in keys:
            steps, values = run.series(key)
            if steps:
                axis.plot(steps, values, style, color=f"C{i}", label=run.label + suffix, markersize=4, linewidth=1.2)
                drawn = True
    if not drawn:
        plt.close(figure)
        return None
    axis.set(xlabel="step", ylabel=ylabel, yscale="log" if log else "linear")
    axis.legend(fontsize=8)
    return figure


def loss(runs: list[Run]) -> Figure | None:
    return _lines(runs, [("loss", "-", ""), ("val/loss", "o--", " (validation)")], "nats / token")


def loss_gap(runs: list[Run]) -> Figure | None:
    """Relative difference of each run's loss to the first run's."""
    if len(runs) < 2:
        return None
    figure, axis = plt.subplots(figsize=(WIDTH, HEIGHT), layout="constrained")
    for i, run in enumerate(runs[1:], 1):
        window = max(1, min(20, len(run.series("loss")[0]) // 10))
        steps, values = smooth(gap(runs[0].series("loss"), run.series("loss")), window)
        axis.plot(steps, [100 * v for v in values], color=f"C{i}", label=f"{run.label}, mean of {window} logs", linewidth=1.2)
        steps, values = gap(runs[0].series("val/loss"), run.series("val/loss"))
        axis.plot(steps, [100 * v for v in values], "o--", color=f"C{i}", markersize=4, label=f"{run.label} (validation)")
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set(xlabel="step", ylabel=f"loss over that of {runs[0].label}, %")
    axis.legend(fontsize=8)
    return figure


def optimisation(runs: list[Run]) -> Figure | None:
    return _lines(runs, [("grad_norm", "-", ""), ("lr", ":", " (learning rate)")], "gradient norm, learning rate", log=True)


def mtp(runs: list[Run]) -> Figure | None:
    return _lines([r for r in runs if any(r.series("mtp_loss")[1])], [("mtp_loss", "-", "")], "nats / token")


def throughput(runs: list[Run]) -> Figure | None:
    return _lines(runs, [("tokens_per_s", "-", "")], "tokens / s, all ranks")


def _stacked(runs: list[Run], pattern: str, ylabel: str, share: bool) -> Figure | None:
    """Areas of the keys that match, one axis a run; `share`: as parts of their sum."""
    runs = [run for run in runs if run.keys(pattern)]
    if not runs:
        return None
    figure, axes = _axes(runs)
    for run, axis in zip(runs, axes, strict=False):
        keys = run.keys(pattern)
        tables = [dict(zip(*run.series(key), strict=True)) for key in keys]
        steps = sorted(set().union(*tables))
        rows = [[table.get(s, 0.0) for s in steps] for table in tables]
        if share:
            sums = [sum(column) or 1.0 for column in zip(*rows, strict=True)]
            rows = [[100 * v / total for v, total in zip(row, sums, strict=True)] for row in rows]
        labels = [re.sub(r"_gb$", "", key.partition("/")[2]) for key in keys]
        axis.stackplot(steps, rows, labels=labels, step="mid" if len(steps) > 1 else None)
        axis.set(xlabel="step", ylabel=ylabel, title=run.label)
        axis.legend(fontsize=7, loc="upper left", ncols=2)
    return figure


def phases(runs: list[Run]) -> Figure | None:
    return _stacked(runs, r"time/(?!eval|checkpoint).*", "share of a step, %", share=True)


def memory(runs: list[Run]) -> Figure | None:
    """Classes stacked; the allocator's own peak as a line."""
    figure = _stacked(runs, r"memory/(weights|gradients|states|activations)_gb", "GB on rank 0", share=False)
    if figure is None:
        keys = [("memory/allocated_gb", "-", " allocated"), ("memory/reserved_gb", "--", " reserved")]
        return _lines(runs, keys, "GB on rank 0")
    shown = [run for run in runs if run.keys(r"memory/(weights|gradients|states|activations)_gb")]
    for run, axis in zip(shown, figure.axes, strict=False):
        steps, values = run.series("memory/allocated_gb")
        if steps:
            axis.plot(steps, values, color="black", linewidth=1, label="peak allocated")
            axis.legend(fontsize=7, loc="upper left", ncols=2)
    return figure


def wire(runs: list[Run]) -> Figure | None:
    return _stacked(runs, r"wire/.*_gb", "GB sent in a step by rank 0", share=False)


def _heat(axis, table: list[list[float]], rows: list[str], label: str, **options) -> None:
    image = axis.imshow(table, aspect="auto", interpolation="nearest", **options)
    axis.grid(False)
    every = max(1, len(rows) // 24)
    axis.set_yticks(range(0, len(rows), every), rows[::every], fontsize=7)
    axis.figure.colorbar(image, ax=axis, label=label, pad=0.01)


def _layer(key: str) -> str:
    """`load/layers.3.block.router/entropy` -> `3`."""
    found = re.search(r"layers\.(\d+)", key)
    return found[1] if found else "mtp" if "mtp" in key else key


def load_over_time(runs: list[Run]) -> Figure | None:
    """Busiest expert over the mean, layer x step."""
    pattern = r"load/.+/max_over_mean"
    runs = [run for run in runs if run.keys(pattern)]
    if not runs:
        return None
    figure, axes = _axes(runs)
    for run, axis in zip(runs, axes, strict=False):
        keys = run.keys(pattern)
        steps = run.series(keys[0])[0]
        tables = [dict(zip(*run.series(key), strict=True)) for key in keys]
        rows = [[table.get(s, math.nan) for s in steps] for table in tables]
        _heat(axis, rows, [_layer(key) for key in keys], "busiest expert / mean", cmap="magma", vmin=1)
        ticks = range(0, len(steps), max(1, len(steps) // 6))
        axis.set_xticks(list(ticks), [str(steps[i]) for i in ticks])
        axis.set(xlabel="step", ylabel="layer", title=run.label)
    return figure


def load_by_expert(runs: list[Run]) -> Figure | None:
    """Load of each expert, layer x expert, at three moments of each run."""
    chosen = [(run, step, table) for run in runs for step, table in _moments(run.details("load"))]
    if not chosen:
        return None
    figure, axes = plt.subplots(len(chosen), 1, figsize=(WIDTH, 2.0 * len(chosen)), squeeze=False, layout="constrained")
    for (run, step, table), axis in zip(chosen, axes[:, 0], strict=True):
        rows = [[v / max(sum(counts) / len(counts), 1e-9) for v in counts] for counts in table.values()]
        _heat(axis, rows, [_layer(name) for name in table], "tokens / mean", cmap="RdBu_r", vmin=0, vmax=2)
        axis.set(ylabel="layer", title=f"{run.label}, step {step}")
    axes[-1, 0].set_xlabel("expert")
    return figure


def _moments(details: list) -> list:
    """First, middle and last."""
    return [details[i] for i in sorted({0, len(details) // 2, len(details) - 1})] if details else []


def _per_layer(runs: list[Run], pattern: str, ylabel: str) -> Figure | None:
    """A line a layer, coloured by depth."""
    runs = [run for run in runs if run.keys(pattern)]
    if not runs:
        return None
    figure, axes = _axes(runs)
    for run, axis in zip(runs, axes, strict=False):
        keys = run.keys(pattern)
        for i, key in enumerate(keys):
            colour = plt.get_cmap("viridis")(i / max(len(keys) - 1, 1))
            axis.plot(*run.series(key), color=colour, linewidth=1, label=f"layer {_layer(key)}")
        axis.set(xlabel="step", ylabel=ylabel, title=run.label)
        if len(keys) <= MAX_LAYERS_IN_LEGEND:
            axis.legend(fontsize=7)
    return figure


def entropy(runs: list[Run]) -> Figure | None:
    return _per_layer(runs, r"load/.+/entropy", "entropy of the load / log E")


def bias(runs: list[Run]) -> Figure | None:
    return _per_layer(runs, r"bias/.+/range", "largest - smallest expert bias")


def health(runs: list[Run], metric: str, label: str, **options) -> Figure | None:
    """Layer x tensor class of a run's last measurement."""
    found = [(run, *run.details("fp8")[-1]) for run in runs if run.details("fp8")]
    if not found:
        return None
    figure, axes = plt.subplots(len(found), 1, figsize=(WIDTH, 3.2 * len(found)), squeeze=False, layout="constrained")
    for (run, step, table), axis in zip(found, axes[:, 0], strict=True):
        cells = {}
        for key, value in table.items():
            name, _, kind = key.rpartition("/")
            if kind == metric:
                layer = re.match(r"layers\.(\d+)\.", name)
                cells[layer[1] if layer else name.split(".")[0].split("/")[0], re.sub(r"^(layers\.\d+|mtp)\.", "", name)] = value
        layers = sorted({k[0] for k in cells}, key=lambda x: (not x.isdigit(), int(x) if x.isdigit() else 0, x))
        classes = sorted({k[1] for k in cells})
        rows = [[cells.get((layer, c), math.nan) for c in classes] for layer in layers]
        _heat(axis, rows, layers, label, **options)
        axis.set_xticks(range(len(classes)), classes, rotation=60, ha="right", fontsize=7)
        axis.set(ylabel="layer", title=f"{run.label}, step {step}")
    return figure


def health_cosine(runs: list[Run]) -> Figure | None:
    return health(runs, "cosine", "cosine", cmap="viridis", vmax=1.0)


def health_underflow(runs: list[Run]) -> Figure | None:
    return health(runs, "underflow", "underflow", cmap="magma", vmin=0.0)


PANELS = (
    Panel("loss", "Loss", "Training loss of each logged step, and validation loss.", loss),
    Panel("gap", "Loss gap", "Relative difference to the first run at equal steps: what a change of recipe costs.", loss_gap),
    Panel("mtp", "Multi-token prediction", "Loss of the token after next.", mtp),
    Panel("optimisation", "Gradient norm and learning rate", "The norm before clipping.", optimisation),
    Panel("throughput", "Throughput", "Tokens a second over all ranks; evaluation and checkpoints do not count.", throughput),
    Panel("phases", "Phase shares", "Where the time of a step goes on rank 0.", phases),
    Panel("memory", "Memory", "By class on rank 0; the line is the allocator's peak since the last log.", memory),
    Panel("wire", "Bytes on the wire", "What rank 0 sends in a step, by kind: payload with its scales.", wire),
    Panel("load", "Expert load over time", "Tokens of the busiest expert over the mean: 1 is even.", load_over_time),
    Panel(
        "experts", "Expert load by expert", "Tokens of each expert over the mean of its layer: early, midway, last.", load_by_expert
    ),
    Panel("entropy", "Router entropy", "Of each layer's load over log E: 1 is even.", entropy),
    Panel("bias", "Expert bias", "Spread of the bias that steers the load.", bias),
    Panel(
        "cosine",
        "FP8 health: cosine",
        "Between a tensor and its quantised form; 1 is lossless. White: not measured.",
        health_cosine,
    ),
    Panel("underflow", "FP8 health: underflow", "Share of non-zero elements that became zero.", health_underflow),
)
