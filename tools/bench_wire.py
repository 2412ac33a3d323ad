"""What travels between ranks, measured: `torchrun --nproc-per-node 2 -m tools.bench comm`; on a machine without GPUs over gloo.

Four times for each leg and format, of the slowest rank, medians:

    wire     the collective alone, on bytes that are packed already
    no casts packing, collective, unpacking to where the bytes are used
    whole    with quantisation before and dequantisation after, where the leg has them; what a model waits for
    graph    the same, replayed as a CUDA graph, as train.py does; launched one by one, short legs take as long as the host does.
             Not where the host reads counts, and not for gradients and weights, which leave after the graph

"dispatch x" is the forward's first trip, with whatever precedes it; "dispatch dY" is the backward's, along the same plan; "combine"
serves y forward and dX backward. "counted": the same with parallel.dispatch=counted, where "counts" are exchanged and read first.

Shapes: T tokens a rank, D features, E experts, k experts a token, n ranks, F parameters.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp8.permute import unpermute_sum
from fp8.quantize import quantize
from fp8.quantized import Quantized
from fp8.recipe import BLOCK, Recipe
from fp8.route import select_experts
from fp8.weight import Weight
from model.config import ModelConfig
from parallel.collectives import all_gather, all_reduce, all_to_all
from parallel.combine import combine_rows
from parallel.dispatch import DispatchPlan, dispatch, send_tokens, start_dispatch_rows, start_plan
from parallel.grad_auto_scale import AutoScale, SharedScaleBucket
from parallel.grad_wire import OwnerBucket, even_bounds
from parallel.mesh import Axis, Mesh
from parallel.payload import RowFormat, pack, sum_packed
from parallel.shard import Shards
from tools.output import shown
from training.errors import UserError

ROW = Recipe.block().wire
WIDTH = 2048  # of the matrix whose gradients and rows travel
UNIT = BLOCK * WIDTH  # its parameters in one row of blocks, of which each rank has some
TILE_BYTES = {"fp32": 512, "bf16": 256, "fp8": 132, "fp8_lm": 128}  # of 128 gradients on the wire


@dataclass
class Measured:
    """One leg in one format. Times in microseconds; `size` is tokens or parameters; `nbytes` sent by a rank to others."""

    leg: str
    size: int
    ranks: int
    fmt: str
    nbytes: int
    wire: float
    no_casts: float
    whole: float
    graph: float = 0.0


def check_sizes(args: argparse.Namespace, ranks: Sequence[int], unit: int) -> None:
    """Raises UserError, with all reasons, for sizes that do not divide. `unit`: parameters that a rank has at least."""
    routing = dict(num_experts=args.experts, num_experts_per_tok=args.topk, n_group=args.groups, topk_group=args.topk_groups)
    found = ModelConfig(**routing).problems()
    if args.hidden % BLOCK:
        found.append(f"--hidden {args.hidden} is not a multiple of {BLOCK}")
    for n in ranks:
        if args.experts % n:
            found.append(f"--experts {args.experts} is not a multiple of {n} ranks")
        each = unit * n
        found += [f"--params {size} is not a multiple of {unit} x {n} ranks = {each}" for size in args.params if size % each]
    for tp in args.tp if args.model else ():
        found += [f"--tokens {tokens} is not a multiple of --tp {tp}" for tokens in args.tokens if tokens % tp]
    if found:
        raise UserError("; ".join(found))


class WireTimer:
    """Median microseconds of a call that all ranks make together, and of the ranks the slowest's."""

    def __init__(self, rounds: int, axis: Axis, device: torch.device) -> None:
        self.rounds, self.axis, self.device = rounds, axis, device
        self.flush = torch.empty(256 << 20 if device.type == "cuda" else 1, dtype=torch.uint8, device=device)
        self.one = torch.zeros(1, device=device)

    def __call__(self, call: Callable[[], object]) -> float:
        for _ in range(2):
            call()
        found = [self._on_gpu(call) if self.device.type == "cuda" else self._on_cpu(call) for _ in range(self.rounds)]
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            found = [1e3 * a.elapsed_time(b) for a, b in found]
        median = torch.tensor([statistics.median(found)], device=self.device)
        return all_reduce(median, self.axis, "bench", "max").item()

    def replayed(self, call: Callable[[], object]) -> float:
        """As a CUDA graph; 0 on a CPU."""
        if self.device.type != "cuda":
            return 0.0
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            kept = call()  # alive, so that its parts do not share memory
        found = self(graph.replay)
        del kept, graph
        return found

    def _on_gpu(self, call: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        torch.cuda._sleep(1_000_000)  # keeps the device busy until the host has queued the call
        all_reduce(self.one, self.axis, "bench")  # ranks begin together
        start.record()
        call()
        end.record()
        return start, end

    def _on_cpu(self, call: Callable[[], object]) -> float:
        all_reduce(self.one, self.axis, "bench")
        began = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - began)


def sent_by(axis: Axis, call: Callable[[], object]) -> int:
    """Bytes that a call sends."""
    axis.traffic.reset()
    call()
    return sum(axis.traffic.sent.values())


def token_legs(args: argparse.Namespace, timer: WireTimer, tokens: int, axis: Axis, device: torch.device) -> list[Measured]:
    """Dispatch and combine through the functions that the model calls; every rank calls it."""
    scores = torch.rand(tokens, args.experts, device=device)
    ids = select_experts(scores, args.groups, args.topk_groups, args.topk)
    weights = torch.rand(tokens, args.topk, device=device)
    x = torch.randn(tokens, args.hidden, device=device, dtype=torch.bfloat16)
    counting = replace(axis, gathers=False)
    leave = lambda q, way: start_plan(ids, args.experts, way, weights, send_tokens(q, way))  # noqa: E731
    legs = [_plan_leg(timer, ids, args.experts, counting)]
    for fmt in ("bf16", "fp8"):
        make = (lambda: quantize(x, ROW)) if fmt == "fp8" else (lambda: Quantized.unscaled(x))
        ready = make()
        rows, _, plan = dispatch(ready, weights, leave(ready, axis))
        counted = dispatch(ready, weights, start_plan(ids, args.experts, counting))[2]
        packed = pack(ready, counted.token_M)
        wire = timer(lambda packed=packed, plan=counted: all_to_all(packed, axis, "bench", plan.send, plan.recv))
        calls = {}
        for name, way, along in [("", axis, plan)] + [(", counted", counting, counted)] * axis.gathers:
            calls[f"dispatch x{name}"] = lambda q, way=way: dispatch(q, weights, leave(q, way))
            calls[f"dispatch dY{name}"] = lambda q, along=along: start_dispatch_rows(q, along)()
        for leg, call in calls.items():
            nbytes = sent_by(axis, lambda call=call, ready=ready: call(ready))
            no_casts = timer(lambda call=call, ready=ready: call(ready))
            made = lambda call=call, make=make: call(make())  # noqa: E731
            whole = timer(made) if fmt == "fp8" else no_casts
            graph = 0.0 if leg == "dispatch x, counted" or not axis.gathers and leg == "dispatch x" else timer.replayed(made)
            legs.append(Measured(leg, tokens, axis.size, fmt, nbytes, wire, no_casts, whole, graph))
        y = torch.randn(rows.shape, device=device, dtype=torch.bfloat16)
        legs.append(_combine_leg(timer, y, plan, fmt))
        del rows, packed, y
    return legs


def _plan_leg(timer: WireTimer, ids: Tensor, experts: int, axis: Axis) -> Measured:
    def until_read() -> None:
        start = start_plan(ids, experts, axis)
        if start.ready is not None:
            start.ready.synchronize()

    nbytes = sent_by(axis, until_read)
    return Measured("counts", len(ids), axis.size, "int64", nbytes, 0.0, 0.0, timer(until_read))


def _combine_leg(timer: WireTimer, y: Tensor, plan: DispatchPlan, fmt: str) -> Measured:
    axis = replace(plan.axis, wire=ROW if fmt == "fp8" else None)
    plan = replace(plan, axis=axis)
    partial = unpermute_sum(y, plan.perm)
    q = quantize(partial, ROW) if fmt == "fp8" else Quantized.unscaled(partial)
    packed = pack(q)
    wire = timer(lambda: all_to_all(packed, axis, "bench", plan.recv, plan.send))
    whole = timer(lambda: combine_rows(y, plan))
    if fmt == "fp8":
        form = RowFormat.of(q)

        def without_casts() -> None:
            unpermute_sum(y, plan.perm)
            sum_packed(all_to_all(packed, axis, "bench", plan.recv, plan.send), form, plan.row_Tn, torch.bfloat16)

        no_casts = timer(without_casts)
    else:
        no_casts = whole
    nbytes, graph = sent_by(axis, lambda: combine_rows(y, plan)), timer.replayed(lambda: combine_rows(y, plan))
    return Measured("combine", len(plan.row_Tn), axis.size, fmt, nbytes, wire, no_casts, whole, graph)


# ---------------------------------------------------------------- gradients and weights over replicas


def gradient_legs(timer: WireTimer, params: int, axis: Axis, device: torch.device) -> list[Measured]:
    """Sums of F gradients for everybody (zero = 0), and for their owners only (zero = 1)."""
    weight = Weight(params // WIDTH, WIDTH, recipe=Recipe.block()).to(device)
    bounds, flat = even_bounds(axis.size, params // 128), torch.randn(params, device=device)
    legs = []
    for fmt, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        on_wire = flat.to(dtype)
        wire = timer(lambda on_wire=on_wire: all_reduce(on_wire, axis, "bench"))
        nbytes = sent_by(axis, lambda on_wire=on_wire: all_reduce(on_wire, axis, "bench"))
        rounded = dtype != torch.float32
        whole = timer(lambda dtype=dtype: flat.copy_(all_reduce(flat.to(dtype), axis, "bench"))) if rounded else wire
        legs.append(Measured("gradients, all", params, axis.size, fmt, nbytes, wire, wire, whole))
    auto = AutoScale(axis.size, device)
    for leg, shared in (("gradients, all", True), ("gradients, owner", False)):
        for fmt in ("fp32", "bf16", "fp8", "fp8_lm"):
            if shared and fmt in ("fp32", "bf16"):
                continue
            weight.main_grad = flat.view(weight.data.shape)
            options = dict(wire="fp8" if fmt == "fp8_lm" else fmt, shared=shared)
            kind = SharedScaleBucket if fmt == "fp8_lm" else OwnerBucket
            bucket = kind(axis, [weight], bounds, **options, **({"auto": auto} if fmt == "fp8_lm" else {}))

            def whole(bucket: OwnerBucket = bucket) -> None:
                bucket.launch()
                bucket.finish()

            row = torch.empty(params // 128, TILE_BYTES[fmt], dtype=torch.uint8, device=device)
            even = [len(row) // axis.size] * axis.size

            def bytes_only(row: Tensor = row, even: list[int] = even, shared: bool = shared) -> None:
                part = all_to_all(row, axis, "bench", even, even)
                if shared:
                    all_gather(part[: even[0]], axis, "bench")

            wire = timer(bytes_only)
            legs.append(Measured(leg, params, axis.size, fmt, sent_by(axis, whole), wire, wire, timer(whole)))
            del row
    return legs


def weight_legs(timer: WireTimer, params: int, mesh: Mesh, device: torch.device) -> list[Measured]:
    """Owners' new rows of a weight to all replicas."""
    legs = []
    for fmt, recipe in (("bf16", Recipe.bf16()), ("fp8", Recipe.block())):
        weight = Weight(params // WIDTH, WIDTH, recipe=recipe).to(device)
        weight.set_(torch.randn(weight.data.shape, device=device))
        shards = Shards([("w", weight)], mesh)
        nbytes = sent_by(mesh.dp, shards.publish)
        own = torch.empty(1, nbytes // max(mesh.dp.size - 1, 1), dtype=torch.uint8, device=device)
        wire = timer(lambda own=own: all_gather(own, mesh.dp, "bench"))
        whole = timer(shards.publish)
        legs.append(Measured("weights", params, mesh.dp.size, fmt, nbytes, wire, whole, whole))
    return legs


def show(legs: list[Measured]) -> None:
    """A table; columns "/first" are over the first format of the same leg and size."""
    heads = ("wire us", "GB/s", "no casts", "whole", "/first", "graph", "/first", "bytes/first")
    print(f"{'leg':20} {'size':>10} {'ranks':>5} {'':6} {'MB sent':>8}" + "".join(f" {head:>11}" for head in heads))
    first: dict[tuple[str, int], Measured] = {}
    for x in legs:
        base = first.setdefault((x.leg, x.size), x)
        rate = x.nbytes / x.wire / 1e3 if x.wire else 0.0
        replayed = (x.graph, x.graph / base.graph) if x.graph and base.graph else (None, None)  # not every leg is captured
        numbers = (x.wire, rate, x.no_casts, x.whole, x.whole / base.whole, *replayed, x.nbytes / max(base.nbytes, 1))
        line = f"{x.leg:20} {x.size:10} {x.ranks:5} {x.fmt:6} {x.nbytes / 1e6:8.1f}"
        print(line + "".join(f" {shown(n, '11.2f')}" for n in numbers))


def measure(args: argparse.Namespace, mesh: Mesh, device: torch.device) -> list[Measured]:
    """All legs that `args` asks for; every rank calls it."""
    timer, legs = WireTimer(args.rounds, mesh.world, device), []
    for tokens in args.tokens:
        legs += token_legs(args, timer, tokens, mesh.ep, device)
    for params in args.params:
        legs += gradient_legs(timer, params, mesh.dp, device) + weight_legs(timer, params, mesh, device)
    return legs
