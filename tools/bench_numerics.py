"""`python -m tools.bench numerics`: what each recipe loses, on tensors of known shape. CPU, seconds.

For each distribution of x (activations, 1024 x 1024) and dy: relative L2 error of fprop (x . w^T) and wgrad (dy^T . x) against the
unquantised product, and the share of non-zero elements that become zero: in x, in dy, and in x once re-tiled for wgrad (`x_t`).
`--run runs/evidence` measures on a trained model's operands instead (tools/bench_operands.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fp8.quantize import quantize, quantize_t, requantize_t
from fp8.recipe import Recipe
from tools.arguments import at_least, make_parser

SIZE = 1024
RECIPES = {
    "tensorwise, hybrid": Recipe.tensorwise_current(),
    "tensorwise, E4M3": Recipe.tensorwise_current("e4m3"),
    "block": Recipe.block(),
    "block, hybrid": Recipe.block("hybrid"),
    "mx": Recipe.mx(),
}


def normal(seed: int, rows: int = SIZE) -> Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(seed))


def outlier_channels(seed: int, factor: float) -> Tensor:
    """0.1 % of the channels larger by `factor`."""
    x = normal(seed)
    x[:, 7::1000] *= factor
    return x


def outlier_tokens(seed: int) -> Tensor:
    """Each token with a magnitude of its own: e^(2 z)."""
    return normal(seed) * torch.exp(2 * torch.randn(SIZE, 1, generator=torch.Generator().manual_seed(seed + 50)))


DISTRIBUTIONS: dict[str, Callable[[int], Tensor]] = {
    "Gaussian": normal,
    "0.1% of channels x 100": lambda seed: outlier_channels(seed, 100),
    "0.1% of channels x 3000": lambda seed: outlier_channels(seed, 3000),
    "tokens x e^(2z)": outlier_tokens,
}


def lost(got: Tensor, want: Tensor) -> float:
    """Share of non-zero elements that became zero."""
    return ((got == 0) & (want != 0)).sum().item() / (want != 0).sum().item()


def error(got: Tensor, want: Tensor) -> float:
    """Relative L2 error."""
    return ((got - want).norm() / want.norm()).item()


def rows() -> Iterator[tuple[str, str, list[float]]]:
    """(distribution, recipe, [fprop error, wgrad error, underflow of x, dy, x_t])."""
    w = 0.02 * normal(100)
    for kind, make in DISTRIBUTIONS.items():
        x, dy = make(1), make(2) * 1e-6
        for name, recipe in RECIPES.items():
            x_q, w_q = quantize(x, recipe.activation), quantize(w, recipe.weight)
            dy_t, x_t = quantize_t(dy, recipe.gradient), requantize_t(x_q)
            x_value, xt_value, dyt_value = x_q.dequantize(), x_t.dequantize(), dy_t.dequantize()
            fprop = error(x_value @ w_q.dequantize().t(), x @ w.t())
            wgrad = error(dyt_value @ xt_value.t(), dy.t() @ x)
            yield kind, name, [fprop, wgrad, lost(x_value, x), lost(dyt_value, dy.t()), lost(xt_value, x.t())]


def main(argv: list[str]) -> None:
    """Prints the table as Markdown."""
    parser = make_parser("bench numerics", __doc__)
    parser.add_argument("--run", help="measure on the operands of this trained run (or checkpoint) instead")
    parser.add_argument("--gemm", default="attention.qkv", help="with --run: GEMMs whose names end so")
    parser.add_argument("--sequences", type=at_least(1), default=8, help="with --run: sequences of its text")
    parser.add_argument("--split", choices=("validation", "train"), default="validation", help="with --run: which text")
    parser.add_argument("--data", help="with --run: where its packed text lies now")
    parser.add_argument("--tokenizer", help="with --run: where its tokenizer lies now")
    args = parser.parse_args(argv)
    if args.run:
        from tools import bench_operands  # needs pydantic, as every run does

        return bench_operands.main(args)
    print("| distribution | recipe | error, fprop | error, wgrad | underflow x | dy (columns) | x_t |")
    print("|---|---|---|---|---|---|---|")
    for kind, name, (fprop, wgrad, x, dy, x_t) in rows():
        print(f"| {kind} | {name} | {fprop:.4f} | {wgrad:.4f} | {x:.3%} | {dy:.3%} | {x_t:.3%} |")
