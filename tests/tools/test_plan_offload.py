"""Forecasts of states in host memory, peer copies and kept transposes, against what was measured and what a model holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fp8.offload import visiting
from fp8.optimizer import PRESETS, AdamW, bytes_report
from fp8.quantize import quantize
from fp8.recipe import Recipe
from fp8.transposed import keep_transposes, kept_bytes
from fp8.weight import weights
from model.loss import count_valid
from model.transformer import Transformer, initial_values
from parallel.mesh import Mesh
from parallel.payload import pack
from parallel.send_plan import slot_bytes
from tests.helpers import ROOT
from tools.bench_optimizer import SHAPES
from tools.plan_layouts import Plan, configured, make_plan, states_of
from tools.plan_memory import Layout, memory
from tools.plan_offload import AT_A_TIME, bytes_at_a_time, visit_seconds, visitors
from tools.plan_speed import GPUS
from training.config import Config, load_config

CUT = ("model.num_hidden_layers=4", "train.steps=8", "train.global_batch=4", "optim.warmup_steps=4")


def planned(path: str, *overrides: str, gpus: int = 1) -> Plan:
    config = load_config(f"{ROOT}/configs/{path}.yaml", overrides)
    return make_plan(config, configured(config, gpus), GPUS["h200"], states_of(config))


def test_both_directions_travel_at_once() -> None:
    """docs/performance.md: 209 ms for the five weights of `bench optimizer --offload`, 158 and 159 one way."""
    sizes = [4 * torch.Size(SHAPES[i % len(SHAPES)]).numel() for i in range(5)]
    assert sum(sizes) / 2**30 == pytest.approx(8.0, rel=0.02)
    assert 1e3 * visit_seconds(sizes) == pytest.approx(209, rel=0.1)
    assert visit_seconds([1.0] * 100, 1.0) == 101, "one beside the other, but for the first and the last"
    assert visit_seconds([], 1.0) == 0 == bytes_at_a_time([])


def test_a_large_one_has_little_beside_it() -> None:
    """docs/performance.md: four layers of Ling-mini, 409 ms in the optimizer and 489 a step; 15.0 GiB at the peak."""
    made = planned("ling_mini_1gpu", *CUT, "optim.offload=true")
    assert 1e3 * (made.speed.parts["optimizer"] + made.speed.parts["offload"]) == pytest.approx(409, rel=0.03)
    assert 1e3 * made.speed.expected == pytest.approx(489, rel=0.03)
    assert made.memory.peak / 2**30 == pytest.approx(15.0, rel=0.02)
    assert planned("ling_mini_1gpu", *CUT).memory.peak / 2**30 == pytest.approx(26.8, rel=0.02)


@pytest.mark.parametrize(("layers", "mtp", "tp", "ep"), [(3, 0, 1, 1), (4, 1, 1, 1), (1, 0, 1, 1), (3, 1, 2, 4)])
def test_visitors_are_the_models_own(layers: int, mtp: int, tp: int, ep: int) -> None:
    """All but FP32 weights, in the order that the optimizer takes them in, from a model of any depth."""
    config = load_config(f"{ROOT}/configs/tiny.yaml", [])
    sizes = replace(config.model, num_hidden_layers=layers, num_nextn_predict_layers=mtp)
    layout = Layout(tp * ep, tp, ep)
    with torch.device("meta"):
        model = Transformer(sizes, Recipe.block(), layout.mesh())
    optimizer, want = AdamW(weights(model), states=PRESETS["lean"]), []
    for name, weight in weights(model):
        optimizer.allocate(name)
        if weight.data.dtype != torch.float32:
            want.append(sum(t.nbytes for part in optimizer._state[name].values() for t in part.values()))
    assert list(visitors(sizes, Recipe.block(), PRESETS["lean"], layout)) == want
    if tp == ep == 1:
        shared = visitors(sizes, Recipe.block(), PRESETS["lean"], replace(layout, world=2, zero=1))
        assert sum(shared) == sum(nbytes // 2 for nbytes in want)


def test_states_that_stay_are_not_counted_away() -> None:
    kept, moved = (planned("ling_mini_1gpu", *CUT, f"optim.offload={flag}").memory for flag in ("false", "true"))
    assert moved.static["states"] + moved.host == kept.static["states"] and moved.static["states"] > 0
    assert AT_A_TIME == 3 and "at most three" in visiting.__doc__


def test_peer_copies_take_buffers_and_wait_less() -> None:
    """docs/performance.md: a step of small at ep=2 takes 86.5 instead of 87.9 ms."""
    options = "parallel.ep=2", "train.cuda_graphs=true", "train.micro_batch=4", "train.global_batch=8"
    plain, peer = (planned("small", *options, f"parallel.peer_copies={flag}", gpus=2) for flag in ("false", "true"))
    assert 1e3 * (plain.speed.expected - peer.speed.expected) == pytest.approx(87.9 - 86.5, rel=0.1)
    config = load_config(f"{ROOT}/configs/small.yaml", []).model
    tokens, x = 4 * 4096, torch.randn(256, config.hidden_size)
    row = pack(quantize(x, Recipe.block().activation)).nbytes / 256 + slot_bytes(config.num_experts_per_tok)
    want = tokens * (2 * row + 2 * config.hidden_size)  # both ranks' rows; sums in BF16
    assert peer.memory.peak - plain.memory.peak == peer.memory.static["peer buffers"] == pytest.approx(want, rel=0.03)
    others = [planned("small", "train.global_batch=8", gpus=2), planned("small", "train.global_batch=8", "parallel.ep=2", gpus=2)]
    assert [made.memory.static["peer buffers"] for made in others] == [0, 0]


def test_kept_transposes_are_what_a_step_keeps() -> None:
    """Forward and backward of a model on the CPU: the planner's bytes are those that then stay; nothing else of it grows."""
    config: Config = load_config(f"{ROOT}/configs/tiny.yaml", [])
    sizes = replace(config.model, num_hidden_layers=2)
    model = Transformer(sizes, Recipe.block(), Mesh.solo())
    keep_transposes(weight for _, weight in weights(model))
    optimizer = AdamW(weights(model))
    for name, _, value in initial_values(model, 0):
        optimizer.set_master(name, value)
    tokens = torch.randint(0, sizes.vocab_size, (1, 65), generator=torch.Generator().manual_seed(0))
    tokens, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    model(tokens, labels, count_valid(tokens, labels)).total.backward()
    forecast = memory(sizes, Recipe.block(), optimizer.states, Layout(keep_transposed=True), 64).static
    assert forecast["transposes"] == kept_bytes(optimizer.all_weights.values()) > 0
    assert forecast["weights"] == bytes_report(optimizer)["weight"]
