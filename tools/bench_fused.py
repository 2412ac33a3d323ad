"""Memory-bound kernels at one model's sizes: time, bytes that have to move, and their share of the copy rate.

    python -m tools.bench fused --tokens 16384 --out fused.json

Bytes count each input once and each output once, padding rows included, rows past the last group not. Times are medians of single
replays of a CUDA graph with a cold L2 (triton.testing.do_bench). Copying and writing alone (fill) are measured in the same run,
launched: inside a graph a copy runs at two thirds of its rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from triton.testing import do_bench

from fp8 import (
    cross_entropy_kernels,
    qk_norm_rope_kernels,
    rms_norm_kernels,
    route_forward_kernel,
    route_kernels,
    swiglu_kernels,
)
from fp8.embedding import add_rows
from fp8.fused import ROW
from fp8.gradient_kernels import take
from fp8.permute import (
    Permutation,
    build_permutation,
    permute,
    permute_both,
    permute_requantize_t,
    permute_slots,
    unpermute_sum,
)
from fp8.quantize import quantize, quantize_both, requantize_t, retile_t
from fp8.quantized import Quantized
from fp8.router_gemm import router_gemm
from model.config import ModelConfig
from tools.arguments import add_out, at_least, make_parser, write_json
from tools.output import need_gpu

EPS = 1e-6
Case = tuple[str, Callable[[], object], int]  # name, what runs, bytes


def launched_us(run: Callable[[], object]) -> float:
    """Median microseconds of `run`, launched, cold L2."""
    return do_bench(run, warmup=10, rep=60, return_mode="median") * 1e3


def time_us(run: Callable[[], object]) -> float:
    """Of `run` as a CUDA graph: launching two short kernels is the host's time, not theirs. Not for copies, which a graph slows."""
    for _ in range(2):  # compiles, and warms the allocator, outside the capture
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return launched_us(graph.replay)


def rates(device: str, size: int) -> tuple[float, float]:
    """TB/s of a copy (read and written) and of a fill of `size` bytes."""
    a, b = torch.empty(2, size, dtype=torch.uint8, device=device)
    return 2 * size / launched_us(lambda: b.copy_(a)) / 1e6, size / launched_us(a.zero_) / 1e6


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def routed(tokens: int, c: ModelConfig) -> Permutation:
    """A mildly uneven routing."""
    score = torch.randn(tokens, c.num_experts, device="cuda") + 0.5 * torch.randn(c.num_experts, device="cuda")
    return build_permutation(score.topk(c.num_experts_per_tok, dim=1).indices, c.num_experts)


def norm_cases(t: int, c: ModelConfig) -> Iterator[Case]:
    d, heads, kv = c.hidden_size, c.num_attention_heads, c.num_key_value_heads
    h, dx, dx2, dx3, dres, w = *(random(t, d) for _ in range(5)), torch.rand(d, device="cuda")
    scales = t * d // 32
    yield "RMSNorm -> FP8", lambda: rms_norm_kernels.rms_norm(h, w, EPS, False, True), 3 * t * d + scales
    yield "RMSNorm -> FP8 + BF16", lambda: rms_norm_kernels.rms_norm(h, w, EPS, True, True), 5 * t * d + scales
    yield "RMSNorm backward, 1 gradient", lambda: rms_norm_kernels.backward(h, w, [dx], None, EPS), 6 * t * d
    three = [dx, dx2, dx3]
    yield "RMSNorm backward, 3 gradients + residual", lambda: rms_norm_kernels.backward(h, w, three, dres, EPS), 12 * t * d
    size, total = c.head_dim, heads + 2 * kv
    qkv, angle = random(t, total, size), torch.rand(t, 1, c.rotary_dim, device="cuda")
    norm, cos, sin = torch.rand(size, device="cuda"), angle.cos().bfloat16(), angle.sin().bfloat16()
    run = lambda: qk_norm_rope_kernels.forward(qkv, norm, norm, cos, sin, heads, EPS)  # noqa: E731
    yield "QK-norm + RoPE", run, 4 * t * (heads + kv) * size + 4 * cos.numel()
    dq, dk, dv = random(t, heads, size), random(t, kv, size), random(t, kv, size)
    run = lambda: qk_norm_rope_kernels.backward(qkv, norm, norm, cos, sin, dq, dk, dv, EPS)  # noqa: E731
    yield "QK-norm + RoPE backward", run, 2 * t * size * (3 * (heads + kv) + 2 * kv) + 4 * cos.numel()


def expert_cases(t: int, c: ModelConfig) -> Iterator[Case]:
    perm = routed(t, c)
    d, f, k, buffer = c.hidden_size, c.moe_intermediate_size, c.num_experts_per_tok, perm.groups.max_rows
    live, r = perm.groups.block_expert_B, int(perm.groups.ends_E[-1])
    x = quantize(random(t, d), ROW)
    ids = torch.rand(t, c.num_experts, device="cuda").topk(k, dim=1).indices
    yield "build indices (3 launches)", lambda: build_permutation(ids, c.num_experts), 16 * t * k + 8 * buffer
    yield "permute FP8 rows", lambda: permute(x, perm), t * d + r * d + (t + r) * d // 32
    run = lambda: permute_both(x, perm, ROW)  # noqa: E731
    yield "permute dY: rows + columns", run, t * d + 2 * r * d + (2 * t + 4 * r) * d // 64
    yield "permute X, re-tiled to 128x128, transposed", lambda: permute_requantize_t(x, perm), t * d + r * d + t * d // 32
    x16 = Quantized.unscaled(random(t, d))
    yield "permute BF16 rows", lambda: permute(x16, perm), 2 * (t + r) * d
    h, da, w = random(buffer, 2 * f), random(buffer, f), permute_slots(torch.rand(t, k, device="cuda"), perm)
    h_q, a_q = swiglu_kernels.quantize_swiglu(h, w, live)
    wide, narrow = 2 * f * r, f * r
    si = wide // 32
    run = lambda: swiglu_kernels.quantize_swiglu(h, w, live)  # noqa: E731
    yield "quantise h + SwiGLU -> FP8", run, 3 * wide + narrow + si + si // 2
    run = lambda: swiglu_kernels.quantize_swiglu(h_q, w, live)  # noqa: E731
    yield "SwiGLU of stored h -> FP8", run, wide + narrow + si + si // 2
    run = lambda: swiglu_kernels.backward(h_q, w, da, live)  # noqa: E731
    yield "SwiGLU backward -> row + column FP8", run, 3 * wide + 2 * narrow + 3 * si
    run = lambda: swiglu_kernels.plain(Quantized.unscaled(h), w, da, live)  # noqa: E731
    yield "SwiGLU backward, BF16 recipe", run, 4 * wide + 2 * narrow
    y = random(buffer, d)
    yield "sum of k rows", lambda: unpermute_sum(y, perm), 2 * t * k * d + 2 * t * d
    x_R, dy = permute(x, perm), permute(x, perm)
    yield "re-tile X to 128x128, transposed", lambda: requantize_t(x_R, live), 2 * r * d
    yield "re-tile dY to columns", lambda: retile_t(dy, ROW, live), 2 * r * d
    big = random(t, c.qkv_size)
    yield "quantise dY, rows + columns", lambda: quantize_both(big, ROW), 4 * big.numel()
    acc, part = torch.zeros(c.vocab_size // 4, d, device="cuda"), random(c.vocab_size // 4, d)
    yield "dense wgrad into FP32", lambda: take(part, acc, True), 10 * part.numel()


def router_cases(t: int, c: ModelConfig) -> Iterator[Case]:
    e, k = c.num_experts, c.num_experts_per_tok
    logits, bias = torch.randn(t, e, device="cuda"), torch.zeros(e, device="cuda")
    sizes = c.n_group, c.topk_group, k, 2.5
    ids, weights, lse = route_forward_kernel.route(logits, bias, *sizes)
    yield "route", lambda: route_forward_kernel.route(logits, bias, *sizes), 4 * t * e + 12 * t * k
    run = lambda: route_kernels.route_backward(logits, ids, lse, weights, lse, 2.5, parts=True)  # noqa: E731
    yield "route backward -> 4 x BF16", run, 12 * t * e + 12 * t * k
    x, w, size = random(t, c.hidden_size), random(e, c.hidden_size, dtype=torch.float32), 2 * t * c.hidden_size + 4 * t * e
    yield "router product as three BF16 ones", lambda: router_gemm(x, w), size
    yield "router product in IEEE FP32", lambda: x.float() @ w.t(), size
    yield "split the router's W -> 4 x BF16", lambda: route_kernels.split_bf16(w, (2, 1, 0, 0), True), 12 * w.numel()


def head_cases(chunk: int, c: ModelConfig) -> Iterator[Case]:
    v = c.vocab_size
    logits, label = random(chunk, v), torch.randint(0, v, (chunk,), device="cuda")
    peak, total, picked = cross_entropy_kernels.statistics(logits, label)
    lse, one, scale = peak + total.log(), torch.ones_like(peak), torch.tensor(1e-4, device="cuda")
    yield f"softmax statistics, {chunk} tokens", lambda: cross_entropy_kernels.statistics(logits, label), 2 * chunk * v
    run = lambda: cross_entropy_kernels.gradient(logits, lse, one, label, picked, scale)  # noqa: E731
    yield "softmax gradient -> row + column FP8", run, 4 * chunk * v + chunk * v // 16


def embedding_cases(t: int, c: ModelConfig) -> Iterator[Case]:
    out, dy = torch.zeros(c.vocab_size, c.hidden_size, device="cuda"), random(t, c.hidden_size)
    tokens = (torch.rand(t, device="cuda") ** 3 * c.vocab_size).long()  # the commonest is about 2% of all, as in text
    touched = tokens.unique().numel()
    yield "embedding gradient, adds", lambda: add_rows(out, tokens, dy, True), 2 * dy.numel() + 8 * touched * c.hidden_size


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("bench fused", __doc__)
    parser.add_argument("--tokens", type=at_least(1), default=16384, help="that every kernel but the head's works on")
    add_out(parser)
    args = parser.parse_args(argv)
    need_gpu("tools.bench fused")
    c = ModelConfig()
    copy, fill = rates("cuda", 2**30)
    print(f"copy {copy:.2f} TB/s, fill {fill:.2f} TB/s on {torch.cuda.get_device_name()}")
    print(f"{'kernel':<52}{'us':>9}{'GB/s':>8}{'of copy':>9}")
    rows = [{"kernel": "copy", "tb_s": copy, "fill_tb_s": fill}]
    for cases in (norm_cases, expert_cases, router_cases, embedding_cases):
        for name, run, size in cases(args.tokens, c):
            rows.append(report(name, time_us(run), size, copy))
    for name, run, size in head_cases(2048, c):
        rows.append(report(name, time_us(run), size, copy))
    write_json(args.out, rows)


def report(name: str, us: float, size: int, copy: float) -> dict[str, object]:
    rate = size / us / 1e3
    print(f"{name:<52}{us:9.1f}{rate:8.0f}{rate / copy / 1e3:9.0%}")
    return {"kernel": name, "us": us, "bytes": size, "of_copy": rate / copy / 1e3}
