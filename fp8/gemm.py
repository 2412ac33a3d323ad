"""One product: y = a . b^T with both operands K-major. All three GEMMs of a layer take this form.

    fprop   y_TF  = x_TD  . w_FD^T          A = x (1x128),     B = w (128x128)
    dgrad   dx_TD = dy_TF . (w^T)_DF^T      A = dy (1x128),    B = transpose(w), exact
    wgrad   dw_FD = dy^T_FT . (x^T)_DT^T    A = dy^T (1x128 along tokens), B = x re-tiled to 128x128

Shapes: M, N rows of A and B; K the common, contiguous dimension.
Reference: dequantise and multiply in FP32. On Hopper: cuBLAS through torch (FP32 promotion every 128 of K for block scales).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8.quantized import TENSORWISE, Quantized
from fp8.recipe import BLOCK


def gemm_nt_ref(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """[M, K] x [N, K] -> [M, N]: FP32 product of the dequantised operands, rounded once to `dtype`."""
    return (a.dequantize() @ b.dequantize().t()).to(dtype)


def _scaled_mm(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """cuBLAS product of scaled operands; which scale layouts it takes decides the tile (1x128 . 128x128, or tensorwise)."""
    kind = F.ScalingType
    if a.tile == TENSORWISE:
        scales, kinds = (a.scale_inv.reshape(()), b.scale_inv.reshape(())), (kind.TensorWise, kind.TensorWise)
    else:
        scales = (a.scale_inv, b.scale_inv.t())
        kinds = (kind.BlockWise1x128, kind.BlockWise128x128)
    swizzle = F.SwizzleType.NO_SWIZZLE
    return F.scaled_mm(
        a.data, b.data.t(), scales[0], kinds[0], scales[1], kinds[1], swizzle_a=swizzle, swizzle_b=swizzle, output_dtype=dtype
    )


def gemm_nt(
    a: Quantized,
    b: Quantized,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """a [M, K] . b [N, K]^T -> [M, N].

    Args:
        dtype: dtype of a newly made result.
        out: write (or, with `accumulate`, add) into this [M, N] tensor instead; a gradient buffer, FP32 or BF16.

    Raises:
        AssertionError: K differs, or a scaled K is not a multiple of 128.
    """
    assert a.shape[-1] == b.shape[-1], f"K differs: {tuple(a.shape)} . {tuple(b.shape)}^T"
    assert a.scale_inv is None or a.shape[-1] % BLOCK == 0, f"K = {a.shape[-1]} is not a multiple of {BLOCK}"
    result_dtype = dtype if out is None else (torch.float32 if out.dtype == torch.float32 else out.dtype)
    if a.data.is_cuda and a.scale_inv is not None:
        y = _scaled_mm(a, b, torch.bfloat16 if out is not None else dtype)
    elif a.data.is_cuda and out is None:
        y = (a.data @ b.data.t()).to(dtype)
    elif a.data.is_cuda:
        return _bf16_into(a.data, b.data, out, accumulate)
    else:
        y = gemm_nt_ref(a, b, result_dtype)
    if out is None:
        return y
    return out.add_(y) if accumulate else out.copy_(y)


def _bf16_into(a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> Tensor:
    """Unscaled wgrad into `out`; BF16 operands with an FP32 `out` accumulate without a round trip where torch offers it."""
    if a.dtype == out.dtype:
        return torch.addmm(out, a, b.t(), beta=float(accumulate), out=out)
    y = torch.mm(a, b.t(), out_dtype=out.dtype)
    return out.add_(y) if accumulate else out.copy_(y)
