"""State of FP8 recipes in checkpoints: a resumed run goes on bitwise, another recipe starts anew or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fp8.auto import AutoFP8
from fp8.config import AutoConfig, Fp8Config
from fp8.optimizer import AdamW
from fp8.scaling import role_scales, update_scales
from fp8.weight import weights
from model.config import ModelConfig
from model.loss import count_valid
from model.router import update_expert_bias
from model.transformer import Transformer, initial_values
from parallel.mesh import Mesh
from training.checkpoint import Checkpointer, load_masters
from training.config import CheckpointConfig, Config, RunConfig
from training.errors import UserError

TINY = ModelConfig(
    vocab_size=256, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=64,
    intermediate_size=128, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, n_group=2, topk_group=1,
    initializer_range=0.02, loss_chunk=128,
)  # fmt: skip


class Run:
    """A small run whose batches are a function of the step."""

    def __init__(self, folder: Path, fp8: Fp8Config) -> None:
        self.config = Config(run=RunConfig(dir=str(folder)), checkpoint=CheckpointConfig(), model=TINY, fp8=fp8)
        self.model = Transformer(TINY, fp8.build(), dtype=torch.float32).train()
        self.optimizer = AdamW(weights(self.model))
        self.checkpointer = Checkpointer(self.config, self.model, self.optimizer, Mesh.solo(), "tok", "data")
        self.auto = AutoFP8(self.model, fp8.auto)
        self.warnings: list[str] = []
        self.step = 0
        state = self.checkpointer.restore(self.warnings.append)
        if state is None:
            for name, _, value in initial_values(self.model, 0):
                self.optimizer.set_master(name, value)
        else:
            self.step = state.step

    def advance(self, steps: int) -> list[Tensor]:
        losses = []
        for _ in range(steps):
            self.step += 1
            tokens = torch.randint(0, 256, (1, 33), generator=torch.Generator().manual_seed(self.step))
            tokens, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            self.auto.begin(self.step)
            total = self.model(tokens, labels, count_valid(tokens, labels)).total
            total.backward()
            update_scales(self.model)
            self.auto.end()
            self.optimizer.step(1e-3)
            update_expert_bias(self.model, Mesh.solo().world, 1e-3)
            losses.append(total.detach())
        return losses

    def save(self) -> None:
        self.checkpointer.save(self.step, self.step, None)


def config(recipe: str, **options: object) -> Fp8Config:
    return Fp8Config(recipe=recipe, amax_history=4, auto=AutoConfig(every=3, layers_per_group=1), **options)


@pytest.mark.parametrize("recipe", ["tensorwise_delayed", "tensorwise_current", "static", "mx", "block", "auto"])
def test_resumed_run_goes_on_bitwise_for_20_steps(recipe: str, tmp_path: Path) -> None:
    whole = Run(tmp_path, config(recipe))
    whole.advance(5)
    whole.save()
    want = whole.advance(20)
    resumed = Run(tmp_path, config(recipe))
    assert resumed.step == 5
    assert torch.equal(torch.stack(resumed.advance(20)), torch.stack(want))
    for a, b in zip(role_scales(whole.model), role_scales(resumed.model), strict=True):
        assert torch.equal(a.history, b.history) and torch.equal(a.scale_inv, b.scale_inv)
    assert resumed.auto.choices() == whole.auto.choices()


def test_histories_are_restored_before_they_are_used(tmp_path: Path) -> None:
    run = Run(tmp_path, config("tensorwise_delayed"))
    run.advance(3)
    run.save()
    resumed = Run(tmp_path, config("tensorwise_delayed"))
    used = [s for s in role_scales(resumed.model) if s.history.any()]  # the shared expert reads the routed experts' bytes
    assert len(used) == len(role_scales(resumed.model)) - 1 and all(s.history[:3].gt(0).all() and s.scale_inv > 0 for s in used)


@pytest.mark.parametrize(("before", "after"), [("bf16", "tensorwise_delayed"), ("tensorwise_delayed", "block"),
                                               ("block", "auto"), ("static", "tensorwise_delayed")])  # fmt: skip
def test_another_recipe_at_a_resume_starts_its_scales_anew(before: str, after: str, tmp_path: Path) -> None:
    run = Run(tmp_path, config(before))
    run.advance(3)
    run.save()
    (want,) = run.advance(1)
    if (before, after) == ("static", "tensorwise_delayed"):  # a history of another length: nothing is silently reinterpreted
        with pytest.raises(UserError, match="history"):
            Run(tmp_path, config(after))
        return
    resumed = Run(tmp_path, config(after))
    assert any(f"fp8.recipe changes from {before} to {after}" in w for w in resumed.warnings)
    (loss,) = resumed.advance(1)
    assert loss.isfinite() and abs(loss / want - 1) < 0.01


def test_another_history_length_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, config("tensorwise_delayed"))
    run.advance(2)
    run.save()
    with pytest.raises(UserError, match=r"a history of \d+ steps, this run of 8 \(fp8.amax_history"):
        Run(tmp_path, Fp8Config(recipe="tensorwise_delayed", amax_history=8))


def test_a_model_for_generation_needs_no_state_of_the_recipe(tmp_path: Path) -> None:
    run = Run(tmp_path, config("block"))
    run.save()
    model = Transformer(TINY, config("tensorwise_delayed").build(), dtype=torch.float32)
    load_masters(tmp_path / "checkpoints" / "step_00000000", model, Mesh.solo())
    assert model.eval().logits(torch.zeros(1, 4, dtype=torch.int64)).isfinite().all()
