"""How optimizer states are stored: one codec per format, each the definition that the fused kernel must equal.

    master  exp_avg  exp_avg_sq
    fp32    fp32     fp32        as they are
    fp16                         power-of-two scale per 128x128 block
            bf16     bf16        no scale
                     fp16        power-of-two scale per 1x128 group
            fp8                  E4M3, power-of-two scale per 1x128 group
                     fp8         E5M3 or E4M4 without sign, whichever a 1x128 group needs, power-of-two scale per group:
                                 v >= 0, so the sign's bit buys range or precision; no code means zero
            coat     coat        E4M3 after COAT's range expansion (arXiv 2410.19313), fp32 scale; no kernel, for comparison

Everything is rounded stochastically (coat: to nearest). With power-of-two scales and rounding to nearest the moments freeze:
half an FP8 step is 3 to 6% of v, while a step of beta2 = 0.999 decays it by 0.1%. A scale is stored as one byte, its exponent
+ 127. Shapes: [..., R, C] (1-D counts as one row); groups run along C, the last may be short.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fp8.quantize import cast_fp8, tile_amax
from fp8.quantized import expand_scales
from fp8.recipe import BLOCK, E4M3

GROUP, SQUARE, ELEMENT = (1, BLOCK), (BLOCK, BLOCK), (1, 1)
# First bit and number of the bits of a random word that each state rounds with: no bit serves twice. 13 bits are all that fp16
# drops of fp32; 11 resolve 0.05% of a step of v, 7 resolve 0.8% of one of m, which moves by (1 - beta1) of itself in a step.
FIELDS = {"exp_avg": (1, 7), "exp_avg_sq": (8, 11), "master": (19, 13)}
MIN_FP16 = 2.0**-86  # an fp16 tile whose largest magnitude is smaller counts as zero: every scale stays a normal number
State = dict[str, Tensor]  # parts of one encoded state: "data", and "scale" and others where the format has them


def dither(word: Tensor | None, role: str, dropped: int) -> Tensor | int:
    """What is added before `dropped` low bits are cut off: random below 2^dropped, or one half for rounding to nearest."""
    if word is None:
        return 1 << (dropped - 1)
    start, width = FIELDS[role]
    rest = dropped - width
    return ((word >> start & ((1 << width) - 1)) << rest) + ((1 << rest) >> 1)


def bits_of(x: Tensor) -> Tensor:
    """int64 holding the 32 bits of fp32 values, sign-extended."""
    return x.float().contiguous().view(torch.int32).long()


def float_of(bits: Tensor) -> Tensor:
    """fp32 values with these bits."""
    return bits.int().view(torch.float32)


def cut(x: Tensor, noise: Tensor | int, dropped: int) -> Tensor:
    """fp32 values rounded to `23 - dropped` mantissa bits by adding noise below; representable ones stay as they are."""
    return float_of((bits_of(x) + noise) >> dropped << dropped)


def half_toward_zero(x: Tensor) -> Tensor:
    """fp32 -> fp16, the neighbour nearer to zero."""
    x = cut(x, 0, 13)
    return torch.where(x.abs() < 2.0**-14, (x * 2.0**24).trunc() * 2.0**-24, x).half()


def pow2(exponent: Tensor) -> Tensor:
    """2^exponent as fp32, for exponents -126 .. 127."""
    return float_of((exponent.long() + 127) << 23)


def spread(tiles: Tensor, tile: tuple[int, int], shape: torch.Size) -> Tensor:
    """One value a tile -> one value an element of `shape`."""
    if len(shape) > 1:
        return expand_scales(tiles, tile, shape)
    return expand_scales(tiles.unsqueeze(0), tile, torch.Size((1, *shape))).squeeze(0)


def amax_of(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """Largest magnitude of each tile."""
    return tile_amax(x, tile) if x.dim() > 1 else tile_amax(x.unsqueeze(0), tile).squeeze(0)


def tiles_shape(shape: torch.Size, tile: tuple[int, int]) -> tuple[int, ...]:
    """Shape of a tensor with one value a tile."""
    last = -(-shape[-1] // tile[1])
    return (last,) if len(shape) == 1 else (*shape[:-2], -(-shape[-2] // tile[0]), last)


class Codec(Protocol):
    """A storage format.

    Attributes:
        parts: name -> (dtype, tile that shares one value, what a new state of zeros is filled with).
    """

    parts: dict[str, tuple[torch.dtype, tuple[int, int], float]]

    def encode(self, x: Tensor, word: Tensor | None) -> State:
        """fp32 values -> parts; `word` int64 random words of their shape, None to round to nearest."""
        ...

    def decode(self, state: State) -> Tensor:
        """Parts -> fp32 values; never aliases the state, except for fp32."""
        ...


@dataclass(frozen=True)
class Fp32:
    parts = {"data": (torch.float32, ELEMENT, 0)}

    def encode(self, x: Tensor, word: Tensor | None) -> State:
        return {"data": x}

    def decode(self, state: State) -> Tensor:
        return state["data"]


@dataclass(frozen=True)
class Bf16:
    role: str
    parts = {"data": (torch.bfloat16, ELEMENT, 0)}

    def encode(self, x: Tensor, word: Tensor | None) -> State:
        return {"data": cut(x, dither(word, self.role, 16), 16).bfloat16()}

    def decode(self, state: State) -> Tensor:
        return state["data"].float()


@dataclass(frozen=True)
class Fp16:
    """The scale puts the largest magnitude into [2^14, 2^15): a factor of 2 of headroom above, 2^28 of full precision below."""

    role: str
    tile: tuple[int, int]

    @property
    def parts(self) -> dict[str, tuple[torch.dtype, tuple[int, int], float]]:
        return {"data": (torch.float16, ELEMENT, 0), "scale": (torch.uint8, self.tile, 27)}

    def encode(self, x: Tensor, word: Tensor | None) -> State:
        x = cut(x, dither(word, self.role, 13), 13)
        amax = amax_of(x, self.tile)
        kept = ~(amax < MIN_FP16)
        exponent = torch.where(kept, torch.where(amax.isfinite(), (bits_of(amax) >> 23) - 127 - 14, 0), -100)
        data = half_toward_zero(x * spread(torch.where(kept, pow2(-exponent), 0.0), self.tile, x.shape))
        if self.role == "exp_avg_sq":  # never zero: floored at the smallest code
            data = torch.where(data == 0, torch.tensor(2.0**-24, dtype=torch.float16, device=data.device), data)
        return {"data": data, "scale": (exponent + 127).to(torch.uint8)}

    def decode(self, state: State) -> Tensor:
        return state["data"].float() * spread(pow2(state["scale"].long() - 127), self.tile, state["data"].shape)


@dataclass(frozen=True)
class E4M3Groups:
    """A group with an inf or a NaN has an infinite scale: it must not turn into numbers."""

    role: str = "exp_avg"
    parts = {"data": (E4M3, ELEMENT, 0), "scale": (torch.uint8, GROUP, 127)}

    def encode(self, x: Tensor, word: Tensor | None) -> State:
        amax = bits_of(amax_of(x, GROUP))
        exponent = ((amax >> 23) - 135 + ((amax & 0x7FFFFF) > 0x600000).long()).clamp(min=-120)
        exponent = torch.where(amax < 0x7F800000, torch.where(amax > 0, exponent, 0), 128)
        # FP16 has E4M3's exponents with a bias of 15 instead of 7: at 2^-8 its bits are the code and 7 more of mantissa, in
        # both formats' subnormal range too.
        half = (x * spread(torch.where(exponent < 128, pow2(-exponent) * 2.0**-8, 0.0), GROUP, x.shape)).half()
        bits = half.contiguous().view(torch.int16).long()
        code = ((bits & 0x7FFF) + dither(word, self.role, 7)) >> 7 | (bits < 0).long() << 7
        return {"data": code.to(torch.uint8).view(E4M3), "scale": (exponent + 127).to(torch.uint8)}

    def decode(self, state: State) -> Tensor:
        return state["data"].float() * spread(pow2(state["scale"].long() - 127), GROUP, state["data"].shape)


@dataclass(frozen=True)
class UnsignedGroups:
    """Code c of a group with low = scale % 128 and M = 3 or 4 mantissa bits: 2^(c >> M) * (1 + c % 2^M / 2^M) * 2^(low - 127).

    M is the scale's top bit: 4 (sixteen steps a binade, 16 binades) where that range holds the whole group, else 3 (32
    binades). What is still smaller than 2^-32 of the group's largest v is raised to code 0: such a weight moves less, never
    more.
    """

    role: str = "exp_avg_sq"
    parts = {"data": (torch.uint8, ELEMENT, 0), "scale": (torch.uint8, GROUP, 1)}

    def encode(self, x: Tensor, word: Tensor | None) -> State:
        bits = bits_of(x)
        amax = bits_of(amax_of(x, GROUP))
        amin = 0x7FFFFFFF - amax_of((0x7FFFFFFF - bits).double(), GROUP).long()  # edges are padded with no effect
        coarse = ((amax >> 23) - 31 + ((amax & 0x7FFFFF) > 0x700000).long()).clamp(1, 127)
        fine = (amax >> 23) - 15 + ((amax & 0x7FFFFF) > 0x780000).long()
        is_fine = ((fine >= 1) & (fine <= 127) & (amin >= fine << 23)).long()
        low = torch.where(is_fine > 0, fine, coarse)
        shift = spread(is_fine, GROUP, x.shape)
        fixed = (bits - spread(low << 23, GROUP, x.shape)) << shift
        code = ((fixed + dither(word, self.role, 20)) >> 20).clamp(0, 255)
        return {"data": code.to(torch.uint8), "scale": (low + (is_fine << 7)).to(torch.uint8)}

    def decode(self, state: State) -> Tensor:
        scale = spread(state["scale"].long(), GROUP, state["data"].shape)
        return float_of((state["data"].long() << (20 - (scale >> 7))) + ((scale & 127) << 23))


@dataclass(frozen=True)
class Coat:
    """y = (|x| / center)^power fills E4M3's range; center = sqrt(max * min), power = log(2^16.6) / log(max / min) >= 1.

    The minimum is that of the non-zero values, but not below max * 2^-17: one outlier must not compress the rest.
    """

    role: str
    parts = {
        "data": (E4M3, ELEMENT, 0),
        "scale": (torch.float32, GROUP, 1),
        "power": (torch.float32, GROUP, 1),
        "center": (torch.float32, GROUP, 1),
    }

    def encode(self, x: Tensor, word: Tensor | None) -> State:
        a = x.abs()
        top = amax_of(a, GROUP)
        floor = spread(top * 2.0**-17, GROUP, x.shape)
        inverse = torch.where(a > 0, 1 / torch.maximum(a, floor), 0.0)  # amax of the inverse is the minimum's
        low = 1 / amax_of(inverse, GROUP)
        live = (top > 2.0**-100) & top.isfinite()
        top, low = torch.where(live, top, 2.0**-100), torch.where(live, low, 2.0**-100)
        ratio = (top / low).clamp(min=1 + 2.0**-10).log2()
        power = ((16.6 / ratio * 16).floor() / 16).clamp(1, 64)
        center = top.sqrt() * low.sqrt()
        scale = (top / center).pow(power) / 448
        y = (a / spread(center, GROUP, x.shape)).pow(spread(power, GROUP, x.shape)) / spread(scale, GROUP, x.shape)
        if self.role == "exp_avg_sq":
            y = y.clamp(min=2.0**-9)
        data = cast_fp8(torch.copysign(y, x), E4M3)
        return {"data": data, "scale": scale, "power": power, "center": center}

    def decode(self, state: State) -> Tensor:
        q = state["data"].float()
        scale, power, center = (spread(state[part], GROUP, q.shape) for part in ("scale", "power", "center"))
        return torch.copysign((q.abs() * scale).pow(1 / power) * center, q) * (q != 0)


CODECS: dict[str, dict[str, Codec]] = {
    "master": {"fp32": Fp32(), "fp16": Fp16("master", SQUARE)},
    "exp_avg": {"fp32": Fp32(), "bf16": Bf16("exp_avg"), "fp8": E4M3Groups(), "coat": Coat("exp_avg")},
    "exp_avg_sq": {
        "fp32": Fp32(), "bf16": Bf16("exp_avg_sq"), "fp16": Fp16("exp_avg_sq", GROUP), "fp8": UnsignedGroups(),
        "coat": Coat("exp_avg_sq"),
    },
}  # fmt: skip


def new_state(codec: Codec, shape: torch.Size, device: torch.device) -> State:
    """Parts of a state whose values are zero (as near to zero as the format goes)."""
    return {
        part: torch.zeros(tiles_shape(shape, tile), dtype=dtype, device=device).fill_(fill) if fill else
        torch.zeros(tiles_shape(shape, tile), dtype=dtype, device=device)
        for part, (dtype, tile, fill) in codec.parts.items()
    }  # fmt: skip


def codec_bytes(codec: Codec) -> float:
    """Bytes of an element, its share of the scales included."""
    return sum(dtype.itemsize / (tile[0] * tile[1]) for dtype, tile, _ in codec.parts.values())
