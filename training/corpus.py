"""Where text comes from: a stream of documents out of the standard library, local files or the Hugging Face hub.

Ugly input never stops a run and never vanishes unseen: it is skipped or repaired, and counted in a `Tally` with the
first file and line. Only input that leaves nothing to train on (no such file, no document) raises UserError.
"""

import glob
import hashlib
import itertools
import os
import platform
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from training.errors import UserError
from training.readers import Tally, read_hub, read_jsonl, read_parquet, read_text_pieces, read_whole_file

# Folders that are tests, caches or third-party inside a source tree.
SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}
READERS = {
    "stdlib": read_whole_file,
    "text": read_text_pieces,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
}


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The `data` section of a run's YAML file."""

    source: Literal["stdlib", "text", "jsonl", "parquet", "hub"] = "stdlib"
    paths: list[str] = field(default_factory=list)  # globs of text, jsonl or parquet files ("**" recurses)
    validation_paths: list[str] = field(default_factory=list)  # when given, `paths` is all training
    text_key: str = "text"  # key or column that holds the text (jsonl, parquet, hub)
    hub_name: str | None = None  # "owner/name", or a local folder that `datasets` can load
    hub_config: str | None = None
    hub_split: str = "train"
    streaming: bool = False  # hub only: read while downloading instead of downloading first
    extra_dirs: list[str] = field(default_factory=list)  # stdlib only: more folders of .py files; or "site-packages"

    tokenizer: str = "data/tokenizer.model"  # .model, tokenizer.json, or a folder with one
    vocab_size: int = 2048  # for tools.train_tokenizer
    tokenizer_bytes: int = 64_000_000  # it reads at most this much of the training text

    dir: str = "data"  # where the packed files lie
    seq_len: int = 256
    isolate_documents: bool = False  # no attention and no label across a document's end
    validation_fraction: float = 0.05  # share of documents, chosen by a hash of their names
    max_documents: int | None = None  # stop reading after this many documents, or bytes of text
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        problems = []
        if self.source in ("text", "jsonl", "parquet") and not self.paths:
            problems.append(f"data.source={self.source} needs data.paths")
        if self.source == "hub" and not self.hub_name:
            problems.append("data.source=hub needs data.hub_name")
        for name in ("paths", "validation_paths") if self.source in ("stdlib", "hub") else ():
            if getattr(self, name):
                problems.append(f"data.{name} is for data.source=text, jsonl or parquet, not {self.source}")
        if self.source != "stdlib" and self.extra_dirs:
            problems.append(f"data.extra_dirs is for data.source=stdlib, not {self.source}")
        if not 0.0 <= self.validation_fraction < 1.0:
            problems.append(f"data.validation_fraction={self.validation_fraction} is not in [0, 1)")
        for name in ("vocab_size", "tokenizer_bytes", "seq_len", "max_documents", "max_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                problems.append(f"data.{name}={value} is not positive")
        if problems:
            raise ValueError("; ".join(problems))


@dataclass(frozen=True)
class Document:
    key: str  # stable name, the same wherever the corpus lies: it decides between train and validation
    text: str  # never empty, always encodable as UTF-8
    split: str  # "train" or "validation"


def read_documents(config: DataConfig, tally: Tally) -> Iterator[Document]:
    """All documents of the corpus in a fixed order. `tally` fills up on the way.

    Raises UserError for a missing or unreadable file or data set, and when there is no document at all.
    """
    for document in itertools.islice(_all_documents(config, tally), config.max_documents):
        tally.documents += 1
        tally.text_bytes += len(document.text.encode())
        yield document
        if config.max_bytes is not None and tally.text_bytes >= config.max_bytes:
            return
    if tally.documents == 0:
        reasons = "; ".join(tally.lines()) or "nothing was read"
        place = config.hub_name or " ".join(config.paths) or sysconfig.get_path("stdlib")
        raise UserError(f"no document in the corpus (data.source={config.source}, {place}): {reasons}")


def corpus_files(config: DataConfig) -> list[tuple[str, str, str | None]]:
    """The files behind a local corpus in reading order, as (key, path, split); empty for a hub data set.

    The split is None where the hash of each document's name decides. Raises UserError when a pattern matches no file.
    """
    if config.source == "hub":
        return []
    if config.source == "stdlib":
        folders = [("stdlib", sysconfig.get_path("stdlib"))]
        for name in config.extra_dirs:
            folder = sysconfig.get_path("purelib") if name == "site-packages" else os.path.expanduser(name)
            folders.append((os.path.basename(os.path.abspath(name)), folder))
        return [(key, path, None) for label, folder in folders for key, path in _python_files(label, folder)]
    if not config.validation_paths:
        return [(key, path, None) for key, path in _matches(config.paths, "data.paths")]
    train = [(key, path, "train") for key, path in _matches(config.paths, "data.paths")]
    held_out = [(key, path, "validation") for key, path in _matches(config.validation_paths, "data.validation_paths")]
    overlap = {path for _, path, _ in train} & {path for _, path, _ in held_out}
    if overlap:
        raise UserError(f"{min(overlap)} is matched by both data.paths and data.validation_paths")
    return train + held_out


def corpus_settings(config: DataConfig) -> dict:
    """What the documents depend on, cheap to compute: packed files keep it to know when they are out of date.

    Local files count by path, size and time of change; a hub data set counts by its name alone.
    """
    names = ("source", "text_key", "hub_name", "hub_config", "hub_split", "paths", "validation_paths", "extra_dirs",
             "validation_fraction", "max_documents", "max_bytes")  # fmt: skip
    settings = {name: getattr(config, name) for name in names}
    digest = hashlib.sha256()
    for _, path, _ in corpus_files(config):
        stat = os.stat(path)
        digest.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    settings["files"] = digest.hexdigest()
    settings["python"] = platform.python_version() if config.source == "stdlib" else None
    return settings


def corpus_bytes(config: DataConfig) -> int | None:
    """Bytes to be read, for a progress bar; None when that is unknown beforehand (hub, parquet, limited reading)."""
    if config.source in ("hub", "parquet") or config.max_documents:
        return config.max_bytes
    return min(sum(os.path.getsize(path) for _, path, _ in corpus_files(config)), config.max_bytes or 2**63)


def split_of(key: str, validation_fraction: float) -> str:
    """Returns "train" or "validation" from the name alone, so a document stays put when others come or go."""
    share = int.from_bytes(hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()[:8], "big") / 2**64
    return "validation" if share < validation_fraction else "train"


def _all_documents(config: DataConfig, tally: Tally) -> Iterator[Document]:
    if config.source == "hub":
        for key, text in read_hub(config.hub_name, config.hub_config, config.hub_split, config.streaming,
                                  config.text_key, tally):  # fmt: skip
            yield Document(key, text, split_of(key, config.validation_fraction))
        return
    read = READERS[config.source]
    for key, path, split in corpus_files(config):
        try:
            if os.path.getsize(path) == 0:
                tally.trouble("empty file", path)
                continue
            for name, text in read(key, path, config.text_key, tally):
                yield Document(name, text, split or split_of(name, config.validation_fraction))
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def _python_files(label: str, folder: str) -> list[tuple[str, str]]:
    """(key, path) of the .py files below `folder`, sorted; keys are `label`/relative path."""
    if not os.path.isdir(folder):
        raise UserError(f"{folder} is not a folder (data.extra_dirs)")
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        for name in names:
            # _sysconfigdata holds build paths of this machine.
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                path = os.path.join(root, name)
                found.append((f"{label}/{os.path.relpath(path, folder)}".replace(os.sep, "/"), path))
    return sorted(found)


def _matches(patterns: list[str], config_key: str) -> list[tuple[str, str]]:
    """(key, path) of the files that the glob patterns match, sorted, each once.

    The key is relative to the pattern's folder, so that moving a corpus does not move documents between the splits.
    """
    found: dict[str, str] = {}
    for pattern in patterns:
        pattern = os.path.expanduser(pattern)
        paths = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        if os.path.isdir(pattern):
            raise UserError(f"{config_key}: {pattern} is a folder; name its files, for example {pattern}/**/*.txt")
        files = [path for path in paths if os.path.isfile(path)]  # a pipe or socket would block for ever
        if not files:
            raise UserError(f"{config_key}: no file matches {pattern}")
        literal = pattern if paths == [pattern] else re.match(r"[^*?[]*", pattern).group()
        folder = os.path.dirname(literal) or "."
        for path in files:
            found.setdefault(path, os.path.relpath(path, folder).replace(os.sep, "/"))
    return sorted((key, path) for path, key in found.items())
