"""SwiGLU kernels against float64 from the same stored bytes."""

import pytest
import torch

from fp8 import swiglu_kernels as kernels
from fp8.linear import linear, quantize_activation
from fp8.linear_swiglu import linear_swiglu
from fp8.quantize import quantize_ref
from fp8.quantized import Quantized
from fp8.recipe import Recipe
from fp8.stash import Stash
from fp8.swiglu import swiglu_quantize
from fp8.weight import Weight
from tests.fp8.kernel_checks import DEVICE, INTERPRETED, ROW, assert_quantized, marks, randn, same_bytes

pytestmark = marks
SIZES = [(1, 128), (130, 128)] if INTERPRETED else [(1, 128), (130, 256), (1000, 512), (4096, 1408)]


def definition(h: torch.Tensor, w: torch.Tensor | None, da: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(a, dh, dw) in float64."""
    h = h.double().requires_grad_()
    w = torch.ones(h.shape[0], device=h.device, dtype=torch.float64) if w is None else w.double()
    w.requires_grad_()
    g, u = h.chunk(2, -1)
    a = g * torch.sigmoid(g) * u * w[:, None]
    return a.detach(), *torch.autograd.grad(a, (h, w), da.double())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rows, width", SIZES)
def test_forward_and_backward(rows: int, width: int, weighted: bool) -> None:
    h, da = randn(rows, 2 * width, scale=3.0), randn(rows, width, scale=1e-3)
    w = torch.rand(rows, device=DEVICE) if weighted else None
    h_q, a_q = kernels.quantize_swiglu(h, w)
    assert same_bytes(h_q, quantize_ref(h, ROW))
    assert same_bytes(a_q, kernels.quantize_swiglu(h_q, w)[1]), "recomputation differs from the first forward"
    a, dh, dw = definition(h_q.dequantize(), w, da)
    assert_quantized(a_q, a, slack=2**-8)  # rounded to BF16 on the way
    dh_q, dh_t, dw_R = kernels.backward(h_q, w, da)
    bf16 = 2**-8 + 1e-4  # dh is rounded to BF16 before it is quantised, as the reference does
    assert_quantized(dh_q, dh, slack=bf16)
    assert_quantized(dh_t, torch.nn.functional.pad(dh, (0, 0, 0, -rows % 128)).t(), slack=bf16)
    if weighted:
        torch.testing.assert_close(dw_R.double(), dw, rtol=1e-4, atol=1e-5 * dw.abs().max().item())


@pytest.mark.parametrize("rows, width, times", [(130, 128, 1)] if INTERPRETED else [(20480, 512, 50), (20000, 512, 50)])
def test_backward_gives_the_same_bytes_every_time(rows: int, width: int, times: int) -> None:
    """Warps read what other warps have put into shared memory, where other inputs had been."""
    h, da, w = randn(rows, 2 * width, scale=3.0), randn(rows, width, scale=1e-3), torch.rand(rows, device=DEVICE)
    h_q, _ = kernels.quantize_swiglu(h, w)
    dh_q, dh_t, dw = kernels.backward(h_q, w, da)
    for _ in range(times):
        again_q, again_t, again_w = kernels.backward(h_q, w, da)
        assert same_bytes(again_q, dh_q) and same_bytes(again_t, dh_t) and torch.equal(again_w, dw)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("rows, width", SIZES)
def test_unquantised(rows: int, width: int, stored: bool) -> None:
    h, da, w = randn(rows, 2 * width), randn(rows, width), torch.rand(rows, device=DEVICE)
    h_q = quantize_ref(h, ROW) if stored else Quantized.unscaled(h)
    a, dh, dw = definition(h_q.dequantize(), w, da)
    torch.testing.assert_close(kernels.plain(h_q, w, None, None)[0].double(), a, rtol=2**-8, atol=1e-6)
    got_dh, got_dw = kernels.plain(h_q, w, da, None)
    torch.testing.assert_close(got_dh.double(), dh, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(got_dw.double(), dw, rtol=1e-4, atol=1e-4)


def test_dead_blocks_are_neither_read_nor_written() -> None:
    rows, width = 384, 128
    h, da, w = randn(rows, 2 * width), randn(rows, width), torch.rand(rows, device=DEVICE)
    live = torch.tensor([0, 3, -1], dtype=torch.int32, device=DEVICE)
    clean = kernels.quantize_swiglu(h[:256].contiguous(), w[:256])
    h[256:], da[256:], w[256:] = float("nan"), float("nan"), float("nan")
    h_q, a_q = kernels.quantize_swiglu(h, w, live)
    assert same_bytes(h_q, clean[0], 256) and same_bytes(a_q, clean[1], 256)
    dh_q, dh_t, dw = kernels.backward(h_q, w, da, live)
    want_q, want_t, want_dw = kernels.backward(clean[0], w[:256], da[:256].contiguous())
    assert same_bytes(dh_q, want_q, 256) and torch.equal(dw[:256], want_dw)
    assert torch.equal(dh_t.data.view(torch.uint8)[:, :256], want_t.data.view(torch.uint8))


@pytest.mark.skipif(INTERPRETED, reason="one kernel for dh against two: on a GPU")
def test_linear_and_swiglu_as_one_function() -> None:
    """Their gradients differ from those of two Functions by roundings of single values to BF16."""
    found = []
    for fused in (False, True):
        up, down = (Weight(n, k, recipe=Recipe.block()).to(DEVICE) for n, k in ((1024, 256), (256, 512)))
        for seed, weight in enumerate((up, down)):
            weight.set_(torch.randn(weight.data.shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed)) * 0.05)
        x = torch.randn(1024, 256, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(2)).bfloat16().requires_grad_()
        edge, to = quantize_activation(x, up, Stash()), (down, Stash(), "s")
        y = linear(linear_swiglu(edge, up, *to) if fused else swiglu_quantize(linear(edge, up), *to), down)
        y.square().sum().backward()
        found.append([y, x.grad, up.main_grad, down.main_grad])
    two, one = found
    assert torch.equal(one[0], two[0]) and torch.equal(one[3], two[3])
    for a, b in zip(one[1:3], two[1:3], strict=True):
        assert (a - b).float().norm() < 2e-3 * b.float().norm()
