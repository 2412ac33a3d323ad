"""The kernels of fp8/ under compute-sanitizer, on small shapes: `python -m tools.sanitize`.

memcheck and racecheck run over each subject (tools/sanitize_subjects.py), in a process of its own, `--jobs` at a time:

    control     a kernel that does nothing but hand work to three groups of warps, each of which writes its own numbers
    exchange    the same, but the warps of a group also exchange values, for which they wait for each other
    gemm        forward, dgrad and wgrad, all output formats, groups of 0, 1, 127, 128 and 129 rows, N not a multiple of 256
    swiglu      forward and backward, with routing weights and without, a last block that is not whole, a dead one
    quantise    rows, transposed, both, re-tile, requantise, and the weights' kernels, odd sizes
    norms       RMSNorm, QK-norm with RoPE, forward and backward
    experts     indices, permutations, sums over a token's rows, SwiGLU, dense gradients
    router      routing, its gradient, the splits into BF16 parts and the products that read them
    head        softmax statistics and gradient
    embedding   its gradient
    optimizer   AdamW under each preset of states, gradients in FP32 and BF16

Left out: kernels of parallel/, the residual's sum, and what only MX and tensorwise recipes run.

racecheck reports hazards in the code that Triton generates around `warp_specialize`: a byte of shared memory tells each group of
warps what to run, between two barriers. `control` and `exchange` show which hazards those are; `gemm` must show none beside them.
Exits with 1 if a subject did not run to its end or memcheck found an error. Needs a Hopper GPU and compute-sanitizer (CUDA
toolkit) on the PATH.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.arguments import at_least, make_parser
from training.errors import UserError, exit_status

TOOLS = ("memcheck", "racecheck")
SUBJECTS = (
    "control", "exchange", "gemm", "swiglu", "quantise", "norms", "experts", "router", "head", "embedding", "optimizer",
)  # fmt: skip
RACE = re.compile(r"Race reported between (\w+) access at (.+)\n((?:=+ +and .+\n)+)")
OTHER = re.compile(r"and (\w+) access at (.+?)(?: \[(\d+) hazards?\])?\n")
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (.*)")


def races_of(text: str) -> Counter[str]:
    """{the two places of a race: hazards} from racecheck's analysis report."""
    found: Counter[str] = Counter()
    for first, at_first, others in RACE.findall(text):
        for second, at_second, hazards in OTHER.findall(others):
            found[" / ".join(sorted((f"{first} {at_first}", f"{second} {at_second}")))] += int(hazards or 1)
    return found


def check(tool: str, subject: str, keep: Path | None) -> tuple[str, Counter[str], bool]:
    """compute-sanitizer's own summary, the places between which it reports a race, and whether the subject ran to its end (else the
    summary is what it said last) without a memory error. Its whole text goes to the folder `keep`."""
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "1000", sys.executable, "-m", "tools.sanitize"]
    done = subprocess.run([*command, "--inside", subject], capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    if keep is not None:
        (keep / f"{tool}-{subject}.txt").write_text(text)
    summary = SUMMARY.search(text)
    if f"{subject} ran" not in text or summary is None:
        return f"ended with code {done.returncode}:\n{text[-2000:]}", Counter(), False
    return summary[1], races_of(text), tool != "memcheck" or summary[1].startswith("0 ")


def main(argv: list[str] | None = None) -> int:
    parser = make_parser("sanitize", __doc__)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS), help="of compute-sanitizer")
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS), help="what they watch")
    parser.add_argument("--jobs", type=at_least(1), default=1, help="processes side by side")
    parser.add_argument("--keep", type=Path, help="folder for compute-sanitizer's whole output")
    parser.add_argument("--inside", choices=SUBJECTS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.inside:
        import torch

        from tools import sanitize_subjects  # needs Triton and a GPU

        sanitize_subjects.SUBJECTS[args.inside]()
        torch.cuda.synchronize()
        print(f"{args.inside} ran")
        return 0
    if shutil.which("compute-sanitizer") is None:
        raise UserError("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit, in its bin folder")
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
    pairs = [(tool, subject) for tool in args.tools for subject in args.subjects]
    failed = False
    with ThreadPoolExecutor(args.jobs) as pool:
        found = pool.map(lambda pair: check(*pair, args.keep), pairs)
        for (tool, subject), (summary, races, passed) in zip(pairs, found, strict=True):
            failed |= not passed
            print(f"{tool:10} {subject:9} {summary}", flush=True)
            for places, times in races.most_common(12):
                print(f"    {times:4} x  {places[:200]}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(exit_status(main))
