"""Whole optimizer steps by phase, FP8 against BF16 one after the other: `python -m tools.bench step`, on one GPU or under torchrun.

The model is a config file's (`--config configs/small.yaml`) or Ling-mini cut to `--layers` MoE layers; random tokens as skewed as
text, clipping. Each recipe runs `--steps` steps after warm-up; medians by CUDA events, of the ranks the slowest's. "roofline": the
share that the products' least time (tools/roofline.py; one GPU, a rank's part of the tokens) has of forward and backward, on a GPU.
`--profile DIR` also saves a trace of one more step and the kernels' shares.

Under torchrun each of `--layouts` runs in turn: `solo` (every GPU for itself, what one GPU does), or keys of the configuration's
`parallel` section: `ep=2`, `ep=1,zero=1,grad_wire=fp8`. The batch of a rank is the same in all. Then two more steps are timed
collective by collective: what compute has not hidden. With `--mirror 2` one GPU does what a rank of two does, but the wire.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fp8.optimizer import PRESETS
from fp8.recipe import Recipe
from fp8.transposed import keep_transposes
from fp8.weight import weights
from model.config import ModelConfig
from model.counts import flops_per_token
from model.loss import NumValid, count_valid
from model.transformer import Transformer, initial_values
from parallel.collectives import all_reduce
from parallel.grad_auto_scale import attach_auto_scale
from parallel.mesh import Mesh, close_mesh
from parallel.sharded_optimizer import make_optimizer, make_reducer
from tools.arguments import (
    RECIPES_HELP,
    STAGES,
    add_out,
    at_least,
    contender,
    make_parser,
    model_of,
    possible,
    recipe_of,
    write_json,
)
from tools.bench_layer import GRADS, print_kernels, profile
from tools.bench_layouts import layout_named, refuse_impossible, route_evenly, traffic_of
from tools.bench_mirror import mirrored
from tools.output import need_gpu, shown
from tools.roofline import copy_rate, step_share
from training.config import ParallelConfig
from training.errors import UserError
from training.graph import GraphedMicroBatch

PHASES = ("forward", "backward", "clip", "optimizer")  # "clip": until gradients are summed and their norm is known
GRAPHED = ("fwd+bwd", *PHASES[2:])  # with --graph
ADAMW = (0.9, 0.95, 1e-8, 0.1)


@dataclass(frozen=True)
class Work:
    """What every layout does: the model, and one rank's batch.

    Attributes:
        parts: micro-batches of `batch` sequences in a step.
        grad: format of the gradients of matrices. states: of the optimizer.
    """

    config: ModelConfig
    stage: int
    batch: int
    seq: int
    parts: int
    grad: str
    states: str
    graph: bool


class Stepper:
    """A model, its optimizer, and one micro-batch of random tokens."""

    def __init__(self, work: Work, recipe: Recipe, mesh: Mesh, parallel: ParallelConfig, device: torch.device) -> None:
        self.mesh, self.device, self.parts = mesh, device, work.parts
        with torch.device(device):
            self.model = Transformer(work.config, recipe, mesh, torch.bfloat16, work.stage)
        for _, weight in weights(self.model):
            if weight.data.dtype != torch.float32:  # norms and router keep FP32 gradients
                weight.grad_dtype = GRADS[work.grad]
        attach_auto_scale(self.model, mesh, parallel.grad_wire)
        sharding = parallel.zero, parallel.zero_partition, parallel.overlap_gather
        self.optimizer = make_optimizer(self.model, mesh, *sharding, *ADAMW, PRESETS[work.states])
        for name, _, value in initial_values(self.model, seed=0):
            self.optimizer.set_master(name, value)
        named, mu = list(weights(self.model)), getattr(self.model, "grad_scale", None)
        self.weights = [weight for _, weight in named]
        self.reducer = make_reducer(named, mesh, self.optimizer, parallel.grad_wire, zero=parallel.zero, auto=mu)
        generator = torch.Generator(device).manual_seed(mesh.dp.rank)
        skewed = torch.rand(work.batch, work.seq + 1, device=device, generator=generator) ** 3  # as uneven as text
        data = (skewed * work.config.vocab_size).long()
        self.tokens, self.labels = data[:, :-1].contiguous(), data[:, 1:].contiguous()
        own = count_valid(self.tokens, self.labels)
        total = work.parts * torch.stack([own.ce, own.mtp, own.tokens])
        self.num_valid = NumValid(*all_reduce(total, mesh.dp, "counts"))
        self.graphed = GraphedMicroBatch(self.model, mesh, collectives=True) if work.graph else None

    def __call__(self) -> tuple[Tensor, list[torch.cuda.Event | float]]:
        """One step without a host synchronisation of its own: (loss of the last micro-batch, the times between its phases)."""
        forward, times = [], [self._now()]
        for part in range(self.parts):
            for weight in self.weights:
                weight.last_microbatch = part == self.parts - 1
            if self.graphed is not None:  # and backward, in the same launch
                self.optimizer.settle()
                losses = self.graphed(self.tokens, self.labels, self.num_valid)
                continue
            begin = self._now()
            losses = self.model(self.tokens, self.labels, self.num_valid)
            forward.append((begin, self._now()))
            losses.total.backward()
            if self.reducer.each_microbatch and part < self.parts - 1:
                self.reducer.finish(last=False)
        times.append(self._now())
        self.reducer.finish()
        norm = self.reducer.norm()
        scale = (1.0 / norm).clamp(max=1.0)
        times.append(self._now())
        self.optimizer.step(1e-4, scale)
        times.append(self._now())
        return losses.total.detach() * (self.parts * self.mesh.dp.size), [forward, *times]

    def capture_again(self) -> None:
        """As a graph that notes when it waits for a collective."""
        self.graphed = None
        self.graphed, self.mesh.traffic.times_graphs = GraphedMicroBatch(self.model, self.mesh, collectives=True), True
        for _ in range(3):
            self()

    def _now(self) -> torch.cuda.Event | float:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def between(a: torch.cuda.Event | float, b: torch.cuda.Event | float) -> float:
    """Milliseconds."""
    return 1e3 * (b - a) if isinstance(a, float) else a.elapsed_time(b)


def split(times: list) -> list[float]:
    """Milliseconds by phase: of `PHASES`, or of `GRAPHED` where forward and backward were one launch and left no times between."""
    forward, start, ready, reduced, end = times
    both, rest = between(start, ready), [between(ready, reduced), between(reduced, end)]
    ahead = sum(between(a, b) for a, b in forward)
    return [ahead, both - ahead, *rest] if forward else [both, *rest]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(stepper: Stepper, steps: int) -> dict[str, object]:
    """Median ms of each phase and of the step (the slowest rank's), and the losses' ends."""
    losses, rows, mesh = [], [], stepper.mesh
    for i in range(steps + 4):
        loss, times = stepper()
        wait(stepper.device)
        losses.append(loss.item())
        if i >= 4:  # two eager steps and a capture with --graph
            rows.append(split(times))
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    medians.append(statistics.median(sum(row) for row in rows))
    slowest = all_reduce(torch.tensor(medians), mesh.world, "bench", "max").tolist()
    result: dict[str, object] = dict(zip((*(GRAPHED if stepper.graphed else PHASES), "ms"), slowest, strict=True))
    return result | {"first_loss": losses[0], "last_loss": losses[-1]}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("bench step", __doc__)
    parser.add_argument("--config", help="a run's config file: its model is taken, nothing else; without a GPU it is needed")
    parser.add_argument("--layers", type=at_least(1), default=6, help="without --config: of Ling-mini, all of them MoE layers")
    parser.add_argument("--batch", type=at_least(1), help="sequences of a micro-batch; 4, without a GPU 1")
    parser.add_argument("--seq", type=at_least(1), help="tokens of a sequence; 4096, without a GPU 128")
    parser.add_argument("--parts", type=at_least(1), default=1, help="micro-batches a step")
    parser.add_argument("--steps", type=at_least(1), default=8, help="that are measured")
    parser.add_argument("--stage", type=int, choices=STAGES, default=0, help="of activations (fp8.activations)")
    parser.add_argument("--grad", choices=GRADS, default="fp32", help="format of the gradients of matrices")
    parser.add_argument("--states", choices=PRESETS, default="fp32", help="optim.states")
    parser.add_argument("--routing", choices=["own", "even"], default="own", help="even: as of a balanced router")
    parser.add_argument("--graph", action="store_true", help="forward and backward as one CUDA graph, timed together; not with tp")
    parser.add_argument("--recipes", type=contender, nargs="+", default=["block", "bf16"], help=RECIPES_HELP)
    parser.add_argument("--layouts", nargs="+", default=["solo"], help="solo, or keys of the parallel section: ep=2,zero=1")
    parser.add_argument("--mirror", type=at_least(2), default=0, help="ranks, of which one GPU plays one (bench_mirror.py)")
    parser.add_argument("--chunk", type=at_least(1), help="tokens whose logits exist at once; 4096, without a GPU the model's own")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="folder for a trace of one more step")
    add_out(parser)
    return parser.parse_args(argv)


def understood(args: argparse.Namespace) -> Work:
    """What `args` ask for on this machine, sizes that they leave open chosen. Raises UserError for what cannot run here."""
    on_gpu = torch.cuda.is_available()
    if args.graph:
        need_gpu("--graph")
    if not on_gpu and not args.config:
        need_gpu("tools.bench step with layers of Ling-mini (another model: --config configs/tiny.yaml)")
    config = model_of(args.config) if args.config else ModelConfig(num_hidden_layers=args.layers, first_k_dense_replace=0)
    config = possible(replace(config, loss_chunk=args.chunk or (4096 if on_gpu else config.loss_chunk)))
    batch, seq = args.batch or (4 if on_gpu else 1), args.seq or (4096 if on_gpu else 128)
    fp8 = any(recipe_of(name)[0].is_fp8 for name in args.recipes)
    if fp8 and (problems := config.fp8_problems(1)):
        raise UserError("; ".join(problems))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if args.mirror and (world > 1 or set(args.layouts) == {"solo"}):
        raise UserError("--mirror is for one process, and for a rank of a layout that --layouts names, such as ep=2")
    for layout in args.layouts:
        limits = dict(tokens=batch * seq, fp8=fp8, mirror=bool(args.mirror), graph=args.graph)
        refuse_impossible(layout, args.mirror or world, config, **limits)
    return Work(config, args.stage, batch, seq, args.parts, args.grad, args.states, args.graph)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    work = understood(args)
    if args.routing == "even":
        route_evenly(work.config.num_experts)
    device, speaks = torch.device("cpu"), os.environ.get("RANK", "0") == "0"
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if speaks:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        print(f"{name}, {work.config.num_hidden_layers} layers, {work.parts} x {work.batch} x {work.seq} tokens a rank and step")
        columns = f"{'tokens/s':>11}{'TFLOP/s':>9}{'roofline':>10}{'GiB':>8}"
        phases = GRAPHED if work.graph else PHASES
        print(f"{'recipe':<12}" + "".join(f"{p:>11}" for p in (*phases, "ms")) + columns)
    rate, results = copy_rate() if device.type == "cuda" else 0.0, []
    with mirrored() if args.mirror else nullcontext():
        for layout in args.layouts:
            for name in args.recipes:
                results.append(run(work, layout, name, device, rate, args, speaks))
                gc.collect()
                torch.cuda.empty_cache()
    close_mesh()
    if speaks:
        write_json(args.out, results)


def run(
    work: Work, layout: str, name: str, device: torch.device, rate: float, args: argparse.Namespace, speaks: bool
) -> dict[str, object]:
    """One layout and recipe: measured, printed by the first rank. `rate`: of a copy, 0 where there is no GPU."""
    phases = GRAPHED if work.graph else PHASES
    mesh, parallel = layout_named(layout, device, args.mirror)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    recipe, kept = recipe_of(name)
    stepper = Stepper(work, recipe, mesh, parallel, device)
    if kept:
        keep_transposes(stepper.weights)
    row: dict[str, object] = {"layout": layout, "recipe": name} | measure(stepper, args.steps)
    tokens = work.parts * work.batch * work.seq * mesh.dp.size
    flops = flops_per_token(work.config, work.seq) * tokens / mesh.world.size
    row |= {"tokens_per_s": tokens / row["ms"] * 1e3, "tflops": flops / row["ms"] / 1e9}
    share = work.parts, tokens // work.parts // mesh.world.size  # a rank's: micro-batches, tokens of one
    row["roofline"] = step_share(work.config, *share, work.seq, recipe.is_fp8, sum(row[p] for p in phases[:-2]), rate)
    row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    if speaks:
        print(f"{name:<12}" + "".join(f"{row[p]:11.2f}" for p in (*phases, "ms")), end="")
        of_gpu = shown(row["roofline"], "10.0%") + shown(row["peak_gib"], "8.1f")
        print(f"{row['tokens_per_s']:11.0f}{row['tflops']:9.1f}{of_gpu}", end="")
        print(f"   {layout}   loss {row['first_loss']:.3f} -> {row['last_loss']:.3f}", flush=True)
    if mesh.world.size > 1:
        row |= traffic_of(stepper)
        if speaks:
            exposed = " ".join(f"{kind} {ms:.2f}" for kind, ms in row["exposed_ms"].items())
            sent = " ".join(f"{kind} {mb:.0f}" for kind, mb in row["sent_mb"].items())
            print(f"         waited for, ms a step: {exposed}; sent by a rank, MB a step: {sent}", end="")
            print(f"; rows of the busiest rank {row['busiest']:.2f} of the mean", flush=True)
    if args.profile:
        row |= profile(stepper, args.profile, f"step-{name}-{layout}-rank{mesh.world.rank}")
        if speaks:
            print(f"    busy {row['busy_ms']:.3f} ms in {row['launches']} launches")
            print_kernels(row, 24)
    return row
