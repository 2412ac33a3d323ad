"""Recipes: which format, tile and scale rule each role of a GEMM uses.

A role is what a matrix is to the GEMM: activation, weight or gradient, plus `wire`, the form in which sums travel between ranks.
A recipe is frozen and belongs to a layer for life; there is no global context. What each costs and loses: docs/numerics.md.
Sources: block: DeepSeek-V3 (arXiv 2412.19437, section 3.3). Delayed: NVIDIA TransformerEngine. MX: OCP Microscaling Formats v1.0
with the scale rounded up. Static: unit scaling (arXiv 2303.11257) and u-muP's muS (arXiv 2502.05967).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

E4M3, E5M2, BF16, FP32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32
FORMATS = {"e4m3": E4M3, "e5m2": E5M2, "bf16": BF16, "fp32": FP32}
FP8_MAX = {E4M3: 448.0, E5M2: 57344.0}
BLOCK = 128  # edge of a scale block and of the GEMM's K step
MX_BLOCK = 32
CANDIDATES = ("tensorwise", "block", "bf16")  # of `auto`, cheapest first
TENSORWISE = (0, 0)  # the tile that stands for "one scale for the whole matrix"
SCALINGS = ("none", "block", "current", "delayed", "static")


@dataclass(frozen=True)
class Spec:
    """Format, tile and scale rule of one role.

    Attributes:
        fmt: "e4m3", "e5m2", "bf16" or "fp32".
        tile: (rows, columns) that share one scale; `TENSORWISE` for one a matrix; None when unscaled.
        scaling: "none"; "block": a power of two from each tile's own amax; tensorwise: "current" (from the tensor's own amax),
            "delayed" (from the amax of earlier steps), "static" (set once so that the tensor has unit variance, then frozen).
        history, algo: delayed only: optimizer steps remembered, and which amax of them counts, "max" or "most_recent".
        margin: tensorwise only: binades of headroom that the scale leaves.
    """

    fmt: str
    tile: tuple[int, int] | None = None
    scaling: str = "none"
    history: int = 1
    algo: str = "max"
    margin: int = 0

    def __post_init__(self) -> None:
        assert self.fmt in FORMATS, f"unknown format {self.fmt!r}; known: {', '.join(FORMATS)}"
        assert self.scaling in SCALINGS, f"unknown scaling {self.scaling!r}; known: {', '.join(SCALINGS)}"
        assert (self.scaling == "none") == (self.tile is None) == (not self.is_fp8), f"{self} mixes scaled and unscaled"
        assert self.tile is None or (self.scaling != "block") == (self.tile == TENSORWISE), f"{self} mixes tiles and one scale"
        assert self.algo in ("max", "most_recent"), f"amax algorithm {self.algo!r}; known: max, most_recent"
        assert self.history >= 1 and self.margin >= 0, f"history {self.history} or margin {self.margin} is too small"

    @property
    def dtype(self) -> torch.dtype:
        return FORMATS[self.fmt]

    @property
    def is_fp8(self) -> bool:
        return self.fmt in ("e4m3", "e5m2")

    @property
    def has_state(self) -> bool:
        """Whether the scale depends on earlier steps."""
        return self.scaling in ("delayed", "static")


@dataclass(frozen=True)
class Recipe:
    """How the three GEMMs of a layer and the wires between ranks represent numbers. Frozen: a layer keeps it for life.

    Attributes:
        gradient_t: form of dY in wgrad where it differs from dgrad's (`auto` may choose so); None: as `gradient`.
        adaptive: `auto`: the four specs are replaced by measured choices (fp8/auto.py).
        overrides: (name prefix, recipe) of modules that differ: `head`, `layers.0`, `layers.3.attention.out`. The longest wins.
    """

    name: str
    activation: Spec
    weight: Spec
    gradient: Spec
    wire: Spec = field(default=Spec("bf16"))
    gradient_t: Spec | None = None
    adaptive: bool = False
    overrides: tuple[tuple[str, Recipe], ...] = ()

    @staticmethod
    def block(fmt: str = "e4m3") -> Recipe:
        """Activations and gradients 1x128, weights 128x128, power-of-two scales; E4M3 everywhere, or E5M2 gradients ("hybrid")."""
        return _tiled("block", BLOCK, fmt)

    @staticmethod
    def mx(fmt: str = "e4m3") -> Recipe:
        """1x32 along K, E8M0 scales rounded up so that a block's maximum never clips; weights 32x32, so they transpose exactly."""
        return _tiled("mx", MX_BLOCK, fmt)

    @staticmethod
    def tensorwise_current(fmt: str = "hybrid", margin: int = 0) -> Recipe:
        """One scale a tensor from its own amax; E4M3 forward, E5M2 backward."""
        forward, backward = _pair(fmt)
        spec = lambda f: Spec(f, TENSORWISE, "current", margin=margin)  # noqa: E731
        return Recipe("tensorwise_current", spec(forward), spec(forward), spec(backward), _wire(forward))

    @staticmethod
    def tensorwise_delayed(fmt: str = "hybrid", history: int = 1024, algo: str = "max", margin: int = 0) -> Recipe:
        """One scale a tensor from the amax of earlier steps; a weight, quantised once a step from its master, from its own amax."""
        forward, backward = _pair(fmt)
        spec = lambda f: Spec(f, TENSORWISE, "delayed", history, algo, margin)  # noqa: E731
        weight = Spec(forward, TENSORWISE, "current", margin=margin)
        return Recipe("tensorwise_delayed", spec(forward), weight, spec(backward), _wire(forward))

    @staticmethod
    def static(fmt: str = "hybrid") -> Recipe:
        """Unit scaling: one scale a tensor, fixed once: weights by their initial deviation, the others by the first step."""
        forward, backward = _pair(fmt)
        spec = lambda f: Spec(f, TENSORWISE, "static")  # noqa: E731
        return Recipe("static", spec(forward), spec(forward), spec(backward), _wire(forward))

    @staticmethod
    def auto(fprop: str = "bf16", dgrad: str = "bf16", wgrad: str = "bf16") -> Recipe:
        """Chosen by measurement (fp8/auto.py) for each tensor class, from `CANDIDATES`; starts in BF16.

        Args:
            fprop: of activation and weight. dgrad, wgrad: of the gradient's row and column form.
        """
        forms = {
            "tensorwise": (Spec("e4m3", TENSORWISE, "current"),) * 2,
            "block": (Spec("e4m3", (1, BLOCK), "block"), Spec("e4m3", (BLOCK, BLOCK), "block")),
            "bf16": (Spec("bf16"),) * 2,
        }
        row, weight = forms[fprop]
        return Recipe("auto", row, weight, forms[dgrad][0], _wire("e4m3"), forms[wgrad][0], adaptive=True)

    @staticmethod
    def bf16() -> Recipe:
        """Operands in BF16, products accumulated in FP32."""
        return Recipe("bf16", Spec("bf16"), Spec("bf16"), Spec("bf16"), Spec("bf16"))

    @staticmethod
    def fp32() -> Recipe:
        """Operands as they come, in FP32: the reference of every parity test."""
        return Recipe("fp32", Spec("fp32"), Spec("fp32"), Spec("fp32"), Spec("fp32"))

    @property
    def is_fp8(self) -> bool:
        """Whether any weight may be stored in FP8."""
        return self.adaptive or self.weight.is_fp8

    def with_format(self, fmt: str) -> Recipe:
        """The same tiles and scale rules in "e4m3", "e5m2" or "hybrid"; roles that are not in FP8 stay. Raises ValueError."""
        forward, backward = _pair(fmt)
        formats = dict(activation=forward, weight=forward, gradient=backward, wire=forward, gradient_t=backward)
        roles = {role: getattr(self, role) for role in formats}
        return replace(self, **{r: replace(spec, fmt=formats[r]) for r, spec in roles.items() if spec is not None and spec.is_fp8})

    def at(self, name: str, num_layers: int = 0) -> Recipe:
        """The recipe of the module or weight `name`: that of its longest matching override, else this one.

        Args:
            num_layers: lets overrides count from the end (`layers.-1`).
        """
        best, found = -1, replace(self, overrides=())
        for key, recipe in self.overrides:
            prefix = absolute_name(key, num_layers)
            if (name == prefix or name.startswith(prefix + ".")) and len(prefix) > best:
                best, found = len(prefix), recipe
        return found


def absolute_name(key: str, num_layers: int) -> str:
    """`layers.-1.attention` -> `layers.19.attention` in a model of 20 layers."""
    parts = key.split(".")
    if len(parts) > 1 and parts[0] == "layers" and parts[1].startswith("-") and parts[1][1:].isdigit():
        parts[1] = str(num_layers + int(parts[1]))
    return ".".join(parts)


def _pair(fmt: str) -> tuple[str, str]:
    """(forward, backward) formats of "e4m3", "e5m2" or "hybrid"."""
    if fmt not in ("e4m3", "e5m2", "hybrid"):
        raise ValueError(f"unknown FP8 format {fmt!r}; known: e4m3, e5m2, hybrid (E4M3 forward, E5M2 backward)")
    return ("e4m3", "e5m2") if fmt == "hybrid" else (fmt, fmt)


def _wire(fmt: str) -> Spec:
    """Sums on a wire are quantised without state: rows of 1x128."""
    return Spec(fmt, (1, BLOCK), "block")


def _tiled(name: str, edge: int, fmt: str) -> Recipe:
    forward, backward = _pair(fmt)
    row = Spec(forward, (1, edge), "block")
    return Recipe(name, row, Spec(forward, (edge, edge), "block"), Spec(backward, (1, edge), "block"), row)


# ---------------------------------------------------------------- names


def DelayedScaling(  # noqa: N802 (the name that users of fp8_autocast know)
    margin: int = 0, amax_history_len: int = 1024, amax_compute_algo: str = "max", fp8_format: str = "hybrid"
) -> Recipe:
    """`tensorwise_delayed` under TransformerEngine's names and defaults."""
    return Recipe.tensorwise_delayed(fp8_format.lower(), amax_history_len, amax_compute_algo, margin)


def Float8CurrentScaling(fp8_format: str = "hybrid") -> Recipe:  # noqa: N802
    """`tensorwise_current`."""
    return Recipe.tensorwise_current(fp8_format.lower())


def Float8BlockScaling(fp8_format: str = "e4m3") -> Recipe:  # noqa: N802
    """`block`."""
    return Recipe.block(fp8_format.lower())


def MXFP8BlockScaling(fp8_format: str = "e4m3") -> Recipe:  # noqa: N802
    """`mx`."""
    return Recipe.mx(fp8_format.lower())


RECIPES = {
    "block": Recipe.block,
    "tensorwise_current": Recipe.tensorwise_current,
    "tensorwise_delayed": Recipe.tensorwise_delayed,
    "mx": Recipe.mx,
    "static": Recipe.static,
    "auto": Recipe.auto,
    "bf16": Recipe.bf16,
    "fp32": Recipe.fp32,
}
ALIASES = {
    "DelayedScaling": "tensorwise_delayed",
    "Float8CurrentScaling": "tensorwise_current",
    "Float8BlockScaling": "block",
    "MXFP8BlockScaling": "mx",
}


def recipe_named(name: str) -> Recipe:
    """The recipe a config names, with its default formats.

    Raises:
        ValueError: the name is unknown; the message lists the known ones.
    """
    name = ALIASES.get(name, name)
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}; known: {', '.join([*RECIPES, *ALIASES])}")
    return RECIPES[name]()


def with_overrides(recipe: Recipe, names: Mapping[str, str]) -> Recipe:
    """`recipe` with modules that differ, e.g. {"head": "bf16", "layers.0": "bf16"}. Raises ValueError as `recipe_named`."""
    return replace(recipe, overrides=tuple((key, recipe_named(name)) for key, name in names.items()))
