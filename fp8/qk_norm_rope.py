"""QK-norm and rotary embedding of a fused [Q | K | V] projection, in one pass each way.

Shapes: T tokens, H query heads, K key/value heads, d head dimension, r rotary dimensions (the first r of d; halves paired).
    forward   y = rope(w * cast(x * rstd)) for each query and key head; v passes through
    backward  dn = rope^T(dy),  dx = rstd * (dn w - n * mean(dn w n)),  dw = sum over tokens and heads of dn * n
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fp8.rms_norm import rms_norm_ref
from fp8.weight import Weight


def apply_rope(x_THd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first r dimensions by tables [T, 1, r], halves paired (i with i + r/2); the rest passes through."""
    r = cos.shape[-1]
    rotary, rest = x_THd[..., :r], x_THd[..., r:]
    first, second = rotary.chunk(2, dim=-1)
    rotated = rotary * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([rotated, rest], dim=-1)


def qk_norm_rope_ref(
    qkv_THd: Tensor, wq_d: Tensor, wk_d: Tensor, cos: Tensor, sin: Tensor, heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The differentiable definition: [T, H + 2K, d] -> q [T, H, d], k [T, K, d], v [T, K, d]."""
    kv = (qkv_THd.shape[1] - heads) // 2
    q, k, v = qkv_THd.split([heads, kv, kv], dim=1)
    return apply_rope(rms_norm_ref(q, wq_d, eps), cos, sin), apply_rope(rms_norm_ref(k, wk_d, eps), cos, sin), v


def _kernels(qkv: Tensor, rope: tuple[Tensor, Tensor]) -> ModuleType | None:
    """The Triton kernels on a GPU (half of a head rotates), None for the reference."""
    if not qkv.is_cuda:
        return None
    from fp8 import qk_norm_rope_kernels  # Triton comes with CUDA builds of torch only

    return qk_norm_rope_kernels if qk_norm_rope_kernels.fits(qkv.shape[-1], rope[0].shape[-1]) else None


def _backward_ref(
    qkv: Tensor, wq_d: Tensor, wk_d: Tensor, cos: Tensor, sin: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dqkv, dwq, dwk) through the reference's graph."""
    inputs = [t.detach().requires_grad_() for t in (qkv, wq_d, wk_d)]
    with torch.enable_grad():
        out = qk_norm_rope_ref(*inputs, cos, sin, dq.shape[1], eps)
    return torch.autograd.grad(out, inputs, (dq, dk, dv))


class _QkNormRope(torch.autograd.Function):
    """forward (q, k, v), v a view of qkv; backward as in the module's equations, the norms' gradients into their Weights."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, qkv: Tensor, anchor_q: Tensor, anchor_k: Tensor, wq: Weight, wk: Weight,
        rope: tuple[Tensor, Tensor], heads: int, eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(qkv, *rope)
        ctx.wq, ctx.wk, ctx.eps = wq, wk, eps
        kernels = _kernels(qkv, rope)
        if kernels is None:
            return qk_norm_rope_ref(qkv, wq.data, wk.data, *rope, heads, eps)
        qk = kernels.forward(qkv, wq.data, wk.data, *rope, heads, eps)
        return qk[:, :heads], qk[:, heads:], qkv[:, qk.shape[1] :]

    @staticmethod
    def backward(ctx: FunctionCtx, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        qkv, *rope = ctx.saved_tensors
        kernels = _kernels(qkv, rope)
        run = kernels.backward if kernels else _backward_ref
        dqkv, dwq, dwk = run(qkv, ctx.wq.data, ctx.wk.data, *rope, dq, dk, dv, ctx.eps)
        ctx.wq.add_grad(dwq)
        ctx.wk.add_grad(dwk)
        return dqkv, None, None, None, None, None, None, None


def qk_norm_rope(
    qkv_THd: Tensor, wq: Weight, wk: Weight, rope: tuple[Tensor, Tensor], heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Fused projection [T, H + 2K, d] -> (q [T, H, d], k [T, K, d], both normed and rotated; v [T, K, d], a view).

    Args:
        wq, wk: norm weights [d].
        rope: (cos, sin) [T, 1, r], both halves equal.
        heads: H.
    """
    return _QkNormRope.apply(qkv_THd, wq.anchor, wk.anchor, wq, wk, rope, heads, eps)
