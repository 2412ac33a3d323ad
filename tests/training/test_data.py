"""Batches and the data order: what is promised in docs/data.md."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from training.data import IGNORED, Loader, PackedDataset, epoch_order, make_batch, validation_batches
from training.errors import UserError

EOS = 2


def dataset_of(num_tokens, seq_len=4):
    """A data set of tokens 0, 1, 2, ... without a file."""
    dataset = object.__new__(PackedDataset)
    dataset.path, dataset.seq_len, dataset.num_samples = "memory", seq_len, (num_tokens - 1) // seq_len
    dataset.info = SimpleNamespace(vocab_size=2**31, eos_id=-5)
    dataset._tokens_N = np.arange(num_tokens, dtype=np.uint32)
    return dataset


def step_ids(loader):
    return [batch.sample_ids for batch in next(loader)]


# ------------------------------------------------------------------------------------------------ order and resume


def test_a_sample_is_S_tokens_and_the_labels_one_further():
    dataset = dataset_of(14)  # 3 samples of 4 + 1; the 14th token is in none
    rows = dataset.rows(np.array([0, 2]))
    assert rows.tolist() == [[0, 1, 2, 3, 4], [8, 9, 10, 11, 12]]
    batch = make_batch(rows, np.array([0, 2]), EOS, False)
    assert batch.tokens_BS.tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert batch.labels_BS.tolist() == [[1, 2, 3, 4], [9, 10, 11, 12]]
    assert batch.positions_BS.tolist() == [[0, 1, 2, 3]] * 2
    assert batch.cu_seqlens is None and batch.max_seqlen == 4 and batch.sample_ids == (0, 2)
    assert batch.tokens_BS.dtype == batch.labels_BS.dtype == batch.positions_BS.dtype == torch.int64


def test_the_last_token_is_a_label_when_the_file_ends_with_a_sample():
    assert dataset_of(13).num_samples == 3 and dataset_of(12).num_samples == 2


@given(n=st.integers(1, 300), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_an_epoch_visits_each_sample_once(n, seed, epoch):
    assert sorted(epoch_order(n, seed, epoch).tolist()) == list(range(n))


def test_seeds_and_epochs_differ():
    orders = [epoch_order(1000, seed, epoch).tolist() for seed in (0, 1, 2) for epoch in (0, 1)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


def test_the_order_is_the_same_for_ever():
    # Literal: a change of numpy or of the code that altered it would break the resume of every running job.
    assert epoch_order(10, 1234, 0).tolist() == [5, 6, 3, 9, 7, 4, 1, 2, 8, 0]


@given(
    num_samples=st.integers(8, 40),
    consumed=st.integers(0, 200),
    micro=st.sampled_from([1, 2, 4]),
    ranks=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
)
def test_any_ranks_and_micro_batches_take_the_same_samples_in_the_same_order(num_samples, consumed, micro, ranks, seed):
    dataset = dataset_of(num_samples * 4 + 1)
    whole = Loader(dataset, global_batch=8, micro_batch=8, seed=seed, consumed=consumed)
    parts = [
        Loader(dataset, global_batch=8, micro_batch=micro, seed=seed, consumed=consumed, rank=r, num_ranks=ranks)
        for r in range(ranks)
    ]
    for _ in range(3):
        expected = step_ids(whole)[0]
        per_rank = [step_ids(part) for part in parts]
        interleaved = [i for micro_batches in zip(*per_rank, strict=True) for ids in micro_batches for i in ids]
        assert tuple(interleaved) == expected


@given(num_samples=st.integers(4, 30), stops=st.lists(st.integers(1, 12), min_size=2, max_size=3))
def test_resume_is_exact_also_twice_and_across_epochs_and_with_other_ranks(num_samples, stops):
    dataset = dataset_of(num_samples * 4 + 1)
    straight = Loader(dataset, global_batch=4, micro_batch=2, seed=7)
    expected = [i for _ in range(sum(stops)) for ids in step_ids(straight) for i in ids]
    seen, consumed = [], 0
    for leg, steps in enumerate(stops):
        ranks = 1 + leg % 2
        loaders = [
            Loader(dataset, global_batch=4, micro_batch=2, seed=7, rank=r, num_ranks=ranks, consumed=consumed) for r in range(ranks)
        ]
        for _ in range(steps):
            seen += [i for micro in zip(*map(step_ids, loaders), strict=True) for ids in micro for i in ids]
        consumed = loaders[0].consumed
    assert seen == expected
    whole_epochs = len(seen) // num_samples
    for epoch in range(whole_epochs):  # no repeat, no gap
        assert sorted(seen[epoch * num_samples : (epoch + 1) * num_samples]) == list(range(num_samples))


def test_epoch_counts_passes():
    loader = Loader(dataset_of(41), global_batch=5, micro_batch=5, seed=0)
    for _ in range(3):
        next(loader)
    assert loader.consumed == 15 and loader.epoch == 1.5


@pytest.mark.parametrize(("micro", "ranks"), [(3, 1), (4, 3), (16, 1)])
def test_sizes_that_do_not_divide_are_refused_with_all_numbers(micro, ranks):
    with pytest.raises(UserError, match=rf"\b8\b.*\b{micro}\b.*\b{ranks}\b"):
        Loader(dataset_of(100), global_batch=8, micro_batch=micro, seed=0, num_ranks=ranks)


def test_fewer_samples_than_one_global_batch_is_refused_with_both_numbers():
    with pytest.raises(UserError, match=r"3 sequences.*batch of 4 on 4 ranks"):
        Loader(dataset_of(13), global_batch=4, micro_batch=1, seed=0, num_ranks=4)


# ------------------------------------------------------------------------------------------------ isolation


def test_isolation_restarts_positions_and_drops_the_label_across_a_boundary():
    rows = np.array([[5, 6, EOS, 7, EOS, EOS, 8], [5, 6, 7, 8, 9, 10, EOS]])
    batch = make_batch(rows, np.array([0, 1]), EOS, True)
    assert batch.positions_BS.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]
    assert batch.labels_BS.tolist() == [[6, EOS, IGNORED, EOS, IGNORED, IGNORED], [6, 7, 8, 9, 10, EOS]]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 6, 12] and batch.cu_seqlens.dtype == torch.int32
    assert batch.max_seqlen == 6


def test_without_isolation_every_label_counts():
    batch = make_batch(np.array([[5, EOS, 7]]), np.array([0]), EOS, False)
    assert batch.labels_BS.tolist() == [[EOS, 7]] and batch.positions_BS.tolist() == [[0, 1]]


@given(st.lists(st.lists(st.sampled_from([EOS, 5, 6]), min_size=9, max_size=9), min_size=1, max_size=4))
def test_isolated_documents_cover_the_batch(rows):
    batch = make_batch(np.array(rows), np.arange(len(rows)), EOS, True)
    bounds = batch.cu_seqlens.tolist()
    assert bounds[0] == 0 and bounds[-1] == len(rows) * 8
    positions = batch.positions_BS.flatten().tolist()
    tokens = batch.tokens_BS.flatten().tolist()
    for start, end in pairwise(bounds):
        assert positions[start:end] == list(range(end - start))
        assert EOS not in tokens[start : end - 1]
    assert batch.max_seqlen == max(b - a for a, b in pairwise(bounds))


# ------------------------------------------------------------------------------------------------ validation


@given(num_samples=st.integers(1, 20), micro=st.integers(1, 4), ranks=st.integers(1, 4), limit=st.integers(1, 25))
def test_validation_covers_each_sample_once_in_equal_batches(num_samples, micro, ranks, limit):
    dataset = dataset_of(num_samples * 4 + 1)
    per_rank = [
        list(validation_batches(dataset, micro_batch=micro, rank=r, num_ranks=ranks, max_samples=limit)) for r in range(ranks)
    ]
    assert len({len(batches) for batches in per_rank}) == 1
    batches = [batch for rank_batches in per_rank for batch in rank_batches]
    ids = [i for batch in batches for i in batch.sample_ids if i >= 0]
    assert len(ids) == len(set(ids)) == min(limit, num_samples)
    for batch in batches:
        assert batch.tokens_BS.shape == (micro, 4)
        padded = torch.tensor(batch.sample_ids) < 0
        assert ((batch.labels_BS == IGNORED).all(dim=1) == padded).all()


def test_validation_is_the_same_set_for_any_ranks_and_spread_over_the_file():
    dataset = dataset_of(401)
    one = [i for b in validation_batches(dataset, micro_batch=2, max_samples=10) for i in b.sample_ids]
    parts = [validation_batches(dataset, micro_batch=1, rank=r, num_ranks=2, max_samples=10) for r in range(2)]
    assert one == list(range(0, 100, 10))
    assert sorted(i for part in parts for b in part for i in b.sample_ids) == one
