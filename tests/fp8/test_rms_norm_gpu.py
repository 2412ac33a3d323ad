"""RMSNorm kernels against float64."""

import pytest
import torch

from fp8 import rms_norm_kernels as kernels
from fp8.column_sum_kernels import sum_columns
from fp8.quantize import quantize_ref
from fp8.residual import add_residual_ref
from fp8.residual_kernels import add
from fp8.rms_norm import rms_norm_ref
from tests.fp8.kernel_checks import DEVICE, INTERPRETED, ROW, marks, randn, same_bytes

pytestmark = marks
SIZES = [(1, 128), (7, 272), (3, 129)]
SIZES += [] if INTERPRETED else [(5, 130), (1000, 2048), (333, 4096), (100, 8192), (16384, 2048)]
WIDE = [(1, 8193), (2, 12290), (1, 16384)]  # more warps share a row
EPS = 1e-6


def definition(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS) * w


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows, dim", SIZES + WIDE)
def test_forward(rows: int, dim: int, dtype: torch.dtype) -> None:
    h, w = randn(rows, dim, dtype=dtype, scale=3.0), torch.rand(dim, device=DEVICE) + 0.5
    x, q = kernels.rms_norm(h, w, EPS, plain=True, quantized=True)
    bound = 2**-7 if dtype == torch.bfloat16 else 1e-5  # two roundings to BF16
    torch.testing.assert_close(x.double(), definition(h.double(), w.double()), rtol=bound, atol=1e-6)
    torch.testing.assert_close(x, rms_norm_ref(h, w, EPS), rtol=2 * bound, atol=1e-6)  # each of the two may fall the other way
    assert same_bytes(q, quantize_ref(x, ROW)), "the codes are not those of the rows handed out"
    assert same_bytes(q, kernels.rms_norm(h, w, EPS, plain=False, quantized=True)[1]), "recomputation differs"
    assert torch.equal(x, kernels.rms_norm(h, w, EPS, plain=True, quantized=False)[0]), "recomputation differs"


@pytest.mark.parametrize("num_grads, residual", [(1, False), (2, False), (3, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows, dim", SIZES if INTERPRETED else SIZES + WIDE)
def test_backward(rows: int, dim: int, dtype: torch.dtype, num_grads: int, residual: bool) -> None:
    h, w = randn(rows, dim, dtype=dtype), torch.rand(dim, device=DEVICE) + 0.5
    grads = [randn(rows, dim, dtype=dtype) for _ in range(num_grads)]
    dres = randn(rows, dim, dtype=dtype) if residual else None
    dh, dw = kernels.backward(h, w, grads, dres, EPS)
    h64, w64 = h.double().requires_grad_(), w.double().requires_grad_()
    dx = sum(d.double() for d in grads)
    want_dh, want_dw = torch.autograd.grad(definition(h64, w64), (h64, w64), dx)
    want_dh = want_dh + (dres.double() if residual else 0)
    low = dtype == torch.bfloat16
    torch.testing.assert_close(dh.double(), want_dh, rtol=2**-8 if low else 1e-5, atol=2e-5)
    assert (dw - want_dw).norm() <= (2**-8 if low else 1e-5) * want_dw.norm()
    assert torch.equal(dw, kernels.backward(h, w, grads, dres, EPS)[1]), "dw differs between two runs"


@pytest.mark.parametrize("parts", [1, 2])
def test_residual_sum_rounds_once(parts: int) -> None:
    given = [randn(33, 272) for _ in range(1 + parts)]
    assert torch.equal(add(*given), add_residual_ref(*given))


@pytest.mark.parametrize("rows, cols, split", [(1, 8, None), (1, 8, 1), (2500, 20, None), (2500, 20, 1100), (559, 128, 447)])
def test_sums_of_columns(rows: int, cols: int, split: int | None) -> None:
    """More rows than a program adds at once, and columns that are not a multiple of its own."""
    x = randn(rows, cols, dtype=torch.float32)
    got, parts = sum_columns(x, split), [x] if split is None else [x[:split], x[split:]]
    want = torch.stack([part.double().sum(0) for part in parts])
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)
    assert torch.equal(got, sum_columns(x, split))
