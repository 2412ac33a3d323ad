"""Both tokenizer kinds behind one interface: round trips, special tokens, determinism, refusals."""

import inspect
import json
import textwrap

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from training.errors import UserError
from training.tokenizer import check_vocab, load_tokenizer, other_vocabulary, train_tokenizer

CORPUS = [inspect.getsource(textwrap), inspect.getsource(inspect)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizer")


@pytest.fixture(scope="module")
def sentencepiece_tokenizer(folder):
    return train_tokenizer(CORPUS, 512, str(folder / "t.model"))


@pytest.fixture(scope="module")
def hf_path(folder):
    """A byte-level BPE with two special tokens, as published tokenizers have."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=["<|startoftext|>", "<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    model.train_from_iterator(CORPUS, trainer)
    model.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


@pytest.fixture(scope="module", params=["sentencepiece", "hugging face"])
def tokenizer(request, sentencepiece_tokenizer, hf_path):
    return sentencepiece_tokenizer if request.param == "sentencepiece" else load_tokenizer(hf_path)


# U+2581 is sentencepiece's own space; surrogates are no text.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"))


@given(text=TEXT)
def test_any_text_survives_encode_and_decode(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", ["  indented\n\n\n\tx = 1234  \r\n", "\x00", "\ufeff", "é漢字🙂", "", " ", "<0x41>"])
def test_spaces_newlines_and_strange_characters_survive(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_batch_equals_one_by_one(tokenizer):
    texts = ["a b", "", "line\nline", "12345"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


@pytest.mark.parametrize("spelled", ["</s>", "<s>", "<unk>", "<|endoftext|>", "x<|endoftext|>y <|startoftext|>"])
def test_text_that_spells_a_special_token_stays_text(tokenizer, spelled):
    ids = tokenizer.encode(spelled)
    assert tokenizer.eos_id not in ids and tokenizer.bos_id not in ids
    assert tokenizer.decode(ids) == spelled


def test_encode_adds_no_special_token_and_decode_leaves_them_out(tokenizer):
    ids = tokenizer.encode("def")
    assert ids[-1] != tokenizer.eos_id and ids[0] != tokenizer.bos_id
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id]) == "def"


def test_ids_past_the_vocabulary_decode_to_nothing(tokenizer):
    assert tokenizer.decode([*tokenizer.encode("ab"), tokenizer.vocab_size, 10**6]) == "ab"


def test_digits_are_split(sentencepiece_tokenizer):
    assert len(sentencepiece_tokenizer.encode("1000000")) == 7


def test_training_twice_gives_the_same_bytes_at_any_path(sentencepiece_tokenizer, folder):
    again = train_tokenizer(iter(CORPUS), 512, str(folder / "deeper" / "other.model"))
    assert again.fingerprint == sentencepiece_tokenizer.fingerprint
    assert again.vocab_size == 512


def test_other_text_gives_another_fingerprint(sentencepiece_tokenizer, folder):
    other = train_tokenizer(CORPUS[:1], 400, str(folder / "o.model"))
    assert other.fingerprint != sentencepiece_tokenizer.fingerprint


def test_long_lines_are_trained_on(folder):
    model = train_tokenizer(["abcdefgh " * 20_000], 280, str(folder / "long.model"))
    assert len(model.encode("abcdefgh")) <= 2


def test_an_error_in_the_corpus_comes_through_training(folder):
    def texts():
        yield "some text"
        raise UserError("corpus trouble")

    with pytest.raises(UserError, match="corpus trouble"):
        train_tokenizer(texts(), 300, str(folder / "refused.model"))


def test_a_folder_stands_for_the_tokenizer_in_it(hf_path, folder):
    assert load_tokenizer(str(folder)).fingerprint == load_tokenizer(hf_path).fingerprint


def test_eos_comes_from_tokenizer_config(hf_path, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(open(hf_path, "rb").read())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|startoftext|>"}}))
    assert load_tokenizer(str(tmp_path)).eos_id == 0
    assert load_tokenizer(hf_path).eos_id == 1


def test_a_model_may_have_more_rows_than_tokens_but_not_fewer(tokenizer):
    check_vocab(tokenizer, tokenizer.vocab_size)
    check_vocab(tokenizer, tokenizer.vocab_size + 100)
    with pytest.raises(UserError, match=rf"{tokenizer.vocab_size} tokens.*{tokenizer.vocab_size - 1}"):
        check_vocab(tokenizer, tokenizer.vocab_size - 1)


def test_a_vocabulary_size_that_is_not_the_tokenizers_is_said(sentencepiece_tokenizer, hf_path):
    """Nobody reads `data.vocab_size` once a tokenizer is there, and one from elsewhere has a size of its own."""
    tokenizer, size = sentencepiece_tokenizer, sentencepiece_tokenizer.vocab_size
    assert other_vocabulary(tokenizer, size, default=1) is None and other_vocabulary(tokenizer, 7, default=7) is None
    assert f"has {size} tokens and is what is read, not data.vocab_size=7;" in other_vocabulary(tokenizer, 7, default=1)
    assert other_vocabulary(load_tokenizer(hf_path), 7, default=1) is None


@pytest.mark.parametrize(("texts", "vocab_size", "message"), [
    (["few words"], 100_000, "vocab_size=100000"),
    (CORPUS, 100, "vocab_size=100"),
    ([], 512, "no training text"),
    (["", "\n\n"], 512, "no training text"),
])  # fmt: skip
def test_training_refuses(texts, vocab_size, message, folder):
    with pytest.raises(UserError, match=message):
        train_tokenizer(texts, vocab_size, str(folder / "refused.model"))
    assert not (folder / "refused.model").exists()


REMEDIES = {"none.model": "tools.train_tokenizer", "none.json": "set data.tokenizer", "broken.model": "data.tokenizer is a sent"}


@pytest.mark.parametrize("name", ["none.model", "none.json", "broken.model", "broken.json", "empty_folder"])
def test_missing_and_broken_files_are_named(name, tmp_path):
    if name.startswith("broken"):
        (tmp_path / name).write_bytes(b"\x01 not a model")
    if name == "empty_folder":
        (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=f"{name}.*{REMEDIES.get(name, '')}"):
        load_tokenizer(str(tmp_path / name))


def test_eos_that_is_not_in_the_vocabulary_is_named(hf_path, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(open(hf_path, "rb").read())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<none>"}')
    with pytest.raises(UserError, match="<none>"):
        load_tokenizer(str(tmp_path))
