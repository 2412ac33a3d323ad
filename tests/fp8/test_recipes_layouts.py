"""Every recipe over several ranks: rows that travel share a scale, state moves in step, the losses are those of one rank."""

from __future__ import annotations

import pytest
import torch

from fp8.config import AutoConfig, Fp8Config
from fp8.scaling import role_scales
from fp8.weight import weights
from model.config import ModelConfig
from model.transformer import Transformer, initial_values
from parallel.mesh import Mesh, build_mesh
from tests.helpers import run_ranks
from training.data import Batch
from training.metrics import Phases
from training.schedule import OptimConfig
from training.step import TrainStep

TINY = ModelConfig(
    vocab_size=256, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    intermediate_size=256, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256, n_group=2, topk_group=1,
    initializer_range=0.02, loss_chunk=128,
)  # fmt: skip
RECIPES = ("tensorwise_current", "tensorwise_delayed", "static", "mx", "auto")
STEPS = 3


def train(recipe: str, mesh: Mesh, stage: int) -> tuple[list[float], list[list[float]], dict]:
    """(losses, histories, choices) of a few steps on the same global batch, whatever the layout."""
    from fp8.optimizer import AdamW

    fp8 = Fp8Config(recipe=recipe, amax_history=2, auto=AutoConfig(every=2))
    model = Transformer(TINY, fp8.build(), mesh, torch.float32, stage).train()
    optimizer = AdamW(weights(model))
    for name, _, value in initial_values(model, 0):
        optimizer.set_master(name, value)
    step = TrainStep(model, optimizer, mesh, OptimConfig(clip=0.0), 1e-3, Phases(torch.device("cpu")), auto=fp8.auto)
    losses = []
    for i in range(1, STEPS + 1):
        tokens = torch.randint(0, 256, (4, 33), generator=torch.Generator().manual_seed(i))
        own = tokens.chunk(mesh.dp.size)[mesh.dp.rank]
        fields = {name: None for name in Batch.__dataclass_fields__}
        fields |= dict(tokens_BS=own[:, :-1].contiguous(), labels_BS=own[:, 1:].contiguous(), max_seqlen=0)
        losses.append(step(i, [Batch(**fields)], 1e-3).loss)
    return losses, [s.history.tolist() for s in role_scales(model)], step.auto.choices()


def _on_ranks(rank: int, size: int, tp: int, ep: int, stage: int) -> dict[str, tuple]:
    mesh = build_mesh(tp=tp, ep=ep)
    return {recipe: train(recipe, mesh, stage) for recipe in RECIPES}


@pytest.mark.distributed
@pytest.mark.parametrize(("tp", "ep", "stage"), [(2, 2, 0), (1, 2, 4)])
def test_losses_are_those_of_one_rank_and_state_is_equal_everywhere(tp: int, ep: int, stage: int) -> None:
    results = run_ranks(2, _on_ranks, tp, ep, stage)
    for recipe in RECIPES:
        losses, _, choices = train(recipe, Mesh.solo(), 0)
        for rank in results:
            got, histories, got_choices = rank[recipe]
            assert got == results[0][recipe][0] and histories == results[0][recipe][1]
            assert got_choices == results[0][recipe][2] and set(got_choices) == set(choices)
            for a, b in zip(got, losses, strict=True):
                assert abs(a / b - 1) < 2e-3, (recipe, got, losses)
