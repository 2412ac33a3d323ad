"""Packed token files: `NAME.bin`, the documents' tokens with EOS after each, and its description `NAME.json`.

The .bin file is flat little-endian uint16 (uint32 from 65,537 tokens of vocabulary on). Both are written beside and
renamed when whole, the description last: without a description there is no packed file.

A packing that is killed goes on where it was: `NAME.bin.partial.json` says how many documents are done. They are read again, which
is cheap, and hashed, so that a corpus that has changed is noticed and packed from its beginning; they are not tokenised again.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from training.corpus import DataConfig, Document, corpus_settings, read_documents
from training.errors import UserError
from training.readers import Tally
from training.tokenizer import Tokenizer, write_whole

FORMAT = 1
SPLITS = ("train", "validation")
BATCH_CHARS = 4_000_000  # text encoded at once: enough to keep every core busy, small next to any memory
JOURNAL_SECONDS = 5.0  # at most so much work is lost when a packing is killed


@dataclass(frozen=True, kw_only=True)
class PackedInfo:
    """The description beside a packed file."""

    format: int
    num_tokens: int
    num_documents: int
    text_bytes: int  # UTF-8 bytes of all documents, without the EOS tokens: for bits per byte
    dtype: str
    vocab_size: int
    eos_id: int
    tokenizer: str  # fingerprint of the tokenizer
    source_hash: str  # sha256 of names and texts of the documents
    sha256: str  # of the .bin file
    settings: dict  # corpus_settings at the time of packing
    troubles: dict[str, int]  # what was skipped or repaired, in both splits


def packed_path(folder: str, split: str) -> str:
    return os.path.join(folder, f"{split}.bin")


def read_info(path: str) -> PackedInfo:
    """The description of the packed file `path`. Raises UserError: missing, damaged, other format, truncated."""
    description = Path(path).with_suffix(".json")
    missing = next((name for name in (path, str(description)) if not os.path.isfile(name)), None)
    if missing is not None:
        raise UserError(f"packed data {missing} does not exist; make it with `python -m tools.prepare_data --config ...`")
    try:
        fields = json.loads(description.read_text(encoding="utf-8"))
        if fields["format"] != FORMAT:
            raise UserError(f"{description} has format {fields['format']}, octet reads {FORMAT}; prepare the data anew")
        info = PackedInfo(**fields)
        for name in ("num_tokens", "text_bytes", "vocab_size", "eos_id"):
            if type(fields[name]) is not int or fields[name] < 0:
                raise TypeError(f"{name} is {fields[name]!r:.40}")
        if info.dtype not in ("<u2", "<u4"):
            raise TypeError(f"dtype is {info.dtype!r:.40}")
    except (ValueError, OverflowError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"{description} is damaged ({error}); delete it and prepare the data again") from error
    size, expected = os.path.getsize(path), info.num_tokens * np.dtype(info.dtype).itemsize
    if size != expected:
        what = "truncated" if size < expected else "too long, something else has written to it"
        raise UserError(f"{path} has {size} bytes, its description says {expected}: {what}; prepare the data again")
    return info


IDENTITY = ("source", "hub_name", "hub_config", "hub_split", "paths", "extra_dirs")  # settings that name a text


def stale_reason(config: DataConfig, tokenizer: Tokenizer) -> str | None:
    """Why the packed files of `config` must be made (again); None when they are up to date."""
    settings = json.loads(json.dumps(corpus_settings(config)))
    for split in SPLITS:
        path = packed_path(config.dir, split)
        try:
            info = read_info(path)
        except UserError as error:
            return str(error) if os.path.exists(path) else f"{path} does not exist"
        if info.tokenizer != tokenizer.fingerprint:
            return f"{path} was packed by tokenizer {info.tokenizer[:12]}, not by {tokenizer.fingerprint[:12]}"
        changed = [name for name, value in settings.items() if info.settings.get(name) != value]
        if changed:
            return f"{path} was packed from another corpus ({', '.join(changed)} differ{'s'[: len(changed) == 1]})"
    return None


def other_corpus(config: DataConfig) -> str | None:
    """What to say where the training file holds another text than `config` names; a part of that text (`max_bytes`) is the same."""
    path = packed_path(config.dir, "train")
    held = read_info(path).settings
    read = [name for name in IDENTITY if config.source == "hub" or not name.startswith("hub_")]
    wanted = json.loads(json.dumps({name: getattr(config, name) for name in read}))
    changed = [f"data.{name}" for name, value in wanted.items() if name in held and held[name] != value]
    if not changed:
        return None
    return f"{path} was packed with other {', '.join(changed)} and is what is read; python -m tools.prepare_data packs it anew"


def pack_corpus(
    config: DataConfig, tokenizer: Tokenizer, progress: Callable[[int], None] = lambda text_bytes: None
) -> tuple[dict[str, PackedInfo], Tally]:
    """Tokenises the corpus into `config.dir`/{train,validation}.{bin,json}. One pass, bounded memory.

    `progress` is called with the bytes of text done since its last call. Raises UserError when the corpus is missing or
    empty or the disk is full; packed files of before stay in place until the new ones are whole. What a killed packing of the
    same corpus has done is taken over.
    """
    settings = json.loads(json.dumps(corpus_settings(config)))
    writers = {split: _Writer(packed_path(config.dir, split), tokenizer, settings) for split in SPLITS}
    try:
        return _pack(config, settings, writers, progress)
    except _Changed:
        for writer in writers.values():
            writer.discard()
        return pack_corpus(config, tokenizer, progress)
    except (OSError, UserError) as error:  # a kill or Ctrl-C leaves the partial files for the next call
        for writer in writers.values():
            writer.discard()
        if isinstance(error, UserError):
            raise
        raise UserError(f"cannot write packed data in {config.dir}: {error.strerror or error}") from error
    finally:
        for writer in writers.values():
            writer.file.close()


def _pack(
    config: DataConfig, settings: dict, writers: dict[str, "_Writer"], progress: Callable[[int], None]
) -> tuple[dict[str, PackedInfo], Tally]:
    tally = Tally()
    for document in read_documents(config, tally):
        progress(writers[document.split].add(document))
    for writer in writers.values():
        progress(writer.flush())
    return {split: writer.finish(settings, dict(tally.troubles)) for split, writer in writers.items()}, tally


def documents_done(config: DataConfig) -> int:
    """Documents that a killed packing in `config.dir` has behind it; 0 where there is none."""
    done = 0
    for split in SPLITS:
        try:
            done += json.loads(Path(f"{packed_path(config.dir, split)}.partial.json").read_text(encoding="utf-8"))["num_documents"]
        except (OSError, ValueError, OverflowError, KeyError, TypeError):
            pass
    return done


class _Changed(Exception):
    """The documents that a partial file was made from are not those of the corpus."""


class _Writer:
    """Collects documents, encodes them in batches, appends their tokens to `path`.partial."""

    def __init__(self, path: str, tokenizer: Tokenizer, settings: dict) -> None:
        self.path, self.partial, self.tokenizer = path, f"{path}.partial", tokenizer
        self.journal, self.settings, self.saved = Path(f"{self.partial}.json"), settings, time.monotonic()
        self.dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
        self.texts: list[str] = []
        self.chars = self.num_tokens = self.num_documents = self.text_bytes = self.flushed_bytes = 0
        self.source_hash, self.sha256 = hashlib.sha256(), hashlib.sha256()
        self.seen, self.skip, self.expected = 0, 0, ""
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            self.file = self._reopen() or open(self.partial, "wb")
        except OSError as error:
            raise UserError(f"cannot write {self.partial}: {error.strerror or error}") from error

    def _reopen(self) -> BinaryIO | None:
        """The partial file of a killed packing of the same corpus and tokenizer, at its end; None where there is none."""
        try:
            done = json.loads(self.journal.read_text(encoding="utf-8"))
            same = done["tokenizer"] == self.tokenizer.fingerprint and done["settings"] == self.settings
            size = done["num_tokens"] * self.dtype.itemsize
            if not same or os.path.getsize(self.partial) < size:
                return None
            self.num_tokens, self.num_documents = done["num_tokens"], done["num_documents"]
            self.skip, self.expected = done["num_documents"], done["source_hash"]
        except (OSError, ValueError, OverflowError, KeyError, TypeError):
            return None
        file = open(self.partial, "r+b")
        file.truncate(size)
        while chunk := file.read(1 << 24):
            self.sha256.update(chunk)
        return file

    def _save_journal(self) -> None:
        self.file.flush()
        done = {"num_tokens": self.num_tokens, "num_documents": self.num_documents, "source_hash": self.source_hash.hexdigest()}
        done |= {"tokenizer": self.tokenizer.fingerprint, "settings": self.settings}
        write_whole(str(self.journal), json.dumps(done).encode())
        self.saved = time.monotonic()

    def add(self, document: Document) -> int:
        """Takes a document; returns the bytes of text that were encoded on this occasion."""
        raw = document.text.encode()
        self.text_bytes += len(raw)
        self.source_hash.update(f"{document.key}\0{len(raw)}\0".encode("utf-8", "surrogateescape"))
        self.source_hash.update(raw)
        self.seen += 1
        if self.seen <= self.skip:
            if self.seen == self.skip and self.source_hash.hexdigest() != self.expected:
                raise _Changed
            self.flushed_bytes = self.text_bytes
            return len(raw)
        self.texts.append(document.text)
        self.chars += len(document.text)
        return self.flush() if self.chars >= BATCH_CHARS else 0

    def flush(self) -> int:
        for ids in self.tokenizer.encode_batch(self.texts):
            tokens = np.array([*ids, self.tokenizer.eos_id], dtype=self.dtype)
            self.num_tokens += len(tokens)
            self.sha256.update(tokens.data)
            self.file.write(tokens.data)
        self.num_documents += len(self.texts)
        self.texts, self.chars = [], 0
        if time.monotonic() - self.saved > JOURNAL_SECONDS:
            self._save_journal()
        done, self.flushed_bytes = self.text_bytes - self.flushed_bytes, self.text_bytes
        return done

    def finish(self, settings: dict, troubles: dict[str, int]) -> PackedInfo:
        if self.seen < self.skip:  # the corpus has lost documents
            raise _Changed
        info = PackedInfo(
            format=FORMAT, num_tokens=self.num_tokens, num_documents=self.num_documents, text_bytes=self.text_bytes,
            dtype=self.dtype.str, vocab_size=self.tokenizer.vocab_size, eos_id=self.tokenizer.eos_id,
            tokenizer=self.tokenizer.fingerprint, source_hash=self.source_hash.hexdigest(),
            sha256=self.sha256.hexdigest(), settings=settings, troubles=troubles,
        )  # fmt: skip
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        description = Path(self.path).with_suffix(".json")
        description.unlink(missing_ok=True)  # an old description must never stand beside new tokens
        os.replace(self.partial, self.path)
        write_whole(str(description), (json.dumps(asdict(info), indent=1) + "\n").encode())
        self.journal.unlink(missing_ok=True)
        return info

    def discard(self) -> None:
        """Removes what `finish` has not renamed."""
        self.file.close()
        self.journal.unlink(missing_ok=True)
        Path(self.partial).unlink(missing_ok=True)
