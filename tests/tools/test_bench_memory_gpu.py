"""The account of kept bytes against the CUDA allocator: Ling-mini's widths, fewer experts (quicker to initialise)."""

from __future__ import annotations

import pytest
import torch

from model.config import ModelConfig
from tools.bench_memory import STAGES, Account, build, measure, sample_tokens

pytestmark = pytest.mark.gpu
CONFIG = ModelConfig(num_hidden_layers=3, vocab_size=8192, num_experts=32)


@pytest.fixture(scope="module")
def accounts() -> dict[tuple[str, int], Account]:
    device = torch.device("cuda")
    tokens = sample_tokens(CONFIG, 2, 2048, device)
    settings = [("block", stage) for stage in STAGES] + [("bf16", 0)]
    return {(recipe, stage): measure(build(CONFIG, recipe, stage, device), *tokens) for recipe, stage in settings}


def test_account_agrees_with_the_allocator_within_5_percent(accounts: dict[tuple[str, int], Account]) -> None:
    for key, account in accounts.items():
        assert abs(account.kept / account.cuda_kept - 1) < 0.05, (key, account.kept, account.cuda_kept)


def test_kept_bytes_and_the_allocators_peak_fall_with_every_stage(accounts: dict[tuple[str, int], Account]) -> None:
    kept = [accounts["block", s].cuda_kept for s in STAGES]
    peak = [accounts["block", s].cuda_peak for s in STAGES]
    assert all(later < earlier for earlier, later in zip(kept[:-1], kept[1:], strict=True)), kept
    assert all(later <= earlier for earlier, later in zip(peak[:3], peak[1:4], strict=True)) and peak[3] < peak[0], peak
    assert peak[4] < peak[0], peak


def test_fp8_storage_keeps_less_than_bf16(accounts: dict[tuple[str, int], Account]) -> None:
    assert accounts["block", 0].cuda_kept < 0.8 * accounts["bf16", 0].cuda_kept
