"""The `fp8` section of a run's configuration, and the Recipe it describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from fp8.hardware import Machine, check
from fp8.recipe import ALIASES, RECIPES, Recipe, Spec, recipe_named, with_overrides

Format = Literal["e4m3", "e5m2"]


@dataclass(frozen=True, kw_only=True)
class AutoConfig:
    """`auto`: when it measures and what it allows (fp8/auto.py)."""

    every: int = 200  # steps between measurements, from the first step on; and at steps 10, 30 and 100
    max_error: float = 0.045  # relative L2 error of a GEMM's output; a healthy E4M3 product has about 0.037
    max_underflow: float = 0.01  # share of non-zero elements that become zero
    hysteresis: float = 0.1  # a cheaper choice has to stay this share below the limits
    layers_per_group: int = 4  # neighbouring layers that choose together


@dataclass(frozen=True, kw_only=True)
class Fp8Config:
    """How GEMMs represent numbers, and what is kept for backward."""

    recipe: str = "block"  # a name from fp8/recipe.py, or its name in fp8_autocast (DelayedScaling, ...)
    # FP8-LM's stages (arXiv 2310.18313): O1 gradients in low precision, O2 optimizer states too, O3 sharded with their weights too;
    # a preset for optim.states and optim.grad_dtype, which win where given
    level: Literal["O1", "O2", "O3"] | None = None
    format: Literal["default", "e4m3", "hybrid", "e5m2"] = "default"  # hybrid: E4M3 forward, E5M2 backward
    activation: Format | None = None  # formats of single roles, where they differ from `format`
    weight: Format | None = None
    gradient: Format | None = None
    wire: Format | None = None  # sums between ranks
    amax_history: int = 1024  # tensorwise_delayed: steps remembered
    amax_algo: Literal["max", "most_recent"] = "max"  # tensorwise_delayed: which of them counts
    margin: int = 0  # tensorwise: binades of headroom
    overrides: dict[str, str] = field(default_factory=dict)  # module -> recipe: {head: bf16, layers.0: bf16, layers.-1: bf16}
    activations: int | dict[str, int] = 0  # stage 0-4 of every layer, or by class or name: {default: 2, moe: 3, layers.0: 4}
    # A second, transposed copy of each FP8 weight, a byte a parameter: turned once an optimizer step instead of once a micro-batch
    keep_transposed: bool = False
    emulate: bool = False  # run a recipe that this device cannot, in reference arithmetic; each log line says so
    health_every: int = 0  # steps between measurements of underflow, saturation and cosine; 0: never
    auto: AutoConfig = field(default_factory=AutoConfig)

    @staticmethod
    def of(values: Mapping[str, Any], recipe: str | None = None) -> Fp8Config:
        """The section as a checkpoint's config has it; keys that this version does not know are left out.

        Args:
            recipe: replaces the recipe, and with it the overrides.
        """
        known = {f.name for f in fields(Fp8Config)}
        found = {key: value for key, value in values.items() if key in known and key != "auto"}
        return Fp8Config(**(found if recipe is None else {"recipe": recipe}))

    @property
    def name(self) -> str:
        """The recipe's own name, without aliases."""
        return ALIASES.get(self.recipe, self.recipe)

    def build(self) -> Recipe:
        """The recipe, overrides included. Raises ValueError for names that do not exist."""
        recipe = recipe_named(self.recipe)
        if recipe.weight.is_fp8:
            recipe = self._with_formats(recipe)
        return with_overrides(recipe, self.overrides) if self.overrides else recipe

    def _with_formats(self, recipe: Recipe) -> Recipe:
        if self.format != "default":
            recipe = recipe.with_format(self.format)
        roles: dict[str, Spec] = {}
        for role in ("activation", "weight", "gradient", "wire"):
            spec, fmt = getattr(recipe, role), getattr(self, role)
            spec = spec if fmt is None else replace(spec, fmt=fmt)
            if spec.scaling == "delayed":
                spec = replace(spec, history=self.amax_history, algo=self.amax_algo, margin=self.margin)
            elif spec.scaling == "current":
                spec = replace(spec, margin=self.margin)
            roles[role] = spec
        return replace(recipe, **roles)

    def admit(self, machine: Machine) -> str:
        """What stands in front of every log line on this machine: "" or that a recipe is emulated.

        Raises:
            ValueError: a recipe cannot run there; the text has the reason and the nearest one that can.
        """
        prefix = ""
        for name in dict.fromkeys((self.name, *(ALIASES.get(n, n) for n in self.overrides.values()))):
            verdict = check(name, machine, self.emulate)
            if verdict.kind == "refused":
                raise ValueError(verdict.reason)
            prefix += verdict.log_prefix(name)
        return prefix

    def idle_keys(self) -> list[str]:
        """A sentence for each key that differs from its default and that the recipe does not read."""
        recipe, roles, default = recipe_named(self.recipe), ("activation", "weight", "gradient", "wire"), Fp8Config()
        is_fp8 = recipe.weight.is_fp8
        scalings = {getattr(recipe, role).scaling for role in roles if is_fp8}
        read = dict.fromkeys(("format", *roles), is_fp8) | dict.fromkeys(("amax_history", "amax_algo"), "delayed" in scalings)
        read |= {"margin": bool(scalings & {"delayed", "current"}), "auto": recipe.adaptive}
        read["keep_transposed"] = recipe.is_fp8
        idle = [name for name, is_read in read.items() if not is_read and getattr(self, name) != getattr(default, name)]
        return [f"fp8.{name} is set, but fp8.recipe={self.recipe} does not read it" for name in idle]

    def problems(self) -> list[str]:
        """Everything that is inconsistent by itself."""
        names = {"fp8.recipe": self.recipe} | {f"fp8.overrides {key}": name for key, name in self.overrides.items()}
        known = [*RECIPES, *ALIASES]
        found = [f"{key}={name} is unknown; known: {', '.join(known)}" for key, name in names.items() if name not in known]
        stateful = ("fp32", "auto")  # one dtype for the whole residual stream; choices are the model's
        found += [
            f"fp8.overrides {key}={name}: {name} is for whole models" for key, name in self.overrides.items() if name in stateful
        ]
        if self.name == "fp32" and self.overrides:
            found.append("fp8.overrides with fp8.recipe=fp32: the reference takes none")
        limits: Mapping[str, tuple[float, float, float]] = {
            "amax_history": (self.amax_history, 1, 2**20),
            "margin": (self.margin, 0, 16),
            "health_every": (self.health_every, 0, float("inf")),
            "auto.every": (self.auto.every, 1, float("inf")),
            "auto.max_error": (self.auto.max_error, 0, 1),
            "auto.max_underflow": (self.auto.max_underflow, 0, 1),
            "auto.hysteresis": (self.auto.hysteresis, 0, 1),
            "auto.layers_per_group": (self.auto.layers_per_group, 1, float("inf")),
        }
        return found + [f"fp8.{k}={v} must be from {low} to {high}" for k, (v, low, high) in limits.items() if not low <= v <= high]
