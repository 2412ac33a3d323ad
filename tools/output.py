"""What tools share: a folder that appears under its name only when it is whole; the need of a GPU; figures and their absence."""

from __future__ import annotations

import glob
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from training.errors import UserError


def need_gpu(what: str) -> None:
    """Raises UserError on a machine without one."""
    import torch

    if not torch.cuda.is_available():
        raise UserError(f"{what} needs a CUDA GPU; torch {torch.__version__} finds none on this machine")


def shown(value: float | None, form: str) -> str:
    """`value` in a format such as "8.1f"; None, which nothing has measured (device memory on a CPU), as "-" of that width."""
    return format(value, form) if value is not None else format("-", ">" + form.partition(".")[0].strip(","))


@contextmanager
def whole_or_nothing(out: Path) -> Iterator[Path]:
    """A folder beside `out` to fill; it takes the name `out` when the block succeeds and vanishes when it does not.

    It is this process's own, `OUT.partial-PID`: two that write the same `out` at once do not mix. What a kill leaves has that name.

    Raises:
        UserError: `out` exists and is not an empty folder, or the disk does not take it.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"output {out} exists and is not an empty folder; nothing was written")
    out = out.absolute()  # "." has no name
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    for left in out.parent.glob(f"{glob.escape(out.name)}.partial-*"):
        print(f"note: {left} is of another conversion that runs or was killed", file=sys.stderr)
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a killed process that had this number
        partial.mkdir(parents=True)
        yield partial
        if out.exists():
            out.rmdir()
        os.rename(partial, out)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or out}: {error.strerror or error}; {out} was not made") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
