"""Quantise, re-tile and transpose: every recipe, and the inputs that break others."""

from __future__ import annotations

import pytest
import torch

from fp8 import mx
from fp8.permute import gather_rows_ref
from fp8.quantize import (
    cast_fp8,
    pow2_scale_inv,
    quantize,
    quantize_t,
    requantize_t,
    retile_t,
    tile_amax,
    transpose,
)
from fp8.quantized import Quantized
from fp8.recipe import BLOCK, E4M3, E5M2, FP8_MAX, TENSORWISE, Recipe, Spec

RECIPES = {
    "block": Recipe.block(),
    "block_hybrid": Recipe.block("hybrid"),
    "mx": Recipe.mx(),
    "current": Recipe.tensorwise_current(),
    "e5m2": Recipe.tensorwise_current("e5m2"),
    "bf16": Recipe.bf16(),
    "fp32": Recipe.fp32(),
}
FP8_RECIPES = [name for name in RECIPES if name not in ("bf16", "fp32")]
# Largest relative rounding error of a normal number: half a step of 2^-3 (E4M3) or 2^-2 (E5M2) above a power of two.
HALF_STEP = {"e4m3": 2.0**-4, "e5m2": 2.0**-3, "bf16": 2.0**-8, "fp32": 0.0}
ALL_CODES = torch.arange(256, dtype=torch.int32).to(torch.uint8)


def wide(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers whose columns span four decades."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.logspace(-3, 1, shape[-1])


def specs_of(name: str) -> list[Spec]:
    recipe = RECIPES[name]
    return list(dict.fromkeys((recipe.activation, recipe.weight, recipe.gradient)))


def nan_of(dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([0x7F], dtype=torch.uint8).view(dtype)


# ---------------------------------------------------------------- every recipe


@pytest.mark.parametrize("name", RECIPES)
def test_error_is_half_a_step_of_the_format(name: str) -> None:
    x = wide(256, 256)
    for spec in specs_of(name):
        q = quantize(x, spec)
        error = (q.dequantize() - x).abs()
        smallest = 0.0
        if spec.is_fp8:  # below the normal range the step is constant
            tiny = {"e4m3": 2.0**-10, "e5m2": 2.0**-17}[spec.fmt]
            scale = q.scale_inv if spec.tile == TENSORWISE else q.scale_inv.amax()
            smallest = tiny * float(scale)
        assert bool((error <= HALF_STEP[spec.fmt] * x.abs() + smallest).all()), spec


@pytest.mark.parametrize("name", RECIPES)
def test_all_operands_of_the_three_gemms_exist_and_agree_in_k(name: str) -> None:
    recipe, (tokens, d, f) = RECIPES[name], (200, 256, 128)
    x, w, dy = wide(tokens, d), wide(f, d, seed=1), wide(tokens, f, seed=2)
    x_q, w_q, dy_q = quantize(x, recipe.activation), quantize(w, recipe.weight), quantize(dy, recipe.gradient)
    w_t, x_t, dy_t = transpose(w_q), requantize_t(x_q), quantize_t(dy, recipe.gradient)
    assert x_q.shape[-1] == w_q.shape[-1] and dy_q.shape[-1] == w_t.shape[-1]
    padded = -(-tokens // BLOCK) * BLOCK
    assert x_t.shape == (d, padded) and dy_t.shape == (f, padded)
    assert x_t.dequantize()[:, tokens:].eq(0).all() and dy_t.dequantize()[:, tokens:].eq(0).all()
    assert torch.equal(w_t.dequantize(), w_q.dequantize().t()), "a weight transposes exactly"
    assert retile_t(dy_q, recipe.gradient).shape == dy_t.shape


@pytest.mark.parametrize("name", ["current", "e5m2", "bf16", "fp32"])
def test_one_scale_or_none_only_moves_bytes(name: str) -> None:
    q = quantize(wide(130, 128), RECIPES[name].gradient)
    for moved in (requantize_t(q), retile_t(q, RECIPES[name].gradient)):
        assert torch.equal(moved.dequantize()[:, :130], q.dequantize().t())


def test_stacked_weights_have_a_scale_each() -> None:
    w = torch.stack([wide(128, 128), 1000 * wide(128, 128, seed=1), torch.zeros(128, 128)])
    q = quantize(w, Recipe.tensorwise_current().weight)
    assert q.scale_inv.shape == (3, 1, 1) and q.scale_inv[1] > 100 * q.scale_inv[0] and q.scale_inv[2] == 1
    assert torch.equal(transpose(q).dequantize(), q.dequantize().transpose(1, 2))


def test_margin_leaves_binades_of_headroom() -> None:
    x = wide(64, 128)
    plain, spare = (quantize(x, Recipe.tensorwise_current(margin=m).activation) for m in (0, 3))
    assert torch.equal(spare.scale_inv, plain.scale_inv * 8)


def test_given_scale_is_used_and_saturates() -> None:
    spec = Recipe.tensorwise_delayed().activation
    q = quantize(torch.tensor([[1.0, 1000.0, -5000.0]]), spec, torch.tensor(1.0))
    assert q.dequantize().tolist() == [[1.0, 448.0, -448.0]]


def test_mx_scales_are_powers_of_two_in_e8m0_range_per_32() -> None:
    q = quantize(wide(64, 256), Recipe.mx().activation)
    assert q.scale_inv.shape == (64, 8) and q.tile == (1, 32)
    mantissa, _ = torch.frexp(q.scale_inv)
    assert mantissa.eq(0.5).all()
    w = quantize(wide(64, 256), Recipe.mx().weight)
    assert w.scale_inv.shape == (2, 8)


# ---------------------------------------------------------------- zero, inf, saturation


@pytest.mark.parametrize("name", FP8_RECIPES)
def test_all_zero_tile_gives_zeros_and_scale_one(name: str) -> None:
    for spec in specs_of(name):
        q = quantize(torch.zeros(128, 128), spec)
        assert q.scale_inv.eq(1).all() and q.dequantize().eq(0).all()
        mixed = torch.zeros(128, 256)
        mixed[:, :128] = wide(128, 128)
        assert quantize(mixed, spec).dequantize().isfinite().all()
    assert requantize_t(quantize(torch.zeros(128, 128), RECIPES[name].activation)).dequantize().eq(0).all()


@pytest.mark.parametrize("amax", [1e-38, 1e-40, 2.0**-149])
@pytest.mark.parametrize("name", FP8_RECIPES)
def test_tiny_and_subnormal_amax_keep_scales_finite_and_normal(name: str, amax: float) -> None:
    for spec in specs_of(name):
        q = quantize(torch.full((128, 128), amax), spec)
        for scale in (q.scale_inv, 1 / q.scale_inv):
            assert scale.isfinite().all() and (scale >= torch.finfo(torch.float32).tiny).all()
        assert q.dequantize().isfinite().all()


@pytest.mark.parametrize("value", [448.0, 464.0, 465.0, 1e3, 1e30, float("inf")])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_cast_saturates_and_never_gives_nan(value: float, dtype: torch.dtype) -> None:
    limit = FP8_MAX[dtype]
    got = cast_fp8(torch.tensor([value, -value]), dtype).float()
    assert got.tolist() == [min(value, limit), -min(value, limit)] or (dtype == E5M2 and got.isfinite().all())
    if value >= limit:
        assert got.tolist() == [limit, -limit]


@pytest.mark.parametrize("name", FP8_RECIPES)
def test_inf_saturates_and_nan_stays_nan(name: str) -> None:
    x = wide(128, 128)
    x[0, 0], x[1, 1] = float("inf"), float("nan")
    for spec in specs_of(name):
        q = quantize(x, spec)
        assert q.scale_inv.isfinite().all()
        value = q.dequantize()
        assert value[1, 1].isnan() and value[0, 0] == FP8_MAX[spec.dtype] and int(value.isnan().sum()) == 1


@pytest.mark.parametrize("name", FP8_RECIPES)
def test_scale_never_clips_the_block_maximum(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand((128, 8192), generator=generator) * torch.exp2(40 * torch.rand((128, 8192), generator=generator) - 20)
    for spec in specs_of(name):
        q = quantize(x, spec)
        tile = (x.shape[0], x.shape[1]) if spec.tile == TENSORWISE else spec.tile
        ratio = tile_amax(x, tile) / q.scale_inv
        limit = FP8_MAX[spec.dtype]
        assert (ratio <= limit).all() and (ratio > limit / 2).all(), "the largest power of two that does not clip"


@pytest.mark.parametrize("limit", [448.0, 57344.0])
def test_scale_at_exact_powers_and_just_above(limit: float) -> None:
    amax = torch.tensor([limit, limit * 2, torch.nextafter(torch.tensor(limit), torch.tensor(torch.inf)), limit / 2])
    assert pow2_scale_inv(amax, limit).tolist() == [1.0, 2.0, 2.0, 0.5]


@pytest.mark.parametrize("name", FP8_RECIPES)
def test_gradients_of_1e_6_keep_their_relative_error(name: str) -> None:
    """A floor of 1e-4 under amax, as DeepGEMM's helpers have, would flush all of them."""
    generator = torch.Generator().manual_seed(0)
    dy = (1 + torch.rand(128, 128, generator=generator)) * 1e-6
    spec = RECIPES[name].gradient
    error = ((quantize(dy, spec).dequantize() - dy) / dy).abs().max()
    assert error <= HALF_STEP[spec.fmt] <= (0.07 if spec.fmt == "e4m3" else 0.13)


def test_nan_code_survives_permute_transpose_and_retile() -> None:
    for name in FP8_RECIPES:
        recipe = RECIPES[name]
        x = wide(128, 128)
        x[5, 7] = float("nan")
        q = quantize(x, recipe.activation)
        assert gather_rows_ref(q, torch.tensor([5, -1])).dequantize()[0, 7].isnan()
        assert requantize_t(q).dequantize()[7, 5].isnan() and int(requantize_t(q).dequantize().isnan().sum()) == 1
        assert retile_t(quantize(x, recipe.gradient), recipe.gradient).dequantize()[7, 5].isnan()
        assert transpose(quantize(x, recipe.weight)).dequantize()[7, 5].isnan()


# ---------------------------------------------------------------- scaling-aware re-tile


@pytest.mark.parametrize("edge", [BLOCK, 32])
@pytest.mark.parametrize("shift", range(21))
def test_retile_is_the_rounded_quotient_for_all_256_codes(shift: int, edge: int) -> None:
    """Row 0 holds every code at scale 1, row 1 forces the block's scale to 2^shift: an exponent shift, rounded to nearest even."""
    codes = ALL_CODES.view(E4M3).repeat_interleave(edge)[: 256 * edge]
    for part in range(256):
        columns = slice(part * edge, (part + 1) * edge)
        assert codes[columns].view(torch.uint8).eq(part).all()
    picked = ALL_CODES.view(E4M3)
    data = torch.zeros(2, 256 * edge, dtype=torch.uint8)
    data[0, ::edge] = picked.view(torch.uint8)
    data[1] = torch.tensor([1.0]).to(E4M3).view(torch.uint8)
    scale_inv = torch.ones(2, 256)
    scale_inv[1] = 2.0**shift
    out = requantize_t(Quantized(data.view(E4M3), scale_inv, (1, edge)))
    got = out.data[::edge, 0].float()
    want = cast_fp8(picked.float() / 2.0**shift, E4M3).float()
    assert torch.equal(torch.isnan(got), torch.isnan(want)) and int(torch.isnan(got).sum()) == 2
    assert torch.equal(got.nan_to_num(nan=0.0), want.nan_to_num(nan=0.0))
    assert out.scale_inv[:, 0].eq(2.0**shift).all()


@pytest.mark.parametrize("edge", [BLOCK, 32])
def test_retile_with_equal_scales_moves_every_code_unchanged(edge: int) -> None:
    data = torch.randint(0, 256, (BLOCK, BLOCK), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    q = Quantized(data.view(E4M3), torch.full((BLOCK, BLOCK // edge), 4.0), (1, edge))
    out = requantize_t(q)
    same = out.data.view(torch.uint8).t() == data
    assert bool((same | (data & 0x7F).eq(0x7F)).all())  # NaN keeps being NaN, not its sign
    again = requantize_t(Quantized(out.data, out.scale_inv.repeat_interleave(edge, 0), (1, edge)))
    assert torch.equal(again.dequantize().nan_to_num(nan=500.0), q.dequantize().nan_to_num(nan=500.0))


def test_empty_rows_do_not_widen_the_block() -> None:
    x = torch.zeros(BLOCK, BLOCK)
    x[0] = 1e-5
    out = requantize_t(quantize(x, Recipe.block().activation))
    assert torch.equal(out.dequantize()[:, 0], quantize(x, Recipe.block().activation).dequantize()[0])


def test_retiled_gradient_keeps_a_scale_for_each_column() -> None:
    """dY along tokens has one scale a feature and 128 tokens: an outlier token costs its own tile only."""
    dy = wide(256, BLOCK)
    dy[0, 0] = 1e4
    q = retile_t(quantize(dy, Recipe.block().gradient), Recipe.block().gradient)
    assert q.scale_inv.shape == (BLOCK, 2) and q.scale_inv[0, 0] > 100 * q.scale_inv[1, 0]


# ---------------------------------------------------------------- MX on Blackwell


def test_e8m0_bytes_are_the_exponents() -> None:
    scale = torch.tensor([1.0, 2.0, 0.5, 2.0**-126, 2.0**126])
    assert mx.e8m0(scale).view(torch.uint8).tolist() == [127, 128, 126, 1, 253]
    assert torch.equal(mx.e8m0(scale).float(), scale)


def test_mx_scales_lie_where_cublas_looks_for_them() -> None:
    rows, scales = 200, 6
    exponents = torch.arange(rows * scales).view(rows, scales) % 200 - 100
    flat = mx.swizzle(torch.exp2(exponents.float())).view(torch.uint8)
    assert flat.numel() == 256 * 8
    for r, c in ((0, 0), (1, 0), (31, 3), (32, 1), (127, 3), (128, 0), (199, 5), (5, 4)):
        tile = (r // 128) * 2 + c // 4
        offset = tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4
        assert flat[offset] == exponents[r, c] + 127


def test_a_square_tile_is_the_scale_of_each_of_its_rows() -> None:
    w = quantize(wide(64, 64), Recipe.mx().weight)
    scales = mx.row_scales(w)
    assert scales.shape == (64, 2)
    assert torch.equal(Quantized(w.data, scales, (1, 32)).dequantize(), w.dequantize())


@pytest.mark.parametrize("recipe", [Recipe.block(), Recipe.mx(), Recipe.tensorwise_current(), Recipe.bf16()], ids=lambda r: r.name)
def test_a_part_of_the_rows_keeps_its_values_and_its_layout(recipe: Recipe) -> None:
    q = quantize(torch.randn(7, 384), recipe.activation)
    part = q.rows(slice(2, 5))
    assert torch.equal(part.dequantize(), q.dequantize()[2:5]) and part.tile == q.tile
    assert part.tile is None or part.tile == TENSORWISE or part.scale_inv.stride() == (1, 3)
