"""Triton kernels behind swiglu.py: one read of what comes in, FP8 out.

Shapes: R rows, f width (a multiple of 128 under FP8), h = [gate | up] of width 2f. Inverse scales are column-major.
Forward and the recomputation in backward share one kernel, so both give the same bytes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8.block_forms import encode_pairs, pack_bf16, row_scales
from fp8.device_math import LOG2_E, decode_bytes, reciprocal_of_1_plus_exp2, round_bf16, sigmoid
from fp8.launch import cdiv, in_words
from fp8.quantize_device import unpack4
from fp8.quantize_kernels import BLOCK, INTERPRETED, _empty_fp8, _row_scales
from fp8.quantized import Quantized
from fp8.swiglu_backward_kernel import REGISTERS, WARPS, swiglu_backward

FORWARD_ROWS, FORWARD_WARPS = 32, 4  # 64 FP32 values of gate and up a thread


@triton.jit
def _pre_activation(h_ptr, q_ptr, si_ptr, row, row_ok, at, block, rows, STORED: tl.constexpr, HARDWARE: tl.constexpr):
    """(codes [ROWS, 32 words of four], inverse scales [ROWS]) of h: the stored ones, or made from BF16 and stored."""
    si = si_ptr + block.to(tl.int64) * rows + row
    if STORED:
        return tl.load(q_ptr + at, mask=row_ok[:, None], other=0), tl.load(si, mask=row_ok, other=0.0)
    else:
        x = tl.load(h_ptr + at, mask=row_ok[:, None], other=0)
        lo, hi = x.to(tl.int32), (x >> 32).to(tl.int32)
        multiplier, inverse = row_scales(lo, hi, HARDWARE)
        code = encode_pairs(lo, hi, multiplier[:, None], HARDWARE)
        tl.store(q_ptr + at, code, mask=row_ok[:, None])
        tl.store(si, inverse, mask=row_ok)
        return code, inverse


@triton.jit
def _swiglu_quantize(
    h_ptr, hq_ptr, hsi_ptr, w_ptr, aq_ptr, asi_ptr, live_ptr, rows, width,
    ROWS: tl.constexpr, STORED: tl.constexpr, WEIGHTED: tl.constexpr, LIVE: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """ROWS x 128 columns of a = silu(gate) * up * w, in codes; with STORED = False it also writes the codes of h.

    hq and aq as int32 words of four codes, h as int64 words of four BF16. What is constant along a row is multiplied once.
    """
    cb, rb = tl.program_id(0), tl.program_id(1)
    if LIVE:
        if tl.load(live_ptr + rb * ROWS // 128) < 0:
            return
    words, row, word = width // 4, rb * ROWS + tl.arange(0, ROWS), cb * 32 + tl.arange(0, 32)
    row_ok, at = row < rows, row.to(tl.int64)[:, None] * (2 * words) + word[None, :]
    up_block = cb + width // 128
    g, gate = _pre_activation(h_ptr, hq_ptr, hsi_ptr, row, row_ok, at, cb, rows, STORED, HARDWARE)
    u, up = _pre_activation(h_ptr, hq_ptr, hsi_ptr, row, row_ok, at + words, up_block, rows, STORED, HARDWARE)
    slope, scale = (gate * -LOG2_E)[:, None], gate * up
    if WEIGHTED:
        scale *= tl.load(w_ptr + row, mask=row_ok, other=0.0)
    scale = scale[:, None]
    g0, g1, g2, g3 = unpack4(g, HARDWARE)
    u0, u1, u2, u3 = unpack4(u, HARDWARE)
    a0 = reciprocal_of_1_plus_exp2(g0 * slope, HARDWARE) * (g0 * u0) * scale
    a1 = reciprocal_of_1_plus_exp2(g1 * slope, HARDWARE) * (g1 * u1) * scale
    a2 = reciprocal_of_1_plus_exp2(g2 * slope, HARDWARE) * (g2 * u2) * scale
    a3 = reciprocal_of_1_plus_exp2(g3 * slope, HARDWARE) * (g3 * u3) * scale
    lo, hi = pack_bf16(a0, a1, HARDWARE), pack_bf16(a2, a3, HARDWARE)
    multiplier, inverse = row_scales(lo, hi, HARDWARE)
    at = row.to(tl.int64)[:, None] * words + word[None, :]
    tl.store(aq_ptr + at, encode_pairs(lo, hi, multiplier[:, None], HARDWARE), mask=row_ok[:, None])
    tl.store(asi_ptr + cb.to(tl.int64) * rows + row, inverse, mask=row_ok)


@triton.jit
def _swiglu_grad(g, u, da, w, HARDWARE: tl.constexpr):
    """(dg, du, da * silu(g) * u) of one element; w broadcasts over columns."""
    s = sigmoid(g, HARDWARE)
    silu = g * s
    both = da * u
    return both * w * (s + silu * (1.0 - s)), da * w * silu, both * silu


@triton.jit
def _swiglu_plain(
    h_ptr, si_ptr, w_ptr, da_ptr, out_ptr, dw_ptr, live_ptr, rows, width,
    ROWS: tl.constexpr, STORED: tl.constexpr, BACKWARD: tl.constexpr, WEIGHTED: tl.constexpr, LIVE: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Unquantised a [R, f] (forward), or dh [R, 2f] and partial dw (backward), of ROWS x 128; h as values or STORED in codes."""
    cb, rb = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if LIVE:
        if tl.load(live_ptr + rb * ROWS // 128) < 0:
            return
    row = rb * ROWS + tl.arange(0, ROWS).to(tl.int64)
    row_ok = row < rows
    col = cb * 128 + tl.arange(0, 128)
    ok = row_ok[:, None] & (col < width)[None, :]
    wide = row[:, None] * (2 * width) + col[None, :]
    narrow = row[:, None] * width + col[None, :]
    if STORED:
        si = si_ptr + row
        g = decode_bytes(tl.load(h_ptr + wide, mask=ok, other=0), HARDWARE)
        u = decode_bytes(tl.load(h_ptr + wide + width, mask=ok, other=0), HARDWARE)
        g *= tl.load(si + cb * rows, mask=row_ok, other=0.0)[:, None]
        u *= tl.load(si + (cb + width // 128) * rows, mask=row_ok, other=0.0)[:, None]
    else:
        g = tl.load(h_ptr + wide, mask=ok, other=0.0).to(tl.float32)
        u = tl.load(h_ptr + wide + width, mask=ok, other=0.0).to(tl.float32)
    if WEIGHTED:
        w = tl.load(w_ptr + row, mask=row_ok, other=0.0)[:, None]
    else:
        w = 1.0
    if BACKWARD:
        da = tl.load(da_ptr + narrow, mask=ok, other=0.0).to(tl.float32)
        dg, du, dw = _swiglu_grad(g, u, da, w, HARDWARE)
        tl.store(out_ptr + wide, round_bf16(dg, HARDWARE), mask=ok)
        tl.store(out_ptr + wide + width, round_bf16(du, HARDWARE), mask=ok)
        if WEIGHTED:
            tl.store(dw_ptr + cb * rows + row, tl.sum(dw, 1), mask=row_ok)
    else:
        tl.store(out_ptr + narrow, round_bf16(g * sigmoid(g, HARDWARE) * u * w, HARDWARE), mask=ok)


# ---------------------------------------------------------------- launchers


def quantize_swiglu(
    h: Tensor | Quantized, w_R: Tensor | None, live_B: Tensor | None = None
) -> tuple[Quantized, Quantized]:
    """h [R, 2f], BF16 or already in E4M3 with 1x128 tiles -> (h in E4M3, silu(gate) * up * w [R, f] in E4M3).

    Args:
        live_B: int32 [ceil(R / 128)]; blocks with a negative entry, the last ones, are neither read nor written.
    """
    stored = isinstance(h, Quantized)
    rows, width = h.shape[0], h.shape[1] // 2
    assert width % BLOCK == 0, f"width {width} is not a multiple of {BLOCK}"
    data = h.data if stored else h
    h_q = h if stored else Quantized(_empty_fp8(rows, 2 * width, like=data), _row_scales(rows, 2 * width, data), (1, BLOCK))
    a_q = Quantized(_empty_fp8(rows, width, like=data), _row_scales(rows, width, data), (1, BLOCK))
    grid = (width // BLOCK, cdiv(rows, FORWARD_ROWS))
    _swiglu_quantize[grid](
        in_words(data, torch.int32 if stored else torch.int64), in_words(h_q.data, torch.int32), h_q.scale_inv,
        a_q.scale_inv if w_R is None else w_R, a_q.data.view(torch.int32), a_q.scale_inv,
        a_q.scale_inv if live_B is None else live_B, rows, width, ROWS=FORWARD_ROWS, STORED=stored,
        WEIGHTED=w_R is not None, LIVE=live_B is not None, HARDWARE=not INTERPRETED, num_warps=FORWARD_WARPS,
    )  # fmt: skip
    return h_q, a_q


def backward(
    h_q: Quantized, w_R: Tensor | None, da_Rf: Tensor, live_B: Tensor | None = None
) -> tuple[Quantized, Quantized, Tensor | None]:
    """Stored h [R, 2f] and da [R, f] BF16 -> (dh [R, 2f], dh transposed [2f, Rp] tiled along rows, dw [R] fp32 or None)."""
    rows, width = da_Rf.shape
    rows_p = cdiv(rows, BLOCK) * BLOCK
    dh, si = _empty_fp8(rows, 2 * width, like=da_Rf), _row_scales(rows, 2 * width, da_Rf)
    dh_t = _empty_fp8(2 * width, rows_p, like=da_Rf)
    si_t = torch.empty((rows_p // BLOCK, 2 * width), dtype=torch.float32, device=da_Rf.device)
    dw = None if w_R is None else torch.empty((width // BLOCK, rows), dtype=torch.float32, device=da_Rf.device)
    swiglu_backward[(width // BLOCK, rows_p // BLOCK)](
        in_words(h_q.data, torch.int32), h_q.scale_inv, in_words(da_Rf, torch.int64), si if w_R is None else w_R,
        si if dw is None else dw, dh.view(torch.int32), si, dh_t.view(torch.int32), si_t, si_t if live_B is None else live_B,
        rows, width, rows_p // 4, WEIGHTED=w_R is not None, LIVE=live_B is not None, FULL=rows % BLOCK == 0,
        HARDWARE=not INTERPRETED, num_warps=WARPS, maxnreg=REGISTERS,
    )  # fmt: skip
    return Quantized(dh, si, (1, BLOCK)), Quantized(dh_t, si_t.t(), (1, BLOCK)), None if dw is None else dw.sum(0)


def plain(h_q: Quantized, w_R: Tensor | None, da_Rf: Tensor | None, live_B: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(a [R, f], None) without `da`, else (dh [R, 2f], dw [R] or None): BF16, dw fp32. h in BF16 or in E4M3 with 1x128 tiles."""
    h, si, stored = h_q.data, h_q.scale_inv, h_q.scale_inv is not None
    rows, width = h.shape[0], h.shape[1] // 2
    out = torch.empty((rows, width if da_Rf is None else 2 * width), dtype=torch.bfloat16, device=h.device)
    blocks = cdiv(width, BLOCK)
    backward = da_Rf is not None
    dw = torch.empty((blocks, rows), dtype=torch.float32, device=h.device) if backward and w_R is not None else None
    _swiglu_plain[(blocks, cdiv(rows, FORWARD_ROWS))](
        h.view(torch.uint8) if stored else h, si if stored else h, out if w_R is None else w_R,
        da_Rf.contiguous() if backward else out, out, out if dw is None else dw, out if live_B is None else live_B, rows, width,
        ROWS=FORWARD_ROWS, STORED=stored, BACKWARD=backward, WEIGHTED=w_R is not None, LIVE=live_B is not None,
        HARDWARE=not INTERPRETED, num_warps=FORWARD_WARPS,
    )  # fmt: skip
    return out, None if dw is None else dw.sum(0)
