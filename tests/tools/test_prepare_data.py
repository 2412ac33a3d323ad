"""The two tools that `make train` runs before training, as a user calls them."""

import os
from pathlib import Path

import pytest

from tests.training.corpora import write
from tools import prepare_data, train_tokenizer
from training.corpus import DataConfig
from training.data import PackedDataset
from training.errors import UserError, exit_status
from training.packing import packed_path, read_info
from training.tokenizer import load_tokenizer
from training.tokenizer import train_tokenizer as train


@pytest.fixture
def run(tmp_path, capsys):
    """Calls a tool on a small corpus; returns its exit status and what it printed."""
    text = "".join(f"def function_{i}(argument):\n    return argument + {i}\n\n" for i in range(300))
    write(tmp_path, a__txt=text, b__txt=text[:5000], v__txt=text[5000:9000])
    (tmp_path / "run.yaml").write_text(
        f"data:\n  source: text\n  paths: ['{tmp_path}/[ab].txt']\n  validation_paths: ['{tmp_path}/v.txt']\n"
        f"  tokenizer: {tmp_path}/out/t.model\n  vocab_size: 320\n  dir: {tmp_path}/out\n  seq_len: 64\n"
    )

    def call(tool, *arguments):
        status = exit_status(lambda: tool.main(["--config", str(tmp_path / "run.yaml"), *arguments]))
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return call


def test_from_nothing_to_samples(run, tmp_path):
    status, said = run(train_tokenizer)
    assert status == 0 and "320 tokens" in said
    status, said = run(prepare_data)
    assert status == 0
    tokenizer = load_tokenizer(str(tmp_path / "out/t.model"))
    for split, first in (("train", "a.txt"), ("validation", "v.txt")):
        dataset = PackedDataset(packed_path(str(tmp_path / "out"), split), 64, tokenizer.fingerprint)
        assert (tmp_path / first).read_text().startswith(tokenizer.decode(dataset.rows([0])[0]))
        assert f"{dataset.info.num_tokens:,} tokens" in said
    assert dataset.info.text_bytes == 4000


def test_a_second_call_does_nothing(run, tmp_path):
    run(train_tokenizer), run(prepare_data)
    before = {name: os.stat(tmp_path / "out" / name).st_mtime_ns for name in os.listdir(tmp_path / "out")}
    assert len(before) == 5
    assert "exists" in run(train_tokenizer)[1]
    assert "up to date" in run(prepare_data)[1]
    assert {name: os.stat(tmp_path / "out" / name).st_mtime_ns for name in before} == before


def test_the_tokenizer_reads_only_training_text_and_no_more_than_told(run, tmp_path):
    run(train_tokenizer)
    first = load_tokenizer(str(tmp_path / "out/t.model")).fingerprint
    write(tmp_path, v__txt="quite different words " * 500)
    run(train_tokenizer, "--force")
    assert load_tokenizer(str(tmp_path / "out/t.model")).fingerprint == first
    run(train_tokenizer, "--force", "data.tokenizer_bytes=2000", "data.vocab_size=300")
    assert load_tokenizer(str(tmp_path / "out/t.model")).vocab_size == 300


def test_another_vocabulary_size_does_not_replace_a_tokenizer_unasked(run, tmp_path):
    run(train_tokenizer)
    status, said = run(train_tokenizer, "data.vocab_size=300")
    assert status == 2 and "320" in said and "300" in said and "--force" in said
    assert load_tokenizer(str(tmp_path / "out/t.model")).vocab_size == 320


def test_another_tokenizer_means_packing_anew(run, tmp_path):
    run(train_tokenizer), run(prepare_data)
    run(train_tokenizer, "--force", "data.vocab_size=300")
    status, said = run(prepare_data, "data.vocab_size=300")
    assert status == 0 and "was packed by tokenizer" in said
    tokenizer = load_tokenizer(str(tmp_path / "out/t.model"))
    assert read_info(str(tmp_path / "out/train.bin")).tokenizer == tokenizer.fingerprint


def test_a_truncated_file_is_packed_anew(run, tmp_path):
    run(train_tokenizer), run(prepare_data)
    path = tmp_path / "out/train.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    assert "truncated" in run(prepare_data)[1]
    assert path.read_bytes() == whole


def test_troubles_of_the_corpus_are_told(run, tmp_path):
    write(tmp_path, a__txt=b"def \xff bad bytes\n" * 300, b__txt="")
    run(train_tokenizer, "data.vocab_size=280")
    status, said = run(prepare_data, "data.vocab_size=280")
    assert status == 0
    assert f"300 x bad UTF-8 sequence (replaced) (first: {tmp_path}/a.txt)" in said
    assert f"1 x empty file (first: {tmp_path}/b.txt)" in said


@pytest.mark.parametrize(("tool", "arguments", "message"), [
    (train_tokenizer, ["data.paths=[nowhere/*.txt]"], "nowhere/*.txt"),
    (train_tokenizer, ["data.tokenizer=none/tokenizer.json"], "none/tokenizer.json does not exist"),
    (train_tokenizer, ["data.tokenizer=none/tokenizer.json"], "tokenizer.json tokenizer_config.json --local-dir none`"),
    (prepare_data, ["data.tokenizer=none/tokenizer.json"], "hf download inclusionAI/Ling-mini-2.0 tokenizer.json"),
    (train_tokenizer, ["data.vocab_size=100000", "model.vocab_size=100096"], "data.vocab_size=100000"),
    (prepare_data, ["data.tokenizer=none.model"], "none.model does not exist"),
    (prepare_data, ["data.dir=/dev/null/x"], "/dev/null/x"),
    (prepare_data, ["model.vocab_size=256", "data.vocab_size=256"], "model's vocabulary holds only 256"),
])  # fmt: skip
def test_mistakes_end_with_one_message_and_status_2(run, tool, arguments, message):
    if tool is prepare_data:
        run(train_tokenizer)
    status, said = run(tool, *arguments)
    assert status == 2 and message in said and "Traceback" not in said


def test_bugs_keep_their_traceback():
    def broken():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        exit_status(broken)
    assert exit_status(lambda: None) == 0


def test_a_split_without_a_document_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One file is one document: it falls whole into training or into validation. Training needs one, validation does not."""
    (tmp_path / "only.txt").write_text("a short text\n" * 40)
    tokenizer = train(["a short text\n" * 40], 280, tmp_path / "t.model")
    files = dict(paths=(str(tmp_path / "only.txt"),), tokenizer=str(tokenizer.path), dir=str(tmp_path / "data"), seq_len=16)
    prepare_data.prepare(DataConfig(source="text", validation_fraction=0.0, **files), 512)
    out = capsys.readouterr().out
    assert out.count("no document fell to validation") == 1 and "data.validation_paths" in out
    with pytest.raises(UserError, match=r"no document fell to train: .*data.validation_paths"):
        prepare_data.prepare(DataConfig(source="text", validation_fraction=0.999999, **files), 512)


def test_a_corpus_shorter_than_a_sequence_ends_the_program(run, tmp_path):
    """docs/data.md says so; the second time too, when the packed files are up to date."""
    run(train_tokenizer)
    write(tmp_path, a__txt="x = 1\n" * 5, b__txt="y = 2\n" * 5)
    for _ in range(2):
        status, said = run(prepare_data)
        assert status == 2 and "fewer than the 65 of one sequence" in said and "a shorter data.seq_len" in said
    assert run(prepare_data, "data.seq_len=8")[0] == 0
