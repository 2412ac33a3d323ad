"""Parts of a layer, forward and backward, FP8 against BF16 in the same run: `python -m tools.bench layer`.

Each part runs alone on random tokens, with the routing that random weights give, gradients of weights written (not added).
Times are medians over alternating rounds, by CUDA events; "graph" is the sum once more as one CUDA graph, so without gaps between
launches, "roofline" the share that tools/roofline.py's least time has of it. `--profile DIR` also saves a trace and the kernels'
shares of each part. A recipe's `+kept` (`--recipes block block+kept bf16`) is fp8.keep_transposed: weights are turned outside of
what is timed, as in a step of many micro-batches.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from fp8.transposed import keep_transposes, refresh_transposes
from fp8.weight import Weight, weights
from model.attention import Context
from model.config import ModelConfig
from model.transformer import Transformer, initial_values
from parallel.mesh import Mesh
from tools.arguments import (
    RECIPES_HELP,
    STAGES,
    add_out,
    at_least,
    contender,
    make_parser,
    possible,
    recipe_of,
    refuse_repeated,
    write_json,
)
from tools.output import need_gpu
from tools.roofline import copy_rate, part_seconds

Run = Callable[[], Tensor]  # forward; returns what backward starts from
GRADS = {"fp32": torch.float32, "bf16": torch.bfloat16}  # of matrices
PARTS = ("attention", "dense", "moe", "layer", "head")


def build(config: ModelConfig, name: str, stage: int, grad: torch.dtype) -> Transformer:
    """A model on the GPU with its initial values, without optimizer; `name` as for `recipe_of`, `grad` of matrices."""
    recipe, kept = recipe_of(name)
    with torch.device("cuda"):
        model = Transformer(config, recipe, Mesh.solo(), torch.bfloat16, stage)
    if kept:
        keep_transposes(weight for _, weight in weights(model))
    for _, weight, value in initial_values(model, seed=0):
        weight.set_(value)
        if weight.data.dtype != torch.float32:  # norms and router keep FP32 gradients
            weight.grad_dtype = grad
    return model


def context(model: Transformer, batch: int, seq_len: int) -> Context:
    """What the layers of one forward share."""
    tokens = torch.zeros(batch, seq_len, dtype=torch.int64, device="cuda")
    count = torch.tensor(tokens.numel(), device="cuda")
    return model._context(tokens, None, cu_seqlens=None, max_seqlen=0, num_tokens=count, cache=None)


def part(model: Transformer, name: str, batch: int, seq_len: int) -> tuple[Run, Tensor]:
    """(forward of one part, the gradient of its output). Layer 0 is dense, layer 1 a MoE layer."""
    c, ctx, rows = model.config, context(model, batch, seq_len), batch * seq_len
    h = torch.randn(rows, c.hidden_size, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn(rows, c.hidden_size, device="cuda").bfloat16() * 1e-3

    def fresh() -> Tensor:
        h.grad = None
        return h

    if name == "head":
        labels = torch.randint(0, c.vocab_size, (batch, seq_len), device="cuda")
        scale = torch.tensor(1.0 / rows, device="cuda")
        one = torch.ones((), device="cuda")
        return lambda: model._loss(model._head_input(fresh(), model.norm, "norm"), labels, scale)[0], one
    dense, moe = model.layers[0], model.layers[1]
    runs: dict[str, Run] = {
        "attention": lambda: moe.attention(fresh(), ctx),
        "dense": lambda: dense.block(fresh(), ctx)[0],
        "moe": lambda: moe.block(fresh(), ctx)[0],
        "layer": lambda: moe(fresh(), ctx)[0],
    }
    return runs[name], dy


def fresh_step(model: nn.Module) -> None:
    """As an optimizer step leaves the weights: no gradients; kept transposes are turned again, outside of what is timed."""
    every: list[Weight] = [weight for _, weight in weights(model)]
    for weight in every:
        weight.note_written()
        weight.clear_grad()
    refresh_transposes(every)


def once(model: nn.Module, run: Run, dy: Tensor) -> tuple[float, float, float]:
    """(forward ms, backward ms, both)."""
    fresh_step(model)
    start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda.synchronize()
    start.record()
    y = run()
    middle.record()
    y.backward(dy)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(middle), middle.elapsed_time(end), start.elapsed_time(end)


def graphed(model: nn.Module, run: Run, dy: Tensor, rounds: int) -> float:
    """Median ms of forward and backward as one CUDA graph: the GPU's time without the host's."""
    fresh_step(model)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run().backward(dy)
    times = []
    for _ in range(rounds + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:])


def profile(run: Callable[[], object], folder: Path, name: str, top: int = 40) -> dict[str, object]:
    """One profiled call: a trace in `folder`, and {busy_ms, launches, kernels: name -> [ms, calls]} of the GPU, if there is one."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as prof:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    folder.mkdir(parents=True, exist_ok=True)
    prof.export_chrome_trace(str(folder / f"{name}.json.gz"))
    kernels: dict[str, list[float]] = {}
    for event in prof.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            entry = kernels.setdefault(event.name[:90], [0.0, 0])
            entry[0] += event.device_time / 1e3
            entry[1] += 1
    ranked = dict(sorted(kernels.items(), key=lambda item: -item[1][0]))
    busy, launches = sum(v[0] for v in ranked.values()), sum(v[1] for v in ranked.values())
    return {"busy_ms": busy, "launches": launches, "kernels": dict(list(ranked.items())[:top])}


def print_kernels(result: dict[str, object], limit: int = 14) -> None:
    """The kernels that take most, one a line."""
    for name, (ms, calls) in list(result["kernels"].items())[:limit]:
        print(f"    {ms:8.3f} ms {calls:4d} x  {name[:84]}")


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("bench layer", __doc__)
    parser.add_argument("--batch", type=at_least(1), default=4, help="sequences")
    parser.add_argument("--seq", type=at_least(1), default=4096, help="tokens of a sequence")
    parser.add_argument("--rounds", type=at_least(1), default=7, help="of which the median counts")
    parser.add_argument("--stage", type=int, choices=STAGES, default=0, help="of activations (fp8.activations)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what is measured, in turn")
    parser.add_argument("--recipes", type=contender, nargs="+", default=["block", "bf16"], help=RECIPES_HELP)
    parser.add_argument("--grad", choices=GRADS, default="fp32", help="format of the gradients of matrices")
    parser.add_argument("--chunk", type=at_least(1), default=4096, help="tokens whose logits exist at once")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="folder for a trace of each part; prints its kernels' shares")
    add_out(parser)
    args = parser.parse_args(argv)
    need_gpu("tools.bench layer")
    refuse_repeated("--recipes", args.recipes)
    config = possible(ModelConfig(num_hidden_layers=2, loss_chunk=args.chunk))
    models = {name: build(config, name, args.stage, GRADS[args.grad]) for name in args.recipes}
    results: list[dict[str, object]] = []
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, {args.batch} x {args.seq} tokens, copy {rate / 1e12:.2f} TB/s")
    print(f"{'part':<12}{'recipe':<12}{'fwd ms':>9}{'bwd ms':>9}{'sum':>9}{'graph':>9}{'roofline':>10}")
    for name in args.parts:
        runs = {recipe: part(model, name, args.batch, args.seq) for recipe, model in models.items()}
        times: dict[str, list[tuple[float, float, float]]] = {recipe: [] for recipe in models}
        for i in range(args.rounds + 2):
            for recipe, model in models.items():
                measured = once(model, *runs[recipe])
                if i >= 2:
                    times[recipe].append(measured)
        for recipe, model in models.items():
            forward, backward, total = (statistics.median(column) for column in zip(*times[recipe], strict=True))
            replayed = graphed(model, *runs[recipe], args.rounds)
            fp8 = recipe_of(recipe)[0].is_fp8
            floor = 1e3 * part_seconds(config, name, args.batch * args.seq, args.seq, fp8, rate, GRADS[args.grad].itemsize)
            print(f"{name:<12}{recipe:<12}{forward:9.3f}{backward:9.3f}{total:9.3f}{replayed:9.3f}{floor / replayed:10.0%}")
            row: dict[str, object] = {
                "part": name,
                "recipe": recipe,
                "grad": args.grad,
                "forward_ms": forward,
                "backward_ms": backward,
                "ms": total,
            }
            row |= {"graph_ms": replayed, "roofline": floor / replayed}
            if args.profile:
                row |= profile(lambda: once(model, *runs[recipe]), args.profile, f"{name}-{recipe}")  # noqa: B023
                print(f"    busy {row['busy_ms']:.3f} ms in {row['launches']} launches")
                print_kernels(row)
            results.append(row)
        runs.clear()
        for model in models.values():
            for _, weight in weights(model):
                weight.main_grad = None
    write_json(args.out, results)
