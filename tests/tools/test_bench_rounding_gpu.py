"""`tools.bench rounding` on a GPU: every mixture of formats multiplies what it says, whichever kernels that takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fp8.recipe import Recipe
from model.transformer import Transformer, initial_values
from tests.model import tiny
from tools.bench_rounding import gradient_table, loss_table
from tools.rounding_settings import CLASSES, forward_settings, gradient_settings

pytestmark = pytest.mark.gpu
WIDE = dict(hidden_size=256, moe_intermediate_size=256, head_dim=128)


@pytest.fixture(scope="module")
def like() -> Transformer:
    with torch.device("cuda"):
        model = Transformer(replace(tiny.CONFIG, **WIDE), Recipe.fp32(), dtype=torch.float32).eval()
    for _, weight, value in initial_values(model, 0):
        weight.set_(value)
    return model


def text(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [tuple(t.cuda() for t in tiny.batch(4, 256, seed=i)) for i in range(count)]


def test_every_gradient_is_near_fp32s(like: Transformer) -> None:
    rows = gradient_table(like, text(2), gradient_settings())
    for row in rows:
        if row["setting"].endswith("same experts"):
            bound = 0.1 if row["setting"].startswith("bf16") else 0.4  # 0.01 and 0.04 to 0.15 in reference arithmetic
            assert 0 < row["error"] < bound and row["cosine"] > 1 - bound**2, row
    errors = {(row["setting"], row["kind"]): row["error"] for row in rows if row["batches"] == 2}
    for kind in CLASSES:
        exact, rounded, coarse = (errors[f"{name}, same experts", kind] for name in ("bf16", "block", "block, hybrid"))
        assert exact < rounded < coarse, kind


def test_every_loss_is_near_bf16s(like: Transformer) -> None:
    rows = loss_table(like, text(2), forward_settings(), 2)
    assert [row["setting"] for row in rows] == [s.name for s in forward_settings()]
    assert all(abs(row["gap"]) < 0.005 and row["choices"] < 0.2 for row in rows)
    assert sum(row["gap"] != 0 for row in rows) > len(rows) - 3
