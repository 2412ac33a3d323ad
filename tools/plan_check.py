"""The memory forecast against the allocator: builds a model on this CUDA device, takes two steps, compares.

    python -m tools.plan --config configs/small.yaml --compare-allocator

Random tokens, no data. Under torchrun in the config's layout: `torchrun --nproc-per-node 2 -m tools.plan ... --compare-allocator`.
"""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass, replace

import torch

from fp8.transposed import keep_transposes
from fp8.weight import weights
from model.loss import count_valid
from model.transformer import Transformer, initial_values
from parallel.mesh import build_mesh
from parallel.sharded_optimizer import make_optimizer, make_reducer
from tools.plan_layouts import configured, planned_memory, states_of
from tools.plan_memory import Memory
from training.config import Config
from training.errors import UserError
from training.start import set_gradient_format
from training.states import gradient_format


@dataclass(frozen=True)
class Comparison:
    """Bytes, forecast and measured."""

    forecast: Memory
    static: int  # allocated after the first step, before the second
    kept: int  # allocated between forward and backward, above that
    peak: int  # of the second step
    peaks: dict[str, int]  # by phase

    @property
    def error(self) -> float:
        """Relative error of the forecast peak."""
        return self.forecast.peak / self.peak - 1

    def lines(self) -> list[str]:
        gb = 1e9
        static, kept = sum(self.forecast.static.values()), sum(self.forecast.kept.values())
        rows = [("static", static, self.static), ("kept", kept, self.kept), ("peak", self.forecast.peak, self.peak)]
        out = [f"{name:<8}{a / gb:10.3f} GB forecast {b / gb:10.3f} GB measured {a / max(b, 1) - 1:+8.1%}" for name, a, b in rows]
        return [*out, "measured peak by phase: " + ", ".join(f"{k} {v / gb:.3f}" for k, v in self.peaks.items())]


def compare(config: Config) -> Comparison:
    """Two steps of this rank on its CUDA device, in the config's layout; what the device holds already does not count.

    Raises:
        UserError: the config cannot run on so many ranks.
    """
    world, device = int(os.environ.get("WORLD_SIZE", "1")), torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    layout = configured(config, world)
    if layout is None:
        raise UserError("; ".join(config.problems(world)) or f"one stage for all layers is forecast: {config.fp8.activations=}")
    torch.cuda.set_device(device)
    gc.collect()  # a model is full of cycles
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    parallel, states = config.parallel, states_of(config)
    mesh = build_mesh(parallel.tp, parallel.ep, device, parallel.sequence_parallel)
    with torch.device(device):
        model = Transformer(config.model, config.fp8.build(), mesh, torch.bfloat16, layout.stage).train()
    set_gradient_format(model, gradient_format(config.optim, config.fp8.level))
    if config.fp8.keep_transposed:
        keep_transposes(weight for _, weight in weights(model))
    options = 0.9, 0.95, 1e-8, 0.1, states, 0, config.optim.offload
    optimizer = make_optimizer(model, mesh, parallel.zero, parallel.zero_partition, parallel.overlap_gather, *options)
    reducer = make_reducer(weights(model), mesh, optimizer, parallel.grad_wire, parallel.grad_rounding, parallel.zero)
    for name, _, value in initial_values(model, 0):
        optimizer.set_master(name, value)
    del value  # the head's is 1.3 GB at Ling-mini's size
    base, kept, peaks = 0, 0, dict.fromkeys(("forward", "backward", "optimizer"), 0)

    def note(phase: str) -> int:
        torch.cuda.synchronize()
        peaks[phase] = torch.cuda.max_memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() - before

    for _ in range(2):
        tokens = torch.randint(0, config.model.vocab_size, (config.train.micro_batch, config.data.seq_len + 1), device=device)
        tokens, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        num_valid = count_valid(tokens, labels)
        base = note("optimizer")
        losses = model(tokens, labels, num_valid)
        kept = note("forward") - base
        losses.total.backward()
        del losses
        reducer.finish()
        note("backward")
        optimizer.step(1e-4)
        note("optimizer")
    optimizer.settle()
    forecast = planned_memory(config, replace(layout, peer_copies=False), states)  # their buffers are not the allocator's
    return Comparison(forecast, base, kept, max(peaks.values()), peaks)
