"""Dispatch in a whole model: when it waits for the device, gathered against counted tokens, and what runs beside the wire."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8.weight import weights
from model import experts
from model.loss import count_valid
from model.moe import MoE
from parallel.mesh import build_mesh
from tests.helpers import run_ranks
from tests.parallel.layouts import Case, backward, bits, build, global_batch

MOE_LAYERS = 2  # of tests/parallel/layouts.py's model: one of its two layers, and the MTP layer


@contextmanager
def recorded_reads() -> Iterator[Counter[str]]:
    """Counts, by our function that asks, how often a tensor's value is brought to the host."""
    found: Counter[str] = Counter()

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **options: Any) -> Any:
            frame = sys._getframe(1)
            while frame.f_back is not None and Path(frame.f_code.co_filename).parent.name not in ("fp8", "parallel", "model"):
                frame = frame.f_back
            found[frame.f_code.co_name] += 1
            return original(*args, **options)

        return read

    with pytest.MonkeyPatch.context() as patch:
        for name in ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
            patch.setattr(torch.Tensor, name, watched(getattr(torch.Tensor, name)))
        yield found


def host_reads(rank: int, size: int) -> dict[tuple[int, int], tuple[dict[str, int], dict[str, int]]]:
    """(reads in forward, reads in backward) of a whole model, by ep (-2: gathered) and activation stage."""
    seen = {}
    for ep, stage in ((1, 0), (2, 0), (2, 2), (2, 3), (2, 4), (-2, 0), (-2, 4)):
        mesh = build_mesh(1, abs(ep), dispatch="gathered" if ep < 0 else "counted")
        model = build(Case(ep=abs(ep), recipe="block", stage=stage), mesh)
        tokens, labels = (x.chunk(2)[rank] for x in global_batch())
        valid = count_valid(tokens, labels)
        with recorded_reads() as forward:
            total = model(tokens, labels, valid).total
        with recorded_reads() as backward:
            total.backward()
        for reads in (forward, backward):
            reads.pop("_slices", None)  # only the grouped GEMMs' reference needs row counts on the host
            reads.pop("buffer_rows", None)  # of what _token_counts has brought there
        seen[ep, stage] = dict(forward), dict(backward)
    return seen


@pytest.mark.distributed
def test_a_layer_waits_once_for_the_device() -> None:
    """Its counts at ep > 1, unless all tokens are gathered. A layer that is recomputed whole (stage 4) dispatches again."""
    for seen in run_ranks(2, host_reads):
        assert seen[1, 0] == seen[-2, 0] == seen[-2, 4] == ({}, {})
        for stage in (0, 2, 3):
            assert seen[2, stage] == ({"_token_counts": MOE_LAYERS}, {}), stage
        assert seen[2, 4] == ({"_token_counts": MOE_LAYERS}, {"_token_counts": MOE_LAYERS})


def both_ways(rank: int, size: int) -> list[tuple[float, dict[str, int]]]:
    """(loss, digests of all gradients) of a whole model: tokens counted, then gathered; stages 0 and 2."""
    found = []
    for stage in (0, 2):
        for way in ("counted", "gathered"):
            mesh = build_mesh(1, size, dispatch=way)
            model = build(Case(ep=size, recipe="block", stage=stage), mesh)
            loss = backward(model, mesh, parts=1)
            found.append((loss, {name: bits(w.main_grad) for name, w in weights(model)}))
    return found


def last_ranks_idle(rank: int, size: int) -> list[dict[str, object]]:
    """A whole model, forward and backward, tokens counted, where nobody chooses experts 4-7; kept, recomputed in part and whole."""
    found = []
    for recipe, stage in (("fp32", 0), ("block", 0), ("block", 3), ("block", 4)):
        mesh = build_mesh(1, size, dispatch="counted")
        model = build(Case(ep=size, recipe=recipe, stage=stage, idle=True), mesh)
        came: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(experts, "dispatch", noting_rows(came))
            loss = backward(model, mesh, parts=1)[0]
        own = {name: w.main_grad for name, w in weights(model) if w.expert}
        found.append(
            {
                "loss": loss,
                "rows": came,
                "largest": max(g.abs().max().item() for g in own.values()),
                "finite": all(w.main_grad.isfinite().all() for _, w in weights(model)),
                "router": max(w.main_grad.norm().item() for name, w in weights(model) if "router" in name),
            }
        )
    return found


def noting_rows(came: list[int]) -> Callable[..., Any]:
    """`dispatch` that notes how many rows this rank's experts got."""
    original = experts.dispatch

    def noted(*args: Any) -> Any:
        rows, w_R, plan = original(*args)
        came.append(int(plan.perm.groups.counts_E.sum()))
        return rows, w_R, plan

    return noted


@pytest.mark.distributed
def test_a_rank_whose_experts_get_no_row_goes_forward_and_backward() -> None:
    """Its expert gradients are zeros, not what lay in memory; its own tokens still train everything else."""
    busy, idle = run_ranks(2, last_ranks_idle)
    for a, b in zip(busy, idle, strict=True):
        assert len(b["rows"]) >= MOE_LAYERS and set(b["rows"]) == {0} and min(a["rows"]) > 0
        assert b["largest"] == 0.0 < a["largest"]
        assert a["loss"] == b["loss"] > 0 and a["finite"] and b["finite"] and b["router"] > 0
    assert len({r["loss"] for r in busy[1:]}) == 1 and abs(busy[0]["loss"] / busy[1]["loss"] - 1) < 0.02


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 4])
def test_gathered_is_counted_bit_for_bit(ranks: int) -> None:
    for counted, gathered, recounted, regathered in run_ranks(ranks, both_ways):
        assert counted == gathered == recounted == regathered and len(counted[1]) > 10


def beside_the_wire(rank: int, size: int) -> tuple[list[str], list[str]]:
    """What happens in forward and in backward of a gathered layout, in order: rows leave and arrive, the shared expert works."""
    found: list[str] = []

    def noted(name: str, what: str, patch: pytest.MonkeyPatch) -> None:
        original = getattr(experts, name)

        def start(*args: Any) -> Callable[[], Any]:
            found.append(f"{what} leave")
            wait = original(*args)
            return lambda: (found.append(f"{what} arrive"), wait())[1]

        patch.setattr(experts, name, start)

    mesh = build_mesh(1, size, dispatch="gathered")
    model = build(Case(ep=size, recipe="block"), mesh)
    for block in (m for m in model.modules() if isinstance(m, MoE)):
        block.shared.register_forward_hook(lambda *_: found.append("shared"))
        block.shared.down.on_grad_ready = block.shared.gate_up.on_grad_ready = lambda _: found.append("shared")
    tokens, labels = (x.chunk(size)[rank] for x in global_batch())
    with pytest.MonkeyPatch.context() as patch:
        noted("start_combine_rows", "sums", patch)
        noted("start_dispatch_both", "dy", patch)
        for _, weight in weights(model):
            weight.last_microbatch = True
        total = model(tokens, labels, count_valid(tokens, labels)).total
        forward, found[:] = list(found), []
        total.backward()
    return forward, found


@pytest.mark.distributed
def test_the_shared_expert_runs_beside_sums_and_dy() -> None:
    for ahead, back in run_ranks(2, beside_the_wire):
        assert ahead == ["sums leave", "shared", "sums arrive"] * MOE_LAYERS
        assert back == ["dy leave", "shared", "shared", "dy arrive", "sums leave", "sums arrive"] * MOE_LAYERS
