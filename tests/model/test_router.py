"""Router: choices, weights, counts, the bias update, and the auxiliary losses."""

from __future__ import annotations

import pytest
import torch

from fp8 import route as route_module
from fp8.permute import count_slots
from fp8.recipe import Recipe
from fp8.route import route, select_experts
from model import router as router_module
from model.loss import NumValid, count_valid
from model.moe import sequence_balance_loss
from model.router import Routing, bias_update, routers, update_expert_bias
from parallel.mesh import Axis, Mesh
from tests.model.tiny import batch, build, grads, relative_error
from tools.bench_layouts import route_evenly


def select_loop(biased: torch.Tensor, n_group: int, topk_group: int, k: int) -> list[set[int]]:
    """Group-limited top-k, token by token, as the paper words it."""
    out = []
    size = biased.shape[1] // n_group
    for row in biased.tolist():
        score = [sum(sorted(row[g * size : (g + 1) * size])[-2:]) for g in range(n_group)]
        groups = sorted(range(n_group), key=lambda g: -score[g])[:topk_group]
        candidates = [e for g in groups for e in range(g * size, (g + 1) * size)]
        out.append(set(sorted(candidates, key=lambda e: -row[e])[:k]))
    return out


def test_selection_matches_the_loop_with_negative_biased_scores() -> None:
    biased = torch.rand(200, 16) - 0.9  # mostly negative: a mask of 0 instead of -inf would pick masked experts
    got = select_experts(biased, 4, 2, 4)
    assert [set(row) for row in got.tolist()] == select_loop(biased, 4, 2, 4)


def test_bias_steers_the_choice_but_not_the_weights() -> None:
    model = build(Recipe.fp32())
    router = model.layers[1].block.router
    seen: list[Routing] = []
    router.register_forward_hook(lambda _, __, out: seen.append(out))
    tokens, labels = batch()
    router.expert_bias[3] = 10.0
    model(tokens, labels, count_valid(tokens, labels))
    routing = seen[0]
    assert (routing.ids_Tk == 3).any(-1).all()
    chosen = routing.logits_TE.sigmoid().gather(1, routing.ids_Tk)
    torch.testing.assert_close(routing.weights_Tk, chosen / chosen.sum(-1, keepdim=True) * 2.5)


def test_bias_update_is_zero_mean_and_follows_the_sign_rule() -> None:
    counts = torch.tensor([10, 0, 2, 4])
    new = bias_update(torch.zeros(4), counts, 1e-3)
    torch.testing.assert_close(new, 1e-3 * (torch.tensor([-1.0, 1, 1, 0]) - 0.25))
    assert torch.equal(bias_update(new, torch.zeros(4, dtype=torch.int64), 1e-3), new)


def test_bias_update_counts_are_integers() -> None:
    """Around 40,000 BF16 counts are 256 apart: 40,001 and 39,999 would both be 'balanced'."""
    counts = torch.tensor([40001, 39999])
    assert torch.equal(bias_update(torch.zeros(2), counts, 1.0), torch.tensor([-1.0, 1.0]))


def test_bias_and_counts_survive_a_cast_to_bf16() -> None:
    model = build(Recipe.fp32()).to(torch.bfloat16)
    for _, router in routers(model):
        assert router.expert_bias.dtype == torch.float32 and router.counts.dtype == torch.int64


def test_bias_moves_once_a_step_from_all_micro_batches_and_training_only() -> None:
    tokens, labels = batch(rows=4)
    valid = count_valid(tokens, labels)
    whole, cut = build(Recipe.fp32()), build(Recipe.fp32())
    whole(tokens, labels, valid)
    for part in range(4):
        cut(tokens[part : part + 1], labels[part : part + 1], valid)
    with torch.no_grad():
        cut.eval()(tokens, labels, valid)
    for (name, a), (_, b) in zip(routers(whole), routers(cut), strict=True):
        assert torch.equal(a.counts, b.counts), name
        assert a.counts.sum() == 4 * 64 * 2
    update_expert_bias(whole, Mesh.solo().dp, 1e-3)
    for _, router in routers(whole):
        assert router.counts.sum() == 0 and router.expert_bias.abs().max() > 0
        assert abs(router.expert_bias.mean()) < 1e-9
    assert len(list(routers(whole))) == 2, "the MTP layer's router is among them"


def test_choices_are_counted_where_somebody_asks_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in layers recomputed or evaluated: at ep > 1 nobody reads it, at ep = 1 the permutation counts what it needs."""
    asked: list[torch.Tensor] = []

    def counted(ids_Tk: torch.Tensor, num_experts: int, sums_E: torch.Tensor) -> None:
        asked.append(ids_Tk)
        return count_slots(ids_Tk, num_experts, sums_E)

    monkeypatch.setattr(route_module, "count_slots", counted)
    monkeypatch.setattr(router_module, "route", route)
    logits, bias, counts = torch.randn(50, 16), torch.zeros(16), torch.full((16,), 2)
    ids = route(logits, bias, 4, 2, 4, 2.5)[0]
    assert not asked
    route(logits, bias, 4, 2, 4, 2.5, None, counts)
    assert len(asked) == 1 and torch.equal(counts - 2, torch.bincount(ids.flatten(), minlength=16))

    route_evenly(16)  # what `bench step --routing even` has instead
    counts.zero_()
    even = router_module.route(logits, bias, 4, 2, 4, 2.5, None, counts)[0]
    assert len(asked) == 1 and counts.sum() == 16 * (ids.numel() // 16) and not torch.equal(even, ids)


def test_main_loss_trains_the_router() -> None:
    model = build(Recipe.fp32(), router_z_loss_weight=0.0)
    tokens, labels = batch()
    model(tokens, labels, count_valid(tokens, labels)).total.backward()
    assert grads(model)["layers.1.block.router.weight"].norm() > 0


@pytest.mark.parametrize("kind", ["aux_loss_weight", "router_z_loss_weight"])
def test_auxiliary_gradient_is_real_and_linear_in_its_coefficient(kind: str) -> None:
    """CE off (its count infinite): the router still has a gradient, and it doubles with the coefficient."""
    tokens, labels = batch()
    found = []
    for weight in (1e-2, 2e-2):
        model = build(Recipe.fp32(), **{"router_z_loss_weight": 0.0, "aux_loss_weight": 0.0, kind: weight})
        valid = NumValid(torch.tensor(float("inf")), torch.tensor(float("inf")), torch.tensor(tokens.numel()))
        model(tokens, labels, valid).total.backward()
        found.append(grads(model)["layers.1.block.router.weight"])
    assert found[0].norm() > 0
    assert relative_error(found[1], 2 * found[0]) < 1e-5


@pytest.mark.parametrize("kind", ["aux_loss_weight", "router_z_loss_weight"])
def test_auxiliary_losses_do_not_depend_on_micro_batching(kind: str) -> None:
    tokens, labels = batch(rows=4)
    valid, results = count_valid(tokens, labels), []
    for parts in (1, 2, 4):
        model = build(Recipe.fp32(), **{kind: 1e-2})
        aux = 0.0
        for t, y in zip(tokens.chunk(parts), labels.chunk(parts), strict=True):
            losses = model(t, y, valid)
            losses.total.backward()
            aux += losses.aux_loss.item()
        results.append((aux, grads(model)["layers.1.block.router.weight"]))
    for aux, grad in results[1:]:
        assert aux == pytest.approx(results[0][0], rel=1e-5)
        assert relative_error(grad, results[0][1]) < 1e-5


def balance_loss(ids_Tk: torch.Tensor, logits_TE: torch.Tensor) -> float:
    """The balance loss of one sequence."""
    routing = Routing(ids_Tk, torch.ones(ids_Tk.shape), logits_TE.logsumexp(-1), logits_TE)
    return sequence_balance_loss(routing, seq_len=len(ids_Tk), tp=Axis.solo()).item()


@pytest.mark.parametrize("num_experts", [8, 16])
def test_balance_loss_is_one_when_balanced_however_many_experts(num_experts: int) -> None:
    ids = torch.arange(2 * num_experts).remainder(num_experts).view(num_experts, 2)
    assert balance_loss(ids, torch.zeros(num_experts, num_experts)) == pytest.approx(1.0, abs=1e-6)
    # one expert preferred by every token and chosen in every first slot: f = E / 2 there, P its share of the scores
    skewed = torch.zeros(num_experts, num_experts)
    skewed[:, 0] = 100.0
    share = 1 / (1 + 0.5 * (num_experts - 1))
    others = (1 - share) * num_experts / (2 * (num_experts - 1))
    ids = torch.stack([torch.zeros(num_experts - 1), torch.arange(1, num_experts)], dim=1).long()
    assert balance_loss(ids, skewed[1:]) == pytest.approx(share * num_experts / 2 + others, rel=1e-5)


@pytest.mark.parametrize("logit", [0.0, -69.0, -200.0])
def test_balance_loss_stays_at_least_one_for_vanishing_scores(logit: float) -> None:
    """Scores near 1e-30 (logits of -69), and such as underflow to zero, weigh as their ratios say."""
    ids = torch.arange(8).view(4, 2).repeat(2, 1)
    assert 1 - 1e-5 <= balance_loss(ids, torch.full((8, 8), logit)) <= 1 + 1e-5
    scores = logit + torch.linspace(0, 3, 8)
    top = scores.topk(2).indices.expand(8, 2)  # every token to the two largest: f and P are sorted alike
    assert 1 - 1e-5 <= balance_loss(top, scores.expand(8, 8)) < float("inf")


def test_a_large_embedding_spreads_the_tokens_of_a_new_model() -> None:
    """With all matrices alike, what attention adds to every token outweighs the embedding: tokens look the same to a router."""
    busiest = {}
    for std in (None, 1.0):
        model = build(Recipe.fp32(), num_hidden_layers=4, num_experts=32, embedding_init_std=std)
        tokens, labels = batch(rows=4, seq_len=128)
        model(tokens, labels, count_valid(tokens, labels))
        loads = [router.counts.max() / router.counts.double().mean() for name, router in routers(model) if "mtp" not in name]
        busiest[std] = torch.stack(loads).mean().item()
    assert busiest[1.0] < 0.6 * busiest[None], busiest
