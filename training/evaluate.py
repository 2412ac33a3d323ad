"""Validation loss: the token-weighted mean over the same samples each time. Leaves the run bitwise as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from parallel.collectives import all_reduce
from parallel.mesh import Mesh
from training.data import PackedDataset, validation_batches
from training.step import forward, global_counts


@dataclass(frozen=True)
class Evaluation:
    """Means over all valid tokens of the validation samples.

    Attributes:
        nats, mtp_nats: cross-entropy a token, and that of the token after next.
        bits_per_byte: `nats` over the bytes of text that the tokens stand for: comparable between tokenizers.
        num_tokens: with a label.
    """

    nats: float
    mtp_nats: float
    bits_per_byte: float
    num_tokens: int

    def metrics(self) -> dict[str, float]:
        """By the names they are logged under."""
        return {"val/loss": self.nats, "val/mtp_loss": self.mtp_nats, "val/bits_per_byte": self.bits_per_byte}


@torch.no_grad()
def evaluate(
    model: nn.Module, dataset: PackedDataset, mesh: Mesh, device: torch.device, micro_batch: int, samples: int, isolate: bool,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:  # fmt: skip
    """Every rank calls it; every rank gets the same result. Routing counts, amax, RNG and gradients are not touched.

    Args:
        stop: asked before each batch; True, on all ranks at once, ends the evaluation without a result.
    """
    batches = validation_batches(
        dataset,
        micro_batch=micro_batch,
        rank=mesh.dp.rank,
        num_ranks=mesh.dp.size,
        max_samples=samples,
        isolate_documents=isolate,
    )
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            if stop():
                return None
            moved = batch.to(device)
            losses = forward(model, moved, global_counts([moved], mesh))
            sums += torch.stack([x.double() for x in (losses.ce_sum, losses.num_ce, losses.mtp_sum, losses.num_mtp)])
    finally:
        model.train(was_training)
    ce_sum, num_ce, mtp_sum, num_mtp = all_reduce(sums, mesh.dp, "report").tolist()
    nats = ce_sum / max(num_ce, 1)
    return Evaluation(nats, mtp_sum / max(num_mtp, 1), dataset.bits_per_byte(nats), int(num_ce))
