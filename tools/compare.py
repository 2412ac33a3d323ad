"""The same run under several recipes (or other settings), and the table of their losses.

    python -m tools.compare --config configs/evidence.yaml --recipes bf16,block,tensorwise_delayed --seeds 1,2 train.steps=300
    python -m tools.compare --config configs/tiny.yaml --set base: --set fast:optim.lr=4e-3,optim.warmup_steps=5
    python -m tools.compare --config configs/evidence.yaml --set block: --set plain: --reference plain   without the kernels
    python -m tools.compare --join runs/seed1 runs/seed2 --tail 0.5        one table of comparisons that ran side by side

Each run is `train.py`'s own, one after the other in this process: same data in the same order, same initial weights for a seed.
Recipes that the device cannot run are emulated. Writes OUT/compare.json (every loss) and OUT/compare.md (the table) after each run;
OUT is a new folder, runs/compare-CONFIG or, where that exists, runs/compare-CONFIG-2 and so on, unless --out names one.
A run that breaks or diverges has a row that says why. A signal ends the comparison: the run that it cuts short is left out (130).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as train.py does, before torch is imported

import torch

from tools.arguments import at_least, make_parser, names, whole_numbers
from tools.output import shown
from tools.reference_arithmetic import reference_arithmetic
from train import run
from training.config import Config, load_config
from training.errors import DONE, UserError, exit_status
from training.faults import BadStepError

# What neither --set nor an override can say, and what says it instead
OWN = {"run.dir": "--out", "train.seed": "--seeds", "train.log_every": "--log-every"}
TAIL = 0.1  # share of the steps, the last ones, whose losses are averaged unless --tail says otherwise


@dataclass(frozen=True)
class Outcome:
    """One run. Losses in nats a token."""

    name: str
    seed: int
    status: int
    loss: float  # mean over the last share of the logged steps
    val: float
    seconds: float
    tokens_per_s: float | None  # None: of too few steps
    memory_gb: float | None  # GiB at the allocator's peak; None on a CPU
    losses: list[tuple[int, float]]
    stopped: str | None = None  # why it has no result


def config_of(args: argparse.Namespace, name: str, settings: list[str], seed: int) -> Config:
    """The run of a setting and a seed. Raises UserError: a mistake in what all share, or in the setting, which is then named."""
    fixed = [f"run.dir={Path(args.out or '') / f'{name}-{seed}'}", f"train.seed={seed}", f"train.log_every={args.log_every}"]
    fixed += ["checkpoint.every=0", "log.wandb=off", "log.progress=false", "fp8.emulate=true"]
    shared = [*fixed, *args.overrides]
    try:
        return load_config(args.config, [*shared, *settings])
    except UserError as error:
        load_config(args.config, shared)  # a mistake that all of them have is no setting's
        raise UserError(f"setting {name}: {str(error).replace('command line: ', '')}") from error


def one_run(args: argparse.Namespace, name: str, settings: list[str], seed: int) -> Outcome:
    """Trains under `settings` and reads what the run logged. Raises KeyboardInterrupt when a signal has cut it short."""
    config = config_of(args, name, settings, seed)
    folder = Path(config.run.dir)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    with reference_arithmetic() if name in args.reference else nullcontext():
        status = run(config)
    if status != DONE:
        raise KeyboardInterrupt
    seconds = time.perf_counter() - start
    memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [(r["step"], r["loss"]) for r in records if "loss" in r]
    loss = tail_mean(losses, args.tail)
    val = [r["val/loss"] for r in records if "val/loss" in r]
    speeds = [r["tokens_per_s"] for r in records if "tokens_per_s" in r][1:]  # the first step compiles
    speed = statistics.median(speeds) if speeds else None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Outcome(name, seed, status, loss, val[-1] if val else float("nan"), seconds, speed, memory, losses)


def tail_mean(losses: list[tuple[int, float]], share: float) -> float:
    """Mean loss over the last `share` of the steps; NaN where nothing was logged."""
    return statistics.mean([loss for step, loss in losses if step > losses[-1][0] * (1 - share)] or [math.nan])


def joined(folders: list[str], share: float) -> list[Outcome]:
    """The runs of several comparisons, their training losses averaged anew. Raises UserError for what is no comparison."""
    found = []
    for folder in folders:
        try:
            records = json.loads((Path(folder) / "compare.json").read_text(encoding="utf-8"))
            outcomes = [Outcome(**record) for record in records]
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{folder} holds no comparison: {error}") from error
        if twice := [f"{o.name}, seed {o.seed}" for o in outcomes if (o.name, o.seed) in {(f.name, f.seed) for f in found}]:
            raise UserError(f"--join: {folder} has runs that a folder before it has too: {'; '.join(twice)}")
        found += [replace(o, loss=tail_mean(o.losses, share)) for o in outcomes]
    if not any(o.stopped is None for o in found):
        raise UserError(f"no run of {', '.join(folders)} came to its end")
    return found


def table(outcomes: list[Outcome], base: str) -> str:
    """Markdown: means over seeds, and the gap to `base` of the same seeds; a row of its own for each run that has no result."""
    lines = [
        f"| setting | seeds | train loss | gap to {base} | val loss | gap to {base} | tokens/s | peak GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ended = [o for o in outcomes if o.stopped is None]
    by_key = {(o.name, o.seed): o for o in ended}
    for name in dict.fromkeys(o.name for o in ended):
        runs = [o for o in ended if o.name == name]
        mean = lambda key, runs=runs: statistics.mean(getattr(o, key) for o in runs)  # noqa: E731
        gaps = {}
        for key in ("loss", "val"):
            pairs = [(getattr(o, key), getattr(by_key[base, o.seed], key)) for o in runs if (base, o.seed) in by_key]
            ratios = [100 * (value / reference - 1) for value, reference in pairs if not math.isnan(value + reference)]
            spread = f" (± {statistics.stdev(ratios):.2f})" if len(ratios) > 1 else ""
            gaps[key] = f"{statistics.mean(ratios):+.3f}%{spread}" if ratios else "-"
        loss, val = (f"{mean(key):.4f}".replace("nan", "-") for key in ("loss", "val"))  # no validation: eval.samples=0
        measured = {key: mean(key) if all(getattr(o, key) for o in runs) else None for key in ("tokens_per_s", "memory_gb")}
        speed, memory = shown(measured["tokens_per_s"], ",.0f"), shown(measured["memory_gb"], ".2f")
        lines.append(f"| {name} | {len(runs)} | {loss} | {gaps['loss']} | {val} | {gaps['val']} | {speed} | {memory} |")
    without = [o for o in outcomes if o.stopped is not None]
    lines += [f"| {o.name}, seed {o.seed} | 0 | stopped: {o.stopped} | - | - | - | - | - |" for o in without]
    return "\n".join(lines)


def broken(name: str, seed: int, error: Exception) -> Outcome:
    """The outcome of a run that ended with `error`."""
    why = str(error) if isinstance(error, BadStepError | UserError) else f"{type(error).__name__}: {error}"
    text = " ".join(why.replace("|", "/").split())
    return Outcome(name, seed, 1, math.nan, math.nan, 0.0, None, None, [], text if len(text) <= 160 else f"{text[:160]}...")


def settings_in(text: str) -> list[str]:
    """`a.b=1,c.d={x: y, z: w}` -> its settings: split at commas outside braces and brackets."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth <= 0:
            found.append("")
        else:
            found[-1] += letter
    return [setting.strip() for setting in found if setting.strip()]


def refuse_own(settings: list[str], where: str) -> None:
    """Raises UserError for keys that the comparison itself sets for each run."""
    for key, option in OWN.items():
        if any(setting.partition("=")[0].strip() == key for setting in settings):
            raise UserError(f"{where}: {key} is the comparison's own for each run; {option} says it")


def parse_settings(args: argparse.Namespace) -> dict[str, list[str]]:
    """Name -> overrides of each setting to compare. Raises UserError for a malformed --set."""
    found = {name: [f"fp8.recipe={name}"] for name in args.recipes}
    for text in args.set:
        name, colon, values = text.partition(":")
        if not colon or not name or Path(name).name != name:
            raise UserError(f"--set {text!r} is not of the form name:section.key=value,section.key=value (a folder gets the name)")
        if name in found:
            raise UserError(f"two settings are named {name}: each has a row, and a folder, of its own")
        found[name] = settings_in(values)
        refuse_own(found[name], f"--set {name}")
    if not found:
        raise UserError("nothing to compare: give --recipes or --set")
    return found


def claim(out: str | None, config: str) -> Path:
    """The comparison's folder, made: `out`, or the first of runs/compare-CONFIG, runs/compare-CONFIG-2 ... that nobody has.

    Raises UserError where `out` holds a comparison, or the disk does not take it.
    """
    if out is not None and (Path(out) / "compare.json").exists():
        raise UserError(f"{out} holds a comparison already: another --out, and --join shows both in one table")
    stem = f"runs/compare-{Path(config).stem}"
    for number in itertools.count(1):
        folder = Path(out or (stem if number == 1 else f"{stem}-{number}"))
        try:
            folder.mkdir(parents=True, exist_ok=out is not None)
            return folder
        except FileExistsError as error:
            if out is not None:
                raise UserError(f"cannot write {folder}: {error.strerror}") from error
        except OSError as error:
            raise UserError(f"cannot write {folder}: {error.strerror}") from error


def main(argv: list[str] | None = None) -> None:
    """Runs everything; the table grows after each run, so that an interrupted comparison still has one."""
    parser = make_parser("compare", __doc__)
    parser.add_argument("--config", help="what all runs share; needed unless --join")
    parser.add_argument("--join", nargs="+", default=[], metavar="OUT", help="folders of comparisons: their table, no run")
    parser.add_argument("--tail", type=float, default=TAIL, help="share of the steps, the last ones, whose losses are averaged")
    parser.add_argument("--recipes", type=names, default="", help="recipes with commas between them")
    parser.add_argument("--set", action="append", default=[], help="name:key=value,key=value; may be repeated")
    parser.add_argument("--reference", action="append", default=[], help="a setting that runs through the reference arithmetic")
    parser.add_argument("--seeds", type=whole_numbers(0), default="1234", help="with commas between them")
    parser.add_argument("--base", help="what gaps are measured against; the first setting by default")
    parser.add_argument("--out", help="folder without a comparison, for the table and the runs; default: a new runs/compare-CONFIG")
    parser.add_argument("--log-every", type=at_least(1), default=5, help="steps between two losses of a curve")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args(argv)
    if not 0 < args.tail <= 1:
        raise UserError(f"--tail {args.tail:g} is no share: more than 0, at most 1")
    if args.join:
        outcomes = joined(args.join, args.tail)
        base = args.base or outcomes[0].name
        if base not in {o.name for o in outcomes}:
            raise UserError(f"--base {base} is none of the settings: {', '.join(dict.fromkeys(o.name for o in outcomes))}")
        print(table(outcomes, base))
        return
    if args.config is None:
        raise UserError("--config names what to run; --join shows what has run")
    settings = parse_settings(args)
    refuse_own(args.overrides, "an override")
    base = args.base or next(iter(settings))
    for option, named in (("--base", base), *(("--reference", name) for name in args.reference)):
        if named not in settings:
            raise UserError(f"{option} {named} is none of the settings: {', '.join(settings)}")
    for name, values in settings.items():  # a mistake in the last setting is told before the first has run
        config_of(args, name, values, args.seeds[0])
    args.out, outcomes = claim(args.out, args.config), []
    for seed in args.seeds:
        for name, values in settings.items():
            try:
                outcomes.append(one_run(args, name, values, seed))
            except KeyboardInterrupt:
                rest = "the table has those before it" if outcomes else "there is no table"
                print(f"{name}, seed {seed} was interrupted and is left out, as are the runs after it; {rest}", file=sys.stderr)
                raise
            except Exception as error:  # one recipe that breaks must not take the others' results along
                print(f"{name}, seed {seed}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                outcomes.append(broken(name, seed, error))
            text = table(outcomes, base)
            (args.out / "compare.json").write_text(json.dumps([asdict(o) for o in outcomes]), encoding="utf-8")
            (args.out / "compare.md").write_text(text + "\n", encoding="utf-8")
            print(f"{text}\nin {args.out}/compare.md", flush=True)
    if not any(o.stopped is None for o in outcomes):
        raise UserError("no run came to its end")


if __name__ == "__main__":
    sys.exit(exit_status(main))
