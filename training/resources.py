"""Memory by class and bytes on the wire of this rank, for the log."""

from __future__ import annotations

import resource
from pathlib import Path

import torch
from torch import nn

from fp8.optimizer import ROLES, AdamW, bytes_report
from fp8.transposed import kept_bytes
from parallel.mesh import Mesh

GIB = 1 << 30
BASELINE = 16  # bytes a parameter: BF16 weight and gradient, FP32 master and two moments
MAX_DETAILS = 200  # records of a run that carry tables (a count for each expert): about 30 KB each for Ling-mini


class Resources:
    """Reads what has gathered since the last `read`."""

    def __init__(self, model: nn.Module, optimizer: AdamW, mesh: Mesh, done: int) -> None:
        self.model, self.optimizer, self.mesh, self._last, self._kept = model, optimizer, mesh, done, 0

    def read(self, step: int) -> dict[str, float]:
        """Values after step `step`.

        Returns:
            "memory/CLASS_gb" of this process on the host, and of weights, their kept transposes if there are any, gradients,
            optimizer states and, at their largest, activations kept in FP8 for backward;
            "wire/KIND_gb" that this rank sent in a step, "wire_format/KIND/FORMAT_gb" of it in each format, and "wire_time/KIND_s"
            that it waited for them in this step, overlap with compute left out.
        """
        held, steps = classes(self.optimizer), max(step - self._last, 1)
        account, traffic = self.model.stash.account, self.mesh.traffic
        memory = {("states" if name == "optimizer states" else name): size for name, size in held.items()}
        memory |= {"activations": account.peak, "host": resident_bytes()}
        found = {f"memory/{name}_gb": size / 1e9 for name, size in memory.items()}
        found |= {f"wire/{kind}_gb": size / steps / 1e9 for kind, size in sorted(traffic.by_kind().items())}
        found |= {f"wire_format/{kind}/{fmt}_gb": size / steps / 1e9 for (kind, fmt), size in sorted(traffic.sent.items())}
        found |= {f"wire_time/{kind}_s": seconds for kind, seconds in sorted(traffic.seconds().items())}
        self._kept, account.peak, self._last = max(self._kept, account.peak), 0, step
        traffic.reset()
        return found

    def peak(self, device: torch.device) -> str:
        """Memory by class at its peak so far, in GiB, beside what BF16 training with FP32 AdamW holds, both without activations."""
        kept, parameters = max(self._kept, self.model.stash.account.peak), bytes_report(self.optimizer)["parameters"]
        held = classes(self.optimizer)
        parts = held | {"activations kept": kept}
        total = sum(parts.values())
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device)
            parts["everything else"], total = peak - total, peak
        text = " + ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
        both = f"{sum(held.values()) / GIB:.2f}, BF16 and FP32 AdamW {BASELINE * parameters / GIB:.2f}"
        return f"{text} = {total / GIB:.2f} GiB; without activations {both}"


def classes(optimizer: AdamW) -> dict[str, int]:
    """Bytes that stay between steps, by what they are for; transposes where `fp8.keep_transposed` has made some."""
    held, turned = bytes_report(optimizer), kept_bytes(optimizer.all_weights.values())
    transposes = {"transposes": turned} if turned else {}
    return {"weights": held["weight"], **transposes, "gradients": held["grad"], "optimizer states": sum(held[r] for r in ROLES)}


def steady_state(optimizer: AdamW, device: torch.device) -> str:
    """What stays between steps, in GiB and bytes a parameter, beside what the allocator holds; for after the first step."""
    held, parameters = classes(optimizer), max(bytes_report(optimizer)["parameters"], 1)
    total, text = sum(held.values()), " + ".join(f"{name} {size / GIB:.2f}" for name, size in held.items())
    text = f"{text} = {total / GIB:.2f} GiB, {total / parameters:.3f} bytes/parameter"
    if device.type == "cuda":
        allocated, card = torch.cuda.memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
        text += f"; {allocated / GIB:.2f} GiB allocated between steps, of {card / GIB:.1f}"
    return text


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def detailed(step: int, steps: int, log_every: int) -> bool:
    """Whether the record of a logged step carries tables: at most about `MAX_DETAILS` of a run do."""
    every = log_every * max(1, steps // (MAX_DETAILS * log_every))
    return step % every == 0 or step in (1, steps)
