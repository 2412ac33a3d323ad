"""Every tile of the Hopper kernel compiles for sm_90 without a GPU, spills no register and fits into shared memory.

A spill in the K loop costs half of the speed and shows nowhere else on a CPU; see the kernel for what provokes one.
"""

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import torch  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from fp8.grouped_gemm_kernel import grouped_gemm_kernel  # noqa: E402
from fp8.grouped_gemm_sm90 import LONG_ADD_FP32, NARROW, QUANTIZING, TILES, Tile  # noqa: E402

SHARED_BYTES = 232448  # of one CTA on sm_90
CASES = [
    *[(kind, dtype, add, tile) for (kind, dtype, add), tile in TILES.items()],
    *[("nt", dtype, False, tile) for dtype, tile in NARROW.items()],
    ("wgrad", torch.float32, True, LONG_ADD_FP32),
    ("nt", torch.float8_e4m3fn, False, QUANTIZING),
]


def compile_for_hopper(kind: str, dtype: torch.dtype, add: bool, tile: Tile) -> "triton.compiler.CompiledKernel":
    """The launcher's call, typed by hand."""
    fp8 = repr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2))
    row = repr(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1))
    out = repr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * dtype.itemsize, rank=2))
    name = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv"}[dtype]
    signature = {
        "a_desc": f"tensordesc<fp8e4nv[64, 128],{fp8}>",
        "sa_desc": f"tensordesc<fp32[64],{row}>",
        "b_desc": f"tensordesc<fp8e4nv[128, 128],{fp8}>",
        "sb_ptr": "*fp32",
        "c_desc": f"tensordesc<{name}[64, {tile.width}],{out}>",
        "sc_ptr": "*fp32",
        **dict.fromkeys(("counts", "ends", "order", "block_expert"), "*i32"),
        **dict.fromkeys(("num_experts", "m_tiles", "n_tiles", "n_size", "a_rows", "b_blocks", "k_blocks"), "i32"),
    }
    aligned = [i for i, t in enumerate(signature.values()) if t.startswith("*")]
    constants = {"WGRAD": kind == "wgrad", "ADD": add, "HALVES": tile.halves, "STAGES": tile.stages}
    constants |= {"C_WIDTH": tile.width, "C_BUFS": tile.buffers, "QUANTIZE": dtype.itemsize == 1, "num_warps": 4}
    signature |= dict.fromkeys(constants, "constexpr")
    places = {(list(signature).index(key),): value for key, value in constants.items()}
    source = GluonASTSource(grouped_gemm_kernel, signature, places, {(i,): [["tt.divisibility", 16]] for i in aligned})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


@pytest.mark.parametrize("kind, dtype, add, tile", CASES, ids=str)
def test_tile_compiles_without_spills(kind: str, dtype: torch.dtype, add: bool, tile: Tile, tmp_path: Path):
    kernel = compile_for_hopper(kind, dtype, add, tile)
    assert kernel.metadata.shared <= SHARED_BYTES
    (tmp_path / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    nvdisasm = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    sass = subprocess.run([nvdisasm, "-c", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True).stdout
    assert len(re.findall(r"\bQGMMA\b", sass)) == 2 * 4 * tile.halves  # consumers x 32-deep steps of a K block x halves
    assert not re.search(r"\b(STL|LDL)\b", sass)
