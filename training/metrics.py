"""What a run reports: a console line, metrics.jsonl, wandb. Time by phase, throughput, load of the experts.

metrics.jsonl only grows: one JSON object a line, each with `step`. A resume writes {"event": "resume", "step": N}; what was
logged past N before it is superseded, which `read_metrics` knows.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from model.counts import FLOPS_FORMULA
from model.router import routers
from training.config import Config
from training.errors import UserError
from training.wandb_log import WandbLog

# Dense BF16 peak, TFLOP/s, of the devices people train on: MFU is against BF16 in every recipe, so that recipes compare.
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "H800": 989.0, "H20": 148.0, "A100": 312.0, "B200": 2250.0, "L40S": 362.0}


def peak_tflops(device: torch.device) -> float | None:
    """Dense BF16 TFLOP/s of the device; None where unknown (and on CPUs)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_TFLOPS.items() if key in name), None)


class Phases:
    """Seconds by phase since the last `read`. On CUDA by events, so that no phase waits for the device.

    Attributes:
        note: told the name of each phase as it begins (the watchdog's).
    """

    def __init__(self, device: torch.device) -> None:
        self.note: Callable[[str], None] = lambda name: None
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.note(name)
        if self._cuda:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            with torch.profiler.record_function(name), torch.cuda.nvtx.range(name):
                yield
            end.record()
            self._events.append((name, start, end))
        else:
            began = time.perf_counter()
            with torch.profiler.record_function(name):
                yield
            self._seconds[name] += time.perf_counter() - began

    def read(self) -> dict[str, float]:
        """Phase -> seconds; starts anew. Waits for the device."""
        for name, start, end in self._events:
            end.synchronize()
            self._seconds[name] += start.elapsed_time(end) / 1e3
        seconds = dict(self._seconds)
        self._seconds.clear()
        self._events.clear()
        return seconds


def expert_load(model: nn.Module, counts_LE: Tensor | None) -> dict[str, float]:
    """How evenly the experts of each router were used in a step, and the spread of its bias.

    Args:
        counts_LE: int64 tokens by router (in `routers` order) and expert, over all ranks.

    Returns:
        "load/NAME/max_over_mean" (1 is even), ".../dead" (share of experts without a token), ".../entropy" (over log E, 1 is
        even), "bias/NAME/range"; and "load/max_over_mean", "load/dead" over all layers.
    """
    found: dict[str, float] = {}
    if counts_LE is None:  # a dense model
        return found
    for (name, router), counts_E in zip(routers(model), counts_LE.double(), strict=True):
        share_E = counts_E / counts_E.sum().clamp(min=1)
        found[f"load/{name}/max_over_mean"] = float(share_E.max() * share_E.numel())
        found[f"load/{name}/dead"] = float((counts_E == 0).double().mean())
        found[f"load/{name}/entropy"] = float(torch.special.entr(share_E).sum() / math.log(share_E.numel()))
        found[f"bias/{name}/range"] = float(router.expert_bias.max() - router.expert_bias.min())
    for key, reduce in (("max_over_mean", max), ("dead", lambda values: sum(values) / len(values))):
        found[f"load/{key}"] = reduce([v for k, v in found.items() if k.startswith("load/") and k.endswith(key)])
    return found


def load_table(model: nn.Module, counts_LE: Tensor) -> dict[str, list[int]]:
    """Tokens of each expert by router, from counts as in `expert_load`."""
    return {name: counts_E for (name, _), counts_E in zip(routers(model), counts_LE.tolist(), strict=True)}


class Throughput:
    """Rates between two logs. Evaluation and checkpoints do not count as training time."""

    def __init__(self, tokens_per_step: int, flops_per_token: float, num_ranks: int, device: torch.device) -> None:
        self.tokens_per_step, self.flops_per_token, self.num_ranks = tokens_per_step, flops_per_token, num_ranks
        self.device, self.peak = device, peak_tflops(device)
        self._began, self._steps = time.perf_counter(), 0

    def step(self) -> None:
        self._steps += 1

    def formula(self) -> str:
        """What TFLOP/s and MFU mean, for the log's head."""
        peak = f"MFU is against {self.peak:.0f} TFLOP/s (dense BF16)" if self.peak else "no MFU: peak of this device unknown"
        return f"FLOPs/token {self.flops_per_token:.4g} ({FLOPS_FORMULA}); TFLOP/s are per device; {peak}"

    def read(self, phases: dict[str, float]) -> dict[str, float]:
        """tokens_per_s (all ranks), tflops and mfu per device, seconds per step by phase, memory in GB."""
        now, steps = time.perf_counter(), max(self._steps, 1)
        seconds = now - self._began - phases.get("eval", 0.0) - phases.get("checkpoint", 0.0)
        tokens_per_s = self._steps * self.tokens_per_step / max(seconds, 1e-9)
        values = {"tokens_per_s": tokens_per_s, "step_s": seconds / steps}
        values["tflops"] = tokens_per_s * self.flops_per_token / self.num_ranks / 1e12
        if self.peak:
            values["mfu"] = values["tflops"] / self.peak
        for name, spent in phases.items():
            values[f"time/{name}"] = spent if name in ("eval", "checkpoint") else spent / steps
        if self.device.type == "cuda":
            values["memory/allocated_gb"] = torch.cuda.max_memory_allocated(self.device) / 1e9
            values["memory/reserved_gb"] = torch.cuda.memory_reserved(self.device) / 1e9
        self._began, self._steps = now, 0
        return values


class Metrics:
    """Writes on the rank where `active` is true; on the others every method does nothing."""

    def __init__(self, config: Config, active: bool) -> None:
        self.config, self.active, self.prefix = config, active, ""  # in front of every console line
        self.path = Path(config.run.dir) / "metrics.jsonl"
        self.wandb: WandbLog | None = None
        self._bar, self._file, self._reference = None, None, {}

    def start(self, done: int, wandb_id: str | None) -> str | None:
        """Opens everything, for a run that has `done` steps behind it; returns the id of the wandb run."""
        if not self.active:
            return None
        config = self.config
        self._reference = read_reference(config.log.reference)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            (self.path.parent / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
            self._file = open(self.path, "a", encoding="utf-8")
            if self.path.read_bytes()[-1:] not in (b"", b"\n"):  # a kill has cut a record off: the next one gets its own line
                self._file.write("\n")
        except OSError as error:
            raise UserError(f"cannot write in run.dir={config.run.dir}: {error.strerror or error}") from error
        if done or self.path.stat().st_size:
            self.event("resume", done)
        name = config.run.name or self.path.parent.name
        log = config.log
        self.wandb = WandbLog(config.run.dir, log.wandb, log.project, log.entity, name, wandb_id, config.to_dict(), self.warn)
        if done:
            self.wandb.remember(read_metrics(self.path))
        if log.progress and sys.stderr.isatty():
            self._bar = tqdm(total=config.train.steps, initial=done, unit="step", dynamic_ncols=True)
        return self.wandb.id

    def say(self, text: str) -> None:
        """A line on the console."""
        if self.active:
            text = self.prefix + text
            tqdm.write(text, file=sys.stdout) if self._bar is not None else print(text, flush=True)

    def warn(self, text: str | None) -> None:
        """A warning on the console; None is none."""
        if self.active and text is not None:
            tqdm.write(f"{self.prefix}warning: {text}", file=sys.stderr)

    def advance(self) -> None:
        """One step more on the progress bar."""
        if self._bar is not None:
            self._bar.update()

    def log(self, step: int, values: dict[str, float], detail: dict[str, Any] | None = None) -> None:
        """Values of optimizer step `step` (from 1), to the file and to wandb; `detail`: tables by layer, drawn there."""
        if self.active:
            values = values | self._gaps(step, values)
            self._write({"step": step, "time": time.time(), **values, **({"detail": detail} if detail else {})})
            if self.wandb is not None:
                self.wandb.log(step, values, detail)

    def _gaps(self, step: int, values: dict[str, float]) -> dict[str, float]:
        """Relative difference to the run `log.reference` at this step, in percent."""
        pairs = {"gap/loss": "loss", "gap/val_loss": "val/loss"}
        found = {gap: (values[key], self._reference.get((step, key))) for gap, key in pairs.items() if key in values}
        return {gap: 100 * (value / base - 1) for gap, (value, base) in found.items() if base}

    def event(self, name: str, step: int, **detail: Any) -> None:
        """Something that happened to the run at `step`: to the file."""
        if self.active:
            self._write({"event": name, "step": step, **detail})

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            self.warn(f"{self.path}: {error.strerror or error}; metrics go to the console only")
            self._file = None

    def written(self) -> str:
        """The run's folder and what there is in it."""
        folder = self.path.parent
        names = ("config.yaml", "metrics.jsonl", "checkpoints/", "wandb/", "profile/")
        return f"{folder}/: {', '.join(name for name in names if (folder / name).exists())}"

    def close(self) -> None:
        """Ends the bar, the file and the wandb run."""
        if self._bar is not None:
            self._bar.close()
        if self._file is not None:
            self._file.close()
        if self.active and self.wandb is not None:
            self.wandb.finish()


def health_by_class(measured: dict[str, float]) -> dict[str, float]:
    """Of every weight "NAME/ROLE/METRIC" -> "fp8/CLASS/ROLE/METRIC": the mean over layers, and the worst of them."""
    found: dict[str, list[float]] = defaultdict(list)
    for key, value in measured.items():
        found[re.sub(r"^layers\.\d+\.", "", key)].append(value)
    values = {}
    for key, per_layer in found.items():
        values[f"fp8/{key}"] = sum(per_layer) / len(per_layer)
        values[f"fp8/{key}_worst"] = min(per_layer) if key.endswith("cosine") else max(per_layer)
    return values


def console_line(step: int, total: int, values: dict[str, float]) -> str:
    """The few numbers that people watch."""
    parts = [f"step {step:>{len(str(total))}}/{total}", f"loss {values['loss']:.4f}"]
    if values.get("mtp_loss"):
        parts.append(f"mtp {values['mtp_loss']:.4f}")
    parts += [f"lr {values['lr']:.2e}", f"norm {values['grad_norm']:.3f}", f"{values['tokens_per_s']:,.0f} tok/s"]
    parts.append(f"{values['tflops']:.3g} TFLOP/s" + (f" ({values['mfu']:.1%} MFU)" if "mfu" in values else ""))
    if "memory/allocated_gb" in values:
        parts.append(f"{values['memory/allocated_gb']:.1f}/{values['memory/reserved_gb']:.1f} GB")
    if "load/max_over_mean" in values:
        parts.append(f"load {values['load/max_over_mean']:.2f}x")
    return "  ".join(parts)


def read_reference(run: str | None) -> dict[tuple[int, str], float]:
    """(step, key) -> training and validation losses of another run. Raises UserError: it has none."""
    if run is None:
        return {}
    path = Path(run) / "metrics.jsonl"
    try:
        records = read_metrics(path)
    except OSError as error:
        raise UserError(f"log.reference={run}: cannot read {path}: {error.strerror or error}") from error
    found = {(r["step"], key): r[key] for r in records for key in ("loss", "val/loss") if r.get(key)}
    if not found:
        raise UserError(f"log.reference={run}: {path} holds no losses")
    return found


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl without those that a resume superseded; a half-written last line is left out."""
    records: list[dict[str, Any]] = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record.get("event") == "resume":
            records = [r for r in records if r["step"] <= record["step"]]
        elif "event" not in record:
            records.append(record)
    return records
