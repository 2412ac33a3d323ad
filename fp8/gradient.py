"""Adding to a BF16 gradient without losing what is small: stochastic rounding of the sum.

Rounded to nearest, a micro-batch whose contribution is under 1/512 of the sum so far vanishes; stochastically it counts in the
mean. The first micro-batch of a step writes, so only the following ones come here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from fp8.philox import Draw, weight_words
from fp8.state_codecs import bits_of, float_of

if TYPE_CHECKING:
    from fp8.weight import Weight


def add_stochastic_ref(total: Tensor, x: Tensor, word: Tensor) -> Tensor:
    """BF16 sum of BF16 `total` and `x`; the upper 16 bits of `word` (int64) decide between the two neighbours."""
    return float_of((bits_of(total.float() + x.float()) + (word >> 16)) >> 16 << 16).bfloat16()


def add_stochastic_(weight: Weight, x: Tensor, draw: Draw) -> None:
    """weight.main_grad (BF16) += x, rounded stochastically. `draw` must be one of a step and a use of the weight."""
    total = weight.main_grad
    if total.is_cuda:
        from fp8 import optimizer_launch  # Triton comes with CUDA builds of torch only

        if optimizer_launch.whole_blocks(weight) and total.is_contiguous():
            return optimizer_launch.add_stochastic_(weight, x, draw)
    total.copy_(add_stochastic_ref(total, x, weight_words(draw, weight)))
