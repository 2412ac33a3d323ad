"""The kernels of the send plan against the references, bitwise: whole blocks and parts of one, idle ranks, odd and even k."""

from __future__ import annotations

import pytest
import torch

from parallel import send_plan_kernels as kernels
from parallel.send_plan import count_tokens_ref, order_tokens_ref, read_slots_ref, slot_bytes
from tests.fp8.kernel_checks import DEVICE, INTERPRETED, marks

pytestmark = marks
CASES = [(1, 2, 8, 2), (130, 8, 64, 4), (77, 3, 24, 8), (300, 1, 6, 3)]  # tokens, k, experts, ranks
CASES += [] if INTERPRETED else [(16384, 8, 256, 2), (65536, 8, 256, 8), (1000, 8, 256, 64), (4096, 6, 64, 2)]


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("tokens, k, experts, ranks", CASES)
def test_count_order_read(tokens: int, k: int, experts: int, ranks: int, idle: bool) -> None:
    scores = torch.rand(tokens, experts, device=DEVICE)
    if idle:
        scores[:, experts // ranks :] -= 2.0  # the first rank gets all it can
    ids, weights = scores.topk(k, dim=1).indices, torch.randn(tokens, k, device=DEVICE)
    want, got = count_tokens_ref(ids, experts, ranks), kernels.count_tokens(ids, experts, ranks)
    assert torch.equal(got.sent, want.sent)
    num_rows, local = int(want.sent[:, 0].sum()), experts // ranks
    order, ours = (f(ids, weights, c, local, num_rows) for f, c in ((order_tokens_ref, want), (kernels.order_tokens, got)))
    for name in ("token_M", "row_Tn", "slots_MX"):
        assert torch.equal(getattr(ours, name), getattr(order, name)), name

    payload = torch.randint(0, 256, (num_rows, 32 + slot_bytes(k) + 4), dtype=torch.uint8, device=DEVICE)
    payload[:, 32 : 32 + slot_bytes(k)] = order.slots_MX
    for first, here in ((0, local), (local // 2, local - local // 2 - 1)):
        for mine, theirs in zip(*(f(payload, 32, k, first, here) for f in (kernels.read_slots, read_slots_ref)), strict=True):
            assert torch.equal(mine, theirs)
    back = read_slots_ref(payload, 32, k, 0, local)
    assert torch.equal(back[0], weights[order.token_M])


def test_no_tokens() -> None:
    ids, weights = torch.zeros(0, 2, dtype=torch.int64, device=DEVICE), torch.zeros(0, 2, device=DEVICE)
    got = kernels.count_tokens(ids, 8, 2)
    order = kernels.order_tokens(ids, weights, got, 4, 0)
    assert not got.sent.any() and order.slots_MX.shape == (0, slot_bytes(2))
