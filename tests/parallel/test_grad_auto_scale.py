"""FP8-LM's gradient sums: shared scales, mu, saturation, equal bits; in simulation up to 64 ranks and on four."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8.optimizer import AdamW
from fp8.quantize import cast_fp8
from fp8.recipe import E4M3
from fp8.weight import weights
from parallel.grad_auto_scale import AutoScale, add_codes, scale_of
from parallel.grad_reduce import GradReducer, global_grad_norm
from parallel.mesh import Axis, build_mesh
from tests.helpers import run_ranks
from tests.parallel.layouts import bits
from tests.parallel.test_grad_wire import RANKS, Bag, gradient


def reduced(grads_NF: Tensor, mu: float) -> tuple[Tensor, float]:
    """(sum, share of saturated elements) of N ranks' gradients."""
    factor = torch.stack([scale_of(g) for g in grads_NF]).min() * mu
    codes = add_codes(torch.stack([cast_fp8(g * factor, E4M3) for g in grads_NF]))
    return codes.float() / factor, ((codes.view(torch.uint8) & 0x7F) == 0x7E).double().mean().item()


@pytest.mark.parametrize("n", RANKS)
def test_gradients_of_one_sign_do_not_saturate_at_the_first_mu(n: int) -> None:
    """Nothing is lost up to 16 ranks. Then a rank's code is half a step of the sum or less: what it adds is rounded away."""
    got, _ = reduced(torch.full((n, 256), 448.0), AutoScale(n).mu.item())
    assert got.isfinite().all()
    assert ((got / (448.0 * n) - 1).abs() < 0.15).all() if n <= 16 else (got < 448.0 * n).all()


def test_error_grows_with_the_number_of_ranks_where_the_owners_fp32_sum_does_not() -> None:
    """Each addition rounds: that is the mode's price, and why it is not the default."""
    found = []
    for n in RANKS:
        grads = torch.randn(n, 1 << 12, generator=torch.Generator().manual_seed(n))
        got, saturated = reduced(grads, n**-0.5)
        want = grads.double().sum(0)
        assert saturated < 1e-2
        found.append(((got - want).norm() / want.norm()).item())
    assert found[0] < 0.06 and found == sorted(found) and found[-1] < 0.2, found


def test_a_rank_without_gradients_limits_nobody_and_nan_is_seen() -> None:
    tiny = torch.stack([torch.zeros(128), torch.full((128,), 1e-20)])
    assert torch.allclose(reduced(tiny, 0.5)[0], tiny.sum(0), rtol=0.07)
    assert not reduced(torch.zeros(3, 128), 0.25)[0].any()
    for bad in (float("nan"), float("inf")):
        grads = torch.ones(4, 128)
        grads[1, 5] = bad
        assert reduced(grads, 0.25)[0].isnan().all()


class TestMu:
    def test_halves_at_once_and_doubles_over_a_thousand_clean_steps(self) -> None:
        auto, solo = AutoScale(8), Axis.solo()
        assert auto.mu == 0.125
        for _ in range(1000):
            auto.counts += torch.tensor([9, 1e6, 0])  # 0.9e-5 are at the maximum
            auto.update(solo)
        assert auto.mu.item() == pytest.approx(0.25, rel=1e-12)
        auto.counts += torch.tensor([11, 1e6, 0])
        auto.update(solo)
        assert auto.mu.item() == pytest.approx(0.125, rel=1e-12) and not auto.counts.any()
        for _ in range(5000):
            auto.update(solo)
        assert auto.mu == 1.0

    def test_a_step_that_is_not_finite_leaves_it(self) -> None:
        auto = AutoScale(2)
        auto.counts += torch.tensor([1e6, 1e6, 1])
        auto.update(Axis.solo())
        assert auto.mu == 0.5


def on_ranks(rank: int, size: int) -> dict[str, Any]:
    mesh, seen = build_mesh(ep=2), {}
    bag, auto = Bag(mesh), AutoScale(size)
    named = list(weights(bag))
    AdamW(named)
    reducer = GradReducer(named, mesh, bucket_bytes=1 << 14, auto=auto)

    def reduce(value: float | None = None) -> None:
        for name in ("norm b e a", "a b e norm", "e a norm b", "b norm a e")[rank].split():
            shape = getattr(bag, name).data.shape
            getattr(bag, name).add_grad(gradient(name, rank, shape) if value is None else torch.full(shape, value))
        reducer.finish()
        seen["norm"] = global_grad_norm(named, mesh).item()
        for _, weight in named:
            weight.clear_grad()

    mesh.traffic.reset()
    reduce()
    seen["sent"], seen["mu"] = dict(mesh.traffic.sent), [auto.mu.item()]
    seen["grads"] = {name: w.main_grad.clone() for name, w in named}
    seen["bits"] = {name: bits(w.main_grad) for name, w in named}
    auto.mu.fill_(1.0)
    reduce(448.0)
    seen["mu"].append(auto.mu.item())
    seen["saturated"] = bag.b.main_grad.max().item()
    reduce(float("nan") if rank == 3 else 1.0)
    seen["mu"].append(auto.mu.item())
    return seen


@pytest.mark.distributed
def test_four_ranks_have_equal_bits_equal_mu_and_see_saturation_and_nan() -> None:
    by_rank = run_ranks(4, on_ranks)
    for rank, seen in enumerate(by_rank):
        assert seen["mu"] == by_rank[0]["mu"] and seen["mu"][0] == 0.25 * 2**1e-3
        assert seen["mu"][1:] == [0.5, 0.5]  # halved where sums met the maximum; left alone by NaN
        assert seen["saturated"] == 448.0 and seen["norm"] != seen["norm"]
        for name in ("a", "b", "norm"):
            assert seen["bits"][name] == by_rank[0]["bits"][name]
        assert seen["bits"]["e"] == by_rank[(rank + 2) % 4]["bits"]["e"]
        for name, got in seen["grads"].items():
            ranks = (rank, (rank + 2) % 4) if name == "e" else range(4)
            want = sum(gradient(name, r, got.shape).double() for r in ranks)
            assert ((got - want).norm() / want.norm()).item() < 0.1, name
        # a byte an element each way; scales and counts are FP32 and FP64
        sent = {key: n for key, n in seen["sent"].items() if key[0] == "gradients"}
        assert set(sent) == {("gradients", "e4m3"), ("gradients", "fp32"), ("gradients", "fp64")}
        assert sent["gradients", "fp32"] + sent["gradients", "fp64"] < 100
