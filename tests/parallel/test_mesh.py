"""Layouts: which ranks form which axis, and which layouts are refused."""

from __future__ import annotations

import socket
import time

import pytest
import torch
import torch.distributed as dist

import parallel.mesh as mesh_module
from parallel.collectives import all_reduce
from parallel.mesh import Mesh, build_mesh, check_layout
from tests.helpers import run_ranks


def members_by_layout(rank: int, size: int) -> dict:
    seen = {}
    for tp, ep in ((1, 1), (2, 1), (1, 2), (2, 4), (2, 2), (4, 4)):
        mesh = build_mesh(tp, ep)
        for name in ("tp", "ep", "dp", "edp", "world"):
            axis = getattr(mesh, name)
            ranks = [None] * axis.size
            if axis.size > 1:
                dist.all_gather_object(ranks, rank, group=axis.group)
            else:
                ranks = [rank]
            assert ranks[axis.rank] == rank
            seen[tp, ep, name] = ranks
    return seen


@pytest.mark.distributed
def test_axes_hold_the_documented_ranks() -> None:
    seen = run_ranks(4, members_by_layout)
    for rank, axes in enumerate(seen):
        for tp, ep in ((1, 1), (2, 1), (1, 2), (2, 4), (2, 2), (4, 4)):
            assert axes[tp, ep, "tp"] == [r for r in range(4) if r // tp == rank // tp]
            assert axes[tp, ep, "dp"] == [r for r in range(4) if r % tp == rank % tp]
            assert axes[tp, ep, "ep"] == [r for r in range(4) if r // ep == rank // ep]
            assert axes[tp, ep, "edp"] == [r for r in range(4) if r % ep == rank % ep]
            assert axes[tp, ep, "world"] == [0, 1, 2, 3]


def timeouts(rank: int, size: int) -> dict[str, float]:
    """Of each axis's group."""
    mesh, cpu = build_mesh(2, 4, timeout_s=7.0), torch.device("cpu")
    axes = {name: getattr(mesh, name) for name in ("tp", "ep", "dp", "edp", "world")}
    return {n: a.group._get_backend(cpu).options._timeout.total_seconds() for n, a in axes.items() if a.size > 1}


@pytest.mark.distributed
def test_the_timeout_reaches_every_group() -> None:
    """A new group would otherwise wait for half an hour."""
    for found in run_ranks(4, timeouts):
        assert found == {"tp": 7.0, "ep": 7.0, "dp": 7.0, "world": 7.0}


def silence(rank: int, size: int) -> float:
    """Seconds after which rank 0 gives up on a rank that does not answer."""
    mesh, began = build_mesh(timeout_s=1.0), time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError, match="(?i)time"):
            all_reduce(torch.ones(1), mesh.dp, "test")
    else:
        time.sleep(3.0)
    return time.monotonic() - began


@pytest.mark.distributed
def test_a_rank_that_does_not_answer_ends_the_others() -> None:
    assert 0.9 < run_ranks(2, silence)[0] < 2.9


def test_solo_mesh_has_one_rank_on_each_axis() -> None:
    mesh = Mesh.solo()
    assert {axis.size for axis in (mesh.tp, mesh.ep, mesh.dp, mesh.edp, mesh.world)} == {1}


def test_impossible_layouts_name_both_numbers() -> None:
    widths = {"shared width": 512, "vocab": 130}
    problems = check_layout(6, 4, 4, num_experts=10, num_heads=6, num_kv_heads=3, tokens=130, widths=widths)
    for pair in (("6", "4"), ("10", "4"), ("3", "4"), ("130", "4")):
        assert any(all(number in p for number in pair) for p in problems), (pair, problems)
    sizes = dict(num_experts=8, num_heads=4, num_kv_heads=1, tokens=64, widths={"w": 256})
    assert check_layout(8, 2, 4, **sizes) == []


def test_build_mesh_refuses_before_any_group_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(ValueError, match="6.*4"):
        build_mesh(tp=4)
    assert not dist.is_initialized()


def on_hosts(rank: int, size: int, names: list[str]) -> str:
    """What a mesh with peer copies says on hosts of these names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: names[rank])
        patch.setattr(mesh_module, "Peer", lambda group, place, device: (place, device.index))
        patch.setattr(torch.cuda, "current_device", lambda: 7)
        try:
            return str(build_mesh(1, 2, "cuda", peer_copies=True).ep.peer)
        except ValueError as error:
            return str(error)


@pytest.mark.distributed
def test_peer_copies_are_for_pairs_on_one_host() -> None:
    assert run_ranks(4, on_hosts, ["a", "a", "b", "b"]) == ["(0, 7)", "(1, 7)"] * 2
    for said in run_ranks(4, on_hosts, ["a", "a", "a", "b"]):
        assert said.startswith("parallel.peer_copies is for two ranks of one host: ranks 2 and 3 on a and b; ")
