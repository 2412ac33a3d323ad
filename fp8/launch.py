"""The host's side of kernel launches. Triton's own `cdiv` unwraps compile-time values and costs more than some launches."""

import torch
from torch import Tensor


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below n >= 1."""
    return 1 << (n - 1).bit_length()


def in_words(t: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of t, whole words of the wider `dtype` in each row, as flat words: of a copy where t does not begin at a word.

    A view may begin anywhere in its storage and still be contiguous, which `Tensor.view(dtype)` refuses; and what a kernel makes
    must not depend on where its input lies, as it would if another kernel took over.
    """
    if t.storage_offset() * t.element_size() % dtype.itemsize:
        t = t.clone()
    return t.flatten().view(dtype)
