"""Every byte that tensors hold, and who made them: a registry of storages, filled by a dispatch mode.

It sees what a Stash holds, what autograd saves and what a Function keeps on its ctx alike, on any device; on a GPU the allocator
is the check. A storage is counted once, however many views it has, from the operation that makes it to the moment it is freed.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).parents[1]
# File that made a storage -> tensor class of the table. The innermost frame of the repository decides.
CLASSES = {
    "fp8/rms_norm.py": "norm",
    "fp8/rms_norm_kernels.py": "norm",
    "fp8/swiglu.py": "SwiGLU",
    "fp8/swiglu_kernels.py": "SwiGLU",
    "fp8/permute.py": "permuted rows and routing",
    "fp8/permute_kernels.py": "permuted rows and routing",
    "fp8/index_kernels.py": "permuted rows and routing",
    "fp8/route_forward_kernel.py": "permuted rows and routing",
    "fp8/router_gemm_kernel.py": "permuted rows and routing",
    "fp8/grouped_gemm.py": "GEMM outputs",
    "fp8/gemm.py": "GEMM outputs",
    "fp8/qk_norm_rope.py": "attention",
    "fp8/qk_norm_rope_kernels.py": "attention",
    "fp8/cross_entropy.py": "head",
    "fp8/cross_entropy_kernels.py": "head",
    "model/attention.py": "attention",
    "model/router.py": "permuted rows and routing",
    "fp8/route.py": "permuted rows and routing",
    "fp8/router_gemm.py": "permuted rows and routing",
    "parallel/dispatch.py": "permuted rows and routing",
    "fp8/embedding.py": "residual stream",
    "fp8/residual.py": "residual stream",
    "fp8/residual_kernels.py": "residual stream",
    "model/transformer.py": "residual stream",
    "model/moe.py": "residual stream",
    "model/mtp.py": "residual stream",
}
PASS_THROUGH = ("fp8/quantize.py", "fp8/quantize_kernels.py", "fp8/quantized.py", "fp8/weight.py",
                "fp8/linear.py", "fp8/scaling.py", "parallel/linear.py", "parallel/collectives.py", "fp8/recompute.py")  # fmt: skip


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages made while it is active.

    Attributes:
        live: bytes alive by tensor class.
        peak: largest total since `reset_peak`.
        freed: classes in the order in which their storages went, since `reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        self.total = self.peak = 0
        self.freed: list[tuple[str, int]] = []
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Runs the operation and registers storages that are new: neither known nor an input's (weights, gradients, views)."""
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if made:
            given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            for tensor in made:
                self._register(tensor, given)
        return out

    def _register(self, tensor: Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or key in given or not size or tensor.device.type == "meta":
            return
        self._known.add(key)
        name = _made_by(sys._getframe(2))
        self.live[name] += size
        self.total += size
        self.peak = max(self.peak, self.total)
        weakref.finalize(storage, self._free, key, name, size)

    def _free(self, key: int, name: str, size: int) -> None:
        self._known.discard(key)
        self.live[name] -= size
        self.total -= size
        self.freed.append((name, size))

    def reset_peak(self) -> None:
        """The peak and the order of freeing count from now."""
        self.peak, self.freed = self.total, []

    def snapshot(self) -> dict[str, int]:
        """Bytes alive by class, largest first."""
        return {name: size for name, size in self.live.most_common() if size > 0}


def _made_by(frame: Any) -> str:
    """Tensor class of an allocation: the innermost frame of this repository that says what the tensor is."""
    while frame is not None:
        name = _class_of(frame.f_code.co_filename)
        if name is not None:
            return name
        frame = frame.f_back
    return "other"


@functools.cache
def _class_of(filename: str) -> str | None:
    """Class of what a source file makes; None where the caller knows better."""
    path = Path(filename)
    if not path.is_relative_to(ROOT):
        return None
    name = str(path.relative_to(ROOT))
    if name in PASS_THROUGH or not name.startswith(("fp8/", "parallel/", "model/")):
        return None
    return CLASSES.get(name, name)


def allocated(device: torch.device) -> int:
    """Bytes that the CUDA allocator says are in use; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
