"""One process that reduces gradients as several ranks would: what a wire loses, without the wire.

Each micro-batch of a step stands for a rank. Its gradient is rounded as that rank would send it, and the parts are added as their
owners would add them, so the sums are those of so many ranks bit for bit (tests/parallel/test_grad_simulated.py). Nothing travels
and no state is sharded: who owns what changes no bit.

    fp32        as they are, added in rank order
    bf16        rounded to BF16, added in FP32
    fp8         E4M3 tiles, added in FP32; without sharded states the sum is rounded once more (grad_wire.py)
    fp8_lm      E4M3 under one scale a weight and mu, added in E4M3 (grad_auto_scale.py)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8.philox import weight_words
from fp8.recipe import BLOCK, E4M3
from fp8.weight import Weight
from parallel.grad_auto_scale import AutoScale, add_codes, decode_codes, encode_codes, num_saturated, scale_of
from parallel.grad_reduce import GradReducer
from parallel.grad_wire import SENT, SUMMED, pack_tiles, sum_tiles, weight_parts
from parallel.mesh import Mesh


class SimulatedSums:
    """What owners make of the gradients of several ranks, one weight after the other.

    Args:
        wire: "fp32", "bf16", "fp8" or, with `auto`, "fp8_lm".
        stochastic: how "fp8" rounds; the optimizer of the weights must exist.
        sharded: the sums stay with their owners (ZeRO), so they are not rounded again.
    """

    def __init__(self, wire: str, stochastic: bool = False, sharded: bool = True, auto: AutoScale | None = None) -> None:
        self.wire, self.stochastic, self.sharded, self.auto = wire, stochastic, sharded, auto
        self._totals: dict[Weight, Tensor] = {}
        self._parts: dict[Weight, list[Tensor]] = {}

    def add(self, weight: Weight, rank: int) -> None:
        """`main_grad` is what rank `rank` has; ranks come in order, from 0 on."""
        if self.wire == "fp8_lm":  # its scale needs the gradients of all
            self._parts.setdefault(weight, []).append(weight.main_grad.float().clone())
        elif rank:
            self._totals[weight] += self._sent(weight, rank)
        else:
            self._totals[weight] = self._sent(weight, rank)

    def total(self, weight: Weight) -> Tensor:
        """The sum, FP32, which is then forgotten."""
        if self.wire == "fp8_lm":
            return self._shared_scale_sum(self._parts.pop(weight))
        total = self._totals.pop(weight)
        return total if self.sharded or self.wire != "fp8" else self._rounded(weight, total, SUMMED, 0)

    def _sent(self, weight: Weight, rank: int) -> Tensor:
        """What an owner gets from a rank, in FP32."""
        if self.wire == "fp8":
            return self._rounded(weight, weight.main_grad, SENT, rank)
        return (weight.main_grad.bfloat16() if self.wire == "bf16" else weight.main_grad).float().clone()

    def _shared_scale_sum(self, grads: list[Tensor]) -> Tensor:
        scale = torch.stack([scale_of(g) for g in grads]).min()
        factor = scale * self.auto.mu.float()
        sent = torch.empty(len(grads), grads[0].numel(), dtype=E4M3, device=factor.device)
        for grad, codes in zip(grads, sent, strict=True):
            encode_codes(grad.view(-1), factor, codes)
        codes = add_codes(sent)
        seen = num_saturated(codes), torch.full_like(scale, codes.numel()), scale == 0
        self.auto.counts += torch.stack([x.double() for x in seen])
        total = torch.empty(grads[0].shape, device=factor.device)
        decode_codes(codes, factor, total.view(-1))
        return total

    def _rounded(self, weight: Weight, value: Tensor, stream: int, rank: int) -> Tensor:
        """In tiles of 128 that begin where the weight does, as in a bucket."""
        n, flat = value.numel(), value.reshape(-1)
        arrived = torch.empty(-(-n // BLOCK) * BLOCK, device=value.device)
        for first, last, part in weight_parts(weight) if self.stochastic else [(0, arrived.numel(), weight)]:
            words, gap = None, last - min(last, n)
            if self.stochastic:
                words = pad(weight_words(replace(weight.gradient_draw(rank), stream=stream), part).view(-1), (0, gap))
            sum_tiles(pack_tiles(pad(flat[first:last], (0, gap)), words), 1, arrived[first:last])
        return arrived[:n].view(value.shape)


class SimulatedReducer(GradReducer):
    """A GradReducer for one process whose micro-batches are ranks.

    Args:
        ranks: micro-batches of a step.
        sums: how they are added.
    """

    each_microbatch = True

    def __init__(self, named_weights: Iterable[tuple[str, Weight]], ranks: int, sums: SimulatedSums) -> None:
        self._ranks, self._rank, self._sums, self._auto = ranks, 0, sums, sums.auto
        self._begin(named_weights, Mesh.solo())
        self._restart()

    @torch.no_grad()
    def finish(self, last: bool = True) -> None:
        """Takes a rank's gradients; after those of the last one every weight holds the sum of all."""
        super().finish(last=False)
        assert (self._rank == self._ranks - 1) == last, f"micro-batch {self._rank + 1} of {self._ranks}, last: {last}"
        for weight in self._weights:
            self._sums.add(weight, self._rank)
            if last:
                weight.main_grad.copy_(self._sums.total(weight))
            else:
                weight.clear_grad()
        self._rank = 0 if last else self._rank + 1
        if last and self._auto is not None:
            self._auto.update(self._mesh.world)
