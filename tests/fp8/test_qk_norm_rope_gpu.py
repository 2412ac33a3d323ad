"""QK-norm with rotary embedding, one kernel each way, against float64."""

import pytest
import torch

from fp8 import qk_norm_rope_kernels as kernels
from tests.fp8.kernel_checks import DEVICE, INTERPRETED, marks, randn

pytestmark = marks
SIZES = [(1, 1, 1, 64, 32), (40, 4, 2, 32, 16)]
SIZES += [] if INTERPRETED else [(1000, 16, 4, 128, 64), (4097, 32, 4, 128, 64)]
EPS = 1e-6


def definition(
    qkv: torch.Tensor, wq: torch.Tensor, wk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int
) -> tuple[torch.Tensor, ...]:
    kv, r = (qkv.shape[1] - heads) // 2, cos.shape[-1]
    parts = []
    for x, w in zip(qkv.split([heads, kv, kv], 1), (wq, wk, None), strict=True):
        if w is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * w
            first, second, rest = x[..., : r // 2], x[..., r // 2 : r], x[..., r:]
            c, s = cos[..., : r // 2], sin[..., : r // 2]
            x = torch.cat([first * c - second * s, second * c + first * s, rest], -1)
        parts.append(x)
    return tuple(parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens, heads, kv, d, r", SIZES)
def test_forward_and_backward(tokens: int, heads: int, kv: int, d: int, r: int, dtype: torch.dtype) -> None:
    qkv = randn(tokens, heads + 2 * kv, d, dtype=dtype)
    wq, wk = torch.rand(d, device=DEVICE) + 0.5, torch.rand(d, device=DEVICE) + 0.5
    angle = torch.rand(tokens, 1, r // 2, device=DEVICE) * 6
    cos, sin = torch.cat([angle, angle], -1).cos().to(dtype), torch.cat([angle, angle], -1).sin().to(dtype)
    inputs = [t.double().requires_grad_() for t in (qkv, wq, wk)]
    q, k, v = definition(*inputs, cos.double(), sin.double(), heads)
    low = dtype == torch.bfloat16
    bound = dict(rtol=2**-7, atol=2**-6) if low else dict(rtol=1e-5, atol=1e-5)
    got = kernels.forward(qkv, wq, wk, cos, sin, heads, EPS)
    torch.testing.assert_close(got.double(), torch.cat([q, k], 1).detach(), **bound)

    grads = [randn(*t.shape, dtype=dtype) for t in (q, k, v)]
    grads[0] = grads[0].transpose(0, 1).contiguous().transpose(0, 1)  # as an attention backend may hand it over
    want = torch.autograd.grad((q, k, v), inputs, [g.double() for g in grads])
    dqkv, dwq, dwk = kernels.backward(qkv, wq, wk, cos, sin, *grads, EPS)
    torch.testing.assert_close(dqkv.double(), want[0], **bound)
    for dw, w in ((dwq, want[1]), (dwk, want[2])):
        assert (dw - w).norm() <= (2**-8 if low else 1e-5) * w.norm() + 1e-5
    assert torch.equal(dwq, kernels.backward(qkv, wq, wk, cos, sin, *grads, EPS)[1]), "dw differs between two runs"
