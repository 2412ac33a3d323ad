"""A Gluon kernel that only hands work to three groups of warps: what racecheck says about it, it says about Triton's own code."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _write(out, value, WARPS: gl.constexpr):
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    offset = gl.arange(0, 128, lanes)
    gl.store(out + (gl.program_id(0) * 3 + value - 1) * 128 + offset, gl.full([128], value, gl.int32, lanes))


@gluon.jit
def control_kernel(out):
    gl.warp_specialize([(_write, (out, 1, 4)), (_write, (out, 2, 4)), (_write, (out, 3, 1))], [4, 1], [64, 40])
