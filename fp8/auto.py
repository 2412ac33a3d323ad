"""AutoFP8: which format each GEMM gets, from what quantisation costs on live tensors.

At the first step, a few times soon after, and every `AutoConfig.every` steps, each adaptive weight's operands are sampled and,
for each candidate (tensorwise, block, BF16), two things are measured against the product of the BF16 operands: the relative L2
error of the output, and the share of non-zero elements that underflow. A tensor class (layer group x GEMM) then takes the
cheapest formats under both limits:

    fprop   y = x . w^T      one format for x and w, since both are stored once
    dgrad   dx = dy . w      that format for dy too, or BF16
    wgrad   dw = dy^T . x    likewise

A healthy E4M3 product has an error of about 0.037 = sqrt(2) * 0.0265, whatever the tiles: what tiles change is underflow.
Hysteresis: after the first time, a choice cheaper than the present one has to stay below the limits by a margin. Measurements
are maxima over the class and over the ranks, so every rank decides the same. Sampled: the first 128 rows, for dense weights 128
more from the middle, and 128 rows of w. The rows of x and dy of an expert's wgrad do not belong to the same tokens; their
rounding does not know.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fp8.config import AutoConfig
from fp8.quantize import quantize, quantize_t, requantize_t
from fp8.recipe import BLOCK, CANDIDATES, TENSORWISE, Recipe, Spec
from fp8.scaling import amax_scale_inv
from fp8.weight import Weight, weights

ROLES = ("fprop", "dgrad", "wgrad")
# Time of a GEMM relative to BF16 (docs/performance.md: 794, 1326 and 1434 TFLOP/s at 8192^3); a BF16 gradient against an FP8
# operand, and tensorwise experts, are dequantised first.
COST = {"tensorwise": 0.55, "block": 0.60, "bf16": 1.0}
DEQUANTIZED = 1.05
# Also measured at: tensors change fast at first. An untrained head's probabilities are all alike and fit one scale; after some
# hundred steps 57 % of its gradient underflowed in it (the evidence run).
EARLY = (10, 30, 100)
PAIRS = tuple((f, g) for f in CANDIDATES for g in dict.fromkeys((f, "bf16")))  # (format of x and w, format of dy)


def tensor_class(name: str, layers_per_group: int) -> str:
    """`layers.5.attention.qkv` -> `layers.4-7.attention.qkv`; other names are classes of their own."""
    name = name.replace(".shared.gate_up", ".experts.gate_up")  # both read the same bytes
    found = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    if not found:
        return name
    first = int(found[1]) // layers_per_group * layers_per_group
    group = str(first) if layers_per_group == 1 else f"{first}-{first + layers_per_group - 1}"
    return f"layers.{group}.{found[2]}"


# ---------------------------------------------------------------- measuring


@dataclass(eq=False)
class Sample:
    """Rows of one operand in BF16, and the largest magnitude of the tensor that they are from."""

    rows: Tensor
    amax: Tensor

    @staticmethod
    def of(x_RC: Tensor, expert: bool) -> Sample:
        """The first 128 rows and, for dense weights, 128 from the middle. An expert's buffer may end in rows that hold nothing."""
        rows = x_RC[:BLOCK]
        middle = x_RC.shape[0] // 2 // BLOCK * BLOCK
        if not expert and middle:
            rows = torch.cat([rows, x_RC[middle : middle + BLOCK]])
        rows = rows.detach().to(torch.bfloat16)
        return Sample(rows, rows.abs().amax().float() if expert else x_RC.detach().abs().amax().float())

    def quantized(self, spec: Spec, t: bool = False) -> Tensor:
        """What the GEMM would read of the rows (transposed with `t`), dequantised."""
        scale_inv = amax_scale_inv(self.amax, spec) if spec.tile == TENSORWISE else None
        x = self.rows.float()
        return (quantize_t(x, spec, scale_inv=scale_inv) if t else quantize(x, spec, scale_inv)).dequantize()

    def retiled_t(self, spec: Spec) -> Tensor:
        """What wgrad would read of the quantised rows, transposed and dequantised."""
        scale_inv = amax_scale_inv(self.amax, spec) if spec.tile == TENSORWISE else None
        return requantize_t(quantize(self.rows.float(), spec, scale_inv)).dequantize()


class Observation:
    """Keeps the first activation and the first gradient that a weight quantises in a step."""

    def __init__(self) -> None:
        self.x: Sample | None = None
        self.dy: Sample | None = None

    def see(self, weight: Weight, role: str, x: Tensor) -> None:
        """Called by `Weight`. The pre-activations that a down projection stores are not its operand: their width differs."""
        rows, cols = weight.data.shape[-2:]
        if x.shape[0] == 0:
            return
        if role == "activation" and self.x is None and x.shape[1] == cols:
            self.x = Sample.of(x, weight.expert)
        elif role == "grad" and self.dy is None and x.shape[1] == rows:
            self.dy = Sample.of(x, weight.expert)


def _error(got: Tensor, want: Tensor) -> Tensor:
    norm = want.norm()
    return torch.where(norm > 0, (got - want).norm() / norm.clamp(min=1e-30), torch.zeros_like(norm))


def _underflow(x: Tensor, value: Tensor) -> Tensor:
    nonzero = x != 0
    return (nonzero & (value == 0)).sum() / nonzero.sum().clamp(min=1)


@torch.no_grad()
def measure(x: Sample, dy: Sample, w: Sample) -> Tensor:
    """[pairs, roles, 2] fp32: (error, underflow) of the three GEMMs for each pair of `PAIRS`."""
    x_TD, dy_TF, w_FD = x.rows.float(), dy.rows.float(), w.rows.float()
    tokens, part = min(len(x_TD), len(dy_TF)), len(w_FD)  # products over the sampled rows of w, and over common tokens
    dy_s = Sample(dy.rows[:tokens], dy.amax)
    x_s = Sample(x.rows[:tokens], x.amax)
    refs = (x_TD @ w_FD.t(), dy_TF[:, :part] @ w_FD, dy_TF[:tokens, :part].t() @ x_TD[:tokens])
    out = []
    for f, g in PAIRS:
        recipe = Recipe.auto(f, g, g)
        x_q, w_q = x.quantized(recipe.activation), w.quantized(recipe.weight)
        dy_q = dy.quantized(recipe.gradient)
        dy_t = dy_s.quantized(recipe.gradient_t, t=True)[:part]
        x_t = x_s.retiled_t(recipe.activation)
        lost_x, lost_w = _underflow(x_TD, x_q), _underflow(w_FD, w_q)
        lost_t = torch.maximum(
            _underflow(dy_TF[:tokens, :part].t(), dy_t[:, :tokens]), _underflow(x_TD[:tokens].t(), x_t[:, :tokens])
        )
        rows = (
            (_error(x_q @ w_q.t(), refs[0]), torch.maximum(lost_x, lost_w)),
            (_error(dy_q[:, :part] @ w_q, refs[1]), _underflow(dy_TF, dy_q)),
            (_error(dy_t @ x_t.t(), refs[2]), lost_t),
        )
        out.append(torch.stack([torch.stack(row) for row in rows]))
    return torch.stack(out)


# ---------------------------------------------------------------- deciding


Choice = tuple[str, str, str]  # candidates of (fprop, dgrad, wgrad)


def _cost(f: str, g: str, expert: bool) -> float:
    """Of a GEMM whose stored operand is `f` and whose other one is `g`."""
    if f != g or (expert and f == "tensorwise"):
        return DEQUANTIZED
    return COST[f]


def decide(measured: list[list[list[float]]], now: Choice | None, config: AutoConfig, expert: bool) -> tuple[Choice, str]:
    """The cheapest formats under the limits, and the reason in words. A pure function: equal inputs, equal choices.

    Args:
        measured: `measure`'s numbers. BF16 against BF16 has error 0, so something always fits.
        now: the present formats, which a cheaper choice must beat by the hysteresis; None when nothing has been chosen yet.
    """
    table = dict(zip(PAIRS, measured, strict=True))

    def obstacle(role: int, f: str, g: str) -> str:
        cheaper = now is not None and _cost(f, g, expert) < _cost(now[0], now[role], expert)
        slack = 1 - config.hysteresis if cheaper else 1.0
        error, underflow = table[f, g][role]
        over = [f"error {error:.4f}"] * (error > config.max_error * slack)
        over += [f"underflow {underflow:.3%}"] * (underflow > config.max_underflow * slack)
        return " and ".join(over)

    best, best_cost = ("bf16", "bf16", "bf16"), 3 * COST["bf16"]
    for f in CANDIDATES:
        backward = [[g for g in dict.fromkeys((f, "bf16")) if not obstacle(role, f, g)] for role in (1, 2)]
        if obstacle(0, f, f) or not all(backward):
            continue
        picked = (f, *(min(gs, key=lambda g: _cost(f, g, expert)) for gs in backward))
        cost = sum(_cost(f, g, expert) for g in picked)
        if cost < best_cost:
            best, best_cost = picked, cost
    parts = []
    for role, name in enumerate(ROLES):
        f, g = best[0], best[role]
        error, underflow = table[f, g][role]
        text = f"{name} {g} (error {error:.4f}, underflow {underflow:.3%})"
        for other in CANDIDATES[: CANDIDATES.index(g)]:
            if _cost(other, other, expert) < _cost(f, g, expert):
                text += f", not {other}: {obstacle(role, other, other) or 'its other GEMMs'}"
        parts.append(text)
    return best, "; ".join(parts)


class AutoFP8:
    """Measures and chooses for a model whose recipe is `auto`; does nothing for others.

    Use: `begin(step)` before the step's first forward, `end(step)` after its last backward and before the optimizer's step, which
    re-quantises every weight in its new format. The choices are in the weights (`Weight.choice`), and so in the checkpoint.

    Args:
        reduce: elementwise maximum of a fp32 tensor over all ranks.
    """

    def __init__(self, model: nn.Module, config: AutoConfig, reduce: Callable[[Tensor], Tensor] | None = None) -> None:
        self.config, self._reduce = config, reduce
        self._classes: dict[str, list[Weight]] = {}
        for name, weight in weights(model):
            if weight.recipe.adaptive:
                self._classes.setdefault(tensor_class(name, config.layers_per_group), []).append(weight)
        self._seen: dict[Weight, Observation] = {}
        self._asked = False

    def measure_next(self) -> None:
        """The next step becomes one of measurement, whatever its number: on a warning about health, on every rank."""
        self._asked = True

    def begin(self, step: int) -> None:
        """Starts observing if step number `step` (from 1) is one of measurement."""
        if (step - 1) % self.config.every and not (step in EARLY and step < self.config.every) and not self._asked:
            return
        for members in self._classes.values():
            for weight in members:
                weight.observer = self._seen[weight] = Observation()

    @property
    def observing(self) -> bool:
        """Whether the present step is one of measurement; the same on every rank."""
        return bool(self._seen)

    @torch.no_grad()
    def end(self) -> list[str]:
        """Ends an observed step: choices for every class; returns a line for each, for the log. Empty at other steps."""
        if not self._seen:
            return []
        self._asked = False
        table = torch.stack([self._measure_class(members) for members in self._classes.values()])
        table = table if self._reduce is None else self._reduce(table)
        lines = []
        for (name, members), measured in zip(self._classes.items(), table.tolist(), strict=True):
            now, known = _formats(members[0]), bool(members[0].choice[3])
            if measured[0][0][0] < 0:
                lines.append(f"auto: {name}: no tensors in this step, stays {'/'.join(now)}")
                continue
            expert = any(w.expert for w in members)
            chosen, reason = decide(measured, now if known else None, self.config, expert)
            for weight in members:
                weight.choice.copy_(torch.tensor([*(CANDIDATES.index(c) for c in chosen), 1]))
            change = "stays" if chosen == now else f"was {'/'.join(now)}, now"
            lines.append(f"auto: {name}: {change} {'/'.join(chosen)}; {reason}")
        self._detach()
        return lines

    def _measure_class(self, members: list[Weight]) -> Tensor:
        """Largest numbers over the class; -1 where nothing was seen."""
        device = members[0].data.device
        worst = torch.full((len(PAIRS), len(ROLES), 2), -1.0, device=device)
        for weight in members:
            seen = self._seen[weight]
            if seen.x is not None and seen.dy is not None and weight.sample is not None:
                worst = torch.maximum(worst, measure(seen.x, seen.dy, Sample(weight.sample, weight.sample_amax.float())))
        return worst

    def abandon(self) -> None:
        """Ends an observed step without choices: the step was bad."""
        self._detach()

    def _detach(self) -> None:
        for weight in self._seen:
            weight.observer = None
        self._seen.clear()

    def choices(self) -> dict[str, Choice]:
        """Class -> formats of (fprop, dgrad, wgrad)."""
        return {name: _formats(members[0]) for name, members in self._classes.items()}


def _formats(weight: Weight) -> Choice:
    return tuple(CANDIDATES[i] for i in weight.choice[:3].tolist())
