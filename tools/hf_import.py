"""From a published BailingMoeV2 folder to a checkpoint that training starts from (`tools/convert_hf.py import`).

    OUT/state.json, .metadata, __*.distcp   a checkpoint of step 0: masters and expert biases, no moments
    OUT/hf/                                 config.json, tokenizer and code files as they came; source.json
    OUT/train.yaml                          a run that continues from it

Masters are kept in BF16 where that is exact; reading widens them. Scales of an FP8 source are kept beside its values, so that an
untouched weight goes out again in the very bytes that came in.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fp8.quantized import expand_scales
from fp8.recipe import BLOCK, Recipe
from fp8.weight import weights
from model.config import ModelConfig
from model.huggingface import Part, bias_name, parts
from model.router import routers
from model.transformer import Transformer
from tools.hf_config import import_config
from tools.hf_files import TensorFiles, read_json
from training.checkpoint_files import seal_alone
from training.config import load_config
from training.config_loading import dump_yaml
from training.errors import UserError
from training.run_state import RunState
from training.streaming import ShardWriter
from training.tokenizer import load_tokenizer

SLAB = 64 << 20  # elements of a piece of a master: 256 MB in FP32
CARRIED = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json", "*.py", "LICENSE*",
)  # fmt: skip
SCALE_PREFIX = "hf.scale_inv."
Progress = Callable[[int], object]


def skeleton(config: ModelConfig) -> Transformer:
    """The model without memory: names and shapes."""
    with torch.device("meta"):
        return Transformer(config, Recipe.bf16())


def global_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Our weight name -> its global shape. Raises UserError for a model with other weights than BailingMoeV2 has."""
    shapes = {name: weight.global_shape for name, weight in weights(skeleton(config))}
    held = {part.name for part in parts(config)}
    if wrong := [*(f"has no weight for {name}" for name in shapes if name not in held),
                 *(f"needs {name}, which this model does not have" for name in held if name not in shapes)]:  # fmt: skip
        more = f"; {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise UserError(f"the published format, BailingMoeV2, {'; '.join(wrong[:4])}{more}: a layer of your own has no place in it")
    return shapes


def bias_names(config: ModelConfig) -> dict[str, str]:
    """Published name of each expert bias -> its name in our checkpoints."""
    return {bias_name(name, config): f"expert_bias.{name}" for name, _ in routers(skeleton(config))}


def check_tensors(files: TensorFiles, config: ModelConfig, fp8: bool, drop_mtp: bool) -> list[Part]:
    """The parts of the model, each checked against the files.

    Raises:
        UserError: tensors that are missing, unknown, of another shape or dtype; the first few are named.
    """
    shapes, entries, wrong = global_shapes(config), files.entries, []
    found, left = list(parts(config)), set(entries)

    def check(name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
        left.discard(name)
        if name not in entries:
            wrong.append(f"{name} is missing")
        elif entries[name].dtype not in dtypes:
            wrong.append(f"{name} has dtype {entries[name].dtype}, expected {' or '.join(dtypes)}")
        elif entries[name].shape != shape:
            wrong.append(f"{name} has shape {list(entries[name].shape)}; config.json implies {list(shape)}")

    for part in found:
        shape = part.hf_shape(shapes[part.name])
        check(part.hf_name, shape, ("BF16", "F16", "F32", *(("F8_E4M3",) if fp8 and part.fp8 else ())))
        if part.hf_name in entries and entries[part.hf_name].dtype == "F8_E4M3":
            check(part.hf_name + "_scale_inv", tuple(-(-n // BLOCK) for n in shape), ("F32",))
    for name in bias_names(config):
        check(name, (config.num_experts,), ("F32",))
    extra_layer = f"model.layers.{config.num_hidden_layers}."
    if drop_mtp:
        left = {name for name in left if not name.startswith(extra_layer)}
    for name in sorted(left):
        known = config.num_nextn_predict_layers == 0 and name.startswith(extra_layer)
        hint = "; config.json has num_nextn_predict_layers = 0: set it to 1, or pass --mtp drop" if known else ""
        wrong.append(f"{name} is no tensor of this model{hint}")
    if fp8 and not any(e.dtype == "F8_E4M3" for e in entries.values()):
        wrong.append("config.json has a quantization_config but no tensor is FP8")
    if wrong:
        more = [f"... and {len(wrong) - 8} more"] if len(wrong) > 8 else []
        raise UserError("\n  - ".join([f"{files.folder} cannot be imported", *wrong[:8], *more]))
    return found


def _values(files: TensorFiles, part: Part, rows: slice) -> Tensor:
    """Rows of a published tensor as a master: FP8 dequantised; BF16 where that is exact, else FP32."""
    value = files.read(part.hf_name, rows)
    if value.dtype == torch.float8_e4m3fn:
        blocks = slice(rows.start // BLOCK, -(-rows.stop // BLOCK))
        scale = files.read(part.hf_name + "_scale_inv", blocks)
        if not (torch.isfinite(scale).all() and (scale > 0).all()):
            raise UserError(f"{part.hf_name}_scale_inv holds scales that are not positive finite numbers")
        value = value.float() * expand_scales(scale, (BLOCK, BLOCK), value.shape)
    if value.dtype != torch.bfloat16:
        value = value.float()
        if torch.equal(value.bfloat16().float(), value):
            value = value.bfloat16()
    if not torch.isfinite(value).all():
        raise UserError(f"{part.hf_name} holds NaN or infinity")
    return value


def _copy_weights(files: TensorFiles, found: list[Part], config: ModelConfig, writer: ShardWriter, done: Progress) -> None:
    shapes = global_shapes(config)
    for part in found:
        shape = shapes[part.name]
        box, hf_shape = part.box(shape), part.hf_shape(shape)
        rows_dim = len(shape) - len(hf_shape)  # 1 where experts are stacked
        first = box[rows_dim].start
        if len(hf_shape) == 2:  # slabs start on a block, so that scales go with their rows
            rows = max(BLOCK, SLAB // hf_shape[1] // BLOCK * BLOCK)
            slabs = [slice(a, min(a + rows, hf_shape[0])) for a in range(0, hf_shape[0], rows)]
        else:
            slabs = [slice(0, hf_shape[0])]
        for slab in slabs:
            value = _values(files, part, slab)
            offset = [s.start for s in box]
            offset[rows_dim] = first + slab.start
            writer.add(f"master.{part.name}", shape, offset, value.reshape(*[1] * rows_dim, *value.shape))
            done(value.numel())
        if files.entries[part.hf_name].dtype == "F8_E4M3":
            scale = files.read(part.hf_name + "_scale_inv")
            writer.add(SCALE_PREFIX + part.hf_name, scale.shape, (0,) * scale.dim(), scale)
    for theirs, ours in bias_names(config).items():
        bias = files.read(theirs)
        if not torch.isfinite(bias).all():
            raise UserError(f"{theirs} holds NaN or infinity")
        writer.add(ours, bias.shape, (0,), bias)


def _carry(source: Path, files: TensorFiles, folder: Path) -> None:
    """Everything that is not a weight, as it came."""
    folder.mkdir()
    for pattern in ("config.json", *CARRIED):
        for path in sorted(source.glob(pattern)):
            shutil.copyfile(path, folder / path.name)
    dtypes = {name: entry.dtype for name, entry in files.entries.items()}
    default = collections.Counter(dtypes.values()).most_common(1)[0][0]
    other = {name: dtype for name, dtype in dtypes.items() if dtype != default}
    (folder / "source.json").write_text(json.dumps({"dtype": default, "other": other}, indent=1), encoding="utf-8")


def _run_file(config: ModelConfig, out: Path, tokenizer: str | None) -> str:
    """A run that continues from the import: the published recipe of continued pre-training (Ling-V2's example scripts)."""
    name = out.name
    data = {"dir": f"data/{name}", "seq_len": min(config.max_position_embeddings, 4096)}
    data |= {"tokenizer": tokenizer or f"data/{name}/tokenizer.json", "vocab_size": min(2048, config.vocab_size)}
    beside = out.resolve().parent.name == "runs"  # the run must not lie in the import: one name would stand for both
    values = {
        "run": {"dir": f"runs/{name}_trained" if beside else f"runs/{name}"},
        "model": dataclasses.asdict(config),
        "data": data,
        "train": {"steps": 2000, "global_batch": 128, "micro_batch": 1},
        "optim": {"lr": 3e-5, "schedule": "cosine", "min_lr_ratio": 0.1},
        "checkpoint": {"init_from": str(out)},
    }
    if config.fp8_problems():  # narrower than FP8's 128-wide blocks
        values["fp8"] = {"recipe": "bf16"}
    head = f"# Continues from {out}. Set data.source and data.paths to your text (docs/data.md).\n"
    return head + dump_yaml(values)


def import_hf(source: Path, folder: Path, final: Path, drop_mtp: bool, progress: Progress = lambda n: None) -> ModelConfig:
    """Writes the import of `source` into `folder`, which exists and is empty; `final` is the name it will have.

    Raises:
        UserError: anything in the source is missing, damaged, unknown or contradictory.
        OSError: writing failed.
    """
    if not source.is_dir():
        raise UserError(f"{source} is not a folder" if source.exists() else f"{source} does not exist")
    if not (source / "config.json").is_file():
        raise UserError(f"{source} has no config.json: is it a Hugging Face model folder?")
    hf = read_json(source / "config.json")
    config = import_config(hf, f"{source}/config.json")
    if drop_mtp:
        config = dataclasses.replace(config, num_nextn_predict_layers=0)
    files = TensorFiles(source)
    found = check_tensors(files, config, hf.get("quantization_config") is not None, drop_mtp)
    has_tokenizer = any((source / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
    fingerprint = load_tokenizer(str(source)).fingerprint if has_tokenizer else ""
    (folder / "train.yaml").write_text(_run_file(config, final, f"{final}/hf" if has_tokenizer else None), encoding="utf-8")
    run = load_config(str(folder / "train.yaml")).to_dict()
    writer = ShardWriter(folder)
    _copy_weights(files, found, config, writer, progress)
    writer.finish()
    _carry(source, files, folder / "hf")
    state = RunState(step=0, consumed=0, num_steps=0, model=dataclasses.asdict(config), tokenizer=fingerprint, data="", config=run)
    (folder / "state.json").write_text(json.dumps(dataclasses.asdict(state), indent=1), encoding="utf-8")
    seal_alone(folder)
    return config
