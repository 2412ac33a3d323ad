"""Every recipe on a GPU: native or dequantised to BF16, its GEMMs give what the reference gives."""

from __future__ import annotations

import pytest
import torch

from fp8.gemm import gemm_nt, gemm_nt_ref
from fp8.grouped_gemm import grouped_gemm_nt, grouped_gemm_nt_ref, grouped_wgrad, grouped_wgrad_ref, make_groups, padded_rows
from fp8.quantize import quantize, quantize_t, requantize_t, transpose
from fp8.quantized import Quantized
from fp8.recipe import Recipe

pytestmark = pytest.mark.gpu
BF16_EPS = 2.0**-8

RECIPES = {
    "block": Recipe.block(),
    "block_hybrid": Recipe.block("hybrid"),
    "current": Recipe.tensorwise_current(),
    "current_e4m3": Recipe.tensorwise_current("e4m3"),
    "mx": Recipe.mx(),
    "auto_mixed": Recipe.auto("block", "bf16", "bf16"),
    "bf16": Recipe.bf16(),
}


@pytest.fixture(params=RECIPES)
def recipe(request: pytest.FixtureRequest) -> Recipe:
    return RECIPES[request.param]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Rounded to BF16 once or twice; sums in another order."""
    want = want.float()
    assert (got.float() - want).norm() <= 2 * BF16_EPS * want.norm()


def inputs(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32)
    return (x * torch.logspace(-2, 1, shape[-1], device="cuda")).bfloat16()


def test_three_gemms_equal_the_reference(recipe: Recipe) -> None:
    x, w, dy = inputs(384, 256), inputs(512, 256, seed=1), inputs(384, 512, seed=2)
    x_q, w_q, dy_q = quantize(x, recipe.activation), quantize(w.float(), recipe.weight), quantize(dy, recipe.gradient)
    close(gemm_nt(x_q, w_q), gemm_nt_ref(x_q, w_q, torch.float32))
    w_t = transpose(w_q)
    close(gemm_nt(dy_q, w_t), gemm_nt_ref(dy_q, w_t, torch.float32))
    dy_t, x_t = quantize_t(dy, recipe.gradient_t or recipe.gradient), requantize_t(x_q)
    out = torch.ones(512, 256, device="cuda")
    gemm_nt(dy_t, x_t, out=out, accumulate=True)
    close(out, 1 + gemm_nt_ref(dy_t, x_t, torch.float32))


def test_grouped_gemms_equal_the_reference(recipe: Recipe) -> None:
    counts = torch.tensor([130, 0, 1, 128], device="cuda")
    groups = make_groups(counts, padded_rows(int(counts.sum()), 4))
    live = torch.zeros(groups.max_rows, dtype=torch.bool, device="cuda")
    for start, count in zip(groups.starts_E.tolist(), counts.tolist(), strict=True):
        live[start : start + count] = True
    x = inputs(groups.max_rows, 256).masked_fill(~live[:, None], 0)
    dy = inputs(groups.max_rows, 128, seed=2).masked_fill(~live[:, None], 0)
    w = inputs(4, 128, 256, seed=1)
    x_q, w_q = quantize(x, recipe.activation), quantize(w.float(), recipe.weight)
    close(grouped_gemm_nt(x_q, w_q, groups)[live], grouped_gemm_nt_ref(x_q, w_q, groups, torch.float32)[live])
    dy_t, x_t = quantize_t(dy, recipe.gradient_t or recipe.gradient), requantize_t(x_q)
    got, want = (torch.full((4, 128, 256), 7.0, device="cuda") for _ in range(2))
    grouped_wgrad(dy_t, x_t, groups, got, accumulate=False)
    grouped_wgrad_ref(dy_t, x_t, groups, want, accumulate=False)
    close(got, want)
    assert got[1].eq(0).all(), "an expert without tokens has exactly zero gradient"


def test_quantising_equals_the_cpu_bit_for_bit(recipe: Recipe) -> None:
    x = inputs(130, 256)
    for spec in (recipe.activation, recipe.gradient, recipe.weight):
        source = x[:128] if spec is recipe.weight else x
        same(quantize(source, spec), quantize(source.cpu(), spec))
    same(requantize_t(quantize(x, recipe.activation)), requantize_t(quantize(x.cpu(), recipe.activation)))


def same(a: Quantized, b: Quantized) -> None:
    code = torch.uint8 if a.data.element_size() == 1 else torch.int16
    assert torch.equal(a.data.cpu().view(code), b.data.view(code))
    assert a.scale_inv is None or torch.equal(a.scale_inv.cpu(), b.scale_inv)
