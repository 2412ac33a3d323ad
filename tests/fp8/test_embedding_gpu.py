"""The embedding's gradient kernels against float64, and against themselves."""

import pytest
import torch

from fp8 import embedding_kernels
from fp8.embedding_kernels import add_rows, order
from tests.fp8.kernel_checks import DEVICE, INTERPRETED, marks, randn

pytestmark = marks
SIZES = [(1, 8, 16), (100, 5, 48), (300, 1000, 16)]
SIZES += [] if INTERPRETED else [(16384, 157184, 2048), (5000, 1, 272), (4096, 64, 1024), (100_000, 700, 64)]


def drawn(tokens: int, vocab: int) -> torch.Tensor:
    return (torch.rand(tokens, device=DEVICE) ** 3 * vocab).long()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens, vocab, dim", SIZES)
def test_sums(tokens: int, vocab: int, dim: int, dtype: torch.dtype) -> None:
    ids = drawn(tokens, vocab)
    dy, start = randn(tokens, dim, dtype=dtype), randn(vocab, dim, dtype=torch.float32)
    out, again = start.clone(), start.clone()
    add_rows(out, ids, dy)
    add_rows(again, ids, dy)
    assert torch.equal(out, again)
    want = start.double().index_add_(0, ids, dy.double())
    size = start.double().abs().index_add_(0, ids, dy.double().abs())
    assert ((out.double() - want).abs() <= 1e-6 * size).all()


def test_a_run_longer_than_is_looked_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_kernels, "JOIN_REACH", 2)
    ids, dy, out = torch.zeros(75, dtype=torch.int64, device=DEVICE), randn(75, 16), torch.zeros(2, 16, device=DEVICE)
    ids[0] = 1
    add_rows(out, ids, dy)
    torch.testing.assert_close(out[0], dy[1:].float().sum(0), rtol=1e-5, atol=1e-5)
    assert torch.equal(out[1], dy[0].float())


ORDERS = [(1, 1), (700, 2), (300, 40)]
ORDERS += [] if INTERPRETED else [(16384, 157184), (16384, 1), (20000, 300), (65536, 300), (100_000, 157184)]


@pytest.mark.parametrize("tokens, vocab", ORDERS)
def test_equal_tokens_stand_together(tokens: int, vocab: int) -> None:
    ids = drawn(tokens, vocab)
    ordered, places = order(ids)
    assert torch.equal(places.long().sort()[0], torch.arange(tokens, device=DEVICE))
    assert torch.equal(ids[places.long()], ordered.long())
    assert 1 + (ordered[1:] != ordered[:-1]).sum() == ids.unique().numel()
    assert torch.equal(places, order(ids)[1]), "another order in another run"
