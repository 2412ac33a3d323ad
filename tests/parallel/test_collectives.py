"""Collectives: values, bytes on the wire, and rows of a Quantized packed into bytes."""

from __future__ import annotations

import pytest
import torch

from fp8.quantize import quantize
from fp8.recipe import Recipe
from parallel.collectives import (
    all_gather,
    all_gather_rows,
    all_reduce,
    all_to_all,
    reduce_scatter,
)
from parallel.mesh import Axis, build_mesh
from parallel.traffic import Traffic
from tests.helpers import run_ranks

ROW = Recipe.block().activation
COLS = 384


def part(rank: int) -> torch.Tensor:
    return torch.randn(5, COLS, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (rank - 2)


def collectives_on_four_ranks(rank: int, size: int) -> dict:
    mesh = build_mesh(1, 1, timed=True)
    axis, traffic, seen = mesh.dp, mesh.traffic, {}
    parts = [part(r) for r in range(size)]
    total = torch.stack(parts).sum(0)

    def counted(fmt: str) -> int:
        nbytes = traffic.sent["test", fmt]
        traffic.reset()
        return nbytes

    gathered = all_gather_rows(quantize(parts[rank], ROW), axis, "test")
    whole = quantize(torch.cat(parts), ROW)
    seen["gather"] = torch.equal(gathered.dequantize(), whole.dequantize()) and gathered.scale_inv.stride(0) == 1
    seen["gather bytes"] = counted("e4m3") == 3 * 5 * (COLS + 4)  # three scale bytes and one of padding a row
    fp8 = all_gather(parts[rank].to(torch.float8_e4m3fn), axis, "test")
    seen["fp8 tensor"] = fp8.dtype == torch.float8_e4m3fn and fp8.shape == (20, COLS)
    traffic.reset()

    x = torch.cat(parts)
    ours = slice(5 * rank, 5 * rank + 5)
    seen["reduce_scatter"] = bool(torch.allclose(reduce_scatter(x, axis, "test"), size * x[ours]))
    seen["reduce_scatter bytes"] = counted("fp32") == 3 * 5 * COLS * 4
    wired = reduce_scatter(x, axis, "test", ROW)
    seen["reduce_scatter fp8"] = torch.equal(wired, size * quantize(x, ROW).dequantize()[ours])
    seen["reduce_scatter fp8 bytes"] = counted("e4m3") == 3 * 5 * (COLS + 4)

    reduced = all_reduce(parts[rank].clone(), axis, "test")
    seen["all_reduce"] = bool(torch.allclose(reduced, total, atol=1e-6))
    seen["all_reduce bytes"] = counted("fp32") == 2 * 3 * 5 * COLS * 4 // 4
    copies = all_gather(reduced[None], axis, "test")
    seen["same bits"] = torch.equal(copies, reduced.expand_as(copies))
    seen["max"] = torch.equal(all_reduce(parts[rank].clone(), axis, "test", "max"), torch.stack(parts).amax(0))
    traffic.reset()

    send = [(rank + r) % 3 for r in range(size)]
    rows = torch.cat([torch.full((n, 2), 10.0 * rank + r) for r, n in enumerate(send)])
    back = all_to_all(rows, axis, "test", send, send)  # symmetric: what r sends here is what goes to r
    seen["all_to_all"] = back[:, 0].tolist() == [10.0 * r + rank for r, n in enumerate(send) for _ in range(n)]
    seen["all_to_all bytes"] = traffic.sent["test", "fp32"] == 8 * (sum(send) - send[rank])
    seen["timed"] = traffic.seconds()["test"] > 0
    return seen


@pytest.mark.distributed
def test_collectives_and_their_bytes_on_four_ranks() -> None:
    for rank, seen in enumerate(run_ranks(4, collectives_on_four_ranks)):
        assert all(seen.values()), f"rank {rank}: {[name for name, ok in seen.items() if not ok]}"


def test_a_solo_axis_returns_its_input_and_counts_nothing() -> None:
    axis, x = Axis.solo(), torch.randn(4, 8)
    q = quantize(torch.randn(4, 128), ROW)
    assert all_gather(x, axis, "t") is x and reduce_scatter(x, axis, "t") is x and all_reduce(x, axis, "t") is x
    assert all_gather_rows(q, axis, "t") is q and all_to_all(x, axis, "t", [4], [4]) is x
    assert not axis.traffic.sent


def test_what_a_graph_sends_counts_when_it_is_replayed() -> None:
    traffic = Traffic(timed=True)
    traffic.add("tp", "bf16", 1)
    with traffic.capture() as captured:
        traffic.add("combine", "bf16", 3)
        with traffic.clock("combine", torch.device("cpu")):
            pass
    assert traffic.by_kind() == {"tp": 1} and traffic.seconds() == {} and traffic.timed
    for _ in range(2):
        traffic.replayed(captured)
    assert traffic.by_kind() == {"tp": 1, "combine": 6}
