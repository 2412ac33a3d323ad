"""From a checkpoint of a run (or of an import) to a folder that inference engines load (`tools/convert_hf.py export`).

`--dtype` is one of

    fp8    attention, MLPs and experts as block FP8: for a run in the block recipe the very bytes it trained with, made from the
           masters exactly as training makes them; head and eh_proj, which the format keeps in BF16, hold their trained FP8 values
    bf16   every master rounded once
    fp32   the masters
    auto   each tensor in the dtype in which it was once imported; bf16 where there was no import
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8.config import Fp8Config
from fp8.quantize import cast_fp8, quantize
from fp8.quantized import expand_scales
from fp8.recipe import BLOCK, Recipe
from model.config import ModelConfig
from model.huggingface import Part, parts
from tools.hf_config import export_config
from tools.hf_files import DTYPES, Planned, TensorWriter, read_json
from tools.hf_import import CARRIED, SCALE_PREFIX, SLAB, Progress, bias_names, global_shapes
from tools.hf_tokenizer import write_tokenizer_json
from training.checkpoint_files import corruption
from training.errors import UserError
from training.run_state import RunState, locate
from training.streaming import ShardReader
from training.tokenizer import load_tokenizer

SPEC = Recipe.block().weight
NAMES = {"bf16": "BF16", "fp32": "F32"}


@dataclass(frozen=True)
class Source:
    """A checkpoint and what is known about where it came from."""

    folder: Path
    config: ModelConfig
    reader: ShardReader
    run: dict[str, Any]  # the run's configuration
    hf: Path | None  # files of the import that it descends from

    @property
    def imported(self) -> bool:
        """Nothing has been trained since the import."""
        return (self.folder / "hf").is_dir()

    def trained_in_fp8(self, name: str) -> bool:
        """Whether the run's GEMMs read weight `name` in the block format: then its value is the quantised one."""
        recipe = Fp8Config.of(self.run["fp8"]).build() if self.run.get("fp8") else Recipe.block()
        return not self.imported and recipe.at(name, self.config.num_hidden_layers).weight == SPEC

    @property
    def dtypes(self) -> dict[str, Any]:
        return read_json(self.hf / "source.json") if self.hf is not None else {"dtype": "BF16", "other": {}}


def open_source(checkpoint: str, drop_mtp: bool, warn: Any) -> Source:
    """Reads the checkpoint once, against its checksums.

    Raises:
        UserError: no whole checkpoint there, or one whose model cannot be built.
    """
    folder = locate(checkpoint, warn, corruption)
    state = RunState.read(folder)
    try:
        config = ModelConfig(**state.model)
    except TypeError as error:
        raise UserError(f"checkpoint {folder}: its model cannot be built: {error}") from error
    if drop_mtp:
        config = replace(config, num_nextn_predict_layers=0)
    origin = (state.config.get("checkpoint") or {}).get("init_from")
    places = [folder / "hf", *([Path(origin) / "hf"] if origin else [])]
    hf = next((p for p in places if (p / "source.json").is_file()), None)
    return Source(folder, config, ShardReader(folder), state.config, hf)


def plan(source: Source, dtype: str) -> list[tuple[Planned, Part | None]]:
    """Every tensor of the export in its order; None for scales and biases. Raises UserError: a tensor of the model is missing."""
    shapes, known = global_shapes(source.config), source.dtypes
    found: list[tuple[Planned, Part | None]] = []
    for part in parts(source.config):
        shape = part.hf_shape(shapes[part.name])
        if source.reader.shape(f"master.{part.name}") != shapes[part.name]:
            raise UserError(
                f"checkpoint {source.folder}: {part.name} has shape {source.reader.shape(f'master.{part.name}')}, "
                f"its state.json implies {shapes[part.name]}"
            )
        if dtype == "auto":
            stored = known["other"].get(part.hf_name, known["dtype"])
        else:
            stored = "F8_E4M3" if dtype == "fp8" and part.fp8 else NAMES.get(dtype, "BF16")
        found.append((Planned(part.hf_name, stored, shape), part))
        if stored == "F8_E4M3":
            blocks = tuple(-(-n // BLOCK) for n in shape)
            found.append((Planned(part.hf_name + "_scale_inv", "F32", blocks), None))
    for theirs, ours in bias_names(source.config).items():
        found.append((Planned(theirs, "F32", source.reader.shape(ours)), None))
    return found


def _slabs(shape: tuple[int, ...]) -> list[slice]:
    rows = shape[0] if len(shape) < 2 else max(BLOCK, SLAB // shape[1] // BLOCK * BLOCK)
    return [slice(a, min(a + rows, shape[0])) for a in range(0, shape[0], rows)]


def _masters(source: Source, part: Part, shape: tuple[int, ...]) -> Iterator[tuple[slice, Tensor]]:
    """(rows, FP32 values) of a published tensor, a slab at a time."""
    whole = source.reader.shape(f"master.{part.name}")
    box, dim = part.box(whole), len(whole) - len(shape)
    for rows in _slabs(shape):
        start = box[dim].start
        slab = (*box[:dim], slice(start + rows.start, start + rows.stop), *box[dim + 1 :])
        yield rows, source.reader.master(part.name, slab).flatten(0, dim)


def _to_fp8(source: Source, part: Part, rows: slice, value: Tensor) -> tuple[Tensor, Tensor]:
    """(FP8 values, scales): those it was imported with where they still give the master, else as training quantises it."""
    name = SCALE_PREFIX + part.hf_name
    if name in source.reader.names():
        scale = source.reader.read(name)[rows.start // BLOCK : -(-rows.stop // BLOCK)]
        wide = expand_scales(scale, (BLOCK, BLOCK), value.shape)
        data = cast_fp8(value / wide, torch.float8_e4m3fn)
        if torch.equal((data.float() * wide).view(torch.int32), value.view(torch.int32)):
            return data, scale
    q = quantize(value, SPEC)
    return q.data, q.scale_inv


def _write_tensors(source: Source, planned: list[tuple[Planned, Part | None]], writer: TensorWriter, done: Progress) -> None:
    biases, scales = bias_names(source.config), {}
    fp8 = any(tensor.dtype == "F8_E4M3" for tensor, _ in planned)
    for tensor, part in planned:
        if part is None:
            scale = scales.pop(tensor.name, None)
            writer.write(tensor.name, source.reader.read(biases[tensor.name]) if scale is None else scale)
            continue
        pieces = []
        for rows, value in _masters(source, part, tensor.shape):
            if tensor.dtype == "F8_E4M3":
                data, scale = _to_fp8(source, part, rows, value)
                pieces.append(scale)
            else:
                if fp8 and part.name in ("head", "mtp.eh_proj") and source.trained_in_fp8(part.name):
                    value = quantize(value, SPEC).dequantize()
                data = value.to(DTYPES[tensor.dtype])
            writer.write(tensor.name, data)
            done(data.numel())
        if pieces:
            scales[tensor.name + "_scale_inv"] = torch.cat(pieces)


def _carry(source: Source, out: Path, tokenizer: str | None) -> dict[str, Any]:
    """Copies tokenizer (and, of an import, code) files; returns the config.json fields that go with them."""
    base = read_json(source.hf / "config.json") if source.hf is not None else {}
    folder = source.hf
    if tokenizer is None and not source.imported and (folder is None or not any(folder.glob("tokenizer.*"))):
        tokenizer = (source.run.get("data") or {}).get("tokenizer")
    if tokenizer is not None and tokenizer != "none":
        loaded = load_tokenizer(tokenizer, "name an existing file, or none, with --tokenizer")
        path = Path(loaded.path)
        if path.suffix == ".model":
            shutil.copyfile(path, out / "tokenizer.model")
            if (reason := write_tokenizer_json(str(path), out)) is not None:
                print(f"warning: {path} has no tokenizer.json, which most engines read: {reason}", file=sys.stderr)
        folder = path.parent if path.suffix == ".json" else None
        base |= {"eos_token_id": loaded.eos_id, "pad_token_id": loaded.eos_id}
        base |= {"bos_token_id": loaded.bos_id} if loaded.bos_id is not None else {}
    if tokenizer == "none":
        return base
    for pattern in CARRIED if folder is not None else ():
        for path in sorted(folder.glob(pattern)):
            shutil.copyfile(path, out / path.name)
    return base


def export_hf(
    source: Source, out: Path, dtype: str, tokenizer: str | None, shard_bytes: int, progress: Progress = lambda n: None
) -> ModelConfig:
    """Writes the export into `out`, which exists and is empty; the index comes last.

    Raises:
        UserError: the checkpoint lacks tensors, or there is no tokenizer to carry along.
        OSError: writing failed.
    """
    planned = plan(source, dtype)
    base = _carry(source, out, tokenizer)
    writer = TensorWriter(out, [tensor for tensor, _ in planned], shard_bytes)
    _write_tensors(source, planned, writer, progress)
    writer.finish()
    stored = {tensor.dtype for tensor, _ in planned}
    kind = "fp8" if "F8_E4M3" in stored else "fp32" if "BF16" not in stored else "bf16"
    text = json.dumps(export_config(source.config, base, kind), indent=2)
    (out / "config.json").write_text(text + "\n", encoding="utf-8")
    return source.config
