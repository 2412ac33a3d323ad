"""The report's panels as a saved view of a wandb project, in the report's order and sections.

    python -m tools.wandb_workspace --project octet [--entity NAME]     needs `pip install wandb-workspaces` and a wandb key
    python -m tools.wandb_workspace --print                             what it would make, as JSON; needs neither

Without it wandb shows the same metrics by itself, one chart each in a section for each prefix, and the heat maps as images.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tools.arguments import make_parser
from training.config import LogConfig
from training.errors import UserError, exit_status
from training.panels import PANELS

AREAS = {"share": "pct-area", "stack": "stacked-area"}


def _is_pattern(key: str) -> bool:
    return any(c in key for c in ".+*(")


def plots() -> dict[str, list[dict[str, Any]]]:
    """Section -> its plots: `keys` or `regex` with `area` and `log`, or `image`."""
    sections: dict[str, list[dict[str, Any]]] = {}
    for panel in PANELS:
        found = sections.setdefault(panel.section, [])
        head = {"title": panel.title, "unit": panel.unit}
        names = [key for key in panel.keys if not _is_pattern(key)]
        if panel.kind != "heat":
            found += [{**head, "regex": f"^{key}$", "area": AREAS.get(panel.kind)} for key in panel.keys if _is_pattern(key)]
            if panel.name in ("loss", "gap"):  # few points beside many: a chart each
                found += [{**head, "title": f"{panel.title}: {name}", "keys": [name]} for name in names]
            elif panel.log:  # of different sizes
                found += [{**head, "title": name, "unit": name, "keys": [name], "log": name == "grad_norm"} for name in names]
            elif names:
                found.append({**head, "keys": names})
        if panel.image:
            found.append({**head, "title": f"{panel.title} (heat map)", "image": panel.image})
    return sections


def workspace(entity: str, project: str, name: str) -> Any:
    """The view as the wandb-workspaces package describes it.

    Raises:
        ImportError: the package is not installed.
    """
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces

    def plot(p: dict[str, Any]) -> Any:
        if "image" in p:
            return reports.MediaBrowser(title=p["title"], media_keys=[p["image"]], num_columns=1)
        options = {"plot_type": p["area"]} if p.get("area") else {}
        options |= {"metric_regex": p["regex"]} if "regex" in p else {"y": p["keys"]}
        return reports.LinePlot(title=p["title"], x="step", title_y=p["unit"], log_y=bool(p.get("log")), **options)

    sections = [
        workspaces.Section(name=section, panels=[plot(p) for p in found], is_open=True, pinned=section == "Loss")
        for section, found in plots().items()
    ]
    return workspaces.Workspace(entity=entity, project=project, name=name, sections=sections)


def save(entity: str | None, project: str, name: str) -> str:
    """Saves the view and returns its address. Raises UserError: a package, the key or the server is missing."""
    try:
        import wandb

        view = workspace(entity or wandb.Api().default_entity, project, name)
        view.save()
    except ImportError as error:
        raise UserError(f"{error}: pip install wandb wandb-workspaces") from error
    except Exception as error:  # of the server, the key, the network
        said = str(error).strip().splitlines() or [repr(error)]
        raise UserError(f"wandb took no workspace: {said[0]}") from error
    return view.url


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser("wandb_workspace", __doc__)
    parser.add_argument("--project", default=LogConfig().project, help="log.project of the runs")
    parser.add_argument("--entity", help="user or team; by default the key's own")
    parser.add_argument("--name", default="octet", help="of the saved view")
    parser.add_argument("--print", action="store_true", help="print the layout as JSON and save nothing")
    options = parser.parse_args(arguments)
    if options.print:
        print(json.dumps(plots(), indent=1))
    else:
        print(f"saved {save(options.entity, options.project, options.name)}")


if __name__ == "__main__":
    sys.exit(exit_status(main))
