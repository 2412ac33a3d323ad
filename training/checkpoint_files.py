"""The folder of one checkpoint: begun under another name, sealed with checksums, renamed when whole, deleted in turn.

`checksums.json` holds length and CRC-32 of every other file. It finds damage (a torn sector, a truncated copy), not forgery: that a
forged file cannot run code is the business of training/shards.py.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from training.run_state import SEAL, RunState, whole_checkpoints
from training.shard_files import threads
from training.shards import damage

CHUNK = 1 << 24


def begin(partial: Path, state: RunState) -> None:
    """Makes the folder `partial`, with state.json in it; clears away what earlier attempts have left. Raises OSError."""
    for leftover in partial.parent.glob("step_*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    _write_json(partial / "state.json", asdict(state))


def finish(partial: Path, final: Path) -> None:
    """Renames the folder once everything in it is on disk. Raises OSError, also where what was written cannot be read back."""
    reason = damage(partial)
    if reason is not None:
        raise OSError(reason)
    sync(partial)
    if final.exists():  # the same step of an earlier attempt
        remove(final)
    partial.rename(final)
    sync(final.parent)


def rotate(final: Path, keep: int, keep_every: int) -> None:
    """Deletes old checkpoints beside `final`: all but the newest `keep`, those of every `keep_every`-th step, and `final`."""
    for old in whole_checkpoints(final.parent.parent)[:-keep]:
        milestone = keep_every and int(old.name.removeprefix("step_")) % keep_every == 0
        if old != final and not milestone:
            remove(old)


def remove(folder: Path) -> None:
    """Deletes a checkpoint; renamed first, so that one half deleted is never taken for whole."""
    doomed = folder.with_name(f"{folder.name}.old.tmp")
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def sync(folder: Path) -> None:
    """Makes renames inside `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---------------------------------------------------------------- checksums


def checksum(path: Path) -> list[int]:
    """[length, CRC-32] of a file."""
    length = value = 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            length, value = length + len(chunk), zlib.crc32(chunk, value)
    return [length, value]


def checksums_beside(folder: Path, rank: int) -> dict[str, list[int]]:
    """Of the files beside the tensors' own, which rank 0 has written."""
    own = (folder / ".metadata", folder / "state.json") if rank == 0 else ()
    return {path.name: checksum(path) for path in own}


def seal(folder: Path, parts: Iterable[dict[str, list[int]]]) -> None:
    """Writes checksums.json from the parts of all ranks."""
    _write_json(folder / SEAL, {name: value for part in parts for name, value in part.items()})


def seal_alone(folder: Path) -> None:
    """`seal` of a checkpoint that one process has written, tensors, metadata and state.json."""
    paths = [*folder.glob("__*.distcp"), folder / ".metadata", folder / "state.json"]
    seal(folder, [{path.name: checksum(path) for path in paths}])


def verify(folder: Path, rank: int = 0, size: int = 1) -> list[str]:
    """What is wrong with the files of a checkpoint, in words; rank r of n reads every n-th of them.

    Checkpoints without checksums.json count as undamaged here; who loads one warns (training/run_state.py).
    """
    try:
        sealed = json.loads((folder / SEAL).read_text(encoding="utf-8"))
        names = sorted(sealed)[rank::size]
        expected = {name: [int(n) for n in sealed[name]] for name in names}
    except FileNotFoundError:
        return []
    except (OSError, ValueError, OverflowError, TypeError, AttributeError, RecursionError) as error:
        return [f"{SEAL} cannot be read ({error})"]

    def problem(name: str) -> str | None:
        want = expected[name]
        try:
            got = checksum(folder / Path(name).name)
        except OSError as error:
            return f"{name}: {error.strerror or error}"
        if got == want:
            return None
        what = f"{got[0]} bytes long, not {want[0]}" if got[0] != want[0] else "corrupt (its checksum is another)"
        return f"{name} is {what}"

    with ThreadPoolExecutor(threads()) as pool:
        return [text for text in pool.map(problem, expected) if text is not None]


def corruption(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files, all of them read by this process; the check that tools give to `locate`."""
    return "; ".join(verify(folder)) or None


def _write_json(path: Path, values: dict) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(values, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
