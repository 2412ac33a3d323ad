"""The memory forecast against the allocator: builds a model on this CUDA device, takes two steps, compares.

    python -m tools.plan --config configs/small.yaml --compare-allocator

Random tokens, one rank, no data. Needs only torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp8.optimizer import AdamW, States
from fp8.recipe import Recipe
from fp8.weight import weights
from model.config import ModelConfig
from model.loss import count_valid
from model.transformer import Transformer, initial_values
from tools.plan_memory import Layout, Memory, memory


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


def compare(config: ModelConfig, recipe: Recipe, states: States, seq_len: int, micro_batch: int, stage: int) -> Comparison:
    """Two steps of one rank on the current CUDA device."""
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    with torch.device(device):
        model = Transformer(config, recipe, dtype=torch.bfloat16, stage=stage).train()
    optimizer = AdamW(weights(model), states=states)
    for name, _, value in initial_values(model, 0):
        optimizer.set_master(name, value)
    base, kept, peaks = 0, 0, {}
    for _ in range(2):
        tokens = torch.randint(0, config.vocab_size, (micro_batch, seq_len + 1), device=device)
        tokens, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        num_valid = count_valid(tokens, labels)
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        losses = model(tokens, labels, num_valid)
        kept = torch.cuda.memory_allocated() - base
        peaks["forward"] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        losses.total.backward()
        del losses
        peaks["backward"] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step(1e-4)
        torch.cuda.synchronize()
        peaks["optimizer"] = torch.cuda.max_memory_allocated()
    forecast = memory(config, recipe, states, Layout(stage=stage, micro_batch=micro_batch), seq_len)
    return Comparison(forecast, base, kept, max(peaks.values()), peaks)
