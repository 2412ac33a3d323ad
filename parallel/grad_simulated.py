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
from parallel.grad_wire import SENT, SUMMED, pack_tiles, sum_tiles
from parallel.mesh import Mesh


class SimulatedReducer(GradReducer):
    """A GradReducer for one process whose micro-batches are ranks.

    Args:
        ranks: micro-batches of a step.
        wire: "fp32", "bf16", "fp8" or, with `auto`, "fp8_lm".
        stochastic: how "fp8" rounds; the optimizer of the weights must exist.
        sharded: the sums stay with their owners (ZeRO), so they are not rounded again.
    """

    each_microbatch = True

    def __init__(
        self,
        named_weights: Iterable[tuple[str, Weight]],
        ranks: int,
        wire: str,
        stochastic: bool = False,
        sharded: bool = True,
        auto: AutoScale | None = None,
    ) -> None:
        self._ranks = ranks
        self._wire, self._stochastic, self._sharded, self._auto = wire, stochastic, sharded, auto
        self._begin(named_weights, Mesh.solo())
        self._rank, self._totals, self._parts = 0, {}, {}
        self._restart()

    @torch.no_grad()
    def finish(self, last: bool = True) -> None:
        """Takes a rank's gradients; after those of the last one every weight holds the sum of all."""
        super().finish(last=False)
        for weight in self._weights:
            if self._wire == "fp8_lm":
                self._parts.setdefault(weight, []).append(weight.main_grad.float().clone())
            elif self._rank:
                self._totals[weight] += self._sent(weight)
            else:
                self._totals[weight] = self._sent(weight)
            if last:
                weight.main_grad.copy_(self._sum(weight))
            else:
                weight.clear_grad()
        assert (self._rank == self._ranks - 1) == last, f"micro-batch {self._rank + 1} of {self._ranks}, last: {last}"
        self._rank = 0 if last else self._rank + 1
        if last:
            self._totals.clear()
            if self._auto is not None:
                self._auto.update(self._mesh.world)

    def _sent(self, weight: Weight) -> Tensor:
        """What an owner gets from this rank, in FP32."""
        if self._wire == "fp8":
            return self._rounded(weight, weight.main_grad, SENT, self._rank)
        return (weight.main_grad.bfloat16() if self._wire == "bf16" else weight.main_grad).float().clone()

    def _sum(self, weight: Weight) -> Tensor:
        if self._wire == "fp8_lm":
            grads = self._parts.pop(weight)
            scale = torch.stack([scale_of(g) for g in grads]).min()
            factor = scale * self._auto.mu.float()
            sent = torch.empty(len(grads), weight.numel, dtype=E4M3, device=factor.device)
            for grad, codes in zip(grads, sent, strict=True):
                encode_codes(grad.view(-1), factor, codes)
            codes = add_codes(sent)
            seen = num_saturated(codes), torch.full_like(scale, codes.numel()), scale == 0
            self._auto.counts += torch.stack([x.double() for x in seen])
            total = torch.empty(grads[0].shape, device=factor.device)
            decode_codes(codes, factor, total.view(-1))
            return total
        total = self._totals[weight]
        return total if self._sharded or self._wire != "fp8" else self._rounded(weight, total, SUMMED, 0)

    def _rounded(self, weight: Weight, value: Tensor, stream: int, rank: int) -> Tensor:
        """In tiles of 128 that begin where the weight does, as in a bucket."""
        n, words = value.numel(), None
        if self._stochastic:
            words = weight_words(replace(weight.gradient_draw(rank), stream=stream), weight).view(-1)
            words = pad(words, (0, -n % BLOCK))
        packed = pack_tiles(pad(value.reshape(-1), (0, -n % BLOCK)), words)
        arrived = torch.empty(packed.shape[0] * BLOCK, device=value.device)
        sum_tiles(packed, 1, arrived)
        return arrived[:n].view(value.shape)
