"""The command line of train.py, and what its exit status says."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from parallel.memory import ExpertMemoryError
from parallel.mesh import close_mesh
from training.config import Config, load_config
from training.errors import ALONE, DESYNCED, DIVERGED, MISTAKE, UserError
from training.faults import BadStepError
from training.metrics import read_reference
from training.process import lost_contact
from training.replicas import DesyncError
from training.run_state import is_checkpoint, resume_from, whole_checkpoints
from training.summary import describe


def refuse_unusable(config: Config) -> None:
    """Raises UserError for folders that no run could use, with all of them; before any work, so that a dry run finds them too."""
    resume, found = config.checkpoint.resume, []
    place = Path(config.run.dir).absolute()
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        found.append(f"cannot write in run.dir={config.run.dir}: {place} is not {'writable' if place.is_dir() else 'a folder'}")
    if is_checkpoint(Path(config.run.dir)):  # one name would stand for both (`locate`)
        moved = "; move its checkpoints/ and metrics.jsonl there to go on" if whole_checkpoints(config.run.dir) else ""
        found.append(f"run.dir={config.run.dir} is itself a checkpoint, an import or a merge: choose another run.dir{moved}")
    for outer in (place, *place.parents):
        if outer.name == "checkpoints" and whole_checkpoints(outer.parent):  # which are removed with all that lies in them
            found.append(f"run.dir={config.run.dir} is where {outer.parent} keeps its checkpoints: choose another run.dir")
    begins = resume not in ("auto", "none") and not whole_checkpoints(config.run.dir)  # else it goes on from its own
    if begins and not is_checkpoint(Path(resume)) and not whole_checkpoints(resume):
        found.append(
            f"no checkpoint at {resume}: checkpoint.resume is auto, none, or the path of a checkpoint or of a run that has one"
        )
    else:
        try:
            resume_from(config.run.dir, resume, lambda text: None)
        except UserError as error:
            found.append(str(error))
    try:
        read_reference(config.log.reference)
    except UserError as error:
        found.append(str(error))
    if found:
        raise UserError("\n  - ".join([f"{len(found)} problems", *found]) if len(found) > 1 else found[0])


def tell_torchrun(message: str, later: int = 0) -> None:
    """Puts what this rank ends with into torchrun's last lines, which follow its own traceback; nothing without torchrun.

    The file is what torch.distributed.elastic's ErrorHandler writes, without a stack: the summary then shows the message, of the
    rank that ended first. `later`: seconds by which this one gives way to ranks with a reason of their own.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        said = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()) + later)}}}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps(said), encoding="utf-8")


def command_line(run: Callable[[Config], int], description: str | None, arguments: list[str] | None) -> int:
    """Parses the command line and runs; turns every end that has a name into one message and its status.

    Raises whatever has none: a bug keeps its traceback.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print what would run, and stop")
    parser.add_argument("--world-size", type=int, help="ranks a dry run plans for; by default the fewest possible")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args(arguments)
    rank, launched = int(os.environ.get("RANK", "0")), int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None
    planned = launched if args.world_size is None else args.world_size
    try:
        if args.world_size is not None and args.world_size < 1:
            raise UserError(f"--world-size {args.world_size} must be at least 1")
        config = load_config(args.config, args.overrides, planned if args.dry_run else launched or 1)
        refuse_unusable(config)
        if not args.dry_run:
            return run(config)
        if rank == 0:
            print(describe(config, planned or config.fewest_ranks))
        return 0
    except (UserError, ExpertMemoryError, BadStepError, DesyncError) as error:
        alone = isinstance(error, ExpertMemoryError)
        if alone or int(os.environ.get("LOCAL_RANK", "0")) == 0:  # once a host: the ranks of a host have met the same one
            print(f"error: {error}" if rank == 0 else f"error on rank {rank}: {error}", file=sys.stderr)
        tell_torchrun(f"error: {error}")
        return {BadStepError: DIVERGED, DesyncError: DESYNCED}.get(type(error), MISTAKE)
    except KeyboardInterrupt:  # before the run listens for signals
        print("interrupted", file=sys.stderr)
        return 130
    except RuntimeError as error:
        if (reason := lost_contact(error)) is None:
            raise
        print(f"error on rank {rank}: {reason}", file=sys.stderr)
        tell_torchrun(f"error: {reason}", later=3600)  # of no rank that was killed, or ended by a bug
        return ALONE
    finally:
        close_mesh()
