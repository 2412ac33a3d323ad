"""AdamW over Weights, with master and moments in the formats of `States`; the weight is re-derived from the master once a step.

    g = grad * grad_scale
    m = beta1 m + (1 - beta1) g            v = beta2 v + (1 - beta2) g^2
    master = master (1 - lr decay) - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    weight = quantise(stored master)

Decoupled weight decay: Loshchilov and Hutter, arXiv 1711.05101. Low-bit states: FP8-LM, arXiv 2310.18313, section 2.3; the
formats and the reason for stochastic rounding are in state_codecs.py. The arithmetic is FP32. A CUDA device takes one fused
pass over gradient, states and weight (optimizer_launch.py, optimizer_kernels.py); the reference here is its definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial

import torch
from torch import Tensor

from fp8.offload import on_device, to_host, visiting
from fp8.philox import GRADIENT, Draw, weight_words
from fp8.recipe import BLOCK
from fp8.state_codecs import Codec, State, new_state
from fp8.states import PRESETS, ROLES, Hyper, States, states_named  # noqa: F401, who configures an AdamW needs them all
from fp8.weight import Weight

Update = Callable[[Hyper, Draw, Tensor], None]  # one step of one weight, its gradient times the last argument


def adamw_ref(master: Tensor, m: Tensor, v: Tensor, grad: Tensor, h: Hyper) -> tuple[Tensor, Tensor, Tensor]:
    """New (master, m, v), all fp32. Operations round one after the other, but for the sums of m and v: one multiply-add each."""
    m = _multiply_add(grad, 1 - h.beta1, m * h.beta1)
    v = _multiply_add(grad * grad, 1 - h.beta2, v * h.beta2)
    return master * h.decay - (m / (v.sqrt() * h.rsqrt_correction2 + h.eps)) * h.step_size, m, v


def _multiply_add(a: Tensor, b: float, c: Tensor) -> Tensor:
    """fp32 a * b + c, rounded once: fp64 holds the product exactly, and its rounding of the sum matters once in 2^29."""
    factor = torch.tensor(b, dtype=torch.float32).item()
    return (a.double() * factor + c).float()


class AdamW:
    """Updates every trainable Weight from its `main_grad`.

    `weights` are those it updates, `all_weights` those of the whole model (more where states are sharded, parallel/shard.py).

    The stored master is the truth that checkpoints keep: the weight is always `quantise(decode(master))`, so it need not be
    saved. Rounding depends on seed, step and global element only, not on how weights are sharded.

    Args:
        named_weights: all weights of the model, in the same order on every rank and in every run.
        states: storage formats.
        seed: of the stochastic rounding.
        offload: keep the states of matrices that lie on a GPU in pinned host memory (fp8/offload.py).

    Raises:
        ValueError: a weight is sharded across the tiles that share a scale.
    """

    def __init__(
        self,
        named_weights: Iterable[tuple[str, Weight]],
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        states: States | None = None,
        seed: int = 0,
        offload: bool = False,
    ) -> None:
        self.weights = self.all_weights = dict(named_weights)
        self.beta1, self.beta2, self.eps, self.weight_decay = beta1, beta2, eps, weight_decay
        self.states, self.seed, self.num_steps = States() if states is None else states, seed, 0
        self.offload = offload
        self._codecs = {name: self.states.codecs(weight) for name, weight in self.weights.items()}
        self._parameter = {name: place for place, name in enumerate(self.weights)}
        for name, weight in self.weights.items():
            _check_pieces(name, weight, self._codecs[name])
            weight.gradient_draw = partial(self._gradient_draw, self._parameter[name])
        self._state: dict[str, dict[str, State]] = {}
        self._updaters: dict[str, tuple[tuple[object, ...], Update]] = {}  # with the tensors that each is good for
        self._table: Callable[[Hyper, Tensor], None] | None = None
        self._table_of: tuple[object, ...] = ()
        self._alone: list[str] = []

    def _gradient_draw(self, parameter: int, use: int) -> Draw:
        return Draw(self.seed, self.num_steps + 1, parameter, GRADIENT, use)

    def allocate(self, name: str) -> None:
        """States of zeros for the parameter `name`, to be filled (a checkpoint's). Its weight is left as it is."""
        weight = self.weights[name]
        shape, device = weight.data.shape, weight.data.device
        state = {role: new_state(codec, shape, device) for role, codec in self._codecs[name].items()}
        if weight.data.dtype == torch.float32:
            state["master"] = {"data": weight.data}
        self._state[name] = to_host(state) if self._travels(weight) else state

    def _travels(self, weight: Weight) -> bool:
        return self.offload and weight.data.is_cuda and weight.data.dtype != torch.float32

    def set_master(self, name: str, value: Tensor) -> None:
        """New values for the parameter `name`: its master (rounded to nearest) and its weight; new moments are zero."""
        if name not in self._state:
            self.allocate(name)
        weight, codec, master = self.weights[name], self._codecs[name]["master"], self._state[name]["master"]
        value = value.to(weight.data.device)
        for rows in chunks(value.shape):
            for part, tensor in codec.encode(value[rows].float(), None).items():
                _rows_of(master[part], rows, codec.parts[part][1])[...] = tensor
        self.refresh(name)

    def refresh(self, name: str) -> None:
        """Derives the weight from the stored master: after loading a checkpoint."""
        weight, master = self.weights[name], self._state[name]["master"]
        if master["data"] is not weight.data:
            weight.set_(self._codecs[name]["master"].decode(on_device(master, weight.data.device)))
        else:
            weight.note_written()

    def publish(self) -> None:
        """Brings every rank the weights that others update; nothing to do where each rank updates all it holds."""

    def settle(self) -> None:
        """Until what `publish` has sent has arrived; before weights are read outside the model's forward."""

    def share_samples(self) -> None:
        """`auto`, before it measures: brings every rank the samples of weights that others update (`Weight.keep_sample`)."""

    def master(self, name: str) -> Tensor:
        """fp32 values of the stored master (the live tensor if it is stored so)."""
        return self._codecs[name]["master"].decode(self._state[name]["master"])

    def moments(self, name: str) -> tuple[Tensor, Tensor]:
        """fp32 values of both moments."""
        return tuple(self._codecs[name][role].decode(self._state[name][role]) for role in ROLES[1:])

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Live tensors by parameter name: master, exp_avg, exp_avg_sq, and scales as `master.scale` and so on."""
        return {
            name: {_key(role, part): tensor for role in ROLES for part, tensor in state[role].items()}
            for name, state in self._state.items()
        }

    def tile_of(self, name: str, kind: str) -> tuple[int, int]:
        """(rows, columns) of the parameter that share one element of the state tensor `kind`; (1, 1) for most."""
        role, _, part = kind.partition(".")
        return self._codecs[name][role].parts[part or "data"][1]

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor | float = 1.0) -> None:
        """One update. `grad_scale` multiplies every gradient (clipping); a 0-dim tensor costs no host synchronisation.

        A weight without a gradient in this step is left alone, moments included. A `grad_scale` that is not finite (the
        norm of a gradient with NaN) leaves every weight and state as it is. The next use overwrites the gradients.
        """
        self.num_steps += 1
        todo = [(name, weight) for name, weight in self.weights.items() if weight.trainable and weight.has_grad]
        if not todo:
            return
        device = todo[0][1].data.device  # filled on the device: a copy from the host would wait
        is_tensor = isinstance(grad_scale, Tensor)
        scale = grad_scale.to(device, torch.float32) if is_tensor else torch.full((), grad_scale, device=device)
        hypers = {decays: self._hyper(lr, decays) for decays in (False, True)}
        together, away = [], [self._state[name] for name, weight in todo if self._travels(weight)]
        with closing(visiting(away, device)) as visitors:
            for name, weight in todo:
                draw = Draw(self.seed, self.num_steps, self._parameter[name])
                if self._travels(weight):
                    updater(weight, next(visitors), self._codecs[name])(hypers[weight.decay], draw, scale)
                elif weight.data.is_cuda and weight.data.dtype == torch.float32:
                    together.append(name)
                else:
                    self._updater(name)(hypers[weight.decay], draw, scale)
            next(visitors, None)  # the last one goes home
        self._update_together(together, hypers, scale)
        for _, weight in todo:
            weight.note_written()  # kernels have written bytes that only their plans know of
            weight.clear_grad()

    def _hyper(self, lr: float, decays: bool) -> Hyper:
        return Hyper(
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            decay=1 - lr * self.weight_decay if decays else 1.0,
            step_size=lr / (1 - self.beta1**self.num_steps),
            rsqrt_correction2=1 / math.sqrt(1 - self.beta2**self.num_steps),
        )

    def _updater(self, name: str) -> Update:
        """`updater` of a weight whose states stay, made anew only when one of its tensors is another."""
        weight = self.weights[name]
        now = weight.data, weight.scale_inv, weight.main_grad, self._state[name], weight.recipe
        before, found = self._updaters.get(name, ((), None))
        if found is None or any(a is not b for a, b in zip(before, now, strict=True)):
            found = updater(weight, self._state[name], self._codecs[name])
            self._updaters[name] = now, found
        return found

    def _update_together(self, names: list[str], hypers: dict[bool, Hyper], scale: Tensor) -> None:
        """FP32 weights on a GPU: one launch for all that a table can hold."""
        if not names:
            return
        from fp8 import optimizer_launch  # Triton comes with CUDA builds of torch only

        now = tuple(t for name in names for t in (self.weights[name].data, self.weights[name].main_grad, self._state[name]))
        if len(now) != len(self._table_of) or any(a is not b for a, b in zip(self._table_of, now, strict=True)):
            fit = [name for name in names if optimizer_launch.in_table(self.weights[name], self._state[name])]
            self._table = optimizer_launch.Table([(self.weights[name], self._state[name]) for name in fit]) if fit else None
            self._table_of, self._alone = now, [name for name in names if name not in fit]
        if self._table is not None:
            self._table(hypers[True], scale)
        for name in self._alone:
            draw = Draw(self.seed, self.num_steps, self._parameter[name])
            self._updater(name)(hypers[self.weights[name].decay], draw, scale)


def _check_pieces(name: str, weight: Weight, codecs: dict[str, Codec]) -> None:
    tiles = {tile for codec in codecs.values() for _, tile, _ in codec.parts.values()}
    for piece in weight.pieces:
        for dim in (-1, -2)[: weight.data.dim()]:
            edge = max(tile[dim] for tile in tiles)
            start, size = piece.offset[dim], piece.local[dim].stop - (piece.local[dim].start or 0)
            whole = size % edge == 0 or start + size == weight.global_shape[dim]
            if start % edge or (piece.local[dim].start or 0) % edge or not whole:
                place = f"{start}..{start + size} of dimension {weight.data.dim() + dim}"
                raise ValueError(f"{name}: this rank's part {place} cuts the {edge}-wide tiles of its optimizer states")


def chunks(shape: torch.Size, limit: int = 1 << 26) -> Iterable[slice]:
    """Parts along the first dimension of about `limit` elements that cut no tile: encoding needs some 40 bytes an element."""
    unit = BLOCK if len(shape) == 2 else 1 if len(shape) > 2 else max(shape[0], 1)
    step = max(limit // max(shape[1:].numel() * unit, 1), 1) * unit
    return (slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step))


def _rows_of(tiles: Tensor, rows: slice, tile: tuple[int, int]) -> Tensor:
    """The part of a tensor with one value a tile that belongs to `rows` of the first dimension."""
    r = tile[0] if tiles.dim() == 2 else 1
    return tiles if tiles.dim() == 1 else tiles[rows.start // r : -(-rows.stop // r)]


def _key(role: str, part: str) -> str:
    return role if part == "data" else f"{role}.{part}"


def update_ref(weight: Weight, state: dict[str, State], codecs: dict[str, Codec], h: Hyper, draw: Draw, grad_scale: Tensor) -> None:
    """One weight's update in place: states decoded, updated, encoded; the weight quantised from the stored master."""
    old = [codecs[role].decode(state[role]) for role in ROLES]
    word = None
    if any(len(codecs[role].parts) > 1 or codecs[role].parts["data"][0] != torch.float32 for role in ROLES):
        word = weight_words(draw, weight)
    new = adamw_ref(*old, weight.main_grad.float() * grad_scale, h)
    finite = grad_scale.isfinite()
    for role, value in zip(ROLES, new, strict=True):
        for part, tensor in codecs[role].encode(value, word).items():
            _keep_unless(finite, state[role][part], tensor)
    if state["master"]["data"] is not weight.data:
        weight.set_(codecs["master"].decode(state["master"]))


def _keep_unless(condition: Tensor, live: Tensor, new: Tensor) -> None:
    """live = condition ? new : live, for every dtype, without reading the device."""
    as_bytes = torch.uint8 if live.element_size() == 1 else live.dtype  # FP8 has few operations
    live, new = live.view(as_bytes), new.view(as_bytes)
    live.copy_(torch.where(condition, new, live))


def updater(weight: Weight, state: dict[str, State], codecs: dict[str, Codec]) -> Update:
    """`update_ref` of one weight, in one pass on a GPU where a kernel covers the formats and shapes."""
    if weight.data.is_cuda:
        from fp8 import optimizer_launch  # Triton comes with CUDA builds of torch only

        if optimizer_launch.covers(weight, codecs):
            return optimizer_launch.Plan(weight, state, codecs)
    return partial(update_ref, weight, state, codecs)


def bytes_report(optimizer: AdamW) -> dict[str, int]:
    """Steady-state bytes by class, from the tensors themselves: weight, grad, master, exp_avg, exp_avg_sq; and parameters.

    An FP32 weight is its own master and counts as weight; a gradient counts once it exists; offloaded states do not.
    """
    found = dict.fromkeys(("weight", "grad", *ROLES, "parameters"), 0)
    states = optimizer.state()
    for name, weight in optimizer.all_weights.items():
        found["parameters"] += weight.numel
        found["weight"] += weight.q.nbytes
        own = weight if weight.main_grad is not None else optimizer.weights.get(name, weight)  # ZeRO-2: only the owner has a part
        found["grad"] += own.main_grad.nbytes if own.main_grad is not None else 0
        for kind, tensor in states.get(name, {}).items():
            if tensor is not optimizer.weights[name].data and tensor.device == weight.data.device:
                found[kind.partition(".")[0]] += tensor.nbytes
    return found
