"""Rows packed into bytes and back: bit for bit."""

from __future__ import annotations

import pytest
import torch

from fp8.quantize import quantize
from fp8.quantized import Quantized
from fp8.recipe import Recipe
from parallel.payload import RowFormat, pack, unpack

ROW = Recipe.block().activation


@pytest.mark.parametrize("recipe", ["block", "mx"])
@pytest.mark.parametrize("cols", [128, 200, 384, 2048])
def test_packed_rows_come_back_bit_for_bit(cols: int, recipe: str) -> None:
    x = torch.randn(7, cols) * torch.logspace(-36, 30, 7)[:, None]
    x[3] = 0
    q = quantize(x, getattr(Recipe, recipe)().activation)
    extra = torch.arange(7 * 8, dtype=torch.uint8).view(7, 8)
    form = RowFormat.of(q, 8)
    packed = pack(q, None, extra)
    assert packed.shape == (7, form.row_bytes)
    back = unpack(packed, form)
    assert torch.equal(back.data.view(torch.uint8), q.data.view(torch.uint8))
    assert torch.equal(packed[:, form.data_bytes : form.data_bytes + 8], extra)
    assert torch.equal(back.scale_inv, q.scale_inv) and back.scale_inv.t().is_contiguous()


def test_index_picks_rows_on_both_sides() -> None:
    q = quantize(torch.randn(5, 256), ROW)
    packed = pack(q, torch.tensor([4, 0, 0]))
    got = unpack(packed, RowFormat.of(q), index_R=torch.tensor([5, -1, 0]), per_row=2)
    want = q.dequantize()[[0, 0, 4]]  # packed row 5 // 2, nothing, packed row 0
    want[1] = 0
    assert torch.equal(got.dequantize(), want) and got.scale_inv[1].eq(1).all()


def test_unscaled_and_tensorwise_rows_carry_no_scale() -> None:
    q = Quantized.unscaled(torch.randn(3, 6).bfloat16())
    assert torch.equal(unpack(pack(q), RowFormat.of(q)).data, q.data) and RowFormat.of(q).row_bytes == 12
    q = quantize(torch.randn(3, 128), Recipe.tensorwise_current().activation)
    back = unpack(pack(q), RowFormat.of(q), q.scale_inv)
    assert torch.equal(back.dequantize(), q.dequantize()) and RowFormat.of(q).row_bytes == 128


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("recipe", ["block", "tensorwise_current", "bf16"])
def test_unpacked_rows_do_not_alias_the_payload(recipe: str, rows: int) -> None:
    """A collective's buffer is used again (parallel/peer.py)."""
    q = quantize(torch.randn(rows, 128, dtype=torch.bfloat16), getattr(Recipe, recipe)().activation)
    packed = pack(q)
    back = unpack(packed, RowFormat.of(q), q.scale_inv)
    want = back.dequantize()
    packed.fill_(1)
    assert torch.equal(back.dequantize(), want)


def test_nothing_to_pack() -> None:
    q = quantize(torch.zeros(0, 128), ROW)
    got = unpack(pack(q), RowFormat.of(q), index_R=torch.full((128,), -1))
    assert got.shape == (128, 128) and not got.dequantize().any()


@pytest.mark.parametrize("cols, bound", [(512, 0.51), (1024, 0.51), (2048, 0.51), (4096, 0.51), (256, 0.53)])
def test_scales_and_padding_cost_little(cols: int, bound: float) -> None:
    assert RowFormat(torch.float8_e4m3fn, cols, (1, 128)).row_bytes <= bound * 2 * cols


def test_a_weight_tile_cannot_travel_by_rows() -> None:
    with pytest.raises(AssertionError, match="span several rows"):
        pack(quantize(torch.randn(128, 128), Recipe.block().weight))
