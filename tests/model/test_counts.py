"""Published sizes, on the meta device and from the formula."""

from __future__ import annotations

import pytest
import torch

from fp8.recipe import Recipe
from fp8.weight import weights
from model.config import ModelConfig
from model.counts import flops_per_token, parameter_counts
from model.router import routers
from model.transformer import Transformer

MINI = ModelConfig()
FLASH = ModelConfig(
    hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=9216, moe_intermediate_size=1024
)  # fmt: skip
ONE_T = ModelConfig(
    hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, intermediate_size=18432,
    moe_intermediate_size=2048, first_k_dense_replace=4,
)  # fmt: skip


@pytest.mark.parametrize("config, total, active", [(MINI, 16.256, 1.433), (FLASH, 102.89, 6.15), (ONE_T, 999.7, 51.05)])
def test_published_sizes_in_billions(config: ModelConfig, total: float, active: float) -> None:
    counts = parameter_counts(config)
    assert counts["total"] / 1e9 == pytest.approx(total, abs=0.006 if total < 100 else 0.06)
    assert counts["active"] / 1e9 == pytest.approx(active, abs=0.006)


@pytest.mark.parametrize("mtp", [0, 1])
def test_ling_mini_on_the_meta_device(mtp: int) -> None:
    config = ModelConfig(num_nextn_predict_layers=mtp)
    with torch.device("meta"):
        model = Transformer(config, Recipe.block())
    held = sum(weight.numel for _, weight in weights(model))
    counts = parameter_counts(config)
    assert counts["total"] == 16_255_638_528
    assert held == counts["total"] + counts["mtp"]
    assert counts["mtp"] == (0 if not mtp else held - 16_255_638_528)
    assert round(counts["non_embedding_active"] / 1e6, 1) == 789.1
    assert sum(router.expert_bias.numel() for _, router in routers(model)) == counts["expert_bias"] == 4864 + 256 * mtp


def test_flops_agree_with_the_published_log() -> None:
    """Ling's own log: 12.2k tokens/s/GPU at 133.7 TFLOP/s, 8K, MTP on: 11.0 GFLOP/token."""
    config = ModelConfig(num_nextn_predict_layers=1)
    assert flops_per_token(config, 8192) / 1e9 == pytest.approx(11.0, abs=0.1)
    assert flops_per_token(MINI, 4096) / 1e9 == pytest.approx(7.67, abs=0.1)


@pytest.mark.parametrize(
    "name", ["rope_theta", "rms_norm_eps", "initializer_range", "max_position_embeddings", "routed_scaling_factor", "hidden_size"]
)
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_numbers_that_would_make_nan_are_refused(name: str, value: float) -> None:
    assert ModelConfig(**{name: value}).problems() == [f"model.{name} = {value} must be positive"]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_an_embedding_without_spread_is_refused(value: float) -> None:
    (problem,) = ModelConfig(embedding_init_std=value).problems()
    assert problem.startswith(f"model.embedding_init_std = {value} must be positive")


@pytest.mark.parametrize(
    "name",
    ["num_shared_experts", "mtp_loss_weight", "router_z_loss_weight", "aux_loss_weight", "bias_update_rate", "head_z_loss_weight"],
)
def test_weights_of_losses_may_be_zero_but_not_negative(name: str) -> None:
    assert not ModelConfig(**{name: 0}).problems()
    assert ModelConfig(**{name: -1}).problems() == [f"model.{name} = -1 must be at least 0"]


def test_wrong_sizes_are_named_with_both_numbers() -> None:
    bad = ModelConfig(num_attention_heads=6, num_key_value_heads=4, num_experts=30, n_group=8)
    text = "\n".join(bad.problems())
    assert "num_attention_heads = 6" in text and "num_key_value_heads = 4" in text
    assert "num_experts = 30" in text and "n_group = 8" in text
