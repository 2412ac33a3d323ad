"""The Triton kernels behind embedding.add_rows: gradients of equal tokens are summed in a fixed order, without atomics.

Tokens are sorted; a run is a stretch of equal tokens. A program sums the runs of 32 sorted positions by a product with
their 0/1 matrix of equality. A run inside goes straight to its row; of a run that crosses into other programs only the
parts are kept, and a second kernel adds them in order. So a token that is 5% of a text costs no more than others.

Shapes: T tokens, D features, V vocabulary, C = ceil(T / 32) chunks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8.launch import cdiv
from fp8.quantize_kernels import INTERPRETED

CHUNK, COLS = 32, 64


@triton.jit
def _token(sorted_ptr, at, count):
    """Sorted token at a position; -1 before the first and -2 after the last, which equal nothing."""
    token = tl.load(sorted_ptr + at, mask=(at >= 0) & (at < count), other=-1).to(tl.int64)
    return tl.where(at >= count, -2, token)


@triton.jit
def _sum_chunks(
    dy_ptr, sorted_ptr, order_ptr, out_ptr, parts_ptr, count, dim,
    CHUNK: tl.constexpr, COLS: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """Runs inside a chunk: out[token] += sum. Of a run that began earlier or goes on later: parts[chunk, 0] or parts[chunk, 1]."""
    chunk, cb = tl.program_id(0), tl.program_id(1)
    first, last = chunk * CHUNK, chunk * CHUNK + CHUNK - 1
    i, col = first + tl.arange(0, CHUNK), cb * COLS + tl.arange(0, COLS)
    token, before = _token(sorted_ptr, i, count), _token(sorted_ptr, i - 1, count)
    other = _token(sorted_ptr, first + tl.arange(0, CHUNK), count)
    row = tl.load(order_ptr + i, mask=i < count, other=0)
    ok = (i < count)[:, None] & (col < dim)[None, :]
    dy = tl.load(dy_ptr + row[:, None] * dim + col[None, :], mask=ok, other=0.0)
    equal = token[:, None] == other[None, :]
    if LOW:  # 0, 1 and BF16 gradients are exact on the tensor cores, which sum in FP32
        total = tl.dot(equal.to(tl.bfloat16), dy)
    else:
        total = tl.dot(equal.to(tl.float32), dy.to(tl.float32), input_precision="ieee")
    is_first = ((i == first) | (before != token)) & (i < count)
    earlier = (i == first) & (before == token)
    later = (token == _token(sorted_ptr, last, count)) & (token == _token(sorted_ptr, last + 1, count))
    inside = is_first & ~earlier & ~later
    at = out_ptr + tl.maximum(token, 0)[:, None] * dim + col[None, :]
    mask = inside[:, None] & (col < dim)[None, :]
    tl.store(at, tl.load(at, mask=mask, other=0.0) + total, mask=mask)
    part = chunk.to(tl.int64) * 2 + tl.where(earlier, 0, 1).to(tl.int64)
    mask = (is_first & (earlier | later))[:, None] & (col < dim)[None, :]
    tl.store(parts_ptr + part[:, None] * dim + col[None, :], total, mask=mask)


@triton.jit
def _join_parts(sorted_ptr, out_ptr, parts_ptr, count, dim, CHUNK: tl.constexpr, COLS: tl.constexpr):
    """Where a run begins in this chunk and goes on: adds its parts, chunk after chunk, to out[token]."""
    chunk = tl.program_id(0)
    last = chunk * CHUNK + CHUNK - 1
    token = _token(sorted_ptr, last, count)
    begins = (_token(sorted_ptr, chunk * CHUNK, count) != token) | (_token(sorted_ptr, chunk * CHUNK - 1, count) != token)
    if begins & (_token(sorted_ptr, last + 1, count) == token) & (token >= 0):
        col = tl.program_id(1) * COLS + tl.arange(0, COLS)
        part = parts_ptr + chunk.to(tl.int64) * 2 * dim + col
        total = tl.load(part + dim, mask=col < dim, other=0.0)
        at = last + 1
        while _token(sorted_ptr, at, count) == token:
            part += 2 * dim
            total += tl.load(part, mask=col < dim, other=0.0)
            at += CHUNK
        row = out_ptr + token * dim + col
        tl.store(row, tl.load(row, mask=col < dim, other=0.0) + total, mask=col < dim)


def add_rows(out_VD: Tensor, tokens_T: Tensor, dy_TD: Tensor) -> None:
    """out[tokens] += dy; out FP32, dy BF16 or FP32, tokens int64."""
    count, dim = dy_TD.shape
    if count == 0:
        return
    ordered, order = torch.sort(tokens_T.to(torch.int32), stable=True)  # half of the passes that 64 bits take
    chunks = cdiv(count, CHUNK)
    parts = torch.empty((chunks, 2, dim), dtype=torch.float32, device=out_VD.device)
    _sum_chunks[(chunks, cdiv(dim, COLS))](
        dy_TD.contiguous(), ordered, order, out_VD, parts, count, dim,
        CHUNK=CHUNK, COLS=COLS, LOW=dy_TD.dtype == torch.bfloat16 and not INTERPRETED, num_warps=4,
    )  # fmt: skip
    _join_parts[(chunks, cdiv(dim, 1024))](ordered, out_VD, parts, count, dim, CHUNK=CHUNK, COLS=1024, num_warps=4)
