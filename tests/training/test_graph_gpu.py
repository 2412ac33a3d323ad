"""Replayed micro-batches are bitwise the eager ones."""

import pytest
import torch

from fp8 import transposed
from fp8.health import Health
from fp8.optimizer import AdamW
from fp8.quantize import transpose
from fp8.recipe import Recipe
from fp8.transposed import keep_transposes
from fp8.weight import weights
from model.config import ModelConfig
from model.loss import count_valid
from model.transformer import Transformer, initial_values
from parallel.mesh import Mesh
from training.graph import GraphedMicroBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs Hopper"),
]
CONFIG = ModelConfig(
    vocab_size=1024, hidden_size=256, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=256,
    num_experts=16, num_experts_per_tok=4, moe_intermediate_size=128, num_nextn_predict_layers=1, loss_chunk=256,
)  # fmt: skip


def train(graphed: bool, steps: int = 5, micro_batches: int = 3, kept: bool = False) -> tuple[list[float], dict[str, torch.Tensor]]:
    with torch.device("cuda"):
        model = Transformer(CONFIG, Recipe.block(), Mesh.solo())
    if kept:
        keep_transposes(weight for _, weight in weights(model))
    optimizer = AdamW(weights(model))
    for name, _, value in initial_values(model, 0):
        optimizer.set_master(name, value)
    graph = GraphedMicroBatch(model, Mesh.solo())
    generator, losses = torch.Generator("cuda").manual_seed(1), []
    for _ in range(steps):
        for _ in range(micro_batches):
            data = torch.randint(0, CONFIG.vocab_size, (2, 257), device="cuda", generator=generator)
            tokens, labels = data[:, :-1].contiguous(), data[:, 1:].contiguous()
            num_valid = count_valid(tokens, labels)
            if graphed:
                assert graph.takes(tokens, None)
                loss = graph(tokens, labels, num_valid)
            else:
                loss = model(tokens, labels, num_valid)
                loss.total.backward()
            losses.append(loss.ce_sum.item())
        optimizer.step(1e-3)
    return losses, {name: w.data.view(torch.uint8).clone() for name, w in weights(model)}


@pytest.mark.parametrize("kept", [False, True])
def test_replayed_training_is_the_eager_one(kept: bool) -> None:
    """Kept transposes are turned before a graph; eager training makes them for each use."""
    eager_losses, eager = train(graphed=False)
    losses, replayed = train(graphed=True, kept=kept)
    if train(graphed=False)[0] != eager_losses:  # cuDNN's attention backward adds in no fixed order
        assert losses == pytest.approx(eager_losses, rel=1e-2)
        return
    assert losses == eager_losses
    for name, data in eager.items():
        assert torch.equal(data, replayed[name]), name


def test_kept_transposes_are_turned_once_a_step_and_never_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    turned = []
    monkeypatch.setattr(transposed, "transpose", lambda q, out=None: (turned.append(q), transpose(q, out))[1])
    train(graphed=True, steps=5, kept=True)  # eager, captured and replayed micro-batches
    with torch.device("cuda"):
        model = Transformer(CONFIG, Recipe.block(), Mesh.solo())
    assert len(turned) == 5 * sum(weight.scale_inv is not None for _, weight in weights(model))


def test_what_is_not_replayed() -> None:
    """Determinism, documents, a measured step, another device: the host has something to do, or the promise could not be kept."""
    with torch.device("cuda"):
        model = Transformer(CONFIG, Recipe.block(), Mesh.solo())
    graph, tokens = GraphedMicroBatch(model, Mesh.solo()), torch.zeros(2, 256, dtype=torch.int64, device="cuda")
    assert graph.takes(tokens, None)
    assert not graph.takes(tokens, torch.tensor([0, 512], dtype=torch.int32, device="cuda"))
    assert not graph.takes(tokens.cpu(), None)
    model.head.health = Health()
    assert not graph.takes(tokens, None)
    model.head.health = None
    torch.use_deterministic_algorithms(True)
    try:
        assert not graph.takes(tokens, None)
    finally:
        torch.use_deterministic_algorithms(False)
    assert graph.takes(tokens, None)
    model.eval()
    assert not graph.takes(tokens, None)
