"""The kernels of the gradient wire against the references, bitwise, with every kind of number that a gradient can hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallel import grad_wire_kernels as kernels
from parallel.grad_wire import PACKED, quantize_tiles, sum_of_ranks
from parallel.payload import pack_ref, unpack_ref
from tests.fp8.kernel_checks import DEVICE, INTERPRETED, marks

pytestmark = marks
TILES = (1, 66) if INTERPRETED else (1, 66, 1 << 19)


def gradients(tiles: int, dtype: torch.dtype) -> Tensor:
    """Magnitudes over six decades in a tile; then tiles of zeros, subnormals, an inf, a NaN."""
    x = torch.randn(tiles, 128) * 10 ** (6 * torch.rand(tiles, 128) - 6)
    small = 1e-20 if INTERPRETED and dtype == torch.bfloat16 else 1e-38  # the interpreter's casts change BF16's subnormals
    for tile, value in ((3, 0.0), (7, -0.0), (12, small * 1e-4), (13, -small)):
        x[tile % tiles] *= value
    if tiles > 1:
        x[20, 5], x[21, 127], x[22, 0] = float("inf"), -float("inf"), float("nan")
    return x.view(-1).to(DEVICE, dtype)


def one_nan(packed: Tensor) -> Tensor:
    """Codes with one sign for NaN, which neither side promises."""
    out = packed.clone()
    codes = out[:, :128]
    codes[(codes & 0x7F) == 0x7F] = 0x7F
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tiles", TILES)
def test_pack_tiles(tiles: int, dtype: torch.dtype) -> None:
    x = gradients(tiles, dtype)
    want = one_nan(pack_ref(quantize_tiles(x)))
    assert torch.equal(one_nan(kernels.pack_tiles(x)), want)
    if tiles > 1:
        codes = want[:, :128].view(torch.float8_e4m3fn).float()
        assert codes[20:23].isnan().sum() == 3 and not codes[:20].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_sum_tiles(ranks: int, dtype: torch.dtype) -> None:
    packed = pack_ref(quantize_tiles(gradients(TILES[-1] // 6 * 6, dtype)))
    want = sum_of_ranks(unpack_ref(packed, PACKED, None, None, 1), ranks)
    got, word = torch.full_like(want, 7.0, dtype=dtype), torch.int32 if dtype == torch.float32 else torch.int16
    kernels.sum_tiles(packed, ranks, got, False)
    fine = ~want.isnan()
    assert torch.equal(got.isnan(), ~fine) and torch.equal(got[fine].view(word), want[fine].to(dtype).view(word))
    kernels.sum_tiles(packed, ranks, got, True)
    assert torch.equal(got[fine], (want.to(dtype) + want)[fine].to(dtype))
