"""Rows of a Quantized as bytes: what travels. Reference, then the public function; the kernels stand in payload_kernels.py.

    row = data (C values) | the caller's own bytes (routing weights, expert ids) | one exponent byte a scale | padding

A power-of-two scale is its exponent (E8M0), so one byte carries it exactly. One buffer, one collective, and one pass each way:
`pack` gathers and packs, `unpack` unpacks and puts rows where they belong.

Shapes: T rows held, M rows sent, R rows made, C columns, B bytes of a packed row, X of which are the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from fp8.permute import gather_rows_ref, sum_rows_ref
from fp8.quantized import TENSORWISE, Quantized


@dataclass(frozen=True)
class RowFormat:
    """How one row of a Quantized lies in bytes.

    Padding is to 16 bytes (a vector load) from 1 KiB on, and to 4 below, where 16 would cost more than it gains.
    """

    dtype: torch.dtype
    cols: int
    tile: tuple[int, int] | None
    extra: int = 0  # X, a multiple of 4

    @staticmethod
    def of(q: Quantized, extra: int = 0) -> RowFormat:
        """The format of q's rows.

        Raises:
            AssertionError: q's tiles span several rows, so its rows cannot travel alone.
        """
        assert q.tile in (None, TENSORWISE) or q.tile[0] == 1, f"tiles {q.tile} span several rows"
        return RowFormat(q.data.dtype, q.shape[-1], q.tile, extra)

    @property
    def data_bytes(self) -> int:
        return self.cols * self.dtype.itemsize

    @property
    def num_scales(self) -> int:
        """Scales that travel with a row; a tensorwise scale does not, it is common to sender and receiver."""
        return 0 if self.tile is None or self.tile == TENSORWISE else -(-self.cols // self.tile[1])

    @property
    def row_bytes(self) -> int:
        size = self.data_bytes + self.extra + self.num_scales
        align = 16 if self.data_bytes >= 1024 else 4
        return -(-size // align) * align


def exponent_bytes(scale_inv: Tensor) -> Tensor:
    """Power-of-two fp32 scales -> uint8 exponents (E8M0). Exact: `scale_from_bytes` inverts it."""
    return (scale_inv.contiguous().view(torch.int32) >> 23).to(torch.uint8)


def scale_from_bytes(exponents: Tensor) -> Tensor:
    """uint8 exponents -> fp32 powers of two."""
    return (exponents.to(torch.int32) << 23).view(torch.float32)


def _kernels(t: Tensor, form: RowFormat) -> ModuleType | None:
    """The Triton kernels on a GPU for rows of whole words, None for the reference."""
    if not t.is_cuda or form.data_bytes % 4:
        return None
    from parallel import payload_kernels  # Triton comes with CUDA builds of torch only

    return payload_kernels


# ---------------------------------------------------------------- pack


def pack_ref(q: Quantized, index_M: Tensor | None = None, extra_MX: Tensor | None = None) -> Tensor:
    """The definition of `pack`."""
    form = RowFormat.of(q, 0 if extra_MX is None else extra_MX.shape[1])
    q = q if index_M is None else gather_rows_ref(q, index_M)
    rows, end = q.shape[0], form.data_bytes
    out = torch.zeros(rows, form.row_bytes, dtype=torch.uint8, device=q.device)
    out[:, :end] = q.data.contiguous().view(torch.uint8).view(rows, end)
    if extra_MX is not None:
        out[:, end : end + form.extra] = extra_MX
    if form.num_scales:
        end += form.extra
        out[:, end : end + form.num_scales] = exponent_bytes(q.scale_inv)
    return out


def pack(q: Quantized, index_M: Tensor | None = None, extra_MX: Tensor | None = None) -> Tensor:
    """Rows of q [T, C] (row tiles with power-of-two scales, tensorwise or unscaled) as uint8 [M, B].

    Args:
        index_M: int64 row of q for each packed row; None packs them all, in order.
        extra_MX: uint8 bytes that travel with each packed row, X a multiple of 4.
    """
    kernels = _kernels(q.data, RowFormat.of(q))
    return kernels.pack(q, index_M, extra_MX) if kernels else pack_ref(q, index_M, extra_MX)


# ---------------------------------------------------------------- unpack


def unpack_ref(payload_MB: Tensor, form: RowFormat, scale_inv: Tensor | None, index_R: Tensor | None, per_row: int) -> Quantized:
    """The definition of `unpack`."""
    end = form.data_bytes
    data = payload_MB[:, :end].clone(memory_format=torch.contiguous_format).view(form.dtype)  # the payload's memory is used again
    if form.num_scales:
        exponents = payload_MB[:, end + form.extra : end + form.extra + form.num_scales]
        scale_inv = scale_from_bytes(exponents.t().contiguous()).t()  # column-major, as the GEMM reads it
    q = Quantized(data, scale_inv if form.tile is not None else None, form.tile)
    return q if index_R is None else gather_rows_ref(q, torch.where(index_R >= 0, index_R // per_row, index_R))


def unpack(
    payload_MB: Tensor,
    form: RowFormat,
    scale_inv: Tensor | None = None,
    index_R: Tensor | None = None,
    per_row: int = 1,
    live_B: Tensor | None = None,
) -> Quantized:
    """uint8 [M, B] -> Quantized [M, C]; or, with `index_R`, [R, C] whose row r is packed row index[r] // per_row. Always a copy.

    Args:
        scale_inv: the tensorwise scale, which does not travel.
        index_R: int64; a negative entry gives a zero row with scale 1.
        live_B: int32, one an 128 rows; kernels leave blocks with a negative entry unwritten.
    """
    kernels = _kernels(payload_MB, form)
    if kernels:
        return kernels.unpack(payload_MB, form, scale_inv, index_R, per_row, live_B)
    return unpack_ref(payload_MB, form, scale_inv, index_R, per_row)


# ---------------------------------------------------------------- sum


def sum_packed_ref(payload_MB: Tensor, form: RowFormat, index_Tn: Tensor, dtype: torch.dtype) -> Tensor:
    """The definition of `sum_packed`."""
    return sum_rows_ref(unpack_ref(payload_MB, form, None, None, 1).dequantize(), index_Tn).to(dtype)


def sum_packed(payload_MB: Tensor, form: RowFormat, index_Tn: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, B] -> [T, C] in `dtype`: the FP32 sum of packed rows index[t] (negative: none), in order. Rows carry their scales."""
    kernels = _kernels(payload_MB, form)
    return (kernels.sum_packed if kernels else sum_packed_ref)(payload_MB, form, index_Tn, dtype)
