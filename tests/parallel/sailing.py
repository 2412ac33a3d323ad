"""A cut of configs/small.yaml under any layout, step by step: what test_nccl.py compares with one process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

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
from training.checkpoint import tensors
from training.graph import GraphedMicroBatch
from training.replicas import compare_replicas, fingerprint
from training.shards import read_shards, write_shards

# configs/small.yaml with fewer layers and experts, so that a checkpoint of it is 1.3 GB
CUT = ModelConfig(
    vocab_size=4096, hidden_size=1024, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4, head_dim=128,
    intermediate_size=3072, first_k_dense_replace=1, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=512, n_group=4,
    topk_group=2, num_nextn_predict_layers=1, aux_loss_weight=1e-3, loss_chunk=4096, embedding_init_std=1.0,
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


@dataclass(frozen=True)
class Trip:
    """What every process does: `steps` steps of `rows` x `seq` tokens each, on GPUs or on the CPU."""

    config: ModelConfig
    recipe: str
    steps: int
    rows: int
    seq: int
    cuda: bool
    seed: int = 5
    lr: float = 6e-4  # small's, after `warmup` steps (small's are 200): 20 steps come to a third of it, 2e-4
    warmup: int = 60
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
        """Of the last step: what one process, which holds every weight whole, has by name."""
        return {name: weight.main_grad.clone() for name, weight in self.named}

    def errors(self, truth: dict[str, Tensor]) -> dict[str, float]:
        """Relative L2 error of the last step's reduced gradient against `truth`, over this rank's parts of each weight."""
        found = {}
        for name, weight in self.named:
            wanted = [truth[name][tuple(map(_part, p.offset, weight.data[p.local].shape))].flatten() for p in weight.pieces]
            got = [weight.main_grad[p.local].flatten().float() for p in weight.pieces]
            found[name] = ((torch.cat(got) - torch.cat(wanted)).norm() / torch.cat(wanted).norm()).item()
        return found

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


def _part(start: int, size: int) -> slice:
    return slice(start, start + size)


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
