"""One product: y = a . b^T with both operands K-major. All three GEMMs of a layer take this form.

    fprop   y_TF  = x_TD  . w_FD^T          A = x (1x128),     B = w (128x128)
    dgrad   dx_TD = dy_TF . (w^T)_DF^T      A = dy (1x128),    B = transpose(w), exact
    wgrad   dw_FD = dy^T_FT . (x^T)_DT^T    A = dy^T (1x128 along tokens), B = x re-tiled to 128x128

Shapes: M, N rows of A and B; K the common, contiguous dimension.
Reference: dequantise and multiply in FP32. On Hopper: cuBLAS through torch (FP32 promotion every 128 of K for block scales).
Operands that a GPU cannot multiply as they are (MX on Hopper, mixed tiles) are dequantised to BF16 and multiplied there: FP8
values times powers of two are exact in BF16, so only the speed differs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8.hardware import has_block_gemm, has_mx_gemm, has_tensorwise_gemm
from fp8.mx import scaled_mm_mx
from fp8.quantized import Quantized
from fp8.recipe import BLOCK, E4M3, MX_BLOCK, TENSORWISE


def gemm_nt_ref(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """[M, K] x [N, K] -> [M, N]: FP32 product of the dequantised operands, rounded once to `dtype`."""
    return (a.dequantize() @ b.dequantize().t()).to(dtype)


def _is_native(a: Quantized, b: Quantized) -> bool:
    """Whether this GPU multiplies the scaled operands as they are."""
    formats = (a.data.dtype, b.data.dtype)
    if a.tile == b.tile == TENSORWISE:
        return has_tensorwise_gemm(a.device) and E4M3 in formats
    if a.tile == (1, MX_BLOCK):
        return b.tile == (MX_BLOCK, MX_BLOCK) and has_mx_gemm(a.device) and E4M3 in formats
    return a.tile == (1, BLOCK) and b.tile == (BLOCK, BLOCK) and formats == (E4M3, E4M3) and has_block_gemm(a.device)


def high_precision(q: Quantized) -> Tensor:
    """The operand as a high-precision matrix: itself when unscaled, else its exact values in BF16."""
    return q.data if q.scale_inv is None else q.dequantize(torch.bfloat16)


def _scaled_mm(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """cuBLAS product of scaled operands; which scale layouts it takes decides the tile (1x128 . 128x128, or tensorwise)."""
    if a.tile == (1, MX_BLOCK):
        return scaled_mm_mx(a, b, dtype)
    kind = F.ScalingType
    if a.tile == TENSORWISE:
        scales, kinds = (a.scale_inv.reshape(()), b.scale_inv.reshape(())), (kind.TensorWise, kind.TensorWise)
    else:
        # cuBLAS wants the K direction of B's scales in rows of four: K = 256 has two, and pads.
        pad = -b.scale_inv.shape[-1] % 4
        scales = (a.scale_inv, (F.pad(b.scale_inv, (0, pad)) if pad else b.scale_inv).t())
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
    if a.data.is_cuda and _is_native(a, b):
        y = _scaled_mm(a, b, torch.bfloat16 if out is not None else dtype)
    elif a.data.is_cuda and out is None:
        y = (high_precision(a) @ high_precision(b).t()).to(dtype)
    elif a.data.is_cuda:
        return _bf16_into(high_precision(a), high_precision(b), out, accumulate)
    else:
        y = gemm_nt_ref(a, b, result_dtype)
    return y if out is None else _take(y, out, accumulate)


def _take(y: Tensor, out: Tensor, accumulate: bool) -> Tensor:
    """out (+)= y; on a GPU at the copy rate, of which torch's mixed-dtype sum reaches half."""
    if not y.is_cuda or y.dtype != torch.bfloat16 or not out.is_contiguous() or out.dtype not in (torch.float32, torch.bfloat16):
        return out.add_(y) if accumulate else out.copy_(y)
    from fp8.gradient_kernels import take  # Triton comes with CUDA builds of torch only

    take(y, out, accumulate)
    return out


def _bf16_into(a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> Tensor:
    """Unscaled wgrad into `out`; BF16 operands with an FP32 `out` accumulate without a round trip where torch offers it."""
    if a.dtype == out.dtype:
        return torch.addmm(out, a, b.t(), beta=float(accumulate), out=out)
    y = torch.mm(a, b.t(), out_dtype=out.dtype)
    return out.add_(y) if accumulate else out.copy_(y)
