"""Philox4x32-7 in Triton: the words of philox.py, bit for bit."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8.philox import ROUNDS, Draw

_M0, _M1 = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
_ROUNDS = tl.constexpr(ROUNDS)
_W0, _W1 = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Four words for each counter. c0 is a uint32 tensor, the others uint32 tensors or scalars; key words uint32 scalars.

    One 32x32 -> 64 bit multiplication gives both halves of a product; the key schedule is scalar work.
    """
    for _ in tl.static_range(_ROUNDS):
        p0 = c0.to(tl.uint64) * _M0
        p1 = c2.to(tl.uint64) * _M1
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = p1.to(tl.uint32)
        c3 = p0.to(tl.uint32)
        k0 = (k0.to(tl.uint64) + _W0).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + _W1).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def quad_words(quad, c1, c2, c3, k0, k1):
    """int64 quad indices -> the four words of each quad's elements, uint32 of the same shape.

    c1..c3 and the key: `Draw.counter` and `Draw.key`, as int32 scalars that hold the bits.
    """
    high = (quad >> 32).to(tl.uint32) + c1.to(tl.uint32, bitcast=True)
    return philox(
        quad.to(tl.uint32), high, c2.to(tl.uint32, bitcast=True), c3.to(tl.uint32, bitcast=True),
        k0.to(tl.uint32, bitcast=True), k1.to(tl.uint32, bitcast=True),
    )  # fmt: skip


@triton.jit
def words_from(first, c1, c2, c3, k0, k1, ROWS: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """Words of `ROWS` x 128 elements as int32; first: int64 [ROWS, 128 // NEIGHBOURS], the first quad of each run of neighbours.

    A thread works out 16 or 8 neighbours: the layout in which wide accesses load a row, so nothing has to move.
    """
    if NEIGHBOURS == 16:
        a0, a1, a2, a3 = quad_words(first, c1, c2, c3, k0, k1)
        b0, b1, b2, b3 = quad_words(first + 1, c1, c2, c3, k0, k1)
        d0, d1, d2, d3 = quad_words(first + 2, c1, c2, c3, k0, k1)
        e0, e1, e2, e3 = quad_words(first + 3, c1, c2, c3, k0, k1)
        w0 = tl.join(tl.join(a0, d0), tl.join(b0, e0))
        w1 = tl.join(tl.join(a1, d1), tl.join(b1, e1))
        w2 = tl.join(tl.join(a2, d2), tl.join(b2, e2))
        w3 = tl.join(tl.join(a3, d3), tl.join(b3, e3))
    else:
        a0, a1, a2, a3 = quad_words(first, c1, c2, c3, k0, k1)
        b0, b1, b2, b3 = quad_words(first + 1, c1, c2, c3, k0, k1)
        w0, w1, w2, w3 = tl.join(a0, b0), tl.join(a1, b1), tl.join(a2, b2), tl.join(a3, b3)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(words, [ROWS, 128]).to(tl.int32, bitcast=True)


@triton.jit
def row_words(quad, c1, c2, c3, k0, k1, ROWS: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """The same from the first quad of each row, int64 [ROWS, 1]."""
    quads: tl.constexpr = NEIGHBOURS // 4
    first = quad + quads * tl.arange(0, 128 // NEIGHBOURS)[None, :]
    return words_from(first, c1, c2, c3, k0, k1, ROWS, NEIGHBOURS)


@triton.jit(do_not_specialize=["start", "c1", "c2", "c3", "k0", "k1"])
def _random_words(out_ptr, start, size, c1, c2, c3, k0, k1, QUADS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * QUADS + tl.arange(0, QUADS)
    w0, w1, w2, w3 = quad_words(place + start, c1, c2, c3, k0, k1)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).to(tl.int64)
    element = tl.program_id(0).to(tl.int64) * QUADS * 4 + tl.arange(0, QUADS * 4)
    tl.store(out_ptr + element, tl.reshape(words, [QUADS * 4]), mask=element < size)


def as_int32(word: int) -> int:
    """The signed number with the bits of a 32-bit word: what a kernel argument of type int32 can carry."""
    return word - (1 << 32) if word >= 1 << 31 else word


def draw_arguments(draw: Draw) -> tuple[int, int, int, int, int]:
    """(c1, c2, c3, k0, k1) as int32 kernel arguments."""
    return tuple(as_int32(word) for word in (*draw.counter, *draw.key))


def random_words(draw: Draw, start: int, size: int, device: torch.device) -> Tensor:
    """int64 [size]: words of the elements start .. start + size - 1; `start` a multiple of 4."""
    assert start % 4 == 0, f"element {start} is not the first of a quad"
    out = torch.empty(size, dtype=torch.int64, device=device)
    _random_words[(triton.cdiv(size, 1024),)](out, start // 4, size, *draw_arguments(draw), QUADS=256)
    return out
