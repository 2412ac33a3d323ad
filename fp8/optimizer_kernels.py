"""AdamW in one pass over gradient, states and weight: Triton kernels behind optimizer.py.

A program owns one 128x128 block of one matrix: every scale (1x128 groups of the moments, 128x128 of master and weight) lies
within it, so nothing is read twice and programs share nothing. Weights that are not whole blocks with FP32 states (norms,
router) take an element-wise kernel.

States equal those of `update_ref` bit for bit, except that a GPU takes the square root and the quotient approximately (two
units in the last place of the *update*): a master may then round to the neighbouring value about once in a million.
The limit is arithmetic as much as memory: bits are added and compared as integers, and one Philox evaluation serves four
elements, all three states from disjoint bits of its words.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8.optimizer import ROLES, Hyper
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
    row_amax,
    store_m,
    store_master,
    store_v,
)
from fp8.philox import Draw
from fp8.philox_kernels import draw_arguments, row_words
from fp8.quantize_device import abs_bits, pow2_scale
from fp8.quantize_kernels import INTERPRETED
from fp8.recipe import BLOCK
from fp8.state_codecs import Bf16, Codec, E4M3Groups, Fp16, Fp32, State, UnsignedGroups
from fp8.weight import Weight

FORMATS = {Fp32: "fp32", Bf16: "bf16", Fp16: "fp16", E4M3Groups: "fp8", UnsignedGroups: "fp8"}
# ROWS x NEIGHBOURS: a thread's neighbours must be the ones that its Philox words are for (philox_kernels.row_words).
LAUNCH = {"num_warps": 16, "ROWS": 64, "NEIGHBOURS": 16}
_SCALARS = [  # never a reason to compile anew
    "piece_rows", "piece_cols", "row_blocks", "col_blocks", "rb0", "cb0", "matrix0", "quad0",
    "quads_per_row", "quads_per_matrix", "c1", "c2", "c3", "k0", "k1",
]  # fmt: skip


# ---------------------------------------------------------------- kernels


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
    m = m + g * rest1
    v = v * beta2 + (g * g) * rest2
    x = tl.fma(quotient(m, v, rsqrt_correction2, eps, HARDWARE), -step_size, x * (x_scale * decay))
    store_m(m_ptr, m_scale_ptr, offset, group, m, word, M, HARDWARE)
    store_v(v_ptr, v_scale_ptr, offset, group, v, word, V, HARDWARE)
    if MASTER == "fp16":  # storing cuts off what lies below the noise
        x = float_of(x.to(tl.int32, bitcast=True) + dither(word, MASTER_BITS, 13))
    return x


@triton.jit(do_not_specialize=_SCALARS)
def _update_blocks(
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
    xs = ()
    for j in tl.static_range(strips):
        x = _update_rows(
            j * ROWS, grad_ptr, grad_scale, x_ptr, x_scale, m_ptr, m_scale_ptr, v_ptr, v_scale_ptr, offset, group, col_blocks,
            quad, quads_per_row, (c1, c2, c3, k0, k1), beta1, rest1, beta2, rest2, eps, decay, step_size, rsqrt_correction2,
            MASTER, M, V, ROWS, NEIGHBOURS, HARDWARE,
        )  # fmt: skip
        xs = xs + (x,)
    amax = row_amax(xs[0], HARDWARE)
    for j in tl.static_range(1, strips):
        amax = tl.maximum(amax, row_amax(xs[j], HARDWARE))
    amax = tl.max(amax, 0)

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
def _update_elements(
    grad_ptr, grad_scale_ptr, weight_ptr, x_ptr, m_ptr, v_ptr, size,
    beta1, rest1, beta2, rest2, eps, decay, step_size, rsqrt_correction2,
    WEIGHT: tl.constexpr, HARDWARE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """FP32 states, weight unscaled (BF16) or the master itself."""
    grad_scale = tl.load(grad_scale_ptr)
    if abs_bits(grad_scale) >= 0x7F800000:
        return
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    ok = i < size
    g = tl.load(grad_ptr + i, mask=ok, other=0.0).to(tl.float32) * grad_scale
    m = tl.load(m_ptr + i, mask=ok, other=0.0) * beta1 + g * rest1
    v = tl.load(v_ptr + i, mask=ok, other=0.0) * beta2 + (g * g) * rest2
    x = tl.load(x_ptr + i, mask=ok, other=0.0) * decay
    x = x - quotient(m, v, rsqrt_correction2, eps, HARDWARE) * step_size
    tl.store(m_ptr + i, m, mask=ok)
    tl.store(v_ptr + i, v, mask=ok)
    tl.store(x_ptr + i, x, mask=ok)
    if WEIGHT == "bf16":
        tl.store(weight_ptr + i, round_bf16(x, HARDWARE).to(tl.bfloat16, bitcast=True), mask=ok)


@triton.jit(do_not_specialize=_SCALARS[3:])
def _add_stochastic(
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


# ---------------------------------------------------------------- launchers


def _pieces(weight: Weight) -> Iterator[tuple[tuple[int, int, int], tuple[int, int, int], int]]:
    """(first matrix, row, column), (matrices, rows, columns) and first global element of each piece."""
    for piece in weight.pieces:
        local = (slice(0, 1),) * (3 - len(piece.local)) + tuple(piece.local)
        place, stride = 0, 1
        for offset, size in zip(reversed(piece.offset), reversed(weight.global_shape), strict=True):
            place, stride = place + offset * stride, stride * size
        yield tuple(s.start or 0 for s in local), tuple(s.stop - (s.start or 0) for s in local), place


def whole_blocks(weight: Weight) -> bool:
    """Whether every piece consists of 128x128 blocks of the local tensor, and of quads of the global one."""
    if weight.data.dim() not in (2, 3) or weight.global_shape[-1] % 4:
        return False
    sizes = [n for start, size, _ in _pieces(weight) for n in (*start[1:], *size[1:])]
    aligned = all(n % BLOCK == 0 for n in (*weight.data.shape[-2:], *sizes))
    return aligned and all(place % 4 == 0 for _, _, place in _pieces(weight))


def _all_fp32(codecs: dict[str, Codec]) -> bool:
    return all(isinstance(codec, Fp32) for codec in codecs.values())


def covers(weight: Weight, codecs: dict[str, Codec]) -> bool:
    """Whether a kernel here has these formats and this shape; otherwise the reference runs, on any device."""
    known = all(type(codec) in FORMATS for codec in codecs.values()) and weight.main_grad.is_contiguous()
    return known and ((_all_fp32(codecs) and weight.scale_inv is None) or whole_blocks(weight))


def _scalars(h: Hyper) -> tuple[float, ...]:
    return h.beta1, 1 - h.beta1, h.beta2, 1 - h.beta2, h.eps, h.decay, h.step_size, h.rsqrt_correction2


def update(
    weight: Weight, state: dict[str, State], codecs: dict[str, Codec], h: Hyper, draw: Draw, grad_scale: Tensor
) -> None:
    """One weight's update in place, as optimizer.update_ref states it."""
    data, grad = weight.data, weight.main_grad
    parts = [state[role] for role in ROLES]
    x, m, v = (part["data"] for part in parts)
    options = dict(HARDWARE=not INTERPRETED, enable_fp_fusion=False)
    stored = _stored(weight) if x is not data else "own"
    if _all_fp32(codecs) and weight.scale_inv is None:
        _update_elements[(triton.cdiv(data.numel(), 1024),)](
            grad, grad_scale, data, x, m, v, data.numel(), *_scalars(h), WEIGHT=stored, SIZE=1024, num_warps=4, **options
        )
    else:
        _launch_blocks(weight, parts, codecs, h, draw, grad_scale, stored, options)
    if stored == "none":
        weight.set_(codecs["master"].decode(state["master"]))


def _stored(weight: Weight) -> str:
    """What the kernel writes as the weight; "none" where other tiles or a changing recipe need `Weight.set_`."""
    if weight.recipe.adaptive or len(weight.scales):
        return "none"
    if weight.data.dtype == torch.bfloat16:
        return "bf16"
    return "fp8" if weight.spec.fmt == "e4m3" and weight.spec.tile == (BLOCK, BLOCK) else "none"


def _launch_blocks(
    weight: Weight, parts: list[State], codecs: dict[str, Codec], h: Hyper, draw: Draw, grad_scale: Tensor,
    stored: str, options: dict[str, bool],
) -> None:  # fmt: skip
    """One launch for each piece."""
    data, grad = weight.data, weight.main_grad
    x, m, v = (part["data"] for part in parts)
    x_scale, m_scale, v_scale = (part.get("scale", part["data"]) for part in parts)
    if m.dtype == torch.float8_e4m3fn:
        m = m.view(torch.uint8)
    weight_scale = data if weight.scale_inv is None else weight.scale_inv
    codes = data.view(torch.uint8) if data.element_size() == 1 else data
    formats = {name: FORMATS[type(codecs[role])] for name, role in zip(("MASTER", "M", "V"), ROLES, strict=True)}
    for (cols, rows, matrices), place in _places(weight):
        _update_blocks[(cols * rows * matrices,)](
            grad, grad_scale, codes, weight_scale, x, x_scale, m, m_scale, v, v_scale, rows, cols, *place,
            *draw_arguments(draw), *_scalars(h), WEIGHT=stored, **formats, **options, **LAUNCH,
        )  # fmt: skip


def _places(weight: Weight) -> Iterator[tuple[tuple[int, int, int], tuple[int, ...]]]:
    """Grid in blocks and the kernels' arguments `row_blocks` to `quads_per_matrix`, for each piece."""
    row_blocks, col_blocks = (size // BLOCK for size in weight.data.shape[-2:])
    quads_per_row = weight.global_shape[-1] // 4
    for (matrix0, row0, col0), (matrices, num_rows, num_cols), place in _pieces(weight):
        grid = (num_cols // BLOCK, num_rows // BLOCK, matrices)
        quads = place // 4, quads_per_row, quads_per_row * weight.global_shape[-2]
        yield grid, (row_blocks, col_blocks, row0 // BLOCK, col0 // BLOCK, matrix0, *quads)


def add_stochastic_(weight: Weight, x: Tensor, draw: Draw) -> None:
    """gradient.add_stochastic_ on a GPU; the same bits as its reference."""
    for (cols, rows, matrices), place in _places(weight):
        grid = (cols, 4 * rows, matrices)
        _add_stochastic[grid](weight.main_grad, x.contiguous(), *place, *draw_arguments(draw), num_warps=4)
