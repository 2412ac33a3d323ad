"""Published checkpoints for tests: the golden one, spoilt or in FP8, and a trained run to export."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8.optimizer import AdamW
from fp8.recipe import Recipe
from fp8.weight import weights
from model.router import routers
from model.transformer import Transformer, initial_values
from parallel.mesh import Mesh
from tests.model.tiny import CONFIG
from tools import convert_hf
from tools.hf_files import read_json
from training.checkpoint import Checkpointer
from training.config import Config, Fp8Config, RunConfig
from training.corpus import DataConfig
from training.errors import exit_status

GOLDEN = Path(__file__).parents[1] / "golden" / "ling_tiny"
SCALE = "_scale_inv"


def read_all(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, as an engine loads them: through the index."""
    placed = read_json(folder / "model.safetensors.index.json")["weight_map"]
    return {k: v for shard in sorted(set(placed.values())) for k, v in load_file(folder / shard).items()}


def same_bytes(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape, name
        assert torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)), name


def call(*arguments: object) -> int:
    return exit_status(lambda: convert_hf.main([str(a) for a in arguments]))


def edit(folder: Path, **changes: object) -> None:
    """Changes fields of config.json; None removes one."""
    hf = {**read_json(folder / "config.json"), **changes}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in hf.items() if v is not None}))


def edit_tensors(folder: Path, **changes: Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        tensors[name.replace("__", ".")] = value
    save_file({k: v for k, v in tensors.items() if v is not None}, folder / "model.safetensors", {"format": "pt"})


def trained(run: Path, recipe: Recipe, tokenizer: str = "none") -> Transformer:
    """A run of a tiny model with one checkpoint: FP32 masters, biases that are not zero."""
    model = Transformer(CONFIG, recipe, dtype=torch.float32)
    optimizer = AdamW(weights(model))
    for name, _, value in initial_values(model, 3):
        optimizer.set_master(name, value)
    for i, (_, router) in enumerate(routers(model)):
        router.expert_bias.copy_(torch.randn(CONFIG.num_experts, generator=torch.Generator().manual_seed(i)) / 3)
    config = Config(
        run=RunConfig(dir=str(run)), model=CONFIG, fp8=Fp8Config(recipe=recipe.name), data=DataConfig(tokenizer=tokenizer)
    )
    Checkpointer(config, model, optimizer, Mesh.solo(), "", "").save(5, 40, None)
    return model
