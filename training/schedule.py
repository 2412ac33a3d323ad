"""Learning-rate schedules: pure functions of the step, so a resumed run needs no scheduler state.

`step` counts from 0; step 0 of a warmup already has a rate above zero. Sources: constant after warmup is what Ling 2.0
trains with (arXiv 2510.22115, section 3.2: checkpoints are averaged instead of decaying); warmup-stable-decay: MiniCPM
(arXiv 2404.06395).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The `optim` section of a run's YAML file."""

    lr: float = 3e-4  # peak
    schedule: Literal["constant", "wsd", "cosine"] = "constant"
    warmup_steps: int = 0  # linear, in every schedule
    decay_steps: int = 0  # wsd: the last steps, over which the rate falls linearly
    min_lr_ratio: float = 0.0  # wsd, cosine: where it ends, as a share of the peak
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0  # largest global gradient norm; 0 turns clipping off
    # Storage of the states: bytes per parameter of master, m, v are 4 4 4 (fp32), 2 1 2 (fp8_lm), 2 1 1 (lean). None: fp8.level's
    states: Literal["fp32", "fp8_lm", "lean"] | None = None
    master: Literal["fp32", "fp16"] | None = None  # single states, where they differ from the preset
    exp_avg: Literal["fp32", "bf16", "fp8", "coat"] | None = None
    exp_avg_sq: Literal["fp32", "bf16", "fp16", "fp8", "coat"] | None = None
    offload: bool = False  # states in pinned host memory, brought to the GPU for the update
    # What weight gradients accumulate in; bf16 rounds stochastically and leaves embedding and head in fp32. None: fp8.level's
    grad_dtype: Literal["fp32", "bf16"] | None = None


def fitted(optim: OptimConfig, num_steps: int) -> tuple[int, int]:
    """(warmup, decay) steps of a run of `num_steps`: as configured, or shrunk in proportion where there is no room for both.

    So a preset also runs with `train.steps=100`; `train.py` says when it shrinks them.
    """
    warmup, decay = optim.warmup_steps, optim.decay_steps if optim.schedule == "wsd" else 0
    if warmup + decay <= num_steps:
        return warmup, decay
    warmup = warmup * num_steps // (warmup + decay)
    return warmup, num_steps - warmup if decay else 0


def fit_note(optim: OptimConfig, num_steps: int) -> str | None:
    """What to say of a run whose warmup and decay are shrunk."""
    if (shrunk := fitted(optim, num_steps)) == (optim.warmup_steps, optim.decay_steps if optim.schedule == "wsd" else 0):
        return None
    return f"train.steps={num_steps} has no room for optim.warmup_steps and decay_steps: they are {shrunk} in this run"


def learning_rate(step: int, optim: OptimConfig, num_steps: int) -> float:
    """The rate of optimizer step `step` (0-based) of a run of `num_steps`."""
    warmup, decay = fitted(optim, num_steps)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    if optim.schedule == "wsd":
        return optim.lr * wsd_ratio(step, num_steps, decay, optim.min_lr_ratio)
    if optim.schedule == "cosine":
        return optim.lr * cosine_ratio(step - warmup, num_steps - warmup, optim.min_lr_ratio)
    return optim.lr


def wsd_ratio(step: int, num_steps: int, decay_steps: int, min_ratio: float) -> float:
    """1 until `decay_steps` before the end, then a line that would reach `min_ratio` at step `num_steps`."""
    left = max(num_steps - step, 0)
    return 1.0 if left >= decay_steps else min_ratio + (1 - min_ratio) * left / decay_steps


def cosine_ratio(step: int, num_steps: int, min_ratio: float) -> float:
    """Half a cosine from 1 at step 0 to `min_ratio` at `num_steps` and after."""
    progress = min(step / max(num_steps, 1), 1.0)
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
