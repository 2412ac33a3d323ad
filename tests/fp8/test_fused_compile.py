"""The fused kernels at Ling-mini's sizes compile for sm_90 without a GPU, spill no register and read 16 bytes at a time.

The interpreter accepts what the compiler does not (a global that is no constexpr), and spills show nowhere else on a CPU.
"""

import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from fp8 import (  # noqa: E402
    cross_entropy_kernels,
    embedding_kernels,
    permute_kernels,
    qk_norm_rope_kernels,
    rms_norm_forward_kernel,
    rms_norm_kernels,
    route_forward_kernel,
    route_kernels,
    swiglu_backward_kernel,
    swiglu_kernels,
)

SHARED_BYTES = 232448  # of one CTA on sm_90
WORDS = {"h_ptr": "*bf16", "x_ptr": "*bf16", "y_ptr": "*bf16", "w_ptr": "*fp32", "eps": "fp32", "factor": "fp32"}
BF16 = ("d1_ptr", "d2_ptr", "d3_ptr", "dres_ptr", "dh_ptr", "dq_ptr", "dk_ptr", "dv_ptr", "dx_ptr", "cos_ptr", "sin_ptr")
MANY = dict.fromkeys(BF16, "*bf16")
CODES = dict.fromkeys(("q_ptr", "hq_ptr", "aq_ptr"), "*u8")
LIVE = {"live_ptr": "*i32", "sorted_ptr": "*i32"}
IDS = dict.fromkeys(("ids_ptr", "label_ptr", "row_ptr", "slot_ptr", "index_ptr", "order_ptr", "counts_ptr"), "*i64")
BLOCKS = {"h_ptr": "*i64", "aq_ptr": "*i32", "hq_ptr": "*i32", "da_ptr": "*i64", "q_ptr": "*i32", "qt_ptr": "*i32"}
PAIRS = {"h_ptr": "*i32", "x_ptr": "*i32", "w_ptr": "*i64", "q_ptr": "*i16", "inverse_dim": "fp32"}
TILE = rms_norm_forward_kernel.forward_tile(2048)
PAIRED = dict(ROWS=TILE.rows, BLOCKS=TILE.blocks, SHARE=TILE.share, LAYOUT=TILE.layout, SUMS=TILE.sums)
ON = dict(HARDWARE=True)
LANES = route_forward_kernel._layouts(256, 8, 8)
# module, kernel, types that differ from the ones above, compile-time arguments, warps
CASES = [
    (rms_norm_forward_kernel, "rms_norm_pairs", PAIRS, dict(FULL=True, **PAIRED, **ON), 4),
    (rms_norm_kernels, "_rms_norm", {}, dict(ROWS=4, BLOCKS=16, ROUND=True, **ON), 8),
    (rms_norm_kernels, "_rms_norm_backward", {}, dict(ROWS=1, BLOCKS=16, GRADS=3, RESIDUAL=True, ROUND=True, STAGES=3, **ON), 4),
    (qk_norm_rope_kernels, "_qk_norm_rope", {}, dict(H=16, K=4, D=128, ROWS=32, ROUND=True, **ON), 4),
    (qk_norm_rope_kernels, "_qk_norm_rope_backward", {}, dict(H=16, K=4, D=128, ROWS=16, ROUND=True, **ON), 2),
    (swiglu_kernels, "_swiglu_quantize", BLOCKS, dict(ROWS=32, STORED=False, WEIGHTED=True, LIVE=True, **ON), 4),
    (swiglu_backward_kernel, "swiglu_backward", BLOCKS, dict(WEIGHTED=True, LIVE=True, FULL=True, **ON), 8),
    (swiglu_backward_kernel, "swiglu_backward", BLOCKS, dict(WEIGHTED=True, LIVE=True, FULL=False, **ON), 8),
    (permute_kernels, "_scatter_rows", {"x_ptr": "*i32", "y_ptr": "*i32"}, dict(K=8, TOKENS=1, WORDS=512, SCALES=16), 1),
    (permute_kernels, "_sum_rows", {"out_ptr": "*bf16"}, dict(K=8, COLS=2048, PLUS=False, ROUND=True, **ON), 4),
    (route_forward_kernel, "_route", {}, dict(E=256, G=8, TOPK_GROUP=4, K=8, KP=8, **LANES, **ON), 1),
    (route_kernels, "_route_backward", {"out_ptr": "*bf16"}, dict(E=256, K=8, KP=8, ROWS=4, PLUS=True, PARTS=True, **ON), 2),
    (cross_entropy_kernels, "_softmax_statistics", {}, dict(COLS=2048, **ON), 8),
    (cross_entropy_kernels, "_softmax_gradient", BLOCKS | {"x_ptr": "*i64"}, dict(FULL=True, **ON), 4),
    (embedding_kernels, "_sum_chunks", {"dy_ptr": "*bf16", "order_ptr": "*i32"}, dict(CHUNK=8, COLS=512), 4),
]  # fmt: skip
CAPS = {
    "rms_norm_pairs": {"maxnreg": TILE.registers},
    "swiglu_backward": {"maxnreg": swiglu_backward_kernel.REGISTERS},
}
THREE_CTAS = SHARED_BYTES // 3 - 1024  # share a multiprocessor


def compiled_for(
    capability: int, module: ModuleType, name: str, types: dict[str, str], constants: dict[str, object], warps: int
) -> "triton.compiler.CompiledKernel":
    """The launcher's call, typed by hand."""
    kernel = getattr(module, name)
    known = WORDS | MANY | CODES | LIVE | IDS | types
    signature = {}
    for argument in kernel.arg_names:
        default = "*fp32" if argument.endswith("_ptr") else "i32"
        signature[argument] = "constexpr" if argument in constants else known.get(argument, default)
    aligned = [i for i, kind in enumerate(signature.values()) if kind.startswith("*") or kind == "i32"]
    places = {(list(signature).index(key),): value for key, value in constants.items()}
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    source = source(kernel, signature, places, {(i,): [["tt.divisibility", 16]] for i in aligned})
    options = {"num_warps": warps} | CAPS.get(name, {})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("module, name, types, constants, warps", CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_compiles_without_spills(
    module: ModuleType, name: str, types: dict[str, str], constants: dict[str, object], warps: int, tmp_path: Path
) -> None:
    compiled = compiled_for(90, module, name, types, constants, warps)
    assert compiled.metadata.shared <= (THREE_CTAS if name == "swiglu_backward" else SHARED_BYTES)
    (tmp_path / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    nvdisasm = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    sass = subprocess.run([nvdisasm, "-c", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"\b(STL|LDL)\b", sass), "spills"
    assert re.search(r"\b(LDG|LDGSTS)\.E\S*\.128", sass), "no 16-byte load"


IN_PAIRS = ("rms_norm_pairs", "swiglu_backward", "_softmax_gradient", "_swiglu_quantize")


@pytest.mark.parametrize("case", [case for case in CASES if case[1] in IN_PAIRS], ids=str)
def test_what_only_hopper_has_is_not_used(case: tuple) -> None:
    """BF16 pairs are worked on by instructions that the first GPUs with FP8 have, too: `fp8.emulate` runs these kernels there."""
    assert compiled_for(89, *case).metadata.shared <= 101376
