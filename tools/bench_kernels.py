"""Times the expert GEMMs and the quantise kernels on one GPU: `python -m tools.bench kernels`.

Each case draws fresh random rows for its groups. Medians over rounds in which all candidates take turns, a cold L2 before each run.
BF16 is torch's F.grouped_mm on the same padded groups in the same run. TFLOP/s by real rows and by padded rows are both named; the
roofline takes the larger of FLOPs over the FP8 peak and bytes (operands once, output once, or read and written when it accumulates)
over this run's copy rate. Quantise kernels are given as bytes read and written per second over that copy rate.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F

from fp8.grouped_gemm import Groups, grouped_gemm_nt, grouped_wgrad, make_groups
from fp8.quantize import quantize, quantize_both, quantize_t, requantize_t, retile_t, transpose
from fp8.recipe import Spec
from tools.arguments import add_out, at_least, make_parser, write_json
from tools.output import need_gpu
from tools.roofline import PEAK
from training.errors import UserError

ROW, BLOCKS = Spec("e4m3", (1, 128), "block"), Spec("e4m3", (128, 128), "block")
TOP_K = 8
WEIGHTS = ((1024, 2048), (2048, 512))  # (N, K) of Ling-mini's two expert GEMMs


@dataclass
class Result:
    """One kernel on one case. Times in microseconds, rates in TFLOP/s (GEMMs) or shares (quantise: of the copy rate)."""

    case: str
    kernel: str
    us: float
    tflops_real: float = 0.0
    tflops_padded: float = 0.0
    over_bf16: float = 0.0
    roofline: float = 0.0


class Timer:
    """Median device time of several functions that take turns, each after a 256 MB flush of L2."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def __call__(self, candidates: dict[str, Callable[[], object]]) -> dict[str, float]:
        for fn in candidates.values():
            fn()
        events = {name: [] for name in candidates}
        for _ in range(self.rounds):
            for name, fn in candidates.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self.flush.zero_()
                torch.cuda._sleep(300_000)  # keeps the device busy until the host has queued the launch
                start.record()
                fn()
                end.record()
                events[name].append((start, end))
        torch.cuda.synchronize()
        return {name: 1e3 * statistics.median(s.elapsed_time(e) for s, e in pairs) for name, pairs in events.items()}


def read_routing(paths: list[Path]) -> dict[int, list[int]]:
    """{number of experts: tokens of each} from runs' metrics.jsonl: the last step logged, the layer of median imbalance.

    Raises:
        UserError: a file holds no such tables.
    """
    found = {}
    for path in paths:
        try:
            tables = [json.loads(line).get("detail", {}).get("load") for line in path.read_text().splitlines()]
            layers = sorted([t for t in tables if t][-1].values(), key=lambda counts: max(counts) / sum(counts))
        except (OSError, ValueError, IndexError) as error:
            raise UserError(f"--routing {path} has no expert loads of a run: {error}") from error
        found[len(layers[0])] = layers[len(layers) // 2]
    return found


def draw_counts(num_experts: int, num_rows: int, kind: str, routing: dict[int, list[int]]) -> list[int]:
    """Rows of each expert. even: uniform in 0.6-1.4 of the mean; skewed: lognormal, sigma 1, some experts empty; routed: as a
    trained router spread its tokens (`routing`)."""
    generator = torch.Generator().manual_seed(num_experts + num_rows)
    if kind == "routed":
        share = torch.tensor(routing[num_experts], dtype=torch.float64)
    elif kind == "even":
        share = 0.6 + 0.8 * torch.rand(num_experts, generator=generator)
    else:
        share = torch.exp(torch.randn(num_experts, generator=generator))
        share[torch.rand(num_experts, generator=generator) < 0.05] = 0
    counts = (share / share.sum() * num_rows).floor().to(torch.int64)
    counts[share.argmax()] += num_rows - counts.sum()
    return counts.tolist()


def grouped_randn(groups: Groups, cols: int) -> torch.Tensor:
    """BF16 [R, cols]: random in real rows, zero in padding rows and past the end."""
    x = torch.randn(groups.max_rows, cols, device="cuda", dtype=torch.bfloat16)
    row = torch.arange(groups.max_rows, device="cuda", dtype=torch.int32)
    expert = groups.block_expert_B.repeat_interleave(128).long()
    real = (expert >= 0) & (row - groups.starts_E[expert] < groups.counts_E[expert])
    return x.mul_(real[:, None])


def gemm_candidates(groups: Groups, n: int, k: int) -> tuple[dict[str, Callable], dict[str, Callable]]:
    """(ours, BF16 baselines) of one weight shape; a baseline is named by the operation it answers for."""
    experts = groups.num_experts
    x, dy = grouped_randn(groups, k), grouped_randn(groups, n)
    w = torch.randn(experts, n, k, device="cuda", dtype=torch.bfloat16)
    x_q, w_q, dy_q = quantize(x, ROW), quantize(w, BLOCKS), quantize(dy, ROW)
    w_t, dy_t, x_t = transpose(w_q), quantize_t(dy, ROW), requantize_t(x_q)
    out16, out32 = torch.zeros_like(w), torch.zeros(experts, n, k, device="cuda")
    ends = groups.ends_E
    ours = {
        "fprop": lambda: grouped_gemm_nt(x_q, w_q, groups),
        "dgrad": lambda: grouped_gemm_nt(dy_q, w_t, groups),
        "wgrad write bf16": lambda: grouped_wgrad(dy_t, x_t, groups, out16, False),
        "wgrad add bf16": lambda: grouped_wgrad(dy_t, x_t, groups, out16, True),
        "wgrad write fp32": lambda: grouped_wgrad(dy_t, x_t, groups, out32, False),
        "wgrad add fp32": lambda: grouped_wgrad(dy_t, x_t, groups, out32, True),
    }
    baselines = {
        "fprop": lambda: F.grouped_mm(x, w.transpose(1, 2), offs=ends),
        "dgrad": lambda: F.grouped_mm(dy, w, offs=ends),
        "wgrad": lambda: F.grouped_mm(dy.t(), x, offs=ends),
    }
    return ours, baselines


def floor_seconds(kernel: str, rows: int, experts: int, n: int, k: int, copy_rate: float) -> float:
    """The larger of FLOPs over peak and bytes over the copy rate."""
    operands = rows * (n + k)
    weight = experts * n * k
    moved = {
        "fprop": rows * k + weight + 2 * rows * n,
        "dgrad": rows * n + weight + 2 * rows * k,
        "wgrad write bf16": operands + 2 * weight,
        "wgrad add bf16": operands + 4 * weight,
        "wgrad write fp32": operands + 4 * weight,
        "wgrad add fp32": operands + 8 * weight,
    }[kernel]
    return max(2.0 * rows * n * k / PEAK[True], moved / copy_rate)


def bench_gemms(timer: Timer, counts: list[int], case: str, n: int, k: int, copy_rate: float) -> list[Result]:
    """All GEMMs of one weight shape over one draw of groups (`counts`: rows of each expert)."""
    experts = len(counts)
    padded = sum(-(-c // 128) * 128 for c in counts)
    groups = make_groups(torch.tensor(counts, device="cuda"), padded)
    ours, baselines = gemm_candidates(groups, n, k)
    times = timer({**ours, **{f"bf16 {name}": fn for name, fn in baselines.items()}})
    results = []
    for name, us in times.items():
        flops = 2.0 * n * k / us / 1e6
        result = Result(case, name, us, flops * sum(counts), flops * padded)
        if name in ours:
            result.over_bf16 = times["bf16 " + name.split()[0]] / us
            result.roofline = floor_seconds(name, padded, experts, n, k, copy_rate) * 1e6 / us
        results.append(result)
    return results


def bench_quantise(timer: Timer, rows: int, cols: int, experts: int, copy_rate: float) -> list[Result]:
    """Quantise kernels on [rows, cols] and on the weights [experts, 1024, 2048]; `roofline` is the share of the copy rate."""
    x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(experts, 1024, 2048, device="cuda")
    x_q, w_q = quantize(x, ROW), quantize(w, BLOCKS)
    elements, weights = rows * cols, w.numel()
    scales = elements // 128 * 4
    work = {
        "quantize rows": (lambda: quantize(x, ROW), 3 * elements + scales),
        "quantize_t": (lambda: quantize_t(x, ROW), 3 * elements + scales),
        "quantize_both": (lambda: quantize_both(x, ROW), 4 * elements + 2 * scales),
        "retile_t": (lambda: retile_t(x_q, ROW), 2 * elements + 2 * scales),
        "requantize_t": (lambda: requantize_t(x_q), 2 * elements + scales),
        "weight quantize (fp32)": (lambda: quantize(w, BLOCKS), 5 * weights),
        "weight transpose": (lambda: transpose(w_q), 2 * weights),
    }
    times = timer({name: fn for name, (fn, _) in work.items()})
    case = f"R{rows} C{cols}"
    return [Result(case, name, us, roofline=work[name][1] / us * 1e6 / copy_rate) for name, us in times.items()]


def measure_copy(timer: Timer) -> float:
    """Bytes per second, read plus written, of a 2 GiB device copy."""
    src = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_()
    dst = torch.empty_like(src)
    return 2 * src.numel() / timer({"copy": lambda: dst.copy_(src)})["copy"] * 1e6


def print_rows(results: list[Result]) -> None:
    """One line a result; GEMM columns are empty for quantise kernels."""
    for r in results:
        rates = f"{r.tflops_real:6.0f} {r.tflops_padded:6.0f}" if r.tflops_real else " " * 13
        ratio = f"{r.over_bf16:6.2f}" if r.over_bf16 else " " * 6
        print(f"{r.case:34} {r.kernel:24} {r.us:8.1f} {rates} {ratio} {r.roofline:5.2f}")


def main(argv: list[str]) -> None:
    parser = make_parser("bench kernels", __doc__)
    parser.add_argument("--experts", type=at_least(1), nargs="+", default=[256, 64, 32], help="numbers of experts")
    parser.add_argument("--tokens", type=at_least(1), nargs="+", default=[4096, 16384, 65536], help="each goes to 8 experts")
    kinds = ["even", "skewed", "routed"]
    parser.add_argument("--groups", nargs="+", default=kinds[:2], choices=kinds, help="how rows spread over the experts")
    parser.add_argument("--routing", type=Path, nargs="+", default=[], help="metrics.jsonl of runs, for --groups routed")
    parser.add_argument("--rounds", type=at_least(1), default=10, help="of which the median counts")
    add_out(parser)
    args = parser.parse_args(argv)
    need_gpu("tools.bench kernels")
    routing = read_routing(args.routing)
    if "routed" in args.groups and (missing := [n for n in args.experts if n not in routing]):
        raise UserError(f"--groups routed needs --routing with the metrics of runs with {', '.join(map(str, missing))} experts")
    torch.manual_seed(0)
    timer = Timer(args.rounds)
    copy_rate = measure_copy(timer)
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, copy {copy_rate / 1e12:.2f} TB/s; TFLOP/s by real and by padded rows")
    print(f"{'case':34} {'kernel':24} {'us':>8} {'real':>6} {'padded':>6} {'/bf16':>6} {'roof':>5}")
    results = bench_quantise(timer, 147456, 2048, 256, copy_rate)
    print_rows(results)
    for experts, tokens, kind in product(args.experts, args.tokens, args.groups):
        counts = draw_counts(experts, tokens * TOP_K, kind, routing)
        for n, k in WEIGHTS:
            case = bench_gemms(timer, counts, f"E{experts} T{tokens} {kind} N{n} K{k}", n, k, copy_rate)
            print_rows(case)
            results += case
            torch.cuda.empty_cache()
    report = {"device": name, "torch": torch.__version__, "copy_bytes_per_s": copy_rate}
    write_json(args.out, {**report, "results": [asdict(r) for r in results]})
