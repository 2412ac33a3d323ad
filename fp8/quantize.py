"""Quantise, quantise-transposed, re-tile and transpose. Each section reads: reference, then the public function.

The kernels stand in quantize_kernels.py and transpose_kernels.py; the tensor's device chooses.

Shapes: R rows, C columns, Rp = R rounded up to 128; nr, nc = number of tiles along rows and columns.
Scale rule (all power-of-two specs): multiplier s = 2^floor(log2(FP8_MAX / amax)), so the tile's maximum never clips; the
inverse is stored. amax 0 -> s = 1. amax is floored at FP8_MAX * 2^-126 so that s and 1/s stay normal fp32 numbers; there is no
floor near gradients (DeepGEMM's 1e-4 would flush them). Non-finite amax -> s = 1; inf saturates, NaN stays NaN.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8.quantized import Quantized, expand_scales
from fp8.recipe import BLOCK, E4M3, FP8_MAX, TENSORWISE, Spec


def _kernels(t: Tensor, dtype: torch.dtype, module: str = "quantize_kernels") -> ModuleType | None:
    """The Triton kernels where they apply (E4M3 on a GPU, rows in whole 16-byte pieces); None means the reference."""
    if not t.is_cuda or dtype != E4M3 or t.shape[-1] % 16:
        return None
    return importlib.import_module(f"fp8.{module}")  # here: Triton comes with CUDA builds of torch only


# ---------------------------------------------------------------- scales and casts


def pow2_scale_inv(amax: Tensor, fmt_max: float) -> Tensor:
    """Inverse power-of-two scales (fp32, the shape of `amax`) under the module's scale rule.

    Works on the bits, so that a kernel can do exactly the same: FP8_MAX is 1.75 * 2^8 (E4M3) or 1.75 * 2^15 (E5M2), hence the
    smallest power of two not below amax / FP8_MAX has exponent(amax) - 8 (or 15), plus one where the mantissa is above 1.75.
    """
    amax = amax.float().contiguous()
    bits = amax.view(torch.int32)
    exponent = (bits >> 23) - 127 - (8 if fmt_max == 448.0 else 15) + ((bits & 0x7FFFFF) > 0x600000).to(torch.int32)
    scale_inv = ((exponent.clamp(-126, 126) + 127) << 23).view(torch.float32)
    return torch.where(torch.isfinite(amax) & (amax > 0), scale_inv, torch.ones_like(amax))


def cast_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Saturating round-to-nearest-even cast from fp32. The clamp comes first: torch < 2.12 turns overflow into NaN."""
    limit = FP8_MAX[dtype]
    return x.clamp(-limit, limit).to(dtype)  # clamp keeps NaN


def column_major(scale_inv: Tensor) -> Tensor:
    """The same [R, nc] values with strides (1, R)."""
    return scale_inv.transpose(-1, -2).contiguous().transpose(-1, -2)


def tile_amax(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """[..., nr, nc]: largest magnitude of each tile; edges are padded with zeros."""
    r, c = tile
    rows, cols = x.shape[-2:]
    padded = F.pad(x.abs(), (0, -cols % c, 0, -rows % r))
    return padded.unflatten(-2, (-1, r)).unflatten(-1, (-1, c)).amax(dim=(-3, -1))


# ---------------------------------------------------------------- quantize


def quantize_ref(x: Tensor, spec: Spec, scale_inv: Tensor | None = None) -> Quantized:
    """[..., R, C] -> Quantized under `spec`; the definition of every quantise kernel."""
    if not spec.is_fp8:
        return Quantized.unscaled(x.to(spec.dtype))
    if spec.tile == TENSORWISE:
        return _quantize_tensorwise(x, spec, scale_inv)
    x = x.float()
    scale_inv = pow2_scale_inv(tile_amax(x, spec.tile), FP8_MAX[spec.dtype])
    data = cast_fp8(x / expand_scales(scale_inv, spec.tile, x.shape), spec.dtype)
    return Quantized(data, column_major(scale_inv) if spec.tile[0] == 1 else scale_inv, spec.tile)


def _quantize_tensorwise(x: Tensor, spec: Spec, scale_inv: Tensor | None) -> Quantized:
    """One scale a matrix: [..., 1, 1]. Without a given scale it comes from each matrix's own amax.

    Divides in x's own dtype: a power of two is exact there too, and what BF16 would lose below 2^-126 is zero in FP8.
    """
    if scale_inv is None:
        scale_inv = pow2_scale_inv(matrix_amax(x).float() * 2.0**spec.margin, FP8_MAX[spec.dtype])
    scale_inv = scale_inv.expand(*x.shape[:-2], 1, 1)
    return Quantized(cast_fp8(x / scale_inv.to(x.dtype), spec.dtype), scale_inv, TENSORWISE)


def matrix_amax(x: Tensor) -> Tensor:
    """[..., R, C] -> [..., 1, 1]: largest magnitude of each matrix; NaN where one is in it, 0 for an empty one."""
    if x.numel() == 0:
        return x.new_zeros(*x.shape[:-2], 1, 1)
    if x.dim() > 2:
        return x.abs().amax(dim=(-2, -1), keepdim=True)
    low, high = torch.aminmax(x)  # one read, no copy of magnitudes
    return torch.maximum(-low, high).view(1, 1)


def quantize(x: Tensor, spec: Spec, scale_inv: Tensor | None = None) -> Quantized:
    """Quantises [..., R, C] as the GEMM's A or B operand (K along C).

    Args:
        scale_inv: tensorwise only: the inverse scale, 0-dim or [..., 1, 1] (delayed, static, common to several ranks); without
            it the tensor's own amax decides.
    """
    kernels = _kernels(x, spec.dtype)
    if kernels and spec.tile == (1, BLOCK) and x.dim() == 2:
        return kernels.quantize_rows(x.contiguous())
    if kernels and spec.tile == (BLOCK, BLOCK):
        return kernels.quantize_blocks(x.contiguous())
    return quantize_ref(x, spec, scale_inv)


# ---------------------------------------------------------------- quantize_t


def quantize_t_ref(x_RC: Tensor, spec: Spec, scale_inv: Tensor | None = None) -> Quantized:
    """[R, C] -> its transpose [C, Rp], tiles along R: what wgrad reads of dY. Padding rows are zero; unscaled, it is a view."""
    if not spec.is_fp8:
        return Quantized.unscaled(_pad_rows(x_RC.to(spec.dtype), -x_RC.shape[0] % BLOCK).t())
    if spec.tile == TENSORWISE:  # the same codes, and only bytes are transposed
        return requantize_t_ref(quantize_ref(x_RC, spec, scale_inv))
    x_CR = F.pad(x_RC, (0, 0, 0, -x_RC.shape[0] % BLOCK)).t().contiguous()
    return quantize_ref(x_CR, spec, scale_inv)


def quantize_t(x_RC: Tensor, spec: Spec, live_B: Tensor | None = None, scale_inv: Tensor | None = None) -> Quantized:
    """Quantises the transpose of [R, C] along R: [C, Rp].

    Args:
        scale_inv: as for `quantize`.
        live_B: int32 [Rp / 128], e.g. `Groups.block_expert_B`; blocks with a negative entry hold nothing, and the kernel skips
            them (their output is undefined).
    """
    kernels = _kernels(x_RC, spec.dtype)
    if kernels and spec.tile == (1, BLOCK) and x_RC.dtype == torch.bfloat16:
        return kernels.quantize_transposed(x_RC.contiguous(), both=False, live_B=live_B)[1]
    return quantize_t_ref(x_RC, spec, scale_inv)


def quantize_both(x_RC: Tensor, spec: Spec, live_B: Tensor | None = None) -> tuple[Quantized, Quantized]:
    """(quantize(x), quantize_t(x)) with one read of x: what dgrad and wgrad want of dY. `live_B` as for `quantize_t`."""
    kernels = _kernels(x_RC, spec.dtype)
    if kernels and spec.tile == (1, BLOCK) and x_RC.dtype == torch.bfloat16:
        return kernels.quantize_transposed(x_RC.contiguous(), both=True, live_B=live_B)
    return quantize(x_RC, spec), quantize_t(x_RC, spec)


# ---------------------------------------------------------------- retile_t


def retile_t_ref(q_RC: Quantized, spec: Spec) -> Quantized:
    """Row-quantised [R, C] -> its transpose [C, Rp], quantised anew in tiles along R: a gradient that travelled in FP8.

    Bytes with one scale for all (and unscaled ones) only move.
    """
    if q_RC.tile in (None, TENSORWISE) and q_RC.data.dtype == spec.dtype:
        return requantize_t_ref(q_RC)
    return quantize_t_ref(q_RC.dequantize(), spec)


def retile_t(q_RC: Quantized, spec: Spec, live_B: Tensor | None = None) -> Quantized:
    """Transposes [R, C] to [C, Rp] with `spec`'s tiles along R; see `retile_t_ref`. `live_B` as for `quantize_t`."""
    kernels = _kernels(q_RC.data, spec.dtype)
    if kernels and q_RC.data.dtype == E4M3 and q_RC.tile == spec.tile == (1, BLOCK):
        return kernels.retile_transposed(q_RC, live_B)
    return retile_t_ref(q_RC, spec)


# ---------------------------------------------------------------- requantize_t


def _pad_rows(data: Tensor, rows: int, cols: int = 0) -> Tensor:
    """Zero rows below and zero columns to the right, FP8 as bytes."""
    if rows == cols == 0:
        return data
    raw = data.view(torch.uint8) if data.element_size() == 1 else data
    return F.pad(raw, (0, cols, 0, rows)).view(data.dtype)


def requantize_t_ref(q: Quantized) -> Quantized:
    """Row-tiled [R, C] (1 x b) -> transposed [C, Rp] with one scale a b x b block: what wgrad reads of X.

    Each block takes the largest inverse scale of its rows; with power-of-two scales that is an exponent shift, rounded to
    nearest even where codes become subnormal. Exact up to FP8 range; NaN codes survive. All-zero rows have scale 1 and would
    widen the block for nothing, so they do not take part in the maximum. Tensorwise and unscaled operands are only transposed.
    Source: FP8-Flow-MoE's scaling-aware transpose, with correct subnormals.
    """
    pad_r = -q.shape[0] % BLOCK
    if q.tile is None:
        return Quantized.unscaled(_pad_rows(q.data, pad_r).t())
    if q.tile == TENSORWISE:
        return Quantized(_pad_rows(q.data, pad_r).t().contiguous(), q.scale_inv, q.tile)
    assert q.tile[0] == 1, f"re-tiling starts from row tiles, got {q.tile}"
    edge, cols = q.tile[1], q.shape[1]
    data = _pad_rows(q.data, pad_r, -cols % edge)
    empty = (data.view(torch.uint8) & 0x7F).unflatten(1, (-1, edge)).amax(-1) == 0  # [Rp, nc]
    scale = F.pad(q.scale_inv, (0, 0, 0, pad_r), value=1.0)
    target = scale.masked_fill(empty, 0.0).unflatten(0, (-1, edge)).amax(1)  # [nr, nc]
    target = torch.where(target > 0, target, torch.ones_like(target))
    ratio = scale / target.repeat_interleave(edge, 0)
    ratio = ratio.masked_fill(empty, 1.0).repeat_interleave(edge, 1)
    out = cast_fp8(data.float() * ratio, q.data.dtype)[:, :cols]
    return Quantized(out.t().contiguous(), target.t().contiguous(), (edge, edge))


def requantize_t(q: Quantized, live_B: Tensor | None = None) -> Quantized:
    """Re-tiles a row-quantised [R, C] into its transpose [C, Rp] with square tiles; see `requantize_t_ref`.

    Args:
        live_B: as for `quantize_t`.
    """
    kernels = _kernels(q.data, q.data.dtype, "transpose_kernels")
    if kernels and q.tile == (1, BLOCK):
        return kernels.requantize_transposed(q, live_B)
    return requantize_t_ref(q)


# ---------------------------------------------------------------- transpose


def transpose_ref(w: Quantized) -> Quantized:
    """[..., R, C] -> [..., C, R], exact: square tiles (or one tile, or none) keep their scales."""
    if w.scale_inv is None:
        return Quantized.unscaled(w.data.transpose(-1, -2))  # a view: GEMMs of unscaled operands take either layout
    assert w.tile[0] == w.tile[1], f"only square tiles transpose exactly, got {w.tile}"
    return Quantized(w.data.transpose(-1, -2).contiguous(), w.scale_inv.transpose(-1, -2).contiguous(), w.tile)


def transpose(w: Quantized, out: Quantized | None = None) -> Quantized:
    """The exact transpose of a weight, for dgrad (fp8/transposed.py).

    Args:
        out: an earlier transpose of a scaled weight of this shape and format, to be overwritten.
    """
    kernels = _kernels(w.data, w.data.dtype, "transpose_kernels")
    if kernels and w.scale_inv is not None and w.shape[-2] % 4 == 0:
        data = kernels.transpose_codes(w.data.contiguous(), None if out is None else out.data)
        turned = Quantized(data, w.scale_inv.transpose(-1, -2).contiguous(), w.tile)
    else:
        turned = transpose_ref(w)
        if out is not None:
            out.data.copy_(turned.data)
    if out is None:
        return turned
    out.scale_inv.copy_(turned.scale_inv)
    return out
