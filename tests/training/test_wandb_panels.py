"""What wandb really gets: the package itself, offline, and its file read back."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from training.config import Config, LogConfig, RunConfig
from training.errors import UserError
from training.heat_map import MISSING, SCALES, Scale, colour, draw
from training.metrics import Metrics
from training.panels import PANELS, Grid, LayerHistory, health_grid, layer_of, load_grid, time_grid

ROUTERS = [f"layers.{i}.block.router" for i in (1, 2, 10)] + ["mtp.block.router"]
HEALTH = {f"layers.{i}.attention.qkv/{role}/{m}": 0.99 for i in range(2) for role in ("activation", "gradient_t")
          for m in ("cosine", "underflow")} | {"head/weight/cosine": 1.0}  # fmt: skip


def records_of(path: Path) -> list[Any]:
    """The protobuf records of a .wandb file: a log of 32 KiB blocks, each record in pieces with a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, place, found, whole = path.read_bytes(), 7, [], b""
    while place + 7 <= len(data):
        room = 32768 - place % 32768
        if room < 7:
            place += room
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            found.append(wandb_internal_pb2.Record.FromString(whole))
            whole = b""
    return found


def row_of(history: Any) -> dict[str, Any]:
    """One logged row; a picture is a value with parts."""
    row: dict[str, Any] = {}
    for item in history.item:
        name, *part = item.nested_key or [item.key]
        if part:
            row.setdefault(name, {})[part[0]] = json.loads(item.value_json)
        else:
            row[name] = json.loads(item.value_json)
    return row


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Four steps of a run with every kind of value, under the real wandb, and the same run gone on after a resume."""
    pytest.importorskip("wandb")
    root = tmp_path_factory.mktemp("wandb")
    reference = [{"step": s, "loss": 4.0 - s} for s in range(1, 4)] + [{"step": 2, "val/loss": 2.0}]
    (root / "ref").mkdir()
    (root / "ref/metrics.jsonl").write_text("\n".join(map(json.dumps, reference)) + "\n")
    log = LogConfig(wandb="offline", progress=False, reference=str(root / "ref"))
    config, wandb_id = Config(run=RunConfig(dir=str(root / "run")), log=log), None
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_DIR"):
            patch.delenv(name, raising=False)
        for done in (0, 3):
            metrics = Metrics(config, active=True)
            wandb_id = metrics.start(done, wandb_id)
            for step in range(done + 1, done + 4):
                values = {"loss": 4.4 - 1.1 * step, "tokens_per_s": 1e5, "time/forward": 0.1, "memory/allocated_gb": 10.0 + step}
                values |= {f"load/{r}/max_over_mean": 1 + step / 10 for r in ROUTERS}
                values |= {f"load/{r}/entropy": 0.9 for r in ROUTERS} | {f"bias/{r}/range": 0.01 for r in ROUTERS}
                metrics.log(step, values, {"load": {r: [step, 1, 2, 1] for r in ROUTERS}} if step != 2 else None)
            metrics.log(2, {"val/loss": 2.2, "val/bits_per_byte": 1.0})
            metrics.log(3, {"fp8/attention.qkv/activation/cosine": 0.99}, {"fp8": HEALTH})
            metrics.close()
            time.sleep(1.1)  # wandb names a run's folder by the second
    runs = sorted((root / "run/wandb").glob("offline-run-*"))
    records = [records_of(next(run.glob("*.wandb"))) for run in runs]
    rows = [row_of(r.history) for part in records for r in part if r.WhichOneof("record_type") == "history"]
    metric = {r.metric.name or r.metric.glob_name: r.metric for r in records[0] if r.WhichOneof("record_type") == "metric"}
    return {"root": root, "runs": runs, "rows": rows, "metric": metric}


def test_every_panel_of_the_report_is_in_wandb(logged: dict[str, Any]) -> None:
    """As a curve that was logged, or as a heat map whose image was."""
    keys = {key for row in logged["rows"] for key in row}
    images = {panel.image for panel in PANELS if panel.image}
    assert images == set(SCALES) and images <= keys
    assert {"loss", "val/loss", "gap/loss", "gap/val_loss", "tokens_per_s", "time/forward", "memory/allocated_gb"} <= keys
    assert all(panel.keys or panel.image for panel in PANELS)


def test_images_are_files_with_captions(logged: dict[str, Any]) -> None:
    rows = [row for row in logged["rows"] if "load/by_expert" in row]
    assert [row["step"] for row in rows] == [1, 3, 4, 5, 6]
    entry = rows[0]["load/by_expert"]
    assert entry["_type"] == "image-file" and entry["caption"].startswith("Tokens of each expert")
    picture = matplotlib.image.imread(logged["runs"][0] / "files" / entry["path"])
    assert picture.shape[:2] == (entry["height"], entry["width"])
    assert len({tuple(c) for c in picture[..., :3].reshape(-1, 3).tolist()}) > 50


def test_maps_over_time_go_on_after_a_resume(logged: dict[str, Any]) -> None:
    """Wider with every logged step, and not shorter after the resume at step 3."""
    columns = []
    for row in (r for r in logged["rows"] if "load/over_time" in r):
        folder = next(run for run in logged["runs"] if (run / "files" / row["load/over_time"]["path"]).is_file())
        columns.append(matplotlib.image.imread(folder / "files" / row["load/over_time"]["path"]).shape[1])
    assert columns == sorted(columns) and columns[0] < columns[2] < columns[-1]


def test_axis_summaries_and_what_has_no_chart_of_its_own(logged: dict[str, Any]) -> None:
    metric = logged["metric"]
    assert metric["step"].options.hidden and metric["*"].step_metric == "step"
    assert metric["val/loss"].summary.min and metric["memory/allocated_gb"].summary.max
    for glob in ("load/layers*", "load/mtp*", "bias/layers*", "bias/mtp*"):
        assert metric[glob].options.hidden and metric[glob].step_metric == "step", glob


def test_gaps_to_a_reference_run(logged: dict[str, Any]) -> None:
    """In percent, at equal steps, in wandb and in the file."""
    rows = logged["rows"]
    assert [row["gap/loss"] for row in rows if "gap/loss" in row] == pytest.approx([10.0] * 3)
    assert [row["gap/val_loss"] for row in rows if "gap/val_loss" in row] == pytest.approx([10.0] * 2)
    assert '"gap/loss": 10.0' in (logged["root"] / "run/metrics.jsonl").read_text()
    for bad, message in (("nowhere", "cannot read"), ("empty", "holds no losses")):
        (logged["root"] / "empty").mkdir(exist_ok=True)
        (logged["root"] / "empty/metrics.jsonl").write_text('{"step": 1}\n')
        config = Config(run=RunConfig(dir=str(logged["root"] / bad / "run")), log=LogConfig(reference=str(logged["root"] / bad)))
        with pytest.raises(UserError, match=f"log.reference=.*{message}"):
            Metrics(config, active=True).start(0, None)


# ---------------------------------------------------------------- tables and pictures


def test_grids_have_layers_in_order_and_say_what_is_missing() -> None:
    assert [layer_of(r) for r in ROUTERS] == ["1", "2", "10", "mtp"]
    grid = load_grid({"layers.1.block.router": [3, 1], "layers.2.block.router": [0, 0]})
    assert grid == Grid([[1.5, 0.5], [0.0, 0.0]], ["1", "2"], ["0", "1"], "expert")
    grid = time_grid({"load/layers.10.x/entropy": {5: 0.5}, "load/layers.2.x/entropy": {5: 0.1, 1000: 0.2}})
    assert grid.rows == ["2", "10"] and grid.columns == ["5", "1,000"] and np.isnan(grid.values[1][1])
    grid = health_grid(HEALTH, "cosine")
    assert grid.rows == ["0", "1", "head"] and len(grid.columns) == 3 and np.isnan(grid.values[2][0])
    assert health_grid(HEALTH, "saturation") is None


def test_the_history_stays_small() -> None:
    history = LayerHistory(limit=8)
    for step in range(1, 101):
        history.note(step, {"load/layers.1.r/entropy": step, "load/dead": 0.0, "loss": 1.0})
    grid = history.grid("load/.+/entropy")
    assert 4 <= len(grid.columns) <= 8 and grid.columns[0] == "1" and grid.rows == ["1"]
    assert history.grid("bias/.+/range") is None


def test_colours_run_from_low_to_high_and_grey_is_missing() -> None:
    pixels, low, high = colour(np.array([[0.0, 1.0, 2.0, 9.0, np.nan]]), Scale("diverging", 0.0, 2.0))
    assert (low, high) == (0.0, 2.0)
    assert pixels[0, 1].tolist() == [247, 247, 247] and (pixels[0, 2] == pixels[0, 3]).all()
    assert pixels[0, 0, 2] > pixels[0, 0, 0] and pixels[0, 2, 0] > pixels[0, 2, 2]  # blue below, red above
    assert tuple(pixels[0, 4]) == MISSING
    assert colour(np.full((1, 2), np.nan), Scale())[1:] == (0.0, 1.0)


@pytest.mark.parametrize("shape", [(1, 1), (80, 256), (3, 1000)])
def test_any_size_can_be_drawn(shape: tuple[int, int]) -> None:
    rows, columns = shape
    grid = Grid(np.random.default_rng(0).random(shape).tolist(), [*map(str, range(rows))], [*map(str, range(columns))], "step")
    picture = draw(grid, "A title", "unit", Scale())
    assert 60 < picture.width < 2400 and picture.height < 900
