"""Readers: each yields (name, text) of the documents in one file or data set, in a fixed order.

Every yielded text is non-empty and can be encoded as UTF-8. What is skipped or repaired on the way goes into a `Tally`.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from training.errors import UserError

# A text file above this many bytes becomes several documents, so that one big file still has a validation part.
PIECE_BYTES = 64 * 1024
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass
class Tally:
    """What one pass over a corpus met."""

    documents: int = 0
    text_bytes: int = 0
    troubles: Counter = field(default_factory=Counter)  # kind -> count
    first: dict[str, str] = field(default_factory=dict)  # kind -> "file:line" of the first

    def trouble(self, kind: str, where: str, count: int = 1) -> None:
        self.troubles[kind] += count
        self.first.setdefault(kind, where)

    def lines(self) -> list[str]:
        return [f"{count} x {kind} (first: {self.first[kind]})" for kind, count in self.troubles.items()]


def read_whole_file(key: str, path: str, text_key: str, tally: Tally) -> Iterator[tuple[str, str]]:
    """The file is one document."""
    with open(path, "rb") as file:
        text = _decode(file.read().removeprefix(BYTE_ORDER_MARK), path, tally)
    if text:
        yield key, text


def read_text_pieces(key: str, path: str, text_key: str, tally: Tally) -> Iterator[tuple[str, str]]:
    """A file up to PIECE_BYTES is one document; a larger one is cut at the first blank line after each PIECE_BYTES."""
    if os.path.getsize(path) <= PIECE_BYTES:
        yield from read_whole_file(key, path, text_key, tally)
        return
    number, piece, size = 0, [], 0
    with open(path, "rb") as file:
        _skip_byte_order_mark(file)
        for line in _bounded_lines(file):
            piece.append(line)
            size += len(line)
            if (size >= PIECE_BYTES and not line.strip()) or size >= 2 * PIECE_BYTES:
                yield f"{key}#{number}", _decode(b"".join(piece), path, tally)
                number, piece, size = number + 1, [], 0
    if piece:
        yield f"{key}#{number}", _decode(b"".join(piece), path, tally)


def read_jsonl(key: str, path: str, text_key: str, tally: Tally) -> Iterator[tuple[str, str]]:
    """One JSON object a line, its text under `text_key`. Blank, broken and textless lines are counted and skipped."""
    with open(path, "rb") as file:
        _skip_byte_order_mark(file)
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            if not line.strip():
                tally.trouble("blank line", where)
                continue
            try:
                record = json.loads(_decode(line, where, tally))
            except (ValueError, RecursionError):
                tally.trouble("line that is not JSON", where)
                continue
            text = _text_of(record, text_key, where, tally)
            if text:
                yield f"{key}:{number}", text


def read_parquet(key: str, path: str, text_key: str, tally: Tally) -> Iterator[tuple[str, str]]:
    """One document a row, its text in column `text_key`."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError("data.source=parquet needs the `pyarrow` package: pip install pyarrow") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if text_key not in columns:
                raise UserError(f"{path} has no column {text_key!r} (data.text_key); it has {', '.join(columns)}")
            number = 0
            for batch in file.iter_batches(batch_size=1024, columns=[text_key]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    text = _text_of({text_key: value}, text_key, f"{path}:row {number}", tally)
                    if text:
                        yield f"{key}:{number}", text
    except pyarrow.ArrowException as error:
        raise UserError(f"{path} is not a readable parquet file: {str(error).splitlines()[0]}") from error


def read_hub(name: str, config: str | None, split: str, streaming: bool, text_key: str, tally: Tally) -> Iterator[tuple[str, str]]:
    """One document a row of a Hugging Face data set (or of a local folder that `datasets` can load)."""
    try:
        import datasets
    except ImportError as error:
        raise UserError("data.source=hub needs the `datasets` package: pip install datasets") from error
    try:
        rows = datasets.load_dataset(name, config, split=split, streaming=streaming)
        for number, record in enumerate(rows, start=1):
            text = _text_of(record, text_key, f"{name}:row {number}", tally)
            if text:
                yield f"{name}:{number}", text
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        # A missing name, no network, an unknown split and a broken file all end here, each with its own text.
        raise UserError(f"cannot read data set {name} (split {split}): {error}") from error


def _text_of(record: Any, text_key: str, where: str, tally: Tally) -> str | None:
    """The text of one record; None, and counted, when there is none."""
    if not isinstance(record, dict):
        tally.trouble("record that is not an object", where)
    elif text_key not in record:
        tally.trouble(f"record without key {text_key!r}", f"{where}, which has {', '.join(record) or 'no key'}")
    elif not isinstance(record[text_key], str):
        tally.trouble(f"record whose {text_key!r} is not text", where)
    elif not record[text_key]:
        tally.trouble("empty document", where)
    else:
        text = record[text_key]
        try:
            text.encode()
            return text
        except UnicodeEncodeError:  # JSON may spell half a surrogate pair
            tally.trouble("document with half a surrogate pair (replaced)", where)
            return text.encode("utf-8", "replace").decode()
    return None


def _decode(data: bytes, where: str, tally: Tally) -> str:
    """UTF-8, with bytes that are none replaced by U+FFFD and counted."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        text = data.decode(errors="replace")
        tally.trouble("bad UTF-8 sequence (replaced)", where, text.count("\ufffd") - data.count(b"\xef\xbf\xbd"))
        return text


def _skip_byte_order_mark(file: BinaryIO) -> None:
    if file.read(len(BYTE_ORDER_MARK)) != BYTE_ORDER_MARK:
        file.seek(0)


def _bounded_lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines of at most about PIECE_BYTES, never cut inside a character: a file without newlines fits in memory too."""
    while line := file.readline(PIECE_BYTES):
        for _ in range(3):  # a character has at most three continuation bytes
            if line.endswith(b"\n") or not (0x80 <= (file.peek(1)[:1] or b"\0")[0] < 0xC0):
                break
            line += file.read(1)
        yield line
