"""Time of an optimizer step beside the time that a copy of the same bytes takes: `python -m tools.bench optimizer`.

    python -m tools.bench optimizer --params 2e9 --states lean fp8_lm fp32
    python -m tools.bench optimizer --launch num_warps=16,ROWS=64 num_warps=8,ROWS=32,maxnreg=128    the plain kernel, launched so
    python -m tools.bench optimizer --launch num_warps=8,ROWS=32,SLOTS=1,maxnreg=128    the pipelined one
    python -m tools.bench optimizer --states lean --offload    states in host memory, beside the link's own rates

The weights are Ling-mini's expert matrices (256 x 1024 x 2048 and 256 x 2048 x 512), as many as fit the size asked for.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence

import torch

from fp8.grad_norm import grad_norm_squared
from fp8.optimizer import PRESETS, AdamW, bytes_report
from fp8.recipe import Recipe
from fp8.weight import Weight
from tools.arguments import add_out, make_parser, positive, write_json
from tools.output import need_gpu
from training.errors import UserError

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


def link_times(num_bytes: int) -> dict[str, float]:
    """ms that this many bytes take between pinned host memory and the device: up, down, and both ways at once."""
    source, target = (torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    here = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    main = torch.cuda.current_stream()

    def copies(up: bool, down: bool) -> None:
        for stream in streams:
            stream.wait_stream(main)
        for stream, wanted, (to, what) in zip(streams, (up, down), ((here[0], source), (target, here[1])), strict=True):
            with torch.cuda.stream(stream):
                if wanted:
                    to.copy_(what, non_blocking=True)
        for stream in streams:
            main.wait_stream(stream)

    ways = {"up": (True, False), "down": (False, True), "both": (True, True)}
    return {name: milliseconds(lambda way=way: copies(*way), 3) * num_bytes / (1 << 30) for name, way in ways.items()}


def build(params: float, preset: str, grad_dtype: torch.dtype, offload: bool = False) -> tuple[dict[str, Weight], AdamW]:
    named: dict[str, Weight] = {}
    with torch.device("cuda"):
        while sum(w.numel for w in named.values()) < params:
            shape = SHAPES[len(named) % len(SHAPES)]
            named[f"w{len(named)}"] = Weight(*shape, recipe=Recipe.block())
    optimizer = AdamW(named.items(), states=PRESETS[preset], offload=offload)
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


def measure_offload(params: float, preset: str) -> dict[str, float | str]:
    """The same step with states on the GPU and in host memory: ms, bytes between steps and at the peak, times of the link."""
    row: dict[str, float | str] = {"states": preset}
    for where, offload in (("gpu", False), ("host", True)):
        named, optimizer = build(params, preset, torch.bfloat16, offload)
        scale = torch.ones((), device="cuda")

        def step(named: dict[str, Weight] = named, optimizer: AdamW = optimizer, scale: torch.Tensor = scale) -> None:
            for weight in named.values():
                weight._written = True
            optimizer.step(1e-4, scale)

        row[f"{where}_ms"] = milliseconds(step, 3)
        torch.cuda.synchronize()
        torch.empty(1 << 21, device="cuda")  # the allocator looks which memory has come free when it is asked for some
        row[f"{where}_gib"] = torch.cuda.memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
        step()
        row[f"{where}_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        tensors = [t for state in optimizer.state().values() for t in state.values()]
        row["states_gib"] = sum(t.nbytes for t in tensors) / 2**30
        del named, optimizer, step, tensors
        torch.cuda.empty_cache()
    return row | {f"link_{way}_ms": ms for way, ms in link_times(int(row["states_gib"] * 2**30)).items()}


def print_offload(row: dict[str, float | str]) -> None:
    print(f"{row['states']}: {row['states_gib']:.2f} GiB of states")
    for where, name in (("gpu", "on the GPU"), ("host", "offloaded")):
        held, peak = row[f"{where}_gib"], row[f"{where}_peak_gib"]
        print(f"  {name:11} {row[f'{where}_ms']:8.1f} ms a step; {held:6.2f} GiB between steps, {peak:6.2f} at the peak")
    up, down, both = (row[f"link_{way}_ms"] for way in ("up", "down", "both"))
    print(f"  the link    {up:8.1f} ms up, {down:.1f} down, {both:.1f} both ways at once")
    step, in_turn = row["host_ms"], up + down + row["gpu_ms"]
    print(f"  an offloaded step over both at once: {step / both:.2f}; over up, update and down in turn: {step / in_turn:.2f}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser("bench optimizer", __doc__)
    parser.add_argument("--params", type=positive, default=2e9, help="at least so many parameters")
    parser.add_argument("--states", nargs="+", choices=PRESETS, default=["lean", "fp8_lm", "fp32"], help="optim.states, in turn")
    parser.add_argument("--launch", nargs="+", default=[""], help="key=value,...: instead of optimizer_launch's; may be several")
    parser.add_argument("--offload", action="store_true", help="states on the GPU against states in host memory, nothing else")
    add_out(parser)
    args = parser.parse_args(argv)
    need_gpu("tools.bench optimizer")
    if args.offload:
        rows = [measure_offload(args.params, preset) for preset in args.states]
        for row in rows:
            print_offload(row)
        return write_json(args.out, rows)
    rate = copy_rate()
    print(f"copy rate {rate / 1e12:.2f} TB/s")
    header = f"{'states':8} {'grad':9} {'B/param':>8} {'moved':>6} {'ms':>7} {'x copy':>7} {'ms, 16.26B':>11}"
    print(f"{header} {'norm ms':>8} {'x copy':>7}")
    rows = []
    from fp8 import optimizer_launch  # Triton comes with CUDA builds of torch only

    built_in = optimizer_launch.LAUNCH, optimizer_launch.PIPELINED
    for preset, launch in itertools.product(args.states, args.launch):
        use_launch(launch, *built_in)
        row = {"launch": launch} | measure(args.params, preset, torch.float32 if preset == "fp32" else torch.bfloat16, rate)
        rows.append(row)
        left = f"{row['states']:8} {row['grad']:9} {row['bytes_per_param']:8.3f} {row['moved_per_param']:6.2f}"
        right = f"{row['ms_of_16.26e9']:11.1f} {row['norm_ms_of_16.26e9']:8.1f} {row['norm_over_copy']:7.2f}"
        print(f"{left} {row['ms']:7.2f} {row['over_copy']:7.2f} {right}  {launch}")
        torch.cuda.empty_cache()
    write_json(args.out, rows)


def use_launch(launch: str, plain: dict[str, dict[str, int]], pipelined: dict[str, dict[str, int]]) -> None:
    """`key=value,...` for all formats: of the pipelined kernel if SLOTS is among them, else of the plain one; "" as built in.

    Raises:
        UserError: a value is no whole number.
    """
    from fp8 import optimizer_launch  # Triton comes with CUDA builds of torch only

    try:
        own = {key: int(value) for key, _, value in (item.partition("=") for item in launch.split(",") if item)}
    except ValueError as error:
        raise UserError(f"--launch {launch} is not of the form key=number,key=number") from error
    if own:
        options = {"NEIGHBOURS": 16} | own
        plain, pipelined = dict.fromkeys(plain, options), dict.fromkeys(pipelined, options) if "SLOTS" in own else {}
    optimizer_launch.LAUNCH, optimizer_launch.PIPELINED = plain, pipelined
