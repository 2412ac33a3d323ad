"""Time of an optimizer step beside the time that a copy of the same bytes takes: `python -m tools.bench optimizer`.

    python -m tools.bench optimizer --params 2e9 --states lean fp8_lm fp32
    python -m tools.bench optimizer --launch num_warps=16,ROWS=64 num_warps=8,ROWS=32,maxnreg=128    other launches

The weights are Ling-mini's expert matrices (256 x 1024 x 2048 and 256 x 2048 x 512), as many as fit the size asked for.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Sequence

import torch

from fp8.grad_norm import grad_norm_squared
from fp8.optimizer import PRESETS, AdamW, bytes_report
from fp8.recipe import Recipe
from fp8.weight import Weight
from tools.output import need_gpu

SHAPES = ((256, 1024, 2048), (256, 2048, 512))


def milliseconds(call: Callable[[], object], repeats: int = 7) -> float:
    """Median time of `call` on the device, after one call to warm up."""
    call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def copy_rate() -> float:
    """Bytes per second, read and written, of a copy of 2 GiB."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source)) * 1e3


def build(params: float, preset: str, grad_dtype: torch.dtype) -> tuple[dict[str, Weight], AdamW]:
    named: dict[str, Weight] = {}
    with torch.device("cuda"):
        while sum(w.numel for w in named.values()) < params:
            shape = SHAPES[len(named) % len(SHAPES)]
            named[f"w{len(named)}"] = Weight(*shape, recipe=Recipe.block())
    optimizer = AdamW(named.items(), states=PRESETS[preset])
    for name, weight in named.items():
        weight.grad_dtype = grad_dtype
        optimizer.set_master(name, torch.empty(weight.data.shape, device="cuda").normal_(0, 0.006))
        weight.main_grad = torch.empty(weight.data.shape, dtype=grad_dtype, device="cuda").normal_(0, 1e-4)
    return named, optimizer


def measure(params: float, preset: str, grad_dtype: torch.dtype, rate: float) -> dict[str, float | str]:
    """One row: ms of a step and of the norm, and both over the copy time of the bytes they move."""
    named, optimizer = build(params, preset, grad_dtype)

    def step() -> None:
        for weight in named.values():
            weight._written = True  # the gradient is there again; its values do not matter
        optimizer.step(1e-4, scale)

    scale = torch.ones((), device="cuda")
    ms = milliseconds(step)
    report = bytes_report(optimizer)
    states = sum(report[role] for role in ("master", "exp_avg", "exp_avg_sq"))
    moved = 2 * states + report["grad"] + report["weight"]  # the weight is only written
    for weight in named.values():
        weight._written = True
    norm_ms = milliseconds(lambda: grad_norm_squared(named.items()))
    numel = report["parameters"]
    return {
        "states": preset,
        "grad": str(grad_dtype).removeprefix("torch."),
        "params": numel,
        "bytes_per_param": (states + report["weight"]) / numel,
        "moved_per_param": moved / numel,
        "ms": ms,
        "over_copy": ms / (moved / rate * 1e3),
        "ms_of_16.26e9": ms * 16_255_638_528 / numel,
        "norm_ms_of_16.26e9": norm_ms * 16_255_638_528 / numel,
        "norm_over_copy": norm_ms / (report["grad"] / rate * 1e3),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools.bench optimizer", description=__doc__)
    parser.add_argument("--params", type=float, default=2e9)
    parser.add_argument("--states", nargs="+", choices=list(PRESETS), default=["lean", "fp8_lm", "fp32"])
    parser.add_argument(
        "--launch", nargs="+", default=[""], help="key=value,...: instead of optimizer_launch.LAUNCH; may be several"
    )
    parser.add_argument("--json", help="also write the rows to this file")
    args = parser.parse_args(argv)
    need_gpu("tools.bench optimizer")
    rate = copy_rate()
    print(f"copy rate {rate / 1e12:.2f} TB/s")
    header = f"{'states':8} {'grad':9} {'B/param':>8} {'moved':>6} {'ms':>7} {'x copy':>7} {'ms, 16.26B':>11}"
    print(f"{header} {'norm ms':>8} {'x copy':>7}")
    rows = []
    from fp8 import optimizer_launch  # Triton comes with CUDA builds of torch only

    built_in = dict(optimizer_launch.LAUNCH)
    for preset, launch in itertools.product(args.states, args.launch):
        own = {key: int(value) for key, _, value in (item.partition("=") for item in launch.split(",") if item)}
        for fmt, options in built_in.items():
            optimizer_launch.LAUNCH[fmt] = {"NEIGHBOURS": 16, "LINE": 0} | own if own else options
        row = {"launch": launch} | measure(args.params, preset, torch.float32 if preset == "fp32" else torch.bfloat16, rate)
        rows.append(row)
        left = f"{row['states']:8} {row['grad']:9} {row['bytes_per_param']:8.3f} {row['moved_per_param']:6.2f}"
        right = f"{row['ms_of_16.26e9']:11.1f} {row['norm_ms_of_16.26e9']:8.1f} {row['norm_over_copy']:7.2f}"
        print(f"{left} {row['ms']:7.2f} {row['over_copy']:7.2f} {right}  {launch}")
        torch.cuda.empty_cache()
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    return 0
