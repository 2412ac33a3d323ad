"""config.json of a BailingMoeV2 checkpoint: what an import checks in it, what an export writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from model.config import ModelConfig
from model.huggingface import config_from_hf
from training.errors import UserError

ARCHITECTURE = "BailingMoeV2ForCausalLM"
# What the model code does; a config.json that says otherwise describes another model.
FIXED = {
    "hidden_act": "silu",
    "score_function": "sigmoid",
    "norm_topk_prob": True,
    "moe_router_enable_expert_bias": True,
    "use_qk_norm": True,
    "use_bias": False,
    "use_qkv_bias": False,
    "tie_word_embeddings": False,
    "use_rmsnorm": True,
}
BLOCK_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
# The sizes that config.json and ModelConfig name alike.
SHARED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "first_k_dense_replace", "num_experts", "num_experts_per_tok", "num_shared_experts",
    "moe_intermediate_size", "n_group", "topk_group", "routed_scaling_factor", "rms_norm_eps", "rope_theta",
    "partial_rotary_factor", "max_position_embeddings", "num_nextn_predict_layers", "initializer_range",
)  # fmt: skip


def _type_problems(hf: Mapping[str, Any]) -> list[str]:
    """Fields of another type than the rest of this file takes them for."""
    kinds = {f.name: f.type for f in dataclasses.fields(ModelConfig)}
    wanted = {name: kinds[name] for name in SHARED} | dict.fromkeys(("rotary_dim", "moe_shared_expert_intermediate_size"), "int")
    wanted |= {"mtp_loss_scaling_factor": "float", "architectures": "list"}
    wanted |= dict.fromkeys(("rope_parameters", "rope_scaling", "quantization_config"), "dict")
    types = {"int": (int, "an integer"), "float": ((int, float), "a number"), "list": (list, "a list"), "dict": (dict, "an object")}
    found = []
    for name, kind in wanted.items():
        value, (type_, text) = hf.get(name), types[kind]
        if value is not None and (not isinstance(value, type_) or isinstance(value, bool)):
            found.append(f"{name} = {value!r} is not {text}")
    return found


def problems(hf: Mapping[str, Any]) -> list[str]:
    """Everything in a config.json that octet's model would get wrong; empty when it can be imported."""
    if found := _type_problems(hf):
        return found
    if ARCHITECTURE not in (hf.get("architectures") or [ARCHITECTURE]):
        found.append(f"architectures = {hf['architectures']}, not {ARCHITECTURE}")
    for name, value in FIXED.items():
        if name in hf and hf[name] != value:
            found.append(f"{name} = {hf[name]!r}; only {value!r} is supported")
    shared, routed = hf.get("moe_shared_expert_intermediate_size"), hf.get("moe_intermediate_size")
    if shared is not None and shared != routed:
        found.append(f"moe_shared_expert_intermediate_size = {shared} is not moe_intermediate_size = {routed}")
    return found + _rope_problems(hf) + _quantization_problems(hf.get("quantization_config"))


def _rope_problems(hf: Mapping[str, Any]) -> list[str]:
    found, rope = [], hf.get("rope_parameters") or {}
    for name in ("rope_parameters", "rope_scaling"):
        given = hf.get(name) or {}
        kind = given.get("rope_type", given.get("type", "default"))
        if kind != "default":
            found.append(
                f"{name} asks for {kind}, which octet does not train with. Ling 2.0 and Ring 2.0 are published without it; it is "
                'added for long inference: import with "rope_scaling": null, and add it to the export'
            )
    if "rope_theta" in hf and rope.get("rope_theta", hf["rope_theta"]) != hf["rope_theta"]:
        found.append(f"rope_theta = {hf['rope_theta']} but rope_parameters.rope_theta = {rope['rope_theta']}")
    factors = [x["partial_rotary_factor"] for x in (hf, rope) if x.get("partial_rotary_factor") is not None]
    factors += [hf["rotary_dim"] / hf["head_dim"]] if hf.get("rotary_dim") and hf.get("head_dim") else []
    if len(set(factors)) > 1:
        found.append(f"partial_rotary_factor and rotary_dim / head_dim contradict each other: {factors}")
    if not factors:
        found.append("neither partial_rotary_factor nor rotary_dim is given")
    return found


def _quantization_problems(quantization: Mapping[str, Any] | None) -> list[str]:
    if quantization is None:
        return []
    checked = ("quant_method", "fmt", "weight_block_size")
    wrong = {k: quantization.get(k) for k in checked if quantization.get(k, BLOCK_FP8[k]) != BLOCK_FP8[k]}
    if quantization.get("weight_block_size") is None:
        wrong["weight_block_size"] = None
    return [f"quantization_config has {wrong}; only block FP8 (e4m3, 128x128) is supported"] if wrong else []


def import_config(hf: Mapping[str, Any], place: str) -> ModelConfig:
    """ModelConfig of a config.json.

    Raises:
        UserError: a field is missing, of the wrong type, or describes a model that octet does not build.
    """
    found = problems(hf)
    if not found:
        factor = (hf.get("rope_parameters") or {}).get("partial_rotary_factor")
        try:
            config = config_from_hf({"partial_rotary_factor": factor, **hf} if factor is not None else hf)
            found = config.problems()
        except (KeyError, TypeError, ZeroDivisionError) as error:
            found = [str(error.args[0]) if error.args else repr(error)]
    if found:
        raise UserError("\n  - ".join([f"{place} cannot be imported", *found]))
    return config


def export_config(config: ModelConfig, base: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """config.json of a model; `base` (of the import that it came from, or {}) keeps what octet has no field for.

    Both forms of the rope base and both partial-rotary keys are written: transformers 5 ignores the old `rope_theta`,
    and engines that only know `rotary_dim` would rotate all dimensions of a head.
    """
    out = {
        "architectures": [ARCHITECTURE],
        "model_type": "bailing_moe",
        "attention_dropout": 0.0,
        "embedding_dropout": 0.0,
        "output_dropout": 0.0,
        "output_router_logits": False,
        "use_cache": True,
        "router_dtype": "fp32",
        **base,
        **FIXED,
    }
    values = dataclasses.asdict(config)
    out |= {name: values[name] for name in SHARED}
    out |= {
        "moe_shared_expert_intermediate_size": config.moe_intermediate_size,
        "mtp_loss_scaling_factor": config.mtp_loss_weight,
        "rotary_dim": config.rotary_dim,
        "rope_scaling": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": config.partial_rotary_factor,
        },
        "torch_dtype": "float32" if dtype == "fp32" else "bfloat16",
    }
    out.pop("quantization_config", None)
    return out | ({"quantization_config": BLOCK_FP8} if dtype == "fp8" else {})
