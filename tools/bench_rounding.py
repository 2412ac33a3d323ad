"""What each rounding costs at one trained checkpoint, on the same tokens: `python -m tools.bench rounding --run runs/evidence`.

Two training runs part by the choice of experts, whatever their arithmetic; at one checkpoint nothing does. Its masters are read
under many settings: all in BF16 or in `block`, one class of GEMMs in the one and the rest in the other, weights or inputs alone.

    loss       cross-entropy of the main head; the gap to BF16 is the mean over sequences of the paired difference, with its
               standard error; `choices`: share of (token, expert) pairs that BF16 did not choose. One rounding of the weights
               raises or lowers the loss by chance (`of roundings`: by how much), so that most rows average several
    gradients  each weight's gradient under a setting against FP32's, summed over 1, 4, 16 ... micro-batches; all of a class:
        error         |g - g_fp32| / |g_fp32| of the sums
        if noise      what the last would be if micro-batches erred independently; where it is larger, something lasts
        lasting       |mean error| / |mean gradient|, both freed of what is left of noise (estimates of their squares without
                      bias; of an error that comes out below zero: 0, so what is near zero is a little too large)
        projection    <g, g_fp32> / |g_fp32|^2; below 1 the setting makes gradients shorter
        sampling      what the gradient of so many micro-batches is off by because they are not all the text

`same experts` runs the setting with the experts that the reference chose: what is left is rounding alone; so do all rows of the
loss from `block, same experts` on (their `choices` are what they would have taken). The shared expert reads
the bytes that the routed ones read, so its input belongs to the class `experts gate_up`. SwiGLU reads pre-activations in the format
of the input of `down`; `SwiGLU unrounded` reads them as the GEMM made them (backward reads the stored ones as ever).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8.recipe import Recipe
from fp8.weight import weights
from model.loss import count_valid
from model.transformer import Transformer
from tools.arguments import add_out, at_least, make_parser, names, write_json
from tools.bench_operands import batch_of
from tools.generate import load
from tools.rounding_settings import (
    Choices,
    Setting,
    class_of,
    forward_settings,
    gradient_settings,
    new_model,
    rounded_as,
    roundings,
    take,
)
from training.errors import UserError

Batches = Sequence[tuple[Tensor, Tensor]]  # (tokens, labels) [B, S]
Row = dict[str, object]

# ---------------------------------------------------------------- loss


def turned(x: Tensor, setting: Setting) -> Tensor:
    """[B, ...] in the setting's order of sequences, and back."""
    return x.flip(0) if setting.reverse else x


@torch.no_grad()
def losses_of(
    model: Transformer, setting: Setting, batches: Batches, reference: list[Choices] | None
) -> tuple[Tensor, list[Choices]]:
    """(cross-entropy of every sequence, nats a token, FP64; the routers' choices for every batch)."""
    found, choices = [], []
    for i, (tokens, labels) in enumerate(batches):
        with rounded_as(model, setting, reference and reference[i]) as own:
            logits = turned(model.logits(turned(tokens, setting)), setting)
        choices.append({name: turned(ids.unflatten(0, (len(tokens), -1)), setting).flatten(0, 1) for name, ids in own.items()})
        ce = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        found.append(ce.double().mean(1))
    return torch.cat(found), choices


def differing(got: list[Choices], want: list[Choices]) -> float:
    """Share of (token, expert) pairs that are not among `want`."""
    pairs = [(own[name], ids) for own, ids_of in zip(got, want, strict=True) for name, ids in ids_of.items()]
    same = [(own[:, :, None] == ids[:, None, :]).any(-1).double().mean() for own, ids in pairs]
    return 1 - torch.stack(same).mean().item() if same else 0.0


def loss_table(like: Transformer, batches: Batches, settings: Sequence[Setting], count: int) -> list[Row]:
    """A row for each setting, printed as it comes.

    Args:
        like: the trained model in FP32.
        count: roundings of weights whose losses are averaged, where a setting wants many.
    """
    masters, model, base, chosen = {name: w.data for name, w in weights(like)}, new_model(like), None, None
    tokens = sum(t.numel() for t, _ in batches)
    print(f"{tokens} tokens; of roundings: the row is a mean over {count} roundings of weights, the standard deviation of one\n")
    print("| setting | loss | gap to bf16 | standard error | of roundings | choices |\n" + "|---" * 6 + "|")
    rows = []
    for setting in settings:
        losses, moved, variants = [], [], roundings(setting, count)
        for variant in variants:
            if setting.name != "fp32":
                take(model, variant, masters)
            found, choices = losses_of(like if setting.name == "fp32" else model, variant, batches, chosen)
            base, chosen = (found, choices) if base is None else (base, chosen)
            losses.append(found)
            moved.append(differing(choices, chosen))
        gaps = (torch.stack(losses) - base) / base.mean()  # [roundings, sequences]
        mean, spread = gaps.mean(0), gaps.mean(1).std().item() if len(variants) > 1 else 0.0
        error = (mean.var().item() / mean.numel() + spread**2 / len(variants)) ** 0.5
        loss, gap, moving = torch.stack(losses).mean().item(), mean.mean().item(), statistics.mean(moved)
        rows.append(dict(setting=setting.name, loss=loss, gap=gap, error=error, spread=spread, choices=moving))
        of_roundings = f"{spread:.4%}" if len(variants) > 1 else "-"
        print(f"| {setting.name} | {loss:.5f} | {gap:+.4%} | {error:.4%} | {of_roundings} | {moving:.2%} |", flush=True)
    return rows


# ---------------------------------------------------------------- gradients


class Errors:
    """Sums over micro-batches of a reference's gradients and of another's distance from them, by class of weight."""

    def __init__(self) -> None:
        self.count, self.total, self.off = 0, {}, {}
        self.squares = defaultdict(float)  # of (class, what) over micro-batches
        self.rows: list[Row] = []

    def add(self, want: dict[str, Tensor], got: dict[str, Tensor]) -> None:
        """One micro-batch's gradients."""
        self.count += 1
        for name, g in want.items():
            d = got[name] - g
            for sums, value, what in ((self.total, g, "own"), (self.off, d, "off")):
                sums[name] = value.clone() if name not in sums else sums[name].add_(value)
                self.squares[class_of(name), what] += value.square().sum(dtype=torch.float64)

    def note(self, setting: str) -> None:
        """Rows of what has come so far."""
        n, sums = self.count, defaultdict(float)
        for name, total in self.total.items():
            off, kind = self.off[name], class_of(name)
            for key, a, b in (("ss", total, total), ("sd", total, off), ("dd", off, off)):
                sums[kind, key] += (a * b).sum(dtype=torch.float64)
        for kind in dict.fromkeys(kind for kind, _ in sums):
            ss, sd, dd = (float(sums[kind, key]) for key in ("ss", "sd", "dd"))
            own, off = (float(self.squares[kind, key]) for key in ("own", "off"))
            row: Row = dict(kind=kind, setting=setting, batches=n, error=(dd / ss) ** 0.5, if_noise=(off / ss) ** 0.5)
            row["projection"], row["cosine"] = sd / ss, (ss + sd) / (ss * (ss + 2 * sd + dd)) ** 0.5
            signal = (ss - own) / (n * (n - 1)) if n > 1 else 0.0  # |mean gradient|^2 of all text, without bias
            if signal > 0:
                row["lasting"] = (max(dd - off, 0.0) / (n * (n - 1)) / signal) ** 0.5
                row["sampling"] = (max(own / n - signal, 0.0) / n / signal) ** 0.5
            self.rows.append(row)


def gradients(model: Transformer, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The micro-batch's gradient by name; valid until the next backward."""
    for _, weight in weights(model):
        weight.clear_grad()
    model(tokens, labels, count_valid(tokens, labels)).total.backward()
    return {name: weight.main_grad for name, weight in weights(model)}


def gradient_table(like: Transformer, batches: Batches, settings: Sequence[Setting]) -> list[Row]:
    """Rows for each class and setting after 1, 4, 16 ... micro-batches, and after the last."""
    masters, models, found = {name: w.data for name, w in weights(like)}, {}, {s.name: Errors() for s in settings}
    for setting in settings:
        models[setting.name] = new_model(like)
        take(models[setting.name], setting, masters)
    stops = {4**i for i in range(10)} | {len(batches)}
    for i, (tokens, labels) in enumerate(batches, 1):
        with rounded_as(like, Setting("fp32", Recipe.fp32())) as choices:
            want = gradients(like, tokens, labels)
        for s in settings:
            if s.many:
                take(models[s.name], roundings(s, len(batches))[i - 1], masters)
            with rounded_as(models[s.name], s, choices):
                found[s.name].add(want, gradients(models[s.name], turned(tokens, s), turned(labels, s)))
            if i in stops:
                found[s.name].note(s.name)
    return [row for errors in found.values() for row in errors.rows]


def show_gradients(rows: Sequence[Row]) -> None:
    """Markdown: a line for each class and setting; first, for each setting, the mean of the squared errors over classes."""
    counts, settings = sorted({row["batches"] for row in rows}), dict.fromkeys(row["setting"] for row in rows)
    print("\n| setting | " + " | ".join(f"error^2 of {n}" for n in counts) + " | lasting^2 |\n" + "|---" * (2 + len(counts)) + "|")
    for setting in settings:
        own = [row for row in rows if row["setting"] == setting]
        squares = [[row["error"] ** 2 for row in own if row["batches"] == n] for n in counts]
        squares += [[row["lasting"] ** 2 for row in own if row["batches"] == counts[-1] and "lasting" in row]]
        print(f"| {setting} | " + " | ".join(f"{statistics.mean(s):.3%}" if s else "-" for s in squares) + " |")
    heads = [f"error of {n}" for n in counts] + ["if noise", "lasting", "projection - 1", "cosine", "sampling"]
    print("\n| gradient of | setting | " + " | ".join(heads) + " |\n" + "|---" * (2 + len(heads)) + "|")
    for kind, setting in itertools.product(dict.fromkeys(row["kind"] for row in rows), settings):
        own = [row for row in rows if (row["kind"], row["setting"]) == (kind, setting)]
        last, shown = own[-1], [f"{row['error']:.4f}" for row in own]
        rest = [f"{last[key]:.4f}" if key in last else "-" for key in ("if_noise", "lasting")]
        tail = f"{last['projection']:+.4f} | {last['cosine']:.5f} | " + (f"{last['sampling']:.3f}" if "sampling" in last else "-")
        print(f"| {kind} | {setting} | " + " | ".join([*shown, *rest, tail]) + " |")


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the tables as Markdown."""
    parser = make_parser("bench rounding", __doc__)
    parser.add_argument("--run", required=True, help="a trained run, or one of its checkpoints")
    parser.add_argument("--what", choices=("loss", "gradients"), help="one of the two tables alone")
    parser.add_argument("--match", type=names, default="", help="only settings whose names hold one of these, commas between")
    parser.add_argument("--sequences", type=at_least(2), default=384, help="of the loss's text")
    parser.add_argument("--batch", type=at_least(2), default=16, help="sequences at a time for the loss")
    parser.add_argument("--roundings", type=at_least(1), default=4, help="of weights, over which the loss of a setting is averaged")
    parser.add_argument("--micro-batches", type=at_least(1), default=16, help="of the gradients; of training text")
    parser.add_argument("--micro-batch", type=at_least(1), default=4, help="sequences in one")
    parser.add_argument("--split", choices=("validation", "train"), default="validation", help="text of the loss")
    parser.add_argument("--data", help="where its packed text lies now")
    parser.add_argument("--tokenizer", help="where its tokenizer lies now")
    add_out(parser)
    args = parser.parse_args(argv)
    known = list(dict.fromkeys(s.name for s in (*forward_settings(), *gradient_settings())))
    for text in args.match:
        if not any(text in name for name in known):
            raise UserError(f"--match: no setting has {text!r} in its name; there are {'; '.join(known)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    like, _ = load(args.run, "fp32", args.tokenizer, device)
    rows: dict[str, list[Row]] = {}
    if args.what != "gradients":
        text = batches_of(args, args.sequences, args.split, args.batch, device)
        rows["loss"] = loss_table(like, text, matching(forward_settings(), args.match), args.roundings)
    if args.what != "loss":
        train = batches_of(args, args.micro_batches * args.micro_batch, "train", args.micro_batch, device)
        rows["gradients"] = gradient_table(like, train, matching(gradient_settings(), args.match))
        show_gradients(rows["gradients"])
    write_json(args.out, rows)


def matching(settings: list[Setting], texts: list[str]) -> list[Setting]:
    """The first, and those whose names hold one of the texts; without texts all."""
    return [s for i, s in enumerate(settings) if i == 0 or not texts or any(text in s.name for text in texts)]


def batches_of(args: argparse.Namespace, count: int, split: str, size: int, device: torch.device) -> Batches:
    """(tokens, labels) of the first `count` sequences, `size` at a time."""
    tokens, labels = (t.to(device) for t in batch_of(args.run, count, args.data, split))
    return list(zip(tokens.split(size), labels.split(size), strict=True))
