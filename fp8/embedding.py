"""Token embedding over a Weight. Shapes: T tokens, V vocabulary, D features."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fp8.weight import Weight


def add_rows(out_VD: Tensor, tokens_T: Tensor, dy_TD: Tensor, accumulate: bool) -> None:
    """out[tokens] (+)= dy, in a fixed order (deterministic)."""
    if not accumulate:
        out_VD.zero_()
    if out_VD.is_cuda and out_VD.dtype == torch.float32 and dy_TD.dtype in (torch.bfloat16, torch.float32):
        from fp8 import embedding_kernels  # Triton comes with CUDA builds of torch only

        embedding_kernels.add_rows(out_VD, tokens_T, dy_TD)
    elif out_VD.is_cuda:  # index_put sorts, index_add uses atomics
        out_VD.index_put_((tokens_T,), dy_TD.to(out_VD.dtype), accumulate=True)
    else:
        out_VD.index_add_(0, tokens_T, dy_TD.to(out_VD.dtype))


class _Embedding(torch.autograd.Function):
    """forward  y_TD = w_VD[tokens];  wgrad  dw[tokens] += dy."""

    @staticmethod
    def forward(ctx: FunctionCtx, tokens_T: Tensor, anchor: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(tokens_T)
        ctx.weight = weight
        return weight.data[tokens_T].to(dtype)

    @staticmethod
    def backward(ctx: FunctionCtx, dy_TD: Tensor) -> tuple[None, ...]:
        (tokens_T,) = ctx.saved_tensors
        ctx.weight.accumulate(lambda out, acc: add_rows(out, tokens_T, dy_TD, acc))
        return None, None, None, None


def embedding(tokens_T: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
    """int64 tokens [T] -> rows [T, D] of weight [V, D], in `dtype`."""
    return _Embedding.apply(tokens_T, weight.anchor, weight, dtype)
