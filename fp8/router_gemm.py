"""The router's products in FP32 accuracy: never FP8, never plain TF32 (its choices flip on rounding noise).

Shapes: T tokens, D features, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def router_gemm(x_TD: Tensor, w_ED: Tensor) -> Tensor:
    """x . w^T -> [T, E] fp32."""
    return _fp32_mm(x_TD.float(), w_ED.float().t())


def router_wgrad(dlogits_TE: Tensor, x_TD: Tensor) -> Tensor:
    """dlogits^T . x -> [E, D] fp32."""
    return _fp32_mm(dlogits_TE.float().t(), x_TD.float())


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
