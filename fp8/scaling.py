"""Scales of the tensorwise recipes: current, delayed (amax history) and static.

A `RoleScale` lives in a Weight, one for each role with state (activation, gradient), and is part of the checkpoint. Within a
step its scale does not change, so what backward recomputes is bitwise what forward made, and the running maximum is the same
however often a tensor is seen: micro-batches, repeated uses and recompute need no bookkeeping. `update_scales` moves all of them
once an optimizer step, with one reduction over the ranks.

Rules: amax 0 (nobody used the module) or not finite leaves history and scale alone; before the first update the scale is the
tensor's own (current), so nothing needs calibration and a recipe may change at a resume.
Source: delayed scaling as in NVIDIA TransformerEngine (fp8_utils, delayed recipe).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fp8.quantize import matrix_amax, pow2_scale_inv
from fp8.recipe import FP8_MAX, Spec

Reduce = Callable[[Tensor], Tensor]  # the maximum over the ranks that share a scale; returns its result


def tensor_amax(x: Tensor) -> Tensor:
    """0-dim fp32 largest magnitude. NaN counts as inf: a maximum over ranks (NCCL's) may drop a NaN, never an inf."""
    amax = matrix_amax(x.detach().flatten(0, -2)).view(()).float()
    return torch.where(amax.isnan(), torch.full_like(amax, float("inf")), amax)


def tensor_rms(x: Tensor) -> Tensor:
    """0-dim fp32 root mean square over the elements that are not zero (padding rows are); inf where it is not finite."""
    x = x.detach().float()
    rms = (x.square().sum() / (x != 0).sum().clamp(min=1)).sqrt()
    return torch.where(rms.isfinite(), rms, torch.full_like(rms, float("inf")))


def amax_scale_inv(amax: Tensor, spec: Spec) -> Tensor:
    """Inverse scale (power of two) that maps `amax` into the format with `spec.margin` binades to spare."""
    return pow2_scale_inv(amax * 2.0**spec.margin, FP8_MAX[spec.dtype])


def unit_scale_inv(rms: Tensor) -> Tensor:
    """Inverse scale that gives a tensor of root mean square `rms` unit variance, to the nearest power of two."""
    known = (rms > 0) & rms.isfinite()
    exponent = torch.log2(torch.where(known, rms, torch.ones_like(rms))).round().clamp(-126, 126)
    return torch.exp2(exponent)


class RoleScale(nn.Module):
    """The scale of one role of one Weight under "delayed" or "static".

    Attributes:
        history: [H] amax of the last H steps in which the role was used, newest first (static: one entry, the rms).
        seen: running maximum of the current step.
        scale_inv: 0-dim inverse scale in use; 0 until the first update.
        reduce: maximum over the ranks that must agree before the first update; None on one rank.
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.register_buffer("history", torch.zeros(spec.history if spec.scaling == "delayed" else 1))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scale_inv", torch.zeros(()))
        self.reduce: Reduce | None = None
        self._known = False

    def forward(self, x: Tensor, record: bool) -> Tensor:
        """0-dim inverse scale for `x`; with `record`, x also counts towards the step's maximum."""
        if not (record or not self.known):
            return self.scale_inv
        delayed = self.spec.scaling == "delayed"
        if not delayed and self.known:
            return self.scale_inv  # frozen: nothing to measure any more
        value = tensor_amax(x) if delayed else tensor_rms(x)
        if record:
            torch.maximum(self.seen, value, out=self.seen)
        if self.known:
            return self.scale_inv
        value = value if self.reduce is None else self.reduce(value)
        current = amax_scale_inv(value, self.spec) if delayed else unit_scale_inv(value)
        return torch.where(self.scale_inv > 0, self.scale_inv, current)

    @property
    def known(self) -> bool:
        """Whether an update has set the scale. Reads the device until it has, never again."""
        if not self._known:
            self._known = bool(self.scale_inv > 0)
        return self._known

    def reset(self) -> None:
        """Forgets that the scale was known: its buffers have been loaded anew."""
        self._known = False

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """What a resume needs. The shape of `history` is its length: another length does not fit and is refused."""
        return {"history": self.history, "scale_inv": self.scale_inv}


def role_scales(module: nn.Module) -> list[RoleScale]:
    """All of a model, in construction order."""
    return [child for child in module.modules() if isinstance(child, RoleScale)]


@torch.no_grad()
def update_scales(module: nn.Module, reduce: Reduce | None = None) -> None:
    """Ends a step: maxima go into the histories and give the next step's scales. Call it once, before the optimizer's step.

    Args:
        reduce: elementwise maximum over all ranks (tp x dp) of a fp32 tensor, the same on every rank.
    """
    scales = role_scales(module)
    if not scales:
        return
    seen = torch.stack([s.seen for s in scales])
    seen = seen if reduce is None else reduce(seen)
    used = (seen > 0) & seen.isfinite()
    for spec in dict.fromkeys(s.spec for s in scales):
        index = [i for i, s in enumerate(scales) if s.spec == spec]
        _update([scales[i] for i in index], seen[index], used[index], spec)
    for scale in scales:
        scale.seen.zero_()


def _update(scales: list[RoleScale], seen_N: Tensor, used_N: Tensor, spec: Spec) -> None:
    """One vectorised update of all scales of a spec: histories [N, H]."""
    history = torch.stack([s.history for s in scales])
    old = torch.stack([s.scale_inv for s in scales])
    if spec.scaling == "static":
        used_N = used_N & (old == 0)  # the first step decides
    moved = torch.cat([seen_N[:, None], history[:, :-1]], dim=1)
    history = torch.where(used_N[:, None], moved, history)
    if spec.scaling == "static":
        new = unit_scale_inv(history[:, 0])
    else:
        new = amax_scale_inv(history.amax(1) if spec.algo == "max" else history[:, 0], spec)
    new = torch.where(used_N, new, old)
    for scale, row, value in zip(scales, history, new, strict=True):
        scale.history.copy_(row)
        scale.scale_inv.copy_(value)
