"""A sentencepiece model as tokenizer.json: the same tokens for any text, special tokens named, or nothing at all."""

from __future__ import annotations

import argparse
import inspect
import io
import json
import random
from pathlib import Path

import pytest
import sentencepiece

from tools.hf_tokenizer import write_tokenizer_json
from training.tokenizer import load_tokenizer, train_tokenizer

TEXT = inspect.getsource(argparse)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([TEXT], 1500, str(root / "t.model"))
    assert write_tokenizer_json(str(root / "t.model"), root) is None
    return root


def test_every_text_has_the_same_tokens(folder: Path) -> None:
    """Source, its lines, random strings of its alphabet and of others."""
    ours, theirs = load_tokenizer(str(folder / "t.model")), load_tokenizer(str(folder / "tokenizer.json"))
    rng = random.Random(0)
    texts = [TEXT, inspect.getsource(json), *TEXT.splitlines()[:300]]
    texts += ["".join(rng.choices(TEXT, k=200)) for _ in range(100)]
    letters = [chr(i) for i in (*range(1, 0x250), *range(0x4E00, 0x5000))]
    texts += ["".join(rng.choices(letters, k=60)) for _ in range(100)]
    texts += [" " * 37, "\n\n\n    x", "</s><s><unk>", ""]
    for text in texts:
        ids = ours.encode(text)
        assert theirs.encode(text) == ids, text
        assert theirs.decode(ids) == ours.decode(ids)
    assert (theirs.eos_id, theirs.bos_id, theirs.vocab_size) == (ours.eos_id, ours.bos_id, ours.vocab_size)


def test_transformers_reads_it(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs, ours = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder)), load_tokenizer(str(folder / "t.model"))
    assert theirs.encode(TEXT[:3000]) == ours.encode(TEXT[:3000]) and theirs.eos_token_id == ours.eos_id
    assert theirs.decode(ours.encode("  def f(x):\n\treturn x")) == "  def f(x):\n\treturn x"


def test_what_would_encode_otherwise_is_not_written(tmp_path: Path) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()), model_writer=model, vocab_size=600, model_type="unigram", minloglevel=2
    )
    (tmp_path / "u.model").write_bytes(model.getvalue())
    assert "encode otherwise" in write_tokenizer_json(str(tmp_path / "u.model"), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["u.model"]
