"""Any layout computes the same function: loss, every gradient, norm, routing counts, optimizer steps, expert biases.

Up to four ranks in every combination of tp, ep, dp and sequence parallel, against a plain single-process model (reference.py) in
FP32, and against one process of our own in FP8. Tests are named after the failures of other trainers that they guard against.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import torch

from parallel.mesh import Mesh
from tests.helpers import largest, run_ranks
from tests.parallel.layouts import (
    Case,
    reference_run,
    router_gradients,
    router_gradients_wanted,
    run_cases,
    take_steps,
    ties,
)

SEQUENCE = {1: (True,), 2: (True, False), 4: (True, False)}
FOUR = [Case(tp, ep, sp, parts=1 + (ep == 2)) for tp in (1, 2, 4) for ep in (1, 2, 4) for sp in SEQUENCE[tp]]
TWO = [Case(tp, ep, sp, parts=2 - (ep == 2)) for tp in (1, 2) for ep in (1, 2) for sp in SEQUENCE[tp]]
IDLE = [Case(1, 2, idle=True), Case(1, 4, idle=True), Case(2, 4, idle=True), Case(4, 2, False, idle=True)]
STAGED = [Case(2, 2, stage=2), Case(1, 4, stage=3), Case(2, 4, False, stage=4)]
FP8 = [Case(*layout, recipe="block") for layout in ((1, 1), (1, 4), (2, 2), (4, 1), (4, 2, False))]
FP8 += [Case(2, 4, recipe="block", stage=4), Case(1, 4, recipe="block", idle=True), Case(2, 2, recipe="mx")]
SHARED_SCALES = [Case(2, 1, recipe="tensorwise_current"), Case(2, 4, recipe="tensorwise_delayed", idle=True)]
FP8 += SHARED_SCALES
WIRED = [Case(2, 4, recipe="block", wires="fp8")]
FP32 = FOUR + IDLE + STAGED

# An FP32 sum in another order moves by a few epsilon (6e-8); the deepest gradient collects about twenty of them.
TOLERANCE = 1e-5
# In the block recipe a layout changes which values are rounded together only where FP32 noise crosses a rounding boundary.
FP8_TOLERANCE = 1e-3
# At tp = 4 two ranks share a KV head: each rounds its own part of the head's gradient, one E4M3 rounding (2.6 % in the mean square)
# in each of three attention layers on the way down. Both are equally far from the FP32 gradient: 0.295 and 0.292 at the first qkv.
FP8_TOLERANCE_SHARED_KV = 2**-3


@pytest.fixture(scope="module")
def wants() -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    found = {"fp32": reference_run(False), "fp32 idle": reference_run(True)}
    for case in {case.oracle: Case(recipe=case.recipe, idle=case.idle) for case in FP8}.values():
        found[case.oracle] = take_steps(case, Mesh.solo())[1]
    return found


@pytest.fixture(scope="module")
def results(wants: dict, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, Case], list[dict]]:
    """(ranks, case) -> each rank's findings."""
    path = tmp_path_factory.mktemp("layouts") / "wants.pt"
    torch.save(wants, path)
    found = {}
    for ranks, cases in ((4, FP32 + FP8 + WIRED), (2, TWO)):
        by_rank = run_ranks(ranks, run_cases, cases, str(path), timeout=280.0)
        found |= {(ranks, case): [seen[case] for seen in by_rank] for case in cases}
    show(found, wants)
    return found


def show(results: dict, wants: dict) -> None:
    """Prints the largest relative errors, which docs/parallelism.md quotes; `pytest -s` shows them."""
    split = {"FP8, tp = 4": [case for case in FP8 if case.tp == 4], "FP8, other layouts": [case for case in FP8 if case.tp < 4]}
    for name, cases in {"FP32": FP32 + TWO, **split}.items():
        seen = list(pick(results, cases))
        top = {key: largest(abs(s[key] / wants[c.oracle][key] - 1) for _, c, s in seen) for key in ("loss", "norm")}
        top |= {key: largest(worst(s, key)[0] for _, _, s in seen) for key in ("grads", "adam", "sgd", "bias", "init")}
        print(f"\n{name}: " + ", ".join(f"{key} {value:.1e}" for key, value in top.items()))


def pick(results: dict, cases: list[Case]) -> Iterator[tuple[str, Case, dict]]:
    for (ranks, case), by_rank in results.items():
        if case in cases:
            yield from ((f"rank {rank} of {ranks}, {case}", case, seen) for rank, seen in enumerate(by_rank))


def worst(seen: dict, key: str) -> tuple[float, str]:
    """The largest error and whose it is; the first NaN if there is one, as infinite."""
    top = largest(seen[key].values())
    return top, next(name for name, e in seen[key].items() if e == top or not math.isfinite(e))


def test_one_process_is_the_plain_model(wants: dict) -> None:
    """The reference shares no autograd Function, GEMM or sort with the model."""
    for case in (Case(), Case(idle=True), Case(parts=4, stage=2)):
        _, got = take_steps(case, Mesh.solo())
        want = wants[case.oracle]
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-6) and got["counts"] == want["counts"]
        for name, grad in want["grads"].items():
            assert ((got["grads"][name] - grad).norm() / grad.norm()).item() < TOLERANCE, (case, name)


@pytest.mark.distributed
class TestEveryLayout:
    @pytest.mark.parametrize("key", ["grads", "adam", "sgd"])
    def test_gradients_and_steps_match_one_process(self, results: dict, key: str) -> None:
        """EP does not rescale gradients (SGD would show it), norms and QK-norms included."""
        for where, _, seen in pick(results, FP32 + TWO):
            assert worst(seen, key) < (TOLERANCE, ""), where

    def test_loss_matches_and_recompute_does_not_double_it(self, results: dict, wants: dict) -> None:
        for where, case, seen in pick(results, FP32 + TWO):
            assert seen["loss"] == pytest.approx(wants[case.oracle]["loss"], rel=1e-6), where

    def test_auxiliary_losses_do_not_depend_on_layout_micro_batches_or_recompute(self, results: dict, wants: dict) -> None:
        for where, case, seen in pick(results, FP32 + TWO):
            assert seen["first aux"] == pytest.approx(wants[case.oracle]["first aux"], rel=1e-5), where

    def test_initial_weights_are_the_same_bits(self, results: dict) -> None:
        for where, _, seen in pick(results, FP32 + FP8 + TWO):
            assert worst(seen, "init")[0] == 0.0, where

    def test_one_global_norm_equal_on_every_rank(self, results: dict, wants: dict) -> None:
        for (_, case), by_rank in results.items():
            assert len({seen["norm"] for seen in by_rank}) == 1, f"ranks disagree: {case}"
        for where, case, seen in pick(results, FP32 + TWO):
            assert seen["norm"] == pytest.approx(wants[case.oracle]["norm"], rel=1e-6), where

    def test_every_gradient_is_on_its_way_before_the_wait(self, results: dict) -> None:
        """All buckets have started when backward ends: nothing is left for `finish` but to wait."""
        for where, _, seen in pick(results, FP32 + FP8 + TWO):
            assert 0 < seen["started"] == seen["reduced"], where

    def test_routing_counts_match(self, results: dict, wants: dict) -> None:
        for where, case, seen in pick(results, FP32 + TWO):
            assert seen["counts"] == wants[case.oracle]["counts"], where

    def test_bias_moves_once_a_step_from_all_tokens_of_the_global_batch(self, results: dict) -> None:
        for where, _, seen in pick(results, FP32 + TWO):
            assert worst(seen, "bias")[0] < 1e-8 and seen["counts reset"], where

    def test_replicas_are_the_same_bits_after_three_steps(self, results: dict) -> None:
        """Router replicas under tp, dense replicas over dp, expert replicas over edp, shared KV heads, biases."""
        shared = set()
        for (ranks, case), by_rank in results.items():
            for (a, one), (b, two) in combinations(enumerate(by_rank), 2):
                for key in one["bits"].keys() & two["bits"].keys():
                    assert one["bits"][key] == two["bits"][key], f"{key} differs on ranks {a} and {b} of {ranks}, {case}"
                    shared.add(key[0])
        assert {"layers.1.block.router.weight", "layers.1.block.experts.down", "layers.0.attention.qkv"} <= shared

    def test_sequence_parallel_on_and_off_agree(self, results: dict) -> None:
        on = [case for case in FOUR if case.tp > 1 and case.sequence]
        for case in on:
            off = results[4, Case(case.tp, case.ep, False, parts=case.parts)]
            for one, other in zip(results[4, case], off, strict=True):
                assert one["loss"] == pytest.approx(other["loss"], rel=1e-6) and one["counts"] == other["counts"]
                assert one["norm"] == pytest.approx(other["norm"], rel=1e-6)

    def test_experts_without_tokens_get_exactly_zero(self, results: dict) -> None:
        """Never None, never uninitialised, also where a whole rank is idle, in FP32 and in FP8."""
        for where, case, seen in pick(results, IDLE + FP8):
            assert not case.idle or seen["idle gradient"] == 0.0, where
            assert seen["finite"], where


@pytest.mark.distributed
class TestFp8Layouts:
    def test_losses_match_one_process(self, results: dict, wants: dict) -> None:
        for where, case, seen in pick(results, FP8):
            assert seen["loss"] == pytest.approx(wants[case.oracle]["loss"], rel=1e-3), where
            assert seen["last loss"] == pytest.approx(wants[case.oracle]["last loss"], rel=1e-2), where

    def test_gradients_stay_within_the_bound(self, results: dict) -> None:
        for where, case, seen in pick(results, FP8):
            assert worst(seen, "grads") < (FP8_TOLERANCE_SHARED_KV if case.tp == 4 else FP8_TOLERANCE, ""), where

    def test_norm_stays_within_the_bound(self, results: dict, wants: dict) -> None:
        for where, case, seen in pick(results, FP8):
            assert seen["norm"] == pytest.approx(wants[case.oracle]["norm"], rel=1e-2), where

    def test_stays_finite_at_tp_4(self, results: dict) -> None:
        assert all(seen["finite"] for _, case, seen in pick(results, FP8) if case.tp == 4)

    def test_delayed_scales_come_from_the_maximum_over_all_ranks(self, results: dict) -> None:
        """tp and dp: a maximum over dp alone let one tp rank overflow. Equal bits on all ranks are asserted with the replicas."""
        assert all(seen["scales"] for _, _, seen in pick(results, SHARED_SCALES))

    def test_dispatch_and_gathers_are_fp8_on_the_wire(self, results: dict) -> None:
        for where, case, seen in pick(results, FP8):
            if case.ep > 1:
                formats = {fmt for kind, fmt in seen["traffic"] if kind == "dispatch"}
                assert formats <= {"e4m3", "e5m2", "int64", "slots"} and "e4m3" in formats, where
            if case.tp > 1 and case.sequence:
                assert seen["traffic"]["tp", "e4m3"] > 0, where

    def test_sums_sent_as_fp8_stay_near(self, results: dict, wants: dict) -> None:
        """One more E4M3 rounding (2.6 % in the mean square) on each of about ten sums that a gradient passes."""
        for where, case, seen in pick(results, WIRED):
            assert seen["loss"] == pytest.approx(wants[case.oracle]["loss"], rel=1e-2), where
            assert seen["norm"] == pytest.approx(wants[case.oracle]["norm"], rel=5e-2) and seen["finite"], where
            sent = seen["traffic"]
            assert sent["combine", "e4m3"] > 0
            # FP32 is left for the embedding and the routing weights' gradient
            assert sent["combine", "fp32"] < 0.1 * sent["combine", "e4m3"] and sent["tp", "fp32"] < sent["tp", "e4m3"], where


@pytest.mark.distributed
@pytest.mark.parametrize("case", [Case(2, 2), Case(2, 4, False), Case(1, 4)], ids=str)
def test_router_learns_from_the_main_loss_through_dispatch_and_from_auxiliary_losses(case: Case) -> None:
    want = router_gradients_wanted()
    for found in run_ranks(4, router_gradients, case):
        for name in want["main"]:
            for key in ("main", "aux"):
                assert want[key][name].norm() > 0
                assert ((found[key][name] - want[key][name]).norm() / want[key][name].norm()).item() < TOLERANCE, (key, name)
            assert torch.allclose(found["double"][name], 2 * found["aux"][name], rtol=1e-5, atol=1e-9)


@pytest.mark.distributed
@pytest.mark.parametrize("recipe", ["fp32", "block"])
def test_recompute_routes_ties_identically(recipe: str) -> None:
    for stages in run_ranks(2, ties, recipe):
        assert all(found == stages[0] for found in stages[1:])
