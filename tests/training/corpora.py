"""Small corpora and a tokenizer of bytes for the data tests."""

from training.corpus import DataConfig, Document, read_documents
from training.readers import Tally

EOS = 2


class ByteTokenizer:
    """Byte b is token b + 3."""

    path, vocab_size, eos_id, bos_id, fingerprint = "bytes", 259, EOS, 1, "f" * 64

    def encode(self, text):
        return [b + 3 for b in text.encode()]

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]

    def decode(self, ids):
        return bytes(i - 3 for i in ids if i >= 3).decode()


TOKENIZER = ByteTokenizer()


def write(folder, **files):
    """Files of the given bytes or str; `a__txt` becomes a.txt."""
    for name, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        (folder / name.replace("__", ".")).write_bytes(data)


def text_config(folder, pattern="*.txt", **changes):
    settings = dict(source="text", paths=[str(folder / pattern)], dir=str(folder / "packed"), validation_fraction=0.0)
    return DataConfig(**(settings | changes))


def read(config) -> tuple[list[Document], Tally]:
    tally = Tally()
    return list(read_documents(config, tally)), tally
