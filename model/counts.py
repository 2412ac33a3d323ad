"""Parameter and FLOP counts, from the config alone."""

from __future__ import annotations

from model.config import ModelConfig

FLOPS_FORMULA = "6 x matrix parameters of a token + causal attention: docs/usage.md#what-a-run-prints"


def _attention(c: ModelConfig) -> int:
    return c.hidden_size * (c.qkv_size + c.num_attention_heads * c.head_dim)


def _moe_layer(c: ModelConfig) -> tuple[int, int]:
    """(all, active) matrix parameters of a MoE block."""
    expert = 3 * c.hidden_size * c.moe_intermediate_size
    fixed = c.num_experts * c.hidden_size + 3 * c.hidden_size * c.shared_intermediate_size
    return fixed + c.num_experts * expert, fixed + c.num_experts_per_tok * expert


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Counts by what they are used for. As published, `total`, `active` and `non_embedding_active` leave the MTP layer out.

    Keys: total, active, non_embedding_active, mtp, expert_bias (buffer entries, not in total).
    """
    c = config
    moe_layers = c.num_hidden_layers - c.first_k_dense_replace
    norms = c.num_hidden_layers * (2 * c.hidden_size + 2 * c.head_dim) + c.hidden_size
    moe_all, moe_active = _moe_layer(c)
    body = c.num_hidden_layers * _attention(c) + c.first_k_dense_replace * 3 * c.hidden_size * c.intermediate_size + norms
    table = c.vocab_size * c.hidden_size
    mtp = 0
    if c.num_nextn_predict_layers:
        mtp = _attention(c) + moe_all + 2 * c.hidden_size**2 + 5 * c.hidden_size + 2 * c.head_dim
    return {
        "total": body + moe_layers * moe_all + 2 * table,
        "active": body + moe_layers * moe_active + 2 * table,
        "non_embedding_active": body + moe_layers * moe_active,
        "mtp": mtp,
        "expert_bias": (moe_layers + c.num_nextn_predict_layers) * c.num_experts,
    }


def flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Training FLOPs of one token (forward + backward, 2 a multiply-add) by the formula in docs/usage.md, without recomputation."""
    c = config
    counts = parameter_counts(c)
    table = c.vocab_size * c.hidden_size
    matrices = counts["non_embedding_active"] + table
    layers = c.num_hidden_layers
    if c.num_nextn_predict_layers:
        matrices += _attention(c) + _moe_layer(c)[1] + 2 * c.hidden_size**2 + table
        layers += 1
    return 6.0 * matrices + 6.0 * layers * seq_len * c.num_attention_heads * c.head_dim
