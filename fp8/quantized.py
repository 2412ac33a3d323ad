"""The one container that every GEMM reads: values in a narrow format and the scales that belong to them.

Shapes: R rows, C columns, (r, c) the tile that shares one scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8.recipe import TENSORWISE


@dataclass(frozen=True, eq=False)
class Quantized:
    """A matrix (or a stack of matrices) in FP8 with inverse scales, or unscaled in BF16/FP32.

    It is deliberately not a tensor: arithmetic on FP8 bytes without their scales is a bug, so torch operations fail on it.

    Attributes:
        data: [..., R, C]; float8_e4m3fn or float8_e5m2 when scaled, else the operand as the GEMM reads it.
        scale_inv: fp32 inverse scales, `value = data * scale_inv`; None when unscaled. Shape [..., ceil(R/r), ceil(C/c)],
            and [..., 1, 1] tensorwise. Row tiles (1, c) are stored column-major (strides (1, R)), as cuBLAS and TMA want them.
        tile: (r, c) that shares one scale; `TENSORWISE` for one scale a matrix; None when unscaled.
    """

    data: Tensor
    scale_inv: Tensor | None
    tile: tuple[int, int] | None

    def __post_init__(self) -> None:
        assert (self.scale_inv is None) == (self.tile is None), "scales and tile come together"

    @staticmethod
    def unscaled(data: Tensor) -> Quantized:
        """Wraps a high-precision operand, so that every recipe takes the same path."""
        return Quantized(data, None, None)

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales."""
        return self.data.nbytes + (0 if self.scale_inv is None else self.scale_inv.nbytes)

    def rows(self, rows: slice) -> Quantized:
        """A part of the rows of a matrix that is row-tiled, tensorwise or unscaled; its scales are column-major again."""
        if self.scale_inv is None or self.tile == TENSORWISE:
            return Quantized(self.data[rows], self.scale_inv, self.tile)
        assert self.tile[0] == 1, f"tiles {self.tile} span several rows"
        return Quantized(self.data[rows], self.scale_inv[rows].t().contiguous().t(), self.tile)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[..., R, C] in `dtype`; the product is taken in fp32."""
        if self.scale_inv is None:
            return self.data.to(dtype)
        return (self.data.float() * expand_scales(self.scale_inv, self.tile, self.data.shape)).to(dtype)


def expand_scales(scale_inv: Tensor, tile: tuple[int, int], shape: torch.Size) -> Tensor:
    """Inverse scales broadcast to one value an element: [..., R, C] (a view where the tile allows it)."""
    if tile == TENSORWISE:
        return scale_inv.expand(shape)
    r, c = tile
    rows, cols = shape[-2:]
    out = scale_inv if r == 1 else scale_inv.repeat_interleave(r, dim=-2)[..., :rows, :]
    return out if c == 1 else out.repeat_interleave(c, dim=-1)[..., :cols]
