"""Mistakes of the user, as opposed to bugs: reported in one line, without a traceback, with exit status 2."""

import io
import os
import select
import sys
from collections.abc import Callable
from typing import TextIO

# Exit statuses of train.py (docs/reliability.md)
DONE, MISTAKE, DIVERGED, DESYNCED, ALONE, UNSAVED, STOPPED = 0, 2, 3, 4, 5, 6, 143


class UserError(Exception):
    """Something the user can put right. The message names the file, key or number and what to do."""


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 GPU`, `2 GPUs`, `2 processes`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def exit_status(main: Callable[[], int | None]) -> int:
    """Runs `main`; returns the exit status: what it returns (None: 0), 2 after printing a UserError, 130 after Ctrl-C.

    Whoever reads our output may have had enough (`| head`): 141 then, as a shell says it, and no traceback.
    """
    try:
        status = main() or 0
        sys.stdout.flush()
        return status
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if not _has_no_reader(sys.stdout):
            raise  # another pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
        return 141


def _has_no_reader(stream: TextIO) -> bool:
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)  # what is told without being asked for: POLLERR, where a pipe's other end is closed
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except io.UnsupportedOperation:  # captured, so no pipe
        return False
