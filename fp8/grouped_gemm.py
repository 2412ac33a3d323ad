"""GEMMs over experts: rows sorted by expert, one weight each. Forward, dgrad and wgrad; reference, then the public function.

Shapes: E experts; R rows of the buffer (a multiple of 128); each expert's group starts on a multiple of 128 and is padded with
zero rows; rows past the last group hold nothing and are never read. K common dimension, N output columns.
The Hopper kernels stand in grouped_gemm_sm90.py.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8.fused import ROW
from fp8.gemm import high_precision
from fp8.hardware import has_block_gemm
from fp8.quantize import quantize
from fp8.quantized import Quantized
from fp8.recipe import BLOCK, E4M3


@dataclass(frozen=True, eq=False)
class Groups:
    """Where each expert's rows lie. All tensors stay on the device; nothing here needs the host to know a count.

    Attributes:
        counts_E: int32 real rows of each expert.
        starts_E: int32 first row of each group, a multiple of 128.
        ends_E: int32 first row after each padded group (what torch's grouped_mm calls offsets).
        block_expert_B: int32 [max_rows / 128] expert of each 128-row block; -1 past the last group.
        max_rows: rows of the buffer, a multiple of 128.
        known_order_E: `order_E` where whoever made the groups knows it; None: sorted at first use.
    """

    counts_E: Tensor
    starts_E: Tensor
    ends_E: Tensor
    block_expert_B: Tensor
    max_rows: int
    known_order_E: Tensor | None = None

    @property
    def num_experts(self) -> int:
        return self.counts_E.numel()

    @functools.cached_property
    def order_E(self) -> Tensor:
        """int32 experts by falling row count: the order in which wgrad's tiles are dealt out, so that its CTAs finish together."""
        if self.known_order_E is not None:
            return self.known_order_E
        return self.counts_E.argsort(descending=True, stable=True).to(torch.int32)


def padded_rows(num_rows: int, num_experts: int) -> int:
    """Rows of a buffer that holds `num_rows` rows however they fall on the experts: each group wastes at most 127."""
    worst = num_rows + min(num_experts, num_rows) * (BLOCK - 1)
    return max(BLOCK, worst // BLOCK * BLOCK)


def make_groups(counts_E: Tensor, max_rows: int) -> Groups:
    """Groups from the count of rows of each expert, without a host synchronisation.

    Args:
        counts_E: integer tensor [E].
        max_rows: buffer rows; `padded_rows(total, E)` always suffices.
    """
    assert max_rows % BLOCK == 0, f"max_rows = {max_rows} is not a multiple of {BLOCK}"
    counts = counts_E.to(torch.int32)
    padded = (counts + BLOCK - 1) // BLOCK * BLOCK
    ends = padded.cumsum(0).to(torch.int32)
    blocks = torch.arange(0, max_rows, BLOCK, device=counts.device, dtype=torch.int32)
    expert = torch.searchsorted(ends, blocks, right=True).to(torch.int32)
    expert = torch.where(expert < counts.numel(), expert, torch.full_like(expert, -1))
    return Groups(counts, ends - padded, ends, expert, max_rows)


def clear_unused(y_RN: Tensor, groups: Groups) -> None:
    """Zeroes the rows past the last group, in place, for a reader that measures whole tensors (one scale a tensor, health)."""
    rows = torch.arange(y_RN.shape[0], device=y_RN.device)
    y_RN.masked_fill_((rows >= groups.ends_E[-1])[:, None], 0)


def _slices(groups: Groups) -> list[tuple[int, int, int]]:
    """(expert, first row, real rows) of the experts that have rows. Reads the device: reference paths only."""
    return [(e, s, n) for e, (s, n) in enumerate(zip(groups.starts_E.tolist(), groups.counts_E.tolist(), strict=True)) if n]


def _has_kernel(a: Quantized, b: Quantized) -> bool:
    """Block-scaled E4M3 on Hopper goes to grouped_gemm_sm90."""
    tiles, formats = (a.tile, b.tile), (a.data.dtype, b.data.dtype)
    return tiles == ((1, BLOCK), (BLOCK, BLOCK)) and formats == (E4M3, E4M3) and has_block_gemm(a.device)


def _in_bf16(a: Quantized, b: Quantized) -> bool:
    """Unscaled BF16 goes to torch's grouped GEMM, and so does, exactly, what has no kernel of its own (gemm.py says why)."""
    return all(q.scale_inv is not None or q.data.dtype == torch.bfloat16 for q in (a, b))


# ---------------------------------------------------------------- forward and dgrad


def grouped_gemm_nt_ref(a: Quantized, b: Quantized, groups: Groups, dtype: torch.dtype) -> Tensor:
    """y[r] = a[r] . b[expert of r]^T in FP32; rows that belong to nobody are zero."""
    y = torch.zeros(a.shape[0], b.shape[1], dtype=dtype, device=a.device)
    for e, start, count in _slices(groups):
        rows = slice(start, start + count)
        b_e = Quantized(b.data[e], None if b.scale_inv is None else b.scale_inv[e], b.tile)
        y[rows] = (a.rows(rows).dequantize() @ b_e.dequantize().t()).to(dtype)
    return y


def grouped_gemm_nt(a: Quantized, b: Quantized, groups: Groups, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """a [R, K] . b [E, N, K]^T of each row's expert -> [R, N]. dgrad is the same with transposed weights.

    Rows past the last group are not written and must not be read.
    """
    assert a.shape[-1] == b.shape[-1], f"K differs: {tuple(a.shape)} . {tuple(b.shape)}^T"
    if a.data.is_cuda and _has_kernel(a, b):
        from fp8.grouped_gemm_sm90 import grouped_gemm_nt_sm90  # Triton comes with CUDA builds of torch only

        return grouped_gemm_nt_sm90(a, b, groups, dtype)
    if a.data.is_cuda and _in_bf16(a, b):
        y = F.grouped_mm(high_precision(a), high_precision(b).transpose(1, 2), offs=groups.ends_E, out_dtype=torch.bfloat16)
        return y.to(dtype)
    return grouped_gemm_nt_ref(a, b, groups, dtype)


def quantizes_output(a: Quantized, b: Quantized) -> bool:
    """Whether `grouped_gemm_quantized` is one kernel here; elsewhere its caller may as well quantise together with other work."""
    return a.data.is_cuda and b.shape[1] % (2 * BLOCK) == 0 and _has_kernel(a, b)


def grouped_gemm_quantized(a: Quantized, b: Quantized, groups: Groups) -> Quantized:
    """`grouped_gemm_nt` in BF16, quantised to E4M3 with 1x128 tiles: the BF16 rows never reach memory where a kernel does it."""
    if quantizes_output(a, b):
        from fp8.grouped_gemm_sm90 import grouped_gemm_quantized_sm90

        return grouped_gemm_quantized_sm90(a, b, groups)
    return quantize(grouped_gemm_nt(a, b, groups), ROW)


# ---------------------------------------------------------------- wgrad


def grouped_wgrad_ref(dy_t: Quantized, x_t: Quantized, groups: Groups, out: Tensor, accumulate: bool) -> None:
    """out[e] (+)= dy_t[:, rows of e] . x_t[:, rows of e]^T in FP32."""
    dy, x = dy_t.dequantize(), x_t.dequantize()
    if not accumulate:
        out.zero_()
    for e, start, count in _slices(groups):
        rows = slice(start, start + count)
        out[e] += (dy[:, rows] @ x[:, rows].t()).to(out.dtype)


def grouped_wgrad(dy_t: Quantized, x_t: Quantized, groups: Groups, out: Tensor, accumulate: bool) -> None:
    """Per expert dy_t [N, R] . x_t [K, R]^T over its rows, into `out` [E, N, K].

    Args:
        accumulate: False writes (exact zeros for experts without rows), True adds (and leaves those untouched).
    """
    assert dy_t.shape[-1] == x_t.shape[-1], f"rows differ: {tuple(dy_t.shape)} and {tuple(x_t.shape)}"
    if dy_t.data.is_cuda and _has_kernel(dy_t, x_t):
        from fp8.grouped_gemm_sm90 import grouped_wgrad_sm90

        return grouped_wgrad_sm90(dy_t, x_t, groups, out, accumulate)
    if dy_t.data.is_cuda and _in_bf16(dy_t, x_t):
        y = F.grouped_mm(high_precision(dy_t), high_precision(x_t).t(), offs=groups.ends_E, out_dtype=torch.bfloat16)
        from fp8.grouped_store_kernels import store_groups

        return store_groups(y, groups.counts_E, out, accumulate)
    grouped_wgrad_ref(dy_t, x_t, groups, out, accumulate)
