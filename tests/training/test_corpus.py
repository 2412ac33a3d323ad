"""Corpora of each source, the split, and ugly input."""

import json
import os
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.training.corpora import read, text_config, write
from training import readers
from training.corpus import DataConfig, corpus_files, split_of
from training.errors import UserError


def test_the_standard_library_is_there_sorted_and_without_tests():
    files = corpus_files(DataConfig())
    keys = [key for key, _, _ in files]
    assert len(keys) > 300 and keys == sorted(keys)
    assert any(key.endswith("/json/decoder.py") for key in keys)
    assert not any("/test/" in key or "/tests/" in key or "site-packages" in key for key in keys)
    splits = [split_of(key, 0.05) for key in keys]
    assert 0.01 < splits.count("validation") / len(keys) < 0.1


def test_extra_folders_come_after_the_standard_library(tmp_path):
    (tmp_path / "pkg" / "tests").mkdir(parents=True)
    write(tmp_path / "pkg", m__py="x = 1\n", notes__txt="no")
    write(tmp_path / "pkg" / "tests", t__py="y = 1\n")
    extra = corpus_files(DataConfig(extra_dirs=[str(tmp_path / "pkg")]))
    assert [key for key, _, _ in extra[len(corpus_files(DataConfig())) :]] == ["pkg/m.py"]
    with pytest.raises(UserError, match="nowhere"):
        corpus_files(DataConfig(extra_dirs=[str(tmp_path / "nowhere")]))


def test_limits_stop_reading():
    documents, tally = read(DataConfig(max_documents=3))
    assert len(documents) == tally.documents == 3
    _, tally = read(DataConfig(max_bytes=100_000))
    assert 100_000 <= tally.text_bytes < 1_000_000


def test_the_split_depends_on_the_name_only(tmp_path):
    names = [f"doc{i}" for i in range(40)]
    for folder, missing in [("here", None), ("there", names[7])]:
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, **{f"{name}__txt": name for name in names if name != missing})
    here, there = (
        {d.text: d.split for d in read(text_config(tmp_path / folder, validation_fraction=0.3))[0]} for folder in ("here", "there")
    )
    assert len(set(here.values())) == 2
    assert there == {text: split for text, split in here.items() if text != names[7]}


def test_own_validation_files(tmp_path):
    write(tmp_path, a__txt="train", b__txt="held out")
    config = text_config(tmp_path, "a.txt", validation_paths=[str(tmp_path / "b.txt")], validation_fraction=0.9)
    assert [(d.text, d.split) for d in read(config)[0]] == [("train", "train"), ("held out", "validation")]
    with pytest.raises(UserError, match=r"a\.txt is matched by both"):
        read(text_config(tmp_path, "a.txt", validation_paths=[str(tmp_path / "*.txt")]))


def test_globs_recurse_and_count_each_file_once(tmp_path):
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub", x__txt="x")
    write(tmp_path, y__txt="y", z__log="z")
    config = DataConfig(source="text", paths=[str(tmp_path / "**/*.txt"), str(tmp_path / "y.txt")])
    assert [d.text for d in read(config)[0]] == ["x", "y"]


def test_a_large_text_file_is_cut_at_blank_lines_and_nothing_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "PIECE_BYTES", 64)
    text = "".join(f"line é {i}\n" + "\n" * (i % 5 == 0) for i in range(100)) + "no newline at the end"
    write(tmp_path, a__txt=text)
    documents, tally = read(text_config(tmp_path))
    assert "".join(d.text for d in documents) == text and not tally.troubles
    assert len(documents) > 5 and len({d.key for d in documents}) == len(documents)
    assert documents[0].text.endswith("\n\n")


@given(text=st.text(st.sampled_from("a\n é漢🙂"), min_size=65, max_size=600))
def test_cutting_never_splits_a_character(text):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "PIECE_BYTES", 16)
        write(Path(folder), a__txt=text)
        documents, tally = read(text_config(Path(folder)))
        assert "".join(d.text for d in documents) == text and not tally.troubles


def test_parquet_and_its_ugly_rows(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pa.table({"body": ["one", None, "", "two"], "n": [1, 2, 3, 4]}), path)
    documents, tally = read(text_config(tmp_path, "*.parquet", source="parquet", text_key="body"))
    assert [d.text for d in documents] == ["one", "two"]
    assert tally.first["record whose 'body' is not text"].endswith("a.parquet:row 2")
    assert tally.first["empty document"].endswith("a.parquet:row 3")
    with pytest.raises(UserError, match=r"a\.parquet has no column 'text'.*body, n"):
        read(text_config(tmp_path, "*.parquet", source="parquet"))
    path.write_bytes(b"no parquet at all")
    with pytest.raises(UserError, match=r"a\.parquet is not a readable parquet"):
        read(text_config(tmp_path, "*.parquet", source="parquet"))


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"never read")
    hub = DataConfig(source="hub", hub_name="a/b")
    sources = {"pyarrow": text_config(tmp_path, "*.parquet", source="parquet"), "datasets": hub}
    for package, config in sources.items():
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(UserError, match=f"data.source={config.source} needs the `{package}` package: pip install {package}"):
            read(config)


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_data_sets(tmp_path, monkeypatch, streaming):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    write(tmp_path / "set", train__jsonl='{"text": "one"}\n{"text": ""}\n{"text": "two"}\n')
    config = DataConfig(source="hub", hub_name=str(tmp_path / "set"), streaming=streaming)
    documents, tally = read(config)
    assert [d.text for d in documents] == ["one", "two"] and tally.troubles["empty document"] == 1
    write(tmp_path / "set", train__jsonl='{"text": "one"}\n{broken')
    with pytest.raises(UserError, match=r"cannot read data set .*set \(split train\)"):
        read(config)
    with pytest.raises(UserError, match="split nosplit"):
        read(DataConfig(source="hub", hub_name=str(tmp_path / "set"), hub_split="nosplit", streaming=streaming))


# ------------------------------------------------------------------------------------------------ ugly input


def test_jsonl_skips_and_counts_with_file_and_line(tmp_path):
    lines = [b'{"text": "first"}', b"", b"{broken", b'{"other": 1}', b"[1]", b'{"text": 3}', b'{"text": ""}',
             b'{"text": "half \\ud800 pair"}', b'{"text": "b\xffd"}', b"   ", b'{"text": "last"}']  # fmt: skip
    write(tmp_path, a__jsonl=b"\n".join(lines))  # no newline at the end
    documents, tally = read(text_config(tmp_path, "*.jsonl", source="jsonl"))
    assert [d.text for d in documents] == ["first", "half ? pair", "b\ufffdd", "last"]
    where = {kind: place.rpartition("/")[2] for kind, place in tally.first.items()}
    assert where == {
        "blank line": "a.jsonl:2",
        "line that is not JSON": "a.jsonl:3",
        "record without key 'text'": "a.jsonl:4, which has other",
        "record that is not an object": "a.jsonl:5",
        "record whose 'text' is not text": "a.jsonl:6",
        "empty document": "a.jsonl:7",
        "document with half a surrogate pair (replaced)": "a.jsonl:8",
        "bad UTF-8 sequence (replaced)": "a.jsonl:9",
    }
    assert tally.troubles["blank line"] == 2


def test_another_key_of_jsonl(tmp_path):
    write(tmp_path, a__jsonl=json.dumps({"content": "words"}))
    assert read(text_config(tmp_path, "*.jsonl", source="jsonl", text_key="content"))[0][0].text == "words"
    with pytest.raises(UserError, match=r"1 x record without key 'text'.*a\.jsonl:1, which has content"):
        read(text_config(tmp_path, "*.jsonl", source="jsonl"))


def test_empty_files_are_counted_and_a_corpus_of_them_is_refused(tmp_path):
    write(tmp_path, a__txt="", b__txt="text")
    documents, tally = read(text_config(tmp_path))
    assert [d.text for d in documents] == ["text"]
    assert tally.first["empty file"].endswith("a.txt")
    with pytest.raises(UserError, match=r"no document.*1 x empty file.*a\.txt"):
        read(text_config(tmp_path, "a.txt"))


def test_bad_utf8_is_replaced_and_counted_but_a_real_replacement_character_is_not(tmp_path):
    write(tmp_path, a__txt=b"ok \xff \xfe end", b__txt="fine \ufffd")
    documents, tally = read(text_config(tmp_path))
    assert [d.text for d in documents] == ["ok \ufffd \ufffd end", "fine \ufffd"]
    assert tally.troubles == {"bad UTF-8 sequence (replaced)": 2}


def test_a_byte_order_mark_is_no_text(tmp_path):
    write(tmp_path, a__txt="\ufeffabc", b__jsonl='\ufeff{"text": "abc"}')
    assert read(text_config(tmp_path))[0][0].text == "abc"
    assert read(text_config(tmp_path, "*.jsonl", source="jsonl"))[0][0].text == "abc"


def test_missing_files_folders_and_pipes_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"data\.paths: no file matches .*none\*\.txt"):
        read(text_config(tmp_path, "none*.txt"))
    with pytest.raises(UserError, match="is a folder"):
        read(DataConfig(source="text", paths=[str(tmp_path)]))
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(UserError, match="no file matches"):
        read(text_config(tmp_path, "pipe.txt"))


def test_unreadable_files_are_named(tmp_path, monkeypatch):
    def refuse(path, mode):
        raise PermissionError(13, "Permission denied", path)

    write(tmp_path, a__txt="text")
    monkeypatch.setattr(readers, "open", refuse, raising=False)  # chmod would not stop root
    with pytest.raises(UserError, match=r"cannot read .*a\.txt: Permission denied"):
        read(text_config(tmp_path))


@pytest.mark.parametrize(("settings", "message"), [
    (dict(source="text"), "data.paths"),
    (dict(paths=["mine/*.txt"]), "data.paths is for data.source=text, jsonl or parquet, not stdlib"),
    (dict(source="hub", hub_name="x", paths=["y"]), "data.paths is for"),
    (dict(source="hub"), "data.hub_name"),
    (dict(validation_fraction=1.0), "validation_fraction=1.0"),
    (dict(seq_len=0), "seq_len=0"),
    (dict(source="text", paths=["x"], extra_dirs=["y"]), "extra_dirs"),
    (dict(source="hub", hub_name="x", validation_paths=["y"]), "validation_paths"),
])  # fmt: skip
def test_settings_that_contradict_each_other(settings, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**settings)


def test_all_problems_of_the_settings_come_together():
    with pytest.raises(ValueError, match=r"paths.*seq_len=-1.*max_bytes=0"):
        DataConfig(source="jsonl", seq_len=-1, max_bytes=0)
