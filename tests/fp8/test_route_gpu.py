"""Routing kernels against the reference, and the router's GEMMs against float64."""

import pytest
import torch

from fp8 import index_kernels
from fp8 import route_kernels as kernels
from fp8 import router_gemm as router_gemm_module
from fp8.route import route_ref
from fp8.route_forward_kernel import route
from fp8.router_gemm import router_dgrad, router_gemm, router_wgrad
from fp8.router_gemm_kernel import product
from tests.fp8.kernel_checks import DEVICE, INTERPRETED, marks, randn

pytestmark = marks
SIZES = [(37, 32, 8, 4, 4), (5, 16, 1, 1, 3), (1, 32, 8, 4, 4), (3, 16, 4, 4, 16)]
SIZES += [] if INTERPRETED else [(4096, 256, 8, 4, 8), (1001, 64, 8, 2, 6)]
FACTOR = 2.5
# How far (score + bias) below 2 of kernel and reference lie apart, in 2^-24, for |logit| <= 6. Kernel: 1.2 from e^-x (its argument
# rounded twice, ex2.approx within 2^-22; times s (1 - s)), 1 from 1 + e^-x, 2 from rcp.approx (2^-23), 1 from the bias. Reference:
# 1 from e^-x (2 ulp), 1, 1 from the division, 1. So the i-th best of one lies within twice that of the i-th best of the other; sums
# of two, which are below 4 and rounded once more, within twice that again.
APART = 9.2 * 2.0**-24
SCORES_APART, GROUPS_APART = 2 * APART, 2 * (2 * APART + 2 * 2.0**-23)


def chosen_within_rounding(ids: torch.Tensor, biased_TE: torch.Tensor, groups: int, topk_group: int) -> torch.Tensor:
    """[T]: whether ids [T, k], best first, are a choice by the reference's fp32 (score + bias), but for near ties.

    The groups chosen from, and the best of those that nothing was chosen from, must be the best groups; in them, the i-th chosen
    must have the i-th best score.
    """
    biased = biased_TE.double()
    grouped = biased.unflatten(1, (groups, -1))
    score = grouped.topk(2, dim=2).values.sum(2)
    taken = torch.zeros_like(score, dtype=torch.bool).scatter_(1, ids // grouped.shape[2], True)
    kept = torch.zeros_like(taken).scatter_(1, (score + 1e3 * taken).topk(topk_group, dim=1).indices, True)
    infinity = float("inf")
    missed = score.masked_fill(kept, -infinity).amax(1) - score.masked_fill(~kept, infinity).amin(1)
    best = grouped.masked_fill(~kept[:, :, None], -infinity).flatten(1).topk(ids.shape[1], dim=1).values
    right = (biased.gather(1, ids) - best).abs().amax(1) <= SCORES_APART
    distinct = ids.sort(dim=1).values.diff(dim=1).ne(0).all(1)
    return right & distinct & (missed <= GROUPS_APART) & (taken.sum(1) <= topk_group)


@pytest.mark.parametrize("tokens, experts, groups, topk_group, k", SIZES)
def test_choice_weights_counts_and_gradient(tokens: int, experts: int, groups: int, topk_group: int, k: int) -> None:
    logits = torch.randn(tokens, experts, device=DEVICE).requires_grad_()
    bias = torch.randn(experts, device=DEVICE) * 0.1
    counts = torch.full((experts,), 7, dtype=torch.int64, device=DEVICE)
    ids, weights, lse = route(logits.detach(), bias, groups, topk_group, k, FACTOR)
    index_kernels.count(ids, experts, counts)
    want_ids, want_weights, want_lse = route_ref(logits, bias, groups, topk_group, k, FACTOR)
    same = (ids == want_ids).all(1)
    assert chosen_within_rounding(ids, logits.detach().sigmoid() + bias, groups, topk_group).all()
    assert same.float().mean() > 0.998  # near ties are few
    torch.testing.assert_close(weights[same], want_weights[same].detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, want_lse.detach(), rtol=1e-6, atol=1e-5)
    assert torch.equal(counts - 7, torch.bincount(ids.flatten(), minlength=experts))

    dweights, dlse = torch.randn(tokens, k, device=DEVICE), torch.randn(tokens, device=DEVICE)
    got = kernels.route_backward(logits.detach(), ids, lse, dweights, dlse, FACTOR)
    (want,) = torch.autograd.grad((want_weights, want_lse), logits, (dweights, dlse))
    torch.testing.assert_close(got[same], want[same], rtol=1e-4, atol=1e-6)

    args = logits.detach(), ids, lse, dweights, dlse, FACTOR
    assert torch.equal(kernels.route_backward(*args, parts=True), kernels.split_bf16(got, (0, 1, 0, 2), along_rows=False))
    plus = torch.randn(tokens, experts, device=DEVICE)
    assert torch.equal(kernels.route_backward(*args, plus), got + plus)
    both = kernels.split_bf16(got + plus, (0, 1, 0, 2), along_rows=False)
    assert torch.equal(kernels.route_backward(*args, plus, parts=True), both)


def choice(biased_TE: torch.Tensor, groups: int, topk_group: int, k: int) -> torch.Tensor:
    """The k best within the best groups, ties to the lower id everywhere."""
    grouped = biased_TE.unflatten(1, (groups, -1))
    score = grouped.sort(dim=2, descending=True, stable=True).values[:, :, :2].sum(2)
    best = score.sort(dim=1, descending=True, stable=True).indices[:, :topk_group]
    keep = torch.zeros_like(score, dtype=torch.bool).scatter_(1, best, True)
    masked = grouped.masked_fill(~keep[:, :, None], float("-inf")).flatten(1)
    return masked.sort(dim=1, descending=True, stable=True).indices[:, :k]


def test_near_ties_pass_and_no_other_choice_does() -> None:
    """Logits an ulp off, as another way to compute them has it, choose others among ties: of experts, and of whole groups."""
    groups, topk_group, k = 8, 4, 6
    logits, bias = torch.randn(500, 32, device=DEVICE), torch.zeros(32, device=DEVICE)
    logits[:, 4:8] = logits[:, :4]  # the first two groups are equal
    logits[:, 9] = logits[:, 8]
    ways = torch.where(torch.rand_like(logits) < 0.5, -1.0, 1.0) * float("inf")
    biased = logits.sigmoid() + bias
    want, other = choice(biased, groups, topk_group, k), choice(logits.nextafter(ways).sigmoid() + bias, groups, topk_group, k)
    assert (want != other).any(1).sum() > 50
    assert chosen_within_rounding(want, biased, groups, topk_group).all()
    assert chosen_within_rounding(other, biased, groups, topk_group).all()
    assert not chosen_within_rounding(want.flip(1), biased, groups, topk_group).any()

    def refused(ids: torch.Tensor) -> int:
        unlike = (biased.gather(1, ids) - biased.gather(1, want)).abs().amax(1) > 1e-4
        assert not chosen_within_rounding(ids, biased, groups, topk_group)[unlike].any()
        return int(unlike.sum())

    next_best = torch.cat([want[:, :-1], choice(biased, groups, topk_group, k + 1)[:, -1:]], 1)
    assert refused(next_best) > 400
    assert refused(choice(biased, groups, groups, k)) > 200  # of all groups
    assert refused(choice(biased, groups, topk_group - 1, k)) > 100
    same_twice = torch.cat([want[:, :-1], want[:, :1]], 1)
    assert not chosen_within_rounding(same_twice, biased, groups, topk_group).any()


@pytest.mark.parametrize("tokens, experts, groups, topk_group, k", SIZES)
def test_ties_go_to_the_lower_id(tokens: int, experts: int, groups: int, topk_group: int, k: int) -> None:
    logits = (2 * torch.randn(tokens, experts, device=DEVICE)).round()
    logits[0] = 0
    ids = route(logits, torch.zeros(experts, device=DEVICE), groups, topk_group, k, FACTOR)[0]
    assert torch.equal(ids, choice(logits.sigmoid(), groups, topk_group, k))


@pytest.mark.parametrize("low", [0.0, -3.0])
@pytest.mark.parametrize("tokens, experts, groups, topk_group, k", SIZES)
def test_scores_that_differ_in_their_last_bits(tokens: int, experts: int, groups: int, topk_group: int, k: int, low: float) -> None:
    """The keys cut those bits off, and negative scores order the other way round in theirs."""
    bias = low + torch.randint(0, 200, (experts,), device=DEVICE) * 2.0**-22
    logits = torch.zeros(tokens, experts, device=DEVICE)
    ids, weights, _ = route(logits, bias, groups, topk_group, k, FACTOR)
    assert torch.equal(ids, choice(logits.sigmoid() + bias, groups, topk_group, k))
    torch.testing.assert_close(weights, torch.full_like(weights, FACTOR / k))


def test_nan_is_seen_and_ids_stay_distinct() -> None:
    logits = torch.randn(9, 16, device=DEVICE)
    logits[2], logits[5, 3] = float("nan"), float("nan")
    ids, weights, lse = route(logits, torch.zeros(16, device=DEVICE), 4, 2, 3, FACTOR)
    assert weights[2].isnan().all() and lse[[2, 5]].isnan().all() and lse.isnan().sum() == 2
    assert ((ids >= 0) & (ids < 16)).all() and all(len(set(row)) == 3 for row in ids.tolist())


def test_split_is_exact() -> None:
    x = torch.randn(37, 32, device=DEVICE) * torch.exp2(torch.randint(-20, 20, (37, 32), device=DEVICE).float())
    rows = kernels.split_bf16(x, (2, 1, 0, 0), along_rows=True).float().view(4, 37, 32)
    columns = kernels.split_bf16(x, (0, 1, 0, 2), along_rows=False).float().view(37, 4, 32)
    assert torch.equal(rows[0] + rows[1] + rows[2], x) and torch.equal(rows[3], rows[2])
    assert torch.equal(columns[:, 3] + columns[:, 1] + columns[:, 0], x) and torch.equal(columns[:, 2], columns[:, 0])


@pytest.mark.parametrize("along_rows", [False, True])
def test_sum_of_parts(along_rows: bool) -> None:
    parts = [torch.randn(37, 32, device=DEVICE) for _ in range(3)]
    got = kernels.sum_parts(torch.cat(parts, 0 if along_rows else 1), along_rows)
    assert torch.equal(got, (parts[0] + parts[1]) + parts[2])


SHAPES = [(1, 72, 128), (300, 2048, 384), (129, 256, 64)]  # the last one's product is the library's
SHAPES += [] if INTERPRETED else [(4096, 2048, 256)]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("tokens, dim, experts", SHAPES)
def test_gemms_have_fp32_accuracy(tokens: int, dim: int, experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter the library's products of BF16 parts are those of a CPU, and the kernel for Hopper has its own test."""
    if INTERPRETED:
        monkeypatch.setattr(router_gemm_module, "splits", lambda x: True)
        exact = lambda a, b, out_dtype=None: (a.float() @ b.float()).to(out_dtype or a.dtype)  # noqa: E731
        monkeypatch.setattr(torch, "mm", exact)
    x, w = randn(tokens, dim), randn(experts, dim, dtype=torch.float32, scale=0.02)
    dy = randn(tokens, experts, dtype=torch.float32)
    x64, w64, dy64 = x.double(), w.double(), dy.double()
    # tensor cores drop bits of long sums that IEEE FP32 keeps (2e-6 measured); TF32 is at 3e-4
    assert error(router_gemm(x, w), x64 @ w64.t()) < 5e-6
    assert error(router_wgrad(dy, x), dy64.t() @ x64) < 5e-6
    got = router_dgrad(dy, w, torch.bfloat16, router_gemm_module.split_gradient(dy) if INTERPRETED else None)
    assert error(got, dy64 @ w64) < 2**-9  # half a step of BF16
    if tokens * dim > 10_000:
        assert error(got, (dy64 @ w64).bfloat16()) < 1e-3  # a few values near a BF16 tie round the other way


@pytest.mark.skipif(not INTERPRETED, reason="the test above runs it")
@pytest.mark.parametrize("tokens, dim, experts", [(1, 72, 128), (130, 328, 256)])
def test_product_of_three_parts(tokens: int, dim: int, experts: int) -> None:
    """Rows and a depth that are no whole tiles. In FP32: the interpreter multiplies BF16 as the integers it keeps it in."""
    x, w = randn(tokens, dim), randn(experts, dim, dtype=torch.float32, scale=0.02)
    parts = kernels.split_bf16(w, (2, 1, 0, 0), along_rows=True)
    assert error(product(x.float(), parts.float(), experts), x.double() @ w.double().t()) < 1e-6


@pytest.mark.skipif(not INTERPRETED, reason="of a CPU")
@pytest.mark.parametrize("tokens, dim, experts", SHAPES)
def test_gemms_in_ieee_fp32(tokens: int, dim: int, experts: int) -> None:
    x, w = randn(tokens, dim), randn(experts, dim, dtype=torch.float32, scale=0.02)
    dy = randn(tokens, experts, dtype=torch.float32)
    assert error(router_gemm(x, w), x.double() @ w.double().t()) < 1e-6
    assert error(router_wgrad(dy, x), dy.double().t() @ x.double()) < 1e-6
    assert error(router_dgrad(dy, w, torch.float32), dy.double() @ w.double()) < 1e-6
