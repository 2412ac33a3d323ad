"""Fixtures of published checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8.quantized import expand_scales
from model.huggingface import parts
from tests.tools.published import GOLDEN, SCALE, edit
from tools.hf_config import import_config
from tools.hf_files import read_json


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the golden checkpoint, to be spoilt."""
    folder = tmp_path / "source"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDEN / name, folder / name)
    return folder


@pytest.fixture
def fp8_source(source: Path) -> Path:
    """The same in block FP8 with scales that are no powers of two, as published converters write it; two shards."""
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(source / "model.safetensors")
    config = import_config(read_json(source / "config.json"), "golden")
    for name in [p.hf_name for p in parts(config) if p.fp8]:
        value = tensors[name].float()
        blocks = [-(-n // 128) for n in value.shape]
        scale = value.abs().amax() / 448 * (0.5 + torch.rand(blocks, generator=generator))
        wide = expand_scales(scale, (128, 128), value.shape)
        tensors[name] = (value / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[name + SCALE] = scale
    (source / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, source / shard, {"format": "pt"})
    index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    edit(source, quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]})
    return source
