"""Triton kernels behind qk_norm_rope.py. A program takes some tokens of one head.

Shapes: T tokens, H query heads, K key/value heads, d head dimension, r rotary dimensions. A head is loaded as the first
and second half of its rotary part and the rest, each a power of two wide: the pairs that rotate together meet in one thread.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8.device_math import round_bf16
from fp8.launch import cdiv
from fp8.quantize_kernels import INTERPRETED

FORWARD_ROWS, BACKWARD_ROWS, WARPS = 32, 16, 4
BACKWARD_PROGRAMS = 27  # a head; fixed: the order of dw's sums does not depend on the device. 24 heads fill 132 SMs five times
STAGES = 3  # tiles whose loads are in flight in backward


def fits(d: int, r: int) -> bool:
    """Whether a head is made of powers of two: r / 2, r / 2 and d - r."""
    return r >= 2 and r < d and (r & (r - 1)) == 0 and ((d - r) & (d - r - 1)) == 0


@triton.jit
def _load(ptr, offset, ok, R: tl.constexpr, D: tl.constexpr):
    """(first half, second half, rest) of rows that start at `offset`, fp32."""
    i, j = tl.arange(0, R // 2)[None, :], tl.arange(0, D - R)[None, :]
    at = ptr + offset[:, None]
    a = tl.load(at + i, mask=ok[:, None], other=0.0).to(tl.float32)
    b = tl.load(at + R // 2 + i, mask=ok[:, None], other=0.0).to(tl.float32)
    return a, b, tl.load(at + R + j, mask=ok[:, None], other=0.0).to(tl.float32)


@triton.jit
def _load_row(ptr, R: tl.constexpr, D: tl.constexpr):
    """The same of one row, for all."""
    i, j = tl.arange(0, R // 2), tl.arange(0, D - R)
    return tl.load(ptr + i)[None, :], tl.load(ptr + R // 2 + i)[None, :], tl.load(ptr + R + j)[None, :]


@triton.jit
def _store(ptr, offset, ok, a, b, c, R: tl.constexpr, D: tl.constexpr, ROUND: tl.constexpr, HARDWARE: tl.constexpr):
    if ROUND:
        a, b, c = round_bf16(a, HARDWARE), round_bf16(b, HARDWARE), round_bf16(c, HARDWARE)
    i, j = tl.arange(0, R // 2)[None, :], tl.arange(0, D - R)[None, :]
    at = ptr + offset[:, None]
    tl.store(at + i, a, mask=ok[:, None])
    tl.store(at + R // 2 + i, b, mask=ok[:, None])
    tl.store(at + R + j, c, mask=ok[:, None])


@triton.jit
def _angles(cos_ptr, sin_ptr, token, ok, R: tl.constexpr):
    """(cos, sin) [ROWS, R / 2]: the tables' halves are equal."""
    at = token[:, None] * R + tl.arange(0, R // 2)[None, :]
    cos = tl.load(cos_ptr + at, mask=ok[:, None], other=0.0).to(tl.float32)
    return cos, tl.load(sin_ptr + at, mask=ok[:, None], other=0.0).to(tl.float32)


@triton.jit
def _dot3(a0, b0, c0, a1, b1, c1):
    """Row sums of products, [ROWS, 1]."""
    return (tl.sum(a0 * a1, 1) + tl.sum(b0 * b1, 1) + tl.sum(c0 * c1, 1))[:, None]


@triton.jit
def _qk_norm_rope(
    x_ptr, wq_ptr, wk_ptr, cos_ptr, sin_ptr, y_ptr, tokens, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, ROUND: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """y[t, h] = rope(norm(x[t, h])) of query or key head h; x holds H + 2K heads a token."""
    token, head = tl.program_id(1) * ROWS + tl.arange(0, ROWS).to(tl.int64), tl.program_id(0)
    ok = token < tokens
    a, b, c = _load(x_ptr, (token * (H + 2 * K) + head) * D, ok, R, D)
    if head < H:
        wa, wb, wc = _load_row(wq_ptr, R, D)
    else:
        wa, wb, wc = _load_row(wk_ptr, R, D)
    cos, sin = _angles(cos_ptr, sin_ptr, token, ok, R)
    rstd = tl.rsqrt(_dot3(a, b, c, a, b, c) / D + eps)
    a, b, c = a * rstd, b * rstd, c * rstd
    if ROUND:
        a, b, c = round_bf16(a, HARDWARE), round_bf16(b, HARDWARE), round_bf16(c, HARDWARE)
    a, b, c = a * wa, b * wb, c * wc
    y_at = (token * (H + K) + head) * D
    _store(y_ptr, y_at, ok, a * cos - b * sin, b * cos + a * sin, c, R, D, ROUND, HARDWARE)


@triton.jit
def _backward_head(
    x_ptr, w_ptr, cos_ptr, sin_ptr, dy_ptr, dx_ptr, dw_ptr, dy_stride, dy_head, head, tokens, eps,
    HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, ROUND: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """dx of one query or key head, tiles program, program + programs, ...; this program's part of dw."""
    wa, wb, wc = _load_row(w_ptr, R, D)
    dwa, dwb = tl.zeros((ROWS, R // 2), tl.float32), tl.zeros((ROWS, R // 2), tl.float32)
    dwc = tl.zeros((ROWS, D - R), tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(tokens, ROWS), tl.num_programs(1), num_stages=STAGES):
        token = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        ok = token < tokens
        at = (token * HEADS + head) * D
        a, b, c = _load(x_ptr, at, ok, R, D)
        da, db, dc = _load(dy_ptr, token * dy_stride + dy_head * D, ok, R, D)
        cos, sin = _angles(cos_ptr, sin_ptr, token, ok, R)
        da, db = da * cos + db * sin, db * cos - da * sin
        rstd = tl.rsqrt(_dot3(a, b, c, a, b, c) / D + eps)
        a, b, c = a * rstd, b * rstd, c * rstd
        if ROUND:
            dwa += da * round_bf16(a, HARDWARE)
            dwb += db * round_bf16(b, HARDWARE)
            dwc += dc * round_bf16(c, HARDWARE)
        else:
            dwa += da * a
            dwb += db * b
            dwc += dc * c
        da, db, dc = da * wa, db * wb, dc * wc
        mean = _dot3(da, db, dc, a, b, c) / D
        da, db, dc = rstd * (da - a * mean), rstd * (db - b * mean), rstd * (dc - c * mean)
        _store(dx_ptr, at, ok, da, db, dc, R, D, ROUND, HARDWARE)
    i, j = tl.arange(0, R // 2), tl.arange(0, D - R)
    tl.store(dw_ptr + i, tl.sum(dwa, 0))
    tl.store(dw_ptr + R // 2 + i, tl.sum(dwb, 0))
    tl.store(dw_ptr + R + j, tl.sum(dwc, 0))


@triton.jit
def _qk_norm_rope_backward(
    x_ptr, wq_ptr, wk_ptr, cos_ptr, sin_ptr, dq_ptr, dk_ptr, dv_ptr, dx_ptr, dw_ptr,
    q_stride, k_stride, v_stride, tokens, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    ROUND: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """dx of one of the H + 2K heads (the gradient of v is copied into its place), and its parts of dw."""
    head = tl.program_id(0)
    dw = dw_ptr + (tl.program_id(1) * (H + K) + head) * D
    if head < H:
        _backward_head(x_ptr, wq_ptr, cos_ptr, sin_ptr, dq_ptr, dx_ptr, dw, q_stride, head, head, tokens, eps,
                       H + 2 * K, D, R, ROWS, STAGES, ROUND, HARDWARE)  # fmt: skip
    elif head < H + K:
        _backward_head(x_ptr, wk_ptr, cos_ptr, sin_ptr, dk_ptr, dx_ptr, dw, k_stride, head - H, head, tokens, eps,
                       H + 2 * K, D, R, ROWS, STAGES, ROUND, HARDWARE)  # fmt: skip
    else:
        for tile in tl.range(tl.program_id(1), tl.cdiv(tokens, ROWS), tl.num_programs(1)):
            token = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
            ok = token < tokens
            a, b, c = _load(dv_ptr, token * v_stride + (head - H - K) * D, ok, R, D)
            _store(dx_ptr, (token * (H + 2 * K) + head) * D, ok, a, b, c, R, D, ROUND, HARDWARE)


# ---------------------------------------------------------------- launchers


def forward(qkv: Tensor, wq_d: Tensor, wk_d: Tensor, cos: Tensor, sin: Tensor, heads: int, eps: float) -> Tensor:
    """qkv [T, H + 2K, d] contiguous; cos, sin [T, 1, r] with equal halves -> rotated q and k, [T, H + K, d]."""
    tokens, total, d = qkv.shape
    kv = (total - heads) // 2
    y = torch.empty((tokens, heads + kv, d), dtype=qkv.dtype, device=qkv.device)
    _qk_norm_rope[(heads + kv, cdiv(tokens, FORWARD_ROWS))](
        qkv, wq_d, wk_d, cos.contiguous(), sin.contiguous(), y, tokens, eps, H=heads, K=kv, D=d, R=cos.shape[-1],
        ROWS=FORWARD_ROWS, ROUND=qkv.dtype == torch.bfloat16, HARDWARE=not INTERPRETED, num_warps=WARPS,
    )  # fmt: skip
    return y


def _rows(x: Tensor) -> Tensor:
    """x with each token's heads contiguous, copied only if they are not."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def backward(
    qkv: Tensor, wq_d: Tensor, wk_d: Tensor, cos: Tensor, sin: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq [T, H, d], dk, dv [T, K, d] -> (dqkv [T, H + 2K, d], dw of the q norm [d], of the k norm [d]), dw in fp32."""
    (tokens, total, d), heads, kv = qkv.shape, dq.shape[1], dk.shape[1]
    dq, dk, dv = _rows(dq), _rows(dk), _rows(dv)
    dx, programs = torch.empty_like(qkv), min(BACKWARD_PROGRAMS, cdiv(tokens, BACKWARD_ROWS))
    dw = torch.empty((programs, heads + kv, d), dtype=torch.float32, device=qkv.device)
    _qk_norm_rope_backward[(total, programs)](
        qkv, wq_d, wk_d, cos.contiguous(), sin.contiguous(), dq, dk, dv, dx, dw,
        dq.stride(0), dk.stride(0), dv.stride(0), tokens, eps, H=heads, K=kv, D=d, R=cos.shape[-1],
        ROWS=BACKWARD_ROWS, STAGES=STAGES,
        ROUND=qkv.dtype == torch.bfloat16, HARDWARE=not INTERPRETED, num_warps=WARPS,
    )  # fmt: skip
    return dx, dw[:, :heads].sum((0, 1)), dw[:, heads:].sum((0, 1))
