"""The whole model through its kernels: no host synchronisation, and the gradients of the reference arithmetic."""

from dataclasses import replace

import pytest
import torch

from fp8.recipe import Recipe
from fp8.weight import weights
from model.config import ModelConfig
from model.loss import count_valid
from model.transformer import Transformer, initial_values
from parallel.mesh import Mesh
from tests.model.tiny import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs Hopper"),
]
CONFIG = ModelConfig(
    vocab_size=1024, hidden_size=256, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=256,
    num_experts=16, num_experts_per_tok=4, moe_intermediate_size=128, num_nextn_predict_layers=1, loss_chunk=128,
    aux_loss_weight=1e-3, initializer_range=0.02,
)  # fmt: skip


ALL_EXPERTS = replace(CONFIG, num_experts_per_tok=16, topk_group=CONFIG.n_group)  # nothing to choose: a smooth function


def build(device: str, recipe: Recipe, stage: int = 0, config: ModelConfig = CONFIG) -> Transformer:
    with torch.device(device):
        model = Transformer(config, recipe, Mesh.solo(), torch.bfloat16, stage)
    values = {name: value for name, _, value in initial_values(Transformer(config, Recipe.fp32()), 0)}
    for name, weight in weights(model):
        weight.set_(values[name].to(device))
    return model


def run(model: Transformer, device: str) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss, gradients) of one batch."""
    data = torch.randint(0, CONFIG.vocab_size, (2, 129), generator=torch.Generator().manual_seed(0)).to(device)
    tokens, labels = data[:, :-1].contiguous(), data[:, 1:].contiguous()
    losses = model(tokens, labels, count_valid(tokens, labels))
    losses.total.backward()
    return losses.total.item(), {name: w.main_grad.cpu() for name, w in weights(model)}


def disturbed(recipe: Recipe, config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """The reference's gradients after half a BF16 step on the embedding: the yardstick for any rounding."""
    model = build("cpu", recipe, config=config)
    data = dict(weights(model))["embedding"].data
    data.copy_(data.float() * (1 + 2**-9 * torch.randn(data.shape, generator=torch.Generator().manual_seed(seed))))
    return run(model, "cpu")[1]


@pytest.mark.parametrize("config", [ALL_EXPERTS, CONFIG], ids=["all experts", "4 of 16"])
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("name", ["block", "bf16"])
def test_gradients_are_those_of_the_reference(name: str, stage: int, config: ModelConfig) -> None:
    """With 4 of 16 experts near ties of the router fall the other way on any rounding, more or fewer of them: the largest of three
    disturbances is the yardstick."""
    recipe = getattr(Recipe, name)()
    loss, grads = run(build("cuda", recipe, stage, config), "cuda")
    want_loss, want = run(build("cpu", recipe, config=config), "cpu")
    assert loss == pytest.approx(want_loss, rel=2e-3)
    noisy = [disturbed(recipe, config, seed) for seed in ((1,) if config is ALL_EXPERTS else (1, 2, 3))]
    found = {key: relative_error(grads[key], want[key]) for key in want}
    noise = {key: max(relative_error(other[key], want[key]) for other in noisy) for key in want}
    over = {key: (error, noise[key]) for key, error in found.items() if not error < 2 * noise[key] + 0.02}
    assert not over, over


@pytest.mark.parametrize("name", ["block", "bf16"])
def test_recomputation_changes_no_bit(name: str) -> None:
    """Nor does a second run: what train.deterministic promises."""
    recipe = getattr(Recipe, name)()
    torch.use_deterministic_algorithms(True)  # also fills new memory with NaN
    try:
        kept, recomputed, again = (run(build("cuda", recipe, stage), "cuda") for stage in (0, 2, 0))
    finally:
        torch.use_deterministic_algorithms(False)
    for other in (again, recomputed):
        assert kept[0] == other[0]
        assert [key for key, grad in kept[1].items() if not torch.equal(grad, other[1][key])] == []


def test_no_host_synchronisation() -> None:
    model = build("cuda", Recipe.block())
    tokens = torch.randint(0, CONFIG.vocab_size, (2, 128), device="cuda")
    num_valid = count_valid(tokens, tokens)
    model(tokens, tokens, num_valid).total.backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(tokens, tokens, num_valid).total.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
