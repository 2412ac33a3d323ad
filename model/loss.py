"""Labels, counts of valid tokens, and what a forward returns.

Shapes: B sequences of S tokens. Labels are the next token, -100 where ignored; MTP labels the one after.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8.cross_entropy import IGNORE


@dataclass(frozen=True, eq=False)
class NumValid:
    """Token counts of the global batch, known before forward, so that every valid token weighs the same. 0-dim tensors.

    Attributes:
        ce, mtp: tokens with a label, for cross-entropy and for multi-token prediction.
        tokens: all tokens: the divisor of the router's auxiliary losses.
    """

    ce: Tensor
    mtp: Tensor
    tokens: Tensor

    def __add__(self, other: NumValid) -> NumValid:
        return NumValid(self.ce + other.ce, self.mtp + other.mtp, self.tokens + other.tokens)


@dataclass(frozen=True, eq=False)
class Losses:
    """Results of one micro-batch. Summed over ranks and micro-batches, `total` is the loss of the global batch.

    Attributes:
        total: differentiable; normalised by the global counts.
        ce_sum, mtp_sum: sums over this batch's valid tokens, nats.
        num_ce, num_mtp: this batch's valid tokens.
        z_loss: this batch's share of the mean logsumexp(router logits)^2, averaged over MoE layers, unweighted.
        aux_loss: this batch's share of all weighted auxiliary losses.
    """

    total: Tensor
    ce_sum: Tensor
    mtp_sum: Tensor
    num_ce: Tensor
    num_mtp: Tensor
    z_loss: Tensor
    aux_loss: Tensor


def document_starts(positions_BS: Tensor) -> Tensor:
    """bool [B, S]: the next position starts another document (or the row ends)."""
    ends = torch.ones_like(positions_BS, dtype=torch.bool)
    ends[:, :-1] = positions_BS[:, 1:] == 0
    return ends


def mtp_inputs(tokens_BS: Tensor, labels_BS: Tensor, positions_BS: Tensor | None) -> tuple[Tensor, Tensor]:
    """(next tokens [B, S], MTP labels [B, S]).

    The next token of a row's last position is its label. Across a document boundary nothing leaks: the next token becomes 0 and the
    label is ignored. Each row is shifted on its own: the last position is never scored against the next row.
    """
    next_tokens = torch.cat([tokens_BS[:, 1:], labels_BS[:, -1:].clamp(min=0)], dim=1)
    labels = torch.cat([labels_BS[:, 1:], torch.full_like(labels_BS[:, :1], IGNORE)], dim=1)
    if positions_BS is not None:
        boundary = document_starts(positions_BS)
        boundary[:, -1] = labels_BS[:, -1] == IGNORE
        next_tokens = next_tokens.masked_fill(boundary, 0)
        labels = labels.masked_fill(boundary, IGNORE)
    return next_tokens, labels


def count_valid(tokens_BS: Tensor, labels_BS: Tensor, positions_BS: Tensor | None = None) -> NumValid:
    """Counts of one micro-batch, int64; sum them over micro-batches and ranks before forward."""
    _, mtp_labels = mtp_inputs(tokens_BS, labels_BS, positions_BS)
    total = torch.tensor(tokens_BS.numel(), device=tokens_BS.device)
    return NumValid((labels_BS != IGNORE).sum(), (mtp_labels != IGNORE).sum(), total)
