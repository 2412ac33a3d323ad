"""wandb: one run a job, the same run after a resume, and never a reason to stop training.

It shows the panels of tools.report (training/panels.py): curves by themselves, one section a prefix; what is one curve a layer
is left out of the automatic charts and drawn as heat maps instead. tools/wandb_workspace.py arranges them as the report does.
"""

from __future__ import annotations

import netrc
import os
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from training.heat_map import SCALES, draw
from training.panels import PANELS, PER_LAYER, Grid, LayerHistory, health_grid, load_grid

INIT_TIMEOUT_S = 30  # wandb's own 90 s is long to wait for a server that is not there


def stored_id(run_dir: str) -> str | None:
    """The wandb id of the run in `run_dir`, if it has one."""
    path = Path(run_dir) / "wandb_id"
    return path.read_text(encoding="utf-8").strip() or None if path.is_file() else None


def has_key() -> bool:
    """Whether wandb can log in without asking: an environment variable or an entry in ~/.netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("://")[2].partition("/")[0].partition(":")[0]
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class WandbLog:
    """One wandb run, opened at construction. Make it on rank 0 only.

    Every failure, from a missing package to a dead server, costs one warning and nothing else; online falls back to offline.

    Attributes:
        id: the run's id; kept in RUN/wandb_id and in checkpoints, so that a resume continues the run.
    """

    def __init__(
        self,
        run_dir: str,
        mode: str,
        project: str,
        entity: str | None,
        name: str,
        run_id: str | None,
        config: dict[str, Any],
        warn: Callable[[str], None],
    ) -> None:
        self._run, self._warn, self._history, self._draws = None, warn, LayerHistory(), True
        self.id = run_id or stored_id(run_dir) or uuid.uuid4().hex[:8]
        if mode == "off":
            return
        if mode == "auto":
            mode = os.environ.get("WANDB_MODE") or ("online" if has_key() else "offline")
        try:
            import wandb
        except ImportError:
            warn("wandb is not installed (pip install wandb); metrics go to metrics.jsonl and the console")
            return
        options = dict(dir=run_dir, project=project, entity=entity, name=name, id=self.id, resume="allow", config=config)
        for attempt in dict.fromkeys((mode, "offline")):
            try:
                Path(run_dir).mkdir(parents=True, exist_ok=True)
                settings = wandb.Settings(init_timeout=INIT_TIMEOUT_S, silent=True, console="off")
                self._run = wandb.init(**options, mode=attempt, settings=settings)
                _define_metrics(self._run)
                (Path(run_dir) / "wandb_id").write_text(self.id + "\n", encoding="utf-8")
                return
            except Exception as error:
                self._run = None
                warn(f"wandb ({attempt}) failed: {_first_line(error)}")

    def remember(self, records: Iterable[dict[str, Any]]) -> None:
        """What was logged before a resume, for the heat maps over time."""
        for record in records:
            self._history.note(record["step"], record)

    def log(self, step: int, values: dict[str, float], detail: dict[str, Any] | None = None) -> None:
        """Values of one step; train and evaluation share the axis. `detail`: tables by layer, which become heat maps."""
        if self._run is None:
            return
        self._history.note(step, values)
        try:
            images = self._images(step, detail or {}) if self._draws else {}
            self._run.log({**values, **images, "step": step})
        except Exception as error:
            self._run = None
            self._warn(f"wandb stopped: {_first_line(error)}; metrics go on in metrics.jsonl")

    def _images(self, step: int, detail: dict[str, Any]) -> dict[str, Any]:
        """Heat maps of what was measured at this step."""
        import wandb

        grids: dict[str, Grid | None] = {}
        if detail.get("load"):
            grids["experts"] = load_grid(detail["load"])
            grids |= {panel.name: self._history.grid(panel.keys[0]) for panel in PANELS if panel.image and panel.keys}
        if detail.get("fp8"):
            grids |= {metric: health_grid(detail["fp8"], metric) for metric in ("cosine", "underflow")}
        shown = {panel: grids[panel.name] for panel in PANELS if grids.get(panel.name) is not None}
        try:
            pictures = {p: draw(grid, f"{p.title}, step {step:,}", p.unit, SCALES[p.image]) for p, grid in shown.items()}
        except ImportError:
            self._draws = False
            self._warn("no heat maps in wandb without Pillow (pip install pillow)")
            return {}
        return {p.image: wandb.Image(picture, caption=p.text) for p, picture in pictures.items()}

    def finish(self) -> None:
        if self._run is None:
            return
        try:
            self._run.finish()
        except Exception as error:
            self._warn(f"wandb did not finish cleanly: {_first_line(error)}")


def _define_metrics(run: Any) -> None:
    """The axis, what the table of runs shows, and which metrics get no chart of their own."""
    # Steps are a metric of their own: wandb drops rows whose own step counter goes back, as a resume does.
    run.define_metric("step", hidden=True)
    for name in ("val/loss", "val/bits_per_byte"):
        run.define_metric(name, step_metric="step", summary="min")
    for name in ("memory/allocated_gb", "memory/reserved_gb"):
        run.define_metric(name, step_metric="step", summary="max")
    for pattern in PER_LAYER:
        run.define_metric(pattern, step_metric="step", hidden=True)
    run.define_metric("*", step_metric="step")  # last: what no rule before it names


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
