"""One GPU as a rank among mirrors of itself: all that a rank does, but the wire. For `tools.bench step --mirror`.

Every other rank is taken to send what this one does, so collectives become copies on the device; sums stay this rank's own, as if
the others' were zero. New weights of others arrive as they were, packed here too. Shapes, launches, kernels and host work are a
real rank's; values are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import collectives
from parallel.mesh import Axis, Mesh
from parallel.shard import ALIGN, Group, copy_bytes, places_of
from parallel.traffic import FORMAT_NAMES, Traffic


class _Done:
    """Work that is over."""

    def wait(self) -> None:
        """At once."""


def _keep(*tensors: object, **options: object) -> _Done:
    return _Done()


def _repeat(out: Tensor, x: Tensor, **options: object) -> _Done:
    out.view(-1, *x.shape).copy_(x.expand(out.shape[0] // x.shape[0], *x.shape))
    return _Done()


def _first(out: Tensor, x: Tensor, **options: object) -> _Done:
    out.copy_(x[: out.shape[0]])
    return _Done()


def _exchange(out: Tensor, x: Tensor, recv: Sequence[int], send: Sequence[int], **options: object) -> _Done:
    for part in out.split(list(recv)):  # what this rank, the first, has for itself is what the others have for it
        rows = min(part.shape[0], x.shape[0])
        part[:rows].copy_(x[:rows])
    return _Done()


def mirror_mesh(ranks: int, ep: int, gathers: bool) -> Mesh:
    """The mesh of rank 0 of `ranks`, tp = 1, without process groups."""
    traffic = Traffic()
    sizes = dict(tp=1, ep=ep, dp=ranks, edp=ranks // ep, world=ranks)
    axes = {name: Axis(None, 0, size, traffic, gathers=gathers and name == "ep") for name, size in sizes.items()}
    return Mesh(**axes, traffic=traffic)


def _send_weights(group: Group) -> None:
    """In place of `Group.send`."""
    for dtype in dict.fromkeys(w.data.dtype for w in group.weights):
        parts = [group.parts(rank, dtype) for rank in range(group.axis.size)]
        size = max(sum(-(-p.numel() // ALIGN) * ALIGN for p in own) for own in parts)
        buffer = torch.empty(group.axis.size, size, dtype=torch.uint8, device=group.weights[0].data.device)
        for row, own in zip(buffer, parts, strict=True):
            copy_bytes(places_of(own, row), own)
        group.axis.traffic.add("weights", FORMAT_NAMES[dtype], size * (group.axis.size - 1))
        group._pending[dtype] = collectives.Pending(buffer, None, group.axis, "weights")


@contextmanager
def mirrored() -> Iterator[None]:
    """Inside, collectives copy on this device."""
    names = {name: getattr(dist, name) for name in ("ReduceOp", "Work")}
    module = SimpleNamespace(**names, all_reduce=_keep, all_to_all_single=_exchange)
    with patch.multiple(collectives, dist=module, _gather=_repeat, _scatter=_first), patch.object(Group, "send", _send_weights):
        yield
