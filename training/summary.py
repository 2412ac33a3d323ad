"""What `--dry-run` prints: the resolved configuration and what it means in parameters, FLOPs and bytes."""

from __future__ import annotations

from glob import glob
from pathlib import Path

import torch

from fp8.recipe import FORMATS
from model.config import ModelConfig
from model.counts import FLOPS_FORMULA, flops_per_token, parameter_counts
from training.config import Config
from training.errors import counted
from training.held_bytes import bytes_per_parameter
from training.idle_keys import idle_keys
from training.packing import SPLITS, packed_path
from training.schedule import fit_note
from training.states import gradient_format, optimizer_states
from training.tokenizer import source_of


def describe(config: Config, world_size: int) -> str:
    """The whole of it as text."""
    counts = parameter_counts(config.model)
    flops = flops_per_token(config.model, config.data.seq_len)
    optim, level = config.optim, config.fp8.level
    states, gradient = optimizer_states(optim, level), gradient_format(optim, level)
    held = bytes_per_parameter(config.model, config.fp8.build(), states, FORMATS[gradient], config.fp8.keep_transposed)
    stored = counts["total"] + counts["mtp"]
    dp = world_size // config.parallel.tp
    micro_batches = config.train.global_batch // (config.train.micro_batch * dp)
    lines = [
        config.to_yaml(),
        f"parameters        {counts['total']:,} total, {counts['active']:,} active, "
        f"{counts['non_embedding_active']:,} active without embedding and head; {counts['mtp']:,} more in the MTP layer",
        f"FLOPs/token       {flops:.4g} ({FLOPS_FORMULA})",
        f"tokens/step       {config.tokens_per_step:,} = {counted(config.train.global_batch, 'sequence')} x {config.data.seq_len}",
        f"tokens in all     {config.tokens_per_step * config.train.steps:,} in {counted(config.train.steps, 'step')}",
        f"ranks             {world_size} = dp {dp} x tp {config.parallel.tp}, ep {config.parallel.ep}; "
        f"{counted(micro_batches, 'micro-batch', 'micro-batches')} of {config.train.micro_batch} a step on each",
        "bytes/parameter   " + " + ".join(f"{value:.3f} {name}" for name, value in held.items())
        + f" = {sum(held.values()):.3f}; {stored * sum(held.values()) / 1e9:,.1f} GB over one set of ranks; "
        "a rank's memory and time: python -m tools.plan --config ...",
    ]  # fmt: skip
    if config.model == ModelConfig():
        size = f"{counts['total']:,} parameters"
        lines.append(f"note              no model.* key is set, so this is Ling-mini-2.0, the default ({size})")
    device, here = config.train.device, ""
    if device == "auto" and not torch.cuda.device_count():
        device, here = "cpu", ", and this machine has no GPU"
    idle = [f"{text}{here}" if text.endswith("on a CPU") else text for text in idle_keys(config, device, world_size)]
    notes = fit_note(optim, config.train.steps), *idle
    lines += [f"note              {text}" for text in notes if text is not None]
    return "\n".join(lines + [f"not there yet     {what}" for what in missing_files(config)])


def missing_files(config: Config) -> list[str]:
    """Files that a run would look for and not find, each with what makes it."""
    data, found = config.data, []
    if not Path(data.tokenizer).exists():
        found.append(f"{data.tokenizer}: {source_of(data.tokenizer)} (or set data.tokenizer)")
    for split in SPLITS if config.eval.samples else SPLITS[:1]:
        packed = Path(packed_path(data.dir, split))
        missing = [path for path in (packed, packed.with_suffix(".json")) if not path.exists()]
        found += [f"{path}: python -m tools.prepare_data --config ..." for path in missing[:1]]
    found += [f"{pattern}: no file matches (data.paths)" for pattern in data.paths if not glob(str(pattern), recursive=True)]
    start = config.checkpoint.init_from
    if start and not Path(start).exists():
        found.append(f"{start} (checkpoint.init_from)")
    return found
