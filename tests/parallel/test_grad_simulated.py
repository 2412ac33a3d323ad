"""The reducer that stands for several ranks gives the bits that so many ranks give, on every wire; a run of it is their run."""

from __future__ import annotations

from typing import Any

import pytest

from fp8.optimizer import AdamW
from fp8.weight import weights
from parallel.grad_auto_scale import AutoScale
from parallel.grad_reduce import GradReducer
from parallel.mesh import Mesh, build_mesh
from parallel.sharded_optimizer import ShardedAdamW, make_reducer
from tests.helpers import run_ranks
from tests.parallel.layouts import bits
from tests.parallel.test_grad_wire import Bag, gradient

RANKS = 4
CASES = [("fp8", "nearest", 0), ("fp8", "stochastic", 0), ("fp8_lm", "nearest", 0), ("fp32", "nearest", 1), ("bf16", "nearest", 1),
         ("fp8", "nearest", 1), ("fp8", "stochastic", 1), ("fp8_lm", "nearest", 1)]  # fmt: skip


def two_steps(reducer: GradReducer, bag: Bag, ranks: list[int]) -> None:
    """Sums of gradients that differ from rank to rank; those of the second step stay."""
    for step in range(2):
        for _, weight in weights(bag):
            weight.clear_grad()
        for place, rank in enumerate(ranks):
            for name, weight in weights(bag):
                if name != "a" or rank:  # rank 0 does not use it
                    weight.add_grad(gradient(name, rank + 10 * step, weight.data.shape))
            reducer.finish(last=place == len(ranks) - 1)


def on_ranks(rank: int, size: int) -> list[tuple[dict[str, Any], float | None]]:
    """For each case: (first row, rows, digest of their sum) of each weight, and mu."""
    mesh, found = build_mesh(), []
    for wire, rounding, zero in CASES:
        bag, auto = Bag(mesh), AutoScale(size) if wire == "fp8_lm" else None
        optimizer = (ShardedAdamW if zero else AdamW)(weights(bag), *(() if not zero else (mesh,)), seed=11)
        two_steps(make_reducer(weights(bag), mesh, optimizer, wire, rounding, zero, auto), bag, [rank])
        seen = {}
        for name, weight in optimizer.weights.items():
            first = optimizer.shards.rows_of(dict(weights(bag))[name]).start if zero else 0
            seen[name] = first, len(weight.data), bits(weight.main_grad)
        found.append((seen, None if auto is None else auto.mu.item()))
    return found


@pytest.mark.distributed
def test_sums_are_those_of_so_many_ranks_bit_for_bit() -> None:
    by_rank = run_ranks(RANKS, on_ranks)
    for i, (wire, rounding, zero) in enumerate(CASES):
        bag, auto = Bag(Mesh.solo()), AutoScale(RANKS) if wire == "fp8_lm" else None
        optimizer, named = AdamW(weights(bag), seed=11), dict(weights(bag))
        two_steps(make_reducer(named.items(), Mesh.solo(), optimizer, wire, rounding, zero, auto, RANKS), bag, list(range(RANKS)))
        covered = dict.fromkeys(named, 0)
        for seen, mu in (found[i] for found in by_rank):
            assert mu == (None if auto is None else auto.mu.item())
            for name, (first, rows, digest) in seen.items():
                assert bits(named[name].main_grad[first : first + rows]) == digest, (wire, rounding, zero, name)
                covered[name] += rows
        assert covered == {name: len(w.data) * (1 if zero else RANKS) for name, w in named.items()}
