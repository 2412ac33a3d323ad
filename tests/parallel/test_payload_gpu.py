"""Packing and unpacking kernels against the references, bitwise: they only move bytes, so the interpreter is exact too."""

from __future__ import annotations

import pytest
import torch

from fp8.permute import build_permutation
from fp8.quantize import quantize_ref
from fp8.quantized import Quantized
from fp8.recipe import Spec
from parallel import payload_kernels as kernels
from parallel.payload import RowFormat, pack_ref, sum_packed_ref, unpack_ref
from tests.fp8.kernel_checks import DEVICE, INTERPRETED, ROW, marks, randn, same_bytes

pytestmark = marks
CASES = [(1, 128), (37, 272), (20, 640)]
CASES += [] if INTERPRETED else [(4096, 2048), (1000, 7168), (16384, 2048)]
SPECS = {"block": ROW, "mx": Spec("e4m3", (1, 32), "block"), "bf16": None}


def rows_of(rows: int, cols: int, form: str) -> Quantized:
    x = randn(rows, cols)
    return Quantized.unscaled(x) if form == "bf16" else quantize_ref(x, SPECS[form])


@pytest.mark.parametrize("extra", [0, 12, 48])
@pytest.mark.parametrize("form", list(SPECS))
@pytest.mark.parametrize("rows, cols", CASES)
def test_pack(rows: int, cols: int, form: str, extra: int) -> None:
    q = rows_of(rows, cols, form)
    index = torch.randint(0, rows, (2 * rows + 3,), device=DEVICE)
    mine = torch.randint(0, 256, (2 * rows + 3, extra), dtype=torch.uint8, device=DEVICE) if extra else None
    assert torch.equal(kernels.pack(q, index, mine), pack_ref(q, index, mine))
    assert torch.equal(kernels.pack(q, None, None), pack_ref(q))


@pytest.mark.parametrize("extra", [0, 12])
@pytest.mark.parametrize("form", list(SPECS))
@pytest.mark.parametrize("rows, cols", CASES)
def test_unpack(rows: int, cols: int, form: str, extra: int) -> None:
    q = rows_of(rows, cols, form)
    layout, mine = RowFormat.of(q, extra), torch.ones(rows, extra, dtype=torch.uint8, device=DEVICE)
    payload = pack_ref(q, None, mine if extra else None)
    ids = torch.randint(-1, 4, (rows, 3), device=DEVICE)
    perm = build_permutation(ids, 4)
    end = int(perm.groups.ends_E[-1])
    for index, per_row, live, count in ((None, 1, None, rows), (perm.slot_R, 3, perm.groups.block_expert_B, end)):
        got = kernels.unpack(payload, layout, None, index, per_row, live)
        want = unpack_ref(payload, layout, None, index, per_row)
        if form == "bf16":
            assert torch.equal(got.data[:count], want.data[:count])
        else:
            assert same_bytes(got, want, count) and got.scale_inv.t().is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", ["block", "mx"])
@pytest.mark.parametrize("rows, cols", CASES)
def test_sum_packed(rows: int, cols: int, form: str, dtype: torch.dtype) -> None:
    """E4M3 times a power of two is exact in BF16 and FP32, so sums in one order are equal."""
    q = rows_of(rows, cols, form)
    index = torch.randint(-1, rows, (2 * rows + 1, 3), device=DEVICE)
    got, want = (f(pack_ref(q), RowFormat.of(q), index, dtype) for f in (kernels.sum_packed, sum_packed_ref))
    assert torch.equal(got, want) and got.dtype == dtype
