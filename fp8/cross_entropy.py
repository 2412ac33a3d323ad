"""Head and cross-entropy in one Function: never the whole [T, V] matrix of logits.

Tokens go in chunks (a multiple of 128). Each chunk's logits are made, turned into their own gradient and used for dgrad and
wgrad at once, in forward; so backward only hands dX on.

Shapes: T tokens, D features, V vocabulary of this rank, C tokens of a chunk.

    loss = scale * sum_t [ lse_t - logit_t(label) + z * lse_t^2 ]
    dlogits = scale * [ (1 + 2 z lse) * softmax - onehot ],   rows with label -100 are zero
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fp8.activation import Activation
from fp8.fused import fuses_gradient
from fp8.gemm import gemm_nt
from fp8.quantize import requantize_t
from fp8.quantized import Quantized
from fp8.transposed import transposed
from fp8.weight import Weight

IGNORE = -100


@dataclass(frozen=True)
class VocabAxis:
    """How a vocabulary split over ranks is reduced; the default is the whole vocabulary on one rank.

    Attributes:
        offset: first vocabulary id of this rank.
        all_max, all_sum: reductions of an fp32 tensor over the ranks that hold the other parts.
    """

    offset: int = 0
    all_max: Callable[[Tensor], Tensor] = lambda x: x
    all_sum: Callable[[Tensor], Tensor] = lambda x: x


def cross_entropy_ref(x_TD: Tensor, w_VD: Tensor, labels_T: Tensor, scale: Tensor | float, z: float = 0.0) -> Tensor:
    """The differentiable definition, with the whole logits matrix."""
    logits = (x_TD @ w_VD.t()).float()
    ce = F.cross_entropy(logits, labels_T, ignore_index=IGNORE, reduction="none")
    lse = torch.logsumexp(logits, -1)
    return scale * (ce + z * torch.where(labels_T != IGNORE, lse.square(), torch.zeros_like(lse))).sum()


def softmax_grad_ref(logits_CV: Tensor, labels_C: Tensor, z: float, vocab: VocabAxis) -> tuple[Tensor, Tensor, Tensor]:
    """(ce [C], z-term [C], dlogits [C, V] before `scale`), FP32; ignored rows are zero."""
    logits = logits_CV.float()
    valid = labels_C != IGNORE
    peak = vocab.all_max(logits.amax(-1))
    exp = (logits - peak[:, None]).exp_()
    total = vocab.all_sum(exp.sum(-1))
    lse = peak + total.log()
    local = labels_C - vocab.offset
    mine = valid & (local >= 0) & (local < logits.shape[-1])
    index = torch.where(mine, local, torch.zeros_like(local))[:, None]
    picked = torch.where(mine, logits.gather(1, index)[:, 0], torch.zeros_like(lse))
    ce = torch.where(valid, lse - vocab.all_sum(picked), torch.zeros_like(lse))
    grad = exp.mul_(((1 + 2 * z * lse) / total)[:, None])
    grad.scatter_add_(1, index, -mine.float()[:, None])
    grad.mul_(valid[:, None])
    return ce, torch.where(valid, z * lse.square(), torch.zeros_like(lse)), grad


def _kernels(logits_CV: Tensor) -> ModuleType | None:
    """The Triton kernels on a GPU (BF16 logits in whole words), None for the reference."""
    if not logits_CV.is_cuda or logits_CV.dtype != torch.bfloat16 or logits_CV.shape[1] % 4:
        return None
    from fp8 import cross_entropy_kernels  # Triton comes with CUDA builds of torch only

    return cross_entropy_kernels


class _Gradient(NamedTuple):
    """dlogits of a chunk: A of dgrad [C, V] and A of wgrad [V, Cp]."""

    rows: Quantized
    columns: Quantized


def _softmax_grad(
    logits_CV: Tensor, labels_C: Tensor, scale: Tensor, z: float, vocab: VocabAxis, weight: Weight, with_grad: bool
) -> tuple[Tensor, Tensor, _Gradient | None]:
    """(sum of ce, sum of z-terms, quantised scale * dlogits) of a chunk; may overwrite the logits."""
    kernels = _kernels(logits_CV)
    if kernels is None:
        ce, z_term, grad = softmax_grad_ref(logits_CV, labels_C, z, vocab)
        dlogits = grad.mul_(scale).to(logits_CV.dtype) if with_grad else None
        made = _Gradient(weight.quantize_grad(dlogits), weight.quantize_grad_t(dlogits)) if with_grad else None
        return ce.sum(), z_term.sum(), made
    valid, local = labels_C != IGNORE, labels_C - vocab.offset
    local = torch.where(valid & (local >= 0) & (local < logits_CV.shape[1]), local, kernels.NO_LABEL)
    peak, total, picked = kernels.statistics(logits_CV, local)
    top = vocab.all_max(peak.clone())
    lse = top + vocab.all_sum(total * (peak - top).exp()).log()
    ce = torch.where(valid, lse - vocab.all_sum(picked), 0.0).sum()
    z_term = torch.where(valid, z * lse.square(), 0.0).sum()
    if not with_grad:
        return ce, z_term, None
    factor = torch.where(valid, 1 + 2 * z * lse, 0.0)
    if fuses_gradient(logits_CV, weight):
        return ce, z_term, _Gradient(*kernels.gradient(logits_CV, lse, factor, local, picked, scale))
    dlogits = kernels.gradient_in_place(logits_CV, lse, factor, local, scale)
    return ce, z_term, _Gradient(weight.quantize_grad(dlogits), weight.quantize_grad_t(dlogits))


class _HeadLoss(torch.autograd.Function):
    """forward (loss, ce_sum); dgrad dx_TD and wgrad dw_VD += dlogits^T . x are made in forward, scaled for d(loss) = 1.

    The gradient of the head is accumulated in forward, so the loss has to be a leaf of the total: its incoming gradient must be 1.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        carrier_TD: Tensor,
        anchor: Tensor,
        x: Activation,
        weight: Weight,
        labels_T: Tensor,
        scale: Tensor,
        z: float,
        chunk: int,
        vocab: VocabAxis,
        with_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        rows, dtype, device = carrier_TD.shape[0], carrier_TD.dtype, carrier_TD.device
        ce_sum, z_sum = torch.zeros((), device=device), torch.zeros((), device=device)
        dx_TD = torch.empty(carrier_TD.shape, dtype=dtype, device=device) if with_grad and ctx.needs_input_grad[0] else None
        w_t = transposed(weight) if dx_TD is not None else None

        def run(dw_VD: Tensor | None, accumulate: bool) -> None:
            for start in range(0, rows, chunk):
                part = slice(start, min(start + chunk, rows))
                x_q = x.q.rows(part)
                logits = gemm_nt(x_q, weight.q, dtype=dtype)
                ce, z_term, grad = _softmax_grad(logits, labels_T[part], scale, z, vocab, weight, with_grad)
                del logits
                ce_sum.add_(ce)
                z_sum.add_(z_term)
                if dx_TD is not None:
                    dx_TD[part] = gemm_nt(grad.rows, w_t, dtype=dtype)
                if dw_VD is not None:
                    gemm_nt(grad.columns, requantize_t(x_q), out=dw_VD, accumulate=accumulate or start > 0)

        weight.accumulate(run) if with_grad and weight.trainable else run(None, False)
        ctx.dx_TD = dx_TD
        ctx.mark_non_differentiable(ce_sum)
        return scale * (ce_sum + z_sum), ce_sum

    @staticmethod
    def backward(ctx: FunctionCtx, d_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        torch._assert_async((d_loss == 1).all(), "the head's gradient was made for d(loss) = 1: add losses, do not scale them")
        dx_TD, ctx.dx_TD = ctx.dx_TD, None
        return dx_TD, None, None, None, None, None, None, None, None, None


def head_loss(
    x: Activation,
    weight: Weight,
    labels_T: Tensor,
    scale: Tensor,
    z: float = 0.0,
    chunk: int = 2048,
    vocab: VocabAxis | None = None,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of x [T, D] . weight [V, D]^T against labels [T] (-100 ignored).

    Args:
        scale: 0-dim fp32; the loss and its gradient are multiplied by it (loss weight / global count of valid tokens).
        z: weight of the squared log-partition.
        chunk: tokens whose logits exist at once; a multiple of 128.

    Returns:
        (loss, ce_sum): `scale` x (sum of cross-entropies and z terms), differentiable; the plain sum, not differentiable.
    """
    assert chunk % 128 == 0, f"chunk = {chunk} is not a multiple of 128"
    grad = torch.is_grad_enabled() and (x.carrier.requires_grad or weight.trainable)
    return _HeadLoss.apply(x.carrier, weight.anchor, x, weight, labels_T, scale, z, chunk, vocab or VocabAxis(), grad)
