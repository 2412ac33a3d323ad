"""The published modeling file's own outputs for a small random checkpoint (fp32, CPU), reproduced by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fp8.recipe import Recipe
from fp8.weight import weights
from model.huggingface import config_from_hf, load_hf, parts
from model.loss import count_valid
from model.router import Router, routers
from model.transformer import Transformer

GOLDEN = Path(__file__).parents[1] / "golden" / "ling_tiny"


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "golden.safetensors")


@pytest.fixture
def model() -> Transformer:
    hf = json.loads((GOLDEN / "config.json").read_text())
    config = config_from_hf(hf, router_z_loss_weight=0.0, loss_chunk=128)
    model = Transformer(config, Recipe.fp32(), dtype=torch.float32)
    named = dict(weights(model))
    for name, value in load_hf(model, load_file(GOLDEN / "model.safetensors")):
        named[name].set_(value)
    return model


def labels_of(tokens_BS: torch.Tensor) -> torch.Tensor:
    return torch.cat([tokens_BS[:, 1:], torch.full_like(tokens_BS[:, :1], -100)], dim=1)


def test_logits_and_mtp_logits_match(model: Transformer, golden: dict[str, torch.Tensor]) -> None:
    tokens = golden["input_ids"]
    torch.testing.assert_close(model.eval().logits(tokens), golden["logits"], rtol=0, atol=1e-5)
    torch.testing.assert_close(model.mtp_logits(tokens, labels_of(tokens)), golden["mtp_logits"], rtol=0, atol=1e-5)


def test_routing_matches_exactly(model: Transformer, golden: dict[str, torch.Tensor]) -> None:
    seen: dict[str, torch.Tensor] = {}
    for name, router in routers(model):
        layer = 3 if name.startswith("mtp") else int(name.split(".")[1])

        def keep(_: Router, __: tuple, out: object, layer: int = layer) -> None:
            seen[f"route.model.layers.{layer}.mlp.gate"] = out

        router.register_forward_hook(keep)
    tokens = golden["input_ids"]
    model.eval().mtp_logits(tokens, labels_of(tokens))
    assert len(seen) == 3
    for key, routing in seen.items():
        assert torch.equal(routing.ids_Tk, golden[f"{key}.ids"]), key
        torch.testing.assert_close(routing.weights_Tk, golden[f"{key}.weights"], rtol=1e-5, atol=1e-6)


def test_losses_and_every_gradient_match(model: Transformer, golden: dict[str, torch.Tensor]) -> None:
    tokens = golden["input_ids"]
    labels = labels_of(tokens)
    losses = model.train()(tokens, labels, count_valid(tokens, labels))
    assert abs(losses.ce_sum / losses.num_ce - golden["ce"].item()) < 1e-6
    assert abs(losses.mtp_sum / losses.num_mtp - golden["ce_mtp"].item()) < 1e-6
    losses.total.backward()
    expected = json.loads((GOLDEN / "grads.json").read_text())
    named, checked = dict(weights(model)), 0
    for part in parts(model.config):
        grad, want = named[part.name].main_grad[part.index], expected[part.hf_name]
        assert abs(grad.norm() - want["norm"]) <= 1e-4 * want["norm"], part.hf_name
        # lm_head's sum is zero but for rounding (softmax gradients cancel): fp32's own share of the norm is allowed beside 1e-4.
        assert abs(grad.double().sum() - want["sum"]) <= 1e-4 * abs(want["sum"]) + 1e-6 * want["norm"], part.hf_name
        checked += 1
    assert checked == len(expected)
