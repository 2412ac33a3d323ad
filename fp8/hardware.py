"""What runs where: the matrix of recipes and devices, and the texts that refuse.

A recipe that a device cannot multiply is refused at start, with the reason and the nearest recipe that works, unless the user asks
for emulation. On a CPU every recipe runs in reference arithmetic: that is what the CPU path is.
Sources: cuBLAS 12.9 release notes (1x128 / 128x128 scales on compute capability 9.0); NVIDIA TransformerEngine's support checks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

Version = tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """A device and the software on it. `sm` is None on a CPU."""

    sm: Version | None
    cuda: Version = (0, 0)
    torch: Version = (2, 11)

    @property
    def arch(self) -> str:
        """Column of the matrix: the newest listed architecture that this one belongs to."""
        if self.sm is None:
            return "CPU"
        major, minor = self.sm
        if major in (10, 11):
            return "SM100"
        return {(8, 9): "SM89"}.get(self.sm, "SM80" if major == 8 else "SM90" if major == 9 else "SM120" if major >= 12 else "SM70")

    def __str__(self) -> str:
        if self.sm is None:
            return f"CPU, torch {_text(self.torch)}"
        return f"SM{self.sm[0]}{self.sm[1]}, CUDA {_text(self.cuda)}, torch {_text(self.torch)}"


@dataclass(frozen=True)
class Support:
    """A row of the matrix.

    Attributes:
        archs: architectures whose tensor cores take the operands as they are -> lowest CUDA version of such a GEMM.
        nearest: architecture -> the recipe to use instead.
        reason: why the others cannot.
    """

    archs: dict[str, Version]
    nearest: dict[str, str]
    reason: str


ARCHS = ("SM80", "SM89", "SM90", "SM100", "SM120")
MIN_TORCH = (2, 11)  # F.scaled_mm, F.grouped_mm
_TENSORWISE = Support(
    {"SM89": (12, 1), "SM90": (12, 1), "SM100": (12, 8), "SM120": (12, 8)},
    {"SM80": "bf16", "SM70": "fp32"},
    "FP8 tensor cores begin with SM89",
)
_BLOCK = Support(
    {"SM90": (12, 9)},
    {"SM90": "tensorwise_current", "SM89": "tensorwise_current", "SM100": "mx", "SM120": "tensorwise_current", "SM80": "bf16",
     "SM70": "fp32"},
    "GEMMs with 1x128 and 128x128 scales exist on SM90 only, from CUDA 12.9 on",
)  # fmt: skip
_MX = Support(
    {"SM100": (12, 8)},
    {"SM89": "tensorwise_current", "SM90": "block", "SM120": "tensorwise_current", "SM80": "bf16", "SM70": "fp32"},
    "tensor cores apply 1x32 E8M0 scales on SM100 only; elsewhere MX is slower than BF16",
)
MATRIX: dict[str, Support] = {
    "tensorwise_current": _TENSORWISE,
    "tensorwise_delayed": _TENSORWISE,
    "static": _TENSORWISE,
    "block": _BLOCK,
    "mx": _MX,
    "auto": Support(_BLOCK.archs, _BLOCK.nearest, "auto also chooses block, which needs SM90 and CUDA 12.9"),
    "bf16": Support({a: (11, 8) for a in ARCHS}, {"SM70": "fp32"}, "BF16 tensor cores begin with SM80"),
    "fp32": Support({a: (11, 8) for a in ("SM70", *ARCHS)}, {}, ""),
}

_UNLISTED = Support(
    {}, {}, "MATRIX in fp8/hardware.py has no row that says which architectures multiply its operands; add one: that of the recipe "
    "whose formats and tiles it shares. fp8.emulate=true runs it in reference arithmetic, slower than BF16",
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """Whether a recipe may run: "native", "reference" (CPU, or asked to emulate) or "refused", and why."""

    kind: str
    reason: str = ""
    nearest: str = ""

    def log_prefix(self, recipe: str) -> str:
        """What stands in front of every log line of an emulated run; empty otherwise."""
        return f"[emulated {recipe}] " if self.kind == "emulated" else ""


def check(recipe: str, machine: Machine, emulate: bool = False) -> Verdict:
    """What happens to `recipe` (a name of `RECIPES`) on `machine`.

    Returns:
        native; reference on a CPU; emulated if asked for; else refused, with a text that names the nearest recipe that works,
        or the row of `MATRIX` that a recipe of your own still needs.
    """
    if machine.torch < MIN_TORCH:
        text = f"torch {_text(machine.torch)} is too old: {_text(MIN_TORCH)} is the first with F.scaled_mm and F.grouped_mm"
        return Verdict("refused", text)
    if machine.sm is None:
        return Verdict("reference")
    support = MATRIX.get(recipe, _UNLISTED)
    needed = support.archs.get(machine.arch)
    if needed is not None and machine.cuda >= needed:
        return Verdict("native")
    if emulate:
        return Verdict("emulated", support.reason)
    if support is _UNLISTED:
        return Verdict("refused", f"recipe {recipe} cannot run on this device ({machine}) yet: {support.reason}")
    nearest = nearest_native(recipe, machine)
    reason = support.reason if needed is None else f"it needs CUDA {_text(needed)} there"
    hint = f"the nearest that runs is {nearest}" if nearest else "nothing runs here"
    return Verdict(
        "refused",
        f"recipe {recipe} cannot run on this device ({machine}): {reason}; {hint}. "
        f"fp8.emulate=true runs {recipe} in reference arithmetic, slower than BF16",
        nearest,
    )


def nearest_native(recipe: str, machine: Machine) -> str:
    """The recipe to use instead of one that the machine cannot run; "" if there is none."""
    tried = set()
    while recipe not in tried:
        tried.add(recipe)
        support = MATRIX[recipe]
        if machine.arch in support.archs and machine.cuda >= support.archs[machine.arch]:
            return recipe
        recipe = support.nearest.get(machine.arch, "bf16")
    return ""


def matrix_table() -> str:
    """The matrix as Markdown: the table of README.md and docs/numerics.md."""
    lines = ["| recipe | CPU | " + " | ".join(ARCHS) + " |", "|---" * (len(ARCHS) + 2) + "|"]
    for name, support in MATRIX.items():
        cells = [
            f"CUDA {_text(support.archs[a])}" if a in support.archs else f"refused: {support.nearest.get(a, 'bf16')}" for a in ARCHS
        ]
        lines.append(f"| {name} | reference | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# ---------------------------------------------------------------- this process


@functools.cache
def machine_of(device: torch.device) -> Machine:
    """The machine behind a torch device."""
    version = _version(torch.__version__)
    if device.type != "cuda":
        return Machine(None, torch=version)
    return Machine(torch.cuda.get_device_capability(device), _version(torch.version.cuda or "0.0"), version)


@functools.cache
def has_tensorwise_gemm(device: torch.device) -> bool:
    """Whether cuBLAS multiplies FP8 operands with one scale each here."""
    return check("tensorwise_current", machine_of(device)).kind == "native"


@functools.cache
def has_block_gemm(device: torch.device) -> bool:
    """Whether 1x128 . 128x128 scaled FP8 operands are multiplied as they are here."""
    return check("block", machine_of(device)).kind == "native"


@functools.cache
def has_mx_gemm(device: torch.device) -> bool:
    """Whether 1x32 scaled FP8 operands are multiplied as they are here."""
    return check("mx", machine_of(device)).kind == "native"


def _version(text: str) -> Version:
    major, minor = text.split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def _text(version: Version) -> str:
    return ".".join(map(str, version))
