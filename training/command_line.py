"""The command line of train.py, and what its exit status says."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

from parallel.memory import ExpertMemoryError
from parallel.mesh import close_mesh
from training.config import Config, load_config
from training.errors import ALONE, DESYNCED, DIVERGED, MISTAKE, UserError
from training.faults import BadStepError
from training.process import lost_contact
from training.replicas import DesyncError
from training.summary import describe


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
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        if args.dry_run:
            config = load_config(args.config, args.overrides, args.world_size)
            print(describe(config, args.world_size or config.fewest_ranks))
            return 0
        return run(load_config(args.config, args.overrides, world_size))
    except (UserError, ExpertMemoryError, BadStepError, DesyncError) as error:
        alone = isinstance(error, ExpertMemoryError)
        if alone or int(os.environ.get("LOCAL_RANK", "0")) == 0:  # once a host: the ranks of a host have met the same one
            print(f"error: {error}" if rank == 0 else f"error on rank {rank}: {error}", file=sys.stderr)
        return {BadStepError: DIVERGED, DesyncError: DESYNCED}.get(type(error), MISTAKE)
    except RuntimeError as error:
        if (reason := lost_contact(error)) is None:
            raise
        print(f"error on rank {rank}: {reason}", file=sys.stderr)
        return ALONE
    finally:
        close_mesh()
