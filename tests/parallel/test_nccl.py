"""The same layouts on two GPUs over NCCL: `pytest -m multi_gpu tests/parallel/test_nccl.py`; a short form runs on CPU ranks.

A cut of configs/small.yaml takes 20 AdamW steps under each layout and on one GPU. tp=2 x ep=2 needs no four ranks: ep spans
consecutive ranks of the whole world, the two of a tp group included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fp8.optimizer import AdamW, states_named
from fp8.recipe import recipe_named
from fp8.scaling import role_scales, update_scales
from fp8.weight import weights
from model.config import ModelConfig
from model.loss import NumValid, count_valid
from model.router import routers, update_expert_bias
from model.transformer import Transformer, initial_values
from parallel.collectives import all_reduce
from parallel.grad_auto_scale import attach_auto_scale
from parallel.grad_reduce import GradReducer
from parallel.mesh import WIRES, Mesh, build_mesh
from parallel.sharded_optimizer import make_optimizer, make_reducer
from tests.helpers import largest, run_ranks
from tests.parallel.layouts import CONFIG
from training.checkpoint import tensors
from training.graph import GraphedMicroBatch
from training.replicas import compare_replicas, fingerprint
from training.shards import read_shards, write_shards

# configs/small.yaml with fewer layers and experts, so that a checkpoint of it is 1.3 GB
CUT = ModelConfig(
    vocab_size=4096, hidden_size=1024, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4, head_dim=128,
    intermediate_size=3072, first_k_dense_replace=1, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=512, n_group=4,
    topk_group=2, num_nextn_predict_layers=1, aux_loss_weight=1e-3, loss_chunk=4096,
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """Keys of the `parallel` section."""

    tp: int = 1
    ep: int = 1
    sequence: bool = True
    wires: str = "bf16"
    grad_wire: str = "fp32"
    zero: int = 0
    overlap: bool = False
    dispatch: str = "auto"
    graph: bool = False
    peer: bool = False
    alone: bool = False  # every process for itself
    reverse: bool = False  # the rows of a batch, which changes nothing but the order of sums


LAYOUTS = {
    "one process, rows reversed": Layout(alone=True, reverse=True),
    "dp=2": Layout(),
    "dp=2, zero 1, FP8 gradients, gather overlapped": Layout(grad_wire="fp8", zero=1, overlap=True),
    "dp=2, zero 2, FP8-LM": Layout(grad_wire="fp8_lm", zero=2),
    "tp=2": Layout(tp=2),
    "tp=2, no sequence parallel": Layout(tp=2, sequence=False),
    "ep=2": Layout(ep=2),
    "ep=2, counted": Layout(ep=2, dispatch="counted"),
    "ep=2, peer copies": Layout(ep=2, peer=True),
    "tp=2, ep=2": Layout(tp=2, ep=2),
    "tp=2, ep=2, FP8 sums": Layout(tp=2, ep=2, wires="fp8"),
    "dp=2, graph": Layout(zero=1, overlap=True, graph=True),
    "ep=2, graph": Layout(ep=2, zero=1, overlap=True, graph=True),
    "ep=2, peer copies, graph": Layout(ep=2, zero=1, overlap=True, graph=True, peer=True),
}
# of the loss in each step against one process's: FP32 sums in another order; BF16 and FP8 round in other places
BOUNDS = {"fp32": 1e-5, "bf16": 5e-3, "block": 2e-2}
# of the gradient norm in step 1, where weights are the same: elements rounded apart by e (2^-9, FP8 0.027, an FP8-LM sum 0.06) move
# a norm by e^2 / 2, which is 0.002 at most; experts chosen at near ties, and shared KV heads' halves under tp, add what is left.
# Later norms are not held to anything: steps without warmup spike, and the same steps with rows reversed lie as far apart.
FIRST_NORM = {"fp32": 1e-5, "bf16": 1e-2, "block": 2e-2}


@dataclass(frozen=True)
class Trip:
    """What every process does: `steps` steps of `rows` x `seq` tokens each, on GPUs or on the CPU."""

    config: ModelConfig
    recipe: str
    steps: int
    rows: int
    seq: int
    cuda: bool
    lr: float = 1e-3
    warmup: int = 1
    seed: int = 5
    shared: bool = False  # all ranks on one GPU, which NCCL refuses: over gloo, by way of the host

    def device(self, rank: int) -> torch.device:
        return torch.device("cuda", 0 if self.shared else rank) if self.cuda else torch.device("cpu")

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """(tokens, labels) [rows, seq], as uneven as text; rows with unequal numbers of labels."""
        uniform = torch.rand(self.rows, self.seq + 1, generator=torch.Generator().manual_seed(step))
        tokens = (uniform**3 * self.config.vocab_size).long()
        labels = tokens[:, 1:].clone()
        labels[0, self.seq // 2 :], labels[1, ::3] = -100, -100
        return tokens[:, :-1].contiguous(), labels


class Sailor:
    """A model under a layout, on its way through the steps of a trip."""

    def __init__(self, trip: Trip, mesh: Mesh, layout: Layout, device: torch.device) -> None:
        self.trip, self.mesh, self.device, self.reverse = trip, mesh, device, layout.reverse
        dtype = torch.float32 if trip.recipe == "fp32" else torch.bfloat16
        with torch.device(device):
            self.model = Transformer(trip.config, recipe_named(trip.recipe), mesh, dtype).train()
        attach_auto_scale(self.model, mesh, layout.grad_wire)
        adamw = 0.9, 0.95, 1e-8, 0.1, states_named("fp32")
        self.optimizer: AdamW = make_optimizer(self.model, mesh, layout.zero, "rows", layout.overlap, *adamw)
        for name, _, value in initial_values(self.model, seed=trip.seed):
            self.optimizer.set_master(name, value)
        self.named, mu = list(weights(self.model)), getattr(self.model, "grad_scale", None)
        self.reducer: GradReducer = make_reducer(self.named, mesh, self.optimizer, layout.grad_wire, zero=layout.zero, auto=mu)
        self.graphed = GraphedMicroBatch(self.model, mesh, collectives=True) if layout.graph else None

    def step(self, number: int) -> tuple[float, float]:
        """(loss of the global batch, gradient norm)."""
        batch = [(x.flip(0) if self.reverse else x).to(self.device) for x in self.trip.batch(number)]
        tokens, labels = (x.chunk(self.mesh.dp.size)[self.mesh.dp.rank] for x in batch)
        valid: NumValid = count_valid(*batch)
        for _, weight in self.named:
            weight.last_microbatch = True
        if self.graphed is not None:
            self.optimizer.settle()
            losses = self.graphed(tokens.contiguous(), labels.contiguous(), valid)
        else:
            losses = self.model(tokens, labels, valid)
            losses.total.backward()
        self.reducer.finish()
        norm = self.reducer.norm()
        update_scales(self.model, partial(all_reduce, axis=self.mesh.world, kind="test", op="max"))
        self.optimizer.step(self.trip.lr * min(1.0, (number + 1) / self.trip.warmup), 1.0 / norm.clamp(min=1.0))
        update_expert_bias(self.model, self.mesh.world, 1e-3)
        return all_reduce(losses.ce_sum.detach().clone(), self.mesh.dp, "test").item() / valid.ce.item(), norm.item()

    def sail(self, first: int, last: int) -> tuple[list[float], list[float]]:
        found = [self.step(number) for number in range(first, last)]
        self.optimizer.settle()
        compare_replicas(self.model, self.mesh, last)  # weights, scales, router, bias: raises where one bit differs
        return [loss for loss, _ in found], [norm for _, norm in found]

    def gradients(self) -> dict[str, Tensor]:
        """Of the last step, summed over ranks: each weight's local pieces, one after the other."""
        return {n: torch.cat([w.main_grad[p.local].flatten().float() for p in w.pieces]) for n, w in self.named}

    def fingerprints(self) -> dict[Any, int]:
        """By name and place in the whole model; two ranks that hold the same place must agree."""
        found = {(n, p.offset): fingerprint(w.data[p.local]).item() for n, w in self.named for p in w.pieces}
        return found | {(n, "bias"): fingerprint(r.expert_bias).item() for n, r in routers(self.model)}

    def write(self, folder: Path) -> None:
        write_shards(folder, tensors(self.model, self.optimizer, self.mesh.world.rank), self.mesh.world)

    def read(self, folder: Path, steps: int) -> None:
        wanted = tensors(self.model, self.optimizer, self.mesh.world.rank)
        read_shards(folder, {k: v for k, v in wanted.items() if not k.startswith("rng.")}, self.mesh.world)
        for scale in role_scales(self.model):
            scale.reset()
        for name in self.optimizer.weights:
            self.optimizer.refresh(name)
        self.optimizer.publish()
        self.optimizer.num_steps = steps


def enter(rank: int, size: int, store: str, trip: Trip) -> torch.device:
    """This rank's device, and NCCL in place of the helper's gloo."""
    device = trip.device(rank)
    if trip.cuda:
        torch.cuda.set_device(device)
    if trip.cuda and not trip.shared:
        dist.destroy_process_group()
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=size, device_id=device)
    return device


def mesh_of(layout: Layout, device: torch.device) -> Mesh:
    wire = WIRES[layout.wires]
    wires = dict(tp_wire=wire, combine_wire=wire, dispatch=layout.dispatch, peer_copies=layout.peer)
    return build_mesh(layout.tp, layout.ep, device, layout.sequence, **wires)


def compare(rank: int, size: int, store: str, trip: Trip, names: list[str]) -> dict[str, Any]:
    """Losses and norms of each step, and what the weights are in the end: one process ("solo"), then each layout."""
    device, found = enter(rank, size, store, trip), {}
    for name in ("solo", *names):
        layout = Layout(alone=True) if name == "solo" else LAYOUTS[name]
        sailor = Sailor(trip, Mesh.solo() if layout.alone else mesh_of(layout, device), layout, device)
        losses, norms = sailor.sail(0, trip.steps)
        found[name] = {"losses": losses, "norms": norms, "bits": sailor.fingerprints()}
    return found


def resumed(rank: int, size: int, store: str, trip: Trip, folder: str) -> list[float]:
    """dp=2 -> ep=2 -> one process, a third of the steps each; every leg reads what the one before wrote."""
    device, part, losses = enter(rank, size, store, trip), trip.steps // 3, []
    for leg, name in enumerate(("dp=2", "ep=2", "solo")):
        layout = Layout() if name == "solo" else LAYOUTS[name]
        sailor = Sailor(trip, Mesh.solo() if name == "solo" else mesh_of(layout, device), layout, device)
        if leg:
            sailor.read(Path(folder) / f"leg{leg}", leg * part)
        losses += sailor.sail(leg * part, (leg + 1) * part)[0]
        if name != "solo":
            sailor.write(Path(folder) / f"leg{leg + 1}")
    return losses


def check(by_rank: list[dict[str, Any]], recipe: str) -> None:
    one, two = by_rank
    truth, failed = one.pop("solo"), []
    print(f"{recipe:6} one process's norms: {' '.join(f'{norm:.3g}' for norm in truth['norms'])}")
    for name, got in one.items():
        loss = largest(abs(a / b - 1) for a, b in zip(got["losses"], truth["losses"], strict=True))
        norm = [largest([abs(a / b - 1)]) for a, b in zip(got["norms"], truth["norms"], strict=True)]
        ends, at = f"{truth['losses'][0]:.3f} -> {truth['losses'][-1]:.3f}", norm.index(max(norm))
        print(f"{recipe:6} {name:48} off by {loss:.1e} of the loss ({ends}); of the norm {norm[0]:.1e} at step 1,", end=" ")
        print(f"most at step {at + 1}: {got['norms'][at]:.3g} for {truth['norms'][at]:.3g}", flush=True)
        if not (loss < BOUNDS[recipe] and norm[0] < FIRST_NORM[recipe]):
            failed.append(f"{name}: loss off by {loss:.1e}, first norm by {norm[0]:.1e}")
        if LAYOUTS[name].alone:  # two processes without each other: attention's backward adds in no fixed order on a GPU
            continue
        if got["norms"] != two[name]["norms"]:
            failed.append(f"ranks disagree on the norm: {name}")
        other = two[name]["bits"]
        differing = [key for key in got["bits"].keys() & other.keys() if got["bits"][key] != other[key]]
        if differing:
            failed.append(f"{name}: {differing} differ between ranks")
    assert not failed, failed
    assert truth["losses"][-1] < truth["losses"][0]


TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
ON_GPU = Trip(CUT, "block", 20, 8, 512, True)


@pytest.mark.multi_gpu
@TWO_GPUS
@pytest.mark.parametrize("recipe", ["block", "bf16"])
def test_layouts_on_two_gpus(tmp_path: Path, recipe: str) -> None:
    few = ["one process, rows reversed", "dp=2", "tp=2", "ep=2", "tp=2, ep=2"]
    names = [n for n in LAYOUTS if "graph" not in n] if recipe == "block" else few
    check(run_ranks(2, compare, str(tmp_path / "store"), replace(ON_GPU, recipe=recipe), names, timeout=150.0), recipe)


@pytest.mark.multi_gpu
@TWO_GPUS
@pytest.mark.parametrize("layout", ["dp=2, graph", "ep=2, graph", "ep=2, peer copies, graph"])
def test_replayed_layouts(tmp_path: Path, layout: str) -> None:
    """Forward and backward as a CUDA graph, in ep with its collectives or copies."""
    check(run_ranks(2, compare, str(tmp_path / "store"), ON_GPU, [layout], timeout=90.0), "block")


@pytest.mark.multi_gpu
@TWO_GPUS
def test_resume_from_dp_to_ep_to_one_gpu(tmp_path: Path) -> None:
    trip = replace(ON_GPU, steps=12)
    (truth, _), (losses, other) = (run_ranks(2, f, *a, timeout=100.0) for f, a in (
        (compare, (str(tmp_path / "one"), trip, [])), (resumed, (str(tmp_path / "two"), trip, str(tmp_path)))
    ))  # fmt: skip
    off = largest(abs(a / b - 1) for a, b in zip(losses, truth["solo"]["losses"], strict=True))
    print(f"dp=2 -> ep=2 -> one GPU: off by {off:.1e} of the loss")
    assert off < BOUNDS["block"] and losses[:8] == other[:8]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_two_ranks_on_one_gpu(tmp_path: Path) -> None:
    """What runs around the wire, where there is one GPU: every kernel of dispatch, gradients and weights between two ranks."""
    trip = replace(ON_GPU, steps=3, shared=True, config=replace(CUT, num_hidden_layers=2, num_nextn_predict_layers=0))
    names = ["ep=2", "ep=2, counted", "dp=2, zero 1, FP8 gradients, gather overlapped", "dp=2, zero 2, FP8-LM"]
    check(run_ranks(2, compare, "", trip, names, timeout=120.0), "block")


ON_CPU = Trip(CONFIG, "fp32", 3, 4, 32, False)


@pytest.mark.distributed
def test_the_comparison_itself_on_cpu_ranks(tmp_path: Path) -> None:
    """In FP32, so that the bound is that of sums in another order."""
    torch.set_num_threads(1)
    exact = [name for name in LAYOUTS if "FP8" not in name and "graph" not in name]
    check(run_ranks(2, compare, "", ON_CPU, exact), "fp32")
    losses, _ = run_ranks(2, resumed, "", ON_CPU, str(tmp_path))
    truth = compare(0, 1, "", ON_CPU, [])["solo"]["losses"]
    assert largest(abs(a / b - 1) for a, b in zip(losses, truth, strict=True)) < BOUNDS["fp32"]
