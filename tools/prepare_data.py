"""Tokenises and packs the corpus of a configuration.

    python -m tools.prepare_data --config configs/tiny.yaml [data.dir=...]

Does nothing when the packed files are up to date with the corpus, the settings and the tokenizer.
"""

import sys
import time

import numpy as np
from tqdm import tqdm

from tools.arguments import make_parser
from training.corpus import DataConfig, corpus_bytes
from training.data import PackedDataset
from training.errors import UserError, counted, exit_status
from training.packing import SPLITS, PackedInfo, documents_done, pack_corpus, packed_path, read_info, stale_reason
from training.tokenizer import check_vocab, load_tokenizer


def prepare(config: DataConfig, model_vocab_size: int, force: bool = False) -> dict[str, PackedInfo]:
    """Packs the corpus unless that is done; prints what was read, skipped and written.

    Raises UserError: no tokenizer, no text, or less for training than one sequence.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    check_vocab(tokenizer, model_vocab_size)
    reason = "--force" if force else stale_reason(config, tokenizer)
    if reason is None:
        infos = {split: read_info(packed_path(config.dir, split)) for split in SPLITS}
        print(f"packed data in {config.dir} is up to date")
    else:
        print(f"packing: {reason}")
        if done := documents_done(config):
            print(f"going on after {counted(done, 'document')} that an interrupted packing has done")
        start = time.perf_counter()
        with tqdm(total=corpus_bytes(config), unit="B", unit_scale=True, desc="tokenising", disable=None) as bar:
            infos, tally = pack_corpus(config, tokenizer, bar.update)
        print(f"read {counted(tally.documents, 'document')}, {tally.text_bytes:,} bytes in {time.perf_counter() - start:.1f} s")
        for line in tally.lines():
            print(f"  {line}")
    for split, info in infos.items():
        ratio = info.text_bytes / max(info.num_tokens, 1)
        print(
            f"{packed_path(config.dir, split)}: {counted(info.num_documents, 'document')}, {counted(info.num_tokens, 'token')}, "
            f"{ratio:.2f} bytes/token, {counted(max(info.num_tokens - 1, 0) // config.seq_len, 'sequence')} of {config.seq_len}"
        )
        if not info.num_documents:
            none = (
                f"no document fell to {split}: a document's name decides; give more files, name validation files in "
                "data.validation_paths, or change data.validation_fraction"
            )
            if split == "train":
                raise UserError(none)
            print(f"warning: there will be no validation loss, {none}")
    PackedDataset(packed_path(config.dir, "train"), config.seq_len)
    if all(info.num_tokens for info in infos.values()):
        print(f"unigram entropy of the validation text: {unigram_nats(config, infos):.3f} nats/token, which a model must beat")
    return infos


def unigram_nats(config: DataConfig, infos: dict[str, PackedInfo]) -> float:
    """Cross-entropy of the validation tokens under the training tokens' frequencies (add-one), nats a token."""
    tokens = {split: np.memmap(packed_path(config.dir, split), dtype=infos[split].dtype, mode="r") for split in SPLITS}
    counts = np.bincount(tokens["train"], minlength=infos["train"].vocab_size).astype(np.float64) + 1
    return float(-np.log(counts / counts.sum())[tokens["validation"]].mean())


def main(arguments: list[str] | None = None) -> None:
    from training.config import load_config

    parser = make_parser("prepare_data", __doc__)
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("--force", action="store_true", help="pack again even if up to date")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example data.seq_len=512")
    options = parser.parse_intermixed_args(arguments)
    config = load_config(options.config, options.overrides)
    prepare(config.data, config.model.vocab_size, options.force)


if __name__ == "__main__":
    sys.exit(exit_status(main))
