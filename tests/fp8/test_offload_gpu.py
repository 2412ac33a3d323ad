"""Optimizer states in host memory, on a GPU."""

import pytest
import torch

from fp8.optimizer import PRESETS, AdamW, States
from fp8.recipe import Recipe
from fp8.weight import Weight

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("states", PRESETS.values(), ids=str)
def test_offloaded_states_give_the_same_bits(states: States) -> None:
    values = [torch.randn(256, 128 * (i + 1), device="cuda") for i in range(5)]
    results = []
    for offload in (False, True):
        with torch.device("cuda"):
            named = {f"w{i}": Weight(*v.shape, recipe=Recipe.block()) for i, v in enumerate(values)}
        optimizer = AdamW(named.items(), states=states, offload=offload)
        for name, value in zip(named, values, strict=True):
            optimizer.set_master(name, value)
        for step in range(3):
            for weight, value in zip(named.values(), values, strict=True):
                weight.add_grad(value * 1e-3 * (step + 1))
            optimizer.step(1e-3)
        tensors = [t for state in optimizer.state().values() for t in state.values()]
        assert all(t.is_pinned() for t in tensors) == offload
        results.append([t.cpu().contiguous().view(torch.uint8) for t in (*tensors, *(w.data for w in named.values()))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_no_more_than_three_offloaded_states_visit_at_once() -> None:
    """The host queues copies much faster than they travel: without a wait, memory for all states would be taken at once. And what
    a step has taken serves the next."""
    with torch.device("cuda"):
        named = {f"w{i}": Weight(2048, 4096, recipe=Recipe.block()) for i in range(10)}
    optimizer = AdamW(named.items(), states=PRESETS["fp32"], offload=True)
    for name in named:
        optimizer.set_master(name, torch.randn(2048, 4096, device="cuda"))
    reserved = []
    for step in range(5):
        for weight in named.values():
            weight.add_grad(torch.ones(1, device="cuda").expand(2048, 4096))
        torch.cuda.synchronize()
        if step == 0:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        optimizer.step(1e-3)
        if step == 0:
            assert (torch.cuda.max_memory_allocated() - before) / (12 * 2048 * 4096) < 3.1
        reserved.append(torch.cuda.memory_reserved())
    # What has come free is seen late now and then, which takes one tensor more; new streams every step would take three visitors.
    assert reserved[-1] - reserved[0] < 12 * 2048 * 4096
