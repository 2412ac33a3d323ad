"""The kernel behind route.py's forward. In Gluon, for its layouts: a lane holds a whole group of a row (or 32 members of it).

Shapes: T tokens, E experts in G groups (both powers of two), k chosen; a tile is [ROWS, G, E / G].

The two best of a group, the largest logit and the sum of exponentials are then found in a lane's own registers, and a row is done
by a few lanes of one warp: no shared memory, no barrier. The k best are found by integer keys, the upper bits of (score + bias) and
below them the id, which no two experts share: the next one is what lies closest below the last one, a subtraction and a maximum a
candidate, and nothing has to be struck out. What the keys cut off decides the order among the chosen, which is found again from
whole scores, and seldom also who is chosen: where one left out has the upper bits of the last one chosen, the rows of that warp are
chosen again from whole scores.
"""

from functools import cache

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl

from fp8.device_math import exp2, sigmoid
from fp8.gluon_layouts import converted, filled_like, jit, places, sliced
from fp8.launch import cdiv, next_power_of_2
from fp8.quantize_kernels import INTERPRETED

LOG2_E = tl.constexpr(1.4426950408889634)
NO_KEY = tl.constexpr(-1073741824)  # below every key; all keys lie within 2^31


@jit
def _two_best(a1, a2, b1, b2):
    """The two largest of two pairs, each pair in order."""
    return tl.maximum(a1, b1), tl.maximum(tl.minimum(a1, b1), tl.maximum(a2, b2))


@jit
def _before(x, ids, PAIRS: tl.constexpr):
    """[ROWS, N]: how many of the row come before each: larger, or equal with a lower id. NaN comes first."""
    x = tl.where(x == x, x, float("inf"))
    mine, other = tl.expand_dims(converted(x, sliced(2, PAIRS)), 2), tl.expand_dims(converted(x, sliced(1, PAIRS)), 1)
    own, id_ = tl.expand_dims(converted(ids, sliced(2, PAIRS)), 2), tl.expand_dims(converted(ids, sliced(1, PAIRS)), 1)
    return tl.sum(((other > mine) | ((other == mine) & (id_ < own))).to(tl.int32), 2)


@jit
def _wide(x):
    """[ROWS] -> [ROWS, 1, 1]."""
    return tl.expand_dims(tl.expand_dims(x, 1), 2)


@jit
def _over_row(x):
    """Maximum over [ROWS, G, M]'s rows."""
    return tl.max(tl.max(x, 2), 1)


@jit
def _places(first_row, ROWS: tl.constexpr, G: tl.constexpr, M: tl.constexpr, LAYOUT: tl.constexpr):
    """(rows [ROWS], experts [1, G, M], groups [1, G]) of a tile."""
    group = tl.expand_dims(places(G, sliced(0, sliced(2, LAYOUT))), 0)
    member = tl.expand_dims(tl.expand_dims(places(M, sliced(0, sliced(1, LAYOUT))), 0), 1)
    return first_row + places(ROWS, sliced(1, sliced(2, LAYOUT))), tl.expand_dims(group * M, 2) + member, group


@jit
def _logits(logits_ptr, first_row, rows, E: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, LAYOUT: tl.constexpr):
    """A tile of logits, zero past the last row."""
    row, expert, _ = _places(first_row, ROWS, G, E // G, LAYOUT)
    return tl.load(logits_ptr + _wide(row).to(tl.int64) * E + expert, mask=_wide(row) < rows, other=0.0)


@jit
def _keys(biased, expert, keep, E: tl.constexpr):
    """uint32 keys that order like `biased` cut to 31 bits less an id's, then by falling id; `NO_KEY` where not kept."""
    bits = biased.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = ((ordered >> 1) & (-E)) | (E - 1 - expert)
    return tl.where(keep, key, NO_KEY).to(tl.uint32, bitcast=True)


@jit
def _best_by_key(key, none, last, slot, BY_SLOT: tl.constexpr, K: tl.constexpr):
    """(keys of the K best, best first, [ROWS, KP]; the last of them; the next one).

    Args:
        none: zeros of the result's shape; last: a key above all others.
    """
    found = none
    for j in tl.static_range(K):
        last += _over_row(key - _wide(last))  # in uint32 those below `last` come out large, the closest largest
        found = tl.where(slot == j, tl.expand_dims(converted(last, sliced(1, BY_SLOT)), 1), found)
    return found, last, last + _over_row(key - _wide(last))


@jit
def _best_by_score(left, expert, none, slot, BY_SLOT: tl.constexpr, E: tl.constexpr, K: tl.constexpr):
    """Ids of the K largest, ties to the lower id, [ROWS, KP]."""
    ids = none
    for j in range(K):
        id_ = tl.min(tl.min(tl.where(left == _wide(_over_row(left)), expert, E), 2), 1)
        left = tl.where(expert == _wide(id_), float("-inf"), left)
        ids = tl.where(slot == j, tl.expand_dims(converted(tl.minimum(id_, E - 1), sliced(1, BY_SLOT)), 1), ids)
    return ids


@jit
def _route(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, lse_ptr, rows, factor,
    E: tl.constexpr, G: tl.constexpr, TOPK_GROUP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr,
    READ: tl.constexpr, BY_EXPERT: tl.constexpr, GROUP_PAIRS: tl.constexpr, BY_SLOT: tl.constexpr, SLOT_PAIRS: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Chosen experts (best first, ties to the lower id), their weights, and logsumexp of the logits."""
    first_row = tl.program_id(0) * ROWS
    row, expert, group = _places(first_row, ROWS, G, E // G, BY_EXPERT)
    logit = converted(_logits(logits_ptr, first_row, rows, E, G, ROWS, READ), BY_EXPERT)
    top = _over_row(logit)
    total = tl.sum(tl.sum(exp2((logit - _wide(top)) * LOG2_E, HARDWARE), 2), 1)
    tl.store(lse_ptr + row, top + tl.log(total), mask=row < rows)
    biased = sigmoid(logit, HARDWARE) + tl.load(bias_ptr + expert)
    best, second = tl.reduce((biased, filled_like(biased, float("-inf"))), 2, _two_best)
    rank = converted(_before(best + second, group, GROUP_PAIRS), sliced(2, BY_EXPERT))
    keep = tl.expand_dims(rank < TOPK_GROUP, 2)

    slot, row_k = tl.expand_dims(places(KP, sliced(0, BY_SLOT)), 0), tl.expand_dims(first_row + places(ROWS, sliced(1, BY_SLOT)), 1)
    ok, none = (row_k < rows) & (slot < K), (row_k + slot) * 0
    above = (row * 0 + 0x40000000).to(tl.uint32, bitcast=True)
    key, zero = _keys(biased, expert, keep, E), none.to(tl.uint32, bitcast=True)
    found, last, left_out = _best_by_key(key, zero, above, slot, BY_SLOT, K)
    ids = E - 1 - (found & (E - 1)).to(tl.int32)
    score = sigmoid(tl.load(logits_ptr + row_k.to(tl.int64) * E + ids, mask=ok, other=0.0), HARDWARE)
    whole = tl.where(slot < K, score + tl.load(bias_ptr + ids), float("-inf"))
    place = converted(_before(whole, ids, SLOT_PAIRS), BY_SLOT)
    unsure = (row < rows) & ((last ^ left_out) < E)  # the same upper bits
    if tl.max(unsure.to(tl.int32), 0) > 0:
        again = sigmoid(_logits(logits_ptr, first_row, rows, E, G, ROWS, BY_EXPERT), HARDWARE) + tl.load(bias_ptr + expert)
        again = tl.where(again == again, again, float("inf"))  # NaN comes first, as its keys do
        ids = _best_by_score(tl.where(keep, again, float("-inf")), expert, none, slot, BY_SLOT, E, K)
        score = sigmoid(tl.load(logits_ptr + row_k.to(tl.int64) * E + ids, mask=ok, other=0.0), HARDWARE)
        place = slot + none
    score = tl.where(slot < K, score, 0.0)
    out = row_k.to(tl.int64) * K + place
    tl.store(ids_ptr + out, ids.to(tl.int64), mask=ok)
    tl.store(weights_ptr + out, score / (tl.expand_dims(tl.sum(score, 1), 1) + 1e-20) * factor, mask=ok)


# ---------------------------------------------------------------- launcher


@cache
def _layouts(experts: int, groups: int, slots: int) -> dict[str, object]:
    """Rows of a program, and how its tiles lie in the lanes of its warp: a row in the same lanes in all, except as it is read."""
    members, layout = experts // groups, gl.BlockedLayout
    of_member = min(32, max(1, members // 32))  # lanes that share a group
    of_group = min(groups, 32 // of_member)
    of_row = 32 // (of_member * of_group)
    read_member = min(32, max(1, members // 4))  # 16 bytes a lane
    read_group = min(groups, 32 // read_member)
    lanes, warp = 32 // of_row, [1, 1, 1]
    mine = max(1, slots // lanes)  # slots of a lane
    return dict(
        ROWS=of_row,
        READ=layout([1, 1, min(4, members)], [32 // (read_member * read_group), read_group, read_member], warp, [2, 1, 0]),
        BY_EXPERT=layout([1, groups // of_group, members // of_member], [of_row, of_group, of_member], warp, [2, 1, 0]),
        GROUP_PAIRS=layout([1, groups // of_group, groups], [of_row, of_group, of_member], warp, [2, 1, 0]),
        BY_SLOT=layout([1, mine], [of_row, lanes], [1, 1], [1, 0]),
        SLOT_PAIRS=layout([1, mine, slots], [of_row, lanes, 1], warp, [2, 1, 0]),
    )


def route(
    logits_TE: Tensor, bias_E: Tensor, n_group: int, topk_group: int, k: int, factor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(ids int64 [T, k], weights fp32 [T, k], logsumexp fp32 [T]) of fp32 logits."""
    (rows, experts), device = logits_TE.shape, logits_TE.device
    ids = torch.empty((rows, k), dtype=torch.int64, device=device)
    weights = torch.empty((rows, k), dtype=torch.float32, device=device)
    lse = torch.empty(rows, dtype=torch.float32, device=device)
    slots = next_power_of_2(k)
    layouts = _layouts(experts, n_group, slots)
    _route[(cdiv(rows, layouts["ROWS"]),)](
        logits_TE.contiguous(), bias_E.contiguous(), ids, weights, lse, rows, factor, E=experts, G=n_group,
        TOPK_GROUP=topk_group, K=k, KP=slots, HARDWARE=not INTERPRETED, num_warps=1, **layouts,
    )  # fmt: skip
    return ids, weights, lse
