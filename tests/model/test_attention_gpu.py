"""The attention core on a GPU, each backend against float64."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from model.attention import attend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs Hopper"),
]


def drawn(batch: int, seq: int, heads: int, kv: int, d: int) -> list[torch.Tensor]:
    """q, k, v [B, S, heads, d] as views of larger tensors, as the model hands them over."""
    qk, qkv = torch.randn(batch, seq, heads + kv, d, device="cuda"), torch.randn(batch, seq, heads + 2 * kv, d, device="cuda")
    parts = (qk[:, :, :heads], qk[:, :, heads:], qkv[:, :, heads + kv :])
    return [t.bfloat16().requires_grad_() for t in parts]


def definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """Causal attention within documents of the flattened tokens, float64."""
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    parts = []
    for a, b in zip(ends[:-1], ends[1:], strict=True):
        score = torch.einsum("qhd,khd->hqk", q[a:b], k[a:b]) * q.shape[-1] ** -0.5
        score = score.masked_fill(~torch.ones(b - a, b - a, dtype=torch.bool, device=q.device).tril(), float("-inf"))
        parts.append(torch.einsum("hqk,khd->qhd", score.softmax(-1), v[a:b]))
    return torch.cat(parts)


@pytest.mark.parametrize("documents", [False, True])
def test_outputs_and_gradients(documents: bool) -> None:
    batch, seq = 2, 256
    inputs = drawn(batch, seq, 8, 2, 128)
    ends = [0, 100, 256, 300, 301, 512] if documents else [0, 256, 512]
    cu = torch.tensor(ends, dtype=torch.int32, device="cuda") if documents else None
    y = attend(*inputs, cu, 212 if documents else 0)
    dy = torch.randn_like(y)
    got = torch.autograd.grad(y, inputs, dy)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    want_y = definition(*(t.flatten(0, 1) for t in exact), ends).view(y.shape)
    want = torch.autograd.grad(want_y, exact, dy.double())
    for a, b in zip((y, *got), (want_y, *want), strict=True):
        assert (a.double() - b).norm() / b.norm() < 2**-7


def kernels_of(run: object) -> str:
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        run()
        torch.cuda.synchronize()
    return " ".join(event.name.lower() for event in prof.events())


def test_cudnn_unless_deterministic() -> None:
    q, k, v = drawn(2, 512, 8, 2, 128)

    def once() -> list[torch.Tensor]:
        y = attend(q, k, v, None)
        return [y, *torch.autograd.grad(y, (q, k, v), torch.ones_like(y))]

    once()
    assert "cudnn" in kernels_of(once)
    torch.use_deterministic_algorithms(True)  # not warn_only: with it flash's backward keeps adding in any order
    try:
        once()
        assert "flash" in kernels_of(once)
        assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
