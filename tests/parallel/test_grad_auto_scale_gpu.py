"""The kernels of FP8-LM's sums against the references, bitwise: saturation, NaN, subnormals, every pair of codes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8.quantize import cast_fp8
from fp8.recipe import E4M3
from parallel import grad_auto_scale_kernels as kernels
from parallel.grad_auto_scale import add_codes_ref
from tests.fp8.kernel_checks import DEVICE, INTERPRETED, marks

pytestmark = marks
SIZE = 5000 if INTERPRETED else (1 << 24) + 5000


def bits(codes: Tensor) -> Tensor:
    """Codes with one sign for NaN, which neither side promises."""
    out = codes.view(torch.uint8).clone()
    out[(out & 0x7F) == 0x7F] = 0x7F
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_encode_codes(dtype: torch.dtype) -> None:
    x = (torch.randn(SIZE) * 10 ** (6 * torch.rand(SIZE) - 4)).to(DEVICE, dtype)
    x[:6] = torch.tensor([0.0, -0.0, 1e9, -1e9, float("nan"), float("inf")], dtype=dtype)
    factor, got = torch.tensor(37.7, device=DEVICE), torch.empty(SIZE, dtype=E4M3, device=DEVICE)
    kernels.encode_codes(x, factor, got)
    assert torch.equal(bits(got), bits(cast_fp8(x.float() * factor, E4M3)))
    assert got.float()[2] == 448 and got.float()[3] == -448


@pytest.mark.parametrize("add", [False, True])
def test_decode_codes(add: bool) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(-(-SIZE // 256))[:SIZE].to(DEVICE).view(E4M3)
    factor, start = torch.tensor(0.3, device=DEVICE), torch.randn(SIZE).to(DEVICE)
    got, want = start.clone(), codes.float() / factor
    kernels.decode_codes(codes, factor, got, add)
    assert torch.equal(got.nan_to_num(7.0), (start + want if add else want).nan_to_num(7.0))


def test_every_pair_of_codes() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    pairs = torch.stack([every.repeat_interleave(256), every.repeat(256)]).to(DEVICE).view(E4M3)
    assert torch.equal(bits(kernels.add_codes(pairs)), bits(add_codes_ref(pairs)))


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_add_codes(ranks: int) -> None:
    codes = torch.randint(0, 256, (ranks, SIZE // 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(ranks))
    codes = codes.to(DEVICE).view(E4M3)
    assert torch.equal(bits(kernels.add_codes(codes)), bits(add_codes_ref(codes)))
