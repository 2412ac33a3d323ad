"""The kernel behind SwiGLU's backward: both FP8 forms of dh from one read of h and da. In Gluon, for its layouts and copies.

A CTA takes a 128x128 block of dg and its block of du. All it reads is copied to shared memory at once. A warp then works on whole
rows: it makes dg and du, rounds them to BF16, stores the row form, whose scales it finds by itself, and puts the BF16 pairs where
the inputs were. Then a warp works on whole columns: it reads pairs down the rows and stores the column form. Held in registers from
one form to the other, as Triton would, a block leaves no room for a second CTA; this way three take turns in waiting for memory.

Rows go four at a time: group i of buffer j is row 4i + j of the block, so that a word of the column form is four buffers' work.
"""

import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from fp8.block_forms import UPPER, encode_pairs, high_half, larger, low_half, pack_bf16, peaks, row_scales, times
from fp8.device_math import LOG2_E, reciprocal_of_1_plus_exp2
from fp8.gluon_layouts import jit, places, sliced, store
from fp8.gluon_names import load_async
from fp8.quantize_device import pack4, pow2_scale, unpack4
from fp8.quantize_kernels import INTERPRETED

WARPS, REGISTERS = 8, 80  # three CTAs a multiprocessor, by registers and by shared memory
# All of [32 groups of rows, 32 words of four columns]. By rows: a lane has words 2i, 2i + 1, 16 + 2i and 17 + 2i of one row. By
# columns: four groups of one word, which are 16 bytes of the transposed matrix.
BY_ROWS = tl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 16]], lane_bases=[[0, 2], [0, 4], [0, 8], [16, 0], [1, 0]],
        warp_bases=[[2, 0], [4, 0], [8, 0]], block_bases=[], shape=[32, 32],
    )
)  # fmt: skip
BY_COLUMNS = tl.constexpr(gl.BlockedLayout([4, 1], [8, 4], [1, WARPS], [0, 1]))
COPY_CODES = tl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0]))  # 16 bytes a lane
COPY_BF16 = tl.constexpr(gl.BlockedLayout([1, 2], [2, 16], [WARPS, 1], [1, 0]))
PAIRS = tl.constexpr(gl.SwizzledSharedLayout(vec=4, per_phase=4, max_phase=8, order=[1, 0]))  # no bank conflict by rows or columns
PLAIN = tl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0]))

if INTERPRETED:  # layouts mean nothing there, and shared memory is a name for a value

    class _Buffer:
        def store(self, value: tl.tensor) -> None:
            self.value = value

        def load(self, layout: object) -> tl.tensor:
            return self.value

    _pairs = _words = _Buffer

    def _copy(buffer: _Buffer, at: tl.tensor, ok: tl.tensor, FULL: tl.constexpr) -> None:
        buffer.store(tl.load(at, mask=ok, other=0))

    def _arrive() -> None:
        pass

else:

    @jit
    def _pairs():
        return gl.allocate_shared_memory(gl.int32, [32, 32], PAIRS)

    @jit
    def _words():
        return gl.allocate_shared_memory(gl.int64, [32, 32], PLAIN)

    @jit
    def _copy(buffer, at, ok, FULL: gl.constexpr):
        """Begins to copy a tile; what is not `ok` becomes zero."""
        if FULL:
            load_async(buffer, at)
        else:
            load_async(buffer, at, mask=ok)

    @jit
    def _arrive():
        """Until all that was begun has been copied."""
        async_copy.commit_group()
        async_copy.wait_group(0)


@jit
def _gradients(g, u, da, slope, gate, up, scale, HARDWARE: tl.constexpr):
    """(dg, du, da * silu(g) * u / (gate * up)) of one element; g and u are codes.

    Everything constant along a row comes multiplied already: gate is the scale of g, slope = -gate / ln 2, up the scale of u times
    the routing weight, scale = gate times the routing weight.
    """
    s = reciprocal_of_1_plus_exp2(g * slope, HARDWARE)
    gs = g * s
    both = da * u
    return both * up * (gs * (gate - gate * s) + s), da * gs * scale, both * gs


@jit
def _row_gradients(g, u, da, gate, up, w, HARDWARE: tl.constexpr):
    """Pairs of dg and of du (columns 4w and 4w + 1; 4w + 2 and 4w + 3), and each row's part of dw."""
    part = gate * up
    slope, up, scale = tl.expand_dims(gate * -LOG2_E, 1), tl.expand_dims(up * w, 1), tl.expand_dims(gate * w, 1)
    gate = tl.expand_dims(gate, 1)
    low, high = da.to(tl.int32), (da >> 32).to(tl.int32)
    g0, g1, g2, g3 = unpack4(g, HARDWARE)
    u0, u1, u2, u3 = unpack4(u, HARDWARE)
    g0, u0, p0 = _gradients(g0, u0, low_half(low), slope, gate, up, scale, HARDWARE)
    g1, u1, p1 = _gradients(g1, u1, high_half(low), slope, gate, up, scale, HARDWARE)
    g2, u2, p2 = _gradients(g2, u2, low_half(high), slope, gate, up, scale, HARDWARE)
    g3, u3, p3 = _gradients(g3, u3, high_half(high), slope, gate, up, scale, HARDWARE)
    g01, g23 = pack_bf16(g0, g1, HARDWARE), pack_bf16(g2, g3, HARDWARE)
    u01, u23 = pack_bf16(u0, u1, HARDWARE), pack_bf16(u2, u3, HARDWARE)
    return g01, g23, u01, u23, part * tl.sum(p0 + p1 + p2 + p3, 1)


@jit
def _store_rows(q_at, si_at, lo, hi, ok, FULL: tl.constexpr, HARDWARE: tl.constexpr):
    """Codes of 32 rows with 1x128 tiles."""
    multiplier, inverse = row_scales(lo, hi, HARDWARE)
    store(si_at, inverse, ok, FULL)
    store(q_at, encode_pairs(lo, hi, tl.expand_dims(multiplier, 1), HARDWARE), tl.expand_dims(ok, 1), FULL)


@jit
def _store_columns(b0, b1, b2, b3, qt_at, sit_at, words_t, HARDWARE: tl.constexpr):
    """Codes of both columns of each pair, tiles along rows."""
    w0, w1, w2, w3 = b0.load(BY_COLUMNS), b1.load(BY_COLUMNS), b2.load(BY_COLUMNS), b3.load(BY_COLUMNS)
    peak = peaks(larger(larger(w0, w1, HARDWARE), larger(w2, w3, HARDWARE), HARDWARE), 0, HARDWARE)
    low, low_inverse = pow2_scale(peak << 16)
    high, high_inverse = pow2_scale(peak & UPPER)
    factors = tl.expand_dims((low.to(tl.int32, bitcast=True) >> 16) | high.to(tl.int32, bitcast=True), 0)
    w0, w1 = times(w0, factors, HARDWARE), times(w1, factors, HARDWARE)
    w2, w3 = times(w2, factors, HARDWARE), times(w3, factors, HARDWARE)
    tl.store(sit_at, low_inverse)
    tl.store(sit_at + 1, high_inverse)
    tl.store(qt_at, pack4(low_half(w0), low_half(w1), low_half(w2), low_half(w3), HARDWARE))
    tl.store(qt_at + words_t, pack4(high_half(w0), high_half(w1), high_half(w2), high_half(w3), HARDWARE))


@jit
def _row_pass(
    j, codes_g, codes_u, wide_da, constants, q_ptr, si_ptr, dw_ptr, first, cb, rows, words,
    WEIGHTED: tl.constexpr, FULL: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Rows 4i + j: their row form and part of dw are stored, their pairs returned in buffers: g01, g23, u01, u23."""
    gate, up, w = constants
    g, u, da = codes_g.load(BY_ROWS), codes_u.load(BY_ROWS), wide_da.load(BY_ROWS)
    g01, g23, u01, u23, part = _row_gradients(g, u, da, gate, up, w, HARDWARE)
    b0, b1, b2, b3 = _pairs(), _pairs(), _pairs(), _pairs()  # here, so that they lie where g, u and da were
    b0.store(g01)
    b1.store(g23)
    b2.store(u01)
    b3.store(u23)
    inside = 4 * places(32, sliced(1, BY_ROWS)) + j
    ok, row = first + inside < rows, first.to(tl.int64) + inside
    of_gate, of_up = cb.to(tl.int64) * rows, (cb + words // 32).to(tl.int64) * rows
    if WEIGHTED:
        store(dw_ptr + of_gate + row, part, ok, FULL)
    q_at = q_ptr + (first.to(tl.int64) * (2 * words) + cb * 32)
    q_at += tl.expand_dims(inside, 1) * (2 * words) + tl.expand_dims(places(32, sliced(0, BY_ROWS)), 0)
    _store_rows(q_at, si_ptr + of_gate + row, g01, g23, ok, FULL, HARDWARE)
    _store_rows(q_at + words, si_ptr + of_up + row, u01, u23, ok, FULL, HARDWARE)
    return b0, b1, b2, b3


@jit
def _constants(j, hsi_ptr, w_ptr, first, cb, rows, words, WEIGHTED: tl.constexpr, FULL: tl.constexpr):
    """(scale of g, scale of u, routing weight) of rows 4i + j."""
    row = first + 4 * places(32, sliced(1, BY_ROWS)) + j
    gate_at, up_at = hsi_ptr + cb.to(tl.int64) * rows + row, hsi_ptr + (cb + words // 32).to(tl.int64) * rows + row
    w = 1.0
    if FULL:
        gate, up = tl.load(gate_at), tl.load(up_at)
        if WEIGHTED:
            w = tl.load(w_ptr + row)
    else:
        gate, up = tl.load(gate_at, mask=row < rows, other=0.0), tl.load(up_at, mask=row < rows, other=0.0)
        if WEIGHTED:
            w = tl.load(w_ptr + row, mask=row < rows, other=0.0)
    return gate, up, w


@jit
def _copy_rows(j, codes_g, codes_u, wide_da, hq_ptr, da_ptr, first, cb, rows, words, FULL: tl.constexpr):
    """Begins to copy rows 4i + j of g, of u and of da."""
    inside = tl.expand_dims(4 * places(32, sliced(1, COPY_CODES)) + j, 1)
    at = hq_ptr + (first.to(tl.int64) * (2 * words) + cb * 32) + inside * (2 * words)
    at += tl.expand_dims(places(32, sliced(0, COPY_CODES)), 0)
    _copy(codes_g, at, first + inside < rows, FULL)
    _copy(codes_u, at + words, first + inside < rows, FULL)
    inside = tl.expand_dims(4 * places(32, sliced(1, COPY_BF16)) + j, 1)
    at = da_ptr + (first.to(tl.int64) * words + cb * 32) + inside * words + tl.expand_dims(places(32, sliced(0, COPY_BF16)), 0)
    _copy(wide_da, at, first + inside < rows, FULL)


@jit
def swiglu_backward(
    hq_ptr, hsi_ptr, da_ptr, w_ptr, dw_ptr, q_ptr, si_ptr, qt_ptr, sit_ptr, live_ptr, rows, width, words_t,
    WEIGHTED: tl.constexpr, LIVE: tl.constexpr, FULL: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Row form and transposed form (tiles along rows) of a 128x128 block of dg and its block of du, and the block's part of dw.

    hq, q and qt as int32 words of four codes, da as int64 words of four BF16. FULL: rows is a multiple of 128.
    """
    cb, rb = tl.program_id(0), tl.program_id(1)
    if LIVE:
        if tl.load(live_ptr + rb) < 0:
            return
    words, first = width // 4, rb * 128
    g0, g1, g2, g3 = _pairs(), _pairs(), _pairs(), _pairs()
    u0, u1, u2, u3 = _pairs(), _pairs(), _pairs(), _pairs()
    d0, d1, d2, d3 = _words(), _words(), _words(), _words()
    _copy_rows(0, g0, u0, d0, hq_ptr, da_ptr, first, cb, rows, words, FULL)
    _copy_rows(1, g1, u1, d1, hq_ptr, da_ptr, first, cb, rows, words, FULL)
    _copy_rows(2, g2, u2, d2, hq_ptr, da_ptr, first, cb, rows, words, FULL)
    _copy_rows(3, g3, u3, d3, hq_ptr, da_ptr, first, cb, rows, words, FULL)
    c0 = _constants(0, hsi_ptr, w_ptr, first, cb, rows, words, WEIGHTED, FULL)
    c1 = _constants(1, hsi_ptr, w_ptr, first, cb, rows, words, WEIGHTED, FULL)
    c2 = _constants(2, hsi_ptr, w_ptr, first, cb, rows, words, WEIGHTED, FULL)
    c3 = _constants(3, hsi_ptr, w_ptr, first, cb, rows, words, WEIGHTED, FULL)
    _arrive()
    r0 = _row_pass(0, g0, u0, d0, c0, q_ptr, si_ptr, dw_ptr, first, cb, rows, words, WEIGHTED, FULL, HARDWARE)
    r1 = _row_pass(1, g1, u1, d1, c1, q_ptr, si_ptr, dw_ptr, first, cb, rows, words, WEIGHTED, FULL, HARDWARE)
    r2 = _row_pass(2, g2, u2, d2, c2, q_ptr, si_ptr, dw_ptr, first, cb, rows, words, WEIGHTED, FULL, HARDWARE)
    r3 = _row_pass(3, g3, u3, d3, c3, q_ptr, si_ptr, dw_ptr, first, cb, rows, words, WEIGHTED, FULL, HARDWARE)

    word = cb * 128 + 4 * places(32, sliced(0, BY_COLUMNS))
    qt_at = qt_ptr + rb * 32 + tl.expand_dims(word.to(tl.int64), 0) * words_t + tl.expand_dims(places(32, sliced(1, BY_COLUMNS)), 1)
    sit_at = sit_ptr + rb.to(tl.int64) * (2 * width) + word
    half = width.to(tl.int64) * words_t
    _store_columns(r0[0], r1[0], r2[0], r3[0], qt_at, sit_at, words_t, HARDWARE)
    _store_columns(r0[1], r1[1], r2[1], r3[1], qt_at + 2 * words_t, sit_at + 2, words_t, HARDWARE)
    _store_columns(r0[2], r1[2], r2[2], r3[2], qt_at + half, sit_at + width, words_t, HARDWARE)
    _store_columns(r0[3], r1[3], r2[3], r3[3], qt_at + half + 2 * words_t, sit_at + width + 2, words_t, HARDWARE)
