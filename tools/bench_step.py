"""Whole optimizer steps on one GPU by phase, FP8 against BF16 one after the other: `python -m tools.bench step`.

The model is a config file's (`--config configs/small.yaml`) or Ling-mini cut to `--layers` MoE layers; random tokens as skewed as
text, FP32 master weights and moments, clipping. Each recipe runs `--steps` steps after warm-up; medians by CUDA events.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fp8.optimizer import AdamW, grad_norm_squared
from fp8.recipe import Recipe
from fp8.weight import weights
from model.config import ModelConfig
from model.counts import flops_per_token
from model.loss import count_valid
from model.transformer import Transformer, initial_values
from parallel.mesh import Mesh
from tools.bench_layer import print_kernels, profile
from training.graph import GraphedMicroBatch

GRADS = {"fp32": torch.float32, "bf16": torch.bfloat16}
PHASES = ("forward", "backward", "clip", "optimizer")


class Stepper:
    """A model, its optimizer, and one batch of random tokens."""

    def __init__(
        self, config: ModelConfig, recipe: Recipe, stage: int, batch: int, seq_len: int, graph: bool, grad_dtype: torch.dtype
    ) -> None:
        with torch.device("cuda"):
            self.model = Transformer(config, recipe, Mesh.solo(), torch.bfloat16, stage)
        for _, weight in weights(self.model):
            if weight.data.dtype != torch.float32:  # norms and router keep FP32 gradients
                weight.grad_dtype = grad_dtype
        self.optimizer = AdamW(weights(self.model))
        for name, _, value in initial_values(self.model, seed=0):
            self.optimizer.set_master(name, value)
        skewed = torch.rand(batch, seq_len + 1, device="cuda") ** 3  # the commonest token is about 2% of all, as in text
        data = (skewed * config.vocab_size).long()
        self.tokens, self.labels = data[:, :-1].contiguous(), data[:, 1:].contiguous()
        self.num_valid = count_valid(self.tokens, self.labels)
        self.graphed = GraphedMicroBatch(self.model, Mesh.solo()) if graph else None

    def __call__(self) -> tuple[Tensor, list[torch.cuda.Event]]:
        """One step without host synchronisation: (loss, the events between its phases)."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(PHASES) + 1)]
        events[0].record()
        if self.graphed is not None:
            losses = self.graphed(self.tokens, self.labels, self.num_valid)
            events[1].record()
        else:
            losses = self.model(self.tokens, self.labels, self.num_valid)
            events[1].record()
            losses.total.backward()
        events[2].record()
        norm = grad_norm_squared(weights(self.model)).sqrt()
        scale = (1.0 / norm).clamp(max=1.0)
        events[3].record()
        self.optimizer.step(1e-4, scale)
        events[4].record()
        return losses.total.detach(), events


def measure(stepper: Stepper, steps: int) -> dict[str, float]:
    """Median ms of each phase and of the step, and the losses' ends."""
    losses, rows = [], []
    for i in range(steps + 4):
        loss, events = stepper()
        torch.cuda.synchronize()
        losses.append(loss.item())
        if i >= 4:  # two eager steps and a capture with --graph
            rows.append([a.elapsed_time(b) for a, b in zip(events[:-1], events[1:], strict=True)])
    result = {phase: statistics.median(column) for phase, column in zip(PHASES, zip(*rows, strict=True), strict=True)}
    result["ms"] = statistics.median(sum(row) for row in rows)
    return result | {"first_loss": losses[0], "last_loss": losses[-1]}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, help="a config file; its model is taken, nothing else")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--grad", choices=GRADS, default="fp32", help="format of the gradients of matrices")
    parser.add_argument("--graph", action="store_true", help="forward and backward as one CUDA graph")
    parser.add_argument("--recipes", nargs="+", default=["block", "bf16"])
    parser.add_argument("--chunk", type=int, default=4096, help="tokens whose logits exist at once")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    config = ModelConfig(num_hidden_layers=args.layers, first_k_dense_replace=0)
    if args.config:
        import yaml

        config = ModelConfig(**yaml.safe_load(args.config.read_text())["model"])
    config = replace(config, loss_chunk=args.chunk)
    tokens = args.batch * args.seq
    flops = flops_per_token(config, args.seq) * tokens
    results = []
    print(f"{torch.cuda.get_device_name()}, {config.num_hidden_layers} layers, {args.batch} x {args.seq} tokens")
    print(f"{'recipe':<8}" + "".join(f"{p:>11}" for p in (*PHASES, "ms")) + f"{'tokens/s':>11}{'TFLOP/s':>9}{'GiB':>8}")
    for name in args.recipes:
        torch.cuda.reset_peak_memory_stats()
        stepper = Stepper(config, getattr(Recipe, name)(), args.stage, args.batch, args.seq, args.graph, GRADS[args.grad])
        row: dict[str, object] = {"recipe": name} | measure(stepper, args.steps)
        row |= {"tokens_per_s": tokens / row["ms"] * 1e3, "tflops": flops / row["ms"] / 1e9}
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        print(f"{name:<8}" + "".join(f"{row[p]:11.2f}" for p in (*PHASES, "ms")), end="")
        print(f"{row['tokens_per_s']:11.0f}{row['tflops']:9.1f}{row['peak_gib']:8.1f}", end="")
        print(f"   loss {row['first_loss']:.3f} -> {row['last_loss']:.3f}")
        if args.profile:
            row |= profile(stepper, args.profile, f"step-{name}")
            print(f"    busy {row['busy_ms']:.3f} ms in {row['launches']} launches")
            print_kernels(row, 24)
        results.append(row)
        del stepper
        gc.collect()
        torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
