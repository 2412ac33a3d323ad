"""Names and shapes of the published BailingMoeV2 checkpoints, both ways.

One of our weights is one or several of theirs: gate and up projections are fused, experts are stacked. Each `Part` says which rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from fp8.weight import weights
from model.config import ModelConfig
from model.router import routers


@dataclass(frozen=True)
class Part:
    """`index` of our (global) tensor is their tensor `hf_name`."""

    name: str
    hf_name: str
    index: tuple[int | slice, ...]

    @property
    def fp8(self) -> bool:
        """Whether the published block-FP8 checkpoints quantise it: attention, MLPs and experts; not head, embedding, eh_proj."""
        return self.name.endswith((".qkv", ".out", ".gate_up", ".down"))

    def box(self, global_shape: Sequence[int]) -> tuple[slice, ...]:
        """The part of our tensor of `global_shape` that it is: a slice with start and stop for every dimension."""
        index = (*self.index, *[slice(None)] * (len(global_shape) - len(self.index)))
        ends = [slice(i, i + 1) if isinstance(i, int) else i for i in index]
        return tuple(slice(*s.indices(n)[:2]) for s, n in zip(ends, global_shape, strict=True))

    def hf_shape(self, global_shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of their tensor: the box without the expert dimension."""
        sizes = tuple(s.stop - s.start for s in self.box(global_shape))
        return sizes[sum(isinstance(i, int) for i in self.index) :]


def config_from_hf(hf: Mapping[str, Any], **overrides: Any) -> ModelConfig:
    """ModelConfig of a published config.json. Nothing is left to class defaults that differ from the hub's.

    Raises:
        KeyError: a size that has no safe default is missing.
    """
    known = {f.name for f in fields(ModelConfig)}
    values = {k: v for k, v in hf.items() if k in known and v is not None}
    rope = hf.get("rope_parameters") or {}
    if "rope_theta" in rope:
        values["rope_theta"] = rope["rope_theta"]
    if hf.get("rotary_dim") and "partial_rotary_factor" not in hf:
        values["partial_rotary_factor"] = hf["rotary_dim"] / hf["head_dim"]
    for name in ("hidden_size", "num_hidden_layers", "vocab_size", "num_experts", "routed_scaling_factor", "rope_theta"):
        if name not in values:
            raise KeyError(f"config.json has no {name!r}")
    if "mtp_loss_scaling_factor" in hf:
        values["mtp_loss_weight"] = hf["mtp_loss_scaling_factor"]
    return ModelConfig(**{**values, **overrides})


def _layer_parts(c: ModelConfig, ours: str, theirs: str, moe: bool) -> Iterator[Part]:
    whole = (slice(None),)
    yield Part(f"{ours}.attention.norm", f"{theirs}.input_layernorm.weight", whole)
    yield Part(f"{ours}.attention.qkv", f"{theirs}.attention.query_key_value.weight", whole)
    yield Part(f"{ours}.attention.q_norm", f"{theirs}.attention.query_layernorm.weight", whole)
    yield Part(f"{ours}.attention.k_norm", f"{theirs}.attention.key_layernorm.weight", whole)
    yield Part(f"{ours}.attention.out", f"{theirs}.attention.dense.weight", whole)
    yield Part(f"{ours}.block.norm", f"{theirs}.post_attention_layernorm.weight", whole)
    if not moe:
        yield from _mlp_parts(f"{ours}.block.mlp", f"{theirs}.mlp", c.intermediate_size, ())
        return
    yield Part(f"{ours}.block.router.weight", f"{theirs}.mlp.gate.weight", whole)
    for e in range(c.num_experts):
        yield from _mlp_parts(f"{ours}.block.experts", f"{theirs}.mlp.experts.{e}", c.moe_intermediate_size, (e,))
    if c.num_shared_experts:
        yield from _mlp_parts(f"{ours}.block.shared", f"{theirs}.mlp.shared_experts", c.shared_intermediate_size, ())


def _mlp_parts(ours: str, theirs: str, width: int, index: tuple[int, ...]) -> Iterator[Part]:
    yield Part(f"{ours}.gate_up", f"{theirs}.gate_proj.weight", (*index, slice(0, width)))
    yield Part(f"{ours}.gate_up", f"{theirs}.up_proj.weight", (*index, slice(width, 2 * width)))
    yield Part(f"{ours}.down", f"{theirs}.down_proj.weight", index or (slice(None),))


def parts(config: ModelConfig) -> Iterator[Part]:
    """Every parameter of the model as the published checkpoint names it; MTP is layer `num_hidden_layers`."""
    c, whole = config, (slice(None),)
    yield Part("embedding", "model.word_embeddings.weight", whole)
    for i in range(c.num_hidden_layers):
        yield from _layer_parts(c, f"layers.{i}", f"model.layers.{i}", i >= c.first_k_dense_replace)
    if c.num_nextn_predict_layers:
        theirs = f"model.layers.{c.num_hidden_layers}"
        for name, hf in (("enorm", "enorm"), ("hnorm", "hnorm"), ("eh_proj", "eh_proj"), ("final_norm", "final_layernorm")):
            yield Part(f"mtp.{name}", f"{theirs}.{hf}.weight", whole)
        yield from _layer_parts(c, "mtp", theirs, True)
    yield Part("norm", "model.norm.weight", whole)
    yield Part("head", "lm_head.weight", whole)


def bias_name(router_name: str, config: ModelConfig) -> str:
    """Published name of a router's expert_bias, from our module name."""
    layer = config.num_hidden_layers if router_name.startswith("mtp.") else int(router_name.split(".")[1])
    return f"model.layers.{layer}.mlp.gate.expert_bias"


@torch.no_grad()
def load_hf(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(our name, fp32 values) of every weight from published tensors; copies the expert biases into the routers, bit-exact.

    Strict: every tensor has to be used, and every weight filled.

    Raises:
        KeyError: a tensor is missing, or one is left over.
        ValueError: a shape does not fit.
    """
    config, named, left = model.config, dict(weights(model)), set(tensors)
    pending: dict[str, Tensor] = {}
    for part in parts(config):
        if part.hf_name not in tensors:
            raise KeyError(f"checkpoint has no tensor {part.hf_name!r}")
        value = pending.setdefault(part.name, torch.empty(named[part.name].global_shape, dtype=torch.float32))
        if value[part.index].shape != tensors[part.hf_name].shape:
            raise ValueError(
                f"{part.hf_name!r} has shape {tuple(tensors[part.hf_name].shape)}, expected {tuple(value[part.index].shape)}"
            )
        value[part.index] = tensors[part.hf_name].float()
        left.discard(part.hf_name)
    for name, router in routers(model):
        key = bias_name(name, config)
        if key not in tensors:
            raise KeyError(f"checkpoint has no tensor {key!r}")
        router.expert_bias.copy_(tensors[key])
        left.discard(key)
    if left:
        raise KeyError(f"checkpoint has {len(left)} tensors the model has not, first {sorted(left)[0]!r}")
    yield from pending.items()
