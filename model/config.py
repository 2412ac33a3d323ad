"""Sizes and coefficients of a BailingMoeV2 model. Field names are the published config.json's where it has one."""

from __future__ import annotations

from dataclasses import dataclass

LARGEST_STD = 100  # of initial values; far beyond, the squares of a norm overflow and no gradient is left


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """BailingMoeV2 (Ling-mini/flash/1T); the defaults are Ling-mini-2.0's.

    Attributes beyond config.json:
        mtp_loss_weight: weight of the multi-token prediction loss.
        router_z_loss_weight: coefficient of mean logsumexp(router logits)^2, a MoE layer.
        aux_loss_weight: coefficient of the sequence-level balance loss (DeepSeek-V3, eq. 17-20); 0 as Ling trains.
        bias_update_rate: step of the zero-mean expert-bias update, once an optimizer step.
        head_z_loss_weight: coefficient of logsumexp(logits)^2 of the language model head.
        loss_chunk: tokens whose logits exist at once.
        embedding_init_std: standard deviation of the initial embedding; None takes `initializer_range`, as Ling does. Then the
            first block's output, nearly the same for all tokens, is larger than what tells tokens apart, and a new router sends
            them all to a few experts; around 1 it does not (Takase et al., arXiv 2312.16903, on embeddings and loss spikes).
    """

    vocab_size: int = 157184
    hidden_size: int = 2048
    num_hidden_layers: int = 20
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    head_dim: int = 128
    intermediate_size: int = 5120
    first_k_dense_replace: int = 1
    num_experts: int = 256
    num_experts_per_tok: int = 8
    num_shared_experts: int = 1
    moe_intermediate_size: int = 512
    n_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float = 2.5
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 0.5
    max_position_embeddings: int = 4096
    num_nextn_predict_layers: int = 0
    initializer_range: float = 0.006
    embedding_init_std: float | None = None
    mtp_loss_weight: float = 0.1
    router_z_loss_weight: float = 3.5e-6
    aux_loss_weight: float = 0.0
    bias_update_rate: float = 1e-3
    head_z_loss_weight: float = 0.0
    loss_chunk: int = 2048

    @property
    def qkv_size(self) -> int:
        """Rows of the fused [Q | K | V] projection."""
        return (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of a head that rotate."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def shared_intermediate_size(self) -> int:
        return self.moe_intermediate_size * self.num_shared_experts

    def problems(self) -> list[str]:
        """Everything that is inconsistent, each with the numbers; empty when the config can be built."""
        found = []

        def divides(name: str, by: str) -> None:
            a, b = getattr(self, name), getattr(self, by)
            if b <= 0 or a % b:
                found.append(f"model.{name} = {a} is not divisible by model.{by} = {b}")

        positive = (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
            "intermediate_size", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group",
            "routed_scaling_factor", "rms_norm_eps", "rope_theta", "max_position_embeddings", "initializer_range",
        )  # fmt: skip
        found += [f"model.{name} = {getattr(self, name)} must be positive" for name in positive if not getattr(self, name) > 0]
        if self.embedding_init_std is not None and not self.embedding_init_std > 0:
            found.append(f"model.embedding_init_std = {self.embedding_init_std} must be positive, or null for initializer_range")
        for name in ("initializer_range", "embedding_init_std"):
            if (getattr(self, name) or 0) > LARGEST_STD:
                found.append(f"model.{name} = {getattr(self, name)} must be at most {LARGEST_STD}")
        not_negative = (
            "num_shared_experts", "mtp_loss_weight", "router_z_loss_weight", "aux_loss_weight", "bias_update_rate",
            "head_z_loss_weight",
        )  # fmt: skip
        found += [f"model.{name} = {getattr(self, name)} must be at least 0" for name in not_negative if getattr(self, name) < 0]
        if found:
            return found
        divides("num_attention_heads", "num_key_value_heads")
        divides("num_experts", "n_group")
        if self.topk_group > self.n_group:
            found.append(f"model.topk_group = {self.topk_group} is larger than model.n_group = {self.n_group}")
        candidates = self.num_experts // self.n_group * min(self.topk_group, self.n_group)
        if self.num_experts_per_tok > candidates:
            found.append(
                f"model.num_experts_per_tok = {self.num_experts_per_tok} is larger than the {candidates} experts of "
                f"model.topk_group = {self.topk_group} groups"
            )
        if self.num_experts // self.n_group < 2:
            found.append(f"model.num_experts = {self.num_experts} in model.n_group = {self.n_group}: a group needs 2 experts")
        if not 0 <= self.first_k_dense_replace <= self.num_hidden_layers:
            found.append(
                f"model.first_k_dense_replace = {self.first_k_dense_replace} is not within "
                f"model.num_hidden_layers = {self.num_hidden_layers}"
            )
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            found.append(f"model.partial_rotary_factor = {self.partial_rotary_factor} gives {self.rotary_dim} rotary dimensions")
        if self.num_nextn_predict_layers not in (0, 1):
            found.append(f"model.num_nextn_predict_layers = {self.num_nextn_predict_layers}; 0 or 1 are supported")
        if self.loss_chunk % 128 or self.loss_chunk <= 0:
            found.append(f"model.loss_chunk = {self.loss_chunk} is not a positive multiple of 128")
        return found

    def fp8_problems(self, tp: int = 1) -> list[str]:
        """Widths that break 128-wide FP8 blocks on `tp` ranks."""
        qkv_rows = (max(self.num_attention_heads // tp, 1) + 2 * max(self.num_key_value_heads // tp, 1)) * self.head_dim
        widths = {
            "model.hidden_size": self.hidden_size,
            "qkv rows of a rank": qkv_rows,
            "attention width": self.num_attention_heads * self.head_dim,
            "model.intermediate_size": self.intermediate_size,
            "model.moe_intermediate_size": self.moe_intermediate_size,
            "the shared expert's width": self.shared_intermediate_size,
            "model.vocab_size": self.vocab_size,
        }
        split = {"attention width", "model.intermediate_size", "the shared expert's width", "model.vocab_size"}
        return [
            f"{name} = {size} is not a multiple of {128 * (tp if name in split else 1)} (128-wide FP8 blocks, tp {tp})"
            for name, size in widths.items()
            if size % (128 * (tp if name in split else 1))
        ]
