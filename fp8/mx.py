"""MX operands as Blackwell's tensor cores take them: E8M0 scales, swizzled in tiles of 128 rows x 4 scales.

Layout: cuBLAS documentation, "1D block scaling factors layout"; written against it and not run: no such device was at hand. On
every other device MX operands are dequantised (gemm.py).
Shapes: R rows, K columns, s = K / 32 scales a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8.quantized import Quantized
from fp8.recipe import MX_BLOCK

TILE_ROWS, TILE_SCALES = 128, 4


def e8m0(scale_inv: Tensor) -> Tensor:
    """Power-of-two fp32 scales -> their exponent bytes (float8_e8m0fnu); exact. Torch's own cast rounds to nearest, which clips."""
    return (scale_inv.contiguous().view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)


def row_scales(q: Quantized) -> Tensor:
    """[R, s] one inverse scale for each row and 32 columns, from 1x32 or 32x32 tiles."""
    assert q.tile in ((1, MX_BLOCK), (MX_BLOCK, MX_BLOCK)), f"MX tiles are 1x32 or 32x32, got {q.tile}"
    return q.scale_inv if q.tile[0] == 1 else q.scale_inv.repeat_interleave(MX_BLOCK, dim=-2)[..., : q.shape[-2], :]


def swizzle(scale_inv_Rs: Tensor) -> Tensor:
    """[R, s] inverse scales -> flat E8M0 bytes in tiles of 128 x 4; padding has scale 1.

    Within a tile, row r and scale c lie at (r % 32) * 16 + (r // 32) * 4 + c; tiles follow each other row by row.
    """
    rows, scales = scale_inv_Rs.shape
    padded = F.pad(scale_inv_Rs, (0, -scales % TILE_SCALES, 0, -rows % TILE_ROWS), value=1.0)
    tiles = padded.unflatten(0, (-1, 4, 32)).unflatten(3, (-1, TILE_SCALES))  # [row tile, r // 32, r % 32, scale tile, c]
    return e8m0(tiles.permute(0, 3, 2, 1, 4)).flatten()


def scaled_mm_mx(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """a [M, K] . b [N, K]^T -> [M, N] on SM100."""
    kind, swizzled = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    scale_a, scale_b = swizzle(row_scales(a)), swizzle(row_scales(b))
    return F.scaled_mm(a.data, b.data.t(), scale_a, kind, scale_b, kind, swizzle_a=swizzled, swizzle_b=swizzled, output_dtype=dtype)
