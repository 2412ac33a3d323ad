"""The embedding's gradient kernels against float64, and against themselves."""

import pytest
import torch

from fp8.embedding_kernels import add_rows
from tests.fp8.kernel_checks import DEVICE, INTERPRETED, marks, randn

pytestmark = marks
SIZES = [(1, 8, 16), (100, 5, 48)]
SIZES += [] if INTERPRETED else [(16384, 157184, 2048), (5000, 1, 272), (4096, 64, 1024)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens, vocab, dim", SIZES)
def test_sums(tokens: int, vocab: int, dim: int, dtype: torch.dtype) -> None:
    ids = (torch.rand(tokens, device=DEVICE) ** 3 * vocab).long()
    dy, start = randn(tokens, dim, dtype=dtype), randn(vocab, dim, dtype=torch.float32)
    out, again = start.clone(), start.clone()
    add_rows(out, ids, dy)
    add_rows(again, ids, dy)
    assert torch.equal(out, again)
    want = start.double().index_add_(0, ids, dy.double())
    size = start.double().abs().index_add_(0, ids, dy.double().abs())
    assert ((out.double() - want).abs() <= 1e-6 * size).all()
