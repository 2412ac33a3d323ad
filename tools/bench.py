"""Benchmarks: `python -m tools.bench <what> [options]`. Each prints a table and, with --out, writes JSON."""

from __future__ import annotations

import importlib
import sys

from tools.arguments import make_parser
from training.errors import exit_status

COMMANDS = {
    "numerics": ("tools.bench_numerics", "error and underflow of each recipe on known distributions"),
    "memory": ("tools.bench_memory", "bytes kept between forward and backward, by activation stage and tensor class"),
    "fused": ("tools.bench_fused", "memory-bound kernels around the GEMMs, as a share of the copy rate"),
    "layer": ("tools.bench_layer", "attention, dense block, MoE block, whole layer, head: FP8 against BF16"),
    "step": ("tools.bench_step", "whole optimizer steps by phase: FP8 against BF16"),
    "optimizer": ("tools.bench_optimizer", "optimizer step and gradient norm, as a share of the copy rate"),
    "states": ("tools.bench_states", "how well stored Adam moments follow exact ones"),
    "gradients": ("tools.bench_gradients", "validation loss and gradients of recipes at the same trained weights"),
    "rounding": ("tools.bench_rounding", "loss and gradients of one checkpoint by what is rounded: class of GEMM, weights, inputs"),
    "reduction": ("tools.bench_reduction", "what each gradient wire loses on the gradients of a run"),
    "comm": ("tools.bench_comm", "what travels between ranks: bytes, casts, and time on a wire"),
    "kernels": ("tools.bench_kernels", "expert GEMMs and quantise kernels of fp8/ on one GPU"),
}


def main(argv: list[str] | None = None) -> int | None:
    argv = sys.argv[1:] if argv is None else argv
    parser = make_parser("bench", __doc__)
    parser.add_argument("what", choices=COMMANDS, metavar="what", help="one of those below; its own options: WHAT --help")
    parser.epilog = "\n".join(f"  {name:10} {text}" for name, (_, text) in COMMANDS.items())
    return importlib.import_module(COMMANDS[parser.parse_known_args(argv[:1])[0].what][0]).main(argv[1:])


if __name__ == "__main__":
    sys.exit(exit_status(main))
