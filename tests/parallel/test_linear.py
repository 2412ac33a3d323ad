"""Layers split over tp, with and without sequence parallel, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8.cross_entropy import head_loss
from fp8.linear import linear, quantize_activation
from fp8.quantize import quantize
from fp8.quantized import Quantized
from fp8.recipe import Recipe
from fp8.stash import Stash
from fp8.weight import Weight
from parallel.collectives import all_gather_rows
from parallel.linear import column_linear, row_linear
from parallel.mesh import Axis, build_mesh
from parallel.sequence import (
    gather_activation,
    join_tokens,
    own_rows,
    split_activation,
    split_tokens,
    vocab_axis,
    vocab_embedding,
)
from tests.helpers import largest, run_ranks

T, D, F, V = 24, 256, 512, 512  # T / 4 = 6 rows a rank: not a multiple of 128


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (T, D), "w1": (F, D), "w2": (D, F), "dy": (T, D), "head": (V, D), "emb": (V, D)}
    made = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    # outputs of order one, so that neither the softmax nor the loss hangs on a single value
    return {name: x / x.shape[1] ** 0.5 if name.startswith(("w", "head")) else x for name, x in made.items()}


def weight(value: torch.Tensor, recipe: Recipe) -> Weight:
    made = Weight(*value.shape, recipe=recipe)
    made.set_(value)
    return made


def shard(value: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    return value.chunk(axis.size, dim)[axis.rank].contiguous()


def two_layers(recipe: Recipe, axis: Axis) -> dict[str, torch.Tensor]:
    """y = row(relu(column(x))), then a vocabulary-parallel loss of y; gradients of everything, this rank's parts."""
    v, stash = tensors(), Stash()
    tokens = own_rows(axis, T) if axis.sequence else slice(0, T)
    w1, w2 = weight(shard(v["w1"], axis, 0), recipe), weight(shard(v["w2"], axis, 1), recipe)
    head, emb = weight(shard(v["head"], axis, 0), recipe), weight(shard(v["emb"], axis, 0), Recipe.fp32())
    x = v["x"][tokens].clone().requires_grad_()
    ids = torch.arange(T) * 37 % V
    h = x + vocab_embedding(ids, emb, axis, torch.float32)
    y = column_linear(quantize_activation(h, w1, stash, "x"), w1, axis).relu()
    y = row_linear(quantize_activation(y, w2, stash, "y"), w2, axis)
    edge = gather_activation(quantize_activation(y, head, stash, "head"), axis)
    labels = torch.where(torch.arange(T) % 5 == 0, -100, (ids * 7) % V)
    loss, _ = head_loss(edge, head, labels, torch.tensor(0.1), chunk=128, vocab=vocab_axis(head, axis))
    (loss + (y * v["dy"][tokens]).sum()).backward()
    return {
        "loss": loss.detach(),
        "y": y.detach(),
        "dx": x.grad,
        "dw1": w1.main_grad,
        "dw2": w2.main_grad,
        "dhead": head.main_grad,
        "demb": emb.main_grad,
    }


def parts(whole: dict[str, torch.Tensor], axis: Axis) -> dict[str, torch.Tensor]:
    """What a rank of `axis` should hold of a single process's results."""
    tokens = own_rows(axis, T) if axis.sequence else slice(0, T)
    split = {"dw1": 0, "dw2": 1, "dhead": 0, "demb": 0}
    return {
        name: shard(value, axis, split[name]) if name in split else value[tokens] if value.dim() else value
        for name, value in whole.items()
    }


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm().clamp(min=1e-30)).item()


def split_and_join(axis: Axis) -> tuple[bool, bool]:
    """Replicated tokens, each handled by one rank: forward and gradient are those of all tokens."""
    stash, v = Stash(), tensors()
    w = weight(v["w1"], Recipe.fp32())
    x = v["x"].clone().requires_grad_()
    edge = split_activation(quantize_activation(x, w, stash, "x"), axis)
    y = join_tokens(linear(edge, w) + split_tokens(x, axis).sum(-1, keepdim=True), axis)
    y.square().sum().backward()
    want = v["x"].clone().requires_grad_()
    y_want = want @ v["w1"].t() + want.sum(-1, keepdim=True)
    y_want.square().sum().backward()
    return relative(y.detach(), y_want.detach()) < 1e-6, relative(x.grad, want.grad) < 1e-6


def all_cases(rank: int, size: int) -> dict[Any, Any]:
    seen: dict[Any, Any] = {}
    whole = {name: two_layers(getattr(Recipe, name)(), Axis.solo()) for name in ("fp32", "block")}
    for tp in (2, 4):
        for sequence in (True, False):
            mesh = build_mesh(tp, 1, sequence_parallel=sequence)
            for name in ("fp32", "block"):
                mesh.traffic.reset()
                got = two_layers(getattr(Recipe, name)(), mesh.tp)
                want = parts(whole[name], mesh.tp)
                seen[tp, sequence, name] = {key: relative(got[key], want[key]) for key in want}
                seen[tp, sequence, name, "sent"] = dict(mesh.traffic.sent)
            seen[tp, sequence, "split"] = sequence or split_and_join(mesh.tp)
    mesh = build_mesh(4, 1)
    for cols in (256, 2048):  # what one gather of a column-parallel layer sends, in each format
        x = torch.randn(T // 4, cols, generator=torch.Generator().manual_seed(rank))
        for name, q in (("block", quantize(x, Recipe.block().activation)), ("bf16", Quantized.unscaled(x.bfloat16()))):
            mesh.traffic.reset()
            all_gather_rows(q, mesh.tp, "tp")
            seen["gather bytes", cols, name] = mesh.traffic.by_kind()["tp"]
    wired = build_mesh(4, 1, tp_wire=Recipe.block().wire)
    got = two_layers(Recipe.block(), wired.tp)
    seen["fp8 reduce"] = {k: relative(got[k], w) for k, w in parts(whole["block"], wired.tp).items()}
    seen["fp8 reduce", "sent"] = dict(wired.traffic.sent)
    return seen


@pytest.fixture(scope="module")
def by_rank() -> list[dict]:
    return run_ranks(4, all_cases)


LAYOUTS = [(tp, sequence) for tp in (2, 4) for sequence in (True, False)]
# One E4M3 rounding errs by 2^-4 at worst, 2.6 % in the mean square. Splitting sums differently rounded parts, which moves
# values across rounding boundaries; row-parallel dY reaches wgrad through one more rounding: two apart at most.
BLOCK_BOUND = 2**-4
FP8_REDUCE_BOUND = 2**-3  # and one more on each of the two sums in forward and the two in backward


@pytest.mark.distributed
class TestTensorParallel:
    @pytest.mark.parametrize(("tp", "sequence"), LAYOUTS)
    def test_fp32_equals_one_process(self, by_rank: list[dict], tp: int, sequence: bool) -> None:
        for seen in by_rank:
            assert largest(seen[tp, sequence, "fp32"].values()) < 1e-5, seen[tp, sequence, "fp32"]

    @pytest.mark.parametrize(("tp", "sequence"), LAYOUTS)
    def test_block_recipe_stays_within_its_bound(self, by_rank: list[dict], tp: int, sequence: bool) -> None:
        for seen in by_rank:
            assert largest(seen[tp, sequence, "block"].values()) < BLOCK_BOUND, seen[tp, sequence, "block"]

    def test_rows_of_a_rank_need_not_be_a_multiple_of_128(self, by_rank: list[dict]) -> None:
        """Nothing falls back: row tiles do not care how many rows there are."""
        assert T // 4 % 128 and all(seen[4, True, "block", "sent"]["tp", "e4m3"] > 0 for seen in by_rank)

    def test_fp8_reduce_scatter_stays_within_its_bound(self, by_rank: list[dict]) -> None:
        for seen in by_rank:
            assert largest(seen["fp8 reduce"].values()) < FP8_REDUCE_BOUND, seen["fp8 reduce"]

    def test_sequence_parallel_off_splits_and_joins_tokens_exactly(self, by_rank: list[dict]) -> None:
        assert all(seen[tp, False, "split"] == (True, True) for seen in by_rank for tp in (2, 4))

    def test_gathers_really_are_fp8_on_the_wire_at_most_0_53_of_bf16(self, by_rank: list[dict]) -> None:
        for seen in by_rank:
            assert seen[4, True, "block", "sent"]["tp", "e4m3"] > 0
            for cols in (256, 2048):
                fp8, bf16 = seen["gather bytes", cols, "block"], seen["gather bytes", cols, "bf16"]
                assert bf16 == 3 * (T // 4) * 2 * cols and fp8 <= 0.53 * bf16
            # FP32 (this test's stream) is left on the reduce-scatters and the embedding
            assert seen["fp8 reduce", "sent"]["tp", "fp32"] < seen[4, True, "block", "sent"]["tp", "fp32"]
