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
    index_kernels,
    permute_kernels,
    qk_norm_rope_kernels,
    rms_norm_forward_kernel,
    rms_norm_kernels,
    route_forward_kernel,
    route_kernels,
    router_gemm_kernel,
    swiglu_backward_kernel,
    swiglu_kernels,
)
from fp8.launch import next_power_of_2  # noqa: E402

SHARED_BYTES = 232448  # of one CTA on sm_90
WORDS = {"h_ptr": "*bf16", "x_ptr": "*bf16", "y_ptr": "*bf16", "w_ptr": "*fp32", "eps": "fp32", "factor": "fp32"}
BF16 = ("d1_ptr", "d2_ptr", "d3_ptr", "dres_ptr", "dh_ptr", "dq_ptr", "dk_ptr", "dv_ptr", "dx_ptr", "cos_ptr", "sin_ptr")
MANY = dict.fromkeys(BF16, "*bf16")
CODES = dict.fromkeys(("q_ptr", "hq_ptr", "aq_ptr"), "*u8")
ORDER = dict.fromkeys(("starts_ptr", "sorted_ptr", "order_ptr"), "*i32") | {"tokens_ptr": "*i64", "words_ptr": "*i64"}
INDEX = dict.fromkeys(("hist_ptr", "counts_ptr", "before_ptr", "starts_ptr", "ends_ptr", "order_ptr", "block_expert_ptr"), "*i32")
INDEX |= {"sums_ptr": "*i64"}
LIVE = {"live_ptr": "*i32", "sorted_ptr": "*i32"}
IDS = dict.fromkeys(("ids_ptr", "label_ptr", "row_ptr", "slot_ptr", "index_ptr", "order_ptr", "counts_ptr"), "*i64")
BLOCKS = {"h_ptr": "*i64", "aq_ptr": "*i32", "hq_ptr": "*i32", "da_ptr": "*i64", "q_ptr": "*i32", "qt_ptr": "*i32"}
PAIRS = {"h_ptr": "*i32", "x_ptr": "*i32", "w_ptr": "*i64", "q_ptr": "*i16", "inverse_dim": "fp32"}
ON = dict(HARDWARE=True)
SWIGLU = dict(WEIGHTED=True, LIVE=True, maxnreg=swiglu_backward_kernel.REGISTERS, **ON)
LANES = route_forward_kernel._layouts(256, 8, 8)


def rms_norm(dim: int, full: bool) -> tuple:
    tile = rms_norm_forward_kernel.forward_tile(dim)
    shape = dict(ROWS=tile.rows, BLOCKS=tile.blocks, SHARE=tile.share, LAYOUT=tile.layout, SUMS=tile.sums, maxnreg=tile.registers)
    return rms_norm_forward_kernel, "rms_norm_pairs", PAIRS, dict(FULL=full, **shape, **ON), tile.warps


def routed(experts: int, groups: int, topk_group: int, k: int) -> tuple:
    slots = next_power_of_2(k)
    sizes = dict(E=experts, G=groups, TOPK_GROUP=topk_group, K=k, KP=slots)
    return route_forward_kernel, "_route", {}, sizes | route_forward_kernel._layouts(experts, groups, slots) | ON, 1


# module, kernel, types that differ from the ones above, compile-time arguments, warps
CASES = [
    rms_norm(2048, full=True), rms_norm(12288, full=False), rms_norm(16384, full=True),
    (rms_norm_kernels, "_rms_norm", {}, dict(ROWS=4, BLOCKS=16, ROUND=True, **ON), 8),
    (rms_norm_kernels, "_rms_norm_backward", {}, dict(ROWS=1, BLOCKS=16, GRADS=3, RESIDUAL=True, ROUND=True, STAGES=3, **ON), 4),
    (rms_norm_kernels, "_rms_norm", {}, dict(ROWS=1, BLOCKS=128, ROUND=False, **ON), 16),
    # of 8192 features; above, where no configuration is, backward spills, by 8, 16 or 32 warps: h, dx, w and dw of 16384 features
    # are all registers of a multiprocessor
    (rms_norm_kernels, "_rms_norm_backward", {}, dict(ROWS=1, BLOCKS=64, GRADS=3, RESIDUAL=True, ROUND=True, STAGES=2, **ON), 8),
    (qk_norm_rope_kernels, "_qk_norm_rope", {}, dict(H=16, K=4, D=128, ROWS=32, ROUND=True, **ON), 4),
    (qk_norm_rope_kernels, "_qk_norm_rope_backward", {}, dict(H=16, K=4, D=128, ROWS=16, ROUND=True, **ON), 2),
    (swiglu_kernels, "_swiglu_quantize", BLOCKS, dict(ROWS=32, STORED=False, WEIGHTED=True, LIVE=True, **ON), 4),
    (swiglu_backward_kernel, "swiglu_backward", BLOCKS, SWIGLU | dict(FULL=True), 8),
    (swiglu_backward_kernel, "swiglu_backward", BLOCKS, SWIGLU | dict(FULL=False), 8),
    (permute_kernels, "_scatter_rows", {"x_ptr": "*i32", "y_ptr": "*i32"}, dict(K=8, TOKENS=1, WORDS=512, SCALES=16), 1),
    (permute_kernels, "_sum_rows", {"out_ptr": "*bf16"}, dict(K=8, COLS=2048, PLUS=False, ROUND=True, **ON), 4),
    (route_forward_kernel, "_route", {}, dict(E=256, G=8, TOPK_GROUP=4, K=8, KP=8, **LANES, **ON), 1),
    (route_kernels, "_route_backward", {"out_ptr": "*bf16"}, dict(E=256, K=8, KP=8, ROWS=4, PLUS=True, PARTS=True, **ON), 2),
    (cross_entropy_kernels, "_softmax_statistics", {}, dict(COLS=2048, **ON), 8),
    (cross_entropy_kernels, "_softmax_gradient", BLOCKS | {"x_ptr": "*i64"}, dict(FULL=True, **ON), 4),
    (embedding_kernels, "_sum_chunks", {"dy_ptr": "*bf16", "order_ptr": "*i32"}, dict(CHUNK=8, COLS=512), 4),
]  # fmt: skip
JOINED = dict(CHUNK=8, COLS=512, CHUNKS=4, PARTS=16, REACH=128)
# Of these no load of 16 bytes is expected: they read columns, a few values a thread, or what is masked
MORE = [
    (embedding_kernels, "_list_positions", ORDER, dict(BITS=7, LANES=512, UNROLL=32, FULL=True), 16),
    (embedding_kernels, "_list_positions", ORDER, dict(BITS=1, LANES=512, UNROLL=32, FULL=False), 16),
    (embedding_kernels, "_list_positions", ORDER, dict(BITS=8, LANES=512, UNROLL=32, FULL=False), 16),
    (embedding_kernels, "_place_positions", ORDER, dict(HASHES=2, PLACES=16, OTHERS=256), 4),
    (embedding_kernels, "_place_positions", ORDER, dict(HASHES=256, PLACES=16, OTHERS=256), 4),
    (embedding_kernels, "_join_parts", ORDER, JOINED, 4),
    *[(index_kernels, "_count_slots", INDEX, dict(SLOTS=128, EXPERTS=bins), 4) for bins in (2, 512)],
    *[(index_kernels, "_scan_blocks", INDEX, dict(BLOCKS=256, EXPERTS=8, ADD=add), 4) for add in (False, True)],
    *[(index_kernels, "_place_slots", INDEX, dict(SLOTS=128, EXPERTS=e, ROW_BLOCKS=2), 4) for e in (1, 64, 256, 512)],
    routed(16, 1, 1, 3), routed(16, 4, 4, 16), routed(32, 8, 4, 4), routed(64, 8, 2, 6), routed(256, 8, 8, 32),
]  # fmt: skip
THREE_CTAS = SHARED_BYTES // 3 - 1024  # share a multiprocessor


def compiled_for(
    capability: int, module: ModuleType, name: str, types: dict[str, str], constants: dict[str, object], warps: int
) -> "triton.compiler.CompiledKernel":
    """The launcher's call, typed by hand; `maxnreg` among the constants is an option."""
    capped, constants = {"maxnreg": constants.get("maxnreg")}, {k: v for k, v in constants.items() if k != "maxnreg"}
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
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps} | capped)


@pytest.mark.parametrize("module, name, types, constants, warps", CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_compiles_without_spills(
    module: ModuleType, name: str, types: dict[str, str], constants: dict[str, object], warps: int, tmp_path: Path
) -> None:
    compiled = compiled_for(90, module, name, types, constants, warps)
    assert compiled.metadata.shared <= (THREE_CTAS if name == "swiglu_backward" else SHARED_BYTES)
    assert re.search(r"\b(LDG|LDGSTS)\.E\S*\.128", unspilled(compiled, tmp_path)), "no 16-byte load"


def unspilled(compiled: "triton.compiler.CompiledKernel", folder: Path) -> str:
    """The machine code, in which no register is spilled."""
    (folder / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    nvdisasm = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    sass = subprocess.run([nvdisasm, "-c", folder / "kernel.cubin"], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"\b(STL|LDL)\b", sass), "spills"
    return sass


@pytest.mark.parametrize("case", MORE, ids=lambda case: case[1])
def test_more_kernels_and_edge_shapes_compile_without_spills(case: tuple, tmp_path: Path) -> None:
    compiled = compiled_for(90, *case)
    assert compiled.metadata.shared <= SHARED_BYTES
    unspilled(compiled, tmp_path)


@pytest.mark.parametrize("sizes", [{"depth": 2048, "experts": 256}, {"depth": 72, "experts": 128}], ids=str)
def test_the_routers_product_compiles_without_spills(sizes: dict[str, int], tmp_path: Path) -> None:
    """Its three products of a step are on the tensor cores, two 64-row halves each, and what they read comes by the copy engine."""
    m = router_gemm_kernel
    blocks = {"x_desc": f"tensordesc<bf16[{m.ROWS}, {m.DEPTH}]>", "parts_desc": f"tensordesc<bf16[{m.COLS}, {m.DEPTH}]>"}
    constants = dict(ROWS=m.ROWS, COLS=m.COLS, DEPTH=m.DEPTH, STAGES=m.STAGES, **sizes)
    compiled = compiled_for(90, m, "_product", blocks, constants, m.WARPS)
    assert compiled.metadata.shared <= SHARED_BYTES
    sass = unspilled(compiled, tmp_path)
    assert len(re.findall(r"\bHGMMA\b", sass)) >= 3 and re.search(r"\bUTMALDG\b", sass)


IN_PAIRS = ("rms_norm_pairs", "swiglu_backward", "_softmax_gradient", "_swiglu_quantize")


@pytest.mark.parametrize("case", [case for case in CASES if case[1] in IN_PAIRS], ids=str)
def test_what_only_hopper_has_is_not_used(case: tuple) -> None:
    """BF16 pairs are worked on by instructions that the first GPUs with FP8 have, too: `fp8.emulate` runs these kernels there."""
    assert compiled_for(89, *case).metadata.shared <= 101376
