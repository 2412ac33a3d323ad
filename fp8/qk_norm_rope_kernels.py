"""Triton kernels behind qk_norm_rope.py. A program takes some tokens of one head.

Shapes: T tokens, H query heads, K key/value heads, d head dimension; the first half of it rotates. A head is loaded as quarters,
in one layout: the pairs that rotate together (first and second) meet in one thread, and sums over a head cross no layout.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8.column_sum_kernels import sum_columns
from fp8.device_math import round_bf16
from fp8.launch import cdiv
from fp8.quantize_kernels import INTERPRETED

FORWARD_ROWS, FORWARD_WARPS = 32, 4
BACKWARD_ROWS, BACKWARD_WARPS = 16, 2
BACKWARD_PROGRAMS = 792  # fixed: the order of dw's sums does not depend on the device; six for each of an H200's 132 SMs


def fits(d: int, r: int) -> bool:
    """Whether half of a head of d rotates (r of d), and d is a power of two."""
    return r == d // 2 and d >= 8 and d & (d - 1) == 0


@triton.jit
def _load(ptr, offset, ok, D: tl.constexpr):
    """Quarters of rows that start at `offset`, fp32."""
    at = ptr + offset[:, None] + tl.arange(0, D // 4)[None, :]
    a = tl.load(at, mask=ok[:, None], other=0.0).to(tl.float32)
    b = tl.load(at + D // 4, mask=ok[:, None], other=0.0).to(tl.float32)
    c = tl.load(at + D // 2, mask=ok[:, None], other=0.0).to(tl.float32)
    return a, b, c, tl.load(at + D // 4 * 3, mask=ok[:, None], other=0.0).to(tl.float32)


@triton.jit
def _load_row(ptr, D: tl.constexpr):
    """The same of one row, for all."""
    at = ptr + tl.arange(0, D // 4)
    return tl.load(at)[None, :], tl.load(at + D // 4)[None, :], tl.load(at + D // 2)[None, :], tl.load(at + D // 4 * 3)[None, :]


@triton.jit
def _store(ptr, offset, ok, a, b, c, d, D: tl.constexpr, ROUND: tl.constexpr, HARDWARE: tl.constexpr):
    if ROUND:
        a, b, c, d = round_bf16(a, HARDWARE), round_bf16(b, HARDWARE), round_bf16(c, HARDWARE), round_bf16(d, HARDWARE)
    at = ptr + offset[:, None] + tl.arange(0, D // 4)[None, :]
    tl.store(at, a, mask=ok[:, None])
    tl.store(at + D // 4, b, mask=ok[:, None])
    tl.store(at + D // 2, c, mask=ok[:, None])
    tl.store(at + D // 4 * 3, d, mask=ok[:, None])


@triton.jit
def _angles(cos_ptr, sin_ptr, token, ok, D: tl.constexpr):
    """(cos, sin) [ROWS, d / 4]: the tables' halves are equal."""
    at = token[:, None] * (D // 2) + tl.arange(0, D // 4)[None, :]
    cos = tl.load(cos_ptr + at, mask=ok[:, None], other=0.0).to(tl.float32)
    return cos, tl.load(sin_ptr + at, mask=ok[:, None], other=0.0).to(tl.float32)


@triton.jit
def _dot(a0, b0, c0, d0, a1, b1, c1, d1):
    """Row sums of products, [ROWS, 1]."""
    return tl.sum((a0 * a1 + b0 * b1) + (c0 * c1 + d0 * d1), 1)[:, None]


@triton.jit
def _qk_norm_rope(
    x_ptr, wq_ptr, wk_ptr, cos_ptr, sin_ptr, y_ptr, tokens, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, ROUND: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """y[t, h] = rope(norm(x[t, h])) of query or key head h; x holds H + 2K heads a token."""
    token, head = tl.program_id(1) * ROWS + tl.arange(0, ROWS).to(tl.int64), tl.program_id(0)
    ok = token < tokens
    a, b, c, d = _load(x_ptr, (token * (H + 2 * K) + head) * D, ok, D)
    if head < H:
        wa, wb, wc, wd = _load_row(wq_ptr, D)
    else:
        wa, wb, wc, wd = _load_row(wk_ptr, D)
    cos, sin = _angles(cos_ptr, sin_ptr, token, ok, D)
    rstd = tl.rsqrt(_dot(a, b, c, d, a, b, c, d) / D + eps)
    a, b, c, d = a * rstd, b * rstd, c * rstd, d * rstd
    if ROUND:
        a, b, c, d = round_bf16(a, HARDWARE), round_bf16(b, HARDWARE), round_bf16(c, HARDWARE), round_bf16(d, HARDWARE)
    a, b = a * wa, b * wb
    y_at = (token * (H + K) + head) * D
    _store(y_ptr, y_at, ok, a * cos - b * sin, b * cos + a * sin, c * wc, d * wd, D, ROUND, HARDWARE)


@triton.jit
def _backward_heads(
    x_ptr, w_ptr, cos_ptr, sin_ptr, dy_ptr, dx_ptr, dw_ptr, dy_stride, program, programs, tokens, eps,
    FIRST: tl.constexpr, COUNT: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, ROUND: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """dx of heads FIRST .. FIRST + COUNT - 1 of HEADS, some of their tiles; this program's part of dw."""
    wa, wb, wc, wd = _load_row(w_ptr, D)
    dwa, dwb = tl.zeros((ROWS, D // 4), tl.float32), tl.zeros((ROWS, D // 4), tl.float32)
    dwc, dwd = tl.zeros((ROWS, D // 4), tl.float32), tl.zeros((ROWS, D // 4), tl.float32)
    for i in range(program, tl.cdiv(tokens, ROWS) * COUNT, programs):
        token, head = i // COUNT * ROWS + tl.arange(0, ROWS).to(tl.int64), i % COUNT
        ok = token < tokens
        at = (token * HEADS + FIRST + head) * D
        a, b, c, d = _load(x_ptr, at, ok, D)
        da, db, dc, dd = _load(dy_ptr, token * dy_stride + head * D, ok, D)
        cos, sin = _angles(cos_ptr, sin_ptr, token, ok, D)
        da, db = da * cos + db * sin, db * cos - da * sin
        rstd = tl.rsqrt(_dot(a, b, c, d, a, b, c, d) / D + eps)
        a, b, c, d = a * rstd, b * rstd, c * rstd, d * rstd
        if ROUND:
            dwa += da * round_bf16(a, HARDWARE)
            dwb += db * round_bf16(b, HARDWARE)
            dwc += dc * round_bf16(c, HARDWARE)
            dwd += dd * round_bf16(d, HARDWARE)
        else:
            dwa += da * a
            dwb += db * b
            dwc += dc * c
            dwd += dd * d
        da, db, dc, dd = da * wa, db * wb, dc * wc, dd * wd
        mean = _dot(da, db, dc, dd, a, b, c, d) / D
        da, db, dc, dd = rstd * (da - a * mean), rstd * (db - b * mean), rstd * (dc - c * mean), rstd * (dd - d * mean)
        _store(dx_ptr, at, ok, da, db, dc, dd, D, ROUND, HARDWARE)
    out = dw_ptr + tl.arange(0, D // 4)
    tl.store(out, tl.sum(dwa, 0))
    tl.store(out + D // 4, tl.sum(dwb, 0))
    tl.store(out + D // 2, tl.sum(dwc, 0))
    tl.store(out + D // 4 * 3, tl.sum(dwd, 0))


@triton.jit
def _qk_norm_rope_backward(
    x_ptr, wq_ptr, wk_ptr, cos_ptr, sin_ptr, dq_ptr, dk_ptr, dv_ptr, dx_ptr, dw_ptr,
    q_stride, k_stride, v_stride, tokens, eps, q_programs, k_programs,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, ROUND: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """dx of query heads (the first programs), key heads (the next) or value heads, whose gradient is copied into its place; and a
    program's part of dw. Neighbouring programs take neighbouring heads of the same tokens."""
    pid, heads = tl.program_id(0), H + 2 * K
    v_program = pid - q_programs - k_programs
    if pid < q_programs:
        _backward_heads(x_ptr, wq_ptr, cos_ptr, sin_ptr, dq_ptr, dx_ptr, dw_ptr + pid * D, q_stride, pid, q_programs, tokens, eps,
                        0, H, H + 2 * K, D, ROWS, ROUND, HARDWARE)  # fmt: skip
    elif v_program < 0:
        _backward_heads(x_ptr, wk_ptr, cos_ptr, sin_ptr, dk_ptr, dx_ptr, dw_ptr + pid * D, k_stride, pid - q_programs, k_programs,
                        tokens, eps, H, K, H + 2 * K, D, ROWS, ROUND, HARDWARE)  # fmt: skip
    else:
        for i in range(v_program, tl.cdiv(tokens, ROWS) * K, tl.num_programs(0) - q_programs - k_programs):
            token = i // K * ROWS + tl.arange(0, ROWS).to(tl.int64)
            ok = token < tokens
            a, b, c, d = _load(dv_ptr, token * v_stride + i % K * D, ok, D)
            _store(dx_ptr, (token * heads + H + K + i % K) * D, ok, a, b, c, d, D, ROUND, HARDWARE)


# ---------------------------------------------------------------- launchers


def forward(qkv: Tensor, wq_d: Tensor, wk_d: Tensor, cos: Tensor, sin: Tensor, heads: int, eps: float) -> Tensor:
    """qkv [T, H + 2K, d] contiguous; cos, sin [T, 1, r] with equal halves -> rotated q and k, [T, H + K, d]."""
    tokens, total, d = qkv.shape
    kv = (total - heads) // 2
    y = torch.empty((tokens, heads + kv, d), dtype=qkv.dtype, device=qkv.device)
    _qk_norm_rope[(heads + kv, cdiv(tokens, FORWARD_ROWS))](
        qkv, wq_d, wk_d, cos.contiguous(), sin.contiguous(), y, tokens, eps, H=heads, K=kv, D=d,
        ROWS=FORWARD_ROWS, ROUND=qkv.dtype == torch.bfloat16, HARDWARE=not INTERPRETED, num_warps=FORWARD_WARPS,
    )  # fmt: skip
    return y


def _rows(x: Tensor) -> Tensor:
    """x with each token's heads contiguous, copied only if they are not."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def backward(
    qkv: Tensor, wq_d: Tensor, wk_d: Tensor, cos: Tensor, sin: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq [T, H, d], dk, dv [T, K, d] -> (dqkv [T, H + 2K, d], dw of the q norm [d], of the k norm [d]), dw in fp32."""
    (tokens, _, d), heads, kv = qkv.shape, dq.shape[1], dk.shape[1]
    dq, dk, dv = _rows(dq), _rows(dk), _rows(dv)
    dx = torch.empty_like(qkv)
    moved = 3 * (heads + kv) + 2 * kv  # of a token, in heads: read and written for q and k three times each, twice for v
    q_programs, k_programs = BACKWARD_PROGRAMS * 3 * heads // moved, BACKWARD_PROGRAMS * 3 * kv // moved
    dw = torch.empty((q_programs + k_programs, d), dtype=torch.float32, device=qkv.device)
    _qk_norm_rope_backward[(BACKWARD_PROGRAMS,)](
        qkv, wq_d, wk_d, cos.contiguous(), sin.contiguous(), dq, dk, dv, dx, dw,
        dq.stride(0), dk.stride(0), dv.stride(0), tokens, eps, q_programs, k_programs, H=heads, K=kv, D=d,
        ROWS=BACKWARD_ROWS, ROUND=qkv.dtype == torch.bfloat16, HARDWARE=not INTERPRETED, num_warps=BACKWARD_WARPS,
    )  # fmt: skip
    return dx, *sum_columns(dw, q_programs)
