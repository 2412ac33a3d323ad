"""Gluon kernels that only hand work to groups of warps: what racecheck says about them, it says about Triton's own code."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _write(out, value, WARPS: gl.constexpr, EXCHANGE: gl.constexpr):
    """512 times `value` at the group's place; with EXCHANGE the warps of the group wait for each other on the way."""
    strided: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    packed: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    offset = gl.arange(0, 512, strided)
    what = gl.full([512], value, gl.int32, strided) + offset * 0
    if EXCHANGE:
        what = gl.convert_layout(gl.convert_layout(what + offset, packed) * 2, strided) - what - 2 * offset
    gl.store(out + (gl.program_id(0) * 3 + value - 1) * 512 + offset, what)


@gluon.jit
def control_kernel(out, EXCHANGE: gl.constexpr):
    """out [CTAs, 3, 512] int32: group g writes g + 1."""
    gl.warp_specialize([
        (_write, (out, 1, 4, EXCHANGE)),
        (_write, (out, 2, 4, EXCHANGE)),
        (_write, (out, 3, 1, EXCHANGE)),
    ], [4, 1], [64, 40])  # fmt: skip
