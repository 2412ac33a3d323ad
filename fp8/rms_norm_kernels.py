"""Triton kernels behind rms_norm.py: one read of each input, one write of each output.

Shapes: T tokens, D features; a tile is [ROWS, BLOCKS, 128], so that a block of 128 features is one axis. Scales are column-major.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8.column_sum_kernels import sum_columns
from fp8.device_math import round_bf16
from fp8.launch import cdiv, in_words, next_power_of_2
from fp8.quantize_device import abs_bits, encode_bytes, pow2_scale
from fp8.quantize_kernels import BLOCK, INTERPRETED, _empty_fp8, _row_scales
from fp8.quantized import Quantized
from fp8.rms_norm_forward_kernel import MOST_FEATURES, forward_tile, rms_norm_pairs

FORWARD_TILE, BACKWARD_TILE = 8192, 2048  # values of one program's tile at least
BACKWARD_PROGRAMS = 528  # fixed, so that the order of dw's sums does not depend on the device; 4 for each of an H200's 132 SMs
ROW_BUFFER = 16384  # bytes of one tensor's rows that backward keeps in flight in shared memory


@triton.jit
def _normalised(h, dim, eps, ROUND: tl.constexpr, HARDWARE: tl.constexpr):
    """(h * rstd rounded to the stream's dtype, h * rstd, rstd [ROWS, 1, 1])."""
    rstd = tl.rsqrt(tl.sum(tl.sum(h * h, 2), 1) / dim + eps)[:, None, None]
    n = h * rstd
    if ROUND:
        return round_bf16(n, HARDWARE), n, rstd
    return n, n, rstd


@triton.jit(do_not_specialize=["plain", "quantize"])
def _rms_norm(
    h_ptr, w_ptr, x_ptr, q_ptr, si_ptr, rows, dim, eps, plain, quantize,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, ROUND: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """x = w * cast(h * rstd), as values if `plain`, as codes if `quantize`: FP32 rows, and what rms_norm_pairs does not take.

    One compiled kernel for all: the order of its sums, which the compiler chooses, is the same whatever is stored, so that backward
    recomputes forward's bits.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    col = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    offset = row[:, None, None] * dim + col[None, :, :]
    ok = (row < rows)[:, None, None] & (col < dim)[None, :, :]
    h = tl.load(h_ptr + offset, mask=ok, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + col, mask=col < dim, other=0.0).to(tl.float32)[None, :, :]
    n, _, _ = _normalised(h, dim, eps, ROUND, HARDWARE)
    x = n * w
    if ROUND:
        x = round_bf16(x, HARDWARE)
    if plain != 0:
        tl.store(x_ptr + offset, x, mask=ok)
    if quantize != 0:
        multiplier, inverse = pow2_scale(tl.max(abs_bits(x), 2))
        tl.store(q_ptr + offset, encode_bytes(x * multiplier[:, :, None], HARDWARE), mask=ok)
        si_ok = (row < rows)[:, None] & (block * 128 < dim)[None, :]
        tl.store(si_ptr + block.to(tl.int64)[None, :] * rows + row[:, None], inverse, mask=si_ok)


@triton.jit
def _rms_norm_backward(
    h_ptr, w_ptr, d1_ptr, d2_ptr, d3_ptr, dres_ptr, dh_ptr, dw_ptr, rows, dim, eps,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, GRADS: tl.constexpr, RESIDUAL: tl.constexpr, ROUND: tl.constexpr,
    STAGES: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """dh of rows program, program + programs, ...; this program's part of dw. dx = d1 [+ d2 [+ d3]]; dh gains dres."""
    block = tl.arange(0, BLOCKS)
    col = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    w = tl.load(w_ptr + col, mask=col < dim, other=0.0).to(tl.float32)[None, :, :]
    dw = tl.zeros((BLOCKS, 128), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        offset = row[:, None, None] * dim + col[None, :, :]
        ok = (row < rows)[:, None, None] & (col < dim)[None, :, :]
        h = tl.load(h_ptr + offset, mask=ok, other=0.0).to(tl.float32)
        dx = tl.load(d1_ptr + offset, mask=ok, other=0.0).to(tl.float32)
        if GRADS > 1:
            dx += tl.load(d2_ptr + offset, mask=ok, other=0.0).to(tl.float32)
        if GRADS > 2:
            dx += tl.load(d3_ptr + offset, mask=ok, other=0.0).to(tl.float32)
        rounded, n, rstd = _normalised(h, dim, eps, ROUND, HARDWARE)
        dw += tl.sum(dx * rounded, 0)
        g = dx * w
        dh = rstd * (g - n * (tl.sum(tl.sum(g * n, 2), 1) / dim)[:, None, None])
        if RESIDUAL:
            dh += tl.load(dres_ptr + offset, mask=ok, other=0.0).to(tl.float32)
        if ROUND:
            dh = round_bf16(dh, HARDWARE)
        tl.store(dh_ptr + offset, dh, mask=ok)
    tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * dim + col, dw, mask=col < dim)


# ---------------------------------------------------------------- launchers


def _tile(dim: int, least: int) -> tuple[int, int, int]:
    """(rows, blocks of 128 features, warps) of a tile of whole rows."""
    blocks = next_power_of_2(cdiv(dim, BLOCK))
    rows = max(1, least // (blocks * BLOCK))
    return rows, blocks, min(16, max(4, rows * blocks * BLOCK // 1024))


def rms_norm(h_TD: Tensor, w_D: Tensor, eps: float, plain: bool, quantized: bool) -> tuple[Tensor | None, Quantized | None]:
    """(x [T, D] in h's dtype if `plain`, x in E4M3 with 1x128 tiles if `quantized`)."""
    h = h_TD.contiguous()
    rows, dim = h.numel() // h.shape[-1], h.shape[-1]
    x = torch.empty_like(h, memory_format=torch.contiguous_format) if plain else None
    q = Quantized(_empty_fp8(rows, dim, like=h), _row_scales(rows, dim, h), (1, BLOCK)) if quantized else None
    unused = torch.empty(1, dtype=torch.float32, device=h.device)  # of the right type: another would be another kernel
    codes, scales = (q.data.view(torch.uint8), q.scale_inv) if quantized else (unused.view(torch.uint8), unused)
    if dim % 2 == 0 and h.dtype == torch.bfloat16 and w_D.dtype == torch.float32 and dim <= MOST_FEATURES:
        tile, words = forward_tile(dim), in_words(h, torch.int32)
        rms_norm_pairs[(cdiv(rows, tile.rows),)](
            words, in_words(w_D, torch.int64), x.view(torch.int32) if plain else words, codes.view(torch.int16), scales, rows, dim,
            1 / dim, eps, int(plain), int(quantized), ROWS=tile.rows, BLOCKS=tile.blocks, SHARE=tile.share,
            LAYOUT=tile.layout, SUMS=tile.sums, FULL=rows % tile.rows == 0 and dim == tile.blocks * BLOCK,
            HARDWARE=not INTERPRETED, num_warps=tile.warps, maxnreg=tile.registers,
        )  # fmt: skip
        return x, q
    tile_rows, blocks, warps = _tile(dim, FORWARD_TILE)
    _rms_norm[(cdiv(rows, tile_rows),)](
        h, w_D, x if plain else h, codes, scales, rows, dim, eps, int(plain), int(quantized), ROWS=tile_rows, BLOCKS=blocks,
        ROUND=h.dtype == torch.bfloat16, HARDWARE=not INTERPRETED, num_warps=warps,
    )  # fmt: skip
    return x, q


def backward(
    h_TD: Tensor, w_D: Tensor, grads: Sequence[Tensor], dres_TD: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(dh [T, D] in h's dtype, dw [D] fp32) for dx = the sum of one to three `grads`; `dres_TD`, the residual's gradient, is added
    to dh."""
    h, dim = h_TD.contiguous(), h_TD.shape[-1]
    rows = h.numel() // dim
    tile_rows, blocks, warps = _tile(dim, BACKWARD_TILE)
    programs = min(BACKWARD_PROGRAMS, cdiv(rows, tile_rows))
    stages = max(1, min(3, 1 + ROW_BUFFER // (tile_rows * blocks * BLOCK * h.element_size())))
    dh, dw = torch.empty_like(h), torch.empty((programs, dim), dtype=torch.float32, device=h.device)
    first, *more = (d.contiguous() for d in grads)
    _rms_norm_backward[(programs,)](
        h, w_D, first, more[0] if more else h, more[1] if len(more) > 1 else h, h if dres_TD is None else dres_TD.contiguous(),
        dh, dw, rows, dim, eps, ROWS=tile_rows, BLOCKS=blocks, GRADS=len(grads), RESIDUAL=dres_TD is not None,
        ROUND=h.dtype == torch.bfloat16, STAGES=stages, HARDWARE=not INTERPRETED, num_warps=warps,
    )  # fmt: skip
    return dh, sum_columns(dw)[0]
