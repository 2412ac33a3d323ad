"""Layouts of a config: what each needs and gives, which the model's sizes allow, which are the fastest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fp8.optimizer import States
from fp8.recipe import FORMATS, Recipe
from parallel.mesh import check_layout
from parallel.sharded_optimizer import wire_for
from tools.plan_memory import OVERHEAD_BYTES, Layout, Memory, local_parameters, memory
from tools.plan_offload import bytes_at_a_time, visit_seconds, visitors
from tools.plan_speed import Gpu, Speed, Wires, speed
from training.config import Config
from training.states import gradient_format, optimizer_states

MARGIN = 0.03  # of the forecast peak
MAX_EP, MAX_TP, STAGES = 256, 8, range(5)


@dataclass(frozen=True)
class Plan:
    """One layout, what it needs and what it gives."""

    layout: Layout
    states: States
    memory: Memory
    speed: Speed

    @property
    def total(self) -> int:
        return self.memory.peak + OVERHEAD_BYTES

    @property
    def token_seconds(self) -> float:
        """Expected, over all ranks; batches of different sizes compare by it."""
        return self.speed.expected / self.speed.tokens

    def fits(self, gpu: Gpu) -> bool:
        """With room for what the forecast misses (docs/usage.md has the errors that were measured)."""
        return self.total + MARGIN * self.memory.peak <= gpu.memory


def states_of(config: Config) -> States:
    """Formats of the optimizer states that the config asks for."""
    return optimizer_states(config.optim, config.fp8.level)


def planned_memory(config: Config, layout: Layout, states: States, recipe: Recipe | None = None) -> Memory:
    """What a rank needs under the formats of a config, offloaded states on the host."""
    recipe, c = recipe or config.fp8.build(), config.model
    gradients = FORMATS[gradient_format(config.optim, config.fp8.level)]
    held = memory(c, recipe, states, layout, config.data.seq_len, gradients=gradients)
    if config.optim.offload:
        sizes = visitors(c, recipe, states, layout)
        held.host, held.working["optimizer"] = sum(sizes), bytes_at_a_time(sizes)
        held.static["states"] -= held.host
    return held


def make_plan(config: Config, layout: Layout, gpu: Gpu, states: States, recipe: Recipe | None = None) -> Plan:
    """Memory and time of one layout."""
    recipe, parallel = recipe or config.fp8.build(), config.parallel
    held = planned_memory(config, layout, states, recipe)
    local = local_parameters(config.model, recipe, states, layout)
    batch = round_batch(config, layout.micro_batch * layout.dp) or config.train.global_batch
    gradients = wire_for(parallel.grad_wire, recipe.is_fp8)
    wires = Wires(parallel.tp_wire, parallel.combine_wire, gradients, parallel.overlap_gather)
    moved = held.host + held.static["states"]
    needed = speed(config.model, recipe, layout, config.data.seq_len, batch, gpu, local, moved, wires, config.train.cuda_graphs)
    if held.host:
        visits = visit_seconds(visitors(config.model, recipe, states, layout))
        needed.parts["offload"] = max(visits - needed.parts["optimizer"], 0.0)
    return Plan(layout, states, held, needed)


def configured(config: Config, gpus: int) -> Layout | None:
    """The layout of the config itself on `gpus` ranks; None where it cannot run on them, or its layers differ in their stage."""
    parallel, stage = config.parallel, config.fp8.activations
    if not isinstance(stage, int) or config.problems(gpus):
        return None
    zero = parallel.zero if gpus // parallel.tp > 1 else 0
    return Layout(gpus, parallel.tp, parallel.ep, stage, config.train.micro_batch, zero, **_options(config))


def _options(config: Config) -> dict[str, bool]:
    """What the search takes from the config as it stands."""
    return {"keep_transposed": config.fp8.keep_transposed, "peer_copies": config.parallel.peer_copies}


def _powers(limit: int) -> list[int]:
    return [1 << i for i in range(limit.bit_length()) if 1 << i <= limit]


def round_batch(config: Config, unit: int) -> int | None:
    """The global batch as a multiple of `unit` sequences; None where that would change it by more than 5%."""
    rounded = max(round(config.train.global_batch / unit), 1) * unit
    return rounded if abs(rounded / config.train.global_batch - 1) <= 0.05 else None


def layouts(config: Config, gpus: int) -> list[Layout]:
    """Every layout of `gpus` ranks that the model's sizes allow, keeping all activations."""
    model, found = config.model, []
    is_fp8 = config.fp8.build().is_fp8
    for tp in _powers(min(MAX_TP, gpus)):
        if is_fp8 and model.fp8_problems(tp):
            continue
        for ep in _powers(min(MAX_EP, gpus, model.num_experts)):
            for batch in _powers(64):
                tokens = batch * config.data.seq_len
                sizes = dict(num_experts=model.num_experts, num_heads=model.num_attention_heads, tokens=tokens)
                if check_layout(gpus, tp, ep, num_kv_heads=model.num_key_value_heads, **sizes):
                    continue
                if round_batch(config, batch * (gpus // tp)) is None:
                    continue
                for zero in (0, 1, 2) if gpus // tp > 1 else (0,):
                    found.append(Layout(gpus, tp, ep, 0, batch, zero, **_options(config)))
    return found


def search(config: Config, gpus: int, gpu: Gpu, states: States) -> list[Plan]:
    """Every layout with the least recomputation that fits, most tokens a second first; then the others, the nearest first.

    By the time of a token, not of a step: batches are rounded, so steps differ in size.
    """
    plans = []
    for layout in layouts(config, gpus):
        for stage in STAGES:
            plans.append(make_plan(config, replace(layout, stage=stage), gpu, states))
            if plans[-1].fits(gpu):
                break
    return sorted(plans, key=lambda p: (not p.fits(gpu), p.token_seconds if p.fits(gpu) else p.total))


@dataclass(frozen=True)
class Remedy:
    """Keys, as a command line takes them, that save memory; the config that has them, and its layouts."""

    keys: str
    config: Config
    plans: list[Plan]


SAVING = {"states": "lean", "grad_dtype": "bf16", "offload": True}  # of `optim`


def remedies(config: Config, gpus: int, gpu: Gpu) -> list[Remedy]:
    """The fewest of `SAVING` with which a layout fits, the fastest first: every such set of those on the GPU, and with host memory.

    If none fits, all of them in one set; nothing if the config has them all.
    """

    def formats(c: Config) -> tuple[object, ...]:
        return states_of(c), gradient_format(c.optim, c.fp8.level), c.optim.offload

    def having(keys: Sequence[str]) -> Config:
        return replace(config, optim=replace(config.optim, **{key: SAVING[key] for key in keys}))

    useful = [key for key in SAVING if formats(having([key])) != formats(config)]
    fitting: dict[bool, list[Remedy]] = {}  # by whether host memory is needed
    for size in range(1, len(useful) + 1):
        found: dict[bool, list[Remedy]] = {}
        for keys in itertools.combinations(useful, size):
            if (offloads := "offload" in keys) in fitting:
                continue
            other = having(keys)
            said = " ".join(f"optim.{key}={str(SAVING[key]).lower()}" for key in keys)
            last = Remedy(said, other, search(other, gpus, gpu, states_of(other)))
            if last.plans[0].fits(gpu):
                found.setdefault(offloads, []).append(last)
        fitting |= found
    if not fitting:
        return [last] if useful else []
    return sorted((remedy for group in fitting.values() for remedy in group), key=lambda remedy: remedy.plans[0].token_seconds)
