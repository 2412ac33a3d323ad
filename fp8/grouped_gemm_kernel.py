"""The Gluon kernel behind the Hopper expert GEMMs: one template for forward, dgrad and wgrad, FP32 promotion every 128 of K.

    out[m, n] (+)= sum over K blocks kb of  sa[m, kb] * sb[n // 128, kb] * (a[m, kb] . b[n, kb])

Shapes: R rows of tokens (groups padded to 128, in expert order), E experts, N and K a weight's sizes.
    forward, dgrad   a [R, K] with 1x128 scales, b [E, N, K] with 128x128 scales, out [R, N]
    wgrad            a = dy_t [N, R] with 1x128 scales along R, b = x_t [K, R] with 128x128 scales, out [E, N, K]; an expert's
                     sum runs over its own 128-row blocks only

One CTA per multiprocessor walks over output tiles of 128 x 256 (or 128). Its warps: two consumer warpgroups with 64 rows each;
a warp that loads operands by TMA into a ring of stages; a warp that stores finished chunks; when accumulating, a warp that loads
the old output. A 128x256 tile needs a quarter less L2-to-shared traffic than 128x128, and that traffic is near its limit.
The row blocks in use are counted on the device: the host never waits, and rows past the last group are never read. With QUANTIZE
consumers make E4M3 with 1x128 tiles of their sums. A trap of triton 3.6: a variable carried through a loop whose only use is to
bound an inner loop stays at its first value. Bounds of inner loops are therefore loaded inside the iteration that uses them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fp8.gluon_names import tma_load, tma_store


@gluon.jit
def _total_tiles(groups, sizes, WGRAD: gl.constexpr):
    """Tiles of the whole launch; the row blocks in use are read from the last group's end."""
    counts, ends, order, block_expert = groups
    num_experts, m_tiles, n_tiles, n_size, a_rows, b_blocks, k_blocks = sizes
    if WGRAD:
        return num_experts * m_tiles * n_tiles
    else:
        return gl.load(ends + num_experts - 1) // 128 * n_tiles


@gluon.jit
def _my_tiles(total):
    """Tiles of this CTA. CTAs take turns, every other round in reverse, so that a falling cost per tile evens out."""
    ctas = gl.num_programs(0)
    rounds = total // ctas
    place = gl.where(rounds % 2 == 0, gl.program_id(0), ctas - 1 - gl.program_id(0))
    return rounds + (place < total % ctas).to(gl.int32)


@gluon.jit
def _tile(i, groups, sizes, WGRAD: gl.constexpr, TILE_N: gl.constexpr):
    """Where this CTA's tile i lies: (a_row, b_row, first K block, K blocks, first and last B scale row, c_row, c_col)."""
    counts, ends, order, block_expert = groups
    num_experts, m_tiles, n_tiles, n_size, a_rows, b_blocks, k_blocks = sizes
    ctas = gl.num_programs(0)
    tile = i * ctas + gl.where(i % 2 == 0, gl.program_id(0), ctas - 1 - gl.program_id(0))
    if WGRAD:
        expert = gl.load(order + tile // (m_tiles * n_tiles))
        within = tile % (m_tiles * n_tiles)
        a_row = within // n_tiles * 128
        c_col = within % n_tiles * TILE_N
        num_k = (gl.load(counts + expert) + 127) // 128
        # An empty group reads one block past the end, which TMA fills with zeros.
        first_k = gl.where(num_k > 0, gl.load(ends + expert) // 128 - num_k, k_blocks)
        return a_row, c_col, first_k, num_k, c_col // 128, b_blocks - 1, expert * (m_tiles * 128) + a_row, c_col
    else:
        expert = gl.load(block_expert + tile // n_tiles)
        a_row = tile // n_tiles * 128
        c_col = tile % n_tiles * TILE_N
        first, last = expert * b_blocks + c_col // 128, expert * b_blocks + b_blocks - 1
        return a_row, expert * n_size + c_col, 0, k_blocks, first, last, a_row, c_col


@gluon.jit
def _load_operands(
    descs, ring, groups, sizes, WGRAD: gl.constexpr, ADD: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr
):
    """Producer warp: A (two 64-row boxes), A's scales and B (128-row boxes) of each K block into the next free stage."""
    a_desc, sa_desc, b_desc, c_desc = descs
    a_ring, sa_ring, b_ring, full, empty = ring
    num_experts, m_tiles, n_tiles, n_size, a_rows, b_blocks, k_blocks = sizes
    it = 0
    for i in range(_my_tiles(_total_tiles(groups, sizes, WGRAD))):
        a_row, b_row, first_k, num_k, sb_row, sb_last, c_row, c_col = _tile(i, groups, sizes, WGRAD, 128 * HALVES)
        if (not ADD) or num_k > 0:
            for k in range(gl.maximum(num_k, 1)):
                kb = first_k + k
                stage = it % STAGES
                bar = full.index(stage)
                mbarrier.wait(empty.index(stage), (it // STAGES & 1) ^ 1)
                mbarrier.expect(bar, 2 * 64 * 128 + 2 * 64 * 4 + HALVES * 128 * 128)
                for w in gl.static_range(2):
                    half = stage * 2 + w
                    tma_load(a_desc, [a_row + 64 * w, kb * 128], bar, a_ring.index(half))
                    tma_load(sa_desc, [kb * a_rows + a_row + 64 * w], bar, sa_ring.index(half))
                for h in gl.static_range(HALVES):
                    tma_load(b_desc, [b_row + 128 * h, kb * 128], bar, b_ring.index(stage * HALVES + h))
                it += 1


@gluon.jit
def _load_output(
    descs, c_ring, groups, sizes, WGRAD: gl.constexpr, HALVES: gl.constexpr, C_WIDTH: gl.constexpr, C_BUFS: gl.constexpr
):
    """Producer warp of the accumulating kernels: the old output in 64-row chunks, one ring for each consumer."""
    a_desc, sa_desc, b_desc, c_desc = descs
    c_smem, c_full, c_ready, c_empty = c_ring
    num_experts, m_tiles, n_tiles, n_size, a_rows, b_blocks, k_blocks = sizes
    chunk = 0
    for i in range(_my_tiles(_total_tiles(groups, sizes, WGRAD))):
        a_row, b_row, first_k, num_k, sb_row, sb_last, c_row, c_col = _tile(i, groups, sizes, WGRAD, 128 * HALVES)
        if num_k > 0:
            for part in gl.static_range(HALVES * 128 // C_WIDTH):
                for w in gl.static_range(2):
                    slot = w * C_BUFS + chunk % C_BUFS
                    mbarrier.wait(c_empty.index(slot), (chunk // C_BUFS & 1) ^ 1)
                    mbarrier.expect(c_full.index(slot), c_desc.block_type.nbytes)
                    tma_load(c_desc, [c_row + 64 * w, c_col + C_WIDTH * part], c_full.index(slot), c_smem.index(slot))
                chunk += 1


@gluon.jit
def _store_output(
    descs, c_ring, groups, sizes,
    WGRAD: gl.constexpr, ADD: gl.constexpr, HALVES: gl.constexpr, C_WIDTH: gl.constexpr, C_BUFS: gl.constexpr,
):  # fmt: skip
    """Storing warp: sends finished chunks out and hands their buffers back, so that no consumer waits for a store to drain."""
    a_desc, sa_desc, b_desc, c_desc = descs
    c_smem, c_full, c_ready, c_empty = c_ring
    num_experts, m_tiles, n_tiles, n_size, a_rows, b_blocks, k_blocks = sizes
    chunk = 0
    for i in range(_my_tiles(_total_tiles(groups, sizes, WGRAD))):
        a_row, b_row, first_k, num_k, sb_row, sb_last, c_row, c_col = _tile(i, groups, sizes, WGRAD, 128 * HALVES)
        if (not ADD) or num_k > 0:
            for part in gl.static_range(HALVES * 128 // C_WIDTH):
                for w in gl.static_range(2):
                    slot = w * C_BUFS + chunk % C_BUFS
                    mbarrier.wait(c_ready.index(slot), chunk // C_BUFS & 1)
                    tma_store(c_desc, [c_row + 64 * w, c_col + C_WIDTH * part], c_smem.index(slot))
                if ADD or C_BUFS == 1:
                    tma.store_wait(0)
                    for w in gl.static_range(2):
                        mbarrier.arrive(c_empty.index(w * C_BUFS + chunk % C_BUFS))
                else:  # one pair of stores stays in flight
                    tma.store_wait(2)
                    for w in gl.static_range(2):
                        mbarrier.arrive(c_empty.index(w * C_BUFS + (chunk + C_BUFS - 1) % C_BUFS), pred=chunk > 0)
                chunk += 1
    tma.store_wait(0)


@gluon.jit
def _emit_chunk(acc, c_ring, chunk, WG: gl.constexpr, ADD: gl.constexpr, C_BUFS: gl.constexpr):
    """Consumer: one chunk of the sum, added to the old output where asked, into the output ring."""
    c_smem, c_full, c_ready, c_empty = c_ring
    slot = WG * C_BUFS + chunk % C_BUFS
    phase = chunk // C_BUFS & 1
    buffer = c_smem.index(slot)
    if ADD:
        mbarrier.wait(c_full.index(slot), phase)
        acc += buffer.load(acc.type.layout).to(gl.float32)
    else:
        mbarrier.wait(c_empty.index(slot), phase ^ 1)
    buffer.store(acc.to(c_smem.dtype))
    fence_async_shared()
    mbarrier.arrive(c_ready.index(slot))
    return chunk + 1


@gluon.jit
def _emit(acc, c_ring, chunk, WG: gl.constexpr, ADD: gl.constexpr, C_WIDTH: gl.constexpr, C_BUFS: gl.constexpr):
    """Consumer: 64x128 sums, as one chunk or as two of 64 columns (a split of registers, nothing moves)."""
    if C_WIDTH == 128:
        return _emit_chunk(acc, c_ring, chunk, WG, ADD, C_BUFS)
    else:
        left, right = acc.reshape([64, 2, 64]).permute((0, 2, 1)).split()
        chunk = _emit_chunk(left, c_ring, chunk, WG, ADD, C_BUFS)
        return _emit_chunk(right, c_ring, chunk, WG, ADD, C_BUFS)


@gluon.jit
def _scaled(acc, si_ptr):
    """64 rows of sums as BF16, each times the power of two that quantize.py gives it; the inverses are stored."""
    acc = acc.to(gl.bfloat16).to(gl.float32)
    bits = gl.max(acc.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    exponent = gl.maximum((bits >> 23) - 135 + ((bits & 0x7FFFFF) > 0x600000).to(gl.int32), -126)
    exponent = gl.where((bits > 0) & (bits < 0x7F800000), exponent, 0)  # 120 at most
    inverse = ((127 + exponent) << 23).to(gl.float32, bitcast=True)
    gl.store(si_ptr + gl.arange(0, 64, layout=gl.SliceLayout(1, acc.type.layout)), inverse)
    return acc * gl.expand_dims(((127 - exponent) << 23).to(gl.float32, bitcast=True), 1)


@gluon.jit
def _promote(acc, raw, scale):
    """acc + raw * scale of each row: one FFMA an element, whatever the compiler's default for fusing them is."""
    return gl.fma(raw, gl.expand_dims(scale, 1), acc)


@gluon.jit
def _consume(
    sb_ptr, sc_ptr, ring, c_ring, groups, sizes, WGRAD: gl.constexpr, ADD: gl.constexpr, HALVES: gl.constexpr,
    STAGES: gl.constexpr, C_WIDTH: gl.constexpr, C_BUFS: gl.constexpr, QUANTIZE: gl.constexpr, WG: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup: 64 rows of the tile, one 64x128 product at a time, summed in FP32 outside the tensor core."""
    a_ring, sa_ring, b_ring, full, empty = ring
    num_experts, m_tiles, n_tiles, n_size, a_rows, b_blocks, k_blocks = sizes
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    never = n_tiles < 0  # false, but not to the compiler: both products then share one register block (else it spills)
    raw = gl.full([64, 128], 0.0, gl.float32, layout)
    it = 0
    chunk = 0
    for i in range(_my_tiles(_total_tiles(groups, sizes, WGRAD))):
        a_row, b_row, first_k, num_k, sb_row, sb_last, c_row, c_col = _tile(i, groups, sizes, WGRAD, 128 * HALVES)
        if (not ADD) or num_k > 0:
            sb0_ptr = sb_ptr + sb_row.to(gl.int64) * k_blocks
            sb1_ptr = sb_ptr + gl.minimum(sb_row + 1, sb_last).to(gl.int64) * k_blocks
            acc0 = gl.full([64, 128], 0.0, gl.float32, layout)
            acc1 = gl.full([64, 128], 0.0, gl.float32, layout)
            # At least one block: a trip count that may be zero makes ptxas spill the accumulators.
            for k in range(gl.maximum(num_k, 1)):
                kb = first_k + k
                stage = it % STAGES
                sb0 = gl.load(sb0_ptr + kb, mask=num_k > 0, other=0.0)
                sb1 = sb0
                if HALVES == 2:
                    sb1 = gl.load(sb1_ptr + kb, mask=num_k > 0, other=0.0)
                mbarrier.wait(full.index(stage), it // STAGES & 1)
                a = a_ring.index(stage * 2 + WG)
                b = b_ring.index(stage * HALVES).permute((1, 0))
                raw = warpgroup_mma(a, b, raw, use_acc=never, is_async=True)
                sa = sa_ring.index(stage * 2 + WG).load(gl.SliceLayout(1, layout))
                raw = warpgroup_mma_wait(0, deps=[raw])
                if HALVES == 1:
                    mbarrier.arrive(empty.index(stage))
                acc0 = _promote(acc0, raw, sa * sb0)
                if HALVES == 2:
                    raw, acc0 = warpgroup_mma_wait(0, deps=[raw, acc0])  # the sum is made before its block is written again
                    b = b_ring.index(stage * HALVES + 1).permute((1, 0))
                    raw = warpgroup_mma(a, b, raw, use_acc=never, is_async=True)
                    raw = warpgroup_mma_wait(0, deps=[raw])
                    mbarrier.arrive(empty.index(stage))
                    acc1 = _promote(acc1, raw, sa * sb1)
                it += 1
            if QUANTIZE:
                sc = sc_ptr + (c_col // 128).to(gl.int64) * a_rows + (c_row + 64 * WG)
                acc0, acc1 = _scaled(acc0, sc), _scaled(acc1, sc + a_rows)
            chunk = _emit(acc0, c_ring, chunk, WG, ADD, C_WIDTH, C_BUFS)
            if HALVES == 2:
                chunk = _emit(acc1, c_ring, chunk, WG, ADD, C_WIDTH, C_BUFS)


# Sizes are not specialised on: a kernel compiled for one buffer serves every other.
@gluon.jit(do_not_specialize=["num_experts", "m_tiles", "n_tiles", "n_size", "a_rows", "b_blocks", "k_blocks"])
def grouped_gemm_kernel(
    a_desc, sa_desc, b_desc, sb_ptr, c_desc, sc_ptr, counts, ends, order, block_expert,
    num_experts, m_tiles, n_tiles, n_size, a_rows, b_blocks, k_blocks, WGRAD: gl.constexpr, ADD: gl.constexpr, HALVES: gl.constexpr,
    STAGES: gl.constexpr, C_WIDTH: gl.constexpr, C_BUFS: gl.constexpr, QUANTIZE: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [STAGES * 2, 64, 128], a_desc.layout)
    sa_ring = gl.allocate_shared_memory(gl.float32, [STAGES * 2, 64], sa_desc.layout)
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [STAGES * HALVES, 128, 128], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    c_smem = gl.allocate_shared_memory(c_desc.dtype, [C_BUFS * 2, 64, C_WIDTH], c_desc.layout)
    c_full = gl.allocate_shared_memory(gl.int64, [C_BUFS * 2, 1], mbarrier.MBarrierLayout())
    c_ready = gl.allocate_shared_memory(gl.int64, [C_BUFS * 2, 1], mbarrier.MBarrierLayout())
    c_empty = gl.allocate_shared_memory(gl.int64, [C_BUFS * 2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(C_BUFS * 2):
        mbarrier.init(c_full.index(i), count=1)
        mbarrier.init(c_ready.index(i), count=1)
        mbarrier.init(c_empty.index(i), count=1)
    fence_async_shared()
    descs = (a_desc, sa_desc, b_desc, c_desc)
    ring = (a_ring, sa_ring, b_ring, full, empty)
    c_ring = (c_smem, c_full, c_ready, c_empty)
    groups = (counts, ends, order, block_expert)
    sizes = (num_experts, m_tiles, n_tiles, n_size, a_rows, b_blocks, k_blocks)
    # Written out: a tuple bound to a name loses its constexprs.
    if ADD:
        gl.warp_specialize([
            (_consume, (sb_ptr, sc_ptr, ring, c_ring, groups, sizes, WGRAD, ADD, HALVES, STAGES, C_WIDTH, C_BUFS, QUANTIZE, 0)),
            (_consume, (sb_ptr, sc_ptr, ring, c_ring, groups, sizes, WGRAD, ADD, HALVES, STAGES, C_WIDTH, C_BUFS, QUANTIZE, 1)),
            (_load_operands, (descs, ring, groups, sizes, WGRAD, ADD, HALVES, STAGES)),
            (_store_output, (descs, c_ring, groups, sizes, WGRAD, ADD, HALVES, C_WIDTH, C_BUFS)),
            (_load_output, (descs, c_ring, groups, sizes, WGRAD, HALVES, C_WIDTH, C_BUFS)),
        ], [4, 1, 1, 1], [232, 40, 40, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (sb_ptr, sc_ptr, ring, c_ring, groups, sizes, WGRAD, ADD, HALVES, STAGES, C_WIDTH, C_BUFS, QUANTIZE, 0)),
            (_consume, (sb_ptr, sc_ptr, ring, c_ring, groups, sizes, WGRAD, ADD, HALVES, STAGES, C_WIDTH, C_BUFS, QUANTIZE, 1)),
            (_load_operands, (descs, ring, groups, sizes, WGRAD, ADD, HALVES, STAGES)),
            (_store_output, (descs, c_ring, groups, sizes, WGRAD, ADD, HALVES, C_WIDTH, C_BUFS)),
        ], [4, 1, 1], [232, 40, 40])  # fmt: skip
