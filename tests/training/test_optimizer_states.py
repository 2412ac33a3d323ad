"""Low-bit optimizer states through configuration, training and checkpoints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fp8.optimizer import PRESETS, ROLES, AdamW, States, bytes_report
from fp8.recipe import Recipe
from fp8.transposed import keep_transposes
from fp8.weight import Piece, Weight, weights
from model.loss import count_valid
from model.transformer import initial_values
from parallel.mesh import Mesh
from tests.model.tiny import batch, build
from training.checkpoint import Checkpointer, load_masters
from training.config import CheckpointConfig, Config, RunConfig, load_config
from training.errors import UserError
from training.resources import Resources, steady_state
from training.run_state import whole_checkpoints
from training.shards import Shard, read_shards, write_shards
from training.start import set_gradient_format
from training.states import gradient_format, optimizer_states

ROOT = Path(__file__).parents[2]


class Run:
    """A tiny model with its optimizer and checkpoints."""

    def __init__(self, folder: Path, states: States, seed: int = 0) -> None:
        self.model = build(Recipe.block())
        set_gradient_format(self.model, "bf16" if states != States() else "fp32")
        self.optimizer = AdamW(weights(self.model), states=states)
        for name, _, value in initial_values(self.model, seed):
            self.optimizer.set_master(name, value)
        config = Config(run=RunConfig(dir=str(folder)), checkpoint=CheckpointConfig())
        self.checkpointer = Checkpointer(config, self.model, self.optimizer, Mesh.solo(), "tok", "data")

    def steps(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last + 1):
            for micro in range(2):
                tokens, labels = batch(seed=2 * step + micro)
                total = self.model(tokens, labels, count_valid(tokens, labels)).total
                total.backward()
                losses.append(total.item())
            self.optimizer.step(1e-3)
        return losses

    def bits(self) -> dict[str, Tensor]:
        found = {f"{n}.{k}": t for n, state in self.optimizer.state().items() for k, t in state.items()}
        found |= {n: w.data for n, w in weights(self.model)}
        return {name: t.detach().clone().contiguous().view(torch.uint8) for name, t in found.items()}


@pytest.mark.parametrize("states", [PRESETS["lean"], PRESETS["fp8_lm"], States("fp16", "coat", "bf16")], ids=str)
def test_a_resumed_run_goes_on_bitwise(states: States, tmp_path: Path) -> None:
    """Losses, states and weights; the FP8 weights are not in the checkpoint."""
    run = Run(tmp_path, states)
    run.steps(1, 2)
    folder = run.checkpointer.save(2, 8, None)
    stored = sum(f.stat().st_size for f in folder.iterdir())
    report = bytes_report(run.optimizer)
    own_masters = sum(w.data.nbytes for _, w in weights(run.model) if w.data.dtype == torch.float32)
    held = report["master"] + report["exp_avg"] + report["exp_avg_sq"] + own_masters
    assert held < stored < held + 400_000  # metadata and headers
    other = Run(tmp_path, states, seed=9)
    other.checkpointer.restore(lambda text: None)
    assert run.steps(3, 4) == other.steps(3, 4)
    mine, theirs = run.bits(), other.bits()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


def test_masters_load_without_an_optimizer_and_other_formats_are_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, PRESETS["lean"])
    run.steps(1, 1)
    folder = run.checkpointer.save(1, 4, None)
    bare = build(Recipe.block(), seed=5)
    load_masters(folder, bare, Mesh.solo())
    for (_, a), (_, b) in zip(weights(bare), weights(run.model), strict=True):
        assert torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))
    for states in (PRESETS["fp32"], PRESETS["fp8_lm"]):
        with pytest.raises(UserError, match="is stored as|missing|Missing"):
            Run(tmp_path, states).checkpointer.restore(lambda text: None)
    assert whole_checkpoints(tmp_path) == [folder]


def test_scales_are_sharded_with_their_blocks() -> None:
    """A rank's second half of the experts, and of the rows."""
    experts = Weight(2, 256, 256, recipe=Recipe.block(), global_shape=(4, 256, 256),
                     pieces=(Piece((2, 0, 0), (slice(0, 2), slice(0, 256), slice(0, 256))),))  # fmt: skip
    rows = Weight(128, 256, recipe=Recipe.block(), global_shape=(256, 256),
                  pieces=(Piece((128, 0), (slice(0, 128), slice(0, 256))),))  # fmt: skip
    optimizer = AdamW([("e", experts), ("r", rows)], states=PRESETS["lean"])
    for name, weight in optimizer.weights.items():
        optimizer.set_master(name, torch.randn(weight.data.shape))
    want = {
        ("e", "master.scale"): ((4, 2, 2), (2, 0, 0)),
        ("e", "exp_avg.scale"): ((4, 256, 2), (2, 0, 0)),
        ("r", "master.scale"): ((2, 2), (1, 0)),
        ("r", "exp_avg_sq.scale"): ((256, 2), (128, 0)),
        ("r", "exp_avg"): ((256, 256), (128, 0)),
    }
    for (name, kind), (shape, offset) in want.items():
        tensor = optimizer.state()[name][kind]
        shard = Shard.like(optimizer.weights[name], tensor, optimizer.tile_of(name, kind))
        assert (shard.global_shape, shard.pieces[0].offset) == (shape, offset), kind
        assert tensor[shard.pieces[0].local].shape == tensor.shape


def test_states_of_one_layout_load_into_another(tmp_path: Path) -> None:
    """Experts written whole are read by the rank that holds the second half, codes and scales, bit for bit."""
    whole = Weight(4, 256, 256, recipe=Recipe.block(), expert=True)
    optimizer = AdamW([("e", whole)], states=PRESETS["lean"])
    optimizer.set_master("e", torch.randn(4, 256, 256) * 0.02)
    for _ in range(2):
        whole.add_grad(torch.randn(4, 256, 256) * 1e-3)
        optimizer.step(1e-3)

    def shards(holder: AdamW) -> dict[str, Shard]:
        weight, state = holder.weights["e"], holder.state()["e"]
        return {kind: Shard.like(weight, tensor, holder.tile_of("e", kind)) for kind, tensor in state.items()}

    write_shards(tmp_path, shards(optimizer), Mesh.solo().world)
    half = Piece((2, 0, 0), (slice(0, 2), slice(0, 256), slice(0, 256)))
    part = Weight(2, 256, 256, recipe=Recipe.block(), expert=True, global_shape=(4, 256, 256), pieces=(half,))
    other = AdamW([("e", part)], states=PRESETS["lean"])
    other.allocate("e")
    read_shards(tmp_path, shards(other), Mesh.solo().world)
    other.refresh("e")
    other.num_steps = optimizer.num_steps
    grad = torch.randn(4, 256, 256) * 1e-3
    whole.add_grad(grad)
    part.add_grad(grad[2:])
    optimizer.step(1e-3)
    other.step(1e-3)
    assert torch.equal(part.data.view(torch.uint8), whole.data[2:].view(torch.uint8))
    for kind, tensor in other.state()["e"].items():
        assert torch.equal(tensor.view(torch.uint8), optimizer.state()["e"][kind][2:].contiguous().view(torch.uint8)), kind


def test_levels_are_presets_that_single_keys_override() -> None:
    def formats(*overrides: str) -> tuple[States, str]:
        config = load_config(str(ROOT / "configs/tiny.yaml"), overrides)
        return optimizer_states(config.optim, config.fp8.level), gradient_format(config.optim, config.fp8.level)

    assert formats() == (PRESETS["fp32"], "fp32")
    assert formats("fp8.level=O1") == (PRESETS["fp32"], "bf16")
    assert formats("fp8.level=O2") == formats("fp8.level=O3") == (PRESETS["fp8_lm"], "bf16")
    assert formats("fp8.level=O2", "optim.states=lean", "optim.grad_dtype=fp32") == (PRESETS["lean"], "fp32")
    assert formats("optim.states=lean", "optim.exp_avg_sq=bf16")[0] == States("fp16", "fp8", "bf16")
    for level in ("O1", "O2", "O3"):  # FP8 on the wire, sharded states and FP8 weight gathers are defaults that no level takes away
        parallel = load_config(str(ROOT / "configs/tiny.yaml"), [f"fp8.level={level}"]).parallel
        assert (parallel.grad_wire, parallel.zero) == ("auto", 1)


def test_the_fp32_reference_takes_no_low_bit_states() -> None:
    with pytest.raises(UserError, match="fp8.recipe=fp32 is the reference"):
        load_config(str(ROOT / "configs/tiny.yaml"), ["fp8.recipe=fp32", "optim.states=lean"])


def test_bf16_gradients_leave_embedding_head_norms_and_router_in_fp32() -> None:
    model = build(Recipe.block())
    set_gradient_format(model, "bf16")
    kinds = {name: weight.grad_dtype for name, weight in weights(model)}
    assert kinds["embedding"] == kinds["head"] == kinds["norm"] == torch.float32
    assert all(dtype == torch.float32 for name, dtype in kinds.items() if "router" in name)
    assert any("experts" in n and d == torch.bfloat16 for n, d in kinds.items())


def test_training_with_lean_states_follows_fp32_states(tmp_path: Path) -> None:
    exact, lean = Run(tmp_path / "a", PRESETS["fp32"]), Run(tmp_path / "b", PRESETS["lean"])
    want, got = exact.steps(1, 8), lean.steps(1, 8)
    assert abs(got[0] - want[0]) < 0.05  # masters are rounded to fp16 once
    assert abs(sum(got[-6:]) / sum(want[-6:]) - 1) < 0.01


def test_peak_by_class_adds_up_and_names_what_bf16_training_would_hold(tmp_path: Path) -> None:
    run = Run(tmp_path, PRESETS["lean"])
    run.steps(1, 1)
    resources = Resources(run.model, run.optimizer, Mesh.solo(), 0)
    before = resources.peak(torch.device("cpu"))
    resources.read(1)  # logging starts a new account; the run's peak stays
    assert resources.peak(torch.device("cpu")) == before
    classes, total, held, baseline = re.fullmatch(
        r"(.*) = ([\d.]+) GiB; without activations ([\d.]+), BF16 and FP32 AdamW ([\d.]+)", before
    ).groups()
    sizes = {name: float(size) for name, size in re.findall(r"([a-z ]+) ([\d.]+)", classes)}
    report = bytes_report(run.optimizer)
    assert set(sizes) == {"weights", " gradients", " optimizer states", " activations kept"}
    assert abs(sum(sizes.values()) - float(total)) < 0.03
    assert abs(float(held) - (float(total) - sizes[" activations kept"])) < 0.03
    assert abs(float(baseline) - 16 * report["parameters"] / 2**30) < 0.01


def test_kept_transposes_are_a_class_of_memory_of_their_own(tmp_path: Path) -> None:
    run = Run(tmp_path, PRESETS["lean"])
    without = steady_state(run.optimizer, torch.device("cpu"))
    keep_transposes(weight for _, weight in weights(run.model))
    resources = Resources(run.model, run.optimizer, Mesh.solo(), 0)
    assert "memory/transposes_gb" not in resources.read(0) and steady_state(run.optimizer, torch.device("cpu")) == without
    run.steps(1, 1)
    turned = sum(w.kept_transpose.of(w).nbytes for _, w in weights(run.model) if w.data.dim() > 1 and w.scale_inv is not None)
    assert resources.read(1)["memory/transposes_gb"] * 1e9 == pytest.approx(turned)
    report = bytes_report(run.optimizer)
    held = turned + sum(report[name] for name in ("weight", "grad", *ROLES))
    for text in (steady_state(run.optimizer, torch.device("cpu")), resources.peak(torch.device("cpu"))):
        assert " + transposes " in text
    assert f"{held / report['parameters']:.3f} bytes/parameter" in steady_state(run.optimizer, torch.device("cpu"))
