"""What is shown of a run: the panels of tools.report and of wandb, one list for both, and the tables behind their heat maps."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Panel:
    """A figure: lines of the metrics that match `keys`, or a heat map.

    Attributes:
        section: of wandb's workspace.
        keys: regular expressions of metrics; each is drawn by itself, or all together where `kind` stacks them.
        kind: "lines", "share" (stacked parts of their sum), "stack", or "heat".
        image: key of the heat map in wandb.
        log: whether the vertical axis is logarithmic.
    """

    name: str  # of its PNG
    section: str
    title: str
    text: str  # what it shows and how to read it
    keys: tuple[str, ...]
    unit: str = ""
    kind: str = "lines"
    image: str | None = None
    log: bool = False


PANELS = (
    Panel("loss", "Loss", "Loss", "Training loss of each logged step, and validation loss.", ("loss", "val/loss"), "nats / token"),
    Panel(
        "gap", "Loss", "Loss gap", "Relative difference to the first run at equal steps: what a change of recipe costs.",
        ("gap/loss", "gap/val_loss"), "loss over the reference's, %",
    ),
    Panel("mtp", "Loss", "Multi-token prediction", "Loss of the token after next.", ("mtp_loss",), "nats / token"),
    Panel(
        "optimisation", "Loss", "Gradient norm and learning rate", "The norm before clipping.", ("grad_norm", "lr"),
        "gradient norm, learning rate", log=True,
    ),
    Panel(
        "throughput", "Speed", "Throughput", "Tokens a second over all ranks; evaluation and checkpoints do not count.",
        ("tokens_per_s",), "tokens / s, all ranks",
    ),
    Panel(
        "phases", "Speed", "Phase shares", "Where the time of a step goes on rank 0.", (r"time/(?!eval|checkpoint).*",),
        "share of a step, %", "share",
    ),
    Panel(
        "memory", "Memory", "Memory", "By class on rank 0; the line, on a GPU, is the allocator's peak since the last log.",
        (r"memory/(weights|transposes|gradients|states|activations)_gb", "memory/allocated_gb"), "GB on rank 0", "stack",
    ),
    Panel(
        "wire", "Wire", "Bytes on the wire", "What rank 0 sends in a step, by kind: payload with its scales.", (r"wire/.*_gb",),
        "GB sent in a step by rank 0", "stack",
    ),
    Panel(
        "load", "Experts", "Expert load over time", "Tokens of the busiest expert over the mean: 1 is even.",
        (r"load/.+/max_over_mean",), "busiest expert / mean", "heat", "load/over_time",
    ),
    Panel(
        "experts", "Experts", "Expert load by expert", "Tokens of each expert over the mean of its layer: 1 is even.", (),
        "tokens / mean", "heat", "load/by_expert",
    ),
    Panel(
        "entropy", "Experts", "Router entropy", "Of each layer's load over log E: 1 is even.", (r"load/.+/entropy",),
        "entropy of the load / log E", image="load/entropy_over_time",
    ),
    Panel(
        "bias", "Experts", "Expert bias", "Spread of the bias that steers the load.", (r"bias/.+/range",),
        "largest - smallest expert bias", image="bias/over_time",
    ),
    Panel(
        "cosine", "FP8 health", "FP8 health: cosine",
        "Between a tensor and its quantised form; 1 is lossless. Grey: not measured.", (), "cosine", "heat", "fp8/cosine_by_layer",
    ),
    Panel(
        "underflow", "FP8 health", "FP8 health: underflow", "Share of non-zero elements that became zero.", (), "underflow", "heat",
        "fp8/underflow_by_layer",
    ),
)  # fmt: skip
PER_LAYER = ("load/layers*", "load/mtp*", "bias/layers*", "bias/mtp*")  # too many for a chart each: heat maps show them


@dataclass(frozen=True)
class Grid:
    """A heat map's numbers: rows from the top down, NaN where there is none."""

    values: list[list[float]]
    rows: list[str]
    columns: list[str]
    across: str  # what a column is


def layer_of(key: str) -> str:
    """`load/layers.3.block.router/entropy` -> `3`."""
    found = re.search(r"layers\.(\d+)", key)
    return found[1] if found else "mtp" if "mtp" in key else key


def in_order(names: Sequence[str]) -> list[str]:
    """Numbers in names in numeric order."""
    return sorted(names, key=lambda k: [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in re.split(r"(\d+)", k)])


def load_grid(counts: Mapping[str, Sequence[int]]) -> Grid:
    """Tokens of each expert over its layer's mean, layer x expert, from tokens by router."""
    rows = [[v / max(sum(row) / len(row), 1e-9) for v in row] for row in counts.values()]
    return Grid(rows, [layer_of(name) for name in counts], [str(e) for e in range(max(map(len, rows)))], "expert")


def time_grid(series: Mapping[str, Mapping[int, float]]) -> Grid:
    """A metric's layers x logged steps, from (step -> value) by key."""
    steps = sorted(set().union(*series.values()))
    keys = in_order(list(series))
    values = [[series[key].get(step, math.nan) for step in steps] for key in keys]
    return Grid(values, [layer_of(key) for key in keys], [f"{step:,}" for step in steps], "step")


def health_grid(measured: Mapping[str, float], metric: str) -> Grid | None:
    """One metric of "LAYER.TENSOR/ROLE/METRIC", layer x tensor class; None where it was not measured."""
    cells = {}
    for key, value in measured.items():
        name, _, kind = key.rpartition("/")
        if kind == metric:
            layer = re.match(r"layers\.(\d+)\.", name)
            cells[layer[1] if layer else re.split(r"[./]", name)[0], re.sub(r"^(layers\.\d+|mtp)\.", "", name)] = value
    if not cells:
        return None
    layers, classes = in_order({k[0] for k in cells}), sorted({k[1] for k in cells})
    values = [[cells.get((layer, c), math.nan) for c in classes] for layer in layers]
    return Grid(values, layers, classes, "tensor")


@dataclass
class LayerHistory:
    """Values by layer and step of the metrics that heat maps show over time; at most `limit` steps, every other one dropped."""

    limit: int = 400
    _series: dict[str, dict[int, float]] = field(default_factory=dict)

    def note(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            if key.startswith(("load/", "bias/")) and key.count("/") == 2:
                self._series.setdefault(key, {})[step] = value
        if any(len(s) > self.limit for s in self._series.values()):
            self._series = {key: dict(list(s.items())[::2]) for key, s in self._series.items()}

    def grid(self, pattern: str) -> Grid | None:
        """Of the keys that match; None when there are none yet."""
        found = {key: values for key, values in self._series.items() if re.fullmatch(pattern, key)}
        return time_grid(found) if found else None
