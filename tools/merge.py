"""Averages checkpoints of a run into one, with weights that stand for a learning-rate decay that never ran (WSM).

    python -m tools.merge merged runs/small --last 8 [--decay linear|sqrt|cosine]
    python -m tools.merge merged runs/small/checkpoints/step_00001000 runs/small/checkpoints/step_00001500 ...

With decay factors 1 = w_0 >= w_1 >= ... >= w_k of the checkpoints from oldest to newest, the merge is
theta_0 + sum_j w_j (theta_j - theta_{j-1}): what lay between two checkpoints counts w_j, as if the rate had decayed so. As an
average: c_j = w_j - w_{j+1}, c_k = w_k. Source: WSM as used by Ling 2.0 (arXiv 2510.22115, section 3.2); linear is the plain mean.

Masters are averaged in FP32 (those stored in FP16 are decoded) and quantised when the result is loaded:
`checkpoint.init_from=merged`, `tools.convert_hf export merged ...`, `tools.generate`. Set `checkpoint.keep_for_merge` so that a
run keeps enough checkpoints.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from tools.arguments import at_least, make_parser
from tools.output import whole_or_nothing
from training.checkpoint_files import corruption, seal_alone
from training.errors import UserError, counted, exit_status
from training.run_state import RunState, is_checkpoint, refuse_both, warn_unverified, whole_checkpoints
from training.streaming import ShardReader, ShardWriter, row_boxes, whole_box

SLAB = 64 << 20  # elements held at once
DECAYS = {
    "linear": lambda x: 1 - x,
    "sqrt": lambda x: 1 - math.sqrt(x),
    "cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x)),
}


def coefficients(count: int, decay: str) -> list[float]:
    """Weights of `count` checkpoints, oldest first; they sum to 1."""
    w = [DECAYS[decay](j / count) for j in range(count)] + [0.0]
    return [w[j] - w[j + 1] for j in range(count)]


def check_inputs(folders: Sequence[Path]) -> list[RunState]:
    """States of the checkpoints, oldest first.

    Raises:
        UserError: fewer than two, damaged, or not of one model and tokenizer.
    """
    if len(folders) < 2:
        raise UserError(f"a merge takes at least two checkpoints, got {len(folders)}")
    for folder in folders:
        if (reason := corruption(folder)) is not None:
            raise UserError(f"checkpoint {folder} is not whole: {reason}")
    states = [RunState.read(folder) for folder in folders]
    for folder, state in zip(folders[1:], states[1:], strict=True):
        for field in ("model", "tokenizer"):
            if getattr(state, field) != getattr(states[0], field):
                raise UserError(f"{folder} and {folders[0]} differ in their {field}: they are not checkpoints of one run")
    steps = [state.step for state in states]
    if len(set(steps)) != len(steps):
        raise UserError(f"the checkpoints are of steps {steps}: the same step twice")
    return states


def merge(folders: Sequence[Path], out: Path, decay: str) -> dict[int, float]:
    """Writes the merge of checkpoints (oldest first) into `out`, which exists and is empty; returns step -> weight.

    Raises:
        UserError: see `check_inputs`; or a checkpoint is not whole.
        OSError: writing failed.
    """
    states = check_inputs(folders)
    readers = [ShardReader(folder, cache_bytes=1 << 30) for folder in folders]
    weights, writer = coefficients(len(folders), decay), ShardWriter(out)
    names = sorted(n for n in readers[-1].names() if not n.startswith(("exp_avg", "rng.", "master.scale.", "hf.")))
    for name in tqdm(names, unit="tensor", desc="merging", disable=None):
        shape = readers[-1].shape(name)
        averaged = name.startswith(("master.", "expert_bias."))
        for box in row_boxes(whole_box(shape), SLAB):
            offset = [s.start for s in box]
            if not averaged:  # scale histories and the like belong to the newest weights
                writer.add(name, shape, offset, readers[-1].raw(name, box))
                continue
            total = torch.zeros([s.stop - s.start for s in box], dtype=torch.float32)
            for reader, weight in zip(readers, weights, strict=True):
                part = reader.master(name.removeprefix("master."), box) if name.startswith("master.") else reader.read(name, box)
                total.add_(part, alpha=weight)
            writer.add(name, shape, offset, total)
    writer.finish()
    state = dataclasses.asdict(states[-1])
    (out / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    seal_alone(out)
    return {s.step: weight for s, weight in zip(states, weights, strict=True)}


def chosen(paths: Sequence[str], last: int | None) -> list[Path]:
    """The checkpoints that the arguments mean, oldest first. Raises UserError."""
    folders = [Path(p) for p in paths]
    for folder in folders:
        refuse_both(folder)
    runs = [p for p in folders if not is_checkpoint(p)]
    for run in runs:
        if not whole_checkpoints(run):
            raise UserError(f"{run} is neither a checkpoint nor a run that has some")
    if runs and (len(folders) > 1 or last is None):
        raise UserError("give one run with --last N, or two and more checkpoints")
    if not runs:
        return sorted(folders, key=lambda p: RunState.read(p).step)
    found = whole_checkpoints(runs[0])
    if len(found) < last:
        raise UserError(
            f"--last {last}: {runs[0]} has {counted(len(found), 'checkpoint')} (checkpoint.keep_for_merge says how many stay)"
        )
    return found[-last:]


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser("merge", __doc__)
    parser.add_argument("out", type=Path, help="folder to make; must not exist or be empty")
    parser.add_argument("sources", nargs="+", metavar="RUN|CHECKPOINT")
    parser.add_argument("--last", type=at_least(2), help="of a run: its newest so many checkpoints")
    parser.add_argument("--decay", choices=tuple(DECAYS), default="linear", help="of the learning rate that the merge stands for")
    options = parser.parse_args(arguments)
    folders = chosen(options.sources, options.last)
    for folder in folders:
        warn_unverified(folder, lambda text: print(f"warning: {text}", file=sys.stderr))
    with whole_or_nothing(options.out) as partial:
        used = merge(folders, partial, options.decay)
    steps = sorted(used)
    gaps = {b - a for a, b in zip(steps, steps[1:], strict=False)}
    if len(gaps) > 1:
        print(f"warning: the checkpoints are {sorted(gaps)} steps apart; the decay counts each gap the same", file=sys.stderr)
    print(f"wrote {options.out}: " + ", ".join(f"step {step} x {weight:.4f}" for step, weight in used.items()))


if __name__ == "__main__":
    sys.exit(exit_status(main))
