"""FP8-LM's gradient reduction: FP8 sums under one scale a tensor and an automatic factor mu; arXiv 2310.18313, section 2.1.

    rank i       s_i = 2^floor(log2(448 / amax(g_i)));  s = min over ranks, all tensors of a bucket in one reduction
    on the wire  c_i = FP8(mu * s * g_i);  c = c_0 + c_1 + ... in rank order, rounded to FP8 and saturated after each addition
    gradient     c / (mu * s)
    mu           halves when more than 1e-5 of all summed elements are at FP8's maximum, else doubles over 1000 steps

The paper's wording ("mu is set to 1/2") is read as multiplicative. mu starts at the largest power of two not above 1 / ranks,
where sums cannot saturate, and stays at most 1, above which one rank's own codes would. The additions happen at an owner
(grad_wire.py), so that neither order nor saturation depends on the backend. Each of them rounds: the error grows with the number of
ranks, and among more than 16 ranks of equal sign later ones are rounded away. grad_wire=fp8 has neither trouble.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor, nn

from fp8.quantize import cast_fp8, pow2_scale_inv
from fp8.recipe import E4M3, FP8_MAX
from parallel.collectives import Pending, all_reduce, start_all_gather, start_all_reduce, start_all_to_all
from parallel.grad_wire import KIND, OwnerBucket, starts_of
from parallel.mesh import Axis, Mesh

LIMIT, STEPS = 1e-5, 1000  # share of saturated elements that is too much; clean steps in which mu doubles
LARGEST = 2.0**126  # scale of a tensor without a gradient: it limits nobody


class AutoScale(nn.Module):
    """mu and its counts. A part of the model, so that checkpoints keep it; the same bits on every rank.

    Attributes:
        mu: 0-dim fp64.
        counts: [3] fp64 of the step: saturated elements, elements, tensors that are not finite.
    """

    def __init__(self, ranks: int, device: torch.device | str = "cpu") -> None:
        super().__init__()
        start = 2.0 ** -math.ceil(math.log2(max(ranks, 1)))
        self.register_buffer("mu", torch.tensor(start, dtype=torch.float64, device=device))
        self.register_buffer("counts", torch.zeros(3, dtype=torch.float64, device=device))
        self._before = self.mu.clone()

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Named as a recipe's scales are: a checkpoint of another wire has none."""
        return {"scales.mu": self.mu}

    @torch.no_grad()
    def update(self, world: Axis) -> None:
        """After a step's sums, on every rank: the global count decides. A step with NaN, which updates nothing, leaves mu too."""
        saturated, total, broken = all_reduce(self.counts, world, KIND).unbind()
        self._before.copy_(self.mu)
        next_mu = torch.where(saturated > LIMIT * total, self.mu / 2, (self.mu * 2 ** (1 / STEPS)).clamp(max=1.0))
        self.mu.copy_(torch.where(broken > 0, self.mu, next_mu))
        self.counts.zero_()

    def undo(self) -> None:
        """Takes the last `update` back: its step was refused."""
        self.mu.copy_(self._before)


def attach_auto_scale(model: nn.Module, mesh: Mesh, wire: str, simulated_ranks: int = 0) -> None:
    """Gives the model a `grad_scale` where `parallel.grad_wire` is "fp8_lm"; before a checkpoint is loaded."""
    if wire == "fp8_lm":
        device = next(iter(model.buffers())).device
        model.grad_scale = AutoScale(simulated_ranks or mesh.world.size, device)


def scale_of(grad: Tensor) -> Tensor:
    """0-dim power of two that brings a rank's gradient just below 448; 0 where it is not finite (MAX may lose a NaN, MIN no 0)."""
    amax = torch.linalg.vector_norm(grad, float("inf"), dtype=torch.float32)
    scale = torch.where(amax > 0, 1 / pow2_scale_inv(amax, FP8_MAX[E4M3]), LARGEST)
    return torch.where(amax.isfinite(), scale, 0.0)


def _kernels(t: Tensor) -> ModuleType | None:
    """The Triton kernels on a GPU, None for the reference."""
    if not t.is_cuda:
        return None
    from parallel import grad_auto_scale_kernels  # Triton comes with CUDA builds of torch only

    return grad_auto_scale_kernels


def encode_codes(x_F: Tensor, factor: Tensor, out_F: Tensor) -> None:
    """out = E4M3(factor x), saturating; NaN stays. `factor` is a 0-dim FP32."""
    if kernels := _kernels(x_F):
        return kernels.encode_codes(x_F, factor, out_F)
    out_F.copy_(cast_fp8(x_F.float() * factor, E4M3))


def decode_codes(codes_F: Tensor, factor: Tensor, out_F: Tensor, add: bool = False) -> None:
    """out = [out +] codes / factor."""
    if kernels := _kernels(codes_F):
        return kernels.decode_codes(codes_F, factor, out_F, add)
    value = codes_F.float() / factor
    out_F.copy_(out_F + value if add else value)


def add_codes_ref(codes_NF: Tensor) -> Tensor:
    """[n, F] E4M3 -> their sum [F], in rank order, rounded to E4M3 after each addition; it saturates, and NaN stays."""
    total = codes_NF[0]
    for codes in codes_NF[1:]:
        total = cast_fp8(total.float() + codes.float(), E4M3)
    return total


def add_codes(codes_NF: Tensor) -> Tensor:
    """`add_codes_ref`, in one pass on a GPU."""
    kernels = _kernels(codes_NF)
    return kernels.add_codes(codes_NF) if kernels else add_codes_ref(codes_NF)


def num_saturated(codes: Tensor) -> Tensor:
    """0-dim: elements at FP8's maximum."""
    return ((codes.view(torch.uint8) & 0x7F) == 0x7E).sum()


@dataclass(eq=False)
class SharedScaleBucket(OwnerBucket):
    """An OwnerBucket whose codes share one scale a weight."""

    auto: AutoScale | None = None
    _scales: Pending | None = field(default=None, repr=False)

    def launch(self) -> None:
        """Starts to agree on the scales."""
        self._take()
        starts = starts_of(self.weights)
        own = torch.stack([scale_of(self.flat[a:b]) for a, b in pairwise(starts)])
        self._scales = start_all_reduce(own, self.axis, KIND, "min")

    def proceed(self) -> None:
        """First sends codes; then, called again, sums them."""
        if self._scales is not None:
            self._send()
        elif self._arriving is not None:
            self._sum()

    def _send(self) -> None:
        scales, self._scales = self._scales.wait(), None
        self.auto.counts[2] += (scales == 0).sum()
        self._factor = scales * self.auto.mu.float()
        send = [end - start for start, end in pairwise(self.bounds)]
        codes = torch.empty(self.flat.shape, dtype=E4M3, device=self.flat.device)
        for part, factor in self._weights_in(0, self.bounds[-1]):
            encode_codes(self.flat[part], factor, codes[part])
        if self.transient:
            self.flat = None
        self._sent = codes
        self._arriving = start_all_to_all(codes, self.axis, KIND, send, [send[self.axis.rank]] * self.axis.size)

    def _sum(self) -> None:
        arrived, self._arriving, self._sent = self._arriving.wait(), None, None
        codes = add_codes(arrived.view(self.axis.size, -1))
        self.auto.counts[0] += num_saturated(codes)
        self.auto.counts[1] += codes.numel()
        low, high = self.bounds[self.axis.rank], self.bounds[self.axis.rank + 1]
        if self.shared:
            self._returning = start_all_gather(codes, self.axis, KIND)
            return
        for part, factor in self._weights_in(low, high):
            decode_codes(codes[part], factor, self.own[part], add=self.round > 0)

    def finish(self) -> None:
        """Until `flat` (or this rank's part of it) holds the sums."""
        while self._scales is not None or self._arriving is not None:
            self.proceed()
        if self._returning is not None:
            codes, self._returning = self._returning.wait(), None
            for part, factor in self._weights_in(0, self.bounds[-1]):
                decode_codes(codes[part], factor, self.flat[part])

    def _weights_in(self, low: int, high: int) -> Iterator[tuple[slice, Tensor]]:
        """(part of flat[low:high], its factor) of each weight there; padding at the end goes with the last one."""
        starts = starts_of(self.weights)[:-1] + [self.bounds[-1]]
        for (start, end), factor in zip(pairwise(starts), self._factor, strict=True):
            first, last = max(start, low), min(end, high)
            if first < last:
                yield slice(first - low, last - low), factor
