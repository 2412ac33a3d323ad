"""The expert GEMMs, SwiGLU and the quantise kernels under compute-sanitizer, on small shapes: `python -m tools.sanitize`.

memcheck and racecheck run over each subject, in a process of its own:

    control     a kernel that does nothing but hand work to three groups of warps, each of which writes its own numbers
    exchange    the same, but the warps of a group also exchange values, for which they wait for each other
    gemm        forward, dgrad and wgrad, all output formats, groups of 0, 1, 127, 128 and 129 rows, N not a multiple of 256
    swiglu      forward and backward, with routing weights and without, a last block that is not whole, a dead one
    quantise    rows, transposed, both, re-tile, requantise, and the weights' kernels, odd sizes

racecheck reports hazards in the code that Triton generates around `warp_specialize`: a byte of shared memory tells each group of
warps what to run, between two barriers. `control` and `exchange` show which hazards those are; `gemm` must show none beside them.
Needs a Hopper GPU and compute-sanitizer (CUDA toolkit) on the PATH.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

from tools.arguments import make_parser
from training.errors import UserError, exit_status

TOOLS, SUBJECTS = ("memcheck", "racecheck"), ("control", "exchange", "gemm", "swiglu", "quantise")
RACE = re.compile(r"Race reported between (\w+) access at (.+)\n((?:=+ +and .+\n)+)")
OTHER = re.compile(r"and (\w+) access at (.+?)(?: \[(\d+) hazards?\])?\n")
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (.*)")


def control(exchange: bool = False) -> None:
    """Nothing but `warp_specialize`: three groups of warps write 512 numbers each to memory of their own."""
    import torch

    from tools.sanitize_control import control_kernel

    out = torch.empty(2, 3, 512, dtype=torch.int32, device="cuda")
    control_kernel[(2,)](out, EXCHANGE=exchange, num_warps=4)
    assert (out == torch.arange(1, 4, dtype=torch.int32, device="cuda")[:, None]).all(), out


def gemm() -> None:
    """Every operation and output format, over empty, tiny and unaligned groups, N = 384 and 256."""
    import torch

    from fp8.grouped_gemm import make_groups
    from fp8.grouped_gemm_sm90 import grouped_gemm_nt_sm90, grouped_wgrad_sm90
    from fp8.quantize import quantize_ref, quantize_t_ref, requantize_t_ref
    from fp8.recipe import Spec

    row, blocks = Spec("e4m3", (1, 128), "block"), Spec("e4m3", (128, 128), "block")
    counts = [0, 1, 127, 128, 129, 0]
    groups = make_groups(torch.tensor(counts, device="cuda"), 128 * 7)
    for n, k in ((384, 256), (256, 384)):
        x, dy = torch.randn(groups.max_rows, k, device="cuda"), torch.randn(groups.max_rows, n, device="cuda")
        w = quantize_ref(torch.randn(len(counts), n, k, device="cuda"), blocks)
        x_q = quantize_ref(x, row)
        dy_t, x_t = quantize_t_ref(dy, row), requantize_t_ref(x_q)
        for dtype in (torch.bfloat16, torch.float32):
            grouped_gemm_nt_sm90(x_q, w, groups, dtype)
            out = torch.zeros(len(counts), n, k, dtype=dtype, device="cuda")
            grouped_wgrad_sm90(dy_t, x_t, groups, out, False)
            grouped_wgrad_sm90(dy_t, x_t, groups, out, True)
    torch.cuda.synchronize()


def swiglu() -> None:
    """SwiGLU's kernels: what backward puts into shared memory is read by other warps."""
    import torch

    from fp8 import swiglu_kernels

    h = torch.randn(384, 512, device="cuda", dtype=torch.bfloat16)
    da, w = torch.randn(384, 256, device="cuda", dtype=torch.bfloat16), torch.rand(384, device="cuda")
    live = torch.tensor([0, 0, -1], dtype=torch.int32, device="cuda")
    for rows, weights, blocks in ((384, w, live), (384, None, None), (300, w[:300], None)):
        h_q, _ = swiglu_kernels.quantize_swiglu(h[:rows].contiguous(), weights, blocks)
        swiglu_kernels.backward(h_q, weights, da[:rows].contiguous(), blocks)
    torch.cuda.synchronize()


def quantise() -> None:
    """Every quantise kernel once, on sizes that fill no tile."""
    import torch

    from fp8.quantize import quantize, quantize_both, quantize_t, requantize_t, retile_t, transpose
    from fp8.recipe import Spec

    row, blocks = Spec("e4m3", (1, 128), "block"), Spec("e4m3", (128, 128), "block")
    x = torch.randn(300, 384, device="cuda", dtype=torch.bfloat16)
    rows = quantize(x, row)
    quantize_t(x, row), quantize_both(x, row), retile_t(rows, row), requantize_t(rows)
    transpose(quantize(torch.randn(3, 256, 384, device="cuda"), blocks))
    torch.cuda.synchronize()


def races_of(text: str) -> Counter[str]:
    """{the two places of a race: hazards} from racecheck's analysis report."""
    found: Counter[str] = Counter()
    for first, at_first, others in RACE.findall(text):
        for second, at_second, hazards in OTHER.findall(others):
            found[" / ".join(sorted((f"{first} {at_first}", f"{second} {at_second}")))] += int(hazards or 1)
    return found


def check(tool: str, subject: str, keep: Path | None) -> tuple[str, Counter[str]]:
    """compute-sanitizer's own summary, and the places between which it reports a race. Its whole text goes to the folder `keep`.

    Raises:
        RuntimeError: the subject did not run to its end.
    """
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "1000", sys.executable, "-m", "tools.sanitize"]
    done = subprocess.run([*command, "--inside", subject], capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    if keep is not None:
        (keep / f"{tool}-{subject}.txt").write_text(text)
    summary = SUMMARY.search(text)
    if f"{subject} ran" not in text or summary is None:
        raise RuntimeError(f"{tool} over {subject} ended with code {done.returncode}:\n{text[-2000:]}")
    return summary[1], races_of(text)


def main(argv: list[str] | None = None) -> int:
    parser = make_parser("sanitize", __doc__)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS), help="of compute-sanitizer")
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS), help="what they watch")
    parser.add_argument("--keep", type=Path, help="folder for compute-sanitizer's whole output")
    parser.add_argument("--inside", choices=SUBJECTS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.inside:
        exchange = partial(control, True)
        dict(zip(SUBJECTS, (control, exchange, gemm, swiglu, quantise), strict=True))[args.inside]()
        print(f"{args.inside} ran")
        return 0
    if shutil.which("compute-sanitizer") is None:
        raise UserError("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit, in its bin folder")
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
    for tool in args.tools:
        for subject in args.subjects:
            summary, races = check(tool, subject, args.keep)
            print(f"{tool:10} {subject:9} {summary}")
            for places, times in races.most_common(12):
                print(f"    {times:4} x  {places[:200]}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
