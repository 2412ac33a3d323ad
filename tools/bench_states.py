"""How well each stored v follows the exact one, on a CPU: `python -m tools.bench states` (2 minutes).

Groups of 128 gradients, each with its own deviation (lognormal), 2000 steps, then 2000 more with gradients ten times smaller:
the decay that rounding to nearest cannot follow. A row has stored v / exact v: percentiles 5, 50 and 95 at both ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8.state_codecs import CODECS, codec_bytes, new_state
from tools.arguments import at_least, make_parser, positive

ROLE = "exp_avg_sq"
GROUPS = 16


def ratios(fmt: str, beta2: float, nearest: bool, spread: float, steps: int) -> list[list[float]]:
    """[5%, 50%, 95%] of stored / exact after `steps`, and after as many with gradients a tenth."""
    random = torch.Generator().manual_seed(1)
    sigma = (torch.randn(GROUPS, 128, generator=random) * spread).exp() * 1e-3
    codec, exact = CODECS[ROLE][fmt], torch.zeros_like(sigma)
    state, found = new_state(codec, sigma.shape, sigma.device), []
    for step in range(2 * steps):
        g = torch.randn(GROUPS, 128, generator=random) * sigma * (1.0 if step < steps else 0.1)
        exact = exact * beta2 + g * g * (1 - beta2)
        word = None if nearest else torch.randint(0, 1 << 32, sigma.shape, generator=random)
        state = codec.encode(codec.decode(state) * beta2 + g * g * (1 - beta2), word)
        if step in (steps - 1, 2 * steps - 1):
            ratio = (codec.decode(state) / exact).flatten()
            found.append([float(ratio.quantile(q)) for q in (0.05, 0.5, 0.95)])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("bench states", __doc__)
    parser.add_argument("--steps", type=at_least(1), default=2000, help="before the gradients shrink, and after")
    parser.add_argument("--spread", type=positive, default=1.0, help="of the logarithm of the gradients' deviations in a group")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(f"{'v':6} {'bytes':>6} {'rounding':10} {'beta2':>6}   {f'after {args.steps}':22} {'after as many at a tenth':24}")
    for beta2 in (0.95, 0.999):
        for fmt, nearest in (("fp8", True), ("fp8", False), ("fp16", False), ("bf16", False), ("coat", True)):
            rows = ratios(fmt, beta2, nearest, args.spread, args.steps)
            text = ["  ".join(f"{value:6.2f}" for value in row) for row in rows]
            size, rounding = codec_bytes(CODECS[ROLE][fmt]), "nearest" if nearest else "stochastic"
            print(f"{fmt:6} {size:6.3f} {rounding:10} {beta2:6}   {text[0]:22} {text[1]:24}", flush=True)
    return 0
