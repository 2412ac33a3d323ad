"""The kernel behind RMSNorm's forward of BF16 rows: values, codes or both, from one read. In Gluon, for its layout.

A few warps share a row and keep it as pairs of BF16 from the load to the store. Eight lanes share a block of 128 features, each
with two times eight neighbours, 16 bytes of a load: the largest magnitude of a block costs three shuffles, a row's sum five and one
barrier. Left to itself the compiler sums with two barriers, and moves the codes through shared memory before it stores them.
"""

from functools import lru_cache
from typing import NamedTuple

import triton.language as tl
from triton.experimental.gluon import language as gl

from fp8.block_forms import UPPER, both_halves, high_half, low_half, pack_bf16, peaks, times
from fp8.gluon_layouts import jit, places, sliced, store
from fp8.launch import cdiv, next_power_of_2
from fp8.quantize_device import encode, pow2_scale
from fp8.quantize_kernels import BLOCK, INTERPRETED

LANES = 8  # that share a block of 64 pairs
WARPS, VALUES = 4, 32  # of a program, and of one of its threads
MOST_FEATURES = 16384  # of a row that fits into a program's registers

if INTERPRETED:

    def _sum_of_rows(x: tl.tensor, rows: object, blocks: object, share: object, layout: object, sums: object) -> tl.tensor:
        return tl.sum(tl.sum(x, 2), 1)

else:

    @jit
    def _sum_of_rows(
        x, ROWS: gl.constexpr, BLOCKS: gl.constexpr, SHARE: gl.constexpr, LAYOUT: gl.constexpr, SUMS: gl.constexpr
    ):  # fmt: skip
        """Sums of [ROWS, BLOCKS, 64], known to all threads of a row: each warp leaves its own, and adds up all."""
        x = gl.sum(gl.reshape(gl.sum(x, 2), [ROWS, BLOCKS // SHARE // 4, SHARE, 4]), 3)
        x = gl.sum(x, 1)
        if SHARE > 1:
            shared = gl.allocate_shared_memory(gl.float32, [ROWS, SHARE], gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))
            shared.store(x)
            x = shared.load(SUMS)
        return gl.convert_layout(gl.sum(x, 1), gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))


class Tile(NamedTuple):
    """What a program works on: [rows, blocks, 64 pairs], `share` warps a row, and the layout of [rows, share] partial sums."""

    rows: int
    blocks: int
    share: int
    warps: int
    registers: int | None
    layout: gl.DistributedLinearLayout | None
    sums: gl.DistributedLinearLayout | None


def _bases(first: int, last: int, dim: int, dims: int = 3) -> list[list[int]]:
    """first, 2 * first, ... below `last` along a dimension."""
    return [[first << i if d == dim else 0 for d in range(dims)] for i in range((last // first).bit_length() - 1)]


@lru_cache
def forward_tile(dim: int) -> Tile:
    """Whole rows of `dim` features."""
    once = 32 // LANES  # blocks of which a warp holds one each time
    blocks = max(once, next_power_of_2(cdiv(dim, BLOCK)))
    share = max(min(WARPS, blocks // once), blocks // 16)
    warps = max(WARPS, share)
    together = warps // share  # rows that warps hold one each
    rows = together * max(1, VALUES * 32 * share // (blocks * BLOCK))
    registers = 64 if rows > together else None  # eight programs a multiprocessor; without a cap the compiler takes 70
    if INTERPRETED:
        return Tile(rows, blocks, share, warps, registers, None, None)
    layout = gl.DistributedLinearLayout(
        reg_bases=_bases(1, 4, 2) + _bases(4 * LANES, 64, 2) + _bases(once * share, blocks, 1) + _bases(together, rows, 0),
        lane_bases=_bases(4, 4 * LANES, 2) + _bases(1, once, 1),
        warp_bases=_bases(once, once * share, 1) + _bases(1, together, 0),
        block_bases=[], shape=[rows, blocks, 64],
    )  # fmt: skip
    sums = gl.DistributedLinearLayout(
        reg_bases=_bases(1, share, 1, 2) + _bases(together, rows, 0, 2), lane_bases=[[0, 0]] * 5,
        warp_bases=[[0, 0]] * (share.bit_length() - 1) + _bases(1, together, 0, 2), block_bases=[], shape=[rows, share],
    )  # fmt: skip
    return Tile(rows, blocks, share, warps, registers, layout, sums)


@jit
def _codes(first, second, HARDWARE: tl.constexpr):
    """Two fp32 tensors -> int16 words of two codes, the first in the lower byte."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [first, second], dtype=tl.int16, is_pure=True, pack=1
        )
    else:
        return (encode(first) | (encode(second) << 8)).to(tl.int16)


@jit(do_not_specialize=["plain", "quantize"])
def rms_norm_pairs(
    h_ptr, w_ptr, x_ptr, q_ptr, si_ptr, rows, dim, inverse_dim, eps, plain, quantize,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, SHARE: tl.constexpr, LAYOUT: tl.constexpr, SUMS: tl.constexpr,
    FULL: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """x = w * bf16(h * rstd), as values if `plain`, as codes if `quantize`: one compiled kernel for all, so that backward
    recomputes forward's bits.

    h and x as int32 pairs of BF16, w as int64 pairs of fp32, q as int16 pairs of codes; dim is even. FULL: the tile lies in the
    matrix as a whole.
    """
    row = tl.program_id(0) * ROWS + places(ROWS, sliced(1, sliced(2, LAYOUT)))
    block, pairs = places(BLOCKS, sliced(0, sliced(2, LAYOUT))), dim // 2
    pair = tl.expand_dims(tl.expand_dims(block * 64, 0), 2)
    pair += tl.expand_dims(tl.expand_dims(places(64, sliced(0, sliced(1, LAYOUT))), 0), 1)
    offset = tl.expand_dims(tl.expand_dims(row.to(tl.int64) * pairs, 1), 2) + pair
    ok = tl.expand_dims(tl.expand_dims(row < rows, 1), 2) & (pair < pairs)
    if FULL:
        h, w = tl.load(h_ptr + offset, eviction_policy="evict_first"), tl.load(w_ptr + pair)
    else:
        h, w = tl.load(h_ptr + offset, mask=ok, other=0), tl.load(w_ptr + pair, mask=pair < pairs, other=0)
    first, second = low_half(h), high_half(h)
    squares = _sum_of_rows(tl.fma(second, second, first * first), ROWS, BLOCKS, SHARE, LAYOUT, SUMS)
    rstd = tl.expand_dims(tl.expand_dims(tl.rsqrt(tl.fma(squares, inverse_dim, eps)), 1), 2)
    n = pack_bf16(first * rstd, second * rstd, HARDWARE)
    w_first, w_second = w.to(tl.int32).to(tl.float32, bitcast=True), (w >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    x = pack_bf16(low_half(n) * w_first, high_half(n) * w_second, HARDWARE)
    if plain != 0:
        store(x_ptr + offset, x, ok, FULL)
    if quantize != 0:
        peak = peaks(x, 2, HARDWARE)
        multiplier, inverse = pow2_scale(tl.maximum(peak << 16, peak & UPPER))
        y = times(x, tl.expand_dims(both_halves(multiplier), 2), HARDWARE)
        store(q_ptr + offset, _codes(low_half(y), high_half(y), HARDWARE), ok, FULL)
        si_ok = tl.expand_dims(row < rows, 1) & tl.expand_dims(block * 64 < pairs, 0)
        store(si_ptr + tl.expand_dims(block.to(tl.int64), 0) * rows + tl.expand_dims(row, 1), inverse, si_ok, FULL)
