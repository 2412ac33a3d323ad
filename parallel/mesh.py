"""Who talks to whom. world = dp x tp, tp innermost; ep spans consecutive ranks of the whole world; edp = world / ep.

    rank     0   1   2   3   4   5   6   7        tp = 2, ep = 4
    tp      (0   1) (0   1) (0   1) (0   1)       one model's layers; sequence parallel too
    dp       0       1       2       3            replicas of dense weights: ranks with the same tp rank
    ep      (0   1   2   3) (0   1   2   3)       one set of experts
    edp      0               1                    replicas of experts: ranks with the same ep rank

A layer takes the `Axis` it communicates on. `Axis.solo()` turns each collective into a no-op: layers never ask for
sizes.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from fp8.recipe import BLOCK, Spec
from parallel.peer import Peer
from parallel.traffic import Traffic

# How sums may travel, by the names a configuration uses; "bf16" is the tensors' own dtype (FP32 where the stream is FP32).
WIRES = {"bf16": None, "fp8": Spec("e4m3", (1, BLOCK), "block")}


@dataclass(frozen=True, eq=False)
class Axis:
    """Some ranks that communicate.

    Attributes:
        group: torch process group; None on a solo axis.
        rank: this process within the axis.
        size: number of ranks.
        traffic: where collectives on this axis count their bytes.
        wire: how rows that will be summed travel (tp reduce-scatter, ep combine): None in their own dtype, an FP8 spec as FP8
            bytes that are summed in FP32.
        sequence: tp only: the tokens between dense layers are split over the axis; off, every rank has them all.
        gathers: ep only: every rank gets every token of the axis, and nobody counts (parallel/dispatch.py).
        peer: ep of two ranks only: how rows travel instead of through NCCL (parallel/peer.py).
    """

    group: Any
    rank: int
    size: int
    traffic: Traffic = field(default_factory=Traffic, repr=False)
    wire: Spec | None = None
    sequence: bool = True
    gathers: bool = False
    peer: Peer | None = None

    @staticmethod
    def solo(traffic: Traffic | None = None) -> Axis:
        """An axis of one rank: every collective on it returns its input."""
        return Axis(None, 0, 1, traffic if traffic is not None else Traffic())


@dataclass(frozen=True, eq=False)
class Mesh:
    """The axes of one process.

    Attributes:
        tp: ranks that split dense layers (and, under sequence parallel, the tokens between them).
        ep: ranks that split the experts.
        dp: replicas of dense weights.
        edp: replicas of expert weights.
        world: everybody.
        traffic: the count that all axes share.
    """

    tp: Axis
    ep: Axis
    dp: Axis
    edp: Axis
    world: Axis
    traffic: Traffic = field(default_factory=Traffic, repr=False)

    @staticmethod
    def solo() -> Mesh:
        """One process, no communication."""
        traffic = Traffic()
        return Mesh(*(Axis.solo(traffic) for _ in range(5)), traffic=traffic)


def check_layout(
    world: int,
    tp: int,
    ep: int,
    *,
    num_experts: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    tokens: int | None = None,
    widths: Mapping[str, int] | None = None,
) -> list[str]:
    """Reasons why a layout cannot run, each with both numbers; empty when it can. Needs no process group.

    Args:
        num_experts, num_heads, num_kv_heads: of the model, where known.
        tokens: of one micro-batch on one dp rank; tp splits them.
        widths: name -> size of each dimension that tp splits (FFN and vocabulary widths).
    """
    sizes = {"world size": world, "parallel.tp": tp, "parallel.ep": ep}
    problems = [f"{name} = {n} must be at least 1" for name, n in sizes.items() if n < 1]
    if problems:
        return problems

    def divides(part: int, name: str, whole: int | None, what: str) -> None:
        if whole is not None and whole % part:
            problems.append(f"{what} {whole} is not a multiple of {name} {part}")

    divides(tp, "tp", world, "world size")
    divides(ep, "ep", world, "world size")
    divides(ep, "ep", num_experts, "model.num_experts")
    divides(tp, "tp", num_heads, "model.num_attention_heads")
    divides(tp, "tp", tokens, "tokens of a micro-batch")
    if num_kv_heads is not None and num_kv_heads % tp and tp % num_kv_heads:
        problems.append(f"model.num_key_value_heads {num_kv_heads} and tp {tp}: neither is a multiple of the other")
    for name, width in (widths or {}).items():
        divides(tp, "tp", width, name)
    return problems


def _axis(rank: int, members: list[list[int]], traffic: Traffic, timeout_s: float, **options: Any) -> Axis:
    """The axis of `rank` among `members`. Every process makes every group, in the same order, as torch requires.

    A new group takes torch's default timeout (half an hour on gloo), not that of the default group.
    """
    mine = Axis.solo(traffic)
    for ranks in members:
        if len(ranks) > 1:
            group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
            if rank in ranks:
                mine = Axis(group, ranks.index(rank), len(ranks), traffic, **options)
    return mine


def build_mesh(
    tp: int = 1,
    ep: int = 1,
    device: torch.device | str = "cpu",
    sequence_parallel: bool = True,
    timeout_s: float = 600.0,
    tp_wire: Spec | None = None,
    combine_wire: Spec | None = None,
    timed: bool = False,
    dispatch: str = "auto",
    peer_copies: bool = False,
) -> Mesh:
    """The mesh of this process, from torchrun's environment or an initialised torch.distributed.

    Args:
        device: of the tensors that will travel: gloo for "cpu", NCCL (and gloo for CPU tensors) for "cuda".
        sequence_parallel: split the tokens between dense layers over tp.
        tp_wire, combine_wire: FP8 spec for the tp reduce-scatter and the ep combine; None: the tensors' own dtype.
        timed: measure time per kind of collective too.
        dispatch: "gathered": each ep rank gets all tokens; "counted": those of its experts; "auto": gathered at ep = 2, where
            nearly every token has an expert on either rank.
        peer_copies: gathered tokens and their sums are copied by the GPUs' copy engines; ep = 2 on CUDA, both ranks on one host.

    Raises:
        ValueError: the layout is impossible; raised before any process group is made. `peer_copies`, and ranks that would copy to
            each other are on two hosts; raised on every rank.
    """
    ready = dist.is_initialized()
    world = dist.get_world_size() if ready else int(os.environ.get("WORLD_SIZE", "1"))
    problems = check_layout(world, tp, ep)
    if problems:
        raise ValueError("impossible layout: " + "; ".join(problems))
    if world == 1:
        mesh = Mesh.solo()
        mesh.traffic.timed = timed
        return mesh
    if not ready:
        device = torch.device(device)
        if device.type == "cuda":
            os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")  # else the wire waits behind queued GEMMs (docs/parallelism.md)
            dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, **_meeting(timeout_s))
        else:
            dist.init_process_group("gloo", **_meeting(timeout_s))
    rank, traffic = dist.get_rank(), Traffic(timed)
    gathers = dispatch == "gathered" or (dispatch == "auto" and ep == 2)
    consecutive = lambda n: [list(range(i, i + n)) for i in range(0, world, n)]  # noqa: E731
    strided = lambda n: [list(range(i, world, n)) for i in range(n)]  # noqa: E731
    experts = _axis(rank, consecutive(ep), traffic, timeout_s, wire=combine_wire, gathers=gathers)
    if peer_copies and gathers and ep == 2 and torch.device(device).type == "cuda":
        experts = replace(experts, peer=_peer(experts))
    return Mesh(
        tp=_axis(rank, consecutive(tp), traffic, timeout_s, wire=tp_wire, sequence=sequence_parallel),
        ep=experts,
        dp=_axis(rank, strided(tp), traffic, timeout_s),
        edp=_axis(rank, strided(ep), traffic, timeout_s),
        world=_axis(rank, consecutive(world), traffic, timeout_s),
        traffic=traffic,
    )


def _peer(axis: Axis) -> Peer:
    """For ranks 0 and 1, 2 and 3, ... of the world. Every rank calls it."""
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    apart = [f"ranks {i} and {i + 1} on {hosts[i]} and {hosts[i + 1]}" for i in range(0, len(hosts), 2) if hosts[i] != hosts[i + 1]]
    if apart:
        raise ValueError(f"parallel.peer_copies is for two ranks of one host: {', '.join(apart)}; set it to false")
    return Peer(axis.group, axis.rank, torch.device("cuda", torch.cuda.current_device()))


def _meeting(timeout_s: float) -> dict[str, Any]:
    """Where the ranks meet, as arguments of init_process_group.

    torchrun's store outlives a restart of its workers, with the dead ones' addresses under the same keys (pytorch#135712): each
    start gets keys of its own. Agents of several hosts count restarts differently; there the store must not be shared
    (docs/reliability.md).
    """
    timeout = timedelta(seconds=timeout_s)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restart == "0" or os.environ.get("GROUP_WORLD_SIZE") != "1":
        return {"timeout": timeout}
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    return {"timeout": timeout, "store": dist.PrefixStore(f"restart_{restart}", store), "rank": rank, "world_size": world}


def close_mesh() -> None:
    """Leaves torch.distributed, if this process entered it."""
    if dist.is_initialized():
        dist.destroy_process_group()
