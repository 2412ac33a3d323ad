"""What owners share before they write: one scale for the rows of several, `auto`'s samples and formats; one norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8.optimizer import AdamW
from fp8.recipe import CANDIDATES, Recipe, recipe_named
from fp8.weight import SAMPLE_ROWS, Weight
from parallel.mesh import build_mesh
from parallel.sharded_optimizer import ShardedAdamW, make_reducer, wire_for
from tests.helpers import run_ranks
from tests.parallel.layouts import bits

ROWS, COLS = 384, 128  # three blocks: one rank of two owns two of them


def values(seed: int, large: float = 1.0) -> torch.Tensor:
    value = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(seed))
    value[0, 0], value[-1, -1] = large, 8 * large  # the first row's owner has not the largest element
    return value


def one_scale(rank: int, size: int, recipe: Recipe) -> list[Any]:
    """After each of some steps: whether bytes and scale are those of an unsharded optimizer, and this rank's rows."""
    mesh, found = build_mesh(), []
    weight, other = Weight(ROWS, COLS, recipe=recipe, init_std=0.5), Weight(ROWS, COLS, recipe=recipe, init_std=0.5)
    sharded, plain = ShardedAdamW([("w", weight)], mesh), AdamW([("w", other)])
    reducer = make_reducer([("w", weight)], mesh, sharded, zero=1)
    for step in range(3):
        if step == 0:
            sharded.set_master("w", values(0, 10.0))
            plain.set_master("w", values(0, 10.0))
        else:
            for w, own in ((weight, rank == 0), (other, True)):  # of rank 1 nothing
                w.add_grad(values(step) * own)
            reducer.finish()
            sharded.step(3.0)  # weights grow: the scale moves
            plain.step(3.0)
        found.append((bits(weight.data) == bits(other.data), weight.scale_inv.item() == other.scale_inv.item()))
    return [*found, weight.scale_inv.item(), sharded.shards.rows_of(weight)]


@pytest.mark.distributed
@pytest.mark.parametrize("recipe", ["tensorwise_current", "tensorwise_delayed", "static"])
def test_rows_of_several_owners_have_one_scale(recipe: str) -> None:
    """The maximum of both owners' amax decides; a scale from one of them would be another one."""
    one, two = run_ranks(2, one_scale, recipe_named(recipe))
    for *same, _, rows in (one, two):
        assert same == [(True, True)] * 3 and 0 < rows.stop - rows.start < ROWS
    assert one[3] == two[3] and {one[4].start, two[4].start} == {0, one[4].stop}


def adopted(rank: int, size: int) -> dict[str, Any]:
    """A matrix and a stack that go from BF16 to each format, half of each on a rank."""
    mesh, seen = build_mesh(), {}
    recipe = recipe_named("auto")
    both = {}
    for kind in ("sharded", "plain"):
        named = [("a", Weight(ROWS, COLS, recipe=recipe)), ("e", Weight(4, COLS, COLS, recipe=recipe, expert=True))]
        optimizer = ShardedAdamW(named, mesh) if kind == "sharded" else AdamW(named)
        optimizer.set_master("a", values(0))
        optimizer.set_master("e", values(1)[:COLS].repeat(4, 1, 1) * torch.arange(1.0, 5.0)[:, None, None])
        both[kind] = dict(named), optimizer
    (named, optimizer), (others, plain) = both["sharded"], both["plain"]
    reducer = make_reducer(named.items(), mesh, optimizer, zero=1)
    for fmt in CANDIDATES:
        optimizer.share_samples()
        seen[f"sample {fmt}"] = [
            torch.equal(w.sample, others[n].sample) and w.sample_amax == others[n].sample_amax and len(w.sample) == SAMPLE_ROWS
            for n, w in named.items()
        ]
        for n, w in named.items():
            for weight, own in ((w, rank == 0), (others[n], True)):
                weight.choice.copy_(torch.tensor([*[CANDIDATES.index(fmt)] * 3, 1]))
                weight.add_grad(values(2)[:COLS].expand(weight.data.shape) * own if n == "e" else values(3) * own)
        reducer.finish()
        mesh.traffic.reset()
        optimizer.step(0.1)
        plain.step(0.1)
        seen[fmt] = [w.recipe == others[n].recipe and bits(w.data) == bits(others[n].data) for n, w in named.items()]
        seen[fmt] += [bits(w.scale_inv) == bits(others[n].scale_inv) for n, w in named.items() if w.scale_inv is not None]
        seen[f"sent {fmt}"] = {f for kind, f in mesh.traffic.sent if kind == "weights"}
    return seen


@pytest.mark.distributed
def test_auto_changes_formats_of_shards_on_every_rank() -> None:
    """Samples, formats, bytes and scales are those of an unsharded optimizer; what is gathered is the new format."""
    for seen in run_ranks(2, adopted):
        for fmt in CANDIDATES:
            assert all(seen[fmt]) and all(seen[f"sample {fmt}"]), (fmt, seen)
            assert seen[f"sent {fmt}"] == {"bf16" if fmt == "bf16" else "e4m3"}


def leaving(rank: int, size: int, zero: int) -> tuple[list[int], list[bool], bool]:
    """Gradient bytes sent after each of four weights is ready; whether it still holds its gradient; whether the sums are right."""
    mesh = build_mesh()
    named = [(str(i), Weight(256, 128, recipe=Recipe.fp32())) for i in range(4)]
    optimizer = ShardedAdamW(named, mesh, bucket_bytes=1)  # each weight has a bucket of its own
    for name, _ in named:
        optimizer.set_master(name, torch.zeros(256, 128))
    reducer = make_reducer(named, mesh, optimizer, "fp8", zero=zero)
    sent, held = [], []
    order = (3, 2, 1, 0) if rank == 0 else (3, 1, 2, 0)  # rank 1 finishes weight 1 before weight 2
    for i in order:
        named[i][1].add_grad(torch.full((256, 128), float(i + 1 + rank)))
        sent.append(mesh.traffic.by_kind().get("gradients", 0))
        held.append(named[i][1].main_grad is not None)
    reducer.finish()
    own = optimizer.weights
    right = all(torch.equal(w.main_grad, torch.full_like(w.main_grad, 2.0 * int(name) + 3)) for name, w in own.items())
    return sent, held, right and len(own) == 4


@pytest.mark.distributed
@pytest.mark.parametrize("zero", [1, 2])
def test_gradients_leave_for_their_owners_while_backward_runs(zero: int) -> None:
    """In one order on all ranks: what is ready early waits for those before it. Under ZeRO-2 what has left is let go."""
    (sent, held, right), (sent_1, held_1, right_1) = run_ranks(2, leaving, zero)
    part = 128 * 132  # one of the two row blocks of a weight goes to the other rank
    assert sent == [part, 2 * part, 3 * part, 4 * part] and sent_1 == [part, part, 3 * part, 4 * part]
    assert held == [zero == 1] * 4 and held_1 == [zero == 1, True, zero == 1, zero == 1]
    assert right and right_1


def test_the_default_wire_is_fp8_where_the_model_computes_in_fp8() -> None:
    assert {name: wire_for("auto", recipe_named(name).is_fp8) for name in ("block", "auto", "static", "bf16", "fp32")} == {
        "block": "fp8", "auto": "fp8", "static": "fp8", "bf16": "fp32", "fp32": "fp32"
    }  # fmt: skip
    assert wire_for("bf16", True) == "bf16"
