"""AdamW over Weights: FP32 master and moments; the FP8 (or BF16) weight is re-derived from the master once a step.

Decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101). An FP32 weight is its own master: no second copy.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fp8.weight import Weight


class AdamW:
    """Updates every trainable Weight from its `main_grad`.

    The master is the truth that checkpoints keep; `set_master` gives both the master and the weight their values.
    """

    def __init__(
        self,
        named_weights: Iterable[tuple[str, Weight]],
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        self.weights = dict(named_weights)
        self.beta1, self.beta2, self.eps, self.weight_decay = beta1, beta2, eps, weight_decay
        self.num_steps = 0
        self._state: dict[str, dict[str, Tensor]] = {}

    def set_master(self, name: str, value: Tensor) -> None:
        """New values for the parameter `name`: its master, its (re-quantised) weight; moments start at zero if there are none."""
        weight = self.weights[name]
        weight.set_(value)
        master = weight.data if weight.data.dtype == torch.float32 else value.to(weight.data.device, torch.float32, copy=True)
        state = self._state.setdefault(name, {})
        state["master"] = master
        for moment in ("exp_avg", "exp_avg_sq"):
            state.setdefault(moment, torch.zeros_like(master))

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Live tensors by parameter name: master, exp_avg, exp_avg_sq."""
        return self._state

    def load_state(self, name: str, state: dict[str, Tensor]) -> None:
        """Takes master and moments of one parameter and re-derives its weight."""
        self.set_master(name, state["master"])
        for moment in ("exp_avg", "exp_avg_sq"):
            self._state[name][moment].copy_(state[moment])

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor | float = 1.0) -> None:
        """One update. `grad_scale` multiplies every gradient (clipping); a 0-dim tensor costs no host synchronisation.

        A weight without a gradient in this step is left alone, moments included.
        """
        self.num_steps += 1
        correction1 = 1 - self.beta1**self.num_steps
        correction2 = 1 - self.beta2**self.num_steps
        for name, weight in self.weights.items():
            if not (weight.trainable and weight.has_grad):
                continue
            state = self._state[name]
            master, m, v = state["master"], state["exp_avg"], state["exp_avg_sq"]
            grad = weight.main_grad.float() * grad_scale
            m.lerp_(grad, 1 - self.beta1)
            v.mul_(self.beta2).addcmul_(grad, grad, value=1 - self.beta2)
            if weight.decay:
                master.mul_(1 - lr * self.weight_decay)
            denominator = (v / correction2).sqrt_().add_(self.eps)
            master.addcdiv_(m, denominator, value=-lr / correction1)
            if master is not weight.data:
                weight.set_(master)
            weight.clear_grad()


def grad_norm_squared(named_weights: Iterable[tuple[str, Weight]]) -> Tensor:
    """Sum of squares of this rank's gradients, 0-dim fp32; weights without a gradient count zero."""
    squares = [w.main_grad.float().square().sum() for _, w in named_weights if w.has_grad and w.trainable]
    return torch.stack(squares).sum() if squares else torch.zeros(())
