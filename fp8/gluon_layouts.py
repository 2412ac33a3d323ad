"""What kernels in Gluon share: layouts, which `tl` does not have, and a masked store.

Under Triton's interpreter, where layouts mean nothing, the same names do without.

Register bases, lanes and warps of a layout are what decides which values a thread holds; see the kernels for why.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fp8.quantize_kernels import INTERPRETED

if INTERPRETED:
    jit = triton.jit

    def sliced(dim: int, layout: object) -> None:
        """No layout."""

    def places(SIZE: tl.constexpr, LAYOUT: object) -> tl.tensor:
        """0 .. SIZE - 1."""
        return tl.arange(0, SIZE)

    def filled_like(x: tl.tensor, value: float) -> tl.tensor:
        """`value` in the shape and dtype of x."""
        return tl.full(x.shape, value, x.dtype)

    def converted(x: tl.tensor, LAYOUT: object) -> tl.tensor:
        """x."""
        return x

else:
    jit = gluon.jit
    sliced = gl.SliceLayout

    @jit
    def places(SIZE: gl.constexpr, LAYOUT: gl.constexpr):
        """0 .. SIZE - 1 in a layout."""
        return gl.arange(0, SIZE, layout=LAYOUT)

    @jit
    def filled_like(x, value):
        """`value` in the shape, dtype and layout of x."""
        return gl.full_like(x, value)

    @jit
    def converted(x, LAYOUT: gl.constexpr):
        """x in another layout."""
        return gl.convert_layout(x, LAYOUT)


@jit
def store(at, value, ok, FULL: tl.constexpr):
    """Where `ok` holds, or everywhere: a tile that lies in the matrix as a whole needs no mask."""
    if FULL:
        tl.store(at, value)
    else:
        tl.store(at, value, mask=ok)
