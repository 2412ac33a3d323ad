"""Packing keeps every token of every document, in order, whatever the documents are."""

import json
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.corpora import EOS, TOKENIZER, read, text_config
from training.data import PackedDataset
from training.packing import SPLITS, pack_corpus, packed_path, read_info

DOCUMENTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), min_size=1, max_size=12).filter(any)


@settings(max_examples=40, deadline=None)
@given(texts=DOCUMENTS, share=st.sampled_from([0.0, 0.3, 0.9]), seq_len=st.integers(1, 9))
def test_packed_tokens_are_those_of_the_documents(texts: list[str], share: float, seq_len: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        config = text_config(folder, "*.jsonl", source="jsonl", validation_fraction=share)
        documents, tally = read(config)
        assert len(documents) == sum(map(bool, texts)) and sum(tally.troubles.values()) == len(texts) - len(documents)
        pack_corpus(config, TOKENIZER)
        for split in SPLITS:
            want = [token for d in documents if d.split == split for token in (*TOKENIZER.encode(d.text), EOS)]
            path = packed_path(config.dir, split)
            assert np.fromfile(path, dtype=read_info(path).dtype).tolist() == want
            if len(want) > seq_len:
                dataset = PackedDataset(path, seq_len)
                rows = dataset.rows(np.arange(dataset.num_samples))
                assert rows.tolist() == [want[i : i + seq_len + 1] for i in range(0, seq_len * dataset.num_samples, seq_len)]
                assert dataset.num_samples == (len(want) - 1) // seq_len
