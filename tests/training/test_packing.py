"""Packed files: what they hold, when they are made anew, and what is said of damaged ones."""

import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.training.corpora import EOS, TOKENIZER, ByteTokenizer, text_config, write
from training import packing
from training.data import IGNORED, PackedDataset, make_batch
from training.errors import UserError
from training.packing import SPLITS, documents_done, other_corpus, pack_corpus, packed_path, read_info, stale_reason


def pack(config):
    infos, tally = pack_corpus(config, TOKENIZER)
    return infos, tally, packed_path(config.dir, "train")


def test_packing_puts_eos_after_each_document(tmp_path):
    write(tmp_path, a__txt="ab\n", b__txt="c")
    infos, _, path = pack(text_config(tmp_path))
    tokens = np.fromfile(path, dtype="<u2").tolist()
    assert tokens == [*TOKENIZER.encode("ab\n"), EOS, *TOKENIZER.encode("c"), EOS]
    assert infos["train"] == read_info(path)
    assert (infos["train"].num_documents, infos["train"].num_tokens, infos["train"].text_bytes) == (2, 6, 4)


def test_a_large_vocabulary_takes_four_bytes(tmp_path):
    class Large(ByteTokenizer):
        vocab_size = 2**16 + 1

        def encode(self, text):
            return [2**16] * len(text)

    write(tmp_path, a__txt="abcdef")
    config = text_config(tmp_path)
    pack_corpus(config, Large())
    dataset = PackedDataset(packed_path(config.dir, "train"), 5)
    assert dataset.rows(np.array([0])).tolist() == [[2**16] * 6]


def test_batches_of_encoding_do_not_change_the_result(tmp_path, monkeypatch):
    write(tmp_path, a__txt="one", b__txt="two", c__txt="three")
    whole = pack(text_config(tmp_path))[0]["train"]
    monkeypatch.setattr(packing, "BATCH_CHARS", 1)
    assert pack(text_config(tmp_path))[0]["train"] == whole


def test_bits_per_byte(tmp_path):
    write(tmp_path, a__txt="abcdefg")  # 7 bytes, 8 tokens
    dataset = PackedDataset(pack(text_config(tmp_path))[2], 4)
    assert dataset.bits_per_byte(math.log(2)) == pytest.approx(8 / 7)


def test_up_to_date_until_text_settings_or_tokenizer_change(tmp_path):
    write(tmp_path, a__txt="some text")
    config = text_config(tmp_path)
    assert "does not exist" in stale_reason(config, TOKENIZER)
    pack(config)
    assert stale_reason(config, TOKENIZER) is None
    assert "(max_bytes differs)" in stale_reason(text_config(tmp_path, max_bytes=5), TOKENIZER)
    assert "(max_documents, max_bytes differ)" in stale_reason(text_config(tmp_path, max_bytes=5, max_documents=1), TOKENIZER)
    other = ByteTokenizer()
    other.fingerprint = "e" * 64
    assert "ffffffffffff" in stale_reason(config, other) and "eeeeeeeeeeee" in stale_reason(config, other)
    write(tmp_path, a__txt="some other text")
    assert "files" in stale_reason(config, TOKENIZER)


def test_failing_halfway_leaves_the_old_files_and_no_partial_ones(tmp_path):
    write(tmp_path, a__txt="some text")
    config = text_config(tmp_path)
    before = pack(config)[0]["train"]

    class DiskFull(ByteTokenizer):
        def encode_batch(self, texts):
            raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="packed.*No space left"):
        pack_corpus(config, DiskFull())
    assert read_info(packed_path(config.dir, "train")) == before
    assert not [name for name in os.listdir(config.dir) if name.endswith(".partial")]


class Killed(BaseException):
    """As Ctrl-C: not an Exception."""


def killed_after(tmp_path, monkeypatch, batches):
    """Packs 40 files in batches of a few; dies after some of them. Returns the config and a counter of encoded texts."""
    monkeypatch.setattr(packing, "BATCH_CHARS", 50)
    monkeypatch.setattr(packing, "JOURNAL_SECONDS", 0.0)
    write(tmp_path, **{f"f{i:02}__txt": f"text number {i} " * (1 + i % 3) for i in range(40)})
    config, encoded = text_config(tmp_path, validation_fraction=0.3), []

    class Dying(ByteTokenizer):
        def encode_batch(self, texts):
            if len(encoded) == batches:
                raise Killed
            encoded.append(len(texts))
            return super().encode_batch(texts)

    with pytest.raises(Killed):
        pack_corpus(config, Dying())
    return config


def files_of(config):
    return {s: (Path(packed_path(config.dir, s)).read_bytes(), read_info(packed_path(config.dir, s))) for s in SPLITS}


def test_a_killed_packing_goes_on_where_it_was(tmp_path, monkeypatch):
    config = killed_after(tmp_path, monkeypatch, 7)
    done, encoded = documents_done(config), []
    assert 0 < done < 40

    class Counting(ByteTokenizer):
        def encode_batch(self, texts):
            encoded.extend(texts)
            return super().encode_batch(texts)

    pack_corpus(config, Counting())
    resumed = files_of(config)
    assert len(encoded) == 40 - done
    assert not [name for name in os.listdir(config.dir) if "partial" in name]
    pack_corpus(config, ByteTokenizer())
    assert files_of(config) == resumed


def test_a_killed_packing_of_another_corpus_or_a_cut_file_is_not_taken_over(tmp_path, monkeypatch):
    config = killed_after(tmp_path, monkeypatch, 7)
    stat = os.stat(tmp_path / "f00.txt")
    text = (tmp_path / "f00.txt").read_text()
    write(tmp_path, f00__txt=text.replace("text", "TEXT"))  # same size and, below, same time: only the hash can tell
    os.utime(tmp_path / "f00.txt", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    pack_corpus(config, ByteTokenizer())
    tokens = files_of(config)["train"][0] + files_of(config)["validation"][0]
    assert np.array(TOKENIZER.encode("TEXT"), "<u2").tobytes() in tokens
    config = killed_after(tmp_path, monkeypatch, 5)
    for path in Path(config.dir).glob("*.partial"):
        path.write_bytes(b"")
    pack_corpus(config, ByteTokenizer())
    resumed = files_of(config)
    pack_corpus(config, ByteTokenizer())
    assert files_of(config) == resumed


def test_damaged_packed_files_are_named(tmp_path):
    write(tmp_path, a__txt="some text")
    path = pack(text_config(tmp_path))[2]
    with pytest.raises(UserError, match="ffffffffffff.*abababababab"):
        PackedDataset(path, 4, tokenizer="ab" * 32)
    with pytest.raises(UserError, match=r"10 tokens, fewer than the 65"):
        PackedDataset(path, 64)
    for size, what in ((11, "truncated"), (22, "too long")):
        with open(path, "r+b") as file:
            file.truncate(size)
        with pytest.raises(UserError, match=rf"train\.bin has {size} bytes.*20: {what}"):
            PackedDataset(path, 4)
    description = path.replace(".bin", ".json")
    for content, message in [("{", "damaged"), ("[]", "damaged"), ('{"format": 1}', "damaged"), ('{"format": 9}', "9")]:
        with open(description, "w") as file:
            file.write(content)
        with pytest.raises(UserError, match=rf"train\.json.*{message}"):
            read_info(path)
    os.unlink(description)
    with pytest.raises(UserError, match="prepare_data"):
        PackedDataset(path, 4)


def test_an_empty_validation_split_is_explained(tmp_path):
    write(tmp_path, a__txt="text " * 100)
    config = text_config(tmp_path)
    pack(config)
    with pytest.raises(UserError, match=r"validation\.bin holds 0 tokens.*data\.validation_fraction"):
        PackedDataset(packed_path(config.dir, "validation"), 4)


def test_one_token_documents_and_missing_newlines_are_fine(tmp_path):
    write(tmp_path, a__txt="x", b__txt="y", c__txt="\n")
    path = pack(text_config(tmp_path))[2]
    batch = make_batch(PackedDataset(path, 5).rows(np.array([0])), np.array([0]), EOS, True)
    assert batch.positions_BS.tolist() == [[0, 1, 0, 1, 0]]
    assert (batch.labels_BS != IGNORED).tolist() == [[True, False, True, False, True]]


def test_training_on_another_text_than_the_config_names_is_said(tmp_path: Path) -> None:
    write(tmp_path, a__txt="one", b__txt="two")
    config = text_config(tmp_path)
    pack_corpus(config, TOKENIZER)
    assert other_corpus(config) is None
    assert other_corpus(replace(config, max_bytes=5)) is None, "a part of the same text"
    said = other_corpus(replace(config, source="stdlib", paths=[])) or ""
    assert "data.source, data.paths" in said and "prepare_data" in said
