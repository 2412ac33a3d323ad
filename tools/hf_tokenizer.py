"""A sentencepiece BPE as the `tokenizer.json` that inference engines read, token for token.

sentencepiece merges the neighbours whose union is the piece with the best score; a tokenizer.json lists pairs in the order in
which they merge. The list holds every way to split every piece, best score first. Both fall back to bytes, and write a space as
U+2581.
"""

from __future__ import annotations

import json
from pathlib import Path

from training.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer, write_whole

SPACE = "\u2581"
ODD = "\n\t  \u00e9\u6f22\u5b57\U0001f642 0123456789 </s> don't_stop(self) -> [x for x in range(10)]\r\n\0"


def _merges(pieces: list[str], scores: list[float], ids: list[int]) -> list[tuple[str, str]]:
    """Pairs of pieces in the order in which they merge; `ids` are those of ordinary pieces."""
    known = {pieces[i]: i for i in ids}
    found = []
    for i in ids:
        piece = pieces[i]
        splits = [(piece[:k], piece[k:]) for k in range(1, len(piece)) if piece[:k] in known and piece[k:] in known]
        found += [(-scores[i], known[left], known[right], left, right) for left, right in splits]
    return [(left, right) for *_, left, right in sorted(found)]


def write_tokenizer_json(source: str, folder: Path) -> str | None:
    """Writes tokenizer.json and tokenizer_config.json of a sentencepiece model into `folder`.

    Returns:
        None; or why nothing was written: the two would not encode alike (a unigram model, say).

    Raises:
        UserError: the model cannot be read, the files cannot be written.
    """
    import sentencepiece
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    theirs = SentencePieceTokenizer(source)
    model = sentencepiece.SentencePieceProcessor(model_file=source)
    every = range(model.vocab_size())
    pieces, scores = [model.id_to_piece(i) for i in every], [model.get_score(i) for i in every]
    control = [i for i in every if model.is_control(i) or model.is_unknown(i)]
    plain = [i for i in every if i not in control and not model.is_byte(i) and not model.is_unused(i)]
    unknown = pieces[model.unk_id()]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    if len(vocab) != len(pieces):
        return "two of its tokens have one name"
    bpe = models.BPE(vocab, _merges(pieces, scores, plain), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(pieces[i], special=True, normalized=False) for i in control])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": pieces[theirs.eos_id], "unk_token": unknown,
        "add_bos_token": False, "add_eos_token": False, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    if theirs.bos_id is not None:
        config["bos_token"] = pieces[theirs.bos_id]
    write_whole(str(folder / "tokenizer_config.json"), json.dumps(config, indent=1).encode())
    write_whole(str(folder / "tokenizer.json"), tokenizer.to_str(pretty=True).encode("utf-8"))
    ours = HuggingFaceTokenizer(str(folder / "tokenizer.json"))
    text = "".join(pieces[i].replace(SPACE, " ") for i in plain)
    for sample in (text, text[::-1], ODD):
        ids = theirs.encode(sample)
        if ours.encode(sample) != ids or ours.decode(ids) != theirs.decode(ids):
            (folder / "tokenizer.json").unlink()
            (folder / "tokenizer_config.json").unlink()
            return "as a tokenizer.json it would encode otherwise"
    return None
