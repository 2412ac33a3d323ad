"""The kernel that takes a BF16 result into a gradient buffer, bitwise against torch."""

import pytest
import torch

from fp8.gradient_kernels import take
from tests.fp8.kernel_checks import INTERPRETED, marks, randn

pytestmark = marks
SHAPES = [(1, 1), (33, 272)] if INTERPRETED else [(1, 1), (33, 272), (5000, 2048)]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_take(shape: tuple[int, int], dtype: torch.dtype, accumulate: bool) -> None:
    y, out = randn(*shape), randn(*shape, dtype=dtype)
    want = out.float() + y.float() if accumulate else y.float()
    take(y, out, accumulate)
    assert torch.equal(out, want.to(dtype))
