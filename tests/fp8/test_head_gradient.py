"""What FP8 loses of dlogits: a label's p - 1 shares its tile with probabilities of 1e-6."""

from __future__ import annotations

import torch

from fp8.cross_entropy import VocabAxis, softmax_grad_ref
from fp8.quantize import quantize, quantize_t
from fp8.recipe import Recipe

SPEC = Recipe.block().gradient


def skewed(tokens: int = 256, vocab: int = 4096) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a model that knows something: label at about 0.4, a few rivals, the rest around 1e-6 to 1e-5."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(tokens, vocab, generator=generator)
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    rivals = torch.randint(0, vocab, (tokens, 4), generator=generator)
    logits.scatter_(1, rivals, 11.0)
    logits[torch.arange(tokens), labels] = 12.0
    return logits, labels


def test_little_mass_is_lost_beside_the_label() -> None:
    logits, labels = skewed()
    _, _, grad = softmax_grad_ref(logits, labels, 0.0, VocabAxis())
    got = quantize(grad, SPEC).dequantize()
    onehot = torch.nn.functional.one_hot(labels, logits.shape[1]).bool()
    mass, kept = grad.masked_fill(onehot, 0).sum(1), got.masked_fill(onehot, 0).sum(1)
    flushed = (got == 0) & (grad != 0)
    # beside 1, E4M3 with a power-of-two scale ends at 2^-18: 127 neighbours of a label lose at most 127 * 2^-19 of the mass
    assert (grad * flushed).sum(1).max() <= 127 * 2**-19 + 5 * 127 * 2**-19
    assert ((kept - mass).abs() / mass).max() < 2**-4
    assert got.sum(1).abs().max() < 2**-4  # the exact gradient sums to zero


def test_dx_and_dw_against_the_exact_gradient() -> None:
    logits, labels = skewed()
    _, _, grad = softmax_grad_ref(logits, labels, 0.0, VocabAxis())
    generator = torch.Generator().manual_seed(1)
    w, x = torch.randn(logits.shape[1], 64, generator=generator), torch.randn(logits.shape[0], 64, generator=generator)
    rows, columns = quantize(grad, SPEC).dequantize(), quantize_t(grad, SPEC).dequantize()
    for got, want in ((rows @ w, grad @ w), (columns @ x, grad.t() @ x)):
        assert (got - want).norm() / want.norm() < 2**-4  # half an E4M3 step: the few large entries share a value


def test_columns_without_a_label_keep_their_own_scale() -> None:
    logits, labels = skewed()
    _, _, grad = softmax_grad_ref(logits, labels, 0.0, VocabAxis())
    unused = torch.ones(logits.shape[1], dtype=torch.bool)
    unused[labels] = False
    got = quantize_t(grad, SPEC).dequantize()[unused]
    want = grad.t()[unused]
    assert (got - want).norm() / want.norm() < 2**-4
