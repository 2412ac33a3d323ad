"""Properties that hold for any input: quantisers, codecs, permutation, payload. Inputs are hypothesis's."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp8.permute import build_permutation, permute, unpermute_sum
from fp8.quantize import quantize, quantize_t, transpose
from fp8.quantized import Quantized
from fp8.recipe import Recipe
from fp8.state_codecs import CODECS
from parallel.payload import RowFormat, pack, unpack

BLOCK_SPECS = [Recipe.block().activation, Recipe.block("hybrid").gradient]
# Largest relative error of one rounding to nearest, and the smallest step below the tile's maximum (448 and 57344 are the tops).
HALF_STEP = {"e4m3": (2.0**-4, 2.0**-9 / 224), "e5m2": (2.0**-3, 2.0**-16 / 28672)}
STEP = {"fp32": 0.0, "bf16": 2.0**-7, "fp16": 2.0**-10, "fp8": 2.0**-3, "coat": 2.0**-3}


@st.composite
def matrices(draw: st.DrawFn, rows: int = 140, cols: int = 300, smallest: int = -120, largest: int = 120) -> Tensor:
    """Normal numbers of any magnitude, with columns and rows of other magnitudes, zeros, ones, and a single outlier."""
    shape = draw(st.integers(1, rows)), draw(st.integers(1, cols))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31))))
    match draw(st.integers(0, 4)):
        case 0:
            x = x * 2.0 ** torch.randint(-8, 8, (shape[1],), generator=torch.Generator().manual_seed(1))
        case 1:
            x[draw(st.integers(0, shape[0] - 1))] = 0
        case 2:
            x = torch.ones(shape)
        case 3:
            x[draw(st.integers(0, shape[0] - 1)), draw(st.integers(0, shape[1] - 1))] = 2.0**6
    return (x * 2.0 ** draw(st.integers(smallest, largest))).clamp(-3e38, 3e38)  # finite: the largest columns may overflow


@settings(max_examples=60)
@given(x=matrices(), spec=st.sampled_from(BLOCK_SPECS))
def test_any_matrix_is_quantised_within_half_a_step(x: Tensor, spec: object) -> None:
    q, (relative, floor) = quantize(x, spec), HALF_STEP[spec.fmt]
    tiles = torch.nn.functional.pad(x, (0, -x.shape[1] % 128)).unflatten(1, (-1, 128))
    top = tiles.abs().amax(2).repeat_interleave(128, 1)[:, : x.shape[1]]
    assert ((q.dequantize() - x).abs() <= x.abs() * relative + top * floor).all()
    assert (torch.frexp(q.scale_inv)[0] == 0.5).all() and q.scale_inv.isfinite().all(), "powers of two"


@settings(max_examples=40)
@given(x=matrices(), spec=st.sampled_from(BLOCK_SPECS))
def test_quantising_along_columns_is_quantising_the_transpose(x: Tensor, spec: object) -> None:
    q = quantize_t(x, spec)
    assert q.shape[1] % 128 == 0 and torch.equal(q.dequantize()[:, : x.shape[0]], quantize(x.t().contiguous(), spec).dequantize())
    assert not q.dequantize()[:, x.shape[0] :].any()


@settings(max_examples=20)
@given(rows=st.integers(1, 2), cols=st.integers(1, 2), exponent=st.integers(-100, 100))
def test_transposing_twice_changes_no_bit(rows: int, cols: int, exponent: int) -> None:
    w = quantize(torch.randn(128 * rows, 128 * cols) * 2.0**exponent, Recipe.block().weight)
    back = transpose(transpose(w))
    assert torch.equal(back.data.view(torch.uint8), w.data.view(torch.uint8)) and torch.equal(back.scale_inv, w.scale_inv)
    assert torch.equal(transpose(w).dequantize(), w.dequantize().t())


@settings(max_examples=60)
@given(x=matrices(smallest=-30, largest=10), role=st.sampled_from(sorted(CODECS)), data=st.data())
def test_any_state_round_trips_within_a_step(x: Tensor, role: str, data: st.DataObject) -> None:
    fmt = data.draw(st.sampled_from(sorted(CODECS[role])))
    x = x.square() if role == "exp_avg_sq" else x
    got = CODECS[role][fmt].decode(CODECS[role][fmt].encode(x, None))
    floor = x.abs().max() * (2.0**-9 / 224 if fmt in ("fp8", "coat") else 2.0**-38)
    assert ((got - x).abs() <= x.abs() * STEP[fmt] * 1.01 + floor).all(), (role, fmt)


@settings(max_examples=60)
@given(tokens=st.integers(1, 40), experts=st.integers(1, 9), k=st.integers(1, 4), seed=st.integers(0, 2**31))
def test_any_permutation_comes_back(tokens: int, experts: int, k: int, seed: int) -> None:
    generator, k = torch.Generator().manual_seed(seed), min(k, experts)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(tokens)])
    x = torch.randn(tokens, 128, generator=generator)
    perm = build_permutation(ids, experts)
    rows = permute(Quantized.unscaled(x), perm).dequantize()
    assert torch.equal(unpermute_sum(rows, perm), torch.stack([x] * k, 1).sum(1))
    for expert in range(experts):
        start, count = int(perm.groups.starts_E[expert]), int(perm.groups.counts_E[expert])
        assert torch.equal(rows[start : start + count], x[(ids == expert).any(1)]), "token order within a group"


@settings(max_examples=40)
@given(x=matrices(rows=20))
def test_any_rows_survive_the_wire(x: Tensor) -> None:
    q = quantize(torch.nn.functional.pad(x, (0, -x.shape[1] % 128)), Recipe.block().activation)
    got = unpack(pack(q), RowFormat.of(q), q.scale_inv)
    assert torch.equal(got.data.view(torch.uint8), q.data.view(torch.uint8)) and torch.equal(got.scale_inv, q.scale_inv)
