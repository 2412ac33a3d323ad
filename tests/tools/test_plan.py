"""The planner against the things it plans: the model's own accounts, its real bytes, its parameter counts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fp8.optimizer import ROLES, AdamW, States, bytes_report
from fp8.recipe import Recipe
from fp8.route import select_experts
from fp8.weight import weights
from model.config import ModelConfig
from model.loss import count_valid
from model.transformer import Transformer, initial_values
from parallel.grad_reduce import GradReducer
from parallel.mesh import build_mesh
from parallel.sharded_optimizer import make_optimizer, make_reducer
from tests.helpers import ROOT, run_ranks
from tests.model.tiny import CONFIG, batch, build, optimizer_of
from tools import plan
from tools.memory_account import LiveBytes
from tools.plan_layouts import Plan, configured, layouts, make_plan, round_batch, search, states_of
from tools.plan_memory import Layout, kept, local_parameters, memory, static
from tools.plan_speed import GPUS, Wires, ranks_visited, sent_bytes
from training.config import Config, load_config
from training.errors import exit_status

ROWS, SEQ = 4, 128
WIRED = replace(CONFIG, num_experts_per_tok=4, topk_group=4, moe_intermediate_size=256)
FP32 = States()


def measured_bytes(recipe: Recipe, stage: int) -> int:
    """Alive between forward and backward: the stash's, autograd's, what no hook sees (the heads' dX, closures' rotary tables)."""
    model = build(recipe, stage=stage, num_hidden_layers=3)
    tokens, labels = batch(ROWS, SEQ)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        losses = model(tokens, labels, count_valid(tokens, labels))
    own = {weight.data.untyped_storage().data_ptr() for _, weight in weights(model)}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    heads = 2 * ROWS * SEQ * CONFIG.hidden_size * 4
    tables = 2 * ROWS * SEQ * CONFIG.rotary_dim * 4 if stage >= 3 else 0
    assert losses.total.requires_grad
    return model.stash.account.total + sum(n for place, n in storages.items() if place not in own) + heads + tables


@pytest.mark.parametrize("stage", range(5))
@pytest.mark.parametrize("recipe", [Recipe.block(), Recipe.bf16()], ids=lambda r: r.name)
def test_kept_activations_are_what_forward_keeps(recipe: Recipe, stage: int) -> None:
    """Forecast for FP32 hidden states; on a GPU only the width differs."""
    config = replace(CONFIG, num_hidden_layers=3)
    forecast = kept(config, recipe, Layout(stage=stage, micro_batch=ROWS), SEQ, torch.float32)
    assert sum(forecast.values()) == pytest.approx(measured_bytes(recipe, stage), rel=0.02)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_kept_as_it_is_counts_once(stage: int) -> None:
    """By storages, so that two names of one tensor count once: what the formula leaves out is the same with and without a copy."""
    config, left_out = replace(CONFIG, num_hidden_layers=3), []
    for recipe in (Recipe.block(), Recipe.fp32()):
        model = build(recipe, stage=stage, num_hidden_layers=3)
        tokens, labels = batch(ROWS, SEQ)
        with LiveBytes() as alive:
            losses = model(tokens, labels, count_valid(tokens, labels))
            total = alive.total
        forecast = sum(kept(config, recipe, Layout(stage=stage, micro_batch=ROWS), SEQ, torch.float32).values())
        left_out.append(total - forecast)
        assert losses.total.requires_grad
    assert left_out[1] == pytest.approx(left_out[0], abs=0.01 * total)


@pytest.mark.parametrize("recipe", [Recipe.block(), Recipe.bf16()], ids=lambda r: r.name)
def test_static_bytes_are_the_models(recipe: Recipe) -> None:
    model = build(recipe)
    optimizer = optimizer_of(model)
    found = memory(CONFIG, recipe, FP32, Layout(), SEQ).static
    assert found["weights"] == sum(w.q.nbytes for _, w in weights(model))
    assert found["gradients"] == 4 * sum(w.numel for _, w in weights(model))
    assert isinstance(optimizer, AdamW)
    own_master = sum(4 * w.numel for _, w in weights(model) if w.data.dtype == torch.float32)
    assert found["states"] == 12 * sum(w.numel for _, w in weights(model)) - own_master


def test_more_layers_are_extrapolated_exactly() -> None:
    config = replace(CONFIG, num_hidden_layers=5)
    with torch.device("meta"):
        model = Transformer(config, Recipe.bf16(), Layout(world=4, tp=2, ep=4).mesh())
    found = static(config, Recipe.bf16(), FP32, 2, 4)
    assert found["dense parameters"] == sum(w.numel for _, w in weights(model) if not w.expert)
    assert found["expert parameters"] == sum(w.numel for _, w in weights(model) if w.expert)
    assert found["dense weights"] + found["expert weights"] == sum(w.q.nbytes for _, w in weights(model))


def test_published_sizes() -> None:
    """Ling-mini with MTP: 17.08B parameters, split over 8 expert ranks."""
    mini = ModelConfig(num_nextn_predict_layers=1)
    local = local_parameters(mini, Recipe.block(), FP32, Layout(world=8, ep=8))
    assert local["dense"] + 8 * local["experts"] == 16_255_638_528 + 827_861_248


def test_memory_falls_along_the_stages_and_with_sharding() -> None:
    mini = ModelConfig(num_nextn_predict_layers=1)
    peaks = [memory(mini, Recipe.block(), FP32, Layout(8, ep=8, stage=s), 4096).peak for s in range(5)]
    assert peaks == sorted(peaks, reverse=True)
    whole, sharded = (memory(mini, Recipe.block(), FP32, Layout(8, ep=2, zero=zero), 4096).static["states"] for zero in (0, 1))
    assert sharded < whole / 3.9  # edp 4, dp 8


def test_new_weights_on_their_way_count_where_little_else_is_alive() -> None:
    """All groups are sent at once (parallel/shard.py): under stage 4 that is more than what layers keep."""
    mini = ModelConfig(num_nextn_predict_layers=1)
    made = memory(mini, Recipe.block(), FP32, Layout(8, stage=4, zero=1), 512)
    assert made.working["weight gather"] == pytest.approx(made.static["weights"] * 9 / 8, rel=1e-3)
    assert made.peak == sum(made.static.values()) + made.working["weight gather"]
    assert "weight gather" not in memory(mini, Recipe.block(), FP32, Layout(1), 512).working


@pytest.fixture(scope="module")
def big() -> Config:
    one_rank = "train.global_batch=18144", "train.micro_batch=1", "parallel.tp=1", "parallel.ep=1"
    return load_config("configs/ling_1t.yaml", one_rank)


@pytest.mark.parametrize(("gpus", "gpu", "overrides", "fits"), [
    (2048, "h200", (), True), (512, "h200", (), True), (256, "h200", (), True), (128, "h200", (), False), (64, "h200", (), False),
    (64, "h200", ("optim.states=lean", "optim.grad_dtype=bf16"), True), (128, "b200", (), True),
])  # fmt: skip
def test_ling_1t_on_paper(gpus: int, gpu: str, overrides: tuple[str, ...], fits: bool) -> None:
    """docs/usage.md has the table; states a rank shrink with the cluster, and what fits is never faster than the floor."""
    config = load_config("configs/ling_1t.yaml", overrides)
    best = search(config, gpus, GPUS[gpu], states_of(config))[0]
    assert best.fits(GPUS[gpu]) is fits
    assert best.speed.expected > best.speed.floor > 0 and best.layout.world == gpus


def test_the_table_of_ling_1t_is_what_the_planner_finds() -> None:
    """docs/usage.md, within the rounding of its figures and a little for what changes in what layers keep."""
    lines = (ROOT / "docs/usage.md").read_text(encoding="utf-8").partition("Ling-1T on paper")[2].partition("##")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.match(r"\| \d", line)]
    assert len(rows) == 8
    for gpus, states, *layout, memory_gb, rate in rows:
        overrides = {"fp32": (), "lean": ("optim.states=lean", "optim.grad_dtype=bf16")}[states]
        config = load_config("configs/ling_1t.yaml", overrides)
        best = search(config, int(gpus), GPUS["h200"], states_of(config))[0]
        assert best.total / 1e9 == pytest.approx(float(memory_gb.partition(",")[0]), rel=0.02), gpus
        assert best.fits(GPUS["h200"]) is ("does not fit" not in memory_gb)
        if rate:
            x = best.layout
            assert [x.tp, x.ep, x.stage, x.micro_batch, x.zero] == [int(cell) for cell in layout], gpus
            assert best.speed.tokens / best.speed.expected / x.world == pytest.approx(float(rate), rel=0.02), gpus


def test_the_published_configs_fit_where_they_say() -> None:
    """The layouts that their files name: 8 H100 for Ling-mini, 32 H200 for Ling-flash, 2048 H200 for Ling-1T, one and two H200."""
    for name, gpus, gpu, overrides in (
        ("ling_mini", 8, "h100", ()), ("ling_flash", 32, "h200", ("train.global_batch=8192",)), ("ling_1t", 2048, "h200", ()),
        ("ling_mini_1gpu", 1, "h200", ()), ("ling_mini_2gpu", 2, "h200", ()), ("small", 1, "h100", ()),
    ):  # fmt: skip
        config = load_config(f"configs/{name}.yaml", overrides)
        made = make_plan(config, configured(config, gpus), GPUS[gpu], states_of(config))
        assert made.fits(GPUS[gpu]), f"{name}: {made.total / 1e9:.1f} GB"


def test_plans_that_fit_come_first_and_fastest_first(big: Config) -> None:
    found = search(big, 2048, GPUS["b200"], FP32)
    fits = [p.fits(GPUS["b200"]) for p in found]
    assert fits == sorted(fits, reverse=True)
    times = [p.token_seconds for p, fit in zip(found, fits, strict=True) if fit]
    assert times == sorted(times)
    assert all(p.speed.floor <= p.speed.expected for p in found)


def test_a_batch_that_does_not_divide_is_rounded_and_said(big: Config) -> None:
    assert round_batch(big, 2048) == 18432 and round_batch(big, 18144) == 18144
    assert round_batch(big, 100_000) is None
    made = make_plan(big, Layout(2048, ep=256), GPUS["h200"], FP32)
    assert "train.global_batch=18432" in "\n".join(plan.describe_plan(made, GPUS["h200"], big))


def test_offloaded_states_leave_the_gpu_and_cost_the_link() -> None:
    kept_, moved = (load_config("configs/ling_mini.yaml", [f"optim.offload={flag}"]) for flag in ("false", "true"))
    on, off = (make_plan(c, Layout(8, ep=8), GPUS["h200"], FP32) for c in (kept_, moved))
    assert off.memory.host + off.memory.static["states"] == on.memory.static["states"]  # those of FP32 weights stay
    assert on.memory.peak - off.memory.host <= off.memory.peak < on.memory.peak - 0.5 * off.memory.host
    assert off.speed.expected > on.speed.expected


def test_kept_transposes_cost_a_byte_a_parameter_and_save_a_turn_a_micro_batch() -> None:
    def planned(*over: str) -> list[Plan]:
        configs = [load_config(f"{ROOT}/configs/small.yaml", [*over, f"fp8.keep_transposed={v}"]) for v in ("false", "true")]
        return [make_plan(c, configured(c, 1), GPUS["h200"], states_of(c)) for c in configs]

    one, kept = planned()
    with torch.device("meta"):
        model = Transformer(load_config(f"{ROOT}/configs/small.yaml").model, Recipe.block())
    turned = [weight.q.nbytes for name, weight in weights(model) if weight.scale_inv is not None and name != "embedding"]
    assert (one.memory.static["transposes"], kept.memory.static["transposes"]) == (0, sum(turned))
    assert 0 <= sum(turned) - (kept.memory.peak - one.memory.peak) <= max(turned), "backward makes none any more"
    assert kept.speed.expected < one.speed.expected
    assert len({p.speed.expected for p in planned("train.global_batch=4", "train.micro_batch=4")}) == 1, "one turn a step anyway"


def test_layouts_respect_the_models_sizes() -> None:
    tiny = load_config("configs/tiny.yaml", [])
    found = layouts(tiny, 8)
    assert found and all(x.ep <= 8 and x.dp * x.tp == 8 for x in found)
    assert all(4 % (x.micro_batch * x.dp) == 0 for x in found)


def test_a_longer_wire_costs_more() -> None:
    config = load_config("configs/ling_mini.yaml", ["train.global_batch=4096"])
    near, far = (make_plan(config, Layout(64, ep=ep), GPUS["h200"], FP32).speed for ep in (8, 64))
    assert far.parts["communication"] > near.parts["communication"] > 0
    solo = make_plan(config, Layout(1), GPUS["h200"], FP32).speed
    assert sum(solo.sent.values()) == 0


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    config = ["--config", "configs/ling_mini.yaml", "train.global_batch=4096"]
    assert exit_status(lambda: plan.main([*config, "--gpus", "8"])) == 0
    said = capsys.readouterr().out
    for part in ("16,255,638,528 total", "bytes/param", "kept activations", "sent, GB/step", "floor", "assumptions", "BF16 with"):
        assert part in said
    assert exit_status(lambda: plan.main(["--config", "configs/ling_1t.yaml", "--gpus", "8"])) == 0
    assert "nothing fits" in capsys.readouterr().out
    assert exit_status(lambda: plan.main([*config, "--gpus", "12"])) == 0
    assert "as configured: not on 12 GPUs" in (said := capsys.readouterr().out) and "not a multiple of ep 8" in said
    assert exit_status(lambda: plan.main([*config, "--gpus", "100000"])) == 1
    assert "no layout: train.global_batch=4096" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        plan.main([*config, "--gpus", "0"])
    assert "0 is less than 1" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert exit_status(lambda: plan.main([*config, "--compare-allocator"])) == 2
        assert "needs a CUDA device" in capsys.readouterr().err


def test_ranks_that_a_token_visits_are_those_that_routing_visits() -> None:
    """Random scores through the router's own choice."""
    c = ModelConfig()
    scores = torch.sigmoid(torch.randn(2000, c.num_experts, generator=torch.Generator().manual_seed(0)))
    ids = select_experts(scores, c.n_group, c.topk_group, c.num_experts_per_tok)
    for ep in (2, 4, 8, 16):
        owner = ids // (c.num_experts // ep)
        visited = torch.zeros(len(ids), ep).scatter_(1, owner, 1.0).sum(1).mean() * (ep - 1) / ep
        assert ranks_visited(c, ep) == pytest.approx(float(visited), rel=0.12)
    assert ranks_visited(c, 1) == 0


def _sent(rank: int, size: int, tp: int, ep: int, zero: int, wire: str) -> dict[str, int]:
    """What one rank sends in a step of two micro-batches, by kind; and bytes that it holds after it."""
    mesh = build_mesh(tp, ep, "cpu")
    model = Transformer(WIRED, Recipe.block(), mesh, torch.float32).train()
    optimizer = make_optimizer(model, mesh, zero, "rows", False)
    for name, _, value in initial_values(model, 0):
        optimizer.set_master(name, value)
    reducer = make_reducer(weights(model), mesh, optimizer, wire, zero=zero)
    mesh.traffic.reset()
    for part in range(2):
        for _, weight in weights(model):
            weight.last_microbatch = reducer.each_microbatch or part == 1
        tokens, labels = batch(2, SEQ, seed=10 * part + mesh.dp.rank)
        model(tokens, labels, count_valid(tokens, labels)).total.backward()
        if reducer.each_microbatch or part == 1:
            reducer.finish(last=part == 1)
    own = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _gradients(model, reducer)}
    optimizer.step(1e-4)
    held = bytes_report(optimizer)
    return mesh.traffic.by_kind() | {
        "held gradients": sum(own.values()), "logged gradients": held["grad"], "held states": sum(held[role] for role in ROLES)
    }  # fmt: skip


def _gradients(model: Transformer, reducer: GradReducer) -> Iterator[Tensor]:
    """What of the gradients stays between steps."""
    yield from (weight.main_grad for _, weight in weights(model) if weight.main_grad is not None)
    yield from (bucket.own for bucket in reducer._buckets if hasattr(bucket, "own"))


@pytest.mark.distributed
@pytest.mark.parametrize(("tp", "ep", "zero", "wire"), [(1, 2, 0, "fp32"), (2, 2, 0, "fp32"), (1, 1, 1, "fp8"), (1, 2, 2, "fp32")])
def test_bytes_on_the_wire_and_held_are_what_ranks_send_and_hold(tp: int, ep: int, zero: int, wire: str) -> None:
    """Against the collectives' own count and the tensors that stay, averaged over ranks; hidden states are FP32 here."""
    layout, counts = Layout(2, tp, ep, micro_batch=2, zero=zero), run_ranks(2, _sent, tp, ep, zero, wire)
    held = local_parameters(WIRED, Recipe.block(), FP32, layout)
    sent = sent_bytes(WIRED, Recipe.block(), layout, SEQ, 2, held, torch.float32, Wires(gradients=wire))
    forecast = sent | {k: sent.pop(f"{k} dense", 0.0) + sent.pop(f"{k} experts", 0.0) for k in ("gradients", "weights")}
    static = memory(WIRED, Recipe.block(), FP32, layout, SEQ, torch.float32).static
    forecast |= {"held gradients": static["gradients"], "logged gradients": static["gradients"], "held states": static["states"]}
    for kind, value in forecast.items():
        measured = sum(c.get(kind, 0) for c in counts) / len(counts)
        assert value == pytest.approx(measured, rel=0.02 if kind.startswith(("held", "logged")) else 0.15), kind
