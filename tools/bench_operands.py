"""What each recipe loses on the operands of a trained model: `python -m tools.bench numerics --run runs/evidence`.

The run's masters are loaded into a BF16 model, one batch of its validation text goes forward and backward, and x, w and dY of the
named GEMMs are taken as they are before quantisation. For each recipe: relative RMS error, mean relative error of an element (of
those that are not zero; what underflows counts with 1), share of elements that underflow, and the relative L2 error of the three
products. Wgrad reads dY quantised along tokens and x re-tiled (the block recipe), as in training.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fp8.quantize import quantize, quantize_t, requantize_t
from fp8.recipe import Recipe
from fp8.weight import Weight, weights
from model.loss import count_valid
from model.transformer import Transformer
from tools.bench_numerics import RECIPES as SYNTHETIC
from tools.bench_numerics import error, lost
from tools.generate import load
from training.data import PackedDataset
from training.errors import UserError
from training.packing import packed_path
from training.run_state import RunState, locate

RECIPES = {name: SYNTHETIC[name] for name in ("tensorwise, hybrid", "tensorwise, E4M3", "block")}


@dataclass(eq=False)
class Operands:
    """An observer that keeps the first activation and the first gradient that a weight quantises."""

    seen: dict[str, Tensor] = field(default_factory=dict)

    def see(self, weight: Weight, role: str, x: Tensor) -> None:
        self.seen.setdefault(role, x.detach().float())


def batch_of(run: str, sequences: int, data: str | None, split: str) -> tuple[Tensor, Tensor]:
    """(tokens, labels) [B, S] of the run's text, on the CPU."""
    config = RunState.read(locate(run, print)).config["data"]
    dataset = PackedDataset(packed_path(data or config["dir"], split), config["seq_len"])
    rows = torch.from_numpy(dataset.rows(np.arange(min(sequences, dataset.num_samples))))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def operands(model: Transformer, tokens: Tensor, labels: Tensor, gemm: str) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """(name, x [T, D], w [F, D], dY [T, F]) of every weight whose name ends in `gemm`, from one forward and backward."""
    found = {name: weight for name, weight in weights(model) if name.endswith(gemm) and weight.data.dim() == 2}
    if not found:
        raise UserError(f"no matrix of the model has a name that ends in {gemm!r}; the first is {next(iter(weights(model)))[0]}")
    for weight in found.values():
        weight.observer = Operands()
    model(tokens, labels, count_valid(tokens, labels)).total.backward()
    for name, weight in found.items():
        seen, weight.observer = weight.observer.seen, None
        yield name, seen["activation"], weight.data.float(), seen["grad"]


def of_elements(got: Tensor, want: Tensor) -> float:
    """Mean relative error of the elements that are not zero."""
    return ((got - want).abs() / want.abs())[want != 0].mean().item()


def measure(x: Tensor, w: Tensor, dy: Tensor, recipe: Recipe) -> dict[str, float]:
    """The figures of one GEMM under one recipe."""
    x_q, w_q, dy_q = quantize(x, recipe.activation), quantize(w, recipe.weight), quantize(dy, recipe.gradient)
    x_t, dy_t = requantize_t(x_q).dequantize()[:, : x.shape[0]], quantize_t(dy, recipe.gradient).dequantize()[:, : x.shape[0]]
    x_v, w_v, dy_v = x_q.dequantize(), w_q.dequantize(), dy_q.dequantize()
    found = {}
    for name, got, want in (("x", x_v, x), ("w", w_v, w), ("dy", dy_v, dy), ("dy_t", dy_t, dy.t()), ("x_t", x_t, x.t())):
        found |= {f"rms {name}": error(got, want), f"element {name}": of_elements(got, want), f"lost {name}": lost(got, want)}
    found |= {"fprop": error(x_v @ w_v.t(), x @ w.t()), "dgrad": error(dy_v @ w_v, dy @ w)}
    return found | {"wgrad": error(dy_t @ x_t.t(), dy.t() @ x)}


COLUMNS = ("rms x", "rms w", "rms dy", "element x", "element w", "element dy", "fprop", "dgrad", "wgrad")
LOST = ("lost x", "lost w", "lost dy", "lost dy_t", "lost x_t")


def main(args: argparse.Namespace) -> None:
    """Prints the table as Markdown."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, _ = load(args.run, "bf16", args.tokenizer, device)
    tokens, labels = (t.to(device) for t in batch_of(args.run, args.sequences, args.data, args.split))
    print(f"{args.run}: {tokens.numel()} tokens of {args.split} text, BF16 model, operands of {args.gemm}\n")
    print("| GEMM, largest / rms of x, w, dY | recipe | RMS error x | w | dY | element x | w | dY | fprop | dgrad | wgrad "
          "| underflow x | w | dY | dY columns | x re-tiled |")  # fmt: skip
    print("|---" * 16 + "|")
    for name, *tensors in operands(model, tokens, labels, args.gemm):
        spread = ", ".join(f"{(t.abs().max() / t.square().mean().sqrt()).item():.0f}" for t in tensors)
        for recipe, value in RECIPES.items():
            m = measure(*tensors, value)
            cells = [f"{m[key]:.4f}" for key in COLUMNS] + [f"{m[key]:.3%}" for key in LOST]
            print(f"| {name}: {spread} | {recipe} | " + " | ".join(cells) + " |", flush=True)
