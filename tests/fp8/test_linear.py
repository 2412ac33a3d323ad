"""Linear: output and both gradients against float64, under each recipe; the FP8 bound comes from the format's epsilon."""

from __future__ import annotations

import pytest
import torch

from fp8.linear import linear, linear_ref, quantize_activation
from fp8.recipe import Recipe
from fp8.stash import Stash
from fp8.weight import Weight

# Rounding to e4m3 is uniform within +-2^-4 of a value: rms 2^-4 / sqrt(3) * (mean over a binade) = 2.6 %. A product of two is
# sqrt(2) times that, 3.7 %, and power-of-two scales cost range, not mantissa. 6 % leaves room for small samples.
BOUND = {"fp32": 1e-6, "bf16": 2**-8, "block": 0.06}


def run(recipe: Recipe, tokens: int, features: int, outputs: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """{what: (got, exact float64)} of y, dx and dw."""
    gen = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, features, generator=gen, requires_grad=True)
    w = torch.randn(outputs, features, generator=gen) * 0.05
    dy = torch.randn(tokens, outputs, generator=gen) * 1e-4
    weight = Weight(outputs, features, recipe=recipe)
    weight.set_(w)
    y = linear(quantize_activation(x, weight, Stash()), weight)
    y.backward(dy)
    x64, w64 = x.detach().double().requires_grad_(), w.double().requires_grad_()
    y64 = linear_ref(x64, w64)
    y64.backward(dy.double())
    return {"y": (y, y64), "dx": (x.grad, x64.grad), "dw": (weight.main_grad, w64.grad)}


@pytest.mark.parametrize("tokens", [1, 15, 127, 128, 129, 300])
@pytest.mark.parametrize("name", ["fp32", "bf16", "block"])
def test_output_and_gradients(name: str, tokens: int) -> None:
    for what, (got, want) in run(getattr(Recipe, name)(), tokens, 256, 128).items():
        error = (got.double() - want).norm() / want.norm()
        assert error < BOUND[name], (what, error)


def test_frozen_input_still_yields_weight_gradients() -> None:
    weight = Weight(128, 128, recipe=Recipe.block())
    weight.set_(torch.randn(128, 128))
    x = torch.randn(8, 128)
    linear(quantize_activation(x, weight, Stash()), weight).sum().backward()
    assert weight.main_grad.norm() > 0


def test_frozen_weight_passes_gradients_and_keeps_none() -> None:
    weight = Weight(128, 128, recipe=Recipe.block())
    weight.set_(torch.randn(128, 128))
    weight.anchor.requires_grad_(False)
    x = torch.randn(8, 128, requires_grad=True)
    linear(quantize_activation(x, weight, Stash()), weight).sum().backward()
    assert weight.main_grad is None and x.grad.norm() > 0


def test_two_consumers_of_one_edge_sum_their_gradients() -> None:
    """The gradient carrier: what autograd would lose on an FP8 edge."""
    stash, recipe = Stash(), Recipe.block()
    one, two = Weight(128, 128, recipe=recipe), Weight(256, 128, recipe=recipe)
    one.set_(torch.randn(128, 128))
    two.set_(torch.randn(256, 128))
    grads = []
    for consumers in ((one,), (two,), (one, two)):
        x = torch.randn(8, 128, generator=torch.Generator().manual_seed(0)).requires_grad_()
        edge = quantize_activation(x, one, stash)
        sum(linear(edge, w).sum() for w in consumers).backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[2], grads[0] + grads[1])
    assert stash.account.total == 0


def test_large_gradients_are_not_clipped_on_the_edge() -> None:
    """Behind an e4m3 output autograd would hand a gradient of 1000 on as 448."""
    weight = Weight(128, 128, recipe=Recipe.block())
    weight.set_(torch.eye(128))
    x = torch.ones(4, 128, requires_grad=True)
    linear(quantize_activation(x, weight, Stash()), weight).backward(torch.full((4, 128), 1000.0))
    torch.testing.assert_close(x.grad, torch.full((4, 128), 1000.0), rtol=2**-4, atol=0)


def test_main_grad_is_fp32_and_accumulates_256_plus_1() -> None:
    """A BF16 round trip would lose the one."""
    weight = Weight(128, 128, recipe=Recipe.bf16())
    weight.set_(torch.zeros(128, 128))
    for value in (256.0, 1.0):
        x = torch.ones(1, 128)
        linear(quantize_activation(x, weight, Stash()), weight).backward(torch.full((1, 128), value))
    assert torch.equal(weight.main_grad, torch.full((128, 128), 257.0))
    weight.clear_grad()
    linear(quantize_activation(torch.ones(1, 128), weight, Stash()), weight).backward(torch.ones(1, 128))
    assert torch.equal(weight.main_grad, torch.ones(128, 128)), "a new step overwrites"
