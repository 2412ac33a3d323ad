"""The quantise, re-tile and transpose kernels with the hardware's rounding: the same codes and scales as their references."""

import pytest
import torch

from fp8.quantize import (
    column_major,
    quantize,
    quantize_both,
    quantize_ref,
    quantize_t,
    quantize_t_ref,
    requantize_t,
    requantize_t_ref,
    retile_t,
    retile_t_ref,
    transpose,
    transpose_ref,
)
from fp8.quantized import Quantized
from fp8.recipe import Spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with FP8"),
]

ROW, BLOCKS = Spec("e4m3", (1, 128), "block"), Spec("e4m3", (128, 128), "block")


def nasty(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Values over 80 binades, with rows of zeros, subnormals, the largest floats, infinities and NaN."""
    x = torch.randn(rows, cols, device="cuda") * torch.exp2(torch.randint(-40, 30, (rows, 1), device="cuda").float())
    x *= torch.exp2(torch.randint(-14, 3, (rows, cols), device="cuda").float())
    x[0], x[1] = 0.0, -0.0
    x[2, 7], x[3, 9], x[4, 1] = float("nan"), float("inf"), -float("inf")
    x[5], x[6], x[7], x[8] = 1e-38, 1e-40, 3e38, 448.0
    return x.to(dtype)


def assert_same(got: Quantized, want: Quantized) -> None:
    """Bitwise equal codes (any NaN equals any NaN), scales, strides and tile."""
    nan = want.data.float().isnan()
    assert torch.equal(got.data.float().isnan(), nan)
    differ = (got.data.view(torch.uint8) != want.data.view(torch.uint8)) & ~nan
    assert not differ.any(), f"{differ.sum()} codes differ, first at {differ.nonzero()[0].tolist()}"
    assert torch.equal(got.scale_inv, want.scale_inv)
    assert got.tile == want.tile
    assert got.scale_inv.stride() == want.scale_inv.stride() or 1 in got.scale_inv.shape


SHAPES = [(128, 128), (256, 2048), (200, 272), (1000, 1536), (33, 144)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows, cols", SHAPES)
@pytest.mark.parametrize("spec", [ROW, BLOCKS])
def test_quantize(rows: int, cols: int, dtype: torch.dtype, spec: Spec):
    x = nasty(rows, cols, dtype)
    assert_same(quantize(x, spec), quantize_ref(x, spec))


def test_quantize_a_stack_of_weights():
    w = torch.stack([nasty(256, 384, torch.float32) for _ in range(3)])
    assert_same(quantize(w, BLOCKS), quantize_ref(w, BLOCKS))


@pytest.mark.parametrize("rows, cols", SHAPES)
def test_quantize_both_and_transposed(rows: int, cols: int):
    x = nasty(rows, cols, torch.bfloat16)
    row, transposed = quantize_both(x, ROW)
    assert_same(row, quantize_ref(x, ROW))
    assert_same(transposed, quantize_t_ref(x, ROW))
    assert_same(quantize_t(x, ROW), quantize_t_ref(x, ROW))


@pytest.mark.parametrize("rows, cols", SHAPES)
def test_retile_and_requantize(rows: int, cols: int):
    x = torch.randn(rows, cols, device="cuda") * torch.exp2(torch.randint(-9, 3, (rows, 1), device="cuda").float())
    x[3], x[4, 5] = 0.0, float("nan")
    q = quantize_ref(x, ROW)
    assert_same(requantize_t(q), requantize_t_ref(q))
    assert_same(retile_t(q, ROW), retile_t_ref(q, ROW))


def test_requantize_every_code_at_every_shift():
    codes = torch.arange(256, device="cuda", dtype=torch.int32).repeat(128, 1).to(torch.uint8)
    scale_inv = torch.exp2(-torch.arange(128, device="cuda").float())[:, None].repeat(1, 2)
    q = Quantized(codes.view(torch.float8_e4m3fn), column_major(scale_inv), (1, 128))
    assert_same(requantize_t(q), requantize_t_ref(q))


def test_blocks_past_the_last_group_are_skipped():
    x = torch.randn(384, 256, device="cuda", dtype=torch.bfloat16)
    x[256:] = float("nan")
    live = torch.tensor([0, 5, -1], dtype=torch.int32, device="cuda")
    for got in (quantize_t(x, ROW, live), requantize_t(quantize_ref(x, ROW), live)):
        want = quantize_t_ref(x[:256], ROW) if got.tile == (1, 128) else requantize_t_ref(quantize_ref(x[:256], ROW))
        kept = Quantized(got.data[:, :256].contiguous(), got.scale_inv[:, :2].contiguous(), got.tile)
        assert_same(kept, Quantized(want.data, want.scale_inv.contiguous(), want.tile))


def test_transpose():
    w = quantize_ref(torch.randn(3, 256, 384, device="cuda"), BLOCKS)
    got, want = transpose(w), transpose_ref(w)
    assert torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8))
    assert torch.equal(got.scale_inv, want.scale_inv)
