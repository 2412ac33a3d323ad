"""tools.roofline: FLOPs or bytes, whichever takes longer."""

from __future__ import annotations

import pytest

from model.config import ModelConfig
from tools.roofline import PEAK, linear_seconds, part_seconds, step_seconds, step_share

C, RATE = ModelConfig(), 4e12


def test_many_rows_are_bound_by_the_tensor_cores() -> None:
    flops = 6 * 16384 * C.vocab_size * C.hidden_size
    assert part_seconds(C, "head", 16384, 4096, True, RATE) == pytest.approx(flops / PEAK[True])
    assert part_seconds(C, "head", 16384, 4096, False, RATE) == pytest.approx(flops / PEAK[False])


def test_few_rows_are_bound_by_their_weights() -> None:
    """Read twice, the gradient written once, in FP32: 1 + 1 + 4 bytes a parameter in FP8, 2 + 2 + 4 in BF16; 2 less in BF16."""
    size = 256 * 1024 * 2048
    assert linear_seconds(8, 1024, 2048, True, RATE, experts=256) == pytest.approx(6 * size / RATE, rel=1e-3)
    assert linear_seconds(8, 1024, 2048, False, RATE, experts=256) == pytest.approx(8 * size / RATE, rel=1e-3)
    assert linear_seconds(8, 1024, 2048, True, RATE, experts=256, grad=2) == pytest.approx(4 * size / RATE, rel=1e-3)


def test_a_step_is_its_parts() -> None:
    parts = {part: part_seconds(C, part, 4096, 4096, True, RATE) for part in ("attention", "dense", "moe", "head")}
    moe = C.num_hidden_layers - C.first_k_dense_replace
    assert C.num_nextn_predict_layers == 0
    want = C.num_hidden_layers * parts["attention"] + moe * parts["moe"] + C.first_k_dense_replace * parts["dense"] + parts["head"]
    assert step_seconds(C, 4096, 4096, True, RATE) == pytest.approx(want)
    assert part_seconds(C, "layer", 4096, 4096, True, RATE) == pytest.approx(parts["attention"] + parts["moe"])


def test_a_step_in_the_least_time_is_all_of_the_roofline() -> None:
    """Two micro-batches read their weights twice; without a copy rate there is no roofline."""
    least = step_seconds(C, 2048, 1024, True, RATE)
    assert step_share(C, 2, 2048, 1024, True, 2e3 * least, RATE) == pytest.approx(1.0)
    assert step_share(C, 1, 4096, 1024, True, 2e3 * least, RATE) < 1.0
    assert step_share(C, 2, 2048, 1024, True, 2e3 * least, 0.0) is None
