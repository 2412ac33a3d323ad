"""Gradients as FP8: error whatever the number of ranks, equal bits on all, NaN, rounding, bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8.optimizer import AdamW
from fp8.philox import Draw, random_words
from fp8.quantized import Quantized
from fp8.recipe import Recipe
from fp8.weight import Piece, Weight, weights
from parallel import grad_wire
from parallel.grad_reduce import GradReducer, global_grad_norm
from parallel.grad_wire import SENT, OwnerBucket, even_bounds, pack_tiles, quantize_tiles, sum_of_ranks, weight_parts
from parallel.mesh import Axis, Mesh, build_mesh
from tests.helpers import run_ranks
from tests.parallel.layouts import bits

RMS = 0.0266  # of one E4M3 rounding of a normal variable under a power-of-two scale
RANKS = (2, 3, 4, 8, 16, 32, 64)


def reduced(grads_NF: Tensor, seed: int | None = None) -> Tensor:
    """What every rank gets when N ranks send these gradients: parts in FP8, summed in FP32, the sum in FP8."""
    words = [None] * (len(grads_NF) + 1)
    if seed is not None:
        place = torch.arange(grads_NF.shape[1])
        words = [random_words(Draw(seed, 1, 0, stream, rank), place) for rank, stream in [*enumerate([2] * len(grads_NF)), (0, 3)]]
    sent = [quantize_tiles(g, w) for g, w in zip(grads_NF, words, strict=False)]
    rows = Quantized(torch.cat([q.data for q in sent]), torch.cat([q.scale_inv for q in sent]), sent[0].tile)
    return quantize_tiles(sum_of_ranks(rows, len(sent)), words[-1]).dequantize().view(-1)


class TestError:
    @pytest.mark.parametrize("seed", [None, 7], ids=["nearest", "stochastic"])
    def test_error_against_the_float64_mean_is_independent_of_the_number_of_ranks(self, seed: int | None) -> None:
        """One rounding on the way (whose errors average like the gradients do) and one of the sum."""
        found = []
        for n in RANKS:
            grads = torch.randn(n, 1 << 13, generator=torch.Generator().manual_seed(n))
            mean = grads.double().mean(0)
            found.append(((reduced(grads, seed) / n - mean).norm() / mean.norm()).item())
        # stochastically a rounding is off by sqrt(2) more
        bound = RMS * 2**0.5 * (1 if seed is None else 2**0.5)
        assert max(found) < 1.1 * bound and max(found) / min(found) < 1.1, found

    @pytest.mark.parametrize("n", RANKS)
    def test_gradients_of_one_sign_do_not_saturate(self, n: int) -> None:
        """All ranks at the top of their tiles: the sum is n times 448, and has a scale of its own."""
        for top in (448.0, 447.0 * 2.0**30, 1.75 * 2.0**-100):
            grads = torch.full((n, 256), top)
            assert torch.allclose(reduced(grads), grads.double().sum(0).float(), rtol=2 * 2.0**-4), top
        grads = torch.rand(n, 1 << 12, generator=torch.Generator().manual_seed(n)) + 0.5
        assert ((reduced(grads) / grads.double().sum(0)) - 1).abs().max() < 2 * 2.0**-4 + 2.0**-8

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("seed", [None, 7], ids=["nearest", "stochastic"])
    def test_what_is_not_finite_arrives_as_nan(self, bad: float, seed: int | None) -> None:
        grads = torch.ones(4, 512)
        grads[2, 200] = bad
        got = reduced(grads, seed)
        assert got[200].isnan() and got[:128].isfinite().all() and got[256:].isfinite().all()

    def test_zeros_stay_zero_and_tiny_gradients_stay(self) -> None:
        assert not reduced(torch.zeros(8, 256)).any()
        tiny = torch.full((8, 256), 1e-30)
        assert torch.allclose(reduced(tiny), tiny.sum(0), rtol=0.13)

    def test_stochastic_rounding_is_right_in_the_mean(self) -> None:
        """0.3 of a step above a code: nearest is always off by it, the mean of many draws is not."""
        x = torch.full((1 << 14,), 1.0 + 0.3 / 8)
        x[::128] = 1.75  # the tile's scale
        words = random_words(Draw(3, 1, 0, 2), torch.arange(len(x)))
        got = quantize_tiles(x, words).dequantize().view(-1)[x < 1.5]
        assert set(got.unique().tolist()) == {1.0, 1.125}
        assert got.mean().item() == pytest.approx(1.0375, abs=4 * 0.125 * 0.46 / len(got) ** 0.5)


class Bag(nn.Module):
    """Two matrices, a vector shorter than a tile, half of the experts."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        fp32, local = Recipe.fp32(), 4 // mesh.ep.size
        self.a, self.b = Weight(40, 24, recipe=fp32), Weight(128, 128, recipe=fp32)
        self.norm = Weight(100, recipe=fp32, init_std=None, tp_partial=True)
        part = Piece((mesh.ep.rank * local, 0, 0), (slice(0, local), slice(0, 32), slice(0, 16)))
        self.e = Weight(local, 32, 16, recipe=fp32, expert=True, global_shape=(4, 32, 16), pieces=(part,))


def gradient(name: str, rank: int, shape: torch.Size) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(10 * rank + len(name) + ord(name[0])))


def fp8_reductions(rank: int, size: int, stochastic: bool) -> dict[str, Any]:
    mesh, seen = build_mesh(ep=2), {}
    bag = Bag(mesh)
    named = list(weights(bag))
    AdamW(named, seed=11)
    reducer = GradReducer(named, mesh, bucket_bytes=1 << 14, fp8=True, stochastic=stochastic)
    for step in range(2):
        mesh.traffic.reset()
        for name in ("norm b e a", "a b e norm", "e a norm b", "b norm a e")[rank].split():
            weight = getattr(bag, name)
            weight.add_grad(gradient(name, rank, weight.data.shape))
        reducer.finish()
        seen[f"bits {step}"] = {name: bits(w.main_grad) for name, w in named}
        for _, weight in named:
            weight.clear_grad()
    seen["grads"], seen["sent"] = {name: w.main_grad.clone() for name, w in named}, dict(mesh.traffic.sent)
    bag.b.add_grad(torch.full((128, 128), float("inf") if rank == 1 else 1.0))
    reducer.finish()
    seen["norm"] = global_grad_norm(named, mesh).item()
    return seen


def test_random_words_do_not_depend_on_how_much_is_rounded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices, stacks, a vector shorter than a tile; the whole bucket and an owner's part of it."""
    fp32 = Recipe.fp32()
    bag = [Weight(640, 24, recipe=fp32), Weight(5, 32, 16, recipe=fp32), Weight(100, recipe=fp32), Weight(3, 5, 7, recipe=fp32)]
    AdamW([(str(i), w) for i, w in enumerate(bag)], seed=3)
    bucket = OwnerBucket(Axis(None, 0, 2), bag, even_bounds(2, 144), stochastic=True)
    flat = torch.randn(bucket.bounds[-1], generator=torch.Generator().manual_seed(0))
    found = []
    for part in (1 << 23, 1 << 9):
        monkeypatch.setattr(grad_wire, "PART", part)
        found.append((bucket._pack(flat, 0, SENT, 1), bucket._pack(flat[640:9344], 640, SENT, 1)))
    assert len(list(weight_parts(bag[0]))) == 5 and len(list(weight_parts(bag[1]))) == 5
    (whole, own), (parts, own_parts) = found
    assert torch.equal(whole, parts) and torch.equal(own, own_parts) and torch.equal(own, whole[5:73])
    assert len(whole) == 144 and not torch.equal(whole, pack_tiles(flat))


@pytest.fixture(scope="module", params=[False, True], ids=["nearest", "stochastic"])
def by_rank(request: pytest.FixtureRequest) -> list[dict]:
    return run_ranks(4, fp8_reductions, request.param)


@pytest.mark.distributed
class TestFourRanks:
    def test_the_same_bits_on_all_ranks_owners_included(self, by_rank: list[dict]) -> None:
        for seen in by_rank:
            for name in ("a", "b", "norm"):
                assert seen["bits 0"][name] == seen["bits 1"][name] == by_rank[0]["bits 0"][name], name
        assert by_rank[0]["bits 0"]["e"] == by_rank[2]["bits 0"]["e"] != by_rank[1]["bits 0"]["e"]

    def test_sums_are_two_roundings_from_exact(self, by_rank: list[dict]) -> None:
        for rank, seen in enumerate(by_rank):
            for name, got in seen["grads"].items():
                ranks = (rank, (rank + 2) % 4) if name == "e" else range(4)
                want = sum(gradient(name, r, got.shape).double() for r in ranks)
                assert ((got - want).norm() / want.norm()).item() < 2 * RMS * 1.3, name

    def test_every_rank_sees_the_inf_of_one(self, by_rank: list[dict]) -> None:
        assert all(seen["norm"] != seen["norm"] for seen in by_rank)

    def test_only_fp8_travels_and_every_byte_is_counted(self, by_rank: list[dict]) -> None:
        """132 bytes a tile: 128 codes, a scale, padding to 4; to three (one) others and back."""
        dense = [40 * 24 / 128, 128, 1]  # tiles of a, b, norm
        expert = 2 * 32 * 16 / 128
        for seen in by_rank:
            assert set(seen["sent"]) == {("gradients", "e4m3")}
            least = 132 * (2 * 3 / 4 * (sum(dense)) + 2 * 1 / 2 * expert)
            assert least <= seen["sent"]["gradients", "e4m3"] <= least + 2 * 3 * 132 * 4  # buckets are padded to 4 tiles
