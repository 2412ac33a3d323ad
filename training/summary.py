"""What `--dry-run` prints: the resolved configuration and what it means in parameters, FLOPs and bytes."""

from __future__ import annotations

from fp8.recipe import recipe_named
from model.counts import FLOPS_FORMULA, flops_per_token, parameter_counts
from training.config import Config


def bytes_per_parameter(recipe_name: str) -> dict[str, float]:
    """Bytes of a matrix parameter over a whole run, by what they are for. One scale of 4 bytes serves 128 x 128 weights."""
    spec = recipe_named(recipe_name).weight
    weight = spec.dtype.itemsize + (4 / (spec.tile[0] * spec.tile[1]) if spec.tile and spec.tile[0] else 0)
    master = 0.0 if recipe_name == "fp32" else 4.0  # an FP32 weight is its own master
    return {"weight": round(weight, 4), "gradient": 4.0, "master": master, "moments": 8.0}


def describe(config: Config, world_size: int) -> str:
    """The whole of it as text."""
    counts = parameter_counts(config.model)
    flops = flops_per_token(config.model, config.data.seq_len)
    held = bytes_per_parameter(config.fp8.recipe)
    stored = counts["total"] + counts["mtp"]
    dp = world_size // config.parallel.tp
    micro_batches = config.train.global_batch // (config.train.micro_batch * dp)
    lines = [
        config.to_yaml(),
        f"parameters        {counts['total']:,} total, {counts['active']:,} active, "
        f"{counts['non_embedding_active']:,} active without embedding and head; {counts['mtp']:,} more in the MTP layer",
        f"FLOPs/token       {flops:.4g}",
        f"                  {FLOPS_FORMULA}",
        f"tokens/step       {config.tokens_per_step:,} = {config.train.global_batch} sequences x {config.data.seq_len}",
        f"tokens in all     {config.tokens_per_step * config.train.steps:,} in {config.train.steps:,} steps",
        f"ranks             {world_size} = dp {dp} x tp {config.parallel.tp}, ep {config.parallel.ep}; "
        f"{micro_batches} micro-batches of {config.train.micro_batch} a step on each",
        "bytes/parameter   " + " + ".join(f"{value:g} {name}" for name, value in held.items())
        + f" = {sum(held.values()):g}; {stored * sum(held.values()) / 1e9:,.1f} GB over all ranks",
    ]  # fmt: skip
    return "\n".join(lines)
