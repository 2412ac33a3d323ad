"""`python -m tools.bench memory`: the bytes that training keeps between forward and backward, by stage and tensor class.

    python -m tools.bench memory                                         a small model on the CPU
    python -m tools.bench memory --sequence-parallel                     also sequence parallel x staging x FP8, on two ranks
    python -m tools.bench memory --device cuda --batch 4 --seq-len 4096  three of Ling-mini's layers
    python -m tools.bench memory --per-layer                             a MoE layer, FP8 by stage against BF16, no other table

kept: alive after forward. peak: most alive during backward, beside weights, gradients and whatever lived before. Per layer: the
difference that one more layer makes. FLOPs: of GEMMs and attention (all S x S scores), forward and backward. On a GPU the same
figures also come from the allocator. The references that a CPU runs hold dequantised operands for a moment: its peaks are high.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fp8.recipe import RECIPES, recipe_named
from model.config import ModelConfig
from model.loss import count_valid
from model.transformer import Transformer, initial_values
from parallel.mesh import Mesh, build_mesh, close_mesh
from tools.arguments import STAGES, add_out, at_least, make_parser, model_of, possible, write_json
from tools.memory_account import LiveBytes, allocated
from tools.output import need_gpu
from training.errors import UserError

# Ling-mini's proportions at a quarter of its width; 512 tokens.
SMALL = ModelConfig(
    vocab_size=1024, hidden_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=1, head_dim=128,
    intermediate_size=1280, num_experts=8, num_experts_per_tok=4, moe_intermediate_size=128, n_group=4, topk_group=2,
    max_position_embeddings=4096, initializer_range=0.02, loss_chunk=512,
)  # fmt: skip
PER_LAYER = (("bf16", 0), ("block", 0), ("block", 1), ("block", 2), ("block", 3))  # recipe, stage; the first is the yardstick


@dataclass(frozen=True)
class Account:
    """One forward and backward. Bytes; on a GPU `cuda_*` are the allocator's."""

    kept: int
    peak: int
    stash: int
    flops: int
    classes: dict[str, int]
    freed: list[tuple[str, int]] = field(repr=False)
    cuda_kept: int = 0
    cuda_peak: int = 0


def build(config: ModelConfig, recipe: str, stages: Any, device: torch.device, mesh: Mesh | None = None) -> Transformer:
    """A model with values, in BF16 where it is not FP8."""
    with torch.device(device):
        model = Transformer(config, recipe_named(recipe), mesh, torch.bfloat16, stages)
    for _, weight, value in initial_values(model, 0):
        weight.set_(value)
    return model.train()


def sample_tokens(config: ModelConfig, batch: int, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(tokens, labels) [B, S]."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (batch, seq_len + 1), generator=generator).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def measure(model: Transformer, tokens_BS: Tensor, labels_BS: Tensor) -> Account:
    """Accounts for one forward and backward, after one that makes gradient buffers (and, on a GPU, compiles kernels)."""
    device, num_valid = tokens_BS.device, count_valid(tokens_BS, labels_BS)
    counter = FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION)
    with counter if device.type == "cpu" else nullcontext():  # it does not know our kernels, nor grouped queries on a GPU
        model(tokens_BS, labels_BS, num_valid).total.backward()
    gc.collect()
    before = allocated(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with LiveBytes() as live:
        losses = model(tokens_BS, labels_BS, num_valid)
        kept, classes, stash = live.total, live.snapshot(), model.stash.account.total
        cuda_kept = allocated(device) - before
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        live.reset_peak()
        losses.total.backward()
        peak, freed = live.peak, live.freed
    cuda_peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
    flops = counter.get_total_flops() if device.type == "cpu" else 0
    return Account(kept, peak, stash, flops, classes, freed, cuda_kept, cuda_peak)


def _attention_flops(q: Sequence[int], k: Sequence[int], *_: Any, **__: Any) -> int:
    b, h, s, d = q
    return 4 * b * h * s * k[2] * d


def _attention_backward_flops(_: Any, q: Sequence[int], k: Sequence[int], *__: Any, **___: Any) -> int:
    return 5 * _attention_flops(q, k) // 2


_CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}


# ---------------------------------------------------------------- tables


def stage_table(config: ModelConfig, recipe: str, batch: int, seq_len: int, device: torch.device) -> dict[int, dict[str, Any]]:
    """Stage -> totals, and bytes a token of one more MoE and one more dense layer."""
    grown = {
        "moe": replace(config, num_hidden_layers=config.num_hidden_layers + 1),
        "dense": replace(
            config, num_hidden_layers=config.num_hidden_layers + 1, first_k_dense_replace=config.first_k_dense_replace + 1
        ),
    }
    rows, num_tokens = {}, batch * seq_len
    for stage in STAGES:
        tokens, labels = sample_tokens(config, batch, seq_len, device)
        whole = measure(build(config, recipe, stage, device), tokens, labels)
        row = asdict(whole) | {"freed": None}
        for kind, larger in grown.items():
            more = measure(build(larger, recipe, stage, device), tokens, labels)
            row[f"{kind}_layer"] = (more.kept - whole.kept) / num_tokens
            row[f"{kind}_flops"] = (more.flops - whole.flops) / num_tokens
        rows[stage] = row
    return rows


def per_layer(config: ModelConfig, batch: int, seq_len: int, device: torch.device) -> dict[str, float]:
    """Recipe and stage of `PER_LAYER` ("block/2") -> bytes a token that one more MoE layer keeps; on a GPU by the allocator."""
    grown = replace(config, num_hidden_layers=config.num_hidden_layers + 1)
    tokens, labels = sample_tokens(config, batch, seq_len, device)
    rows = {}
    for recipe, stage in PER_LAYER:
        kept = []
        for c in (config, grown):
            account = measure(build(c, recipe, stage, device), tokens, labels)
            kept.append(account.cuda_kept if device.type == "cuda" else account.kept)
        rows[f"{recipe}/{stage}"] = (kept[1] - kept[0]) / tokens.numel()
    return rows


def print_per_layer(rows: dict[str, float]) -> None:
    """Markdown."""
    first = next(iter(rows.values()))
    print("| recipe | stage | one MoE layer, bytes a token | |\n|---|---|---|---|")
    for key, kept in rows.items():
        print(f"| {key.replace('/', ' | ')} | {kept:,.0f} | {100 * (kept / first - 1):+.0f}% |")


def print_stages(rows: dict[int, dict[str, Any]], num_tokens: int) -> None:
    """Markdown: totals by stage, then by tensor class."""
    first = rows[0]
    columns = ("stage", "kept, MiB", "peak in backward, MiB", "MoE layer, bytes/token", "dense", "MoE layer, extra FLOPs", "dense")
    print("| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|")
    for stage, row in rows.items():
        counted = first["flops"] > 0
        extra = {k: f"{100 * (row[f'{k}_flops'] / first[f'{k}_flops'] - 1):+.1f}%" if counted else "" for k in ("moe", "dense")}
        print(
            f"| {stage} | {row['kept'] / 2**20:.2f} ({100 * (row['kept'] / first['kept'] - 1):+.0f}%) "
            f"| {row['peak'] / 2**20:.2f} ({100 * (row['peak'] / first['peak'] - 1):+.0f}%) "
            f"| {row['moe_layer']:,.0f} | {row['dense_layer']:,.0f} | {extra['moe']} | {extra['dense']} |"
        )
    names = sorted({n for row in rows.values() for n in row["classes"]}, key=lambda n: -first["classes"].get(n, 0))
    print("\n| kept after forward, bytes/token | " + " | ".join(f"stage {s}" for s in rows) + " |")
    print("|---" * (len(rows) + 1) + "|")
    for name in names:
        print(f"| {name} | " + " | ".join(f"{row['classes'].get(name, 0) / num_tokens:,.0f}" for row in rows.values()) + " |")
    print("| of it in the Stash | " + " | ".join(f"{row['stash'] / num_tokens:,.0f}" for row in rows.values()) + " |")
    if first["cuda_kept"]:
        print("\n| stage | kept: account / allocator, MiB | difference | peak: allocator, MiB |\n|---|---|---|---|")
        for stage, row in rows.items():
            difference = 100 * (row["kept"] / row["cuda_kept"] - 1)
            print(f"| {stage} | {row['kept'] / 2**20:.1f} / {row['cuda_kept'] / 2**20:.1f} | {difference:+.2f}% "
                  f"| {row['cuda_peak'] / 2**20:.1f} |")  # fmt: skip


def print_cube(kept: dict[str, Account]) -> None:
    """The 2 x 2 x 2 table: sequence parallel x staging x FP8 storage."""
    base = kept["off/0/bf16"]
    print("\n| sequence parallel | stage | stored | kept, MiB | peak in backward, MiB |\n|---|---|---|---|---|")
    for key, account in kept.items():
        sequence, stage, recipe = key.split("/")
        print(
            f"| {sequence} | {stage} | {'FP8 (block)' if recipe == 'block' else 'BF16'} "
            f"| {account.kept / 2**20:.2f} ({100 * (account.kept / base.kept - 1):+.0f}%) "
            f"| {account.peak / 2**20:.2f} ({100 * (account.peak / base.peak - 1):+.0f}%) |"
        )


def cube_rank(rank: int, store: str, config: ModelConfig, batch: int, seq_len: int, stage: int, out: str) -> None:
    """One of two tp ranks: all eight settings; rank 0 writes its accounts (the ranks' are equal but for routing)."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found, device = {}, torch.device("cpu")
    for sequence in (False, True):
        mesh = build_mesh(tp=2, device=device, sequence_parallel=sequence)
        tokens, labels = sample_tokens(config, batch, seq_len, device)
        for stages in (0, stage):
            for recipe in ("bf16", "block"):
                account = measure(build(config, recipe, stages, device, mesh), tokens, labels)
                found[f"{'on' if sequence else 'off'}/{stages}/{recipe}"] = asdict(replace(account, freed=[]))
    if rank == 0:
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    close_mesh()


def cube(config: ModelConfig, batch: int, seq_len: int, stage: int) -> dict[str, Account]:
    """Runs `cube_rank` on two processes, which split the experts' and the shared expert's width."""
    config = replace(config, moe_intermediate_size=max(config.moe_intermediate_size, 256))
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/store", config, batch, seq_len, stage, f"{folder}/out.json")
        torch.multiprocessing.spawn(cube_rank, arguments, nprocs=2)
        return {k: Account(**v) for k, v in json.loads(Path(folder, "out.json").read_text(encoding="utf-8")).items()}


def main(argv: list[str]) -> None:
    """Prints the tables; --out writes every number as JSON."""
    parser = make_parser("bench memory", __doc__)
    parser.add_argument("--config", help="take the model of this run; by default a small one, on a GPU Ling-mini's")
    parser.add_argument("--layers", type=at_least(1), help="layers of the model, the dense ones included")
    parser.add_argument("--recipe", choices=RECIPES, default="block", help="fp8.recipe")
    parser.add_argument("--batch", type=at_least(1), default=1, help="sequences")
    parser.add_argument("--seq-len", type=at_least(1), default=512, help="tokens of a sequence")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where it runs")
    parser.add_argument("--sequence-parallel", action="store_true", help="also the 2 x 2 x 2 table, on two CPU ranks")
    parser.add_argument("--stage", type=int, choices=STAGES[1:], default=4, help="stage of the 2 x 2 x 2 table")
    parser.add_argument("--per-layer", action="store_true", help="one MoE layer, FP8 by stage against BF16, instead of the tables")
    add_out(parser)
    args = parser.parse_args(argv)
    if args.device != "cpu":
        need_gpu(f"--device {args.device}")
    # on a GPU Ling-mini's layers, with a vocabulary that is quicker to initialise
    config = SMALL if args.device == "cpu" else replace(ModelConfig(), num_hidden_layers=3, vocab_size=16384)
    if args.config:
        config = model_of(args.config)
    if args.layers:
        config = possible(replace(config, num_hidden_layers=args.layers))
    device, num_tokens = torch.device(args.device), args.batch * args.seq_len
    if args.sequence_parallel and num_tokens % 2:
        raise UserError(f"--sequence-parallel: two ranks cannot share {args.batch} x {args.seq_len} tokens evenly")
    recipe = "block against bf16" if args.per_layer else args.recipe
    print(f"{device}, torch {torch.__version__}, {recipe}: {config.num_hidden_layers} layers, {num_tokens} tokens")
    if args.per_layer:
        layer = per_layer(config, args.batch, args.seq_len, device)
        print_per_layer(layer)
        return write_json(args.out, layer)
    rows = stage_table(config, args.recipe, args.batch, args.seq_len, device)
    print_stages(rows, num_tokens)
    table = cube(config, args.batch, args.seq_len, args.stage) if args.sequence_parallel else {}
    if table:
        print_cube(table)
    write_json(args.out, {"stages": rows, "cube": {k: asdict(v) for k, v in table.items()}})
