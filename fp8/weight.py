"""Weight: the one home of a parameter under every recipe.

Bytes and scales are buffers; what requires grad is an empty `anchor` that every Function takes, so gradients flow even when the input
needs none (a frozen embedding still trains the layers). The gradient never passes through autograd: wgrad accumulates into `main_grad`.
Quantised once an optimizer step by `set_`, never per use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fp8.health import Health
from fp8.quantize import quantize, quantize_t
from fp8.quantized import Quantized
from fp8.recipe import BLOCK, Recipe, Spec


@dataclass(frozen=True)
class Piece:
    """One contiguous part of a global tensor that this rank holds.

    Attributes:
        offset: where it starts in the global tensor.
        local: slices of the local tensor it fills; the sizes are the same in both.
        replicas: number of (consecutive) tp ranks that hold this same part; KV heads fewer than tp. 1 also for a weight that tp
            does not split at all.
    """

    offset: tuple[int, ...]
    local: tuple[slice, ...]
    replicas: int = 1


class Weight(nn.Module):
    """A parameter of local shape [..., F, D] (or [D]) in the format of its recipe, and the recipe of the GEMMs that read it.

    Attributes:
        recipe: how this weight, the activations that meet it and the gradients of its output are represented.
        anchor: empty Parameter; `anchor.requires_grad = False` freezes the weight.
        main_grad: gradient of the current optimizer step, FP32 unless `grad_dtype` says otherwise; None before the first use.
        on_grad_ready: called with the weight after its last use in a step (`num_uses` uses in each micro-batch; head and embedding
            have two with MTP); drives gradient reduction.
        decay: whether weight decay applies (matrices yes, norm weights no).
        init_std: standard deviation of the initial normal; None means "ones".
        expert: sharded over ep on dimension 0; its gradient is reduced over edp instead of dp.
        tp_partial: replicated over tp but used on part of the tokens, so its gradient is summed over tp too.
        global_shape, pieces: which parts of the global tensor the local one holds; layout-free checkpoints and initialisation read it.
        name: global name, set by the model.
        health: attached at an interval to measure what quantisation loses.
    """

    def __init__(
        self,
        *shape: int,
        recipe: Recipe,
        init_std: float | None = 0.006,
        decay: bool = True,
        num_uses: int = 1,
        expert: bool = False,
        tp_partial: bool = False,
        global_shape: tuple[int, ...] | None = None,
        pieces: tuple[Piece, ...] | None = None,
    ) -> None:
        super().__init__()
        spec = recipe.weight
        for size in shape[-2:] if spec.is_fp8 else ():
            assert size % BLOCK == 0, f"weight {shape}: {size} is not a multiple of {BLOCK}, which {spec.fmt} blocks need"
        self.recipe, self.init_std, self.decay, self.num_uses = recipe, init_std, decay, num_uses
        self.expert, self.tp_partial, self.name = expert, tp_partial, ""
        self.global_shape = tuple(shape) if global_shape is None else global_shape
        whole = Piece((0,) * len(shape), tuple(slice(0, n) for n in shape))
        self.pieces = (whole,) if pieces is None else pieces
        self.register_buffer("data", torch.empty(shape, dtype=spec.dtype))
        self.register_buffer("scale_inv", None)
        if spec.is_fp8:
            r, c = spec.tile
            self.scale_inv = torch.empty(*shape[:-2], -(-shape[-2] // r), -(-shape[-1] // c), dtype=torch.float32)
        self.anchor = nn.Parameter(torch.empty(0))
        self.main_grad: Tensor | None = None
        self.grad_dtype = torch.float32
        self.on_grad_ready: Callable[[Weight], None] | None = None
        self.last_microbatch = True
        self.health: Health | None = None
        self._uses = 0
        self._written = False

    def extra_repr(self) -> str:
        return f"{tuple(self.data.shape)}, {self.spec.fmt}"

    @property
    def spec(self) -> Spec:
        """Storage format."""
        return self.recipe.weight

    @property
    def q(self) -> Quantized:
        """What a GEMM reads, [..., F, D]."""
        return Quantized(self.data, self.scale_inv, self.spec.tile if self.spec.is_fp8 else None)

    @property
    def numel(self) -> int:
        return self.data.numel()

    @property
    def trainable(self) -> bool:
        return self.anchor.requires_grad

    def quantize_activation(self, x_TD: Tensor) -> Quantized:
        """[T, D] as the A operand of y = x . w^T."""
        return self._report("activation", x_TD, quantize(x_TD, self.recipe.activation))

    def quantize_grad(self, dy_TF: Tensor) -> Quantized:
        """[T, F] as the A operand of dx = dy . w."""
        return self._report("grad", dy_TF, quantize(dy_TF, self.recipe.gradient))

    def quantize_grad_t(self, dy_TF: Tensor) -> Quantized:
        """[T, F] -> [F, Tp] as the A operand of dw = dy^T . x."""
        return self._report("grad_t", dy_TF.t(), quantize_t(dy_TF, self.recipe.gradient))

    def _report(self, role: str, x: Tensor, q: Quantized) -> Quantized:
        if self.health is not None:
            self.health.report(f"{self.name}/{role}", x, q)
        return q

    def retile_grad_t(self, dy_q_RF: Quantized) -> Quantized:
        """Row-quantised [R, F] -> [F, Rp] tiled along rows, from the same bytes: a gradient is quantised once, where it is made."""
        return quantize_t(dy_q_RF.dequantize(), self.recipe.gradient)

    @torch.no_grad()
    def set_(self, value: Tensor) -> None:
        """Takes new high-precision values [..., F, D]: the one place where a weight is quantised."""
        assert value.shape == self.data.shape, f"{tuple(value.shape)} into {tuple(self.data.shape)}"
        q = quantize(value, self.spec)
        self.data.copy_(q.data)
        if self.scale_inv is not None:
            self.scale_inv.copy_(q.scale_inv)

    def accumulate(self, write: Callable[[Tensor, bool], None]) -> None:
        """Adds one use's gradient: calls `write(main_grad, accumulate)`; the first use of a step overwrites.

        Fires `on_grad_ready` after the last use of the last micro-batch.
        """
        if not self.trainable:
            return
        if self.main_grad is None:
            self.main_grad = torch.empty(self.data.shape, dtype=self.grad_dtype, device=self.data.device)
        with torch.no_grad():
            write(self.main_grad, self._written)
        self._written = True
        self._uses += 1
        if self._uses % self.num_uses == 0 and self.last_microbatch and self.on_grad_ready is not None:
            self.on_grad_ready(self)

    def add_grad(self, grad: Tensor) -> None:
        """`accumulate` for a gradient that already exists as a tensor (norm weights, router, embedding)."""
        self.accumulate(lambda out, acc: out.add_(grad) if acc else out.copy_(grad))

    def clear_grad(self) -> None:
        """Starts a new optimizer step: the next use overwrites `main_grad`, so nothing needs zeroing."""
        self._written, self._uses = False, 0

    @property
    def has_grad(self) -> bool:
        return self._written


def weights(module: nn.Module) -> Iterator[tuple[str, Weight]]:
    """(global name, Weight) of every parameter, in construction order: the only list optimizer, clipping, checkpoints and counts use."""
    for name, child in module.named_modules():
        if isinstance(child, Weight):
            yield name, child
