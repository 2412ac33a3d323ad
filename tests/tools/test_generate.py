"""tools.generate: the same text as the model in memory gives, and clear refusals."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fp8.recipe import Recipe
from parallel.mesh import Mesh
from tests.model import tiny
from tools.generate import load, main
from training.checkpoint import Checkpointer
from training.config import Config, Fp8Config, RunConfig
from training.corpus import DataConfig
from training.errors import exit_status
from training.sample import generate, next_token
from training.tokenizer import load_tokenizer, train_tokenizer

TEXT = "def f(x):\n    return x + 1\n" * 50


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one checkpoint, recipe "block", with its tokenizer beside it."""
    folder = tmp_path_factory.mktemp("run")
    tokenizer = train_tokenizer([TEXT], 290, str(folder / "tok.model"))
    config = Config(
        run=RunConfig(dir=str(folder)), model=tiny.CONFIG, data=DataConfig(tokenizer=tokenizer.path), fp8=Fp8Config(recipe="block")
    )
    model = tiny.build(Recipe.block(), seed=3)
    optimizer = tiny.optimizer_of(model, seed=3)
    Checkpointer(config, model, optimizer, Mesh.solo(), tokenizer.fingerprint, "data").save(1, 1, None)
    return folder


def call(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["generate", *map(str, args)])
    return exit_status(main)


def test_command_line_gives_the_models_own_text(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    args = ("--checkpoint", run, "--prompt", "def f", "--tokens", 6, "--seed", 4, "--top-k", 5)
    assert call(monkeypatch, *args) == 0
    model, tokenizer = tiny.build(Recipe.block(), seed=3), load_tokenizer(str(run / "tok.model"))
    assert capsys.readouterr().out == generate(model, tokenizer, "def f", 6, seed=4, top_k=5) + "\n"


def test_cached_generation_is_the_full_forward(run: Path) -> None:
    """Greedy tokens with the cache are those of a forward over the whole prefix each time."""
    model, tokenizer = load(str(run), "fp32", None, torch.device("cpu"))
    text = generate(model, tokenizer, "def f", 6, temperature=0)
    ids = tokenizer.encode("def f")
    for _ in range(6):
        ids.append(int(model.logits(torch.tensor([ids]))[0, -1, : tokenizer.vocab_size].argmax()))
    assert text == tokenizer.decode(ids)


def test_top_k_and_temperature() -> None:
    logits, g = torch.tensor([0.0, 3.0, 2.0, -1.0]), torch.Generator().manual_seed(0)
    assert next_token(logits, 0, 0, g) == 1
    assert {next_token(logits, 1.0, 2, g) for _ in range(200)} == {1, 2}
    assert {next_token(logits, 5.0, 0, g) for _ in range(200)} == {0, 1, 2, 3}


def test_context_is_never_exceeded(run: Path) -> None:
    model, tokenizer = load(str(run), None, None, torch.device("cpu"))
    model.config = tiny.replace(model.config, max_position_embeddings=16)
    logits, seen = model.logits, []
    model.logits = lambda tokens, cache: (seen.append(tokens.shape[1]), logits(tokens, cache))[1]
    for prompt, new in ((TEXT, 4), ("", 40), (TEXT, 40)):
        generate(model, tokenizer, prompt, new)
        assert 0 < sum(seen) < 16 and len(seen) <= new, (prompt, seen)  # the last token that is drawn is not read
        seen.clear()


def test_refusals(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    other = train_tokenizer(["something else entirely\n" * 50], 280, str(tmp_path / "other.model"))
    cases = {
        "no checkpoint at": ("--checkpoint", tmp_path),
        "is not the tokenizer that": ("--checkpoint", run, "--tokenizer", other.path),
        "unknown recipe 'fp9'": ("--checkpoint", run, "--recipe", "fp9"),
        "--temperature -1 must be a finite number, 0 or more": ("--checkpoint", run, "--temperature", -1),
        "--temperature nan must be": ("--checkpoint", run, "--temperature", "nan"),
        "or name an existing file with --tokenizer": ("--checkpoint", run, "--tokenizer", tmp_path / "moved.model"),
    }
    for part, args in cases.items():
        assert call(monkeypatch, *args) == 2
        assert part in capsys.readouterr().err
