"""What travels between ranks, and what it costs: `python -m tools.bench comm --model` on one GPU, or under torchrun on real wires.

With --model, one process stands for each rank of an ep (and tp) axis: the bytes and the time of casts, packing and unpacking are
measured; the time on the wire is computed, bytes over bandwidth, and labelled so. Under torchrun each leg is measured whole
(bench_wire.py).

Shapes: T tokens a rank, D features, E experts, k experts a token, n ranks, M rows sent by a rank.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from fp8.grouped_gemm import padded_rows
from fp8.permute import Permutation, build_permutation, permute, sum_rows, unpermute_sum
from fp8.quantize import quantize
from fp8.quantized import Quantized
from fp8.recipe import BLOCK, E4M3, Recipe
from fp8.route import select_experts
from parallel.collectives import rows_of_ranks
from parallel.grad_auto_scale import add_codes, decode_codes, encode_codes, scale_of
from parallel.grad_wire import PACKED, pack_tiles, sum_tiles
from parallel.mesh import build_mesh, close_mesh
from parallel.payload import RowFormat, pack, sum_packed, unpack
from parallel.send_plan import order_ref, own_slots, slot_bytes
from tools import bench_wire
from tools.arguments import add_out, at_least, make_parser, write_json
from tools.bench_kernels import Timer
from tools.output import need_gpu, shown
from training.errors import UserError

# bytes per second and direction of one rank: NVLink as NCCL's all-to-all of 256 MB uses it on H200, and two network cards
WIRES = {"NVLink 250 GB/s": 250e9, "400 Gb/s": 50e9, "100 Gb/s": 12.5e9}
ROW = Recipe.block().wire


@dataclass
class Leg:
    """One leg in one format. Times in microseconds.

    Attributes:
        tokens: or parameters.
        cast: quantise and dequantise. pack: gather, pack, unpack and put in place, or sum.
        nbytes: sent by a rank to others, with scales and padding.
    """

    leg: str
    tokens: int
    ranks: int
    fmt: str
    nbytes: int
    cast: float = 0.0
    pack: float = 0.0

    def total(self, bandwidth: float) -> float:
        return self.cast + self.pack + 1e6 * self.nbytes / bandwidth


def choose(args: argparse.Namespace, tokens: int, device: torch.device) -> Tensor:
    """Expert ids [T, k] of random scores, group-limited as Ling routes."""
    scores = torch.rand(tokens, args.experts, device=device)
    return select_experts(scores, args.groups, args.topk_groups, args.topk)


def add_up(packed: Tensor, form: RowFormat, row_Tn: Tensor) -> Tensor | None:
    """A combine's sum over ranks of packed FP8 rows; nothing for other formats, whose rows carry no scales."""
    return sum_packed(packed, form, row_Tn, torch.bfloat16) if form.num_scales else None


def times(timer: Timer | None, calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    return timer(calls) if timer else dict.fromkeys(calls, 0.0)


def local_permutation(ids_Tk: Tensor, token_M: Tensor, rank_M: Tensor, local: int) -> Permutation:
    """The permutation of a rank that receives what this one sends: by symmetry, as many rows on as many experts."""
    ids = ids_Tk[token_M] - (rank_M * local)[:, None]
    return build_permutation(torch.where((ids >= 0) & (ids < local), ids, -1), local)


def model_dispatch(args: argparse.Namespace, timer: Timer | None, tokens: int, ranks: int, device: torch.device) -> list[Leg]:
    """Dispatch (x forward, dY backward) and combine (y forward, dX backward), BF16 and FP8."""
    local, ids = args.experts // ranks, choose(args, tokens, device)
    to_rank_Tn = (ids[:, :, None] // local == torch.arange(ranks, device=device)).any(1)
    num_rows = int(to_rank_Tn.sum())
    token_M, rank_M, row_Tn = order_ref(to_rank_Tn, num_rows)
    away = int((rank_M != 0).sum())
    perm = local_permutation(ids, token_M, rank_M, local)
    live, rows_R = perm.groups.block_expert_B, perm.groups.max_rows
    x = torch.randn(tokens, args.hidden, device=device, dtype=torch.bfloat16)
    y_RD = torch.randn(rows_R, args.hidden, device=device, dtype=torch.bfloat16)
    partial = unpermute_sum(y_RD, perm)
    legs = []
    for fmt, q in (("bf16", Quantized.unscaled(x)), ("fp8", quantize(x, ROW))):
        for leg, extra in (("dispatch x", 6 * args.topk), ("dispatch dY", 0)):
            slots = torch.zeros(num_rows, extra, dtype=torch.uint8, device=device) if extra else None
            form, payload = RowFormat.of(q, extra), pack(q, token_M, slots)
            found = times(
                timer,
                {
                    "cast": lambda: quantize(x, ROW),
                    "pack": lambda q=q, slots=slots: pack(q, token_M, slots),
                    "unpack": lambda p=payload, f=form: unpack(p, f, None, perm.slot_R, args.topk, live),
                },
            )
            cast = found["cast"] if fmt == "fp8" else 0.0
            legs.append(Leg(leg, tokens, ranks, fmt, away * form.row_bytes, cast, found["pack"] + found["unpack"]))
        wire = quantize(partial, ROW) if fmt == "fp8" else Quantized.unscaled(partial)
        packed, wire_form = pack(wire), RowFormat.of(wire)
        found = times(
            timer,
            {
                "cast": lambda: quantize(partial, ROW),
                "pack": lambda w=wire: pack(w),
                "sum": lambda: (unpermute_sum(y_RD, perm), sum_rows(partial, row_Tn)),
                "fp8 sum": lambda p=packed, f=wire_form: (unpermute_sum(y_RD, perm), add_up(p, f, row_Tn)),
            },
        )
        casts, summed = (found["cast"] + found["pack"], found["fp8 sum"]) if fmt == "fp8" else (0.0, found["sum"])
        nbytes = away * wire_form.row_bytes
        legs += [Leg(leg, tokens, ranks, fmt, nbytes, casts, summed) for leg in ("combine y", "combine dX")]
    return legs


def model_gathered(args: argparse.Namespace, timer: Timer | None, tokens: int, ranks: int, device: torch.device) -> list[Leg]:
    """Dispatch where every rank gets every token: all that comes is unpacked once, and rows are made from it."""
    local, k = args.experts // ranks, args.topk
    ids = choose(args, tokens, device)
    here = torch.where(ids < local, ids, -1).repeat(ranks, 1)  # the first rank's, of as many tokens from each
    perm, weights = build_permutation(here, local, padded_rows(here.numel(), local)), torch.rand(tokens, k, device=device)
    x, legs = torch.randn(tokens, args.hidden, device=device, dtype=torch.bfloat16), []
    for fmt, q in (("bf16", Quantized.unscaled(x)), ("fp8", quantize(x, ROW))):
        for leg, extra in (("gathered x", slot_bytes(k)), ("gathered dY", 0)):
            make = lambda q=q, extra=extra: pack(q, None, own_slots(ids, weights) if extra else None)  # noqa: E731
            form, arrived = RowFormat.of(q, extra), make().repeat(ranks, 1)
            rows = lambda a=arrived, f=form: permute(unpack(a, f), perm)  # noqa: E731
            found = times(timer, {"cast": lambda: quantize(x, ROW), "pack": make, "unpack": rows})
            cast, nbytes = found["cast"] if fmt == "fp8" else 0.0, (ranks - 1) * tokens * form.row_bytes
            legs.append(Leg(leg, tokens, ranks, fmt, nbytes, cast, found["pack"] + found["unpack"]))
    return legs


def model_tp(args: argparse.Namespace, timer: Timer | None, tokens: int, ranks: int, device: torch.device) -> list[Leg]:
    """The gather before a column-parallel layer and the reduce-scatter after a row-parallel one, T tokens on the axis."""
    x = torch.randn(tokens // ranks, args.hidden, device=device, dtype=torch.bfloat16)
    whole = torch.randn(tokens, args.hidden, device=device, dtype=torch.bfloat16)
    q, q_whole = quantize(x, ROW), quantize(whole, ROW)
    form, all_rows = RowFormat.of(q), pack(q_whole)
    calls = {
        "quantize": lambda: quantize(x, ROW),
        "pack": lambda: pack(q),
        "unpack": lambda: unpack(all_rows, form),
        "quantize all": lambda: quantize(whole, ROW),
        "pack all": lambda: pack(q_whole),
        "sum": lambda: sum_packed(all_rows, form, rows_of_ranks(len(x), ranks, device), torch.bfloat16),
    }
    found = times(timer, calls)
    others, row = (ranks - 1) * len(x), 2 * args.hidden
    return [
        Leg("tp gather", tokens, ranks, "bf16", others * row),
        Leg("tp gather", tokens, ranks, "fp8", others * form.row_bytes, found["quantize"], found["pack"] + found["unpack"]),
        Leg("tp reduce-scatter", tokens, ranks, "bf16", others * row),
        Leg(
            "tp reduce-scatter",
            tokens,
            ranks,
            "fp8",
            others * form.row_bytes,
            found["quantize all"],
            found["pack all"] + found["sum"],
        ),
    ]


def model_gradients(timer: Timer | None, params: int, ranks: int, device: torch.device) -> list[Leg]:
    """Gradients of F parameters to their owners, and the owners' new weights to all (ZeRO), in each format.

    BF16 and FP32 are summed within the wire's time, as NCCL's reduce-scatter does.
    """
    flat, own = torch.randn(params, device=device), torch.empty(params // ranks, device=device)
    scale, packed = scale_of(flat), pack_tiles(flat)
    codes = torch.empty(params, dtype=E4M3, device=device)
    encode_codes(flat, scale, codes)
    low, weights = flat.bfloat16(), torch.zeros(params, dtype=torch.uint8, device=device)
    arrived, wide = weights.clone(), low.clone()
    calls = {
        "bf16 cast": lambda: (flat.to(torch.bfloat16), own.copy_(low[: len(own)])),
        "fp8 cast": lambda: pack_tiles(flat),
        "fp8 sum": lambda: sum_tiles(packed, ranks, own),
        "fp8_lm cast": lambda: encode_codes(flat, scale_of(flat), codes),
        "fp8_lm sum": lambda: decode_codes(add_codes(codes.view(ranks, -1)), scale, own),
        "fp8 move": lambda: (arrived[: len(own)].copy_(weights[: len(own)]), weights.copy_(arrived)),
        "bf16 move": lambda: (wide[: len(own)].copy_(low[: len(own)]), low.copy_(wide)),
    }
    found, away = times(timer, calls), (ranks - 1) * (params // ranks)
    legs = [Leg("gradients", params, ranks, "fp32", 4 * away)]
    for fmt, size in (("bf16", 2.0), ("fp8", PACKED.row_bytes / BLOCK), ("fp8_lm", 1.0)):
        legs.append(Leg("gradients", params, ranks, fmt, int(size * away), found[f"{fmt} cast"], found.get(f"{fmt} sum", 0.0)))
    for fmt, size in (("bf16", 2.0), ("fp8", 1 + 4 / BLOCK**2)):
        legs.append(Leg("weights", params, ranks, fmt, int(size * away), 0.0, found[f"{fmt} move"]))
    return legs


def show(legs: list[Leg], timed: bool) -> None:
    """A table; FP8 rows end with FP8 over BF16. `size` is tokens or parameters. `timed`: casts and packing are."""
    title = f"{'leg':18} {'size':>10} {'ranks':>5} {'':6} {'MB sent':>8} {'/bf16':>6}"
    heads = "".join(f" {name:>16} {'/bf16':>6}" for name in WIRES)
    print(f"{title} {'cast us':>8} {'pack us':>8} |{heads}   (us; wire computed, the rest measured)")
    base = {(x.leg, x.tokens, x.ranks): x for x in legs if x.fmt == "bf16"}
    for x in legs:
        b = base[x.leg, x.tokens, x.ranks]
        line = f"{x.leg:18} {x.tokens:10} {x.ranks:5} {x.fmt:6} {x.nbytes / 1e6:8.1f} {x.nbytes / max(b.nbytes, 1):6.3f}"
        line += "".join(f" {shown(us if timed else None, '8.1f')}" for us in (x.cast, x.pack)) + " |"
        line += "".join(f" {x.total(w):16.1f} {x.total(w) / max(b.total(w), 1e-9):6.2f}" for w in WIRES.values())
        print(line)


def main(argv: Sequence[str]) -> None:
    parser, whole = make_parser("bench comm", __doc__), at_least(1)
    parser.add_argument("--model", action="store_true", help="one process: wire times computed from bandwidths")
    parser.add_argument("--tokens", type=whole, nargs="+", help="of a rank; 4096 16384 65536, without a GPU 256")
    size = f"parameters: multiples of {BLOCK} x ranks, under torchrun {bench_wire.UNIT} x ranks; two sizes, without a GPU one small"
    parser.add_argument("--params", type=whole, nargs="+", help=f"of gradients and weights, {size}")
    parser.add_argument("--ranks", type=at_least(2), nargs="+", default=[2, 8], help="ep sizes, with --model")
    parser.add_argument("--tp", type=at_least(2), nargs="+", default=[2], help="tp sizes, with --model")
    parser.add_argument("--hidden", type=whole, default=2048, help="features of a token")
    parser.add_argument("--experts", type=whole, default=256, help="of all ranks")
    parser.add_argument("--topk", type=whole, default=8, help="experts of a token")
    parser.add_argument("--groups", type=whole, default=8, help="of experts")
    parser.add_argument("--topk-groups", type=whole, default=4, help="from which a token's experts come")
    parser.add_argument("--rounds", type=whole, default=15, help="of which the median counts")
    parser.add_argument("--peer-copies", action="store_true", help="under torchrun: parallel.peer_copies's way for gathered rows")
    add_out(parser)
    args = parser.parse_args(argv)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if not args.model and world < 2:
        raise UserError("start it with torchrun --nproc-per-node 2 (or more) -m tools.bench comm, or give --model")
    if args.peer_copies and not args.model:
        need_gpu("--peer-copies")
    big, unit = torch.cuda.is_available(), BLOCK if args.model else bench_wire.UNIT
    ranks = args.ranks if args.model else [world]
    args.tokens = args.tokens or ([4096, 16384, 65536] if big else [256])
    args.params = args.params or ([1 << 24, 1 << 28] if big else [math.lcm(*ranks) * bench_wire.UNIT])
    bench_wire.check_sizes(args, ranks, unit)
    torch.manual_seed(0)
    legs = on_one(args) if args.model else on_all(args)
    if int(os.environ.get("RANK", "0")) == 0:
        write_json(args.out, [asdict(x) for x in legs])


def on_one(args: argparse.Namespace) -> list[Leg]:
    """One process stands for all ranks."""
    cuda, legs = torch.cuda.is_available(), []
    device, timer = torch.device("cuda" if cuda else "cpu"), Timer(args.rounds) if cuda else None
    if not cuda:
        print("no GPU: bytes only; casts and packing are not measured, and the sums are without them")
    for tokens in args.tokens:
        for ranks in args.ranks:
            legs += model_dispatch(args, timer, tokens, ranks, device) + model_gathered(args, timer, tokens, ranks, device)
        for ranks in args.tp:
            legs += model_tp(args, timer, tokens, ranks, device)
    for params in args.params:
        for ranks in args.ranks:
            legs += model_gradients(timer, params, ranks, device)
    show(legs, cuda)
    return legs


def on_all(args: argparse.Namespace) -> list[bench_wire.Measured]:
    """Every rank of torchrun's measures; the first prints."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    mesh = build_mesh(1, int(os.environ.get("WORLD_SIZE", "1")), device, peer_copies=args.peer_copies)
    legs = bench_wire.measure(args, mesh, device)
    if mesh.world.rank == 0:
        bench_wire.show(legs)
    close_mesh()
    return legs
