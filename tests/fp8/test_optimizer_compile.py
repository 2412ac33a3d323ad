"""The fused optimizer compiles for sm_90 without a GPU: what limits it is instructions and registers, and both show here."""

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from fp8 import optimizer_kernels, optimizer_launch  # noqa: E402

ELEMENT = {"fp32": "*fp32", "bf16": "*bf16", "fp16": "*fp16", "fp8": "*u8"}
FLOATS = ("beta1", "rest1", "beta2", "rest2", "eps", "decay", "step_size", "rsqrt_correction2")
# master, m, v, gradient; instructions an element that the version last measured had, and a few more
CASES = {
    "lean": ("fp16", "fp8", "fp8", "bf16", 61),
    "fp8_lm": ("fp16", "fp8", "fp16", "bf16", 63),
    "fp32": ("fp32", "fp32", "fp32", "fp32", 44),
}


def compiled(case: str) -> object:
    master, m, v, grad, _ = CASES[case]
    kernel, launch = optimizer_kernels.update_blocks, dict(optimizer_launch.LAUNCH[v])
    constants = {"MASTER": master, "M": m, "V": v, "WEIGHT": "fp8", "AHEAD": 264, "HARDWARE": True}
    constants |= {key: launch.pop(key) for key in ("ROWS", "NEIGHBOURS", "LINE")}
    types = {"grad_ptr": ELEMENT[grad], "x_ptr": ELEMENT[master], "m_ptr": ELEMENT[m], "v_ptr": ELEMENT[v], "weight_ptr": "*u8"}
    for name, fmt in (("x", master), ("m", m), ("v", v)):
        types[f"{name}_scale_ptr"] = "*u8" if fmt in ("fp16", "fp8") else ELEMENT[fmt]
    types |= {"grad_scale_ptr": "*fp32", "weight_scale_ptr": "*fp32"} | dict.fromkeys(FLOATS, "fp32")
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    places = {(list(signature).index(key),): value for key, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    options = launch | {"enable_fp_fusion": False}
    return triton.compile(ASTSource(kernel, signature, places, aligned), target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize("case", CASES)
def test_instructions_an_element_and_spills(case: str, tmp_path: Path) -> None:
    (tmp_path / "kernel.cubin").write_bytes(compiled(case).asm["cubin"])
    nvdisasm = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    sass = subprocess.run([nvdisasm, "-c", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(.*)", sass, re.M)
    elements = 128 * 128 / (32 * optimizer_launch.LAUNCH[CASES[case][2]]["num_warps"])
    assert len(lines) / elements <= CASES[case][-1]
    assert sum(bool(re.search(r"\b(STL|LDL)\b", line)) for line in lines) / elements <= 1.5  # registers are capped
    assert any("LDG.E.128" in line for line in lines), "no 16-byte load"
