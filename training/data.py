"""Training and validation batches out of packed token files.

The data order is a pure function of (seed, consumed samples): nothing else is stored, so a resume is exact, any number
of times, across epochs, and with another number of ranks. Sample i is tokens[i*S : i*S + S + 1]: S inputs and, one
further, S labels. Epoch e visits all samples in the order `epoch_order(num_samples, seed, e)`; an optimizer step takes
the next `global_batch` samples, across the end of an epoch if need be. Micro-batch m of rank r holds, of those, the
`micro_batch` samples from (m * num_ranks + r) * micro_batch on.

Shape suffixes: N all tokens, B samples of a micro-batch, S tokens of a sequence, G samples of a global batch.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from training.errors import UserError, counted
from training.packing import read_info

IGNORED = -100  # label that carries no loss


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch:
    """One micro-batch."""

    tokens_BS: torch.Tensor  # int64
    labels_BS: torch.Tensor  # int64: the next token, or IGNORED
    positions_BS: torch.Tensor  # int64: from 0 in each row; with isolation from 0 in each document
    # With isolation: int32 [documents + 1], where documents start in the B*S flattened tokens (rows too start one), and
    # the length of the longest. Otherwise None and S.
    cu_seqlens: torch.Tensor | None
    max_seqlen: int
    sample_ids: tuple[int, ...]  # length B; -1 is a padded row of validation, all of whose labels are IGNORED

    def to(self, device: torch.device | str) -> "Batch":
        moved = {
            name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
            for name, value in vars(self).items()
        }
        return Batch(**moved)


class PackedDataset:
    """A packed file cut into samples of `seq_len` + 1 tokens.

    Raises UserError: missing, truncated or damaged file, packed by another tokenizer than `tokenizer` (a fingerprint),
    fewer tokens than one sample.
    """

    def __init__(self, path: str, seq_len: int, tokenizer: str | None = None) -> None:
        self.path, self.seq_len, self.info = path, seq_len, read_info(path)
        if tokenizer is not None and self.info.tokenizer != tokenizer:
            raise UserError(
                f"{path} was packed by tokenizer {self.info.tokenizer[:12]} but data.tokenizer is {tokenizer[:12]} "
                "(sha256 of the files); run `python -m tools.prepare_data` again"
            )
        self.num_samples = (self.info.num_tokens - 1) // seq_len
        if self.num_samples < 1:
            raise UserError(
                f"{path} holds {self.info.num_tokens} tokens, fewer than the {seq_len + 1} of one sequence "
                f"(data.seq_len={seq_len}): use more text, a shorter data.seq_len or another data.validation_fraction"
            )
        self._tokens_N = np.memmap(path, dtype=self.info.dtype, mode="r")

    @property
    def fingerprint(self) -> str:
        """sha256 of the tokens: a resumed run can tell that its data changed."""
        return self.info.sha256

    def rows(self, sample_ids: np.ndarray) -> np.ndarray:
        """Tokens of the samples, int64 [B, S + 1]."""
        offsets = np.asarray(sample_ids, dtype=np.int64)[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        rows = self._tokens_N[offsets].astype(np.int64)
        if rows.size and rows.max() >= self.info.vocab_size:
            found = f"token {rows.max()} of a vocabulary of {self.info.vocab_size}"
            raise UserError(f"{self.path} holds {found}: damaged; prepare the data again")
        return rows

    def bits_per_byte(self, nats_per_token: float) -> float:
        """Compares models of different tokenizers. EOS counts as a token that has no bytes."""
        return nats_per_token / math.log(2) * self.info.num_tokens / self.info.text_bytes


def open_validation(path: str, seq_len: int, tokenizer: str, max_samples: int) -> tuple[PackedDataset | None, str | None]:
    """The validation set, or None for a run that has none; and a warning where that is for want of text.

    Raises UserError as PackedDataset does, except for too few tokens.
    """
    if not max_samples:
        return None, None
    if (found := read_info(path).num_tokens) > seq_len:
        return PackedDataset(path, seq_len, tokenizer), None
    few = f"{path} holds {found} tokens, fewer than the {seq_len + 1} of one sequence"
    return None, f"no validation in this run: {few} (data.validation_paths or a larger data.validation_fraction give it text)"


@functools.lru_cache(maxsize=2)  # a batch touches at most two epochs
def epoch_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(num_samples), int64 [num_samples], not to be written to.

    Sorts raw PCG64 words instead of calling Generator.permutation: numpy promises the former for ever, not the latter.
    """
    words = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(num_samples)
    order = np.argsort(words, kind="stable")
    order.setflags(write=False)
    return order


def make_batch(rows: np.ndarray, sample_ids: np.ndarray, eos_id: int, isolate_documents: bool) -> Batch:
    """Batch of `rows`, int64 [B, S + 1]. Rows of negative id are padding: their labels are IGNORED."""
    tokens_BS, labels_BS = rows[:, :-1].copy(), rows[:, 1:].copy()
    B, S = tokens_BS.shape
    labels_BS[np.asarray(sample_ids) < 0] = IGNORED
    positions_BS = np.tile(np.arange(S), (B, 1))
    cu_seqlens, max_seqlen = None, S
    if isolate_documents:
        starts_BS = np.ones((B, S), dtype=bool)
        starts_BS[:, 1:] = tokens_BS[:, :-1] == eos_id
        positions_BS -= np.maximum.accumulate(np.where(starts_BS, positions_BS, 0), axis=1)
        labels_BS[tokens_BS == eos_id] = IGNORED  # the next document's first token cannot be known
        bounds = np.append(np.flatnonzero(starts_BS), B * S)
        cu_seqlens, max_seqlen = torch.from_numpy(bounds.astype(np.int32)), int(np.diff(bounds).max())
    return Batch(
        tokens_BS=torch.from_numpy(tokens_BS),
        labels_BS=torch.from_numpy(labels_BS),
        positions_BS=torch.from_numpy(positions_BS),
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
        sample_ids=tuple(int(i) for i in sample_ids),
    )


class Loader:
    """Endless iterator: each `next` gives this rank's micro-batches of one optimizer step and advances `consumed`.

    `consumed` counts samples of the whole run over all ranks; save it, pass it back, and the run goes on where it was.
    Raises UserError: sizes that do not divide, or fewer samples than one global batch.
    """

    def __init__(
        self,
        dataset: PackedDataset,
        *,
        global_batch: int,
        micro_batch: int,
        seed: int,
        rank: int = 0,
        num_ranks: int = 1,
        consumed: int = 0,
        isolate_documents: bool = False,
    ) -> None:
        assert 0 <= rank < num_ranks, f"rank {rank} of {num_ranks}"
        assert seed >= 0 and consumed >= 0, f"seed {seed}, consumed {consumed}"
        if global_batch < 1 or micro_batch < 1 or global_batch % (micro_batch * num_ranks):
            raise UserError(
                f"a global batch of {counted(global_batch, 'sequence')} does not divide into micro-batches of {micro_batch} "
                f"on {counted(num_ranks, 'data-parallel rank')}"
            )
        if dataset.num_samples < global_batch:
            raise UserError(
                f"{dataset.path} holds {counted(dataset.num_samples, 'sequence')} of {dataset.seq_len} tokens, fewer than one "
                f"global batch of {global_batch} on {counted(num_ranks, 'rank')}: use more text or a smaller batch"
            )
        self.dataset, self.seed, self.consumed = dataset, seed, consumed
        self.global_batch, self.micro_batch, self.isolate_documents = global_batch, micro_batch, isolate_documents
        self.rank, self.num_ranks = rank, num_ranks

    @property
    def epoch(self) -> float:
        """Passes over the data made so far."""
        return self.consumed / self.dataset.num_samples

    def global_sample_ids(self, consumed: int) -> np.ndarray:
        """Samples of the step that begins after `consumed` samples, over all ranks, int64 [G]."""
        n = self.dataset.num_samples
        epochs, places = np.divmod(np.arange(consumed, consumed + self.global_batch), n)
        parts = [epoch_order(n, self.seed, int(epoch))[places[epochs == epoch]] for epoch in np.unique(epochs)]
        return np.concatenate(parts)

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        ids = self.global_sample_ids(self.consumed).reshape(-1, self.num_ranks, self.micro_batch)
        eos_id = self.dataset.info.eos_id
        step = [make_batch(self.dataset.rows(own), own, eos_id, self.isolate_documents) for own in ids[:, self.rank]]
        self.consumed += self.global_batch
        return step


def validation_batches(
    dataset: PackedDataset,
    *,
    micro_batch: int,
    rank: int = 0,
    num_ranks: int = 1,
    max_samples: int | None = None,
    isolate_documents: bool = False,
) -> Iterator[Batch]:
    """This rank's batches of the validation set: over all ranks, each sample comes exactly once.

    The same evenly spread `max_samples` samples each time. Every rank gets the same number of batches, all of the same
    shape (collectives inside forward need that); missing rows are padding with IGNORED labels, so the mean over
    tokens is sum of losses / number of labels that are not IGNORED, both summed over ranks.
    """
    count = min(max_samples or dataset.num_samples, dataset.num_samples)
    ids = np.arange(count) * dataset.num_samples // count
    group = micro_batch * num_ranks
    padded = np.full(-(-count // group) * group, -1)
    padded[:count] = ids
    for own in padded.reshape(-1, num_ranks, micro_batch)[:, rank]:
        # Padded rows hold real text, so that they load experts as text does.
        rows = dataset.rows(np.where(own < 0, ids[-1], own))
        yield make_batch(rows, own, dataset.info.eos_id, isolate_documents)
