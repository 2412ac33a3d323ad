"""What a run needs, before any GPU is used: parameters, FLOPs, memory, bytes on the wire, time, and the layouts that fit.

python -m tools.plan --config configs/ling_mini.yaml [--gpus 8] [--gpu h200] [optim.lr=...]
python -m tools.plan --config configs/small.yaml --compare-allocator     builds it on this GPU and checks the forecast
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from fp8.optimizer import PRESETS, States
from fp8.recipe import FORMATS, Recipe
from model.counts import FLOPS_FORMULA, flops_per_token, parameter_counts
from parallel.mesh import close_mesh
from tools.arguments import at_least, make_parser
from tools.plan_layouts import MARGIN, STAGES, Plan, configured, make_plan, planned_memory, remedies, search, states_of
from tools.plan_memory import OVERHEAD_BYTES
from tools.plan_speed import ASSUMPTIONS, GPUS, Gpu
from training.config import Config, load_config
from training.errors import UserError, counted, exit_status
from training.held_bytes import bytes_per_parameter
from training.states import gradient_format

GB = 1e9
STATES = ("whole on every replica", "sharded over replicas (parallel.zero=1)", "sharded, gradients too (parallel.zero=2)")


def _gb(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {value / GB:,.1f}" for name, value in parts.items() if value)


def describe_model(config: Config, states: States) -> list[str]:
    """Counts that need no layout."""
    counts, tokens = parameter_counts(config.model), config.tokens_per_step
    flops = flops_per_token(config.model, config.data.seq_len)
    gradients = FORMATS[gradient_format(config.optim, config.fp8.level)]
    each = bytes_per_parameter(config.model, config.fp8.build(), states, gradients, config.fp8.keep_transposed)
    stored = counts["total"] + counts["mtp"]
    return [
        f"parameters     {counts['total']:,} total, {counts['active']:,} active a token; MTP layer {counts['mtp']:,} more",
        f"FLOPs/token    {flops:.4g} ({FLOPS_FORMULA})",
        f"a step         {tokens:,} tokens in {counted(config.train.global_batch, 'sequence')}, {tokens * flops:.4g} FLOPs",
        "bytes/param    " + " + ".join(f"{v:.3f} {k}" for k, v in each.items()) + f" = {sum(each.values()):.3f}; "
        f"{stored * sum(each.values()) / GB:,.1f} GB over one set of ranks",
    ]


def _on_host(plan: Plan, gpu: Gpu) -> str:
    """All GPUs of a node share its memory."""
    near = min(plan.layout.world, gpu.node)
    each = f"{plan.memory.host / GB:,.1f} a GPU"
    return each if near == 1 else f"{each}, {near * plan.memory.host / GB:,.1f} on a host of {near}"


def _kept_by_stage(config: Config, plan: Plan) -> str:
    found = [planned_memory(config, replace(plan.layout, stage=stage), plan.states).kept for stage in STAGES]
    return ", ".join(f"{sum(kept.values()) / GB:,.1f}" for kept in found)


def _keeping_transposes(plan: Plan, gpu: Gpu, config: Config) -> list[str]:
    """What fp8.keep_transposed would change, where it fits and several micro-batches share a step's weights."""
    other = make_plan(config, replace(plan.layout, keep_transposed=True), gpu, plan.states)
    more, saved = other.memory.peak - plan.memory.peak, plan.speed.expected - other.speed.expected
    if saved <= 0 or not (plan.fits(gpu) and other.fits(gpu)):
        return []
    return [f"               fp8.keep_transposed=true would take {more / GB:,.1f} GB more and {saved * 1e3:,.0f} ms less a step"]


def describe_plan(plan: Plan, gpu: Gpu, config: Config) -> list[str]:
    """Memory, wire and time of one plan."""
    batch = plan.speed.tokens // config.data.seq_len
    m, s, layout = plan.memory, plan.speed, plan.layout
    per_gpu = s.tokens / s.expected / layout.world
    return [
        f"layout         {layout.world} x {gpu.name}: dp {layout.dp} x tp {layout.tp}, ep {layout.ep} (edp {layout.edp}); "
        f"activation stage {layout.stage}, micro-batch {layout.micro_batch}; optimizer states {STATES[layout.zero]}",
        *([f"               train.global_batch={batch}, so that it divides"] if batch != config.train.global_batch else []),
        f"memory, GB     static: {_gb(m.static)}",
        f"               kept activations (stage {layout.stage}): {_gb(m.kept)}",
        f"               kept under stage 0 to 4: {_kept_by_stage(config, plan)}",
        f"               working, the largest counts: {_gb(m.working)}",
        *([f"               optimizer states in host memory: {_on_host(plan, gpu)}"] if m.host else []),
        f"               peak {m.peak / GB:,.1f} + {OVERHEAD_BYTES / GB:.1f} context and fragments + {MARGIN:.0%} spare, "
        f"of {gpu.memory / GB:,.1f}: " + ("fits" if plan.fits(gpu) else "DOES NOT FIT"),
        f"sent, GB/step  {_gb(s.sent) or 'nothing'}",
        f"step time      floor {s.floor:.3f} s, expected {s.expected:.3f} s: "
        + ", ".join(f"{k} {v / s.expected:.0%}" for k, v in s.parts.items() if v),
        f"               {s.tokens / s.expected:,.0f} tokens/s, {per_gpu:,.0f} a GPU",
        *_keeping_transposes(plan, gpu, config),
    ]


def table(plans: list[Plan], gpu: Gpu, count: int) -> list[str]:
    """The best plans, one a line; for each (tp, ep) the best two policies."""
    head = f"{'tp':>4}{'ep':>5}{'dp':>6}{'stage':>7}{'micro':>7}{'zero':>6}{'GB/rank':>9}{'step s':>9}{'tok/s/GPU':>11}"
    lines, seen = [head], {}
    for p in plans:
        key = (p.layout.tp, p.layout.ep)
        seen[key] = seen.get(key, 0) + 1
        if seen[key] > 2 or not p.fits(gpu):
            continue
        x, rate = p.layout, p.speed.tokens / p.speed.expected / p.layout.world
        lines.append(
            f"{x.tp:>4}{x.ep:>5}{x.dp:>6}{x.stage:>7}{x.micro_batch:>7}{x.zero:>6}{p.total / GB:>9.1f}"
            f"{p.speed.expected:>9.3g}{rate:>11,.0f}"
        )
    return lines[: count + 1]


def _in_short(plan: Plan, gpu: Gpu) -> str:
    host = f", in host memory {_on_host(plan, gpu)}" if plan.memory.host else ""
    return f"{plan.speed.tokens / plan.speed.expected:,.0f} tokens/s, {plan.total / GB:,.1f} GB a GPU{host}"


def _beside_bf16(config: Config, best: Plan, gpu: Gpu) -> list[str]:
    """The same layout under BF16 and FP32 AdamW, gradients in FP32; what else the config says, offload too, holds for both."""
    plain = replace(config, optim=replace(config.optim, grad_dtype="fp32"))
    bf16 = make_plan(plain, best.layout, gpu, PRESETS["fp32"], Recipe.bf16())
    host = f", and {bf16.memory.host / GB:,.1f} instead of {best.memory.host / GB:,.1f} in host memory (offloaded too)"
    return [
        f"-- BF16 with FP32 AdamW in the same layout: {bf16.total / GB:,.1f} GB a rank instead of {best.total / GB:,.1f} "
        f"({'fits' if bf16.fits(gpu) else 'does not fit'}){host if best.memory.host else ''}, expected step "
        f"{bf16.speed.expected:.3f} s instead of {best.speed.expected:.3f}",
    ]


NO_LAYOUT = "no layout: "


def report(config: Config, gpus: int, gpu: Gpu) -> str:
    """The whole plan as text."""
    states = states_of(config)
    lines = ["== model", *describe_model(config, states)]
    if (own := configured(config, gpus)) is not None:
        lines += ["", "== as configured", *describe_plan(make_plan(config, own, gpu, states), gpu, config)]
    else:
        why = config.problems(gpus) or [f"fp8.activations={config.fp8.activations} differs from layer to layer"]
        lines += ["", f"== as configured: not on {counted(gpus, 'GPU')}", *(f"   {problem}" for problem in why)]
    lines += ["", f"== the fastest on {gpus} x {gpu.name}"]
    plans = search(config, gpus, gpu, states)
    if not plans:
        why = f"train.global_batch={config.train.global_batch} or the model's sizes do not divide over {counted(gpus, 'GPU')}"
        return "\n".join([*lines, f"{NO_LAYOUT}{why}"])
    best, used = plans[0], config
    if not best.fits(gpu):
        limit = f"of {gpu.memory / GB:,.1f} GB"
        lines.append(f"nothing fits as configured; the nearest needs {best.total / GB:,.1f} {limit}:")
        lines += describe_plan(best, gpu, config)
        tried = remedies(config, gpus, gpu)
        if tried and tried[0].plans[0].fits(gpu):
            used, plans, best = tried[0].config, tried[0].plans, tried[0].plans[0]
            lines += ["", f"-- with {tried[0].keys} it fits:", *describe_plan(best, gpu, used)]
            lines += [f"   with {other.keys} too: {_in_short(other.plans[0], gpu)}" for other in tried[1:]]
        elif tried:
            lines.append(f"with {tried[0].keys} the nearest needs {tried[0].plans[0].total / GB:,.1f} GB")
    else:
        lines += describe_plan(best, gpu, config)
    if best.fits(gpu):
        lines += ["", "-- layouts that fit, best first", *table(plans, gpu, 12)]
    lines += ["", *_beside_bf16(used, best, gpu)]
    lines += ["", "-- assumptions", *(f"   {a}" for a in ASSUMPTIONS)]
    if not gpu.measured:
        lines.append(f"   compute rates of {gpu.name} are scaled from those measured on H200, not measured")
    return "\n".join(lines)


def compare_allocator(config: Config) -> str:
    """The forecast against this GPU's allocator. Raises UserError without a CUDA device."""
    import torch

    from tools.plan_check import compare

    if not torch.cuda.is_available():
        raise UserError("--compare-allocator needs a CUDA device")
    try:
        return "\n".join(compare(config).lines())
    finally:
        close_mesh()


def main(arguments: list[str] | None = None) -> int:
    """Prints the plan; status 1 when no layout divides over the GPUs."""
    parser = make_parser("plan", __doc__)
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("--gpus", type=at_least(1), help="number of GPUs; by default the fewest that the config's layout needs")
    parser.add_argument("--gpu", choices=tuple(GPUS), default="h200", help="kind of GPU")
    parser.add_argument("--compare-allocator", action="store_true", help="check the memory forecast on this CUDA device")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_intermixed_args(arguments)
    config = load_config(options.config, options.overrides)
    gpus = config.fewest_ranks if options.gpus is None else options.gpus
    text = compare_allocator(config) if options.compare_allocator else report(config, gpus, GPUS[options.gpu])
    if os.environ.get("RANK", "0") == "0":
        print(text)
    return int(NO_LAYOUT in text)


if __name__ == "__main__":
    sys.exit(exit_status(main))
