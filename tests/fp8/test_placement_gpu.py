"""Kernels that read words make the same bits wherever in its storage a contiguous input begins."""

from collections.abc import Callable

import pytest
import torch

from fp8 import (
    cross_entropy_kernels,
    index_kernels,
    permute_kernels,
    permute_turn_kernels,
    quantize_kernels,
    rms_norm_kernels,
    route_kernels,
    swiglu_kernels,
    transpose_kernels,
)
from fp8.grouped_gemm import padded_rows
from fp8.launch import in_words
from fp8.permute import Permutation
from fp8.quantize import quantize_ref
from fp8.quantized import Quantized
from fp8.route_forward_kernel import route
from fp8.router_gemm_kernel import in_tiles
from tests.fp8.kernel_checks import DEVICE, ROW, marks, randn

pytestmark = marks


def displaced(t: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous, from the second element of a storage on: at no whole word, and at no 16 bytes."""
    raw = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape)
    raw.view(torch.uint8).copy_(t.contiguous().view(torch.uint8)) if t.element_size() == 1 else raw.copy_(t)
    assert raw.is_contiguous() and raw.storage_offset() == 1
    return raw


def displaced_codes(q: Quantized) -> Quantized:
    return Quantized(displaced(q.data), q.scale_inv, q.tile)


def raw_bytes(made: object) -> list[torch.Tensor]:
    """All tensors of a result, those of FP8 as bytes."""
    if isinstance(made, tuple):
        return [t for part in made for t in raw_bytes(part)]
    if isinstance(made, Quantized):
        return [made.data.view(torch.uint8), *raw_bytes(made.scale_inv)]
    return [] if made is None else [made]


def rms_norm(h: torch.Tensor, w: torch.Tensor) -> object:
    return rms_norm_kernels.rms_norm(h, w, 1e-6, plain=True, quantized=True)


def loss_gradient(logits: torch.Tensor) -> object:
    rows = logits.shape[0]
    one, label = torch.ones(rows, device=DEVICE), torch.full((rows,), 3, device=DEVICE)
    return cross_entropy_kernels.gradient(logits, 5 * one, one, label, one, one[0])


def moved(x: Quantized) -> object:
    """Rows of three tokens in the order of their experts: moved, and moved and turned."""
    ids = torch.tensor([[1, 0], [0, 1], [1, 0]], device=DEVICE)
    perm = Permutation(*index_kernels.place(ids, *index_kernels.count(ids, 2), padded_rows(6, 2)))
    live, end = perm.groups.block_expert_B, 256
    rows = permute_kernels.scatter_rows(x, perm.row_Tk, perm.slot_R, live)
    both, columns = permute_turn_kernels.permute_both(x, perm.slot_R, 2, live)
    square = permute_turn_kernels.permute_square(x, perm.slot_R, 2, live)
    by_row = tuple(Quantized(q.data[:end], q.scale_inv[:end], q.tile) for q in (rows, both))
    return *by_row, *(Quantized(q.data[:, :end], q.scale_inv[:, : end // 128], q.tile) for q in (columns, square))


CODES: dict[str, Callable[[Quantized], object]] = {
    "permute": moved,
    "retile": quantize_kernels.retile_transposed,
    "requantize": transpose_kernels.requantize_transposed,
    "swiglu": lambda h: swiglu_kernels.quantize_swiglu(h, None)[1],
    "swiglu_backward": lambda h: swiglu_kernels.backward(h, None, torch.ones(3, 128, dtype=torch.bfloat16, device=DEVICE)),
}
VALUES: dict[str, Callable[[torch.Tensor], object]] = {
    "quantize": lambda x: quantize_kernels.quantize_transposed(x, both=True),
    "swiglu": lambda h: swiglu_kernels.quantize_swiglu(h, None),
    "cross_entropy": loss_gradient,
}


@pytest.mark.parametrize("name", CODES)
def test_codes(name: str) -> None:
    x = quantize_ref(randn(3, 256), ROW)
    want, got = raw_bytes(CODES[name](x)), raw_bytes(CODES[name](displaced_codes(x)))
    assert want and all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("name", VALUES)
def test_values(name: str) -> None:
    x = randn(3, 256)
    want, got = raw_bytes(VALUES[name](x)), raw_bytes(VALUES[name](displaced(x)))
    assert want and all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_rms_norm() -> None:
    h, w = randn(3, 272), torch.rand(272, device=DEVICE) + 0.5
    want = raw_bytes(rms_norm(h, w))
    for got in (rms_norm(displaced(h), w), rms_norm(h, displaced(w)), rms_norm(displaced(h), displaced(w))):
        assert all(torch.equal(a, b) for a, b in zip(want, raw_bytes(got), strict=True))
    lone = torch.zeros(2, 273, dtype=torch.bfloat16, device=DEVICE)[:1, :272]  # contiguous, and the next row at an odd distance
    lone.copy_(h[:1])
    assert lone.is_contiguous() and lone.stride(0) == 273
    want = raw_bytes(rms_norm(h[:1], w))
    assert all(torch.equal(a, b) for a, b in zip(want, raw_bytes(rms_norm(lone, w)), strict=True))


def test_a_word_view_copies_only_where_it_must() -> None:
    x = randn(4, 6)
    assert in_words(x, torch.int32).data_ptr() == x.data_ptr() and in_words(x[1:], torch.int32).data_ptr() == x[1:].data_ptr()
    assert torch.equal(in_words(displaced(x), torch.int32), x.view(torch.int32).flatten())
    columns = x.t()  # not contiguous
    assert torch.equal(in_words(columns[:, :2], torch.int32), columns[:, :2].contiguous().view(torch.int32).flatten())


def test_what_the_copy_engine_reads() -> None:
    x = torch.zeros(5, 64, dtype=torch.bfloat16, device=DEVICE)
    assert in_tiles(x) and in_tiles(x[1:])
    assert not in_tiles(displaced(x)) and not in_tiles(x[:, :60].contiguous()) and not in_tiles(x[:, :56])
    assert not in_tiles(torch.zeros(2, 65, dtype=torch.bfloat16, device=DEVICE)[:1, :64])


def test_logits_may_be_columns_of_something_wider() -> None:
    wide, bias = torch.randn(5, 40, device=DEVICE), torch.randn(32, device=DEVICE)
    ids, weights, lse = route(wide[:, :16], bias[::2], 4, 2, 3, 2.5)
    want = route(wide[:, :16].clone(), bias[::2].clone(), 4, 2, 3, 2.5)
    assert all(torch.equal(a, b) for a, b in zip((ids, weights, lse), want, strict=True))
    got, want = (route_kernels.route_backward(x, ids, lse, weights, lse, 2.5) for x in (wide[:, :16], wide[:, :16].clone()))
    assert torch.equal(got, want)
