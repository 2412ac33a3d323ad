"""Softmax statistics and gradient against float64; the head against the reference."""

import pytest
import torch

from fp8 import cross_entropy_kernels as kernels
from fp8.cross_entropy import IGNORE
from tests.fp8.kernel_checks import DEVICE, INTERPRETED, assert_quantized, marks, randn
from tests.fp8.test_head_gradient import skewed

pytestmark = marks
SIZES = [(1, 128), (150, 144)] if INTERPRETED else [(1, 128), (150, 784), (256, 8192), (2048, 157184)]


def drawn(rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, some rows of which are confident, and labels, some ignored."""
    logits = randn(rows, cols, scale=4.0)
    labels = torch.randint(0, cols, (rows,), device=DEVICE)
    confident = torch.arange(0, rows, 3, device=DEVICE)
    logits[confident, labels[confident]] = 30.0
    labels[rows // 2 : rows // 2 + rows // 5] = IGNORE
    return logits, labels


@pytest.mark.parametrize("z", [0.0, 1e-3])
@pytest.mark.parametrize("rows, cols", SIZES)
def test_statistics_and_gradient(rows: int, cols: int, z: float) -> None:
    logits, labels = drawn(rows, cols)
    valid = labels != IGNORE
    column = torch.where(valid, labels, kernels.NO_LABEL)
    peak, total, picked = kernels.statistics(logits, column)
    x = logits.double()
    lse64 = torch.logsumexp(x, -1)
    lse = peak + total.log()
    torch.testing.assert_close(lse.double(), lse64, rtol=1e-6, atol=1e-5)
    assert torch.equal(picked, torch.where(valid, logits.float().gather(1, column.clamp(min=0)[:, None])[:, 0], 0.0))

    scale = torch.tensor(1 / 1234, device=DEVICE)
    factor = torch.where(valid, 1 + 2 * z * lse, 0.0)
    onehot = torch.zeros_like(x).scatter_(1, column.clamp(min=0)[:, None], 1.0)
    want = scale.double() * valid[:, None] * ((1 + 2 * z * lse64)[:, None] * (x - lse.double()[:, None]).exp() - onehot)
    rows_q, columns_q = kernels.gradient(logits, lse, factor, column, picked, scale)
    # p - 1 of a confident row: ex2.approx is within 2^-22 of p, and three roundings to FP32 follow
    cancels = (2**-22 + 3 * 2**-24) * scale.item()
    bf16 = 2**-8 + 1e-4  # dlogits are rounded to BF16 before they are quantised, as the reference does
    assert_quantized(rows_q, want, slack=bf16, atol=cancels)
    assert_quantized(columns_q, torch.nn.functional.pad(want, (0, 0, 0, -rows % 128)).t(), slack=bf16, atol=cancels)
    plain = kernels.gradient_in_place(logits.float(), lse, factor, column, scale)
    torch.testing.assert_close(plain.double(), want, rtol=1e-4, atol=cancels)
    assert (plain[~valid] == 0).all()


def test_what_lies_past_the_last_column_counts_for_no_scale() -> None:
    """The last tile of each row has 16 columns, all improbable: zeros read past them would be probable."""
    rows, cols = 130, 144
    logits = randn(rows, cols)
    logits[:, 128:] -= 30
    label, one = torch.full((rows,), kernels.NO_LABEL, device=DEVICE), torch.ones(rows, device=DEVICE)
    lse = torch.logsumexp(logits.float(), -1)
    rows_q, columns_q = kernels.gradient(logits, lse, one, label, torch.zeros_like(one), torch.tensor(1.0, device=DEVICE))
    want = (logits.double() - lse.double()[:, None]).exp()
    assert_quantized(rows_q, want, slack=2**-8 + 1e-4)
    assert_quantized(columns_q, torch.nn.functional.pad(want, (0, 0, 0, -rows % 128)).t(), slack=2**-8 + 1e-4)


def test_little_mass_is_lost_beside_the_label() -> None:
    """The kernel's codes where p - 1 of the label shares its tile with probabilities of 1e-6 (bounds: test_head_gradient.py)."""
    tokens, vocab = (128, 256) if INTERPRETED else (256, 4096)
    logits, labels = (t.to(DEVICE) for t in skewed(tokens, vocab))
    logits = logits.bfloat16()
    peak, total, picked = kernels.statistics(logits, labels)
    one = torch.ones_like(peak)
    rows_q, _ = kernels.gradient(logits, peak + total.log(), one, labels, picked, torch.tensor(1.0, device=DEVICE))
    grad = logits.double().softmax(-1).scatter_add(1, labels[:, None], -one.double()[:, None])
    got = rows_q.dequantize().double()
    others = torch.ones_like(grad, dtype=torch.bool).scatter_(1, labels[:, None], False)
    flushed = (got == 0) & (grad != 0) & others
    # beside 1, E4M3 with a power-of-two scale ends at 2^-18: the tiles of a label and of four rivals lose at most 2^-19 a value
    assert (grad * flushed).sum(1).max() <= 6 * 127 * 2**-19
    mass = (grad * others).sum(1)
    assert (((got * others).sum(1) - mass).abs() / mass).max() < 2**-4 + 2**-8
    assert got.sum(1).abs().max() < 2**-4 + 2**-8
