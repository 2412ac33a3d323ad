"""AdamW in one pass over gradient, states and weight: Triton kernels, launched by optimizer_launch.py.

A program owns one 128x128 block of one matrix: every scale (1x128 groups of the moments, 128x128 of master and weight) lies
within it, so nothing is read twice and programs share nothing. Weights that are not whole blocks with FP32 states (norms,
router) take an element-wise kernel.

States equal those of `update_ref` bit for bit, except that a GPU takes the square root and the quotient approximately (two
units in the last place of the *update*): a master may then round to the neighbouring value about once in a million.
Instructions count here as much as bytes: bits are added and compared as integers, two FP16 values in a register where that
will do, and one Philox evaluation serves four elements, all three states from disjoint bits of its words.
"""

import triton
import triton.language as tl

from fp8.optimizer_device import (
    KEPT,
    MASTER_BITS,
    MIN_FP16_BITS,
    dither,
    exp2,
    float_of,
    fp16_scale,
    load_m,
    load_v,
    quotient,
    round_bf16,
    run_amax,
    store_m,
    store_master,
    store_v,
)
from fp8.philox_kernels import row_words
from fp8.quantize_device import abs_bits, pow2_scale

_SCALARS = [  # never a reason to compile anew
    "piece_rows", "piece_cols", "row_blocks", "col_blocks", "rb0", "cb0", "matrix0", "quad0",
    "quads_per_row", "quads_per_matrix", "c1", "c2", "c3", "k0", "k1",
]  # fmt: skip


@triton.jit
def _update_rows(
    first, grad_ptr, grad_scale, x_ptr, x_scale, m_ptr, m_scale_ptr, v_ptr, v_scale_ptr, offset, group, col_blocks,
    quad, quads_per_row, draw, beta1, rest1, beta2, rest2, eps, decay, step_size, rsqrt_correction2,
    MASTER: tl.constexpr, M: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, NEIGHBOURS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """`ROWS` rows of a block from row `first` on: moments updated in place; returns the new master, to be cut."""
    r, c = first + tl.arange(0, ROWS), tl.arange(0, 128)
    offset += r[:, None] * (col_blocks * 128) + c[None, :]
    group += r * col_blocks
    g = tl.load(grad_ptr + offset).to(tl.float32) * grad_scale
    m = load_m(m_ptr, m_scale_ptr, offset, group, beta1, M, HARDWARE)
    v = load_v(v_ptr, v_scale_ptr, offset, group, V)
    x = tl.load(x_ptr + offset).to(tl.float32)
    word = 0
    if (MASTER != "fp32") | (M != "fp32") | (V != "fp32"):
        c1, c2, c3, k0, k1 = draw
        word = row_words(quad + r.to(tl.int64)[:, None] * quads_per_row, c1, c2, c3, k0, k1, ROWS, NEIGHBOURS)
    m = tl.fma(g, rest1, m)
    v = tl.fma(g * g, rest2, v * beta2)
    x = tl.fma(quotient(m, v, rsqrt_correction2, eps, HARDWARE), -step_size, x * (x_scale * decay))
    store_m(m_ptr, m_scale_ptr, offset, group, m, word, M, HARDWARE)
    store_v(v_ptr, v_scale_ptr, offset, group, v, word, V, HARDWARE)
    if MASTER == "fp16":  # storing cuts off what lies below the noise
        x = float_of(x.to(tl.int32, bitcast=True) + dither(word, MASTER_BITS, 13))
    return x


@triton.jit(do_not_specialize=_SCALARS)
def update_blocks(
    grad_ptr, grad_scale_ptr, weight_ptr, weight_scale_ptr, x_ptr, x_scale_ptr, m_ptr, m_scale_ptr, v_ptr, v_scale_ptr,
    piece_rows, piece_cols, row_blocks, col_blocks, rb0, cb0, matrix0, quad0, quads_per_row, quads_per_matrix,
    c1, c2, c3, k0, k1, beta1, rest1, beta2, rest2, eps, decay, step_size, rsqrt_correction2,
    MASTER: tl.constexpr, M: tl.constexpr, V: tl.constexpr, WEIGHT: tl.constexpr,
    ROWS: tl.constexpr, NEIGHBOURS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """A block of the piece a program. Sizes and starts of the local matrix and of the piece within it are in blocks."""
    grad_scale = tl.load(grad_scale_ptr)
    if abs_bits(grad_scale) >= 0x7F800000:
        return
    i = tl.program_id(0)
    cb, rb, e = i % piece_cols, i // piece_cols % piece_rows, (i // piece_cols // piece_rows).to(tl.int64)
    row_block = (matrix0 + e) * row_blocks + rb0 + rb
    block = row_block * col_blocks + cb0 + cb
    offset = row_block * col_blocks * 16384 + (cb0 + cb) * 128
    group = row_block * 128 * col_blocks + cb0 + cb
    quad = quad0 + e * quads_per_matrix + (rb * 128).to(tl.int64) * quads_per_row + cb * 32
    x_scale = 1.0
    if MASTER == "fp16":
        x_scale = exp2(tl.load(x_scale_ptr + block))

    # Strips of rows: their moments are done at once, only the new master waits for the block's maximum.
    strips: tl.constexpr = 128 // ROWS
    xs, amax = (), tl.zeros((ROWS, 8), tl.int32)
    for j in tl.static_range(strips):
        x = _update_rows(
            j * ROWS, grad_ptr, grad_scale, x_ptr, x_scale, m_ptr, m_scale_ptr, v_ptr, v_scale_ptr, offset, group, col_blocks,
            quad, quads_per_row, (c1, c2, c3, k0, k1), beta1, rest1, beta2, rest2, eps, decay, step_size, rsqrt_correction2,
            MASTER, M, V, ROWS, NEIGHBOURS, HARDWARE,
        )  # fmt: skip
        xs, amax = xs + (x,), tl.maximum(amax, run_amax(x, ROWS, HARDWARE))
    amax = tl.max(amax)

    multiplier, inverse, weight_multiplier = 1.0, 1.0, 1.0
    if MASTER == "fp16":
        amax = amax & KEPT
        biased, multiplier = fp16_scale(amax)
        inverse = exp2(biased)
        tl.store(x_scale_ptr + block, biased.to(tl.uint8))
    if WEIGHT == "fp8":
        kept = (amax >= MIN_FP16_BITS) | (MASTER == "fp32")
        weight_multiplier, weight_inverse = pow2_scale(tl.where(kept, amax, 0))
        weight_multiplier = tl.where(kept, weight_multiplier * inverse, 0.0)  # of a stored half
        tl.store(weight_scale_ptr + block, weight_inverse)
    strip = offset + tl.arange(0, ROWS)[:, None] * (col_blocks * 128) + tl.arange(0, 128)[None, :]
    step = ROWS * 128 * col_blocks
    factors = (multiplier, inverse, weight_multiplier)
    for j in tl.static_range(strips):
        store_master(x_ptr, weight_ptr, strip + j * step, xs[j], factors, MASTER, WEIGHT, HARDWARE)


@triton.jit
def float_ptr(place_ptr):
    """A pointer to FP32 values from the address at `place_ptr`."""
    return tl.multiple_of(tl.load(place_ptr).to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def _update_run(
    i, size, grad_ptr, grad_scale, weight_ptr, x_ptr, m_ptr, v_ptr,
    beta1, rest1, beta2, rest2, eps, decay, step_size, rsqrt_correction2, WEIGHT: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Elements `i` below `size`: FP32 states, weight unscaled (BF16) or the master itself."""
    ok = i < size
    g = tl.load(grad_ptr + i, mask=ok, other=0.0).to(tl.float32) * grad_scale
    m = tl.fma(g, rest1, tl.load(m_ptr + i, mask=ok, other=0.0) * beta1)
    v = tl.fma(g * g, rest2, tl.load(v_ptr + i, mask=ok, other=0.0) * beta2)
    x = tl.load(x_ptr + i, mask=ok, other=0.0) * decay
    x = x - quotient(m, v, rsqrt_correction2, eps, HARDWARE) * step_size
    tl.store(m_ptr + i, m, mask=ok)
    tl.store(v_ptr + i, v, mask=ok)
    tl.store(x_ptr + i, x, mask=ok)
    if WEIGHT == "bf16":
        tl.store(weight_ptr + i, round_bf16(x, HARDWARE).to(tl.bfloat16, bitcast=True), mask=ok)


@triton.jit
def update_elements(
    grad_ptr, grad_scale_ptr, weight_ptr, x_ptr, m_ptr, v_ptr, size,
    beta1, rest1, beta2, rest2, eps, decay, step_size, rsqrt_correction2,
    WEIGHT: tl.constexpr, HARDWARE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One weight with a master beside it."""
    grad_scale = tl.load(grad_scale_ptr)
    if abs_bits(grad_scale) >= 0x7F800000:
        return
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    _update_run(
        i, size, grad_ptr, grad_scale, weight_ptr, x_ptr, m_ptr, v_ptr,
        beta1, rest1, beta2, rest2, eps, decay, step_size, rsqrt_correction2, WEIGHT, HARDWARE,
    )  # fmt: skip


@triton.jit
def update_table(
    table_ptr, place_ptr, grad_scale_ptr, beta1, rest1, beta2, rest2, eps, decay, step_size, rsqrt_correction2,
    HARDWARE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Many FP32 weights. table: int64 rows (gradient, weight, m, v, size, decays); place: int32 row and part of each program."""
    grad_scale = tl.load(grad_scale_ptr)
    if abs_bits(grad_scale) >= 0x7F800000:
        return
    row, part = tl.load(place_ptr + 2 * tl.program_id(0)), tl.load(place_ptr + 2 * tl.program_id(0) + 1)
    row_ptr = table_ptr + 6 * row
    grad_ptr, x_ptr, m_ptr, v_ptr = float_ptr(row_ptr), float_ptr(row_ptr + 1), float_ptr(row_ptr + 2), float_ptr(row_ptr + 3)
    _update_run(
        part.to(tl.int64) * SIZE + tl.arange(0, SIZE), tl.load(row_ptr + 4), grad_ptr, grad_scale, x_ptr, x_ptr, m_ptr, v_ptr,
        beta1, rest1, beta2, rest2, eps, tl.where(tl.load(row_ptr + 5) != 0, decay, 1.0), step_size, rsqrt_correction2,
        "own", HARDWARE,
    )  # fmt: skip


@triton.jit(do_not_specialize=_SCALARS[2:])
def add_stochastic(
    total_ptr, x_ptr, row_blocks, col_blocks, rb0, cb0, matrix0, quad0, quads_per_row, quads_per_matrix, c1, c2, c3, k0, k1
):
    """BF16 total += x over 32 rows x 128 columns, rounded by the upper 16 bits of each element's word."""
    cb, strip, e = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row_block = (matrix0 + e) * row_blocks + rb0
    r, c = tl.arange(0, 32), tl.arange(0, 128)
    offset = row_block * col_blocks * 16384 + (strip * 32).to(tl.int64) * (col_blocks * 128) + (cb0 + cb) * 128
    offset += r[:, None] * (col_blocks * 128) + c[None, :]
    first = quad0 + e * quads_per_matrix + (strip * 32).to(tl.int64) * quads_per_row + cb * 32
    word = row_words(first + r.to(tl.int64)[:, None] * quads_per_row, c1, c2, c3, k0, k1, 32, 16)
    total = tl.load(total_ptr + offset).to(tl.float32) + tl.load(x_ptr + offset).to(tl.float32)
    bits = (total.to(tl.int32, bitcast=True) + ((word >> 16) & 0xFFFF)) >> 16
    tl.store(total_ptr + offset, bits.to(tl.int16).to(tl.bfloat16, bitcast=True))
