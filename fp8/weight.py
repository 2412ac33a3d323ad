"""Weight: the one home of a parameter under every recipe.

Bytes and scales are buffers; what requires grad is an empty `anchor` that every Function takes, so gradients flow even when
the input needs none (a frozen embedding still trains the layers). The gradient never passes through autograd: wgrad accumulates
into `main_grad`. Quantised once an optimizer step, never per use; who has written the bytes says so (`note_written`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from fp8.gradient import add_stochastic_
from fp8.health import Health
from fp8.philox import Draw
from fp8.quantize import quantize, quantize_both, quantize_t, retile_t
from fp8.quantized import Quantized
from fp8.recipe import BLOCK, CANDIDATES, TENSORWISE, Recipe, Spec
from fp8.scaling import Reduce, RoleScale, amax_scale_inv, tensor_amax, unit_scale_inv
from fp8.transposed import KeptTranspose

SAMPLE_ROWS = 128  # high-precision rows that an adaptive weight keeps, for fp8/auto.py to measure against


class Observer(Protocol):
    """Sees every high-precision tensor that a weight quantises; see fp8/auto.py."""

    def see(self, weight: Weight, role: str, x: Tensor) -> None: ...


@dataclass(frozen=True)
class Piece:
    """One contiguous part of a global tensor that this rank holds.

    Attributes:
        offset: where it starts in the global tensor.
        local: slices of the local tensor it fills; the sizes are the same in both.
        replicas: (consecutive) tp ranks that hold this same part: KV heads fewer than tp. 1 for a weight that tp does not split.
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
        gradient_draw: use of the step -> what a BF16 gradient is rounded by when that use is added; None: to nearest.
        on_grad_ready: called with the weight after its last use in a step (`num_uses` in each micro-batch: two with MTP for some).
        decay: whether weight decay applies (matrices yes, norm weights no).
        init_std: standard deviation of the initial normal; None means "ones".
        expert: sharded over ep on dimension 0; its gradient is reduced over edp instead of dp.
        tp_partial: replicated over tp but used on part of the tokens, so its gradient is summed over tp too.
        global_shape, pieces: which parts of the global tensor the local one holds: for checkpoints and initialisation.
        name: global name, set by the model.
        health: attached at an interval to measure what quantisation loses.
        observer: attached at an interval by `auto`.
        scales: state of delayed and static recipes, by role ("activation", "gradient").
        reduce: maximum over the ranks whose tensors share one scale (rows that travel between ranks); None on one rank.
        choice: `auto` only: [4] indices into `CANDIDATES` of (fprop, dgrad, wgrad), and 1 once they have been measured. On the
            CPU; adopted by the next `set_`.
        version: another number whenever the bytes may be others; `note_written` counts, and nothing else.
        kept_transpose: where the transpose stays between uses (fp8/transposed.py); None: it is made for each use.
        sample, sample_amax: `auto` only: some rows in BF16, and the largest magnitude of the matrix that they are from.
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
        self.init_std, self.decay, self.num_uses = init_std, decay, num_uses
        self.expert, self.tp_partial, self.name = expert, tp_partial, ""
        self.global_shape = tuple(shape) if global_shape is None else global_shape
        whole = Piece((0,) * len(shape), tuple(slice(0, n) for n in shape))
        self.pieces = (whole,) if pieces is None else pieces
        self.register_buffer("data", torch.empty(shape, dtype=recipe.weight.dtype))
        self.register_buffer("scale_inv", None)
        self.anchor = nn.Parameter(torch.empty(0))
        self.main_grad: Tensor | None = None
        self.grad_dtype = torch.float32
        self.gradient_draw: Callable[[int], Draw] | None = None
        self.on_grad_ready: Callable[[Weight], None] | None = None
        self.health: Health | None = None
        self.observer: Observer | None = None
        self.reduce: Reduce | None = None
        self.choice: Tensor | None = None
        self.sample: Tensor | None = None
        self.sample_amax: Tensor | None = None
        self.kept_transpose: KeptTranspose | None = None
        self._uses, self._written, self.version, self.last_microbatch = 0, False, 0, True
        self.use(recipe)

    def use(self, recipe: Recipe) -> None:
        """Takes another recipe, before `set_` gives values: construction with overrides, and `auto`.

        Raises:
            ValueError: an FP8 recipe, and the shape is not made of whole 128-wide blocks.
        """
        spec, shape, device = recipe.weight, self.data.shape, self.data.device
        for size in shape[-2:] if recipe.is_fp8 else ():
            if size % BLOCK:
                raise ValueError(f"weight {tuple(shape)}: {size} is not a multiple of {BLOCK}, which FP8 blocks need")
        self.recipe = recipe
        if self.data.dtype != spec.dtype:
            self.data = torch.empty(shape, dtype=spec.dtype, device=device)
        self.scale_inv = None
        if spec.is_fp8:
            r, c = (shape[-2], shape[-1]) if spec.tile == TENSORWISE else spec.tile
            scales = (*shape[:-2], -(-shape[-2] // r), -(-shape[-1] // c))
            self.scale_inv = torch.empty(scales, dtype=torch.float32, device=device)
        roles = {"activation": recipe.activation, "gradient": recipe.gradient}
        with torch.device(device):
            self.scales = nn.ModuleDict({name: RoleScale(spec) for name, spec in roles.items() if spec.has_state})
        if recipe.adaptive and self.choice is None:
            self.choice = torch.tensor([CANDIDATES.index("bf16")] * 3 + [0], device="cpu")

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """State of the recipe that a checkpoint keeps (that of `scales` comes from them)."""
        return {} if self.choice is None else {"choice": self.choice}

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

    @property
    def is_watched(self) -> bool:
        """Whether quantising must go through this class alone: its scales have state or are shared, or somebody measures.

        Kernels that fuse a quantisation with other work may be used only when this is False.
        """
        tensorwise = TENSORWISE in (self.recipe.activation.tile, self.recipe.gradient.tile)
        return tensorwise or self.health is not None or self.observer is not None

    def quantize_activation(self, x_TD: Tensor) -> Quantized:
        """[T, D] as the A operand of y = x . w^T."""
        spec = self.recipe.activation
        return self._report("activation", x_TD, quantize(x_TD, spec, self._scale_inv_of(x_TD, "activation", spec)))

    def quantize_grad(self, dy_TF: Tensor) -> Quantized:
        """[T, F] as the A operand of dx = dy . w."""
        spec = self.recipe.gradient
        return self._report("grad", dy_TF, quantize(dy_TF, spec, self._scale_inv_of(dy_TF, "gradient", spec)))

    def quantize_grad_t(self, dy_TF: Tensor) -> Quantized:
        """[T, F] -> [F, Tp] as the A operand of dw = dy^T . x."""
        scale_inv = self._scale_inv_of(dy_TF, "gradient", self.gradient_t)
        return self._report("grad_t", dy_TF.t(), quantize_t(dy_TF, self.gradient_t, scale_inv=scale_inv))

    def quantize_grad_both(self, dy_TF: Tensor) -> tuple[Quantized, Quantized]:
        """(quantize_grad(dy), quantize_grad_t(dy)); with one read of dy where nothing watches."""
        spec = self.recipe.gradient
        if self.is_watched or self.gradient_t != spec:
            return self.quantize_grad(dy_TF), self.quantize_grad_t(dy_TF)
        return quantize_both(dy_TF, spec)

    def retile_grad_t(self, dy_q_RF: Quantized, live_B: Tensor | None = None) -> Quantized:
        """Row-quantised [R, F] -> [F, Rp] tiled along rows: quantised once, where it is made. `live_B` as for `quantize_t`."""
        return retile_t(dy_q_RF, self.gradient_t, live_B)

    @property
    def gradient_t(self) -> Spec:
        """Form of dY in wgrad."""
        return self.recipe.gradient if self.recipe.gradient_t is None else self.recipe.gradient_t

    def _scale_inv_of(self, x: Tensor, role: str, spec: Spec) -> Tensor | None:
        """The scale that is not the tensor's own business. Evaluation and generation (`eval()`) leave no trace in it."""
        if spec.has_state:
            return self.scales[role](x, record=self.training)
        if spec.tile == TENSORWISE and self.reduce is not None:
            return amax_scale_inv(self.reduce(tensor_amax(x)), spec)
        return None

    def _report(self, role: str, x: Tensor, q: Quantized) -> Quantized:
        if self.health is not None:
            self.health.report(f"{self.name}/{role}", x, q)
        if self.observer is not None:
            self.observer.see(self, role, x)
        return q

    @torch.no_grad()
    def set_(self, value: Tensor) -> None:
        """Takes new high-precision values [..., F, D]: the one place where a weight is quantised."""
        assert value.shape == self.data.shape, f"{tuple(value.shape)} into {tuple(self.data.shape)}"
        if self.recipe.adaptive:
            self.adopt(value)
        static = self.spec.scaling == "static"
        q = quantize(value, self.spec, unit_scale_inv(value.new_tensor(self.init_std)) if static else None)
        self.data.copy_(q.data)
        if self.scale_inv is not None:
            self.scale_inv.copy_(q.scale_inv)
        self.note_written()

    def note_written(self) -> None:
        """To be called after every write to `data` or `scale_inv`: what is kept of earlier values (a transpose) is out of date."""
        vars(self)["version"] += 1  # Module.__setattr__ takes longer than a launch

    def adopt(self, value: Tensor) -> None:
        """Turns `choice` into formats, and keeps the sample that the next choice is measured on."""
        self.adopt_choice()
        self.keep_sample(value)

    def adopt_choice(self) -> bool:
        """Takes the formats that `choice` names; whether they are others than before. Values are to be set anew then."""
        recipe = Recipe.auto(*(CANDIDATES[i] for i in self.choice[:3].tolist()))
        changes = recipe != self.recipe
        if changes:
            self.use(recipe)
        return changes

    def keep_sample(self, value: Tensor) -> None:
        """Keeps some rows of `value` (of the first matrix of a stack), and that matrix's largest magnitude."""
        matrix = value if value.dim() == 2 else value.flatten(0, -3)[0]
        self.sample = matrix[:SAMPLE_ROWS].to(self.data.device, torch.bfloat16, copy=True)
        self.sample_amax = matrix.abs().amax()

    def accumulate(self, write: Callable[[Tensor, bool], None]) -> None:
        """Adds one use's gradient: calls `write(main_grad, accumulate)`; the first use of a step overwrites.

        Fires `on_grad_ready` after the last use of the last micro-batch.
        """
        if not self.trainable:
            return
        if self.main_grad is None:
            self.main_grad = torch.empty(self.data.shape, dtype=self.grad_dtype, device=self.data.device)
        with torch.no_grad():
            if self._written and self.adds_by_chance:
                use = torch.empty_like(self.main_grad)
                write(use, False)
                add_stochastic_(self, use, self.gradient_draw(self._uses))
            else:
                write(self.main_grad, self._written)
        self._written, self._uses = True, self._uses + 1
        if self._uses % self.num_uses == 0 and self.last_microbatch and self.on_grad_ready is not None:
            self.on_grad_ready(self)

    @property
    def adds_by_chance(self) -> bool:
        """Whether uses after a step's first are added with stochastic rounding, by bits that the host draws anew each time."""
        return self.grad_dtype == torch.bfloat16 and self.gradient_draw is not None

    def note_replayed_uses(self) -> None:
        """Bookkeeping of one micro-batch's uses that a CUDA graph has made: the gradient is written, nobody was called."""
        if self.trainable:
            self._written, self._uses = True, self._uses + self.num_uses

    def add_grad(self, grad: Tensor) -> None:
        """`accumulate` for a gradient that already exists as a tensor (norm weights, router, embedding)."""
        self.accumulate(lambda out, acc: out.add_(grad) if acc else out.copy_(grad))

    def clear_grad(self) -> None:
        """Starts a new optimizer step: the next use overwrites `main_grad`, so nothing needs zeroing."""
        vars(self).update(_written=False, _uses=0)

    @property
    def has_grad(self) -> bool:
        return self._written


def weights(module: nn.Module) -> Iterator[tuple[str, Weight]]:
    """(global name, Weight) of every parameter, in construction order: the one list that all others are made from."""
    for name, child in module.named_modules():
        if isinstance(child, Weight):
            yield name, child
