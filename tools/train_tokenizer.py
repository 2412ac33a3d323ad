"""Trains the tokenizer of a configuration.

    python -m tools.train_tokenizer --config configs/tiny.yaml [data.vocab_size=4096]

Reads the training part of the corpus only. A tokenizer that exists is kept.
"""

import os
import sys
import time
from collections.abc import Iterator

from tqdm import tqdm

from tools.arguments import make_parser
from training.corpus import DataConfig, read_documents
from training.errors import UserError, counted, exit_status
from training.readers import Tally
from training.tokenizer import Tokenizer, load_tokenizer, source_of, train_tokenizer


def training_texts(config: DataConfig, tally: Tally) -> Iterator[str]:
    """Texts of the training documents, up to `config.tokenizer_bytes` of them, behind a progress bar."""
    done = 0
    with tqdm(total=config.tokenizer_bytes, unit="B", unit_scale=True, desc="reading text", disable=None) as bar:
        for document in read_documents(config, tally):
            if document.split == "train":
                yield document.text
                size = len(document.text.encode())
                done += size
                bar.update(size)
                if done >= config.tokenizer_bytes:
                    return
        bar.total = done


def make_tokenizer(config: DataConfig, force: bool = False) -> Tokenizer:
    """The tokenizer at `config.tokenizer`, trained if there is none yet (or if `force`).

    Raises UserError when one of another size exists: replacing it would orphan the data and checkpoints made with it.
    """
    if os.path.exists(config.tokenizer) and not force:
        tokenizer = load_tokenizer(config.tokenizer)
        if config.tokenizer.endswith(".model") and tokenizer.vocab_size != config.vocab_size:
            raise UserError(
                f"{config.tokenizer} has {tokenizer.vocab_size} tokens but data.vocab_size={config.vocab_size}: set "
                "data.vocab_size to keep it, choose another data.tokenizer to train one there, or --force to replace it"
            )
        print(f"tokenizer {config.tokenizer} exists: {tokenizer.vocab_size} tokens, {tokenizer.fingerprint[:12]}")
        return tokenizer
    if not config.tokenizer.endswith(".model"):
        raise UserError(
            f"tokenizer {config.tokenizer} does not exist, and only a sentencepiece .model can be trained here; "
            f"{source_of(config.tokenizer)}; or set data.tokenizer to a name that ends in .model"
        )
    tally, start = Tally(), time.perf_counter()
    tokenizer = train_tokenizer(training_texts(config, tally), config.vocab_size, config.tokenizer)
    print(
        f"trained {config.tokenizer}: {tokenizer.vocab_size} tokens, {tally.text_bytes:,} bytes in "
        f"{counted(tally.documents, 'document')} read, {time.perf_counter() - start:.1f} s, {tokenizer.fingerprint[:12]}"
    )
    for line in tally.lines():
        print(f"  {line}")
    return tokenizer


def main(arguments: list[str] | None = None) -> None:
    from training.config import load_config

    parser = make_parser("train_tokenizer", __doc__)
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("--force", action="store_true", help="replace a tokenizer that exists")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example data.vocab_size=4096")
    options = parser.parse_intermixed_args(arguments)
    make_tokenizer(load_config(options.config, options.overrides).data, options.force)


if __name__ == "__main__":
    sys.exit(exit_status(main))
