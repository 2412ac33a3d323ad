"""Philox: published test vectors, independence of layout, streams that share nothing."""

import itertools

import pytest
import torch

from fp8.philox import GRADIENT, UPDATE, Draw, global_index, philox_ref, random_words, weight_words
from fp8.recipe import Recipe
from fp8.weight import Piece, Weight


@pytest.mark.parametrize(
    "counter, key, want",
    [  # kat_vectors of Random123, seven rounds
        ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ],
)
def test_published_vectors(counter: tuple[int, ...], key: tuple[int, int], want: tuple[int, ...]) -> None:
    words = philox_ref(tuple(torch.tensor([c]) for c in counter), key)
    assert tuple(int(w) for w in words) == want


def test_quads_and_single_elements_agree() -> None:
    index = torch.arange(4000).view(10, 400) + (1 << 35)
    draw = Draw(seed=1, step=2, parameter=3)
    assert torch.equal(random_words(draw, index, by_quads=True), random_words(draw, index))


def test_every_part_of_the_key_changes_the_words() -> None:
    index = torch.arange(4096)
    draws = [Draw(0, 0, 0), Draw(1, 0, 0), Draw(1 << 32, 0, 0), Draw(0, 1, 0), Draw(0, 0, 1), Draw(0, 0, 0, GRADIENT),
             Draw(0, 0, 0, UPDATE, 1)]  # fmt: skip
    words = [random_words(d, index) for d in draws]
    for a, b in itertools.combinations(words, 2):
        assert (a == b).sum() <= 1  # 4096 / 2^32 expected


def test_bits_are_fair_and_uncorrelated() -> None:
    words = random_words(Draw(3, 4, 5), torch.arange(1 << 16))
    bits = (words[:, None] >> torch.arange(32)) & 1
    sigma = 0.5 / 256
    assert ((bits.float().mean(0) - 0.5).abs() < 5 * sigma).all()
    signs = bits.float() * 2 - 1
    correlation = (signs.t() @ signs) / len(words) - torch.eye(32)
    assert correlation.abs().max() < 6 / 256


def test_an_argument_that_does_not_fit_is_refused() -> None:
    with pytest.raises(AssertionError, match="step"):
        Draw(0, 1 << 32, 0)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_words_do_not_depend_on_expert_sharding(ranks: int) -> None:
    draw, shape = Draw(9, 8, 7), (4, 6, 8)
    whole = weight_words(draw, Weight(*shape, recipe=Recipe.bf16()))
    share = shape[0] // ranks
    for rank in range(ranks):
        piece = Piece((rank * share, 0, 0), (slice(0, share), slice(0, 6), slice(0, 8)))
        part = Weight(share, 6, 8, recipe=Recipe.bf16(), global_shape=shape, pieces=(piece,))
        assert torch.equal(weight_words(draw, part), whole[rank * share : (rank + 1) * share])


def test_words_of_scattered_pieces_and_columns_are_the_whole_ones() -> None:
    draw = Draw(9, 8, 7)
    whole = weight_words(draw, Weight(8, 10, recipe=Recipe.bf16()))
    rows = (Piece((6, 0), (slice(0, 2), slice(0, 10))), Piece((1, 0), (slice(2, 3), slice(0, 10))))
    part = Weight(3, 10, recipe=Recipe.bf16(), global_shape=(8, 10), pieces=rows)
    assert torch.equal(weight_words(draw, part), whole[[6, 7, 1]])
    columns = Weight(8, 5, recipe=Recipe.bf16(), global_shape=(8, 10), pieces=(Piece((0, 5), (slice(0, 8), slice(0, 5))),))
    assert torch.equal(weight_words(draw, columns), whole[:, 5:])
    assert global_index(columns)[1, 0] == 15
