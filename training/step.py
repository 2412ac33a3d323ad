"""One optimizer step: forward and backward of each micro-batch, reduction, clipping, update.

Every valid token of the global batch weighs the same: the counts of valid tokens over all ranks and micro-batches are known
before the first forward, and the losses are divided by them there. So gradients are summed and never averaged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fp8.auto import AutoFP8
from fp8.config import AutoConfig
from fp8.optimizer import AdamW
from fp8.scaling import role_scales, update_scales
from fp8.weight import weights
from model.loss import Losses, NumValid, count_valid
from model.router import routers, update_expert_bias
from parallel.collectives import all_reduce
from parallel.mesh import Mesh
from parallel.sharded_optimizer import make_reducer
from training.data import Batch
from training.diagnose import first_bad
from training.faults import FaultConfig, Guard
from training.graph import GraphedMicroBatch
from training.metrics import Phases
from training.schedule import OptimConfig


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Of the global batch, the same on every rank. Losses are in nats a token."""

    loss: float
    mtp_loss: float
    z_loss: float
    aux_loss: float
    grad_norm: float  # before clipping
    num_tokens: int  # with a label
    interrupted: bool  # some rank was asked to stop
    counts_LE: Tensor | None = None  # int64 tokens by router and expert, when asked for; on the CPU
    notes: tuple[str, ...] = ()  # what `auto` chose and why, at the steps at which it measures
    problem: str | None = None  # why nothing was updated

    def metrics(self) -> dict[str, float]:
        """By the names they are logged under."""
        return {name: getattr(self, name) for name in ("loss", "mtp_loss", "z_loss", "aux_loss", "grad_norm")}


class Report(NamedTuple):
    """What the host reads of a step: sums over the global batch, the same on every rank."""

    ce_sum: float
    mtp_sum: float
    z_loss: float
    aux_loss: float
    asked_to_stop: float  # ranks that were
    grad_norm: float
    num_ce: float  # labels of the next token, and of the one after it
    num_mtp: float
    broken: tuple[int, ...]  # ranks whose own loss is not finite


def global_counts(batches: Sequence[Batch], mesh: Mesh) -> NumValid:
    """Valid tokens of all micro-batches of all ranks."""
    own = [count_valid(b.tokens_BS, b.labels_BS, b.positions_BS if b.cu_seqlens is not None else None) for b in batches]
    total = torch.stack([torch.stack([n.ce, n.mtp, n.tokens]) for n in own]).sum(0)
    return NumValid(*all_reduce(total, mesh.dp, "counts"))


def forward(model: nn.Module, batch: Batch, num_valid: NumValid) -> Losses:
    """The model on one micro-batch."""
    b = batch
    return model(b.tokens_BS, b.labels_BS, num_valid, b.positions_BS, b.cu_seqlens, b.max_seqlen)


class TrainStep:
    """Holds what a step needs and takes steps. Every rank calls it with its own micro-batches."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: AdamW,
        mesh: Mesh,
        optim: OptimConfig,
        bias_rate: float,
        phases: Phases,
        *,
        auto: AutoConfig | None = None,
        cuda_graphs: bool | str = False,
        grad_wire: str = "fp32",
        guard: Guard | None = None,
        grad_rounding: str = "nearest",
        zero: int = 0,
        simulated_ranks: int = 0,
    ) -> None:
        self.model, self.optimizer, self.mesh, self.optim = model, optimizer, mesh, optim
        self.bias_rate, self.phases = bias_rate, phases
        self.weights = list(weights(model))
        mu = getattr(model, "grad_scale", None)
        self.reducer = make_reducer(self.weights, mesh, optimizer, grad_wire, grad_rounding, zero, mu, simulated_ranks)
        self.reduce_max = partial(all_reduce, axis=mesh.world, kind="amax", op="max")
        self.auto = AutoFP8(model, auto or AutoConfig(), self.reduce_max)
        self.graphed = None
        if cuda_graphs and not self.reducer.each_microbatch:
            self.graphed = GraphedMicroBatch(model, mesh, collectives=cuda_graphs == "collectives")
        self.guard = guard or Guard(FaultConfig())

    def __call__(
        self, step: int, batches: Sequence[Batch], lr: float, interrupted: bool = False, want_counts: bool = False
    ) -> StepResult:
        """Step number `step` (from 1).

        A bad step (loss or gradient not finite on any rank, or a spike) leaves weights, moments, biases and FP8 scales on
        every rank as before it; `problem` of the result names the step, the ranks and the first bad tensor.
        """
        self.phases.note("counts")
        num_valid = global_counts(batches, self.mesh)
        self.auto.begin(step)
        if self.auto.observing:
            self.optimizer.share_samples()
        losses = self._backward(batches, num_valid)
        with self.phases("reduce"):
            self.reducer.finish()
            norm = self.reducer.norm()
            report = self._report(losses, norm, num_valid, interrupted)
        loss, grad_norm = report.ce_sum / max(report.num_ce, 1), report.grad_norm
        if report.broken or not math.isfinite(grad_norm):
            where = first_bad(self.model, self.weights, batches, num_valid, self.mesh.world)
            return self._refuse(f"{self._explain(step, report)}; {where}; nothing was updated", report)
        if (spike := self.guard.spike(loss, grad_norm)) is not None:
            return self._refuse(f"step {step}: {spike}; nothing was updated", report)
        self.guard.good(loss, grad_norm)
        counts_LE = self._counts() if want_counts else None
        update_scales(self.model, self.reduce_max)
        notes = self.auto.end()
        with self.phases("optimizer"):
            clip = self.optim.clip
            self.optimizer.step(lr, clip / grad_norm if 0 < clip < grad_norm else 1.0)
            update_expert_bias(self.model, self.mesh.world, self.bias_rate)
        return StepResult(
            loss=loss,
            mtp_loss=report.mtp_sum / max(report.num_mtp, 1),
            z_loss=report.z_loss,
            aux_loss=report.aux_loss,
            grad_norm=grad_norm,
            num_tokens=int(report.num_ce),
            interrupted=report.asked_to_stop > 0,
            counts_LE=counts_LE,
            notes=tuple(notes),
        )

    def _refuse(self, problem: str, report: Report) -> StepResult:
        """Forgets everything that forward and backward have left."""
        for weight in (*(w for _, w in self.weights), *self.optimizer.weights.values()):  # a sharded optimizer has its own
            weight.clear_grad()
        for _, router in routers(self.model):
            router.counts.zero_()
        for scale in role_scales(self.model):
            scale.seen.zero_()
        self.auto.abandon()
        self.reducer.abandon()
        values = dict.fromkeys(("loss", "mtp_loss", "z_loss", "aux_loss"), math.nan)
        values |= {"grad_norm": report.grad_norm, "num_tokens": int(report.num_ce), "interrupted": report.asked_to_stop > 0}
        return StepResult(**values, problem=problem)

    def _backward(self, batches: Sequence[Batch], num_valid: NumValid) -> list[Losses]:
        results = []
        for i, batch in enumerate(batches):
            for _, weight in self.weights:
                weight.last_microbatch = self.reducer.each_microbatch or i == len(batches) - 1
            if self.graphed is not None and self.graphed.takes(batch.tokens_BS, batch.cu_seqlens):
                with self.phases("forward"):  # and backward, in the same launch
                    self.optimizer.settle()
                    losses = self.graphed(batch.tokens_BS, batch.labels_BS, num_valid)
            else:
                with self.phases("forward"):
                    losses = forward(self.model, batch, num_valid)
                with self.phases("backward"):
                    losses.total.backward()
            if self.reducer.each_microbatch and i < len(batches) - 1:
                self.reducer.finish(last=False)
            results.append(losses)
        return results

    def _report(self, losses: list[Losses], norm: Tensor, num_valid: NumValid, interrupted: bool) -> Report:
        """The step's numbers: one collective, and the one host sync of a step."""
        world, device = self.mesh.world, norm.device
        sums = torch.stack([torch.stack([x.ce_sum, x.mtp_sum, x.z_loss, x.aux_loss]) for x in losses]).sum(0).double()
        bad = torch.zeros(world.size, dtype=torch.float64, device=device)
        bad[world.rank] = ~torch.stack([x.total.detach() for x in losses]).isfinite().all()
        # Ranks of one tp group have seen the same tokens: one of them speaks. A NaN must not drown the flags.
        sums = sums.nan_to_num() * (self.mesh.tp.rank == 0)
        flag = torch.tensor([float(interrupted)], dtype=torch.float64, device=device)
        summed = all_reduce(torch.cat([sums, flag, bad]), world, "report")
        known = torch.stack([norm.double(), num_valid.ce.double(), num_valid.mtp.double()])  # the same on every rank already
        ce_sum, mtp_sum, z_loss, aux_loss, asked, *flags, grad_norm, num_ce, num_mtp = torch.cat([summed, known]).tolist()
        broken = tuple(rank for rank, value in enumerate(flags) if value)
        return Report(ce_sum, mtp_sum, z_loss, aux_loss, asked, grad_norm, num_ce, num_mtp, broken)

    def _counts(self) -> Tensor | None:
        found = [router.counts for _, router in routers(self.model)]
        return all_reduce(torch.stack(found), self.mesh.world, "report").cpu() if found else None

    @staticmethod
    def _explain(step: int, report: Report) -> str:
        if report.broken:
            return f"step {step}: the loss is not finite on rank {', '.join(map(str, report.broken))}"
        return f"step {step}: the gradient norm is {report.grad_norm} though every rank's loss is finite"
