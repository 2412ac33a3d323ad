"""A model of minutes on a CPU, with every part the big ones have, and a batch for it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fp8.optimizer import AdamW
from fp8.recipe import Recipe
from fp8.weight import weights
from model.config import ModelConfig
from model.transformer import Transformer, initial_values

CONFIG = ModelConfig(
    vocab_size=512,
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=256,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=128,
    n_group=4,
    topk_group=2,
    num_nextn_predict_layers=1,
    initializer_range=0.05,
    loss_chunk=128,
)


def build(recipe: Recipe, seed: int = 0, stage: int = 0, **changes: object) -> Transformer:
    """A tiny model with its seeded initial values."""
    model = Transformer(replace(CONFIG, **changes), recipe, dtype=torch.float32, stage=stage)
    for _, weight, value in initial_values(model, seed):
        weight.set_(value)
    return model.train()


def optimizer_of(model: Transformer, seed: int = 0) -> AdamW:
    """AdamW whose masters are the same initial values."""
    optimizer = AdamW(weights(model))
    for name, _, value in initial_values(model, seed):
        optimizer.set_master(name, value)
    return optimizer


def batch(rows: int = 2, seq_len: int = 64, seed: int = 0, vocab: int = CONFIG.vocab_size) -> tuple[Tensor, Tensor]:
    """(tokens, labels) [rows, seq_len]."""
    tokens = torch.randint(0, vocab, (rows, seq_len + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def grads(model: Transformer) -> dict[str, Tensor]:
    """main_grad by name."""
    return {name: weight.main_grad.clone() for name, weight in weights(model)}


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want|| in float64."""
    got, want = got.double(), want.double()
    return ((got - want).norm() / want.norm().clamp(min=1e-300)).item()
