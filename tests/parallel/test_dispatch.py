"""Expert parallelism: dispatch and combine against the plain reference, whatever the counts.

Experts and ranks without tokens, ragged counts, padding, rows past the last group, scales that travel with their bytes.
"""

from __future__ import annotations

import pytest
import torch

from fp8.permute import build_permutation, permute, permute_slots, unpermute_slots, unpermute_sum
from fp8.quantize import quantize
from fp8.quantized import Quantized
from fp8.recipe import Recipe
from parallel.combine import combine_rows, combine_slots
from parallel.dispatch import dispatch, dispatch_rows, start_plan
from parallel.dispatch_reference import combine_ref, dispatch_ref
from parallel.mesh import Mesh, build_mesh
from tests.helpers import run_ranks

EXPERTS, K, D = 8, 2, 512
ROW = Recipe.block().activation


def routing(case: str, rank: int, tokens: int) -> torch.Tensor:
    """Expert ids [T, 2] of one rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(K, dim=1).indices
    if case == "one_expert":  # all first choices to expert 5, all second choices to expert 4
        ids = torch.tensor([[5, 4]]).expand(tokens, K).clone()
    elif case == "idle_rank":  # experts 0-3 get nothing: with ep = 2 or 4 whole ranks are idle
        ids = ids % 4 + 4
        ids[:, 1] = (ids[:, 0] - 4 + 1) % 4 + 4
    return ids


def tokens_of(case: str, rank: int) -> int:
    if case == "empty_source":
        return 0 if rank == 1 else 130
    return {"uneven": 40 + 77 * rank}.get(case, 96)


def check_layout(rank: int, mesh: Mesh, case: str) -> dict:
    """Errors of one layout and one routing case; every value is a plain number or bool."""
    axis, tokens = mesh.ep, tokens_of(case, rank)
    generator = torch.Generator().manual_seed(rank)
    x_TD = torch.randn(tokens, D, generator=generator) * 10 ** (2 * torch.rand(tokens, 1, generator=generator))
    weights_Tk, ids_Tk = torch.rand(tokens, K, generator=generator), routing(case, rank, tokens)
    local = EXPERTS // axis.size
    gain_e = torch.arange(1.0, local + 1) + axis.rank * local  # expert e multiplies by e + 1

    ref_rows, ref_plan = dispatch_ref(x_TD, ids_Tk, EXPERTS, axis)
    ref_y = combine_ref([rows * gain for rows, gain in zip(ref_rows, gain_e, strict=True)], ref_plan, axis)

    rows, w_R, plan = dispatch(Quantized.unscaled(x_TD), weights_Tk, start_plan(ids_Tk, EXPERTS, axis))
    groups = plan.perm.groups
    starts, counts = groups.starts_E.tolist(), groups.counts_E.tolist()
    spans = [slice(s, s + c) for s, c in zip(starts, counts, strict=True)]
    y_RD = torch.full_like(rows.data, float("nan"))  # rows that belong to nobody stay poisoned
    w_ref = torch.zeros(groups.max_rows)
    for e, span in enumerate(spans):
        y_RD[span] = rows.data[span] * gain_e[e]
        w_ref[span] = w_R[span]
    y_TD = combine_rows(y_RD, plan)

    q = quantize(x_TD, ROW)
    q_rows, _, q_plan = dispatch(q, weights_Tk, start_plan(ids_Tk, EXPERTS, axis))
    again = dispatch_rows(q, q_plan)
    ref_bytes, _ = dispatch_ref(q.data.view(torch.uint8), ids_Tk, EXPERTS, axis)
    ref_values, _ = dispatch_ref(q.dequantize(), ids_Tk, EXPERTS, axis)
    values = q_rows.dequantize()
    pads = torch.ones(groups.max_rows, dtype=torch.bool)
    for span in spans:
        pads[span] = False
    return {
        "rows": all(torch.equal(rows.data[s], r) for s, r in zip(spans, ref_rows, strict=True)),
        "counts": counts == [len(r) for r in ref_rows],
        "aligned": all(s % 128 == 0 for s in starts) and groups.max_rows % 128 == 0,
        "combine": bool(torch.allclose(y_TD, ref_y, rtol=1e-6, atol=0)) and not bool(y_TD.isnan().any()),
        "bytes": all(torch.equal(q_rows.data.view(torch.uint8)[s], r) for s, r in zip(spans, ref_bytes, strict=True)),
        "scales": all(torch.equal(values[s], r) for s, r in zip(spans, ref_values, strict=True)),
        "column_major": q_rows.scale_inv.stride(0) == 1 and q_rows.scale_inv.shape[0] == q_rows.data.shape[0],
        "pads_zero": not bool(values[pads].any()) and not bool(w_R[pads].any()),
        "again": torch.equal(again.data.view(torch.uint8), q_rows.data.view(torch.uint8)),
        "slots": torch.equal(combine_slots(w_ref, plan), weights_Tk),
    }


CASES = ("plain", "uneven", "empty_source", "idle_rank", "one_expert")
GATHERED_CASES = ("plain", "idle_rank", "one_expert")  # every rank has as many tokens


def all_layouts(rank: int, size: int) -> dict:
    results = {}
    for ep in (1, 2, 4):
        mesh = build_mesh(1, ep, dispatch="counted")
        for case in CASES:
            results[ep, case] = check_layout(rank, mesh, case)
    for ep in (2, 4):
        mesh = build_mesh(1, ep, dispatch="gathered")
        for case in GATHERED_CASES:
            results[-ep, case] = check_layout(rank, mesh, case)
    wired = build_mesh(1, 4, combine_wire=ROW)
    ids, x = routing("plain", rank, 96), torch.randn(96, D, generator=torch.Generator().manual_seed(rank))
    rows, _, plan = dispatch(Quantized.unscaled(x), torch.ones(96, K), start_plan(ids, EXPERTS, wired.ep))
    results["fp8_combine"] = ((combine_rows(rows.data, plan) - K * x).norm() / (K * x).norm()).item()
    results["no_traffic_solo"] = dict(build_mesh(1, 1).traffic.sent)

    for name, q in (("fp8", quantize(x, ROW)), ("bf16", Quantized.unscaled(x.bfloat16()))):
        mesh = build_mesh(1, 4)
        plan = dispatch(q, torch.ones(96, K), start_plan(ids, EXPERTS, mesh.ep))[2]
        results[name, "dispatch bytes"] = mesh.traffic.by_kind()["dispatch"]
        results["rows sent"] = sum(plan.send) - plan.send[mesh.ep.rank]
    return results


@pytest.fixture(scope="module")
def by_rank() -> list[dict]:
    return run_ranks(4, all_layouts)


def holds(by_rank: list[dict], check: str, cases: tuple[str, ...] = CASES) -> bool:
    failed = [
        (rank, ep, case)
        for rank, results in enumerate(by_rank)
        for ep in (1, 2, 4, -2, -4)  # below zero: gathered
        for case in cases
        if (ep, case) in results and not results[ep, case][check]
    ]
    assert not failed, f"{check} fails at (rank, ep, case) {failed}"
    return True


@pytest.mark.distributed
class TestDispatch:
    def test_rows_arrive_grouped_by_expert_in_source_and_token_order(self, by_rank: list[dict]) -> None:
        assert holds(by_rank, "rows") and holds(by_rank, "counts")

    def test_padding_really_reaches_the_block_and_is_zero(self, by_rank: list[dict]) -> None:
        assert holds(by_rank, "aligned") and holds(by_rank, "pads_zero")

    def test_combine_sums_over_slots_and_never_reads_rows_past_the_groups(self, by_rank: list[dict]) -> None:
        assert holds(by_rank, "combine")

    def test_scales_travel_with_their_bytes(self, by_rank: list[dict]) -> None:
        assert holds(by_rank, "bytes") and holds(by_rank, "scales") and holds(by_rank, "column_major")

    def test_the_backward_trip_takes_the_same_rows(self, by_rank: list[dict]) -> None:
        assert holds(by_rank, "again") and holds(by_rank, "slots")

    def test_a_rank_whose_experts_got_no_token_does_not_hang(self, by_rank: list[dict]) -> None:
        assert holds(by_rank, "rows", ("idle_rank",)) and holds(by_rank, "combine", ("idle_rank",))

    def test_a_rank_without_tokens_does_not_hang(self, by_rank: list[dict]) -> None:
        assert holds(by_rank, "rows", ("empty_source",)) and holds(by_rank, "combine", ("empty_source",))

    def test_all_tokens_to_one_expert(self, by_rank: list[dict]) -> None:
        assert holds(by_rank, "rows", ("one_expert",)) and holds(by_rank, "combine", ("one_expert",))

    def test_fp8_combine_stays_within_two_roundings(self, by_rank: list[dict]) -> None:
        assert all(0 < r["fp8_combine"] < 2**-4 for r in by_rank)

    def test_fp8_dispatch_is_at_most_0_53_of_bf16_on_the_wire(self, by_rank: list[dict]) -> None:
        for results in by_rank:
            fp8, bf16 = results["fp8", "dispatch bytes"], results["bf16", "dispatch bytes"]
            row = -(-(2 * D + 6 * K) // 16) * 16  # values, weights and ids of a row, padded to 16 bytes
            counts = 3 * 8 * (1 + EXPERTS // 4)  # to each other rank: its tokens and the rows of its experts, int64
            assert bf16 == results["rows sent"] * row + counts
            assert fp8 <= 0.53 * bf16

    def test_one_rank_sends_nothing(self, by_rank: list[dict]) -> None:
        assert all(r["no_traffic_solo"] == {} for r in by_rank)


def test_slots_without_an_expert_get_no_row() -> None:
    ids = torch.tensor([[1, -1], [-1, -1], [0, 1]])
    perm = build_permutation(ids, 2)
    assert perm.groups.counts_E.tolist() == [1, 2]
    x, w = torch.randn(3, 4), torch.rand(3, 2)
    rows = permute(Quantized.unscaled(x), perm)
    torch.testing.assert_close(unpermute_sum(rows.data, perm), x * torch.tensor([[1.0], [0.0], [2.0]]))
    torch.testing.assert_close(unpermute_slots(permute_slots(w, perm), perm), w.masked_fill(ids < 0, 0))


@pytest.mark.parametrize("count", [1, 15, 16, 17, 127, 128, 129])
def test_ragged_counts_match_a_loop(count: int) -> None:
    ids = torch.cat([torch.zeros(count), torch.full((5,), 2)]).long()[:, None]
    perm = build_permutation(ids, 4)
    assert perm.groups.counts_E.tolist() == [count, 0, 5, 0]
    x = torch.randn(count + 5, 8)
    rows, start = permute(Quantized.unscaled(x), perm).data, -(-count // 128) * 128
    assert torch.equal(rows[:count], x[:count]) and torch.equal(rows[start : start + 5], x[count:])
    assert not rows[count:start].any()


def test_no_token_at_all() -> None:
    rows, w_R, plan = dispatch(
        quantize(torch.zeros(0, 128), ROW),
        torch.zeros(0, 2),
        start_plan(torch.zeros(0, 2, dtype=torch.int64), 4, Mesh.solo().ep),
    )
    assert plan.perm.groups.counts_E.tolist() == [0, 0, 0, 0]
    assert not rows.dequantize().any() and combine_rows(rows.dequantize(), plan).shape == (0, 128)
