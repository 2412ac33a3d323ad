"""State and memory of weights under FP8: what accumulates, what is cached (nothing), how many bytes stay."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fp8.hardware import matrix_table
from fp8.linear import linear, quantize_activation
from fp8.optimizer import AdamW
from fp8.permute import gather_rows_ref
from fp8.quantize import cast_fp8, quantize, requantize_t
from fp8.recipe import E4M3, Recipe, recipe_named
from fp8.stash import Stash
from fp8.weight import Weight, weights
from model.loss import count_valid
from model.transformer import Transformer
from tests.fp8.test_recipes import TINY, backward, batch, build
from tests.helpers import run_ranks
from tools.memory_account import LiveBytes

DOCS = Path(__file__).parents[2] / "docs" / "numerics.md"


@pytest.mark.parametrize("name", ["block", "tensorwise_delayed", "mx"])
def test_micro_batch_without_labels_adds_nothing(name: str) -> None:
    """Without the router's own loss, which needs no labels."""
    quiet = replace(TINY, router_z_loss_weight=0.0)
    one, two = build(name, config=quiet)[0], build(name, config=quiet)[0]
    num_valid, (tokens, labels) = count_valid(*batch(1)), batch(2)
    one(*batch(1), num_valid).total.backward()
    two(*batch(1), num_valid).total.backward()
    two(tokens, torch.full_like(labels, -100), num_valid).total.backward()
    for (n, a), (_, b) in zip(weights(two), weights(one), strict=True):
        assert torch.equal(a.main_grad, b.main_grad), n


def test_second_use_in_a_step_accumulates() -> None:
    """Head and embedding are used twice with MTP; a shared layer too."""
    weight = Weight(128, 128, recipe=Recipe.block(), num_uses=2)
    weight.set_(torch.eye(128))
    x = torch.ones(8, 128)
    for _ in range(2):
        linear(quantize_activation(x, weight, Stash()), weight).sum().backward()
    assert weight.main_grad.eq(16).all()


@pytest.mark.parametrize("name", ["block", "tensorwise_delayed"])
def test_forward_always_reads_this_steps_weights(name: str) -> None:
    """There is no weight cache that could be stale: after the optimizer's step, and from eval to train."""
    model, optimizer = build(name)
    tokens, _ = batch()
    first = model.eval().logits(tokens)
    backward(model.train())
    optimizer.step(1e-2)
    second = model.eval().logits(tokens)
    third = model.train().eval().logits(tokens)
    assert (second - first).abs().max() > 1e-3 and torch.equal(second, third)


@pytest.mark.parametrize(("name", "want"), [("block", 1 + 4 / 128**2), ("mx", 1 + 4 / 32**2), ("tensorwise_current", 1.0)])
def test_bytes_per_parameter_and_one_resident_copy(name: str, want: float) -> None:
    """Transposes are made on demand and dropped: after backward nothing but gradients is left."""
    weight = Weight(256, 512, recipe=recipe_named(name))
    weight.set_(torch.randn(256, 512))
    assert abs(weight.q.nbytes / weight.numel - want) <= 4 / weight.numel
    x = torch.ones(64, 512, requires_grad=True)
    with LiveBytes() as live:
        linear(quantize_activation(x, weight, Stash()), weight).sum().backward()
        assert live.total <= weight.main_grad.nbytes + x.grad.nbytes + 1024


def test_scales_travel_with_their_rows_through_permutation_and_padding() -> None:
    x = torch.randn(6, 256) * torch.logspace(-6, 6, 6)[:, None]
    q = quantize(x, Recipe.block().activation)
    moved = gather_rows_ref(q, torch.tensor([5, -1, 0, 3]))
    assert torch.equal(moved.dequantize(), torch.stack([q.dequantize()[5], torch.zeros(256), q.dequantize()[0], q.dequantize()[3]]))


@pytest.mark.parametrize("name", ["block", "mx"])
def test_row_scales_lie_as_the_gemm_wants_them_without_a_copy(name: str) -> None:
    """Column-major rows scales from the quantiser on, through permutation, to the GEMM."""
    q = quantize(torch.randn(48, 256), recipe_named(name).activation)
    for operand in (q, gather_rows_ref(q, torch.arange(16))):
        assert operand.scale_inv.stride() == (1, operand.shape[0])
    assert requantize_t(q).scale_inv.is_contiguous()


def test_zero_gradient_leaves_weights_where_they_are() -> None:
    model, _ = build("block")
    optimizer = AdamW(weights(model), weight_decay=0.0)
    before = {}
    for name, weight in weights(model):
        value = weight.q.dequantize()
        optimizer.set_master(name, value)
        before[name] = weight.data.clone()
    for _ in range(20):
        for _, weight in weights(model):
            weight.add_grad(torch.zeros(weight.data.shape))
        optimizer.step(1e-2)
    for name, weight in weights(model):
        assert torch.equal(weight.data.reshape(-1).view(torch.uint8), before[name].reshape(-1).view(torch.uint8)), name


def _rank_with_nan(rank: int, size: int) -> tuple[str, bool]:
    """One rank's gradient turns NaN; returns what TrainStep says, and whether anything moved."""
    from parallel.mesh import build_mesh
    from training.data import Batch
    from training.metrics import Phases
    from training.schedule import OptimConfig
    from training.step import TrainStep

    mesh = build_mesh()
    recipe = Recipe.tensorwise_delayed(history=2)
    model = Transformer(TINY, recipe, mesh, torch.float32).train()
    optimizer = AdamW(weights(model))
    for name, weight in weights(model):
        optimizer.set_master(name, torch.full(weight.data.shape, 0.02) if weight.data.dim() > 1 else torch.ones(weight.data.shape))
    step = TrainStep(model, optimizer, mesh, OptimConfig(), 1e-3, Phases(torch.device("cpu")))
    if rank == 1:
        model.layers[0].attention.out.register_forward_pre_hook(lambda *_: None)
        quantize_grad = model.layers[0].attention.out.quantize_grad
        model.layers[0].attention.out.quantize_grad = lambda dy: quantize_grad(dy * float("nan"))
    before = {k: v.clone() for k, v in model.state_dict().items() if "seen" not in k and "counts" not in k}
    fields = {name: None for name in Batch.__dataclass_fields__}
    tokens, labels = batch(rank)
    problem = step(1, [Batch(**fields | dict(tokens_BS=tokens, labels_BS=labels, max_seqlen=0))], 1e-3).problem
    now = model.state_dict()
    same = all(torch.equal(v.reshape(-1).view(torch.uint8), now[k].reshape(-1).view(torch.uint8)) for k, v in before.items())
    return problem, same


@pytest.mark.distributed
def test_nan_in_one_ranks_gradient_is_seen_by_every_rank_and_nothing_moves() -> None:
    results = run_ranks(2, _rank_with_nan)
    assert results[0] == results[1] and "gradient norm" in results[0][0] and results[0][1]


@pytest.mark.slow
def test_cast_saturates_when_compiled() -> None:
    x = torch.tensor([448.0, 464.0, 465.0, 1e3, float("inf"), -1e9])
    assert torch.compile(cast_fp8)(x, E4M3).float().tolist() == [448.0] * 5 + [-448.0]


# ---------------------------------------------------------------- docs/numerics.md


def test_the_example_for_users_of_fp8_autocast_runs() -> None:
    page = DOCS.read_text(encoding="utf-8")
    page = page[page.index("## If you come from fp8_autocast") :]
    code = re.search(r"\n\n((?:    .*\n|\n)*?    x\.grad, weight\.main_grad\n)", page)[1]
    namespace: dict[str, object] = {}
    exec("\n".join(line[4:] for line in code.splitlines()), namespace)  # noqa: S102 (our own page)
    assert namespace["weight"].main_grad.shape == (256, 128) and namespace["x"].grad.norm() > 0


def test_the_hardware_tables_of_page_and_readme_are_the_matrix() -> None:
    assert matrix_table() in DOCS.read_text(encoding="utf-8")
    assert matrix_table() in (DOCS.parents[1] / "README.md").read_text(encoding="utf-8")
