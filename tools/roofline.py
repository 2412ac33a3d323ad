"""The least time a part of a layer can take: its products at the tensor cores' peak, or their operands at the copy rate.

Each product counts with the larger of FLOPs / peak and bytes / copy rate: both operands once, the result once (BF16, a weight's
gradient FP32 unless said). What lies between the products counts as free, so 100% is out of reach by what norms, quantisation,
SwiGLU and permutation have to move. Peaks are the vendor's dense ones for Hopper. Shapes: T tokens, D features.
"""

from __future__ import annotations

import torch

from model.config import ModelConfig

PEAK = {True: 1979e12, False: 989e12}  # FLOP/s in FP8, in BF16


def copy_rate() -> float:
    """Bytes/s, read and written, of a copy of 1 GiB on this GPU."""
    from triton.testing import do_bench  # a CPU does without Triton

    a, b = torch.empty(2, 2**30, dtype=torch.uint8, device="cuda")
    return 2 * a.numel() / do_bench(lambda: b.copy_(a), warmup=10, rep=60, return_mode="median") * 1e3


def linear_seconds(m: int, n: int, k: int, fp8: bool, rate: float, experts: int = 1, grad: int = 4) -> float:
    """fprop, dgrad and wgrad of y [m, n] = x [m, k] . w [n, k]^T, with `experts` weights for equal parts of the rows, `grad` bytes
    an element of their gradients."""
    size = 1 if fp8 else 2
    weight, x, y = experts * n * k, m * k, m * n
    moved = (size * (x + weight) + 2 * y, size * (y + weight) + 2 * x, size * (x + y) + grad * weight)
    return sum(max(2 * m * n * k / PEAK[fp8], bytes_ / rate) for bytes_ in moved)


def part_seconds(c: ModelConfig, part: str, tokens: int, seq_len: int, fp8: bool, rate: float, grad: int = 4) -> float:
    """Forward and backward of "attention", "dense", "moe", "layer" (attention and moe) or "head" on one GPU."""

    def linear(m: int, n: int, k: int, experts: int = 1) -> float:
        return linear_seconds(m, n, k, fp8, rate, experts, grad)

    t, d = tokens, c.hidden_size
    if part == "layer":
        return sum(part_seconds(c, each, tokens, seq_len, fp8, rate, grad) for each in ("attention", "moe"))
    if part == "head":
        return linear(t, c.vocab_size, d)
    if part == "dense":
        return linear(t, 2 * c.intermediate_size, d) + linear(t, d, c.intermediate_size)
    if part == "attention":
        wide = c.num_attention_heads * c.head_dim
        core = 3.5 * 2 * t * seq_len * wide / PEAK[False]  # causal: half of the scores; five products back, two forth
        return linear(t, c.qkv_size, d) + linear(t, d, wide) + core
    rows, f, shared = t * c.num_experts_per_tok, c.moe_intermediate_size, c.shared_intermediate_size
    found = linear(rows, 2 * f, d, c.num_experts) + linear(rows, d, f, c.num_experts)
    found += linear_seconds(t, c.num_experts, d, False, rate)  # the router, as one BF16 product
    if shared:
        found += linear(t, 2 * shared, d) + linear(t, d, shared)
    return found


def step_seconds(c: ModelConfig, tokens: int, seq_len: int, fp8: bool, rate: float) -> float:
    """Forward and backward of all layers and heads."""
    mtp = c.num_nextn_predict_layers
    parts = {"dense": c.first_k_dense_replace, "moe": c.num_hidden_layers - c.first_k_dense_replace + mtp}
    parts |= {"attention": c.num_hidden_layers + mtp, "head": 1 + mtp}
    return sum(n * part_seconds(c, part, tokens, seq_len, fp8, rate) for part, n in parts.items())


def step_share(c: ModelConfig, parts: int, tokens: int, seq_len: int, fp8: bool, milliseconds: float, rate: float) -> float | None:
    """The share that the least time of `parts` micro-batches has of `milliseconds`; None without a GPU (`rate` 0)."""
    return 1e3 * parts * step_seconds(c, tokens, seq_len, fp8, rate) / milliseconds if rate else None
