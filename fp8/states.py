"""Which format each optimizer state has, the presets by name, and the numbers of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fp8.state_codecs import CODECS, Codec
from fp8.weight import Weight

ROLES = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Hyper:
    """The numbers of one optimizer step, as the arithmetic uses them."""

    beta1: float
    beta2: float
    eps: float
    decay: float  # 1 - lr * weight_decay
    step_size: float  # lr / (1 - beta1^t)
    rsqrt_correction2: float  # 1 / sqrt(1 - beta2^t)


@dataclass(frozen=True)
class States:
    """Storage format of each optimizer state; names from state_codecs.CODECS.

    Low-bit formats apply to weights of two or more dimensions that are themselves below FP32. Norms and router (0.07% of
    Ling-mini) keep FP32 states, and an FP32 weight is its own master.
    """

    master: str = "fp32"
    exp_avg: str = "fp32"
    exp_avg_sq: str = "fp32"

    def __post_init__(self) -> None:
        for role in ROLES:
            fmt = getattr(self, role)
            assert fmt in CODECS[role], f"no format {fmt!r} for {role}; known: {', '.join(CODECS[role])}"

    def codecs(self, weight: Weight) -> dict[str, Codec]:
        """The codec of each state of one weight."""
        low = weight.data.dim() > 1 and weight.data.dtype != torch.float32
        return {role: CODECS[role][getattr(self, role) if low else "fp32"] for role in ROLES}


# Bytes per parameter of master, m and v: fp8_lm is FP8-LM's choice, lean FP8 for both moments.
PRESETS = {
    "fp32": States(),  # 4 4 4
    "fp8_lm": States("fp16", "fp8", "fp16"),  # 2 1 2
    "lean": States("fp16", "fp8", "fp8"),  # 2 1 1
}


def states_named(preset: str, **overrides: str | None) -> States:
    """A preset with single states replaced (`exp_avg_sq="bf16"`; None leaves the preset's).

    Raises:
        ValueError: a name is unknown; the message lists the known ones.
    """
    if preset not in PRESETS:
        raise ValueError(f"unknown optimizer states {preset!r}; known: {', '.join(PRESETS)}")
    try:
        return replace(PRESETS[preset], **{role: fmt for role, fmt in overrides.items() if fmt is not None})
    except AssertionError as error:
        raise ValueError(str(error)) from error
