"""RMSNorm, SwiGLU, permute, experts and the head: outputs and every gradient against their differentiable definitions."""

from __future__ import annotations

import pytest
import torch

from fp8.activation import Activation
from fp8.cross_entropy import VocabAxis, cross_entropy_ref, head_loss, softmax_grad_ref
from fp8.grouped_gemm import make_groups, padded_rows
from fp8.linear import linear, quantize_activation
from fp8.linear_swiglu import linear_swiglu
from fp8.permute import build_permutation, permute, unpermute_sum
from fp8.quantize import quantize
from fp8.recipe import Recipe
from fp8.rms_norm import rms_norm_quantize, rms_norm_ref
from fp8.stash import Stash
from fp8.swiglu import swiglu_quantize, swiglu_ref
from fp8.weight import Weight
from model.experts import RoutedExperts, routed_experts_ref
from parallel.mesh import Axis
from tests.model.tiny import CONFIG, relative_error

# Three FP8 roundings in a row (operand, output, gradient) at 2.6-3.7 % each add up to 6 %; small samples get the rest.
BOUND = {"fp32": 1e-5, "block": 0.1}


def filled(*shape: int, recipe: Recipe, std: float = 0.1, **rest: object) -> Weight:
    weight = Weight(*shape, recipe=recipe, **rest)
    weight.set_(torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * std)
    return weight


@pytest.mark.parametrize("rebuild", [False, True])
@pytest.mark.parametrize("name", ["fp32", "block"])
def test_rms_norm_feeds_gemm_and_router_with_both_gradients(name: str, rebuild: bool) -> None:
    recipe, eps = getattr(Recipe, name)(), 1e-6
    norm, down = filled(128, recipe=Recipe.fp32(), std=1.0), filled(256, 128, recipe=recipe)
    h = torch.randn(9, 128, requires_grad=True)
    x = rms_norm_quantize(h, norm, eps, down, Stash(), "n", rebuild)
    (linear(x.edge, down).square().sum() + x.x_TD.sin().sum()).backward()
    h64, n64, w64 = (t.detach().double().requires_grad_() for t in (h, norm.data, down.q.dequantize()))
    x64 = rms_norm_ref(h64, n64, eps) if name == "fp32" else None
    if x64 is None:  # the definition in float64 (rms_norm_ref computes in fp32)
        x64 = h64 * torch.rsqrt(h64.square().mean(-1, keepdim=True) + eps) * n64
    ((x64 @ w64.t()).square().sum() + x64.sin().sum()).backward()
    assert relative_error(h.grad, h64.grad) < BOUND[name]
    assert relative_error(norm.main_grad, n64.grad) < BOUND[name]


@pytest.mark.parametrize("rebuild", [False, True])
@pytest.mark.parametrize("name", ["fp32", "block"])
def test_swiglu_then_linear(name: str, rebuild: bool) -> None:
    recipe = getattr(Recipe, name)()
    down = filled(128, 128, recipe=recipe)
    h = torch.randn(9, 256, requires_grad=True)
    linear(swiglu_quantize(h, down, Stash(), "s", rebuild), down).square().sum().backward()
    h64, w64 = h.detach().double().requires_grad_(), down.q.dequantize().double().requires_grad_()
    g, u = h64.chunk(2, -1)
    ((torch.nn.functional.silu(g) * u) @ w64.t()).square().sum().backward()
    assert relative_error(h.grad, h64.grad) < BOUND[name]
    assert relative_error(down.main_grad, w64.grad) < BOUND[name]


@pytest.mark.parametrize("frozen", [(), ("x",), ("up",), ("x", "up")], ids=str)
@pytest.mark.parametrize("rebuild", [False, True])
@pytest.mark.parametrize("name", ["fp32", "bf16", "block", "tensorwise_current"])
def test_linear_and_swiglu_as_one_function_are_bitwise_the_two(name: str, rebuild: bool, frozen: tuple[str, ...]) -> None:
    found = []
    for fused in (False, True):
        recipe, stash = getattr(Recipe, name)(), Stash()
        up, down = filled(256, 128, recipe=recipe), filled(128, 128, recipe=recipe)
        up.anchor.requires_grad = "up" not in frozen
        dtype = torch.float32 if name == "fp32" else torch.bfloat16
        x = torch.randn(9, 128, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_("x" not in frozen)
        edge, to = quantize_activation(x, up, stash), (down, stash, "s", rebuild)
        a = linear_swiglu(edge, up, *to) if fused else swiglu_quantize(linear(edge, up), *to)
        y = linear(a, down)
        y.square().sum().backward()
        found.append([y, x.grad, up.main_grad, down.main_grad])
        assert frozen == ("x", "up") or not stash.account.total, "what was kept for backward has been used"
    for one, other in zip(*found, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    assert (found[0][1] is None, found[0][2] is None) == ("x" in frozen, "up" in frozen)


@pytest.mark.parametrize("counts", [[0, 1, 15, 16], [17, 127, 128, 129], [0, 0, 0, 0], [500, 0, 0, 0]])
def test_groups_and_permutation_place_every_row(counts: list[int]) -> None:
    ids = torch.cat([torch.full((n,), e) for e, n in enumerate(counts)])[:, None].long()
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))] if len(ids) else ids
    perm = build_permutation(ids, 4)
    groups = perm.groups
    assert groups.counts_E.tolist() == counts
    assert all(start % 128 == 0 for start in groups.starts_E.tolist())
    assert groups.max_rows == padded_rows(sum(counts), 4) >= groups.ends_E[-1]
    blocks = groups.block_expert_B.tolist()
    for expert, (start, count) in enumerate(zip(groups.starts_E.tolist(), counts, strict=True)):
        assert all(blocks[b] == expert for b in range(start // 128, (start + count + 127) // 128))
    assert all(b == -1 for b in blocks[groups.ends_E[-1].item() // 128 :]), "blocks past the end belong to nobody"
    x = torch.randn(len(ids), 128)
    rows = permute(quantize(x, Recipe.block().activation), perm)
    value = rows.dequantize()
    torch.testing.assert_close(value[perm.row_Tk[:, 0]], quantize(x, Recipe.block().activation).dequantize(), rtol=0, atol=0)
    assert (value[perm.slot_R < 0] == 0).all() and (rows.scale_inv[perm.slot_R < 0] == 1).all()


def test_row_order_is_token_order_within_a_group() -> None:
    ids = torch.tensor([[1, 0], [0, 2], [1, 0]])
    perm = build_permutation(ids, 3)
    assert perm.row_Tk.tolist() == [[128, 0], [1, 256], [129, 2]]


def test_nan_code_survives_permutation() -> None:
    q = quantize(torch.randn(2, 128), Recipe.block().activation)
    q.data.view(torch.uint8)[1, 5] = 0x7F
    rows = permute(q, build_permutation(torch.tensor([[0], [1]]), 2))
    assert rows.data.view(torch.uint8)[128, 5] == 0x7F


def test_make_groups_counts_past_the_buffer_are_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="not a multiple of 128"):
        make_groups(torch.tensor([1]), 100)


def test_unpermute_sums_in_fp32() -> None:
    perm = build_permutation(torch.tensor([[0, 1, 2]]), 3)
    rows = torch.zeros(perm.groups.max_rows, 1, dtype=torch.bfloat16)
    rows[perm.row_Tk[0], 0] = torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16)
    assert unpermute_sum(rows, perm).item() == 258.0, "BF16 partial sums would stay at 256"


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("name", ["fp32", "block"])
@pytest.mark.parametrize("routing", ["spread", "one expert", "one token"])
def test_routed_experts_match_a_loop_over_experts(name: str, stage: int, routing: str) -> None:
    recipe = getattr(Recipe, name)()
    stash = Stash()
    experts = RoutedExperts(CONFIG, recipe, Axis.solo(), stash, "e", stage)
    for weight in (experts.gate_up, experts.down):
        weight.set_(torch.randn(weight.data.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    tokens = {"spread": 40, "one expert": 150, "one token": 1}[routing]
    gen = torch.Generator().manual_seed(2)
    ids = torch.rand(tokens, 8, generator=gen).topk(2, -1).indices
    if routing == "one expert":
        ids = torch.tensor([[5, 2]]).expand(tokens, 2).contiguous()
    x = torch.randn(tokens, 128, generator=gen, requires_grad=True)
    w = torch.rand(tokens, 2, generator=gen, requires_grad=True)
    dy = torch.randn(tokens, 128, generator=gen)
    experts(experts.work(quantize_activation(x, experts.gate_up, stash), experts.start(ids), w)).backward(dy)
    leaves = [t.detach().double().requires_grad_() for t in (x, w, experts.gate_up.q.dequantize(), experts.down.q.dequantize())]
    routed_experts_loop(ids, *leaves).backward(dy.double())
    for got, leaf in zip((x.grad, w.grad, experts.gate_up.main_grad, experts.down.main_grad), leaves, strict=True):
        assert relative_error(got, leaf.grad) < BOUND[name]
    idle = torch.ones(8, dtype=torch.bool).scatter_(0, ids.flatten(), False)
    assert (experts.gate_up.main_grad[idle] == 0).all() and (experts.down.main_grad[idle] == 0).all()
    assert stash.account.total == 0


def routed_experts_loop(ids: torch.Tensor, x: torch.Tensor, w: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """`routed_experts_ref` in float64 (its SwiGLU computes in fp32)."""
    y = torch.zeros_like(x)
    for e in range(w1.shape[0]):
        tokens, slots = (ids == e).nonzero(as_tuple=True)
        g, u = (x[tokens] @ w1[e].t()).chunk(2, -1)
        y = y.index_add(0, tokens, (torch.nn.functional.silu(g) * u * w[tokens, slots][:, None]) @ w2[e].t())
    return y


def test_the_shipped_expert_reference_is_the_loop() -> None:
    gen = torch.Generator().manual_seed(0)
    x, w1, w2 = (torch.randn(s, generator=gen) for s in ((6, 16), (4, 16, 16), (4, 16, 8)))
    ids, w = torch.rand(6, 4, generator=gen).topk(2, -1).indices, torch.rand(6, 2, generator=gen)
    got = routed_experts_ref(x, ids, w, w1, w2)
    want = routed_experts_loop(ids, *(t.double() for t in (x, w, w1, w2)))
    assert relative_error(got, want) < 1e-6


def head_case(recipe: Recipe) -> tuple[Weight, torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 256, (300,), generator=gen)
    labels[::7] = -100
    return filled(256, 128, recipe=recipe, std=0.3), torch.randn(300, 128, generator=gen, requires_grad=True), labels


@pytest.mark.parametrize("z", [0.0, 1e-3])
@pytest.mark.parametrize("chunk", [128, 512])
@pytest.mark.parametrize("name", ["fp32", "block"])
def test_head_loss_and_gradients(name: str, chunk: int, z: float) -> None:
    head, x, labels = head_case(getattr(Recipe, name)())
    scale = torch.tensor(1.0 / 257)
    edge = quantize_activation(x, head, Stash())
    loss, ce_sum = head_loss(edge, head, labels, scale, z, chunk)
    loss.backward()
    x64, w64 = edge.q.dequantize().double().requires_grad_(), head.q.dequantize().double().requires_grad_()
    want = cross_entropy_ref(x64, w64, labels, scale.double(), z)
    want.backward()
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    assert ce_sum.item() / 257 == pytest.approx(cross_entropy_ref(x64, w64, labels, 1 / 257).item(), rel=1e-5)
    assert relative_error(x.grad, x64.grad) < BOUND[name] and relative_error(head.main_grad, w64.grad) < BOUND[name]
    assert (x.grad[labels == -100] == 0).all()


def test_head_refuses_a_scaled_loss() -> None:
    head, x, labels = head_case(Recipe.fp32())
    loss, _ = head_loss(quantize_activation(x, head, Stash()), head, labels, torch.tensor(1.0), chunk=128)
    with pytest.raises(RuntimeError, match="do not scale"):
        (2 * loss).backward()


def test_head_without_any_valid_label_gives_zero_not_nan() -> None:
    head, x, labels = head_case(Recipe.block())
    labels = torch.full_like(labels, -100)
    loss, _ = head_loss(quantize_activation(x, head, Stash()), head, labels, torch.tensor(1.0), chunk=128)
    loss.backward()
    assert loss.item() == 0 and (x.grad == 0).all() and (head.main_grad == 0).all()


def test_softmax_gradient_is_invariant_under_a_vocabulary_split() -> None:
    logits, labels = torch.randn(10, 64) * 5, torch.randint(0, 64, (10,))
    whole = softmax_grad_ref(logits, labels, 1e-3, VocabAxis())
    halves = logits.chunk(2, 1)
    peaks = torch.stack([h.amax(-1) for h in halves]).amax(0)
    sums = sum((h - peaks[:, None]).exp().sum(-1) for h in halves)
    picked = logits.gather(1, labels[:, None])[:, 0]
    for rank, half in enumerate(halves):
        answers = iter((sums, picked))
        axis = VocabAxis(rank * 32, all_max=lambda _: peaks, all_sum=lambda _, a=answers: next(a))
        ce, z_term, grad = softmax_grad_ref(half.clone(), labels, 1e-3, axis)
        torch.testing.assert_close(ce, whole[0])
        torch.testing.assert_close(z_term, whole[1])
        torch.testing.assert_close(grad, whole[2][:, rank * 32 : rank * 32 + 32])


def test_swiglu_ref_scales_rows_by_the_routing_weight() -> None:
    h, w = torch.randn(3, 8), torch.tensor([0.0, 1.0, 2.0])
    torch.testing.assert_close(swiglu_ref(h, w), swiglu_ref(h) * w[:, None])
    assert isinstance(quantize_activation(h[:, :4].repeat(1, 32), filled(128, 128, recipe=Recipe.fp32()), Stash()), Activation)
