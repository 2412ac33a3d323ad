"""What happens when a step goes bad, and when a number looks bad: policies, limits, warnings.

Loss or gradient not finite on any rank, or a spike: no rank updates anything; then, by `faults.policy`,

    stop       the run ends with status 3
    skip       the step's data is passed over, the weights stay; `max_streak` bad steps in a row end the run
    rollback   the newest checkpoint comes back, the data goes on; `max_streak` returns to one checkpoint end the run
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Literal

WINDOW = 50  # good steps that a spike is measured against
ENOUGH = 10  # of them, before anything counts as a spike
NOTICEABLE_S = 1.0  # below that between two logs, a slow rank is noise


@dataclass(frozen=True, kw_only=True)
class FaultConfig:
    """Bad steps, hangs, replicas, signals (docs/reliability.md)."""

    policy: Literal["stop", "skip", "rollback"] = "stop"
    max_streak: int = 5  # bad steps in a row (skip), or returns to the same checkpoint (rollback), before the run stops
    spike_loss: float = 0.0  # nats above the median of the last 50 good steps that make a bad step; 0: any loss is good
    spike_norm: float = 0.0  # multiple of their median gradient norm; 0: any norm is good (clipping deals with it)
    compare_every: int = 1000  # steps between comparisons of the replicas of all weights; 0: never
    underflow: float = 0.1  # FP8 health beyond these shares warns (at `fp8.health_every`)
    saturation: float = 0.02
    slow_rank: float = 1.5  # a rank that takes this multiple of the mean time is named
    quiet_s: float = 300.0  # without a new phase or step for so long, each rank prints its phase and stacks
    stop_within_s: float = 25.0  # from a signal to the exit, saved or not: torchrun kills after 30


class BadStepError(Exception):
    """The run cannot go on; raised on every rank before any of them has updated anything."""


class Guard:
    """Judges steps and counts bad ones. Every rank sees the same numbers, so every rank decides the same.

    Attributes:
        history: (loss, gradient norm) of the last good steps; part of a checkpoint, so that a resumed run judges the same.
    """

    def __init__(self, config: FaultConfig, history: Iterable[Iterable[float]] = ()) -> None:
        self.config = config
        self.history = deque((tuple(h) for h in history), maxlen=WINDOW)
        self._streak, self._returns, self._said_dead = 0, {}, False

    def spike(self, loss: float, grad_norm: float) -> str | None:
        """What is out of the ordinary about finite numbers, or None."""
        if len(self.history) < ENOUGH:
            return None
        usual_loss, usual_norm = (median(values) for values in zip(*self.history, strict=True))
        if 0 < self.config.spike_loss < loss - usual_loss:
            return f"the loss {loss:.4f} is {loss - usual_loss:.2f} above its median of {usual_loss:.4f} (faults.spike_loss)"
        if 0 < self.config.spike_norm * usual_norm < grad_norm:
            return f"the gradient norm {grad_norm:.4g} is {grad_norm / usual_norm:.3g} times its median (faults.spike_norm)"
        return None

    def dead(self, step: int, grad_norm: float) -> str | None:
        """A warning, once, when no weight has any gradient: every number is finite, and nothing is learned."""
        if grad_norm != 0 or self._said_dead:
            return None
        self._said_dead = True
        return (
            f"step {step}: the gradient norm is exactly 0, so nothing is learned. Too large a step, or too large values at the "
            "start, do that (optim.lr, model.embedding_init_std, model.initializer_range), and a batch without labels"
        )

    def good(self, loss: float, grad_norm: float) -> None:
        """A step that was taken."""
        self.history.append((loss, grad_norm))
        self._streak = 0

    def bad(self, problem: str, last_checkpoint: int | None) -> bool:
        """Counts a bad step. Returns whether to go back to the last checkpoint (else the step is passed over).

        Raises:
            BadStepError: policy "stop", or the limit is reached, or there is nothing to go back to.
        """
        limit = self.config.max_streak
        if self.config.policy == "stop":
            raise BadStepError(problem)
        if self.config.policy == "skip":
            self._streak += 1
            if self._streak > limit:
                raise BadStepError(f"{problem}; {self._streak} bad steps in a row (faults.max_streak={limit})")
            return False
        if last_checkpoint is None:
            raise BadStepError(f"{problem}; there is no checkpoint to go back to")
        count = self._returns[last_checkpoint] = self._returns.get(last_checkpoint, 0) + 1
        if count > limit:
            raise BadStepError(f"{problem}; step {last_checkpoint} has been returned to {limit} times (faults.max_streak)")
        return True


def worst_of(by_rank: Iterable[dict[str, float]]) -> dict[str, float]:
    """The largest value of each number over the ranks: they hold different tokens and experts."""
    worst: dict[str, float] = {}
    for measured in by_rank:
        worst |= {key: max(value, worst.get(key, value)) for key, value in measured.items()}
    return worst


def unhealthy(measured: dict[str, float], config: FaultConfig) -> str | None:
    """A warning with the layers and tensor classes whose underflow or saturation is beyond its limit, worst first, or None.

    Args:
        measured: "NAME/ROLE/METRIC" of every weight (fp8/health.py).
    """
    limits = {"underflow": config.underflow, "saturation": config.saturation}
    beyond = []
    for key, value in measured.items():
        name, _, metric = key.rpartition("/")
        if value > limits.get(metric, 2.0):
            beyond.append((value, metric, re.sub(r"/(\w+)$", r" (\1)", name)))
    if not beyond:
        return None
    worst = [f"{name}: {metric} {value:.1%}" for value, metric, name in sorted(beyond, reverse=True)[:5]]
    more = f"; and {len(beyond) - 5} more" if len(beyond) > 5 else ""
    return f"FP8 loses much in {'; '.join(worst)}{more}. fp8.recipe=auto, or fp8.overrides, gives a class more precision"


def slowest(seconds: list[dict[str, float]], limit: float) -> tuple[dict[str, float], str | None]:
    """Which rank the others wait for: values for the log, and a warning beyond `limit` times the mean.

    Args:
        seconds: of each rank, by phase. Time in "reduce" is waiting, and evaluation and saving do not count.
    """
    if len(seconds) == 1:
        return {}, None
    waiting = ("reduce", "eval", "checkpoint")
    own = [sum(s for name, s in phases.items() if name not in waiting) for phases in seconds]
    mean, worst = sum(own) / len(own), max(range(len(own)), key=own.__getitem__)
    ratio = own[worst] / mean if mean > 0 else 1.0
    warning = None
    if ratio > limit and own[worst] - mean > NOTICEABLE_S:
        usual = {name: median(phases.get(name, 0.0) for phases in seconds) for name in seconds[worst]}
        excess = {name: s - usual[name] for name, s in seconds[worst].items() if name not in waiting}
        phase = max(excess, key=excess.get)
        warning = f"rank {worst} is slow: {ratio:.2f} times the mean, most of it in {phase!r} (+{excess[phase]:.2f} s)"
    return {"ranks/slowest": float(worst), "ranks/slowest_over_mean": ratio}, warning
