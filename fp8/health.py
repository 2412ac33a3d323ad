"""FP8 health: how much a quantisation loses, by tensor class, on live tensors.

`Weight.health` is set at an interval; each quantisation that the weight does is then reported. Nothing is measured, and nothing is
slower, while it is None. Sources: Ling 2.0 technical report (arXiv 2510.22115), section 5.1 (underflow, cosine).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8.quantized import Quantized
from fp8.recipe import FP8_MAX


@torch.no_grad()
def measure(x: Tensor, q: Quantized) -> dict[str, Tensor]:
    """0-dim fp32 tensors: `underflow` (share of non-zero elements that became zero), `saturation` (share at the format's
    maximum), `cosine` (between x and what q stands for; 1 for an all-zero x). Rows that q adds as padding are ignored."""
    value = q.dequantize()[..., : x.shape[-2], : x.shape[-1]]
    x = x.float()
    nonzero = x != 0
    lost = (nonzero & (value == 0)).sum() / nonzero.sum().clamp(min=1)
    limit = FP8_MAX.get(q.data.dtype)
    full = torch.zeros((), device=x.device) if limit is None else (q.data.float().abs() == limit).float().mean()
    norms = x.norm() * value.norm()
    cosine = torch.where(norms > 0, (x * value).sum() / norms.clamp(min=1e-30), torch.ones((), device=x.device))
    return {"underflow": lost, "saturation": full, "cosine": cosine}


class Health:
    """Collects `measure` by tensor class; several reports of one class are averaged."""

    def __init__(self) -> None:
        self._seen: dict[str, list[dict[str, Tensor]]] = {}

    def report(self, name: str, x: Tensor, q: Quantized) -> None:
        """One quantisation of tensor class `name`."""
        if q.scale_inv is not None:
            self._seen.setdefault(name, []).append(measure(x, q))

    def result(self) -> dict[str, float]:
        """{"class/underflow": ..., "class/saturation": ..., "class/cosine": ...}; reads the device once."""
        keys, values = [], []
        for name, reports in self._seen.items():
            for metric in ("underflow", "saturation", "cosine"):
                keys.append(f"{name}/{metric}")
                values.append(torch.stack([r[metric] for r in reports]).mean())
        return dict(zip(keys, torch.stack(values).tolist(), strict=True)) if keys else {}
