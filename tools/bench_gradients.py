"""What a recipe costs at the same weights: `python -m tools.bench gradients --run runs/tiny --recipes bf16,block`.

A trained run's masters are loaded under each recipe in turn. On the same text each computes the validation loss and, on several
batches, every weight's gradient; `fp32` is what they are compared with. A recipe that trains worse although nothing shows here
does not do it by the arithmetic of single steps.

    validation  nats a token, and its distance from fp32's
    error       |g - g_fp32| / |g_fp32| of one batch's gradient, mean over batches
    lasting     the same of the mean gradient over all batches: what does not average out
    projection  <g, g_fp32> / |g_fp32|^2 of the mean gradients: below 1 the recipe makes gradients shorter
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from fp8.recipe import RECIPES
from fp8.weight import weights
from model.loss import count_valid
from model.router import routers
from model.transformer import Transformer
from tools.arguments import at_least, make_parser, names
from tools.bench_numerics import error
from tools.bench_operands import batch_of
from tools.generate import load
from training.errors import UserError

REFERENCE = "fp32"
Gradients = list[dict[str, Tensor]]  # of each batch: name -> gradient


def kind_of(name: str) -> str:
    """The name without the layer's number."""
    return ".".join(part for part in name.split(".") if not part.isdigit())


@torch.no_grad()
def loss_of(model: Transformer, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Mean cross-entropy, nats a token."""
    model.eval()
    losses = [model(tokens, labels, count_valid(tokens, labels)) for tokens, labels in batches]
    return (sum(x.ce_sum.item() for x in losses)) / sum(int(x.num_ce) for x in losses)


def gradients_of(model: Transformer, batches: Sequence[tuple[Tensor, Tensor]]) -> Gradients:
    """Gradients of each batch on its own, FP32, on the CPU."""
    model.train()
    found: Gradients = []
    for tokens, labels in batches:
        model(tokens, labels, count_valid(tokens, labels)).total.backward()
        found.append({name: weight.main_grad.float().cpu().clone() for name, weight in weights(model)})
        for _, weight in weights(model):
            weight.clear_grad()
    for _, router in routers(model):
        router.counts.zero_()
    return found


def compare(got: Gradients, want: Gradients) -> dict[str, tuple[float, float, float]]:
    """Kind of weight -> (error, lasting, projection), means over its layers."""
    rows: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for name in want[0]:
        single = sum(error(g[name], w[name]) for g, w in zip(got, want, strict=True)) / len(want)
        mean_got, mean_want = (sum(g[name] for g in all_of) / len(all_of) for all_of in (got, want))
        projection = (mean_got * mean_want).sum() / mean_want.square().sum()
        rows[kind_of(name)].append((single, error(mean_got, mean_want), projection.item()))
    return {kind: tuple(sum(column) / len(found) for column in zip(*found, strict=True)) for kind, found in rows.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("bench gradients", __doc__)
    parser.add_argument("--run", required=True, help="a trained run, or one of its checkpoints")
    parser.add_argument("--recipes", type=names, default="bf16,block", help="names with commas between them; fp32 is always there")
    parser.add_argument("--batches", type=at_least(1), default=16, help="of training text")
    parser.add_argument("--sequences", type=at_least(1), default=4, help="in a batch")
    parser.add_argument("--data", help="where its packed text lies now")
    parser.add_argument("--tokenizer", help="where its tokenizer lies now")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.recipes if name not in RECIPES]:
        raise UserError(f"--recipes: {', '.join(unknown)} is none of {', '.join(RECIPES)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def batches(split: str) -> list[tuple[Tensor, Tensor]]:
        tokens, labels = (t.to(device) for t in batch_of(args.run, args.batches * args.sequences, args.data, split))
        return list(zip(tokens.split(args.sequences), labels.split(args.sequences), strict=True))

    train, validation = batches("train"), batches("validation")
    results: dict[str, tuple[float, Gradients]] = {}
    for name in (REFERENCE, *(r for r in args.recipes if r != REFERENCE)):
        model, _ = load(args.run, name, args.tokenizer, device)
        loss, gradients = loss_of(model, validation), gradients_of(model, train)
        results[name] = loss, gradients
        base, want = results[REFERENCE]
        print(f"{name}: validation {loss:.4f} ({loss / base - 1:+.3%})", flush=True)
        if name != REFERENCE:
            print(f"  {'gradient of':34} {'error':>8} {'lasting':>8} {'projection':>11}")
            for kind, row in compare(gradients, want).items():
                print(f"  {kind:34} {row[0]:8.4f} {row[1]:8.4f} {row[2]:11.4f}")
            del results[name]
    return 0
