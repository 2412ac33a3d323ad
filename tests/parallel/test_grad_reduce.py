"""Gradient reduction: sums, order, formats, weights that were not used, and what one rank's NaN does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fp8.recipe import Recipe
from fp8.weight import Piece, Weight, weights
from parallel.grad_reduce import GradReducer, global_grad_norm
from parallel.mesh import Mesh, build_mesh
from tests.helpers import run_ranks


class Bag(nn.Module):
    """Weights of each kind; `e` is this rank's half of four experts."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        fp32 = Recipe.fp32()
        self.a, self.b, self.c, self.unused = (Weight(8, 4, recipe=fp32) for _ in range(4))
        self.norm = Weight(4, recipe=fp32, init_std=None, tp_partial=True)
        local = 4 // mesh.ep.size
        part = Piece((mesh.ep.rank * local, 0, 0), (slice(0, local), slice(0, 2), slice(0, 4)))
        self.e = Weight(local, 2, 4, recipe=fp32, expert=True, global_shape=(4, 2, 4), pieces=(part,))


def fill(bag: Bag, names: str, value: float) -> None:
    for name in names.split():
        weight = getattr(bag, name)
        weight.add_grad(torch.full(weight.data.shape, value))


def reductions(rank: int, size: int) -> dict[str, Any]:
    mesh, seen = build_mesh(tp=2, ep=2), {}  # four ranks: dp 2, edp 2
    bag = Bag(mesh)
    named = list(weights(bag))
    reducer = GradReducer(named, mesh, bucket_bytes=200)
    orders = ["a b c norm e", "e norm c b a", "c a e b norm", "norm e a c b"]
    for step in range(2):  # buckets and hooks serve every step
        fill(bag, orders[rank], 10.0**rank)
        reducer.finish()
        seen[f"values {step}"] = {name: w.main_grad.unique().tolist() for name, w in named}
        seen[f"norm {step}"] = global_grad_norm(named, mesh).item()
        for _, weight in named:
            weight.clear_grad()
    for accumulate in (False, True):  # two micro-batches: nothing leaves before the last one
        for _, weight in named:
            weight.last_microbatch = accumulate
        fill(bag, orders[rank], 1.0)
        seen[f"early {accumulate}"] = bag.a.main_grad.unique().tolist()
    reducer.finish()
    seen["accumulated"] = {name: w.main_grad.unique().tolist() for name, w in named}
    for _, weight in named:
        weight.clear_grad()

    mesh.traffic.reset()
    sent = lambda: mesh.traffic.by_kind().get("gradients", 0)  # noqa: E731
    fill(bag, "e norm", 1.0)
    seen["started"] = [sent()]
    for name in ("unused", "c", "a", "b"):  # in order of use: unused and c leave at once, a waits behind b
        fill(bag, name, 1.0)
        seen["started"].append(sent())
    reducer.finish()
    seen["started"].append(sent())
    for _, weight in named:
        weight.clear_grad()

    fill(bag, "a b c norm e", float("nan") if rank == 3 else 1.0)
    reducer.finish()
    seen["nan"] = global_grad_norm(named, mesh).item()

    bag = Bag(mesh)
    reducer = GradReducer(weights(bag), mesh, wire_dtype=torch.bfloat16)
    mesh.traffic.reset()
    fill(bag, "a b c norm e", 1.001)
    reducer.finish()
    seen["bf16"], seen["bf16 sent"] = bag.a.main_grad.unique().tolist(), dict(mesh.traffic.sent)
    return seen


@pytest.fixture(scope="module")
def by_rank() -> list[dict]:
    return run_ranks(4, reductions)


@pytest.mark.distributed
class TestReduction:
    def test_each_kind_is_summed_over_its_replicas_whatever_the_order(self, by_rank: list[dict]) -> None:
        for rank, seen in enumerate(by_rank):
            pair = [10.0**rank + 10.0 ** ((rank + 2) % 4)]  # ranks 0 and 2, or 1 and 3: dp, and edp
            for step in range(2):
                values = seen[f"values {step}"]
                assert values == {"a": pair, "b": pair, "c": pair, "e": pair, "norm": [1111.0], "unused": [0.0]}

    def test_the_norm_counts_replicas_once_and_shards_all(self, by_rank: list[dict]) -> None:
        # a, b, c are whole on every rank here: one of them counts (tp rank 0); experts: ranks 0 and 1 hold different ones
        want = (3 * 32 * 101.0**2 + 4 * 1111.0**2 + 16 * 101.0**2 + 16 * 1010.0**2) ** 0.5
        norms = {seen[f"norm {step}"] for seen in by_rank for step in range(2)}
        assert len(norms) == 1 and norms.pop() == pytest.approx(want, rel=1e-6)

    def test_micro_batches_accumulate_before_anything_leaves(self, by_rank: list[dict]) -> None:
        for seen in by_rank:
            assert seen["early False"] == [1.0] and seen["accumulated"]["a"] == [4.0]
            assert seen["accumulated"]["norm"] == [8.0] and seen["accumulated"]["unused"] == [0.0]

    def test_buckets_leave_while_backward_runs_and_in_one_order(self, by_rank: list[dict]) -> None:
        """Sums start as soon as their bucket and those before it are full; nothing is left for `finish` but to wait."""
        weight = 8 * 4 * 4  # bytes of a gradient, each in a bucket of its own; a ring of two sends as many
        for seen in by_rank:
            start = [0, weight, 2 * weight, 2 * weight]
            assert seen["started"][:4] == start
            assert seen["started"][4] == seen["started"][5] == 4 * weight + 2 * 8 * 4 + 2 * 16 * 3 // 4

    def test_every_rank_sees_the_nan_of_one(self, by_rank: list[dict]) -> None:
        assert all(seen["nan"] != seen["nan"] for seen in by_rank)

    def test_bf16_halves_the_bytes_and_rounds(self, by_rank: list[dict]) -> None:
        for seen in by_rank:
            assert seen["bf16"] == [2.0]  # 1.001 is 1 in BF16
            assert set(seen["bf16 sent"]) == {("gradients", "bf16")}
            # a, b, c, unused over 2 ranks, the norm over 4, two experts over 2: a ring sends 2 (n - 1) / n of a buffer
            assert seen["bf16 sent"]["gradients", "bf16"] == 2 * (4 * 32 + 16) + 2 * 4 * 3 // 2


def test_more_uses_than_declared_are_named() -> None:
    bag = Bag(Mesh.solo())
    for name, weight in weights(bag):
        weight.name = name
    GradReducer(weights(bag), Mesh.solo())
    fill(bag, "a", 1.0)
    with pytest.raises(AssertionError, match="a: more uses"):
        fill(bag, "a", 1.0)
