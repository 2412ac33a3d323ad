"""The expert GEMMs on Hopper: launchers of grouped_gemm_kernel.py and their table of tiles.

Shapes: R rows of the buffer, E experts, N output columns, K the summed dimension (see the kernel for each operation's operands).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fp8.grouped_gemm_kernel import grouped_gemm_kernel
from fp8.quantized import Quantized

if TYPE_CHECKING:
    from fp8.grouped_gemm import Groups

BLOCK = 128  # rows of a tile, and the K extent of one scale
HALF = 64  # rows of one consumer warpgroup
LONG = 1024  # rows per expert from which a wgrad that adds to FP32 is no longer bound by its output's memory traffic alone


@dataclass(frozen=True)
class Tile:
    """One configuration of the kernel; shared memory (232448 bytes) bounds stages and output buffers together."""

    halves: int  # output columns / 128
    stages: int  # operand ring
    width: int  # columns of an output chunk (64 rows)
    buffers: int  # output chunks of each consumer


# (operation, output dtype, accumulate) -> tile. docs/performance.md says what each candidate measured.
TILES = {
    ("nt", torch.bfloat16, False): Tile(2, 3, 128, 2),
    ("nt", torch.float32, False): Tile(1, 4, 128, 1),
    ("wgrad", torch.bfloat16, False): Tile(2, 3, 128, 2),
    ("wgrad", torch.float32, False): Tile(2, 3, 64, 2),
    ("wgrad", torch.bfloat16, True): Tile(2, 3, 128, 2),
    ("wgrad", torch.float32, True): Tile(1, 4, 128, 1),
}
NARROW = {torch.bfloat16: Tile(1, 5, 128, 2), torch.float32: Tile(1, 4, 128, 1)}  # N % 256 == 128
LONG_ADD_FP32 = Tile(2, 3, 64, 2)
QUANTIZING = Tile(2, 4, 128, 2)  # forward with an E4M3 output


@functools.cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _layout(bits: int, rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128 if rank == 2 else 0, element_bitwidth=bits, rank=rank)


def _descriptor(t: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(t, block, _layout(8 * t.element_size(), t.dim()))


def _launch(
    a: Quantized, b: Quantized, out_MN: Tensor, groups: Groups, wgrad: bool, add: bool, tile: Tile, scales: Tensor | None = None
) -> None:
    """Runs the kernel on `out_MN` [rows, columns] with `b` as stacked rows; see the module docstring for the operands.

    Args:
        scales: inverse scales of an E4M3 output, [rows, columns / 128], column-major.
    """
    assert a.tile == (1, BLOCK) and b.tile == (BLOCK, BLOCK), f"tiles {a.tile} and {b.tile}"
    assert a.data.is_contiguous() and b.data.is_contiguous() and out_MN.is_contiguous()
    assert a.scale_inv.stride(0) == 1 and b.scale_inv.is_contiguous(), "scales of A are column-major, of B row-major"
    a_rows, k_size = a.shape
    assert k_size % BLOCK == 0, f"the summed dimension, {k_size}, is not a multiple of {BLOCK}"
    n_size = b.shape[-2]
    columns = out_MN.shape[1]
    grouped_gemm_kernel[(_num_sms(out_MN.device),)](
        _descriptor(a.data, [HALF, BLOCK]),
        _descriptor(a.scale_inv.t().reshape(-1), [HALF]),
        _descriptor(b.data.view(-1, k_size), [BLOCK, BLOCK]),
        b.scale_inv, _descriptor(out_MN, [HALF, tile.width]), b.scale_inv if scales is None else scales,
        groups.counts_E, groups.ends_E, groups.order_E if wgrad else groups.counts_E, groups.block_expert_B,
        groups.num_experts, a_rows // BLOCK, triton.cdiv(columns, BLOCK * tile.halves), n_size, a_rows,
        triton.cdiv(n_size, BLOCK), k_size // BLOCK,
        WGRAD=wgrad, ADD=add, HALVES=tile.halves, STAGES=tile.stages,
        C_WIDTH=tile.width, C_BUFS=tile.buffers, QUANTIZE=scales is not None, num_warps=4,
    )  # fmt: skip


def grouped_gemm_nt_sm90(
    a: Quantized,
    b: Quantized,
    groups: Groups,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """a [R, K] (1x128) . b [E, N, K]^T (128x128) of each row block's expert -> [R, N].

    K a multiple of 128, N of 8. Rows past the last group are neither read nor written.
    """
    n_size = b.shape[1]
    assert a.shape[0] == groups.max_rows, f"A has {a.shape[0]} rows, the groups {groups.max_rows}"
    if out is None:
        out = torch.empty(groups.max_rows, n_size, dtype=dtype, device=a.device)
    if tile is None:
        tile = NARROW[dtype] if n_size % (2 * BLOCK) == BLOCK else TILES["nt", dtype, False]
    _launch(a, b, out, groups, False, False, tile)
    return out


def grouped_gemm_quantized_sm90(a: Quantized, b: Quantized, groups: Groups, tile: Tile | None = None) -> Quantized:
    """`grouped_gemm_nt_sm90`, its BF16 output quantised to E4M3 with 1x128 tiles: N a multiple of 256."""
    rows, n_size = groups.max_rows, b.shape[1]
    assert n_size % (2 * BLOCK) == 0, f"N = {n_size} is not a multiple of {2 * BLOCK}"
    out = torch.empty(rows, n_size, dtype=torch.float8_e4m3fn, device=a.device)
    scales = torch.empty_strided((rows, n_size // BLOCK), (1, rows), dtype=torch.float32, device=a.device)
    _launch(a, b, out, groups, False, False, tile or QUANTIZING, scales)
    return Quantized(out, scales, (1, BLOCK))


def grouped_wgrad_sm90(
    dy_t: Quantized, x_t: Quantized, groups: Groups, out: Tensor, accumulate: bool, tile: Tile | None = None
) -> None:
    """Per expert dy_t [N, R] (1x128) . x_t [K, R]^T (128x128) over its rows, into `out` [E, N, K] (BF16 or fp32).

    N a multiple of 128, K of 8. Groups without rows are written as exact zeros, or left alone when accumulating.
    """
    num_experts, n_size, k_size = out.shape
    assert n_size % BLOCK == 0, f"N = {n_size} is not a multiple of {BLOCK}"
    assert dy_t.shape == (n_size, groups.max_rows) and x_t.shape == (k_size, groups.max_rows)
    assert num_experts == groups.num_experts
    if tile is None:
        long = accumulate and out.dtype == torch.float32 and groups.max_rows >= LONG * num_experts
        tile = LONG_ADD_FP32 if long else TILES["wgrad", out.dtype, accumulate]
    _launch(dy_t, x_t, out.view(-1, k_size), groups, True, accumulate, tile)
