"""Two runs under `train.deterministic` are bitwise equal on a GPU, at a length where attention's backward adds in pieces."""

import pytest
import torch

from fp8.grad_norm import grad_norm_squared
from fp8.optimizer import AdamW
from fp8.recipe import Recipe
from fp8.weight import weights
from model.config import ModelConfig
from model.loss import count_valid
from model.router import update_expert_bias
from model.transformer import Transformer, initial_values
from parallel.mesh import Mesh
from training.process import make_deterministic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs Hopper"),
]
CONFIG = ModelConfig(
    vocab_size=1024, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=256,
    num_experts=16, num_experts_per_tok=4, moe_intermediate_size=128, num_nextn_predict_layers=1, loss_chunk=512,
    aux_loss_weight=1e-3, head_z_loss_weight=1e-4,
)  # fmt: skip


def run(recipe: Recipe, stage: int, isolate: bool) -> list[float]:
    """Losses and gradient norms of three steps of two micro-batches, 2 x 4096 tokens."""
    with torch.device("cuda"):
        model = Transformer(CONFIG, recipe, Mesh.solo(), torch.bfloat16, stage)
    optimizer = AdamW(weights(model))
    for name, _, value in initial_values(model, 0):
        optimizer.set_master(name, value)
    generator, numbers = torch.Generator("cuda").manual_seed(1), []
    batch, length = 2, 4096
    ends = torch.arange(0, batch * length + 1, 1024, dtype=torch.int32, device="cuda") if isolate else None
    positions = (torch.arange(batch * length, device="cuda") % 1024).view(batch, length) if isolate else None
    for _ in range(3):
        for _ in range(2):
            data = torch.randint(0, CONFIG.vocab_size, (batch, length + 1), device="cuda", generator=generator)
            tokens, labels = data[:, :-1].contiguous(), data[:, 1:].contiguous()
            losses = model(tokens, labels, count_valid(tokens, labels), positions, ends, 1024 if isolate else 0)
            losses.total.backward()
            numbers.append(losses.ce_sum.item())
        numbers.append(grad_norm_squared(weights(model)).item())
        optimizer.step(1e-3)
        update_expert_bias(model, Mesh.solo().world, 1e-3)
    return numbers


@pytest.mark.parametrize(("recipe", "stage", "isolate"), [("block", 2, False), ("block", 0, True), ("bf16", 0, False)])
def test_equal_runs_are_bitwise_equal(recipe: str, stage: int, isolate: bool) -> None:
    make_deterministic(torch.device("cuda"))
    try:
        made = getattr(Recipe, recipe)()
        assert run(made, stage, isolate) == run(made, stage, isolate)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
