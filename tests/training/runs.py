"""A run of seconds that the tests of this folder share: its configuration, what it left behind, steps of a seeded model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8.weight import weights
from parallel.mesh import Mesh
from tests.model import tiny
from training.config import Config, load_config
from training.data import IGNORED, Batch, make_batch
from training.metrics import Phases, read_metrics
from training.schedule import OptimConfig
from training.shards import Shard, read_metadata, read_shards
from training.step import TrainStep

YAML = """
model: {vocab_size: 512, hidden_size: 128, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2, head_dim: 64,
  intermediate_size: 128, num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 128, n_group: 2, topk_group: 2,
  num_nextn_predict_layers: 1, max_position_embeddings: 64, initializer_range: 0.05, loss_chunk: 128}
data: {source: text, paths: [FOLDER/*.txt], dir: FOLDER, tokenizer: FOLDER/tok.model, vocab_size: 300, seq_len: 64,
  validation_fraction: 0.2, isolate_documents: true}
train: {steps: 6, global_batch: 4, micro_batch: 2, log_every: 1, device: cpu}
optim: {lr: 3.0e-3, schedule: wsd, warmup_steps: 2, decay_steps: 2}
checkpoint: {every: 2, keep: 9}
eval: {samples: 6, every: 3, prompt: "def ", sample_tokens: 8}
fp8: {health_every: 4}
log: {wandb: off, progress: false}
"""


def config_of(base: Path, run_dir: Path, *overrides: str, world_size: int = 1) -> Config:
    return load_config(str(base / "run.yaml"), [f"run.dir={run_dir}", *overrides], world_size)


class Crash(Exception):
    """Stands for kill -9 between two steps."""


class Recorder:
    """Wraps TrainStep: notes the samples of each step, and does something at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int = 0, action: Callable[[], None] = lambda: None) -> None:
        self.samples: dict[int, list[int]] = {}
        original = TrainStep.__call__

        def call(take_step: TrainStep, step: int, batches: list[Batch], *args: Any, **options: Any) -> Any:
            if step == at:
                action()
            self.samples[step] = [i for batch in batches for i in batch.sample_ids]
            return original(take_step, step, batches, *args, **options)

        monkeypatch.setattr(TrainStep, "__call__", call)


def crash() -> None:
    raise Crash


def losses(run_dir: Path) -> dict[int, tuple[float, ...]]:
    keys = ("loss", "mtp_loss", "grad_norm", "lr", "z_loss")
    return {r["step"]: tuple(r[k] for k in keys) for r in read_metrics(run_dir / "metrics.jsonl") if "loss" in r}


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    saved = read_metadata(checkpoint).state_dict_metadata
    shards = {name: Shard.whole(torch.zeros(md.size, dtype=md.properties.dtype)) for name, md in saved.items()}
    read_shards(checkpoint, shards, Mesh.solo().world)
    return {name: shard.tensor for name, shard in shards.items()}


def ragged_batches(num: int, rows: int, seed: int = 0) -> list[Batch]:
    """Micro-batches with very different numbers of labels; the second has none."""
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(num):
        data = torch.randint(3, 512, (rows, 65), generator=g).numpy()
        batch = make_batch(data, range(rows), eos_id=2, isolate_documents=False)
        keep = torch.rand(rows, 64, generator=g) < (0.7, 0.0, 1.0, 0.3)[i % 4]
        batches.append(dataclasses.replace(batch, labels_BS=batch.labels_BS.masked_fill(~keep, IGNORED)))
    return batches


def joined(batches: list[Batch]) -> Batch:
    together = {f: torch.cat([getattr(b, f) for b in batches]) for f in ("tokens_BS", "labels_BS", "positions_BS")}
    return dataclasses.replace(batches[0], **together, sample_ids=sum((b.sample_ids for b in batches), ()))


def take_step(batches: list[Batch], mesh: Mesh | None = None, poison: bool = False) -> tuple[Any, dict[str, Tensor], Any]:
    """(result, gradients, model) of one step of a seeded fp32 model."""
    model = tiny.build(tiny.Recipe.fp32())
    if poison:
        model.layers[1].attention.norm.data.fill_(math.nan)
    optimizer = tiny.optimizer_of(model) if not poison else tiny.AdamW(weights(model))
    step = TrainStep(model, optimizer, mesh or Mesh.solo(), OptimConfig(clip=1e-3), 1e-3, Phases(torch.device("cpu")))
    return step(1, batches, 1e-3, want_counts=True), tiny.grads(model), model


def snapshot(model: torch.nn.Module, optimizer: Any) -> dict[str, Tensor]:
    found = {f"buffer.{name}": b.view(torch.uint8) if b.element_size() == 1 else b for name, b in model.named_buffers()}
    found |= {f"grad.{n}": w.main_grad for n, w in weights(model) if w.main_grad is not None}
    found |= {f"{kind}.{n}": t for n, state in optimizer.state().items() for kind, t in state.items()}
    return found | {"rng": torch.get_rng_state()}
