"""Heat maps as images, drawn in milliseconds: a training loop has no second for a plotting library."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from training.panels import Grid

# Nine colours from low to high; between them colours are mixed.
COLOURS = {
    "sequential": "440154 472c7a 3b518b 2c718e 218f8d 27ad81 5cc863 aadc32 fde725",
    "warm": "000004 1c1044 4f127b 812581 b5367a e55064 fb8761 fec287 fcfdbf",
    "diverging": "053061 2166ac 4393c3 92c5de f7f7f7 f4a582 d6604d b2182b 67001f",
}
MISSING, INK, PAPER = (208, 212, 218), (40, 46, 56), (255, 255, 255)
WIDTH, BAR, GAP, TEXT = 900, 14, 8, 12  # pixels: of the cells about, of the colour bar, between parts, of the letters


@dataclass(frozen=True)
class Scale:
    """Which colours stand for which values; `low` and `high` are the data's where None."""

    colours: str = "sequential"
    low: float | None = None
    high: float | None = None


def colour(values: np.ndarray, scale: Scale) -> tuple[np.ndarray, float, float]:
    """([..., 3] uint8, the low and the high end) of values; NaN is grey."""
    finite = values[np.isfinite(values)]
    low = scale.low if scale.low is not None else float(finite.min(initial=math.inf))
    high = scale.high if scale.high is not None else float(finite.max(initial=-math.inf))
    if not low < high:
        low, high = (low, low + 1e-9) if math.isfinite(low) else (0.0, 1.0)
    table = np.array([[int(c[i : i + 2], 16) for i in (0, 2, 4)] for c in COLOURS[scale.colours].split()], dtype=float)
    place = np.clip((np.nan_to_num(values, nan=low) - low) / (high - low), 0, 1) * (len(table) - 1)
    found = np.stack([np.interp(place, range(len(table)), table[:, i]) for i in range(3)], -1)
    found[~np.isfinite(values)] = MISSING
    return found.round().astype(np.uint8), low, high


def draw(grid: Grid, title: str, unit: str, scale: Scale) -> Any:
    """The grid as a PIL image, with its labels, a colour bar and what its ends mean.

    Raises:
        ImportError: Pillow is not installed.
    """
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(TEXT)
    width_of = lambda text: int(font.getlength(text)) + 1  # noqa: E731
    title = title if unit in title else f"{title}: {unit}"
    values = np.array(grid.values, dtype=float)
    num_rows, num_columns = values.shape
    wide = min(max(WIDTH // num_columns, 2), 60)
    tall = min(max(440 // num_rows, 6), 26)
    pixels, low, high = colour(values, scale)
    cells = Image.fromarray(pixels.repeat(tall, 0).repeat(wide, 1))
    upright = max(map(len, grid.columns)) * 7 > wide * (1 if num_columns <= 40 else num_columns)  # names that do not fit across
    ends = [f"{high:.4g}", f"{low:.4g}"]
    left = max(map(width_of, [*grid.rows, "layer"])) + GAP
    top, below = 3 * TEXT + GAP, (max(map(width_of, grid.columns)) if upright else TEXT) + TEXT + 2 * GAP
    right = GAP + BAR + GAP + max(map(width_of, ends)) + GAP
    image = Image.new("RGB", (max(left + cells.width + right, width_of(title) + GAP), top + cells.height + below), PAPER)
    image.paste(cells, (left, top))
    pen = ImageDraw.Draw(image)
    write = lambda x, y, text, anchor: pen.text((x, y), text, INK, font, anchor)  # noqa: E731
    write(GAP // 2, TEXT, title, "lm")
    write(left - GAP // 2, top - GAP, "layer", "rm")
    every = -(-TEXT // tall)
    for row in range(0, num_rows, every):
        write(left - GAP // 2, top + row * tall + tall // 2, grid.rows[row], "rm")
    every = 1 if upright else max(1, -(-(max(map(width_of, grid.columns)) + GAP) // wide))
    for column in range(0, num_columns, every):
        x, y = left + column * wide + wide // 2, top + cells.height + GAP // 2
        if upright:
            name = grid.columns[column]
            label = Image.new("RGB", (width_of(name), TEXT + 4), PAPER)
            ImageDraw.Draw(label).text((0, TEXT // 2 + 2), name, INK, font, "lm")
            image.paste(label.rotate(90, expand=True), (x - TEXT // 2 - 2, y))
        else:
            write(x, y, grid.columns[column], "mt")
    write(left + cells.width // 2, image.height - 2, grid.across, "mb")
    bar, _, _ = colour(np.linspace(high, low, cells.height)[:, None].repeat(BAR, 1), Scale(scale.colours, low, high))
    image.paste(Image.fromarray(bar), (left + cells.width + GAP, top))
    for end, y, anchor in zip(ends, (top, top + cells.height), ("lt", "lb"), strict=True):
        write(left + cells.width + 2 * GAP + BAR, y, end, anchor)
    return image


SCALES = {
    "load/over_time": Scale("warm", low=1.0),
    "load/by_expert": Scale("diverging", 0.0, 2.0),
    "load/entropy_over_time": Scale("sequential", high=1.0),
    "bias/over_time": Scale("sequential", low=0.0),
    "fp8/cosine_by_layer": Scale("sequential", high=1.0),
    "fp8/underflow_by_layer": Scale("warm", low=0.0),
}
