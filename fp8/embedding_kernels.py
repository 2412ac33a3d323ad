"""The Triton kernels behind embedding.add_rows: gradients of equal tokens are summed in a fixed order, without atomics.

Positions are first put in an order in which equal tokens stand together, no matter which token comes first. A few programs read all
tokens, and each lists those whose hash is its own; then each listed position is placed by comparing it with the others of its hash.
A run is a stretch of equal tokens of that order. A program sums the runs of 8 places. A run inside goes straight to its row; of a
run that crosses into other programs only the parts are kept, and a last kernel adds them in order. So a token that is 5% of a text
costs little more than others.

Shapes: T tokens, D features, V vocabulary, C = ceil(T / 8) chunks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8.launch import cdiv

MIX, UNMIX = tl.constexpr(2654435769), tl.constexpr(340573321)  # odd, and its inverse modulo 2^32
LIST_LANES, LIST_UNROLL, LIST_WARPS = 512, 32, 16
PLACES, OTHERS, PLACE_WARPS = 16, 256, 4
COMPARED = 65536  # tokens up to which reading all of them in each program costs less than a sort
CHUNK, COLS, WARPS = 8, 512, 4
JOIN_CHUNKS, JOIN_PARTS, JOIN_REACH = 4, 16, 128


# ---------------------------------------------------------------- order


@triton.jit
def _keys(tokens_ptr, i, count, FULL: tl.constexpr):
    """Tokens times an odd number modulo 2^32: equal keys are equal tokens."""
    token = tl.load(tokens_ptr + i) if FULL else tl.load(tokens_ptr + i, mask=i < count, other=0)
    return (token.to(tl.uint32) * MIX).to(tl.uint32)


@triton.jit
def _hash(key, BITS: tl.constexpr):
    """The upper bits of a key, in the order of keys as signed numbers."""
    return ((key ^ 0x80000000) >> (32 - BITS)).to(tl.int32)


@triton.jit
def _list_positions(
    tokens_ptr, starts_ptr, words_ptr, count,
    BITS: tl.constexpr, LANES: tl.constexpr, UNROLL: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Lists the positions of one hash, in a fixed order, where those of lower hashes end: words of key * 2^32 + position.

    FULL: count is a multiple of what the program reads at once.
    """
    p, lane = tl.program_id(0), tl.arange(0, LANES)
    lower, mine = tl.zeros((LANES,), tl.int32), tl.zeros((LANES,), tl.int32)
    for start in range(0, count, LANES * UNROLL):
        for u in tl.static_range(UNROLL):
            i = start + u * LANES + lane
            hashed = _hash(_keys(tokens_ptr, i, count, FULL), BITS)
            if not FULL:
                hashed = tl.where(i < count, hashed, 1 << BITS)
            lower += (hashed < p).to(tl.int32)
            mine += (hashed == p).to(tl.int32)
    first = tl.sum(lower, 0)
    tl.store(starts_ptr + p, first)
    place = first + tl.cumsum(mine, 0) - mine
    for start in range(0, count, LANES * UNROLL):
        keys = ()
        for u in tl.static_range(UNROLL):  # before the stores, past which the compiler moves no load
            keys = keys + (_keys(tokens_ptr, start + u * LANES + lane, count, FULL),)
        for u in tl.static_range(UNROLL):
            i = start + u * LANES + lane
            here = _hash(keys[u], BITS) == p
            if not FULL:
                here &= i < count
            tl.store(words_ptr + place, (keys[u].to(tl.int32, bitcast=True).to(tl.int64) << 32) | i, mask=here)
            place += here.to(tl.int32)


@triton.jit
def _place_positions(
    starts_ptr, words_ptr, sorted_ptr, order_ptr, count, HASHES: tl.constexpr, PLACES: tl.constexpr, OTHERS: tl.constexpr
):  # fmt: skip
    """sorted = tokens[order], by words: PLACES listed positions, each compared with all that have a hash of one of them."""
    j = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    word = tl.load(words_ptr + j, mask=j < count, other=0)
    starts = tl.load(starts_ptr + tl.arange(0, HASHES))
    first = tl.max(tl.where(starts <= tl.program_id(0) * PLACES, starts, 0), 0)
    last = tl.min(tl.where(starts >= tl.program_id(0) * PLACES + PLACES, starts, count), 0)
    rank = tl.zeros((PLACES,), tl.int32)
    for start in range(first, last, OTHERS):
        k = start + tl.arange(0, OTHERS)
        other = tl.load(words_ptr + k, mask=k < last, other=0x7FFFFFFFFFFFFFFF)
        rank += tl.sum((other[None, :] < word[:, None]).to(tl.int32), 1)
    token = ((word >> 32).to(tl.uint32) * UNMIX).to(tl.uint32).to(tl.int32, bitcast=True)
    tl.store(sorted_ptr + first + rank, token, mask=j < count)
    tl.store(order_ptr + first + rank, word.to(tl.int32), mask=j < count)


# ---------------------------------------------------------------- sums


@triton.jit
def _token(sorted_ptr, at, count):
    """Token at a place of the order; -1 before the first and -2 after the last, which equal nothing."""
    token = tl.load(sorted_ptr + at, mask=(at >= 0) & (at < count), other=-1).to(tl.int64)
    return tl.where(at >= count, -2, token)


@triton.jit
def _sum_chunks(
    dy_ptr, sorted_ptr, order_ptr, out_ptr, parts_ptr, count, dim, CHUNK: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """Runs inside a chunk: out[token] += sum. Of a run that began earlier or goes on later: parts[chunk, 0] or parts[chunk, 1].

    One place after another, once all that they need is on its way: the rows of dy, and those of out where a run ends.
    """
    blocks = tl.cdiv(dim, COLS)
    cb, chunk = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    first, last = chunk * CHUNK, chunk * CHUNK + CHUNK - 1
    col = cb * COLS + tl.arange(0, COLS)
    before, after = _token(sorted_ptr, first - 1, count), _token(sorted_ptr, last + 1, count)
    tokens, dys, olds = (), (), ()
    for k in tl.static_range(CHUNK):
        tokens = tokens + (_token(sorted_ptr, first + k, count),)
    tokens = tokens + (after,)
    for k in tl.static_range(CHUNK):
        row = tl.load(order_ptr + first + k, mask=first + k < count, other=0).to(tl.int64)
        width = tl.where(first + k < count, dim, 0)
        dys = dys + (tl.load(dy_ptr + row * dim + col, mask=col < width, other=0.0, eviction_policy="evict_first"),)
    for k in tl.static_range(CHUNK):
        inside = (tokens[k] != tokens[k + 1]) & (tokens[k] >= 0) & (tokens[k] != before)
        at, width = out_ptr + tl.maximum(tokens[k], 0) * dim + col, tl.where(inside, dim, 0)
        olds = olds + (tl.load(at, mask=col < width, other=0.0, eviction_policy="evict_first"),)
    total = tl.zeros((COLS,), tl.float32)
    for k in tl.static_range(CHUNK):
        token, dy = tokens[k], dys[k].to(tl.float32)
        if k == 0:
            total = dy
        else:
            total = tl.where(token == tokens[k - 1], total + dy, dy)
        ends = (token != tokens[k + 1]) & (token >= 0)
        crosses = ends & (token == before)
        if k == CHUNK - 1:
            crosses = crosses | ((token == after) & (token >= 0))
        part = parts_ptr + (chunk.to(tl.int64) * 2 + tl.where(token == before, 0, 1)) * dim + col
        tl.store(part, total, mask=col < tl.where(crosses, dim, 0))
        at, width = out_ptr + tl.maximum(token, 0) * dim + col, tl.where(ends & (token != before), dim, 0)
        tl.store(at, olds[k] + total, mask=col < width)


@triton.jit
def _join_parts(
    sorted_ptr, out_ptr, parts_ptr, count, dim,
    CHUNK: tl.constexpr, COLS: tl.constexpr, CHUNKS: tl.constexpr, PARTS: tl.constexpr, REACH: tl.constexpr,
):  # fmt: skip
    """Where a run begins in one of CHUNKS chunks and goes on: adds its parts, in order, to out[token]."""
    blocks = tl.cdiv(dim, COLS)
    cb, chunk = tl.program_id(0) % blocks, tl.program_id(0) // blocks * CHUNKS
    col, n = cb * COLS + tl.arange(0, COLS), tl.arange(0, PARTS)
    firsts, lasts = (), (_token(sorted_ptr, chunk * CHUNK - 1, count),)
    for c in tl.static_range(CHUNKS + 1):  # all at once: few chunks have anything to do
        firsts = firsts + (_token(sorted_ptr, (chunk + c) * CHUNK, count),)
        lasts = lasts + (_token(sorted_ptr, (chunk + c) * CHUNK + CHUNK - 1, count),)
    for c in tl.static_range(CHUNKS):
        token = lasts[c + 1]
        if ((firsts[c] != token) | (lasts[c] != token)) & (firsts[c + 1] == token) & (token >= 0):
            parts, more = 0, REACH  # chunks into which it goes on
            while more == REACH:
                ahead = (chunk + c + 1 + parts + tl.arange(0, REACH)) * CHUNK
                more = tl.sum((_token(sorted_ptr, ahead, count) == token).to(tl.int32), 0)
                parts += more
            row, part = out_ptr + token * dim + col, parts_ptr + (chunk + c).to(tl.int64) * 2 * dim + col
            total = tl.load(part + dim, mask=col < dim, other=0.0) + tl.load(row, mask=col < dim, other=0.0)
            for start in range(0, parts, PARTS):
                at = part[None, :] + (start + n + 1)[:, None].to(tl.int64) * (2 * dim)
                ok = (start + n < parts)[:, None] & (col < dim)[None, :]
                total += tl.sum(tl.load(at, mask=ok, other=0.0), 0)
            tl.store(row, total, mask=col < dim)


# ---------------------------------------------------------------- launchers


def order(tokens_T: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens[order], order) of int64 tokens from 0 to 2^31 - 1, where equal tokens stand together; the same in each run."""
    count, device = tokens_T.numel(), tokens_T.device
    if count > COMPARED:
        return torch.sort(tokens_T.to(torch.int32), stable=True)  # half of the passes that 64 bits take
    bits = min(8, max(1, (count // 128).bit_length() - 1))  # about 128 tokens a hash
    starts, words = torch.empty(1 << bits, dtype=torch.int32, device=device), torch.empty(count, dtype=torch.int64, device=device)
    ordered, places = torch.empty((2, count), dtype=torch.int32, device=device)
    _list_positions[(1 << bits,)](
        tokens_T.contiguous(), starts, words, count, BITS=bits, LANES=LIST_LANES, UNROLL=LIST_UNROLL,
        FULL=count % (LIST_LANES * LIST_UNROLL) == 0, num_warps=LIST_WARPS,
    )  # fmt: skip
    _place_positions[(cdiv(count, PLACES),)](
        starts, words, ordered, places, count, HASHES=1 << bits, PLACES=PLACES, OTHERS=OTHERS, num_warps=PLACE_WARPS
    )
    return ordered, places


def add_rows(out_VD: Tensor, tokens_T: Tensor, dy_TD: Tensor) -> None:
    """out[tokens] += dy; out FP32, dy BF16 or FP32, tokens int64."""
    count, dim = dy_TD.shape
    if count == 0:
        return
    ordered, places = order(tokens_T)
    chunks, blocks = cdiv(count, CHUNK), cdiv(dim, COLS)
    parts = torch.empty((chunks, 2, dim), dtype=torch.float32, device=out_VD.device)
    _sum_chunks[(blocks * chunks,)](
        dy_TD.contiguous(), ordered, places, out_VD, parts, count, dim, CHUNK=CHUNK, COLS=COLS, num_warps=WARPS
    )
    _join_parts[(blocks * cdiv(chunks, JOIN_CHUNKS),)](
        ordered, out_VD, parts, count, dim,
        CHUNK=CHUNK, COLS=COLS, CHUNKS=JOIN_CHUNKS, PARTS=JOIN_PARTS, REACH=JOIN_REACH, num_warps=WARPS,
    )  # fmt: skip
