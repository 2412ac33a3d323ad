"""What a process of a run is: its device, whether that can run the recipe, and how it is asked to stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import torch

from fp8.hardware import machine_of
from training.config import Config, TrainConfig
from training.errors import UserError


def choose_device(train: TrainConfig, recipe: str) -> tuple[torch.device, torch.dtype]:
    """The device of this rank, and the type of what is not FP8. Raises UserError when there is no such device."""
    local_rank, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if train.device == "cpu" or (train.device == "auto" and not found):
        return torch.device("cpu"), torch.bfloat16 if train.dtype == "bf16" and recipe != "fp32" else torch.float32
    if local_rank >= found:
        raise UserError(f"this host has {found} GPUs, but torchrun started a process for GPU {local_rank} (train.device)")
    torch.cuda.set_device(local_rank)
    is_fp32 = train.dtype == "fp32" or recipe == "fp32"
    return torch.device("cuda", local_rank), torch.float32 if is_fp32 else torch.bfloat16


def admit(config: Config, device: torch.device) -> str:
    """The prefix of every log line of an emulated run. Raises UserError where the device cannot run the recipe."""
    try:
        return config.fp8.admit(machine_of(device))
    except ValueError as error:
        raise UserError(str(error)) from error


def on_sigterm() -> Callable[[], bool]:
    """From now on SIGTERM only raises a flag: the loop saves and stops after the step at hand. Returns the flag's reader."""
    received = []
    signal.signal(signal.SIGTERM, lambda *_: received.append(True))
    return lambda: bool(received)
