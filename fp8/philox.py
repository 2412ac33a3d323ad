"""Random bits that depend on what they round, never on where: counter-based Philox4x32-7.

    word(element i) = lane i % 4 of Philox4x32-7(key = seed, counter = (i // 4, micro-batch, parameter, stream, step))

`i` is the element's index in the global tensor, so every sharding draws the same bits and a resumed run continues them.
Distinct (seed, step, micro-batch, stream, parameter, i) give distinct counters or lanes: nothing is ever shared.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Philox is a bijection of the counter. Seven rounds
are the fewest that pass all of BigCrush (their section 5); three more, for margin, would cost 3 of some 60 instructions an element.

The Triton form of the same words is in philox_kernels.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fp8.weight import Weight

M0, M1 = 0xD2511F53, 0xCD9E8D57  # multipliers of the two halves
W0, W1 = 0x9E3779B9, 0xBB67AE85  # what a round adds to the key
MASK = 0xFFFFFFFF
ROUNDS = 7
UPDATE, GRADIENT = 0, 1  # streams: optimizer states, gradient accumulation


@dataclass(frozen=True)
class Draw:
    """Everything but the element index that random words depend on.

    Attributes:
        seed: 64 bits.
        step: optimizer step, 32 bits.
        parameter: place of the weight among the model's weights, 24 bits.
        stream: what the bits are for, 8 bits.
        micro_batch: 16 bits; 0 for what happens once a step.
    """

    seed: int
    step: int
    parameter: int
    stream: int = UPDATE
    micro_batch: int = 0

    def __post_init__(self) -> None:
        for name, bits in ("seed", 64), ("step", 32), ("parameter", 24), ("stream", 8), ("micro_batch", 16):
            assert 0 <= getattr(self, name) < 1 << bits, f"{name} {getattr(self, name)} does not fit {bits} bits"

    @property
    def key(self) -> tuple[int, int]:
        return self.seed & MASK, self.seed >> 32

    @property
    def counter(self) -> tuple[int, int, int]:
        """Words 1 to 3; the upper bits of the quad index are added to word 1."""
        return self.micro_batch << 16, self.parameter | self.stream << 24, self.step


def philox_ref(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four counter words -> four random words, each int64 holding 32 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * M0, c2 * M1  # wraps as two's complement: bits 0 to 63 are right
        c0, c1, c2, c3 = ((p1 >> 32) & MASK) ^ c1 ^ k0, p1 & MASK, ((p0 >> 32) & MASK) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + W0) & MASK, (k1 + W1) & MASK
    return c0, c1, c2, c3


def random_words(draw: Draw, index: Tensor, by_quads: bool = False) -> Tensor:
    """32 random bits (int64) for each global element index (int64, any shape).

    Args:
        by_quads: the last dimension consists of whole quads of neighbours (4i .. 4i + 3), which share one evaluation.
    """
    quad = (index[..., ::4] if by_quads else index) >> 2
    high, c2, c3 = draw.counter
    words = philox_ref((quad & MASK, (quad >> 32) + high, torch.full_like(quad, c2), torch.full_like(quad, c3)), draw.key)
    if by_quads:
        return torch.stack(words, -1).flatten(-2)
    return torch.stack(words, -1).gather(-1, (index & 3).unsqueeze(-1)).squeeze(-1)


def global_index(weight: Weight) -> Tensor:
    """int64, the shape of the local tensor: each element's row-major index in the global tensor."""
    index = torch.empty(weight.data.shape, dtype=torch.int64, device=weight.data.device)
    for piece in weight.pieces:
        out, stride = index[piece.local], 1
        out.zero_()
        for dim in reversed(range(out.dim())):
            place = torch.arange(out.shape[dim], device=index.device) + piece.offset[dim]
            out += (place * stride).view(-1, *[1] * (out.dim() - dim - 1))
            stride *= weight.global_shape[dim]
    return index


def whole_quads(weight: Weight) -> bool:
    """Whether quads of neighbouring global elements lie within rows of the local tensor."""
    starts = [(p.offset[-1], p.local[-1].start or 0) for p in weight.pieces]
    sizes = (weight.global_shape[-1], weight.data.shape[-1], *(n for pair in starts for n in pair))
    return all(n % 4 == 0 for n in sizes)


def weight_words(draw: Draw, weight: Weight) -> Tensor:
    """32 random bits (int64) for each element of a weight."""
    return random_words(draw, global_index(weight), whole_quads(weight))
