"""Routed experts with given ids: the fused path against the reference arithmetic, forward and every gradient."""

import pytest
import torch

from fp8.linear import quantize_activation
from fp8.recipe import Recipe
from fp8.stash import Stash
from model.config import ModelConfig
from model.experts import RoutedExperts
from parallel.mesh import Axis
from tests.model.tiny import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs Hopper"),
]
CONFIG = ModelConfig(hidden_size=256, num_experts=12, num_experts_per_tok=3, moe_intermediate_size=128)
TOKENS = 300


def run(device: str, recipe: Recipe, stage: int) -> dict[str, torch.Tensor]:
    """Output and gradients of tokens, routing weights and expert weights; experts 4 and 11 get nothing."""
    draw = torch.Generator().manual_seed(0)

    def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=draw) * scale

    with torch.device(device):
        experts = RoutedExperts(CONFIG, recipe, Axis.solo(), Stash(), "experts", stage)
    experts.gate_up.set_(randn(12, 256, 256, scale=0.1).to(device))
    experts.down.set_(randn(12, 256, 128, scale=0.1).to(device))
    x = randn(TOKENS, 256).bfloat16().to(device).requires_grad_()
    w = torch.rand(TOKENS, 3, generator=draw).to(device).requires_grad_()
    score = torch.rand(TOKENS, 12, generator=draw)
    score[:, [4, 11]] = -1
    ids = score.topk(3, dim=1).indices.to(device)
    dy = randn(TOKENS, 256, scale=1e-3).bfloat16().to(device)
    y = experts(experts.work(quantize_activation(x, experts.gate_up, Stash()), experts.start(ids), w))
    y.backward(dy)
    found = {"y": y.detach(), "dx": x.grad, "dweights": w.grad, "dw1": experts.gate_up.main_grad, "dw2": experts.down.main_grad}
    return {name: value.float().cpu() for name, value in found.items()}


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("name", ["block", "bf16"])
def test_forward_and_gradients(name: str, stage: int) -> None:
    recipe = getattr(Recipe, name)()
    got, want = run("cuda", recipe, stage), run("cpu", recipe, 0)
    for key, value in want.items():
        # same bytes into the same products; a value near a rounding tie may end one step away
        assert relative_error(got[key], value) < (0.03 if name == "block" else 0.01), key
    assert (got["dw1"][[4, 11]] == 0).all() and (got["dw2"][[4, 11]] == 0).all()
