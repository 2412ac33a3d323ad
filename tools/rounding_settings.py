"""How one trained model may round: the settings that `tools.bench rounding` compares, and a model under one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from torch import Tensor

from fp8 import linear_swiglu
from fp8.fused import ROW
from fp8.quantize import quantize
from fp8.quantized import Quantized
from fp8.recipe import Recipe
from fp8.swiglu import quantize_swiglu
from fp8.weight import Weight, weights
from model import experts
from model.router import Router, Routing, routers
from model.transformer import Transformer
from parallel.mesh import Mesh

SUFFIXES = {  # end of a weight's name -> its class; norms and MTP aside
    "head": "head", "attention.qkv": "attention qkv", "attention.out": "attention out", "mlp.gate_up": "dense, shared",
    "mlp.down": "dense, shared", "shared.gate_up": "dense, shared", "shared.down": "dense, shared",
    "experts.gate_up": "experts gate_up", "experts.down": "experts down",
}  # fmt: skip
CLASSES = tuple(dict.fromkeys(SUFFIXES.values()))
BF16, BLOCK = Recipe.bf16(), Recipe.block()
WEIGHTS, INPUTS = replace(BF16, weight=BLOCK.weight), replace(BF16, activation=BLOCK.activation)
GRADIENTS = replace(BF16, gradient=BLOCK.gradient)
FORWARD = replace(INPUTS, weight=BLOCK.weight)

Choices = dict[str, Tensor]  # name of a router -> ids [T, k]


def class_of(name: str) -> str:
    """Of a weight: one of `CLASSES`, or embedding, router, norms, mtp."""
    if name.endswith("norm"):
        return "norms"
    if name == "embedding" or name.endswith("router.weight"):
        return name.split(".")[-2] if "." in name else name
    if name.startswith("mtp."):
        return "mtp"
    return next(kind for suffix, kind in SUFFIXES.items() if name.endswith(suffix))


@dataclass(frozen=True)
class Setting:
    """How one measurement rounds.

    Attributes:
        recipe: of the classes that `only` names (None: of all); `rest`: of the others.
        swiglu: what forward's SwiGLU reads: pre-activations as the recipes say, "unrounded", or "rounded" to E4M3 in any case.
        same_experts: the reference's choice of experts in place of its own.
        reverse: sequences of a batch in reverse: the same sums in another order.
        many: measured with several roundings of the weights, of which one alone moves the loss up or down by chance.
        stretch: weights are rounded at so many times their size: another rounding, as good as the one at 1, of the same weights.
    """

    name: str
    recipe: Recipe
    only: tuple[str, ...] | None = None
    rest: Recipe = BF16
    swiglu: str = ""
    same_experts: bool = False
    reverse: bool = False
    many: bool = False
    stretch: float = 1.0

    def of(self, kind: str) -> Recipe:
        return self.recipe if self.only is None or kind in self.only else self.rest


def forward_settings() -> list[Setting]:
    """Those of the loss; the first is what the others are compared with."""
    own = [Setting("bf16", BF16), Setting("bf16, sequences in reverse", BF16, reverse=True), Setting("block", BLOCK)]
    own += [Setting("mx", Recipe.mx()), Setting("tensorwise_current", Recipe.tensorwise_current()), Setting("fp32", Recipe.fp32())]
    found = [Setting("block, same experts", BLOCK), Setting("weights alone", WEIGHTS, many=True), Setting("inputs alone", INPUTS)]
    found += [Setting("inputs alone, SwiGLU unrounded", INPUTS, swiglu="unrounded")]
    found += [Setting("pre-activations of SwiGLU alone", BF16, swiglu="rounded")]
    found += [Setting("block, on average", BLOCK, many=True)]
    found += [Setting("block, SwiGLU unrounded, on average", BLOCK, swiglu="unrounded", many=True)]
    for kind in CLASSES:
        found += [Setting(f"block but {kind} in bf16, on average", BF16, (kind,), BLOCK, many=True)]
        found += [Setting(f"{kind} alone", BLOCK, (kind,), many=True), Setting(f"{kind}, inputs alone", INPUTS, (kind,))]
        found += [Setting(f"{kind}, weights alone", WEIGHTS, (kind,), many=True)]
    return own + [replace(s, same_experts=True) for s in found]


def roundings(setting: Setting, count: int) -> list[Setting]:
    """The setting with `count` roundings of its weights, at sizes between one power of two and the next, where it wants many."""
    return [replace(setting, stretch=2 ** ((i + 0.5) / count)) for i in range(count)] if setting.many else [setting]


def gradient_settings() -> list[Setting]:
    """Those of the gradients, which are compared with FP32's."""
    found = [Setting("bf16", BF16), Setting("bf16, sequences in reverse", BF16, reverse=True), Setting("block", BLOCK)]
    same = [Setting("bf16", BF16), Setting("block", BLOCK), Setting("weights alone", WEIGHTS), Setting("inputs alone", INPUTS)]
    same += [Setting("weights and inputs", FORWARD), Setting("dY alone", GRADIENTS)]
    same += [Setting("block, hybrid", Recipe.block("hybrid")), Setting("block, SwiGLU unrounded", BLOCK, swiglu="unrounded")]
    same += [Setting("block, other roundings of weights each time", BLOCK, many=True)]
    same += [Setting(f"block but {kind} in bf16", BF16, (kind,), BLOCK) for kind in CLASSES]
    return found + [replace(s, name=f"{s.name}, same experts", same_experts=True) for s in same]


# ---------------------------------------------------------------- the model under a setting


def new_model(like: Transformer) -> Transformer:
    """A model for `take` to fill, in BF16 where FP32 is not all that the device has."""
    device = like.head.data.device
    with torch.device(device):
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = Transformer(like.config, BF16, Mesh.solo(), dtype).eval()
    for (_, own), (_, router) in zip(routers(model), routers(like), strict=True):
        own.expert_bias.copy_(router.expert_bias)
    return model


def take(model: Transformer, setting: Setting, masters: dict[str, Tensor]) -> None:
    """Gives every weight its values in the setting's formats."""
    for name, weight in weights(model):
        kind = class_of(name)
        value = masters[name]
        if kind in CLASSES or kind == "mtp":
            recipe = setting.of(kind)
            if setting.stretch != 1 and recipe.weight.is_fp8:
                value = quantize(value * setting.stretch, recipe.weight).dequantize() / setting.stretch
                recipe = replace(recipe, weight=BF16.weight)
            weight.use(recipe)
        weight.set_(value)


def pre_activation(reads: str) -> Callable[..., tuple[Quantized, Quantized]]:
    """`fp8.swiglu.quantize_pre_activation`, whose SwiGLU reads what `Setting.swiglu` says."""

    def made(h_R2f: Tensor, w_R: Tensor | None, consumer: Weight, live_B: Tensor | None = None) -> tuple[Quantized, Quantized]:
        stored = quantize(h_R2f, ROW) if reads == "rounded" else consumer.quantize_activation(h_R2f)
        read = stored if reads == "rounded" else Quantized.unscaled(h_R2f.to(torch.bfloat16))
        return stored, quantize_swiglu(read, w_R, consumer, h_R2f.dtype, live_B)

    return made


@contextmanager
def rounded_as(model: Transformer, setting: Setting, reference: Choices | None = None) -> Iterator[Choices]:
    """Within, SwiGLU and the routers do what the setting says; yields what the routers choose by themselves.

    Args:
        reference: the choices that `same_experts` means.
    """
    own: Choices = {}
    with ExitStack() as stack:
        if setting.swiglu:
            for module in (linear_swiglu, experts):
                stack.enter_context(patch.object(module, "quantize_pre_activation", pre_activation(setting.swiglu)))
            stack.enter_context(patch.object(experts, "quantizes_output", lambda *_: False))

        def note(name: str, router: Router, routing: Routing) -> Routing | None:
            own[name] = routing.ids_Tk
            return chosen_by(router, routing, reference[name]) if setting.same_experts else None

        for name, router in routers(model):
            hook = router.register_forward_hook(lambda module, _, out, name=name: note(name, module, out))
            stack.callback(hook.remove)
        yield own


def chosen_by(router: Router, routing: Routing, ids_Tk: Tensor) -> Routing:
    """`routing` with these experts, weighted by their own scores (fp8/route.py)."""
    chosen = torch.sigmoid(routing.logits_TE).gather(1, ids_Tk)
    weights_Tk = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * router.config.routed_scaling_factor
    return replace(routing, ids_Tk=ids_Tk, weights_Tk=weights_Tk, counted=None)
