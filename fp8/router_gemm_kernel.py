"""The kernel behind router_gemm.py's forward, on Hopper: the three BF16 products of a tile in one pass over x.

The products of w's lower parts go to an accumulator of their own. In the large one each addition would be cut to the large one's
last bit by the tensor cores, which do not round: the error would be three times that of three products added up afterwards.

Shapes: T tokens, D features, E experts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fp8.launch import cdiv

ROWS, COLS, DEPTH, STAGES, WARPS = 128, 128, 64, 3, 8  # a stage holds a tile of x and one of each part of w


@triton.jit
def _product(
    x_desc,
    parts_desc,
    out_ptr,
    rows,
    depth: tl.constexpr,  # with run-time sizes ptxas waits after every WGMMA: 95 instead of 80 us at 16k tokens
    experts: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out = x . w^T of 128 rows x 128 experts; parts_desc: rows [low | middle | high] of w."""
    m, n = tl.program_id(0) // (experts // COLS), tl.program_id(0) % (experts // COLS)
    large, small = tl.zeros((ROWS, COLS), tl.float32), tl.zeros((ROWS, COLS), tl.float32)
    for k in tl.range(0, depth, DEPTH, num_stages=STAGES):
        x = x_desc.load([m * ROWS, k])
        low, middle = parts_desc.load([n * COLS, k]), parts_desc.load([experts + n * COLS, k])
        high = parts_desc.load([2 * experts + n * COLS, k])
        small = tl.dot(x, low.T, small)
        small = tl.dot(x, middle.T, small)
        large = tl.dot(x, high.T, large)
    row, col = m * ROWS + tl.arange(0, ROWS), n * COLS + tl.arange(0, COLS)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * experts + col[None, :], large + small, mask=(row < rows)[:, None])


# ---------------------------------------------------------------- launcher


def fits(x_TD: Tensor, num_experts: int) -> bool:
    """Whether the kernel takes it: Hopper, rows of whole 16 bytes that begin at 16 bytes, experts in whole tiles."""
    on_hopper = x_TD.is_cuda and torch.cuda.get_device_capability(x_TD.device) == (9, 0)
    return on_hopper and x_TD.shape[0] > 0 and num_experts % COLS == 0 and in_tiles(x_TD)


def in_tiles(x_TD: Tensor) -> bool:
    """Whether the copy engine reads BF16 x: addresses in whole 16 bytes, also where a row after a lone one would begin."""
    return x_TD.is_contiguous() and x_TD.shape[1] % 8 == 0 and x_TD.stride(0) % 8 == 0 and x_TD.data_ptr() % 16 == 0


def product(x_TD: Tensor, parts: Tensor, num_experts: int) -> Tensor:
    """x . w^T -> [T, E] fp32 of x in BF16 and the parts of w, rows [low | middle | high | ...] of E each."""
    (tokens, depth), out = x_TD.shape, torch.empty((x_TD.shape[0], num_experts), dtype=torch.float32, device=x_TD.device)
    _product[(cdiv(tokens, ROWS) * (num_experts // COLS),)](
        TensorDescriptor.from_tensor(x_TD, [ROWS, DEPTH]), TensorDescriptor.from_tensor(parts, [COLS, DEPTH]), out, tokens, depth,
        num_experts, ROWS=ROWS, COLS=COLS, DEPTH=DEPTH, STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
    return out
