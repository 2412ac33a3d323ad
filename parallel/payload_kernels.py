"""Triton kernels behind payload.py: each row is read once and written once, as 32-bit words.

Shapes: T rows held, M rows packed, R rows made. A packed row: data words | extra words | scale words (4 exponents each) | zeros.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8.device_math import decode_bytes, round_bf16
from fp8.quantize_kernels import INTERPRETED
from fp8.quantized import Quantized
from parallel.payload import RowFormat

ROWS, WORDS = 16, 512  # 16 rows share the 64 bytes of a scale column that one load or store touches


@triton.jit(do_not_specialize=["rows_q", "rows"])
def _pack(
    x_ptr, si_ptr, index_ptr, extra_ptr, out_ptr, rows_q, rows,
    DATA: tl.constexpr, EXTRA: tl.constexpr, SCALES: tl.constexpr, LENGTH: tl.constexpr,
    EXTRA_2: tl.constexpr, TAIL_2: tl.constexpr, INDEXED: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """ROWS packed rows x WORDS words of their data; the first column block also packs what follows the data.

    A packed row has LENGTH words: DATA, EXTRA, then SCALES exponents and zeros. Constants, so that the compiler knows how rows
    are aligned. EXTRA_2, TAIL_2: powers of two that cover the parts behind the data.
    """
    rb, wb = tl.program_id(0), tl.program_id(1)
    row = rb * ROWS + tl.arange(0, ROWS)
    row_ok = row < rows
    source = tl.load(index_ptr + row, mask=row_ok, other=0) if INDEXED else row
    at_out = out_ptr + row.to(tl.int64)[:, None] * LENGTH
    word = wb * WORDS + tl.arange(0, WORDS)
    ok = row_ok[:, None] & (word < DATA)[None, :]
    x = tl.load(x_ptr + source.to(tl.int64)[:, None] * DATA + word[None, :], mask=ok, other=0)
    tl.store(at_out + word[None, :], x, mask=ok)
    if wb == 0:
        if EXTRA > 0:
            e = tl.arange(0, EXTRA_2)
            e_ok = row_ok[:, None] & (e < EXTRA)[None, :]
            value = tl.load(extra_ptr + row.to(tl.int64)[:, None] * EXTRA + e[None, :], mask=e_ok, other=0)
            tl.store(at_out + DATA + e[None, :], value, mask=e_ok)
        if TAIL_2 > 0:  # exponents four to a word, then zeros to the end of the row
            w = tl.arange(0, TAIL_2)
            packed = tl.zeros((ROWS, TAIL_2), tl.int32)
            if SCALES > 0:
                for byte in tl.static_range(4):
                    block = w * 4 + byte
                    s_ok = row_ok[:, None] & (block < SCALES)[None, :]
                    si = tl.load(si_ptr + block.to(tl.int64)[None, :] * rows_q + source[:, None], mask=s_ok, other=0.0)
                    packed |= ((si.to(tl.int32, bitcast=True) >> 23) & 0xFF) << (8 * byte)
            tl.store(at_out + DATA + EXTRA + w[None, :], packed, mask=row_ok[:, None] & (w < LENGTH - DATA - EXTRA)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _unpack(
    in_ptr, index_ptr, live_ptr, y_ptr, si_ptr, rows,
    DATA: tl.constexpr, EXTRA: tl.constexpr, SCALES: tl.constexpr, LENGTH: tl.constexpr, SCALES_2: tl.constexpr,
    INDEXED: tl.constexpr, PER_ROW: tl.constexpr, LIVE: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """ROWS rows x WORDS words of y from the packed rows they come from; the first column block also spreads the scales."""
    rb, wb = tl.program_id(0), tl.program_id(1)
    if LIVE:
        if tl.load(live_ptr + rb * ROWS // 128) < 0:
            return
    row = rb * ROWS + tl.arange(0, ROWS)
    row_ok = row < rows
    source = tl.load(index_ptr + row, mask=row_ok, other=-1) if INDEXED else tl.where(row_ok, row, -1)
    present = source >= 0
    at_in = in_ptr + (source // PER_ROW).to(tl.int64)[:, None] * LENGTH
    word = wb * WORDS + tl.arange(0, WORDS)
    word_ok = (word < DATA)[None, :]
    x = tl.load(at_in + word[None, :], mask=present[:, None] & word_ok, other=0)
    tl.store(y_ptr + row.to(tl.int64)[:, None] * DATA + word[None, :], x, mask=row_ok[:, None] & word_ok)
    if SCALES > 0:
        if wb == 0:
            w = tl.arange(0, SCALES_2)  # words of four exponents; 127 in each byte is scale 1, for rows from nowhere
            s_ok = present[:, None] & (w * 4 < SCALES)[None, :]
            packed = tl.load(at_in + DATA + EXTRA + w[None, :], mask=s_ok, other=0x7F7F7F7F)
            for byte in tl.static_range(4):
                block = w * 4 + byte
                si = (((packed >> (8 * byte)) & 0xFF) << 23).to(tl.float32, bitcast=True)
                at = si_ptr + block.to(tl.int64)[None, :] * rows + row[:, None]
                tl.store(at, si, mask=row_ok[:, None] & (block < SCALES)[None, :])


@triton.jit
def _sum_packed(
    in_ptr, index_ptr, out_ptr, cols,
    N: tl.constexpr, BYTES: tl.constexpr, SCALES_AT: tl.constexpr, TILE: tl.constexpr, COLS: tl.constexpr,
    ROUND: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over N ranks of the packed row index[t, rank] (negative: none), FP32, in rank order."""
    t = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * (COLS // TILE) + tl.arange(0, COLS // TILE)
    col = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    total = tl.zeros((COLS // TILE, TILE), tl.float32)
    for rank in tl.static_range(N):
        row = tl.load(index_ptr + t * N + rank).to(tl.int64)
        there = tl.where(row >= 0, cols, 0)
        code = tl.load(in_ptr + row * BYTES + col, mask=col < there, other=0)
        exponent = tl.load(in_ptr + row * BYTES + SCALES_AT + tile, mask=tile * TILE < there, other=127).to(tl.int32)
        total += decode_bytes(code, HARDWARE) * (exponent << 23).to(tl.float32, bitcast=True)[:, None]
    if ROUND:
        total = round_bf16(total, HARDWARE)
    tl.store(out_ptr + t * cols + col, total, mask=col < cols)


def _power(n: int) -> int:
    return triton.next_power_of_2(n) if n else 0


def pack(q: Quantized, index_M: Tensor | None, extra_MX: Tensor | None) -> Tensor:
    """As payload.pack_ref; rows of whole words."""
    form = RowFormat.of(q, 0 if extra_MX is None else extra_MX.shape[1])
    rows = q.shape[0] if index_M is None else index_M.numel()
    out = torch.empty(rows, form.row_bytes, dtype=torch.uint8, device=q.device)
    if rows == 0:
        return out
    data = q.data.contiguous().view(torch.uint8).view(torch.int32)
    extra = data if extra_MX is None else extra_MX.contiguous().view(torch.int32)
    words, length, extra_words = form.data_bytes // 4, form.row_bytes // 4, form.extra // 4
    index, si = data if index_M is None else index_M, q.scale_inv.t().contiguous() if form.num_scales else data
    _pack[(triton.cdiv(rows, ROWS), triton.cdiv(words, WORDS))](
        data, si, index, extra, out.view(torch.int32), q.shape[0], rows,
        DATA=words, EXTRA=extra_words, SCALES=form.num_scales, LENGTH=length, EXTRA_2=_power(extra_words),
        TAIL_2=_power(length - words - extra_words), INDEXED=index_M is not None, ROWS=ROWS, WORDS=WORDS, num_warps=4,
    )  # fmt: skip
    return out


def unpack(
    payload_MB: Tensor, form: RowFormat, scale_inv: Tensor | None, index_R: Tensor | None, per_row: int, live_B: Tensor | None
) -> Quantized:
    """As payload.unpack_ref; rows of whole words."""
    rows = payload_MB.shape[0] if index_R is None else index_R.numel()
    data = torch.empty(rows, form.cols, dtype=form.dtype, device=payload_MB.device)
    scales = form.num_scales
    if scales:
        scale_inv = torch.empty(scales, rows, dtype=torch.float32, device=data.device).t()
    if rows:
        words, packed = form.data_bytes // 4, payload_MB.view(torch.int32)
        _unpack[(triton.cdiv(rows, ROWS), triton.cdiv(words, WORDS))](
            packed, packed if index_R is None else index_R, packed if live_B is None else live_B,
            data.view(torch.uint8).view(torch.int32), scale_inv if scales else packed, rows,
            DATA=words, EXTRA=form.extra // 4, SCALES=scales, LENGTH=form.row_bytes // 4, SCALES_2=_power(triton.cdiv(scales, 4)),
            INDEXED=index_R is not None, PER_ROW=per_row, LIVE=live_B is not None, ROWS=ROWS, WORDS=WORDS, num_warps=4,
        )  # fmt: skip
    return Quantized(data, scale_inv if form.tile is not None else None, form.tile)


def sum_packed(payload_MB: Tensor, form: RowFormat, index_Tn: Tensor, dtype: torch.dtype) -> Tensor:
    """As payload.sum_packed_ref."""
    tokens, ranks = index_Tn.shape
    out = torch.empty(tokens, form.cols, dtype=dtype, device=payload_MB.device)
    if tokens:
        cols = min(2048, triton.next_power_of_2(form.cols))
        _sum_packed[(tokens, triton.cdiv(form.cols, cols))](
            payload_MB, index_Tn, out, form.cols, N=ranks, BYTES=form.row_bytes, SCALES_AT=form.data_bytes + form.extra,
            TILE=form.tile[1], COLS=cols, ROUND=dtype == torch.bfloat16, HARDWARE=not INTERPRETED, num_warps=4,
        )  # fmt: skip
    return out
