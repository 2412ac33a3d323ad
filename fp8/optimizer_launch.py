"""Launches of the fused optimizer. What stays from step to step is worked out once: a model of some hundred weights takes a GPU two
milliseconds a step, and the host several times that to look at every weight anew.

A `Plan` updates one weight, a `Table` all small FP32 ones (norms, routers) in one launch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fp8 import optimizer_kernels as kernels
from fp8.launch import cdiv
from fp8.philox import Draw
from fp8.philox_kernels import draw_arguments
from fp8.quantize_kernels import INTERPRETED
from fp8.recipe import BLOCK
from fp8.state_codecs import Bf16, Codec, E4M3Groups, Fp16, Fp32, State, UnsignedGroups
from fp8.states import ROLES, Hyper
from fp8.weight import Weight

FORMATS = {Fp32: "fp32", Bf16: "bf16", Fp16: "fp16", E4M3Groups: "fp8", UnsignedGroups: "fp8"}
# ROWS x NEIGHBOURS: a thread's neighbours must be the ones that its Philox words are for (philox_kernels.words_from).
# By format of v. With FP8 and FP16 two programs fit on a multiprocessor with few spills: one loads while the other works.
WIDE = {"num_warps": 16, "ROWS": 64, "NEIGHBOURS": 16}
NARROW = {"num_warps": 8, "ROWS": 32, "NEIGHBOURS": 16, "maxnreg": 128}
LAUNCH = {"fp32": WIDE, "bf16": WIDE, "fp16": NARROW, "fp8": NARROW}
# On Hopper, for `lean` and `fp8_lm`. NEIGHBOURS 8: a thread stores 16 bytes of FP16 at once, two threads a sector of L2; with 16
# each store would write half sectors. SLOTS: strips on their way to shared memory, as many as two programs leave room for.
PIPELINED = {"fp16": NARROW | {"NEIGHBOURS": 8, "SLOTS": 1}, "fp8": NARROW | {"NEIGHBOURS": 8, "SLOTS": 2}}
PROGRAMS = 2  # of the pipelined kernel, on a multiprocessor
SIZE = 1024  # elements of a program that knows no blocks
OPTIONS = dict(HARDWARE=not INTERPRETED, enable_fp_fusion=False)


@functools.cache
def hopper_sms(device: torch.device) -> int:
    """Multiprocessors of a Hopper GPU; 0 of anything else."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def pipelined_kernel() -> Callable[..., object]:
    """The kernel behind `PIPELINED`. A Plan keeps no kernel: weights refer to plans, and a kernel cannot be copied."""
    from fp8.optimizer_pipelined import update_pipelined  # nothing else here needs Gluon

    return update_pipelined


def covers(weight: Weight, codecs: dict[str, Codec]) -> bool:
    """Whether a kernel here has these formats and this shape; otherwise the reference runs, on any device."""
    known = all(type(codec) in FORMATS for codec in codecs.values()) and weight.main_grad.is_contiguous()
    return known and ((_all_fp32(codecs) and weight.scale_inv is None) or whole_blocks(weight))


def whole_blocks(weight: Weight) -> bool:
    """Whether every piece consists of 128x128 blocks of the local tensor, and of quads of the global one."""
    if weight.data.dim() not in (2, 3) or weight.global_shape[-1] % 4:
        return False
    sizes = [n for start, size, _ in _pieces(weight) for n in (*start[1:], *size[1:])]
    aligned = all(n % BLOCK == 0 for n in (*weight.data.shape[-2:], *sizes))
    return aligned and all(place % 4 == 0 for _, _, place in _pieces(weight))


class Plan:
    """`optimizer.update_ref` of one weight, in one pass; `covers` must hold. Good while the weight's tensors stay."""

    def __init__(self, weight: Weight, state: dict[str, State], codecs: dict[str, Codec]) -> None:
        self.weight, self.state, self.codecs = weight, state, codecs
        data = weight.data
        parts = [state[role] for role in ROLES]
        x, m, v = (part["data"] for part in parts)
        self.stored = _stored(weight) if x is not data else "own"
        self.blocks = not (_all_fp32(codecs) and weight.scale_inv is None)
        if not self.blocks:
            self.tensors, self.constants = (data, x, m, v, data.numel()), {"WEIGHT": self.stored, "SIZE": SIZE, "num_warps": 4}
            return
        x_scale, m_scale, v_scale = (part.get("scale", part["data"]) for part in parts)
        m = m.view(torch.uint8) if m.dtype == torch.float8_e4m3fn else m
        weight_scale = data if weight.scale_inv is None else weight.scale_inv
        codes = data.view(torch.uint8) if data.element_size() == 1 else data
        self.tensors = (codes, weight_scale, x, x_scale, m, m_scale, v, v_scale)
        formats = {name: FORMATS[type(codecs[role])] for name, role in zip(("MASTER", "M", "V"), ROLES, strict=True)}
        self.constants = {"WEIGHT": self.stored, **formats, **LAUNCH[formats["V"]]}
        self.places = list(_places(weight))
        self.programs = PROGRAMS * hopper_sms(data.device)  # of the pipelined kernel
        low = (self.stored, formats["MASTER"], formats["M"]) == ("fp8", "fp16", "fp8") and formats["V"] in PIPELINED
        aligned = all(t.data_ptr() % 16 == 0 for t in (weight.main_grad, *self.tensors[2::2]))
        if self.programs and low and aligned and weight.main_grad.dtype == torch.bfloat16:
            self.options = {"V": formats["V"], **PIPELINED[formats["V"]], "enable_fp_fusion": False}
        else:
            self.programs, self.options = 0, {**self.constants, **OPTIONS}

    def __call__(self, h: Hyper, draw: Draw, grad_scale: Tensor) -> None:
        grad = self.weight.main_grad
        if self.blocks:
            numbers = *draw_arguments(draw), *_scalars(h)
            for (cols, rows, matrices), place in self.places:
                num_blocks = cols * rows * matrices
                sizes = (num_blocks, rows, cols, *place) if self.programs else (rows, cols, *place)
                grid = (min(num_blocks, self.programs or num_blocks),)
                kernel = pipelined_kernel() if self.programs else kernels.update_blocks
                kernel[grid](grad, grad_scale, *self.tensors, *sizes, *numbers, **self.options)
        else:
            grid = (cdiv(self.tensors[-1], SIZE),)
            kernels.update_elements[grid](grad, grad_scale, *self.tensors, *_scalars(h), **self.constants, **OPTIONS)
        if self.stored == "none":
            self.weight.set_(self.codecs["master"].decode(self.state["master"]))


class Table:
    """The same of many FP32 weights that are their own masters, in one launch."""

    def __init__(self, weights: Sequence[tuple[Weight, dict[str, State]]]) -> None:
        rows, places = [], []
        for weight, state in weights:
            tensors = weight.main_grad, weight.data, state["exp_avg"]["data"], state["exp_avg_sq"]["data"]
            places += [(len(rows), part) for part in range(cdiv(weight.numel, SIZE))]
            rows.append((*(t.data_ptr() for t in tensors), weight.numel, int(weight.decay)))
        device = weights[0][0].data.device
        self.table = torch.tensor(rows, dtype=torch.int64, device=device)
        self.places = torch.tensor(places, dtype=torch.int32, device=device)

    def __call__(self, h: Hyper, grad_scale: Tensor) -> None:
        """`h.decay` is that of the weights that decay."""
        kernels.update_table[(len(self.places),)](
            self.table, self.places, grad_scale, *_scalars(h), SIZE=SIZE, num_warps=4, **OPTIONS
        )


def in_table(weight: Weight, state: dict[str, State]) -> bool:
    """Whether a `Table` can take this weight: FP32 throughout, and addresses that wide accesses reach."""
    tensors = weight.main_grad, weight.data, state["exp_avg"]["data"], state["exp_avg_sq"]["data"]
    own = state["master"]["data"] is weight.data
    return own and all(t.dtype == torch.float32 and t.is_contiguous() and t.data_ptr() % 16 == 0 for t in tensors)


def add_stochastic_(weight: Weight, x: Tensor, draw: Draw) -> None:
    """gradient.add_stochastic_ on a GPU; the same bits as its reference."""
    for (cols, rows, matrices), place in _places(weight):
        grid = (cols, 4 * rows, matrices)
        kernels.add_stochastic[grid](weight.main_grad, x.contiguous(), *place, *draw_arguments(draw), num_warps=4)


def _scalars(h: Hyper) -> tuple[float, ...]:
    return h.beta1, 1 - h.beta1, h.beta2, 1 - h.beta2, h.eps, h.decay, h.step_size, h.rsqrt_correction2


def _all_fp32(codecs: dict[str, Codec]) -> bool:
    return all(isinstance(codec, Fp32) for codec in codecs.values())


def _stored(weight: Weight) -> str:
    """What the kernel writes as the weight; "none" where other tiles or a changing recipe need `Weight.set_`."""
    if weight.recipe.adaptive or len(weight.scales):
        return "none"
    if weight.data.dtype == torch.bfloat16:
        return "bf16"
    return "fp8" if weight.spec.fmt == "e4m3" and weight.spec.tile == (BLOCK, BLOCK) else "none"


def _places(weight: Weight) -> Iterator[tuple[tuple[int, int, int], tuple[int, ...]]]:
    """Grid in blocks and the kernels' arguments `row_blocks` to `quads_per_matrix`, for each piece."""
    row_blocks, col_blocks = (size // BLOCK for size in weight.data.shape[-2:])
    quads_per_row = weight.global_shape[-1] // 4
    for (matrix0, row0, col0), (matrices, num_rows, num_cols), place in _pieces(weight):
        grid = (num_cols // BLOCK, num_rows // BLOCK, matrices)
        quads = place // 4, quads_per_row, quads_per_row * weight.global_shape[-2]
        yield grid, (row_blocks, col_blocks, row0 // BLOCK, col0 // BLOCK, matrix0, *quads)


def _pieces(weight: Weight) -> Iterator[tuple[tuple[int, int, int], tuple[int, int, int], int]]:
    """(first matrix, row, column), (matrices, rows, columns) and first global element of each piece."""
    for piece in weight.pieces:
        local = (slice(0, 1),) * (3 - len(piece.local)) + tuple(piece.local)
        place, stride = 0, 1
        for offset, size in zip(reversed(piece.offset), reversed(weight.global_shape), strict=True):
            place, stride = place + offset * stride, stride * size
        yield tuple(s.start or 0 for s in local), tuple(s.stop - (s.start or 0) for s in local), place
