"""The launcher itself: results in rank order, errors and deaths reported."""

import math
import os

import pytest
import torch
import torch.distributed as dist

from tests.helpers import largest, run_ranks


def _sum_of_ranks(rank: int, size: int, offset: float) -> torch.Tensor:
    x = torch.full((2,), rank + offset)
    dist.all_reduce(x)
    return x + rank


def _fails_on_one(rank: int, size: int) -> None:
    assert rank == 0, "on purpose"


def _dies(rank: int, size: int) -> None:
    if rank == 1:
        os._exit(3)


def test_results_come_in_rank_order() -> None:
    results = run_ranks(2, _sum_of_ranks, 0.5)
    assert [r.tolist() for r in results] == [[2.0, 2.0], [3.0, 3.0]]


def test_traceback_of_a_rank_is_reported() -> None:
    with pytest.raises(AssertionError, match="(?s)rank 1 raised.*on purpose"):
        run_ranks(2, _fails_on_one)


def test_death_of_a_rank_is_reported() -> None:
    with pytest.raises(AssertionError, match="rank 1 died|did not answer"):
        run_ranks(2, _dies, timeout=20)


def test_the_largest_error_is_infinite_where_one_is_not_finite() -> None:
    assert largest([1.0, 3.0, 2.0]) == 3.0
    assert largest([1.0, math.nan, 2.0]) == largest([math.nan, 1.0]) == largest(iter([0.0, -math.inf])) == math.inf
