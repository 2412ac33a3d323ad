"""What `tools.sanitize` watches: kernels on shapes that fill no tile, each group in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from fp8 import swiglu_kernels
from fp8.grouped_gemm import make_groups
from fp8.grouped_gemm_sm90 import grouped_gemm_nt_sm90, grouped_wgrad_sm90
from fp8.optimizer import PRESETS, AdamW
from fp8.quantize import (
    quantize,
    quantize_both,
    quantize_ref,
    quantize_t,
    quantize_t_ref,
    requantize_t,
    requantize_t_ref,
    retile_t,
    transpose,
)
from fp8.recipe import Recipe, Spec
from fp8.weight import Weight
from model.config import ModelConfig
from tools.bench_fused import Case, embedding_cases, expert_cases, head_cases, norm_cases, router_cases
from tools.sanitize_control import control_kernel

ROW, BLOCKS = Spec("e4m3", (1, 128), "block"), Spec("e4m3", (128, 128), "block")
TOKENS = 130
SMALL = ModelConfig(
    vocab_size=520, hidden_size=384, num_attention_heads=3, num_key_value_heads=1, head_dim=128, num_experts=128,
    num_experts_per_tok=8, n_group=8, topk_group=4, moe_intermediate_size=256,
)  # fmt: skip


def control(exchange: bool = False) -> None:
    """Nothing but `warp_specialize`: three groups of warps write 512 numbers each to memory of their own."""
    out = torch.empty(2, 3, 512, dtype=torch.int32, device="cuda")
    control_kernel[(2,)](out, EXCHANGE=exchange, num_warps=4)
    assert (out == torch.arange(1, 4, dtype=torch.int32, device="cuda")[:, None]).all(), out


def gemm() -> None:
    """Every operation and output format, over empty, tiny and unaligned groups, N = 384 and 256."""
    counts = [0, 1, 127, 128, 129, 0]
    groups = make_groups(torch.tensor(counts, device="cuda"), 128 * 7)
    for n, k in ((384, 256), (256, 384)):
        x, dy = torch.randn(groups.max_rows, k, device="cuda"), torch.randn(groups.max_rows, n, device="cuda")
        w = quantize_ref(torch.randn(len(counts), n, k, device="cuda"), BLOCKS)
        x_q = quantize_ref(x, ROW)
        dy_t, x_t = quantize_t_ref(dy, ROW), requantize_t_ref(x_q)
        for dtype in (torch.bfloat16, torch.float32):
            grouped_gemm_nt_sm90(x_q, w, groups, dtype)
            out = torch.zeros(len(counts), n, k, dtype=dtype, device="cuda")
            grouped_wgrad_sm90(dy_t, x_t, groups, out, False)
            grouped_wgrad_sm90(dy_t, x_t, groups, out, True)


def swiglu() -> None:
    """SwiGLU's kernels: what backward puts into shared memory is read by other warps."""
    h = torch.randn(384, 512, device="cuda", dtype=torch.bfloat16)
    da, w = torch.randn(384, 256, device="cuda", dtype=torch.bfloat16), torch.rand(384, device="cuda")
    live = torch.tensor([0, 0, -1], dtype=torch.int32, device="cuda")
    for rows, weights, blocks in ((384, w, live), (384, None, None), (300, w[:300], None)):
        h_q, _ = swiglu_kernels.quantize_swiglu(h[:rows].contiguous(), weights, blocks)
        swiglu_kernels.backward(h_q, weights, da[:rows].contiguous(), blocks)


def quantise() -> None:
    """Every quantise kernel once, on sizes that fill no tile."""
    x = torch.randn(300, 384, device="cuda", dtype=torch.bfloat16)
    rows = quantize(x, ROW)
    quantize_t(x, ROW), quantize_both(x, ROW), retile_t(rows, ROW), requantize_t(rows)
    transpose(quantize(torch.randn(3, 256, 384, device="cuda"), BLOCKS))


def all_of(cases: Callable[[int, ModelConfig], Iterable[Case]]) -> None:
    """Each kernel of a group of tools/bench_fused.py, once."""
    for _, run, _ in cases(TOKENS, SMALL):
        run()


def optimizer() -> None:
    """A step under each preset and recipe: states in blocks (pipelined where they are low-bit), by the element, in one table."""
    for states in PRESETS.values():
        for recipe in (Recipe.block(), Recipe.bf16()):
            with torch.device("cuda"):
                named = [("w", Weight(3, 256, 384, recipe=recipe)), ("norm", Weight(384, recipe=Recipe.fp32()))]
            for _, weight in named:
                weight.grad_dtype = torch.bfloat16 if recipe.is_fp8 and weight.data.dim() > 1 else torch.float32
            adamw = AdamW(named, states=states)
            for name, weight in named:
                adamw.set_master(name, torch.randn(weight.data.shape, device="cuda"))
            for _ in range(2):
                for _ in range(2):  # the second is added with stochastic rounding
                    for _, weight in named:
                        weight.add_grad(torch.randn(weight.data.shape, device="cuda").to(weight.grad_dtype))
                adamw.step(1e-3)


SUBJECTS: dict[str, Callable[[], None]] = {
    "control": control, "exchange": partial(control, True), "gemm": gemm, "swiglu": swiglu, "quantise": quantise,
    "norms": partial(all_of, norm_cases), "experts": partial(all_of, expert_cases), "router": partial(all_of, router_cases),
    "head": partial(all_of, head_cases), "embedding": partial(all_of, embedding_cases), "optimizer": optimizer,
}  # fmt: skip
