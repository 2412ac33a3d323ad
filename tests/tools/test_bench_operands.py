"""`tools.bench numerics --run`: the operands of a trained model, as they are before quantisation."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from fp8.recipe import Recipe
from fp8.weight import weights
from model.loss import count_valid
from model.transformer import Transformer
from parallel.mesh import Mesh
from tests.model import tiny
from tools.bench_operands import RECIPES, measure, operands
from tools.bench_operands import main as bench
from training.checkpoint import Checkpointer
from training.config import Config, Fp8Config, RunConfig
from training.corpus import DataConfig
from training.errors import UserError
from training.packing import pack_corpus
from training.tokenizer import train_tokenizer


def test_operands_are_those_of_the_gemm() -> None:
    """x . w^T is the layer's output and dY its gradient: dY^T . x is the gradient that the model accumulates."""
    model = tiny.build(Recipe.bf16())
    tokens, labels = tiny.batch(2, 128)
    found = list(operands(model, tokens, labels, "attention.qkv"))
    named = dict(weights(model))
    assert [name for name, *_ in found] == [name for name in named if name.endswith("attention.qkv")]
    for name, x, w, dy in found:
        torch.testing.assert_close(dy.bfloat16().float().t() @ x.bfloat16().float(), named[name].main_grad, rtol=1e-2, atol=1e-5)
        assert torch.equal(w, named[name].data.float()) and named[name].observer is None
    with pytest.raises(UserError, match="ends in 'nothing'"):
        next(operands(model, tokens, labels, "nothing"))
    assert count_valid(tokens, labels).ce > 0


def test_outliers_cost_tensorwise_scales_and_not_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(256, 256, generator=generator) for _ in range(3))
    x[:, 0] *= 1e5
    m = {name: measure(x, w, dy, recipe) for name, recipe in RECIPES.items()}
    assert m["tensorwise, E4M3"]["lost x"] > 0.1 > 10 * m["block"]["lost w"]
    for name, found in m.items():
        assert 0.02 < found["rms w"] < 0.04, name
        assert found["element dy"] < (0.06 if "hybrid" in name else 0.03), name


def small_run(folder: Path) -> Transformer:
    """A run's folder with a checkpoint and packed text; the model that it holds."""
    for i in range(20):
        (folder / f"{i}.txt").write_text(f"def f{i}(x):\n    return x + {i}\n" * 50)
    tokenizer = train_tokenizer([(folder / "0.txt").read_text()], 290, str(folder / "tok.model"))
    texts = dict(source="text", paths=[str(folder / "*.txt")], validation_fraction=0.5)
    data = DataConfig(tokenizer=tokenizer.path, dir=str(folder), seq_len=128, **texts)
    pack_corpus(data, tokenizer)
    config = Config(run=RunConfig(dir=str(folder)), model=tiny.CONFIG, data=data, fp8=Fp8Config(recipe="block"))
    model = tiny.build(Recipe.block(), seed=3)
    optimizer = tiny.optimizer_of(model, seed=3)
    Checkpointer(config, model, optimizer, Mesh.solo(), tokenizer.fingerprint, "data").save(1, 1, None)
    return model


def test_a_run_prints_a_row_for_each_recipe_and_layer(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = small_run(tmp_path)
    bench(argparse.Namespace(run=str(tmp_path), gemm="attention.qkv", sequences=2, data=None, tokenizer=None, split="validation"))
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| layers") or line.startswith("| mtp")]
    assert len(rows) == 3 * len([name for name, _ in weights(model) if name.endswith("attention.qkv")])
