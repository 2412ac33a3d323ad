"""Triton kernels behind qk_norm_rope.py. One row of a tile is one head of one token.

Shapes: T tokens, H query heads, K key/value heads, d head dimension (a power of two), r rotary dimensions (even, <= d).
The rotary partner of dimension i (i + r/2 or i - r/2) is loaded a second time, from cache, instead of shuffled across threads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8.device_math import round_bf16
from fp8.quantize_kernels import INTERPRETED

ROWS, WARPS = 16, 4
BACKWARD_PROGRAMS = 1056  # fixed: the order of dw's sums does not depend on the device; 8 for each of an H200's 132 SMs


@triton.jit
def _rotation(cos_ptr, sin_ptr, token, d, row_ok, R: tl.constexpr):
    """(partner [d], cos, sin with the sign of the partner's term [ROWS, d]); beyond r: itself, 1, 0."""
    partner = tl.where(d < R // 2, d + R // 2, tl.where(d < R, d - R // 2, d))
    ok = row_ok[:, None] & (d < R)[None, :]
    at = token[:, None] * R + d[None, :]
    cos = tl.load(cos_ptr + at, mask=ok, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + at, mask=ok, other=0.0).to(tl.float32)
    return partner, cos, tl.where((d < R // 2)[None, :], -sin, sin)


@triton.jit
def _qk_norm_rope(
    x_ptr, wq_ptr, wk_ptr, cos_ptr, sin_ptr, y_ptr, count, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, ROUND: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """y[t, h] = rope(norm(x[t, h])) of the H + K query and key heads; x holds H + 2K heads a token."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    row_ok = row < count
    token, head = row // (H + K), row % (H + K)
    d = tl.arange(0, D)
    partner, cos, sin = _rotation(cos_ptr, sin_ptr, token, d, row_ok, R)
    ok = row_ok[:, None] & (d < D)[None, :]
    source = x_ptr + (token * (H + 2 * K) + head)[:, None] * D
    x = tl.load(source + d[None, :], mask=ok, other=0.0).to(tl.float32)
    x_partner = tl.load(source + partner[None, :], mask=ok, other=0.0).to(tl.float32)
    query = (head < H)[:, None]
    w = tl.where(query, tl.load(wq_ptr + d)[None, :], tl.load(wk_ptr + d)[None, :])
    w_partner = tl.where(query, tl.load(wq_ptr + partner)[None, :], tl.load(wk_ptr + partner)[None, :])
    rstd = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    n, n_partner = x * rstd, x_partner * rstd
    if ROUND:
        n, n_partner = round_bf16(n, HARDWARE), round_bf16(n_partner, HARDWARE)
    y = n * w * cos + n_partner * w_partner * sin
    if ROUND:
        y = round_bf16(y, HARDWARE)
    tl.store(y_ptr + row[:, None] * D + d[None, :], y, mask=ok)


@triton.jit
def _qk_norm_rope_backward(
    x_ptr, wq_ptr, wk_ptr, cos_ptr, sin_ptr, dq_ptr, dk_ptr, dv_ptr, dx_ptr, dw_ptr,
    q_stride, k_stride, v_stride, count, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, ROUND: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """dx of all H + 2K heads (the gradient of v is copied into its place); this program's part of dw of both norms."""
    d = tl.arange(0, D)
    dwq, dwk = tl.zeros((D,), tl.float32), tl.zeros((D,), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        token, head = row // (H + 2 * K), row % (H + 2 * K)
        row_ok = row < count
        is_q, is_v = row_ok & (head < H), row_ok & (head >= H + K)
        is_k = row_ok & (head >= H) & (head < H + K)
        partner, cos, sin = _rotation(cos_ptr, sin_ptr, token, d, row_ok, R)
        at_q, at_k = (token * q_stride + head * D)[:, None], (token * k_stride + (head - H) * D)[:, None]
        dy = tl.load(dq_ptr + at_q + d[None, :], mask=is_q[:, None], other=0.0).to(tl.float32)
        dy += tl.load(dk_ptr + at_k + d[None, :], mask=is_k[:, None], other=0.0).to(tl.float32)
        dy_partner = tl.load(dq_ptr + at_q + partner[None, :], mask=is_q[:, None], other=0.0).to(tl.float32)
        dy_partner += tl.load(dk_ptr + at_k + partner[None, :], mask=is_k[:, None], other=0.0).to(tl.float32)
        dv = tl.load(dv_ptr + (token * v_stride + (head - H - K) * D)[:, None] + d[None, :], mask=is_v[:, None], other=0.0)
        dn = dy * cos - dy_partner * sin
        x = tl.load(x_ptr + row[:, None] * D + d[None, :], mask=(is_q | is_k)[:, None], other=0.0).to(tl.float32)
        w = tl.where(is_q[:, None], tl.load(wq_ptr + d)[None, :], tl.load(wk_ptr + d)[None, :])
        rstd = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        n = x * rstd
        rounded = n
        if ROUND:
            rounded = round_bf16(n, HARDWARE)
        dw = dn * rounded
        dwq += tl.sum(tl.where(is_q[:, None], dw, 0.0), 0)
        dwk += tl.sum(tl.where(is_k[:, None], dw, 0.0), 0)
        g = dn * w
        dx = rstd * (g - n * (tl.sum(g * n, 1) / D)[:, None])
        dx = tl.where(is_v[:, None], dv.to(tl.float32), dx)
        if ROUND:
            dx = round_bf16(dx, HARDWARE)
        tl.store(dx_ptr + row[:, None] * D + d[None, :], dx, mask=row_ok[:, None])
    tl.store(dw_ptr + tl.program_id(0) * 2 * D + d, dwq)
    tl.store(dw_ptr + tl.program_id(0) * 2 * D + D + d, dwk)


# ---------------------------------------------------------------- launchers


def forward(qkv: Tensor, wq_d: Tensor, wk_d: Tensor, cos: Tensor, sin: Tensor, heads: int, eps: float) -> Tensor:
    """qkv [T, H + 2K, d] contiguous; cos, sin [T, 1, r] -> rotated q and k, [T, H + K, d]."""
    tokens, total, d = qkv.shape
    kv = (total - heads) // 2
    y = torch.empty((tokens, heads + kv, d), dtype=qkv.dtype, device=qkv.device)
    count = tokens * (heads + kv)
    _qk_norm_rope[(triton.cdiv(count, ROWS),)](
        qkv, wq_d, wk_d, cos.contiguous(), sin.contiguous(), y, count, eps, H=heads, K=kv, D=d, R=cos.shape[-1], ROWS=ROWS,
        ROUND=qkv.dtype == torch.bfloat16, HARDWARE=not INTERPRETED, num_warps=WARPS,
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
    dx, count = torch.empty_like(qkv), tokens * total
    programs = min(BACKWARD_PROGRAMS, triton.cdiv(count, ROWS))
    dw = torch.empty((programs, 2, d), dtype=torch.float32, device=qkv.device)
    _qk_norm_rope_backward[(programs,)](
        qkv, wq_d, wk_d, cos.contiguous(), sin.contiguous(), dq, dk, dv, dx, dw,
        dq.stride(0), dk.stride(0), dv.stride(0), count, eps, H=heads, K=kv, D=d, R=cos.shape[-1], ROWS=ROWS,
        ROUND=qkv.dtype == torch.bfloat16, HARDWARE=not INTERPRETED, num_warps=WARPS,
    )  # fmt: skip
    dw = dw.sum(0)
    return dx, dw[0], dw[1]
