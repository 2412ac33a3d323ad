"""The quantise kernels under Triton's interpreter: bitwise equal to their references on a CPU.

The interpreter must be chosen before Triton is imported, so one subprocess runs all checks and reports which ones failed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fp8.quantize import (
    column_major,
    quantize_ref,
    quantize_t_ref,
    requantize_t_ref,
    retile_t_ref,
    transpose_ref,
)
from fp8.quantized import Quantized
from fp8.recipe import Spec

ROOT = Path(__file__).parents[2]
ROW, BLOCKS = Spec("e4m3", (1, 128), "block"), Spec("e4m3", (128, 128), "block")
CHECKS = ["rows", "blocks", "both", "transposed", "requantize", "every_code", "retile", "transpose", "live"]


def hard_rows(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Values over 80 binades with zeros, infinities, NaN and the largest floats (the interpreter misreads BF16 subnormals)."""
    generator = torch.Generator().manual_seed(rows + cols)
    x = torch.randn(rows, cols, generator=generator)
    x *= torch.exp2(torch.randint(-40, 30, (rows, 1), generator=generator).float())
    x[0], x[1] = 0.0, -0.0
    x[2, 7], x[3, 9], x[4, 1] = float("nan"), float("inf"), -float("inf")
    x[5], x[6], x[7] = 2e-38, 3e38, 448.0
    return x.to(dtype)


def quantized_rows(rows: int, cols: int) -> Quantized:
    """Row scales that differ by up to 11 binades, a row of zeros and a NaN."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, cols, generator=generator)
    x *= torch.exp2(torch.randint(-9, 3, (rows, 1), generator=generator).float())
    x[3], x[4, 5] = 0.0, float("nan")
    return quantize_ref(x, ROW)


def every_code() -> Quantized:
    """Each of the 256 codes in rows whose scales fall by one binade a row."""
    codes = torch.arange(256, dtype=torch.int32).repeat(128, 1).to(torch.uint8).view(torch.float8_e4m3fn)
    return Quantized(codes, column_major(torch.exp2(-torch.arange(128.0))[:, None].repeat(1, 2)), (1, 128))


def differs(got: Quantized, want: Quantized) -> str:
    """Empty when codes (any NaN equals any NaN), scales, strides and tile agree."""
    nan = want.data.float().isnan()
    codes = (got.data.view(torch.uint8) != want.data.view(torch.uint8)) & ~nan
    if codes.any() or not torch.equal(got.data.view(torch.uint8) & 0x7F == 0x7F, nan):
        return f"{int(codes.sum())} codes differ"
    strides = got.scale_inv.stride() == want.scale_inv.stride() or 1 in got.scale_inv.shape
    return "" if torch.equal(got.scale_inv, want.scale_inv) and strides and got.tile == want.tile else "scales differ"


def run_checks() -> dict[str, str]:
    """Name of each check -> what is wrong, empty when nothing is."""
    from fp8 import quantize_kernels as kernels
    from fp8 import transpose_kernels as turning

    assert kernels.INTERPRETED
    x16, x32 = hard_rows(200, 272, torch.bfloat16), hard_rows(200, 272, torch.float32)
    q = quantized_rows(200, 272)
    both = kernels.quantize_transposed(x16, both=True)
    live = torch.tensor([0, -1], dtype=torch.int32)
    head = kernels.quantize_transposed(x16, both=False, live_B=live)[1]
    head = Quantized(head.data[:, :128].contiguous(), head.scale_inv[:, :1], head.tile)
    weight = quantize_ref(torch.randn(2, 128, 256), BLOCKS)
    moved = Quantized(turning.transpose_codes(weight.data), transpose_ref(weight).scale_inv, BLOCKS.tile)
    return {
        "rows": differs(kernels.quantize_rows(x16), quantize_ref(x16, ROW)),
        "blocks": differs(kernels.quantize_blocks(x32), quantize_ref(x32, BLOCKS)),
        "both": differs(both[0], quantize_ref(x16, ROW)) + differs(both[1], quantize_t_ref(x16, ROW)),
        "transposed": differs(kernels.quantize_transposed(x16, both=False)[1], quantize_t_ref(x16, ROW)),
        "requantize": differs(turning.requantize_transposed(q), requantize_t_ref(q)),
        "every_code": differs(turning.requantize_transposed(every_code()), requantize_t_ref(every_code())),
        "retile": differs(kernels.retile_transposed(q), retile_t_ref(q, ROW)),
        "transpose": differs(moved, transpose_ref(weight)),
        "live": differs(head, quantize_t_ref(x16[:128], ROW)),
    }


@pytest.fixture(scope="module")
def report() -> dict[str, str]:
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("check", CHECKS)
def test_kernel_equals_reference(report: dict[str, str], check: str):
    assert report[check] == ""


if __name__ == "__main__":
    print(json.dumps(run_checks()))
