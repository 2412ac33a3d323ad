"""One interface over sentencepiece (`*.model`) and Hugging Face (`tokenizer.json`) tokenizers.

A tokenizer adds nothing by itself: `encode` gives the text's own tokens, and the packer puts one EOS after each
document. There is no padding token anywhere in octet (padded rows are marked by label -100), so no special id is ever
remapped to stand for padding. Text that spells a special token ("</s>", "<|endoftext|>") is encoded as plain text.
"""

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from training.errors import UserError

# Only consulted when a tokenizer.json has no tokenizer_config.json beside it.
COMMON_EOS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|endofsentence|>")
COMMON_BOS = ("<|startoftext|>", "<s>", "<|begin_of_text|>", "<bos>")
# sentencepiece drops longer lines whole, so `_lines` cuts them; far above any line of prose or source text.
MAX_LINE_CHARS = 4096


class Tokenizer(Protocol):
    """What the rest of octet uses. Get one from `load_tokenizer`."""

    path: str
    vocab_size: int  # largest id + 1
    eos_id: int
    bos_id: int | None
    fingerprint: str  # sha256 of the model file: packed data and checkpoints carry it

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: list[str]) -> list[list[int]]: ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`. Special tokens and ids past the vocabulary (a model's padded rows) are left out."""
        ...


class SentencePieceTokenizer:
    """A sentencepiece `.model` file. Raises UserError when the file is no such model or has no EOS."""

    def __init__(self, path: str) -> None:
        import sentencepiece

        data = _read(path)
        self.path, self.fingerprint = path, hashlib.sha256(data).hexdigest()
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=data)
            self.vocab_size = self._model.vocab_size()
        except RuntimeError as error:
            kinds = "data.tokenizer is a sentencepiece .model, a tokenizer.json, or a folder with one of them"
            raise UserError(f"{path} is not a sentencepiece model; {kinds}") from error
        if self._model.eos_id() < 0:
            raise UserError(f"{path} has no end-of-sentence token, which octet ends each document with: use another data.tokenizer")
        self.eos_id = self._model.eos_id()
        self.bos_id = self._model.bos_id() if self._model.bos_id() >= 0 else None

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return self._model.encode(texts, num_threads=os.cpu_count() or 1)

    def decode(self, ids: Iterable[int]) -> str:
        return self._model.decode([int(i) for i in ids if 0 <= i < self.vocab_size])


class HuggingFaceTokenizer:
    """A `tokenizer.json`. EOS and BOS come from `tokenizer_config.json` beside it, else from common names."""

    def __init__(self, path: str) -> None:
        import tokenizers

        data = _read(path)
        self.path, self.fingerprint = path, hashlib.sha256(data).hexdigest()
        try:
            self._model = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the Rust side raises bare Exception
            raise UserError(f"{path} is not a tokenizer.json: {error}") from error
        # Without this a document that merely mentions "<|endoftext|>" would hold a real document boundary.
        self._model.encode_special_tokens = True
        self._model.no_padding()
        self._model.no_truncation()
        self.vocab_size = max(self._model.get_vocab(with_added_tokens=True).values()) + 1
        eos_id = self._special("eos_token", COMMON_EOS)
        if eos_id is None:
            raise UserError(f"{path}: which token ends a text? Name it as eos_token in tokenizer_config.json beside it")
        self.eos_id = eos_id
        self.bos_id = self._special("bos_token", COMMON_BOS)

    def _special(self, name: str, common: tuple[str, ...]) -> int | None:
        config = Path(self.path).with_name("tokenizer_config.json")
        if config.is_file():
            try:
                token = json.loads(config.read_text(encoding="utf-8")).get(name)
            except (ValueError, AttributeError) as error:
                raise UserError(f"{config} is not a JSON object") from error
            token = token["content"] if isinstance(token, dict) else token
            if token is not None:
                token_id = self._model.token_to_id(token)
                if token_id is None:
                    raise UserError(f"{config}: {name} {token!r} is not in {self.path}")
                return token_id
        ids = (self._model.token_to_id(token) for token in common)
        return next((i for i in ids if i is not None), None)

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._model.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        return self._model.decode([int(i) for i in ids if 0 <= i < self.vocab_size], skip_special_tokens=True)


def source_of(path: str) -> str:
    """What to do for a tokenizer at `path`: a `.model` is trained here, a `tokenizer.json` is a published model's own."""
    if path.endswith(".model"):
        return "train one with `python -m tools.train_tokenizer --config ...`"
    if path.endswith(".json"):
        fetch = "hf download inclusionAI/Ling-mini-2.0 tokenizer.json tokenizer_config.json"
        folder = os.path.dirname(path) or "."
        return f"a tokenizer.json is a published model's own: fetch it, for Ling 2.0 with `{fetch} --local-dir {folder}`"
    return "a name that ends in .model can be trained, with `python -m tools.train_tokenizer --config ...`"


def load_tokenizer(path: str, otherwise: str = "set data.tokenizer to an existing file") -> Tokenizer:
    """Opens a `.model` file, a `tokenizer.json`, or a folder that holds one of them; `otherwise`: what to do where none is.

    Raises UserError for a missing or foreign file.
    """
    if os.path.isdir(path):
        names = [os.path.join(path, name) for name in ("tokenizer.json", "tokenizer.model")]
        found = [name for name in names if os.path.isfile(name)]
        if not found:
            raise UserError(f"folder {path} holds neither tokenizer.json nor tokenizer.model")
        path = found[0]
    if not os.path.isfile(path):
        raise UserError(f"tokenizer {path} does not exist; {source_of(path)}; or {otherwise}")
    return HuggingFaceTokenizer(path) if path.endswith(".json") else SentencePieceTokenizer(path)


def check_vocab(tokenizer: Tokenizer, model_vocab_size: int) -> None:
    """Raises UserError unless every token has a row in the model. More rows than tokens is fine (they are padding)."""
    if tokenizer.vocab_size > model_vocab_size:
        raise UserError(
            f"tokenizer {tokenizer.path} has {tokenizer.vocab_size} tokens but the model's vocabulary holds only "
            f"{model_vocab_size}; raise model.vocab_size or use another data.tokenizer"
        )


def other_vocabulary(tokenizer: Tokenizer, vocab_size: int, default: int) -> str | None:
    """What to say where `data.vocab_size` (unless it is the default) is not what a tokenizer of tools.train_tokenizer has."""
    if vocab_size in (default, tokenizer.vocab_size) or not tokenizer.path.endswith(".model"):
        return None
    there = f"{tokenizer.path} has {tokenizer.vocab_size} tokens and is what is read, not data.vocab_size={vocab_size}"
    return f"{there}; python -m tools.train_tokenizer trains another"


def train_tokenizer(texts: Iterable[str], vocab_size: int, out: str) -> Tokenizer:
    """Trains a byte-fallback BPE of `vocab_size` tokens on `texts` and writes it to `out` (a `.model` file).

    Any text survives encode and decode unchanged (no normalisation, no dummy prefix, bytes for unseen characters; the
    one exception is U+2581, which sentencepiece uses for the space). Deterministic: the same texts give the same bytes,
    whatever the path and the number of cores. Ids: 0 unknown, 1 BOS, 2 EOS. Raises UserError when the texts are too few
    for `vocab_size`, or it is too small for the alphabet.
    """
    import sentencepiece

    model = io.BytesIO()  # a model_prefix would be written into the model, and so into its fingerprint
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts), model_writer=model, vocab_size=vocab_size, model_type="bpe",
            byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
            add_dummy_prefix=False, split_digits=True, unk_id=0, bos_id=1, eos_id=2, pad_id=-1,
            max_sentence_length=4 * MAX_LINE_CHARS, num_threads=2, minloglevel=2,
        )  # fmt: skip
    except RuntimeError as error:
        reason = str(error).rpartition("] ")[2].partition(" Increase vocab_size")[0].strip()
        if "sentences_.empty()" in str(error):
            reason = (
                "no training text: a document belongs to training or to validation by its name, and none fell to training; "
                "give more files, or name validation files in data.validation_paths"
            )
        raise UserError(f"cannot train a tokenizer of data.vocab_size={vocab_size} tokens: {reason}") from error
    write_whole(out, model.getvalue())
    return SentencePieceTokenizer(out)


def write_whole(path: str, data: bytes) -> None:
    """Writes `data` beside `path` and renames it, so that `path` is never half written. OSError becomes UserError."""
    partial = f"{path}.partial"
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            Path(partial).unlink()
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Lines without their ends. A newline is its own byte token, so that tokens never span lines."""
    for text in texts:
        for line in text.split("\n"):
            # sentencepiece warns about, and drops, lines that hold NUL.
            line = line.replace("\0", "")
            for start in range(0, len(line), MAX_LINE_CHARS):
                yield line[start : start + MAX_LINE_CHARS]


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
