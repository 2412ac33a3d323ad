"""The send plan's references, for any routing: every slot of every token arrives once, at the rank of its expert."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel.send_plan import count_tokens_ref, order_tokens_ref, own_slots, read_slots_ref


@given(
    tokens=st.integers(0, 70), k=st.integers(1, 5), ranks=st.integers(1, 6), local=st.integers(1, 9), seed=st.integers(0, 1 << 30)
)
def test_every_slot_arrives_once_at_the_rank_of_its_expert(tokens: int, k: int, ranks: int, local: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    experts, k = ranks * local, min(k, ranks * local)
    ids = torch.rand(tokens, experts, generator=generator).topk(k, dim=1).indices
    weights = torch.randn(tokens, k, generator=generator)
    counted = count_tokens_ref(ids, experts, ranks)
    to_rank = counted.sent[:, 0].tolist()
    assert torch.equal(counted.sent[:, 1:].flatten(), torch.bincount(ids.flatten(), minlength=experts))
    order = order_tokens_ref(ids, weights, counted, local, sum(to_rank))
    seen = torch.zeros(tokens, experts, dtype=torch.int64)
    for rank, rows in enumerate(torch.arange(sum(to_rank)).split(to_rank)):
        got, here = read_slots_ref(order.slots_MX[rows], 0, k, 0, local)
        token = order.token_M[rows]
        assert torch.equal(token, token.unique()), "in token order, each once"
        assert torch.equal(order.row_Tn[token, rank], rows) and (here >= 0).any(1).all()
        for slot in range(k):
            mine = here[:, slot] >= 0
            seen[token[mine], here[mine, slot] + rank * local] += 1
            assert torch.equal(got[mine, slot], weights[token[mine], slot])
        # gathered: the same slots from what all ranks get of all tokens
        whole, local_ids = read_slots_ref(own_slots(ids, weights), 0, k, rank * local, local)
        assert torch.equal(local_ids[token], here) and torch.equal(whole, weights)
    assert torch.equal(seen, torch.zeros_like(seen).scatter_(1, ids, 1))
