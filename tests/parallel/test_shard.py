"""Sharded optimizer states: equal to unsharded ones, one norm, bytes that travel, checkpoints that reshard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8.optimizer import AdamW
from fp8.recipe import Recipe
from fp8.weight import Weight, weights
from parallel.mesh import Mesh, build_mesh
from parallel.shard import cut_evenly, give_whole
from parallel.sharded_optimizer import ShardedAdamW, make_reducer
from tests.helpers import run_ranks
from tests.parallel.layouts import bits
from tests.parallel.sharding import Run, on_ranks, sail

TWO = [
    Run(), Run(1), Run(1, partition="tensors"), Run(1, overlap=True), Run(2, overlap=True),
    Run(states="lean"), Run(1, states="lean"),
    Run(recipe="bf16"), Run(1, recipe="bf16"),
    Run(recipe="tensorwise_current"), Run(1, recipe="tensorwise_current"), Run(2, recipe="tensorwise_current", partition="tensors"),
    Run(recipe="auto", last=3), Run(1, recipe="auto", last=3, overlap=True), Run(2, recipe="auto", last=3, partition="tensors"),
    Run(wire="fp8"), Run(1, wire="fp8"), Run(2, wire="fp8"), Run(2),
    Run(wire="fp8", rounding="stochastic"), Run(1, wire="fp8", rounding="stochastic"),
    Run(wire="fp8_lm"), Run(1, wire="fp8_lm"), Run(2, wire="fp8_lm"),
    Run(ep=2), Run(1, ep=2), Run(tp=2), Run(1, tp=2),
]  # fmt: skip


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[Run, list[dict]]:
    by_rank = run_ranks(2, on_ranks, TWO, str(tmp_path_factory.mktemp("two")), timeout=280.0)
    return {run: [seen[i] for seen in by_rank] for i, run in enumerate(TWO)}


@pytest.mark.distributed
class TestTwoRanks:
    @pytest.mark.parametrize("run", [run for run in TWO if run.zero and run.wire == "fp32"], ids=str)
    def test_sharded_is_unsharded_bit_for_bit(self, two: dict, run: Run) -> None:
        """Weights, scales, losses and norms; low-bit states too: rounding does not know who owns what."""
        for got, want in zip(two[run], two[run.plain], strict=True):
            assert got["losses"] == want["losses"] and got["norms"] == want["norms"] and got["choices"] == want["choices"]
            assert got["weights"] == want["weights"] and got["scales"] == want["scales"]

    def test_each_forward_uses_this_steps_weights_of_every_owner(self, two: dict) -> None:
        for run, by_rank in two.items():
            if run.tp == run.ep == 1:
                assert by_rank[0]["weights"] == by_rank[1]["weights"] and by_rank[0]["scales"] == by_rank[1]["scales"], run

    def test_norm_is_equal_on_every_rank(self, two: dict) -> None:
        for run, by_rank in two.items():
            assert by_rank[0]["norms"] == by_rank[1]["norms"], run

    def test_norm_is_that_of_one_process(self, two: dict, tmp_path: Path) -> None:
        """Of gradients that are not rounded on the way; who counts which part changes nothing but the order of the sum."""
        alone = sail(Run(), Mesh.solo(), tmp_path)["norms"][0]
        for run in (Run(), Run(1), Run(1, partition="tensors"), Run(2), Run(1, ep=2), Run(1, tp=2)):
            assert two[run][0]["norms"][0] == pytest.approx(alone, rel=1e-5), run

    def test_each_rank_keeps_its_share_of_the_states(self, two: dict) -> None:
        whole = two[Run()][0]
        for run in (Run(1), Run(1, partition="tensors")):
            assert sum(seen["owned"] for seen in two[run]) == whole["owned"]
            assert all(0.4 < seen["owned"] / whole["owned"] < 0.6 for seen in two[run]), run

    def test_weights_travel_as_fp8_with_their_scales(self, two: dict) -> None:
        """One byte a parameter and 4 / 128^2 for the scale; only norms and router are FP32."""
        for seen in two[Run(1, wire="fp8")]:
            sent = seen["sent"]
            assert sent["weights", "e4m3"] > 20 * sent["weights", "fp32"]
            assert set(sent) & {("gradients", "fp32"), ("gradients", "bf16")} == set()

    def test_bytes_against_high_precision(self, two: dict) -> None:
        """Gradients and weights, scales and padding counted: the reduce-scatter and all-gather of as many elements."""
        elements = two[Run()][0]["owned"] / 2  # a rank of two sends half of each
        for run in (Run(1, wire="fp8"), Run(2, wire="fp8")):
            for seen in two[run]:
                sent = sum(n for (kind, _), n in seen["sent"].items() if kind in ("gradients", "weights"))
                assert sent < 0.27 * 8 * elements and sent < 0.36 * 6 * elements and sent < 0.53 * 4 * elements, sent / elements

    def test_fp8_reduction_stays_near(self, two: dict) -> None:
        want = two[Run()][0]
        for run in (r for r in two if r.wire.startswith("fp8")):
            assert two[run][0]["losses"] == pytest.approx(want["losses"], rel=1e-2), run
            assert two[run][0]["norms"][0] == pytest.approx(want["norms"][0], rel=2e-2), run


WIRES_AND_STAGES = [("fp32", 1), ("fp32", 2), ("bf16", 1), ("fp8", 0), ("fp8", 1), ("fp8", 2), ("fp8_lm", 0), ("fp8_lm", 1)]
# Largest relative difference of (loss after a step, first norm) from FP32 sums of unsharded states: order of FP32 sums; roundings
BOUNDS = {"fp32": (1e-3, 1e-6), "bf16": (5e-3, 1e-3), "fp8": (1e-2, 1e-2), "fp8_lm": (1e-2, 2e-2)}


@pytest.mark.distributed
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 2), (1, 4)])
def test_wires_and_stages_agree_under_layouts(tp: int, ep: int, tmp_path: Path) -> None:
    """Four ranks; replicas hold the same bits under each."""
    runs = [Run(tp=tp, ep=ep)] + [Run(zero, wire, tp=tp, ep=ep, parts=1) for wire, zero in WIRES_AND_STAGES]
    by_rank = run_ranks(4, on_ranks, runs, str(tmp_path), timeout=280.0)
    want = by_rank[0][0]
    for i, run in enumerate(runs):
        held: dict[Any, int] = {}
        for seen in by_rank:
            loss, norm = BOUNDS[run.wire]
            assert seen[i]["losses"] == pytest.approx(want["losses"], rel=loss), run
            assert seen[i]["norms"][0] == pytest.approx(want["norms"][0], rel=norm), run
            for key, digest in seen[i]["weights"].items():
                assert held.setdefault(key, digest) == digest, (run, key)


class TowerLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Weight(384, 128, recipe=Recipe.block())

    def forward(self) -> Tensor:
        return self.weight.data.clone()


class Tower(nn.Module):
    """Layers that may run in any order; gives the bits that each has read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TowerLayer() for _ in range(6))

    def forward(self, order: list[int]) -> list[int]:
        return [bits(self.layers[i]()) for i in order]


def random_orders(rank: int, size: int) -> tuple[list[int], bool]:
    """Steps at which a layer has read other bits than an unsharded optimizer makes; and whether anything was still under way."""
    mesh, wrong, under_way = build_mesh(), [], False
    towers, draw = (Tower(), Tower()), torch.Generator().manual_seed(rank)
    lazy = ShardedAdamW(weights(towers[0]), mesh, bucket_bytes=384 * 128 * 4)
    lazy.shards.overlap(towers[0])
    plain = AdamW(weights(towers[1]))
    reducer = make_reducer(weights(towers[0]), mesh, lazy, zero=1)
    for name, weight in weights(towers[0]):
        value = torch.randn(weight.data.shape, generator=torch.Generator().manual_seed(len(name)))
        lazy.set_master(name, value)
        plain.set_master(name, value)
    for step in range(8):
        order = torch.randperm(6, generator=draw).tolist()[: 6 - step % 2]  # now and then a layer does not run at all
        under_way |= any(g._pending for g in lazy.shards.groups)
        if towers[0](order) != towers[1](order):
            wrong.append(step)
        for place, (one, two) in enumerate(zip(towers[0].layers, towers[1].layers, strict=True)):
            grad = torch.randn(384, 128, generator=torch.Generator().manual_seed(100 * step + place))
            one.weight.add_grad(grad * rank)  # of rank 0 nothing
            two.weight.add_grad(grad)
        reducer.finish()
        for optimizer in (lazy, plain):
            optimizer.step(0.1)
    return wrong, under_way


@pytest.mark.distributed
def test_layers_in_random_order_read_this_steps_weights() -> None:
    """The gather runs under forward; each rank runs its layers in an order of its own."""
    assert run_ranks(2, random_orders) == [([], True), ([], True)]


@pytest.mark.distributed
def test_resume_is_bitwise(tmp_path: Path) -> None:
    """With sharded FP8 states; FP8 gradients rounded stochastically, or under FP8-LM's mu, which the checkpoint keeps."""
    runs = []
    for options in (dict(zero=1, wire="fp8", rounding="stochastic"), dict(zero=2, wire="fp8_lm")):
        options, name = options | dict(states="lean"), options["wire"]
        runs += [Run(last=4, **options), Run(last=2, target=name, **options), Run(first=2, last=4, source=name, **options)]
    for seen in run_ranks(2, on_ranks, runs, str(tmp_path)):
        for whole, resumed in (seen[0:3:2], seen[3:6:2]):
            assert resumed["losses"] == whole["losses"][2:] and resumed["weights"] == whole["weights"]
            assert resumed["scales"] == whole["scales"] and resumed["mu"] == whole["mu"][2:]


class TestCuts:
    def test_cuts_fall_between_blocks_and_experts(self) -> None:
        block = Recipe.block()
        bag = [Weight(640, 128, recipe=block), Weight(128, 256, recipe=block), Weight(3, 256, 128, recipe=block, expert=True)]
        for n in (1, 2, 3, 4, 7, 64):
            cuts = cut_evenly(bag, n)
            for weight, cut, unit in zip(bag, cuts, (128, 128, 1), strict=True):
                assert cut[0] == 0 and cut[-1] == weight.data.shape[0] and cut == sorted(cut)
                assert all(row % unit == 0 for row in cut), (n, cut)
            share = [sum((c[r + 1] - c[r]) * w.numel // w.data.shape[0] for w, c in zip(bag, cuts, strict=True)) for r in range(n)]
            assert max(share) <= sum(share) / n + 256 * 128, (n, share)

    def test_whole_tensors_go_to_the_least_loaded_by_size(self) -> None:
        bag = [Weight(rows, 128, recipe=Recipe.bf16()) for rows in (1, 5, 3, 3, 2)]
        loads = [0, 0]
        ordered, cuts = give_whole(bag, loads)
        assert loads == [7 * 128, 7 * 128]
        assert all(sorted(set(cut)) == [0, w.data.shape[0]] for w, cut in zip(ordered, cuts, strict=True))


def test_one_process_is_adamw() -> None:
    weight, other = Weight(256, 128, recipe=Recipe.block()), Weight(256, 128, recipe=Recipe.block())
    plain, sharded = AdamW([("w", weight)]), ShardedAdamW([("w", other)], Mesh.solo())
    reducer = make_reducer([("w", other)], Mesh.solo(), sharded, zero=1)
    value, grad = torch.randn(256, 128), torch.randn(256, 128)
    for optimizer, w in ((plain, weight), (sharded, other)):
        optimizer.set_master("w", value)
        w.add_grad(grad)
    reducer.finish()
    plain.step(1e-2)
    sharded.step(1e-2)
    assert bits(weight.data) == bits(other.data) and bits(weight.scale_inv) == bits(other.scale_inv)
    assert not other.has_grad
