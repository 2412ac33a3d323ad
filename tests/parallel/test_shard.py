"""Sharded optimizer states: equal to unsharded ones, one norm, bytes that travel, checkpoints that reshard."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8.optimizer import AdamW, states_named
from fp8.recipe import Recipe, recipe_named
from fp8.weight import Weight, weights
from model.router import update_expert_bias
from model.transformer import Transformer, initial_values
from parallel.grad_auto_scale import attach_auto_scale
from parallel.mesh import Mesh, build_mesh
from parallel.shard import Shards, cut_evenly, give_whole
from parallel.sharded_optimizer import ShardedAdamW, make_optimizer, make_reducer
from tests.helpers import run_ranks
from tests.parallel.layouts import ADAM, CLIP, CONFIG, backward, bits
from training.masters import tensors
from training.shards import read_shards, write_shards


@dataclass(frozen=True)
class Run:
    """Some steps; from a checkpoint, to one."""

    zero: int = 0
    wire: str = "fp32"
    recipe: str = "block"
    states: str = "fp32"
    tp: int = 1
    ep: int = 1
    partition: str = "rows"
    rounding: str = "nearest"
    first: int = 0
    last: int = 2
    source: str = ""
    target: str = ""
    parts: int = 1
    overlap: bool = False


def sail(run: Run, mesh: Mesh, folder: Path) -> dict[str, Any]:
    """Takes the steps; what the ranks end with, in digests and norms."""
    model = Transformer(CONFIG, recipe_named(run.recipe), mesh, dtype=torch.float32).train()
    named = list(weights(model))
    adamw = 0.9, 0.95, ADAM["eps"], 0.1, states_named(run.states), 3
    optimizer = make_optimizer(model, mesh, run.zero, run.partition, run.overlap, *adamw)
    attach_auto_scale(model, mesh, run.wire)
    auto = getattr(model, "grad_scale", None)
    reducer = make_reducer(named, mesh, optimizer, run.wire, run.rounding, run.zero, auto)
    for name, _, value in initial_values(model, seed=5):
        optimizer.set_master(name, torch.zeros_like(value) if run.source else value)
    if run.source:
        wanted = {k: v for k, v in tensors(model, optimizer, mesh.world.rank).items() if not k.startswith("rng.")}
        read_shards(folder / run.source, wanted, mesh.world)
        optimizer.num_steps = run.first
        for name in optimizer.weights:
            optimizer.refresh(name)
        optimizer.publish()
    seen: dict[str, Any] = {"losses": [], "norms": []}
    for _ in range(run.first, run.last):
        mesh.traffic.reset()
        seen["losses"].append(backward(model, mesh, run.parts)[0])
        reducer.finish()
        norm = reducer.norm()
        seen["norms"].append(norm.item())
        optimizer.step(ADAM["lr"], CLIP / norm.clamp(min=CLIP))
        update_expert_bias(model, mesh.world, 1e-3)
    optimizer.settle()
    seen["sent"], seen["mu"] = dict(mesh.traffic.sent), None if auto is None else auto.mu.item()
    if run.target:
        write_shards(folder / run.target, tensors(model, optimizer, mesh.world.rank), mesh.world)
    seen["weights"] = {(n, p.offset): bits(w.data[p.local]) for n, w in named for p in w.pieces}
    seen["scales"] = {n: bits(w.scale_inv) for n, w in named if w.scale_inv is not None and run.tp == run.ep == 1}
    seen["owned"] = sum(w.numel for w in optimizer.weights.values())
    seen["states"] = sum(t.nbytes for s in optimizer.state().values() for t in s.values())
    return seen


def on_ranks(rank: int, size: int, runs: list[Run], folder: str) -> list[dict[str, Any]]:
    meshes: dict[tuple[int, int], Mesh] = {}
    found = []
    for run in runs:
        if (run.tp, run.ep) not in meshes:
            meshes[run.tp, run.ep] = build_mesh(run.tp, run.ep)
        found.append(sail(run, meshes[run.tp, run.ep], Path(folder)))
    return found


TWO = [
    Run(), Run(1), Run(1, partition="tensors"), Run(1, overlap=True), Run(2, overlap=True),
    Run(states="lean"), Run(1, states="lean"),
    Run(recipe="bf16"), Run(1, recipe="bf16"),
    Run(recipe="tensorwise_current"), Run(1, recipe="tensorwise_current"),
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
        plain = Run(wire=run.wire, recipe=run.recipe, states=run.states, tp=run.tp, ep=run.ep)
        for got, want in zip(two[run], two[plain], strict=True):
            assert got["losses"] == want["losses"] and got["norms"] == want["norms"]
            assert got["weights"] == want["weights"] and got["scales"] == want["scales"]

    def test_26_each_forward_uses_this_steps_weights_of_every_owner(self, two: dict) -> None:
        for run, by_rank in two.items():
            if run.tp == run.ep == 1:
                assert by_rank[0]["weights"] == by_rank[1]["weights"] and by_rank[0]["scales"] == by_rank[1]["scales"], run

    def test_norm_is_equal_on_every_rank(self, two: dict) -> None:
        for run, by_rank in two.items():
            assert by_rank[0]["norms"] == by_rank[1]["norms"], run

    def test_each_rank_keeps_its_share_of_the_states(self, two: dict) -> None:
        whole = two[Run()][0]
        for run in (Run(1), Run(1, partition="tensors")):
            assert sum(seen["owned"] for seen in two[run]) == whole["owned"]
            assert all(0.4 < seen["owned"] / whole["owned"] < 0.6 for seen in two[run]), run

    def test_25_weights_travel_as_fp8_with_their_scales(self, two: dict) -> None:
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
        under_way |= any(g._pending is not None for g in lazy.shards.groups)
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
def test_26_layers_in_random_order_read_this_steps_weights() -> None:
    """The gather runs under forward; each rank runs its layers in an order of its own."""
    assert run_ranks(2, random_orders) == [([], True), ([], True)]


@pytest.mark.distributed
def test_31_states_reshard_to_other_numbers_of_ranks(tmp_path: Path) -> None:
    """FP8 moments and fp16 masters with their scales: trained by 4 owners, then 2, 4 under tp and ep, 3, and one process.

    Every leg loads and saves; in the end each byte of each state is what the first leg wrote, and one more step is the same.
    """
    torch.set_num_threads(1)
    still = dict(states="lean", first=2)
    legs = [
        (4, Run(1, states="lean", last=2, target="a", ep=2)),
        (2, Run(1, last=2, source="a", target="b", **still)),
        (4, Run(2, last=2, source="b", target="c", tp=2, ep=2, **still)),
        (3, Run(1, last=2, source="c", target="d", partition="tensors", **still)),
        (2, Run(1, last=3, source="d", **still)),
    ]
    for ranks, run in legs:
        found = run_ranks(ranks, on_ranks, [run], str(tmp_path))
    first, last = (sail(Run(last=3, source=source, target=f"{source}1", **still), Mesh.solo(), tmp_path) for source in "ad")
    assert first == last and first["states"] > 0
    assert [seen["losses"] for [seen] in found] == [pytest.approx(first["losses"], rel=1e-6)] * 2


@pytest.mark.distributed
def test_27_resume_is_bitwise(tmp_path: Path) -> None:
    """With sharded FP8 states; FP8 gradients rounded stochastically, or under FP8-LM's mu, which the checkpoint keeps."""
    runs = []
    for options in (dict(zero=1, wire="fp8", rounding="stochastic"), dict(zero=2, wire="fp8_lm")):
        options, name = options | dict(states="lean"), options["wire"]
        runs += [Run(last=4, **options), Run(last=2, target=name, **options), Run(first=2, last=4, source=name, **options)]
    for seen in run_ranks(2, on_ranks, runs, str(tmp_path)):
        for whole, resumed in (seen[0:3:2], seen[3:6:2]):
            assert resumed["losses"] == whole["losses"][2:] and resumed["weights"] == whole["weights"]
            assert resumed["scales"] == whole["scales"] and resumed["mu"] == whole["mu"]


class TestCuts:
    def test_23_cuts_fall_between_blocks_and_experts(self) -> None:
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

    def test_formats_that_change_are_refused(self) -> None:
        with pytest.raises(ValueError, match="formats that do not change"):
            Shards([("w", Weight(128, 128, recipe=recipe_named("auto")))], Mesh.solo())


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
