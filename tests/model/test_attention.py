"""Attention: documents do not leak, the cache equals the full forward."""

from __future__ import annotations

import pytest
import torch

from fp8.qk_norm_rope import apply_rope
from fp8.recipe import Recipe
from model.attention import KVCache, attend, rope_tables
from model.loss import count_valid, mtp_inputs
from tests.model.tiny import batch, build, grads


def packed() -> dict[str, torch.Tensor]:
    """Two rows of 64: documents of 20 + 44 and of 64 tokens; labels at document ends are ignored."""
    tokens, labels = batch()
    positions = torch.stack([torch.cat([torch.arange(20), torch.arange(44)]), torch.arange(64)])
    labels = labels.clone()
    labels[0, 19] = -100
    cu = torch.tensor([0, 20, 64, 128], dtype=torch.int32)
    return dict(tokens_BS=tokens, labels_BS=labels, positions_BS=positions, cu_seqlens=cu, max_seqlen=64)


def test_packed_documents_do_not_leak() -> None:
    """Changing document A moves neither the loss of B nor any gradient that only B makes: attention, MTP input, labels."""
    model = build(Recipe.fp32())
    data = packed()
    only_b = data["labels_BS"].clone()
    only_b[0, :20] = -100
    results = []
    for change in (0, 7):
        args = {**data, "labels_BS": only_b}
        args["tokens_BS"] = data["tokens_BS"].clone()
        args["tokens_BS"][0, :20] = (args["tokens_BS"][0, :20] + change) % 512
        valid = count_valid(args["tokens_BS"], only_b, data["positions_BS"])
        for weight in (model.head, model.layers[0].attention.qkv):
            weight.clear_grad()
        losses = model(num_valid=valid, **args)
        losses.total.backward()
        results.append((losses.ce_sum.item(), losses.mtp_sum.item(), grads(model)["head"], valid.mtp.item()))
    assert results[0][:2] == results[1][:2]
    assert results[0][3] == results[1][3] == 43 + 63
    torch.testing.assert_close(results[0][2], results[1][2], rtol=0, atol=1e-7)


def test_isolated_documents_equal_separate_forwards() -> None:
    model = build(Recipe.fp32(), router_z_loss_weight=0.0)
    data = packed()
    valid = count_valid(data["tokens_BS"], data["labels_BS"], data["positions_BS"])
    together = model(num_valid=valid, **data)
    ce = mtp = 0.0
    for row, cut in ((0, slice(0, 20)), (0, slice(20, 64)), (1, slice(0, 64))):
        tokens, labels = data["tokens_BS"][row : row + 1, cut], data["labels_BS"][row : row + 1, cut]
        alone = model(tokens, labels, count_valid(tokens, labels))
        ce, mtp = ce + alone.ce_sum.item(), mtp + alone.mtp_sum.item()
    assert together.ce_sum.item() == pytest.approx(ce, rel=1e-5)
    assert together.mtp_sum.item() == pytest.approx(mtp, rel=1e-5)


def test_mtp_never_crosses_rows_or_documents() -> None:
    data = packed()
    tokens, labels, positions = data["tokens_BS"], data["labels_BS"], data["positions_BS"]
    next_tokens, mtp_labels = mtp_inputs(tokens, labels, positions)
    assert next_tokens[0, 19] == 0 and mtp_labels[0, 19] == -100 and mtp_labels[0, 18] == -100
    assert (mtp_labels[:, -1] == -100).all(), "a row's last position was scored against the next row"
    assert torch.equal(next_tokens[1, :-1], tokens[1, 1:]) and next_tokens[1, -1] == labels[1, -1]
    assert torch.equal(mtp_labels[1, :-1], labels[1, 1:])


@pytest.mark.parametrize("recipe", ["fp32", "block"])
def test_cache_logits_equal_the_full_forward_for_each_prefix(recipe: str) -> None:
    model = build(getattr(Recipe, recipe)()).eval()
    tokens, _ = batch(rows=2, seq_len=12)
    full = model.logits(tokens)
    cache, start = KVCache(), 0
    for size in (5, 1, 1, 3, 2):
        part = model.logits(tokens[:, start : start + size], cache)
        torch.testing.assert_close(part, full[:, start : start + size], rtol=1e-4, atol=1e-4)
        start += size
    assert cache.length == 12


def test_rope_turns_half_of_each_head_by_the_published_angles() -> None:
    cos, sin = rope_tables(torch.tensor([0, 3]), 4, 10000.0, torch.float32)
    x = torch.arange(8.0).view(1, 1, 8).expand(2, 1, 8)
    y = apply_rope(x, cos, sin)
    assert torch.equal(y[0], x[0]) and torch.equal(y[:, :, 4:], x[:, :, 4:])
    angle = torch.tensor([3.0, 3.0 / 100])  # theta^(-2i/4): the exponent runs over the rotary dimension, not the head's
    first, second, cos, sin = x[1, 0, :2], x[1, 0, 2:4], angle.cos(), angle.sin()
    want = torch.cat([first * cos - second * sin, second * cos + first * sin])
    torch.testing.assert_close(y[1, 0, :4], want)


def test_grouped_query_attention_repeats_key_heads() -> None:
    q, k, v = torch.randn(1, 9, 4, 8), torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 8)
    got = attend(q, k, v, None)
    want = attend(q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2), None)
    torch.testing.assert_close(got, want)
