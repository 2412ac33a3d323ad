"""Which storage formats of optimizer states and gradients a configuration asks for; `fp8.level` is a preset of both."""

from __future__ import annotations

from fp8.optimizer import States, states_named
from training.schedule import OptimConfig

# FP8-LM's stages -> (optim.grad_dtype, optim.states). O3 also shards states, and weights with them (parallel/).
LEVELS = {None: ("fp32", "fp32"), "O1": ("bf16", "fp32"), "O2": ("bf16", "fp8_lm"), "O3": ("bf16", "fp8_lm")}


def optimizer_states(optim: OptimConfig, level: str | None) -> States:
    """Formats of master and moments: the level's preset, or `optim.states`, with single states replaced."""
    overrides = dict(master=optim.master, exp_avg=optim.exp_avg, exp_avg_sq=optim.exp_avg_sq)
    return states_named(optim.states or LEVELS[level][1], **overrides)


def gradient_format(optim: OptimConfig, level: str | None) -> str:
    """What weight gradients accumulate in, "fp32" or "bf16"."""
    return optim.grad_dtype or LEVELS[level][0]
