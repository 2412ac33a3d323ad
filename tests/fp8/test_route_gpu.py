"""Routing kernels against the reference, and the router's GEMMs against float64."""

import pytest
import torch

from fp8 import index_kernels
from fp8 import route_kernels as kernels
from fp8.route import route_ref
from fp8.route_forward_kernel import route
from fp8.router_gemm import router_dgrad, router_gemm, router_wgrad
from tests.fp8.kernel_checks import DEVICE, INTERPRETED, marks, randn

pytestmark = marks
SIZES = [(37, 32, 8, 4, 4), (5, 16, 1, 1, 3)] + ([] if INTERPRETED else [(4096, 256, 8, 4, 8), (1001, 64, 8, 2, 6)])
FACTOR = 2.5


@pytest.mark.parametrize("tokens, experts, groups, topk_group, k", SIZES)
def test_choice_weights_counts_and_gradient(tokens: int, experts: int, groups: int, topk_group: int, k: int) -> None:
    logits = torch.randn(tokens, experts, device=DEVICE).requires_grad_()
    bias = torch.randn(experts, device=DEVICE) * 0.1
    counts = torch.full((experts,), 7, dtype=torch.int64, device=DEVICE)
    ids, weights, lse = route(logits.detach(), bias, groups, topk_group, k, FACTOR)
    index_kernels.count(ids, experts, counts)
    want_ids, want_weights, want_lse = route_ref(logits, bias, groups, topk_group, k, FACTOR)
    same = (ids == want_ids).all(1)
    assert same.float().mean() > 0.998  # scores may differ in their last bit, so near ties may fall the other way
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


@pytest.mark.skipif(INTERPRETED, reason="the products are library calls on a GPU")
def test_gemms_have_fp32_accuracy() -> None:
    x, w, dy = randn(4096, 2048), randn(256, 2048, dtype=torch.float32, scale=0.02), randn(4096, 256, dtype=torch.float32)
    x64, w64, dy64 = x.double(), w.double(), dy.double()

    def error(got: torch.Tensor, want: torch.Tensor) -> float:
        return ((got.double() - want).norm() / want.norm()).item()

    # tensor cores drop bits of long sums that IEEE FP32 keeps (2e-6 measured); TF32 is at 3e-4
    assert error(router_gemm(x, w), x64 @ w64.t()) < 5e-6
    assert error(router_wgrad(dy, x), dy64.t() @ x64) < 5e-6
    exact = (dy64 @ w64).bfloat16()
    assert error(router_dgrad(dy, w, torch.bfloat16), exact) < 1e-3  # a few values near a BF16 tie round the other way
