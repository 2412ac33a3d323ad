"""A folder that appears under its name only when it is whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from training.errors import UserError


@contextmanager
def whole_or_nothing(out: Path) -> Iterator[Path]:
    """A folder beside `out` to fill; it takes the name `out` when the block succeeds and vanishes when it does not.

    Raises:
        UserError: `out` exists and is not an empty folder, or the disk does not take it.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"output {out} exists and is not an empty folder; nothing was written")
    partial = out.with_name(out.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of an earlier attempt that was killed
        partial.mkdir(parents=True)
        yield partial
        if out.exists():
            out.rmdir()
        os.rename(partial, out)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or out}: {error.strerror or error}; {out} was not made") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
