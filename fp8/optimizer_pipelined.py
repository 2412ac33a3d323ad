"""AdamW for low-bit states on Hopper, in Gluon: the update of optimizer_kernels.py with the next strips' inputs on their way.

A program walks over 128x128 blocks in strips of 32 rows; two programs share a multiprocessor. Copies of the next strips run into
a ring in shared memory while one strip is worked on, so registers hold one strip only. A block's scales depend on all of its new
master, yet nearly always they are those of the step before: master and weight are written at once in the old scales, the new
master waits in shared memory, and only where a scale turns out to be another one are they written anew.

Copies and stores cover whole 32-byte sectors of L2. Bits are those of update_blocks, which other formats and devices take.
Formats: master FP16, m FP8, v FP8 or FP16, the weight FP8 with 128x128 scales, the gradient BF16.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from fp8.gluon_names import load_async
from fp8.optimizer_device import (
    KEPT,
    MASTER_BITS,
    MIN_FP16_BITS,
    codes_of_halves,
    decode_m,
    decode_v,
    dither,
    exp2,
    float_of,
    fp16_scale,
    half_toward_zero,
    max_or_nan,
    quotient,
    store_m,
    store_master,
    store_v,
)
from fp8.philox_kernels import words_from
from fp8.quantize_device import abs_bits, pow2_scale

_SCALARS = [  # never a reason to compile anew
    "num_blocks", "piece_rows", "piece_cols", "row_blocks", "col_blocks", "rb0", "cb0", "matrix0", "quad0",
    "quads_per_row", "quads_per_matrix", "c1", "c2", "c3", "k0", "k1",
]  # fmt: skip


@gluon.jit
def _split(i, piece_rows, piece_cols):
    """(column, row, matrix) of block `i` of the piece, in blocks; also of a distance."""
    return i % piece_cols, i // piece_cols % piece_rows, i // piece_cols // piece_rows


@gluon.jit
def _advance(place, distance, piece_rows, piece_cols):
    """The place a distance later, without a division."""
    cb, rb, e = place
    cols, rows, matrices = distance
    cb += cols
    carry = (cb >= piece_cols).to(gl.int32)
    cb -= carry * piece_cols
    rb += rows + carry
    carry = (rb >= piece_rows).to(gl.int32)
    return cb, rb - carry * piece_rows, e + matrices + carry


@gluon.jit
def _located(place, sizes):
    """(row of blocks in all stacked matrices, column of blocks, first quad) of a place in the piece."""
    row_blocks, rb0, cb0, matrix0, quad0, quads_per_row, quads_per_matrix = sizes
    cb, rb, e = place
    quad = quad0 + e.to(gl.int64) * quads_per_matrix + (rb * 128).to(gl.int64) * quads_per_row + cb * 32
    return (matrix0 + e) * row_blocks + rb0 + rb, cb0 + cb, quad


@gluon.jit
def _inner(rows_stride, ROWS: gl.constexpr, RUN: gl.constexpr, num_warps: gl.constexpr):
    """Offsets within a strip [ROWS, 128]: eight threads a row, each of which takes `RUN` neighbours at a time."""
    L: gl.constexpr = gl.BlockedLayout([1, RUN], [4, 8], [num_warps, 1], [1, 0])
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    return rows[:, None] * rows_stride + gl.arange(0, 128, layout=gl.SliceLayout(0, L))[None, :]


@gluon.jit
def _fetch(inputs, ring, base, offsets, slot):
    """Starts the copies of one strip's inputs: 16 bytes a thread, whole sectors of L2 at once. offsets: by size of an element."""
    for i in gl.static_range(4):
        inner = offsets[inputs[i].dtype.element_ty.primitive_bitwidth // 8 - 1]
        load_async(ring[i].index(slot), inputs[i] + base + inner)
    async_copy.commit_group()


@gluon.jit
def _arrived(ring, slot, L: gl.constexpr):
    """The strip in a slot: gradient, master, m, v."""
    return ring[0].index(slot).load(L), ring[1].index(slot).load(L), ring[2].index(slot).load(L), ring[3].index(slot).load(L)


@gluon.jit
def _block_scales(weights, block):
    x_ptr, x_scale_ptr, weight_ptr, weight_scale_ptr = weights
    return gl.load(x_scale_ptr + block), gl.load(weight_scale_ptr + block)


@gluon.jit
def _row_scales(states, row):
    m_ptr, m_scale_ptr, v_ptr, v_scale_ptr = states
    return gl.load(m_scale_ptr + row), gl.load(v_scale_ptr + row)


@gluon.jit
def _update_strip(raw, scales, weights, states, base, inner, row, words, hyper, old_scale, multiplier, V: gl.constexpr):
    """A strip updated in place in the old scales; `multiplier` takes stored halves to FP8. Returns its new master over the old
    scale, to be cut."""
    g, x, m, v = raw
    m_scale, v_scale = scales
    x_ptr, x_scale_ptr, weight_ptr, weight_scale_ptr = weights
    m_ptr, m_scale_ptr, v_ptr, v_scale_ptr = states
    grad_scale, beta1, rest1, beta2, rest2, eps, decay, step_size, rsqrt_correction2 = hyper
    g = g.to(gl.float32) * grad_scale
    m = gl.fma(g, rest1, decode_m(m, m_scale, beta1, True))
    v = gl.fma(g * g, rest2, decode_v(v, v_scale, V) * beta2)
    step = -step_size * exp2(254 - old_scale)
    x = gl.fma(quotient(m, v, rsqrt_correction2, eps, True), step, x.to(gl.float32) * decay)
    store_m(m_ptr + base, m_scale_ptr, inner, row, m, words, "fp8", True)
    store_v(v_ptr + base, v_scale_ptr, inner, row, v, words, V, True)
    x = float_of(x.to(gl.int32, bitcast=True) + dither(words, MASTER_BITS, 13))
    half = half_toward_zero(x, True)
    gl.store(x_ptr + base + inner, half)
    gl.store(weight_ptr + base + inner, codes_of_halves(half, multiplier, True))
    return x


@gluon.jit
def _quads(quads_per_row, ROWS: gl.constexpr, NEIGHBOURS: gl.constexpr, num_warps: gl.constexpr):
    """int64 [ROWS, runs]: the first quad of each run of neighbours, from the strip's first quad."""
    RUNS: gl.constexpr = 128 // NEIGHBOURS
    L: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [num_warps, 1], [1, 0])
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L)).to(gl.int64)
    return rows[:, None] * quads_per_row + gl.arange(0, RUNS, layout=gl.SliceLayout(0, L))[None, :] * (NEIGHBOURS // 4)


@gluon.jit
def _run_amax(x, ROWS: gl.constexpr, NEIGHBOURS: gl.constexpr):
    """Bits of the largest magnitude of each run that one thread holds; at least those of infinity where there is a NaN."""
    runs = gl.reshape(x, [ROWS, 128 // NEIGHBOURS, NEIGHBOURS])
    return abs_bits(gl.reduce(gl.abs(runs), 2, max_or_nan))


@gluon.jit
def _put(waiting, x, NEIGHBOURS: gl.constexpr):
    """A strip into shared memory; four neighbours at a time, so that the threads of a warp write next to each other."""
    waiting.store(x.reshape([x.shape[0], 128 // NEIGHBOURS, NEIGHBOURS // 4, 4]).permute((2, 0, 1, 3)))


@gluon.jit
def _taken(waiting, like, NEIGHBOURS: gl.constexpr):
    """What `_put` put there, in the layout of `like`."""
    LAYOUT: gl.constexpr = like.reshape([like.shape[0], 128 // NEIGHBOURS, NEIGHBOURS // 4, 4]).permute((2, 0, 1, 3)).type.layout
    x = waiting.load(LAYOUT).permute((1, 2, 0, 3)).reshape([like.shape[0], 128])
    return gl.convert_layout(x, like.type.layout, assert_trivial=True)


@gluon.jit
def _settle(amax, x_scale, w_scale, weights, block, offset, strip, waiting, NEIGHBOURS: gl.constexpr):
    """Where a block's new master asks for other scales than those it was written in: both, and master and weight once more."""
    x_ptr, x_scale_ptr, weight_ptr, weight_scale_ptr = weights
    old = x_scale.to(gl.int32)
    top = abs_bits(float_of(gl.max(gl.max(amax, 1), 0) & KEPT) * exp2(old))
    biased, multiplier = fp16_scale(top)
    kept = top >= MIN_FP16_BITS
    w_multiplier, w_inverse = pow2_scale(gl.where(kept, top, 0))
    if (biased != old) | (w_inverse != w_scale) | (top < MIN_FP16_BITS):
        gl.store(x_scale_ptr + block, biased.to(gl.uint8))
        gl.store(weight_scale_ptr + block, w_inverse)
        factors = (multiplier, exp2(biased), gl.where(kept, w_multiplier * exp2(biased), 0.0))
        for j in range(waiting.shape[0]):
            x = _taken(waiting.index(j), offset, NEIGHBOURS) * exp2(old)
            store_master(x_ptr, weight_ptr, offset + j * strip, x, factors, "fp16", "fp8", True)


@gluon.jit(do_not_specialize=_SCALARS)
def update_pipelined(
    grad_ptr, grad_scale_ptr, weight_ptr, weight_scale_ptr, x_ptr, x_scale_ptr, m_ptr, m_scale_ptr, v_ptr, v_scale_ptr,
    num_blocks, piece_rows, piece_cols, row_blocks, col_blocks, rb0, cb0, matrix0, quad0, quads_per_row, quads_per_matrix,
    c1, c2, c3, k0, k1, beta1, rest1, beta2, rest2, eps, decay, step_size, rsqrt_correction2,
    V: gl.constexpr, ROWS: gl.constexpr, NEIGHBOURS: gl.constexpr, SLOTS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Sizes and starts of the local matrix and of the piece within it are in blocks. No more programs than blocks."""
    grad_scale = gl.load(grad_scale_ptr)
    if abs_bits(grad_scale) >= 0x7F800000:
        return
    RUNS: gl.constexpr = 128 // NEIGHBOURS
    STRIPS: gl.constexpr = 128 // ROWS
    L: gl.constexpr = gl.BlockedLayout([1, NEIGHBOURS], [4, 8], [num_warps, 1], [1, 0])
    LINES: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 1, [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    inputs = (grad_ptr, x_ptr, m_ptr, v_ptr)
    ring = ()
    for i in gl.static_range(4):
        ring = ring + (gl.allocate_shared_memory(inputs[i].dtype.element_ty, [SLOTS, ROWS, 128], LINES),)
    waiting = gl.allocate_shared_memory(gl.float32, [STRIPS, NEIGHBOURS // 4, ROWS, RUNS, 4], PLAIN)
    hyper = (grad_scale, beta1, rest1, beta2, rest2, eps, decay, step_size, rsqrt_correction2)
    sizes = (row_blocks, rb0, cb0, matrix0, quad0, quads_per_row, quads_per_matrix)
    states = (m_ptr, m_scale_ptr, v_ptr, v_scale_ptr)
    weights = (x_ptr, x_scale_ptr, weight_ptr, weight_scale_ptr)

    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    inner = _inner(col_blocks * 128, ROWS, NEIGHBOURS, num_warps)
    offsets = (_inner(col_blocks * 128, ROWS, 16, num_warps), _inner(col_blocks * 128, ROWS, 8, num_warps))
    quads = _quads(quads_per_row, ROWS, NEIGHBOURS, num_warps)
    strip = ROWS * 128 * col_blocks
    first, stride = gl.program_id(0), gl.num_programs(0)
    place, distance = _split(first, piece_rows, piece_cols), _split(stride, piece_rows, piece_cols)
    rb, cb, quad = _located(place, sizes)
    group = rb.to(gl.int64) * 128 * col_blocks + cb
    for s in gl.static_range(SLOTS):
        _fetch(inputs, ring, group * 128 + s * strip, offsets, s)
    m_scale, v_scale = _row_scales(states, group + rows * col_blocks)
    x_scale, w_scale = _block_scales(weights, rb * col_blocks + cb)
    t = 0
    for i in range(first, num_blocks, stride):
        if i + stride < num_blocks:
            place = _advance(place, distance, piece_rows, piece_cols)
        next_rb, next_cb, next_quad = _located(place, sizes)
        next_group = next_rb.to(gl.int64) * 128 * col_blocks + next_cb
        next_x_scale, next_w_scale = _block_scales(weights, next_rb * col_blocks + next_cb)
        old_scale = x_scale.to(gl.int32)
        multiplier = exp2(old_scale - (w_scale.to(gl.int32, bitcast=True) >> 23) + 127)
        amax = _run_amax(gl.full([ROWS, 128], 0.0, gl.float32, L), ROWS, NEIGHBOURS)
        for j in range(STRIPS):
            slot = t % SLOTS
            async_copy.wait_group(SLOTS - 1)
            raw = _arrived(ring, slot, L)
            row = group + (rows + j * ROWS) * col_blocks
            next_row = gl.where(j + 1 < STRIPS, group + (j + 1) * ROWS * col_blocks, next_group) + rows * col_blocks
            next_m_scale, next_v_scale = _row_scales(states, next_row)
            start = gl.where(j + SLOTS < STRIPS, group, next_group) * 128
            _fetch(inputs, ring, start + (j + SLOTS) % STRIPS * strip, offsets, slot)
            words = words_from(quad + j * ROWS * quads_per_row + quads, c1, c2, c3, k0, k1, ROWS, NEIGHBOURS)
            words = gl.convert_layout(words, L, assert_trivial=True)
            base = group * 128 + j * strip
            scales = (m_scale, v_scale)
            x = _update_strip(raw, scales, weights, states, base, inner, row, words, hyper, old_scale, multiplier, V)
            amax = gl.maximum(amax, _run_amax(x, ROWS, NEIGHBOURS))
            _put(waiting.index(j), x, NEIGHBOURS)
            m_scale, v_scale = next_m_scale, next_v_scale
            t += 1
        _settle(amax, x_scale, w_scale, weights, rb * col_blocks + cb, group * 128 + inner, strip, waiting, NEIGHBOURS)
        x_scale, w_scale = next_x_scale, next_w_scale
        rb, cb, quad, group = next_rb, next_cb, next_quad, next_group
    async_copy.wait_group(0)
