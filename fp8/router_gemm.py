"""The router's products in FP32 accuracy: never FP8, never plain TF32 (its choices flip on rounding noise).

On a GPU an FP32 number goes as the sum of three BF16 numbers (8 significant bits each), and the tensor cores add the exact products
in FP32: the accuracy of an FP32 GEMM at three times the cost of a BF16 one, not fifteen times.

Shapes: T tokens, D features, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def splits(x: Tensor) -> bool:
    """Whether products with x go in BF16 parts: it is exact in BF16, so only the other operand has to be split."""
    return x.is_cuda and x.dtype == torch.bfloat16


def router_gemm(x_TD: Tensor, w_ED: Tensor) -> Tensor:
    """logits = x . w^T -> [T, E] fp32."""
    if not splits(x_TD):
        return _fp32_mm(x_TD.float(), w_ED.float().t())
    from fp8 import router_gemm_kernel  # Triton comes with CUDA builds of torch only

    experts, parts = w_ED.shape[0], _split(w_ED)
    if router_gemm_kernel.fits(x_TD, experts):
        return router_gemm_kernel.product(x_TD, parts, experts)
    low_middle_high = parts[: 3 * experts]
    return _sum_parts(torch.mm(x_TD, low_middle_high.t(), out_dtype=torch.float32), along_rows=False)


def router_dgrad(dlogits_TE: Tensor | None, w_ED: Tensor, dtype: torch.dtype, parts_T4E: Tensor | None = None) -> Tensor:
    """dlogits . w -> [T, D] in `dtype`.

    Args:
        parts_T4E: `split_gradient` of dlogits, which is not read then.
    """
    experts = w_ED.shape[0]
    if parts_T4E is None and dlogits_TE.is_cuda and dtype == torch.bfloat16:
        parts_T4E = split_gradient(dlogits_TE)
    if parts_T4E is None:
        return _fp32_mm(dlogits_TE, w_ED.float()).to(dtype)
    high_middle_high = parts_T4E[:, : 3 * experts]
    return torch.mm(high_middle_high, _split(w_ED)[experts:])  # h.wm + m.wh + h.wh: 16 bits, of which BF16 keeps 8


def router_wgrad(dlogits_TE: Tensor | None, x_TD: Tensor, parts_T4E: Tensor | None = None) -> Tensor:
    """dlogits^T . x -> [E, D] fp32; parts as in `router_dgrad`."""
    if not splits(x_TD):
        return _fp32_mm(dlogits_TE.float().t(), x_TD.float())
    parts_T4E = split_gradient(dlogits_TE) if parts_T4E is None else parts_T4E
    middle_high_low = parts_T4E[:, parts_T4E.shape[1] // 4 :]
    return _sum_parts(torch.mm(middle_high_low.t(), x_TD, out_dtype=torch.float32), along_rows=True)


def split_gradient(dlogits_TE: Tensor) -> Tensor:
    """Columns [high | middle | high | low] of dlogits, BF16 [T, 4E]: what both products of backward read, on a GPU."""
    from fp8.route_kernels import split_bf16  # Triton comes with CUDA builds of torch only

    return split_bf16(dlogits_TE, (0, 1, 0, 2), along_rows=False)


def _split(w_ED: Tensor) -> Tensor:
    """Rows [low | middle | high | high] of w, BF16 [4E, D]."""
    from fp8.route_kernels import split_bf16

    return split_bf16(w_ED, (2, 1, 0, 0), along_rows=True)


def _sum_parts(x: Tensor, along_rows: bool) -> Tensor:
    """The three products, added up."""
    from fp8.route_kernels import sum_parts

    return sum_parts(x, along_rows)


def _fp32_mm(a: Tensor, b: Tensor) -> Tensor:
    """IEEE FP32 product even where the process allows TF32."""
    if not a.is_cuda or torch.get_float32_matmul_precision() == "highest":
        return a @ b
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return a @ b
    finally:
        torch.set_float32_matmul_precision(before)
