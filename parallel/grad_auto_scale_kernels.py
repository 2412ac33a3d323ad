"""Triton kernels behind grad_auto_scale.py: each pass over a bucket's codes reads and writes an element once.

Shapes: F elements of one weight or of one owner's part; n ranks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8.device_math import decode_bytes
from fp8.launch import cdiv
from fp8.quantize_device import encode_bytes
from fp8.quantize_kernels import INTERPRETED

SIZE = 4096
OPTIONS = dict(SIZE=SIZE, HARDWARE=not INTERPRETED, num_warps=8)


@triton.jit(do_not_specialize=["count"])
def _encode(x_ptr, factor_ptr, out_ptr, count, SIZE: tl.constexpr, HARDWARE: tl.constexpr):
    """out = E4M3(factor x), saturating; NaN stays."""
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    x = tl.load(x_ptr + i, mask=i < count, other=0.0).to(tl.float32)
    tl.store(out_ptr + i, encode_bytes(x * tl.load(factor_ptr), HARDWARE), mask=i < count)


@triton.jit(do_not_specialize=["count"])
def _decode(code_ptr, factor_ptr, out_ptr, count, ADD: tl.constexpr, SIZE: tl.constexpr, HARDWARE: tl.constexpr):
    """out = [out +] code / factor, rounded as a division is: mu is no power of two."""
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    code = tl.load(code_ptr + i, mask=i < count, other=0)
    value = tl.div_rn(decode_bytes(code, HARDWARE), tl.load(factor_ptr))
    if ADD:
        value = tl.load(out_ptr + i, mask=i < count, other=0.0).to(tl.float32) + value
    tl.store(out_ptr + i, value.to(out_ptr.dtype.element_ty), mask=i < count)


@triton.jit(do_not_specialize=["count", "ranks"])
def _add_codes(code_ptr, out_ptr, count, ranks, SIZE: tl.constexpr, HARDWARE: tl.constexpr):
    """The sum of `ranks` blocks of codes in rank order, rounded to E4M3 after each addition."""
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    total = tl.load(code_ptr + i, mask=i < count, other=0)
    for rank in range(1, ranks):
        code = tl.load(code_ptr + rank * count.to(tl.int64) + i, mask=i < count, other=0)
        total = encode_bytes(decode_bytes(total, HARDWARE) + decode_bytes(code, HARDWARE), HARDWARE)
    tl.store(out_ptr + i, total, mask=i < count)


def encode_codes(x_F: Tensor, factor: Tensor, out_F: Tensor) -> None:
    """As grad_auto_scale.encode_codes."""
    if x_F.numel():
        _encode[(cdiv(x_F.numel(), SIZE),)](x_F, factor, out_F.view(torch.uint8), x_F.numel(), **OPTIONS)


def decode_codes(codes_F: Tensor, factor: Tensor, out_F: Tensor, add: bool) -> None:
    """As grad_auto_scale.decode_codes."""
    if codes_F.numel():
        grid = (cdiv(codes_F.numel(), SIZE),)
        _decode[grid](codes_F.view(torch.uint8), factor, out_F, codes_F.numel(), ADD=add, **OPTIONS)


def add_codes(codes_NF: Tensor) -> Tensor:
    """As grad_auto_scale.add_codes; contiguous."""
    ranks, count = codes_NF.shape
    out = torch.empty(count, dtype=codes_NF.dtype, device=codes_NF.device)
    if count:
        _add_codes[(cdiv(count, SIZE),)](codes_NF.view(torch.uint8), out.view(torch.uint8), count, ranks, **OPTIONS)
    return out
