"""Whether ranks that should hold the same bits still do: weights, scales, router and expert bias."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from fp8.weight import weights
from model.router import routers
from parallel.collectives import all_gather
from parallel.mesh import Axis, Mesh
from training.process import gather

CHUNK = 1 << 22


class DesyncError(Exception):
    """Replicas differ; the message names tensor and ranks. Raised on every rank."""


def fingerprint(t: Tensor) -> Tensor:
    """0-dim int64 checksum of a tensor's bits, by position: equal bits give equal sums, whatever the device."""
    flat = t.detach().contiguous().view(-1).view(torch.uint8)
    words = flat.view(torch.int32) if flat.numel() % 4 == 0 and flat.storage_offset() % 4 == 0 else flat
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    for start in range(0, words.numel(), CHUNK):
        part = words[start : start + CHUNK].long()
        place = torch.arange(start + 1, start + 1 + part.numel(), device=t.device)
        total += (part * (place * 0x9E3779B1 % 0x7FFFFFFF | 1)).sum()
    return total


def replicated(model: nn.Module, mesh: Mesh) -> list[tuple[Axis, dict[str, Tensor]]]:
    """Tensors by the ranks that hold the same ones."""
    groups: dict[str, dict[str, Tensor]] = {"world": {}, "dp": {}, "edp": {}}
    for name, weight in weights(model):
        whole = tuple(weight.data.shape) == tuple(weight.global_shape)
        axis = "edp" if weight.expert else "world" if whole else "dp"
        groups[axis][name] = weight.data
        if weight.scale_inv is not None:
            groups[axis][f"{name} (scales)"] = weight.scale_inv
    groups["world"] |= {f"{name}.expert_bias": router.expert_bias for name, router in routers(model)}
    return [(getattr(mesh, axis), tensors) for axis, tensors in groups.items() if tensors]


def compare_replicas(model: nn.Module, mesh: Mesh, step: int) -> None:
    """Every rank calls it. Reads each weight once; sends 8 bytes a tensor.

    Raises:
        DesyncError: on every rank, when any tensor differs from its replicas.
    """
    if mesh.world.size == 1:
        return
    found = []
    for axis, tensors in replicated(model, mesh):
        own = torch.stack([fingerprint(t) for t in tensors.values()])
        table = all_gather(own[None], axis, "report").tolist()
        for place, name in enumerate(tensors):
            found += _minority(name, [row[place] for row in table], axis)
    verdict = _from_all(found, mesh.world)
    if verdict:
        raise DesyncError(f"step {step}: replicas differ: {'; '.join(verdict[:5])}{' ...' if len(verdict) > 5 else ''}")


def _minority(name: str, values: list[int], axis: Axis) -> list[str]:
    """A line where not all values are the same; the ranks with the rarer value are the suspects."""
    common, count = Counter(values).most_common(1)[0]
    if count == len(values):
        return []
    ranks = torch.distributed.get_process_group_ranks(axis.group)
    if 2 * count <= len(values):
        return [f"{name} between ranks {', '.join(map(str, ranks))}"]
    return [f"{name} on rank {', '.join(str(r) for r, v in zip(ranks, values, strict=True) if v != common)}"]


def _from_all(found: list[str], world: Axis) -> list[str]:
    """The lines of all ranks, once each."""
    return list(dict.fromkeys(line for part in gather(found, world) for line in part))
