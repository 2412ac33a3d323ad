"""Triton kernels behind grad_wire.py: a bucket's gradients to packed tiles in one pass, arrived tiles to their sum in one.

A packed tile is 132 bytes: 128 E4M3 codes, the exponent of their scale, zeros (parallel/payload.py). Unfused, the same moves
60 bytes an element instead of 8: at Ling-mini's sizes that takes as long as an FP32 all-reduce on NVLink.

Shapes: T tiles of 128 gradients; n ranks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8.device_math import decode_bytes, round_bf16
from fp8.launch import cdiv
from fp8.quantize_device import abs_bits, encode_bytes, pow2_scale
from fp8.quantize_kernels import INTERPRETED

TILES = 32  # tiles of one program
ROW: tl.constexpr = tl.constexpr(132)


@triton.jit(do_not_specialize=["tiles"])
def _pack_tiles(x_ptr, out_ptr, tiles, TILES: tl.constexpr, HARDWARE: tl.constexpr):
    """TILES tiles of x as packed rows. What is not finite becomes NaN: E4M3 has no inf, and 448 would hide it."""
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    ok = tile < tiles
    col = tl.arange(0, 128)
    x = tl.load(x_ptr + tile.to(tl.int64)[:, None] * 128 + col[None, :], mask=ok[:, None], other=0.0).to(tl.float32)
    bits = abs_bits(x)
    x = tl.where(bits >= 0x7F800000, float("nan"), x)
    multiplier, inverse = pow2_scale(tl.max(bits, 1))
    at = out_ptr + tile.to(tl.int64)[:, None] * ROW
    tl.store(at + col[None, :], encode_bytes(x * multiplier[:, None], HARDWARE), mask=ok[:, None])
    exponent = inverse.to(tl.int32, bitcast=True) >> 23
    byte = tl.arange(0, 4)
    tl.store(at + 128 + byte[None, :], tl.where(byte[None, :] == 0, exponent[:, None], 0).to(tl.uint8), mask=ok[:, None])


@triton.jit
def _arrived(in_ptr, tile, ok, HARDWARE: tl.constexpr):
    """[TILES, 128] fp32 of packed tiles."""
    at = in_ptr + tile.to(tl.int64) * ROW
    code = tl.load(at[:, None] + tl.arange(0, 128)[None, :], mask=ok[:, None], other=0)
    scale = (tl.load(at + 128, mask=ok, other=127).to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return decode_bytes(code, HARDWARE) * scale[:, None]


@triton.jit(do_not_specialize=["tiles", "ranks"])
def _sum_tiles(in_ptr, out_ptr, tiles, ranks, ADD: tl.constexpr, TILES: tl.constexpr, HARDWARE: tl.constexpr):
    """out = [out +] the sum of `ranks` blocks of `tiles` packed tiles, in FP32 and rank order."""
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    ok = tile < tiles
    # no sum starts from a constant: Triton makes +0 of a full(-0.0), which would turn the -0 of all ranks
    total = _arrived(in_ptr, tile, ok, HARDWARE)
    for rank in range(1, ranks):
        total += _arrived(in_ptr, tile + rank * tiles.to(tl.int64), ok, HARDWARE)
    to = out_ptr + tile.to(tl.int64)[:, None] * 128 + tl.arange(0, 128)[None, :]
    if ADD:
        total = tl.load(to, mask=ok[:, None], other=0.0).to(tl.float32) + total
    if out_ptr.dtype.element_ty == tl.bfloat16:
        total = round_bf16(total, HARDWARE)
    tl.store(to, total.to(out_ptr.dtype.element_ty), mask=ok[:, None])


def pack_tiles(x_F: Tensor) -> Tensor:
    """As grad_wire.pack_tiles on a CPU, without random words."""
    tiles = x_F.numel() // 128
    out = torch.empty(tiles, ROW.value, dtype=torch.uint8, device=x_F.device)
    if tiles:
        _pack_tiles[(cdiv(tiles, TILES),)](x_F, out, tiles, TILES=TILES, HARDWARE=not INTERPRETED, num_warps=4)
    return out


def sum_tiles(packed: Tensor, ranks: int, out_F: Tensor, add: bool) -> None:
    """As grad_wire.sum_tiles on a CPU; out_F [F / ranks] is contiguous, FP32 or BF16."""
    tiles = packed.shape[0] // ranks
    if tiles:
        _sum_tiles[(cdiv(tiles, TILES),)](
            packed, out_F, tiles, ranks, ADD=add, TILES=TILES, HARDWARE=not INTERPRETED, num_warps=4
        )  # fmt: skip
