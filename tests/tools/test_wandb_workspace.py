"""The saved view of wandb: every panel of the report, and what the wandb-workspaces package makes of it where it is installed."""

from __future__ import annotations

import builtins
import json
import re
from typing import Any

import pytest

from tools import wandb_workspace
from tools.wandb_workspace import plots, workspace
from training.errors import exit_status
from training.panels import PANELS

LOGGED = ["loss", "val/loss", "gap/loss", "gap/val_loss", "mtp_loss", "grad_norm", "lr", "tokens_per_s", "time/forward",
          "time/eval", "memory/weights_gb", "memory/allocated_gb", "wire/dispatch_gb", "load/layers.1.block.router/entropy",
          "load/dead", "bias/mtp.block.router/range"]  # fmt: skip


def test_every_panel_is_there_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(lambda: wandb_workspace.main(["--print"])) == 0
    sections = json.loads(capsys.readouterr().out)
    assert list(sections) == list(dict.fromkeys(panel.section for panel in PANELS))
    shown = [plot for found in sections.values() for plot in found]
    assert {p["image"] for p in shown if "image" in p} == {panel.image for panel in PANELS if panel.image}
    for panel in PANELS:
        assert any(panel.title in plot["title"] or plot["title"] in panel.keys for plot in shown), panel.name


def test_each_chart_shows_metrics_that_runs_log() -> None:
    for found in plots().values():
        for plot in found:
            if "image" not in plot:
                names = plot.get("keys") or [name for name in LOGGED if re.search(plot["regex"], name)]
                assert names and set(names) <= set(LOGGED), plot
                assert "time/eval" not in names


def test_the_package_takes_it() -> None:
    pytest.importorskip("wandb_workspaces")
    spec = workspace("me", "p", "octet")._to_model().model_dump_json(by_alias=True)
    for word in ("pct-area", "stacked-area", "load/by_expert", "fp8/cosine_by_layer", "^time/(?!eval|checkpoint).*$", "val/loss"):
        assert json.dumps(word)[1:-1] in spec, word


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    imported = builtins.__import__

    def missing(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("wandb_workspaces"):
            raise ImportError(f"No module named {name!r}")
        return imported(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert exit_status(lambda: wandb_workspace.main(["--entity", "me"])) == 2
    assert "pip install wandb wandb-workspaces" in capsys.readouterr().err
