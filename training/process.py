"""What a process of a run is: its device, whether that can run the recipe, and whether its arithmetic repeats."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from fp8.hardware import machine_of
from parallel.mesh import Axis
from training.config import Config, TrainConfig
from training.errors import UserError, counted

SAVING = "saving"  # the thread that writes a checkpoint in the background


def leave(status: int) -> NoReturn:
    """Ends the process with `status`, also while a save in the background takes longer than the end of its run may wait for it.

    That thread is inside torch, and would end the process with SIGABRT if the interpreter were torn down under it.
    """
    if any(thread.name == SAVING for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def choose_device(train: TrainConfig, recipe: str) -> tuple[torch.device, torch.dtype]:
    """The device of this rank, and the type of what is not FP8. Raises UserError when there is no such device."""
    local_rank, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if train.device == "cpu" or (train.device == "auto" and not found):
        return torch.device("cpu"), torch.bfloat16 if train.dtype == "bf16" and recipe != "fp32" else torch.float32
    if not found:
        raise UserError(
            f"train.device={train.device}, but torch {torch.__version__} finds no GPU on this machine; train.device=cpu needs none"
        )
    if local_rank >= found:
        asked = f"torchrun started a process for GPU {local_rank}: --nproc-per-node is at most {found} here (train.device)"
        raise UserError(f"this host has {counted(found, 'GPU')}, but {asked}")
    torch.cuda.set_device(local_rank)
    is_fp32 = train.dtype == "fp32" or recipe == "fp32"
    return torch.device("cuda", local_rank), torch.float32 if is_fp32 else torch.bfloat16


def admit(config: Config, device: torch.device) -> str:
    """The prefix of every log line of an emulated run. Raises UserError where the device cannot run the recipe."""
    try:
        return config.fp8.admit(machine_of(device))
    except ValueError as error:
        raise UserError(str(error)) from error


def make_deterministic(device: torch.device) -> str:
    """From now on equal runs are bitwise equal; returns what that changes, for the log.

    torch has no deterministic backward of cuDNN's attention, so model/attention.py takes flash; CUDA graphs are left out. An
    operation without a deterministic form is an error: with `warn_only`, flash's backward would go on adding in any order.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # only there to find bugs, and costs a pass over every tensor
    return f"deterministic: {'flash attention instead of cuDNN, no CUDA graphs' if device.type == 'cuda' else 'CPU kernels are so'}"


def gather(value: Any, world: Axis) -> list[Any]:
    """The value of each rank, on every rank. Small picklable values of our own making only."""
    found = [value] * world.size
    if world.size > 1:
        dist.all_gather_object(found, value, group=world.group)
    return found


def lost_contact(error: RuntimeError) -> str | None:
    """What a collective that failed says of the others, in one line; None for any other error."""
    text = str(error)
    said = ("connection closed by peer", "connection reset by peer", "broken pipe", "timed out", "watchdog caught", "refused")
    is_network = isinstance(error, dist.DistBackendError | dist.DistNetworkError | dist.DistStoreError) or "gloo" in text
    found = next((words for words in said if words in text.lower()), None)
    return f"another rank is gone or hangs ({found})" if found and is_network else None
