"""Continues a prompt with a trained model.

    python -m tools.generate --checkpoint runs/tiny --prompt "def main(" --tokens 100
    python -m tools.generate --checkpoint runs/tiny/checkpoints/step_00000100 --temperature 0

The model, the recipe and the tokenizer are those the checkpoint was trained with.
"""

from __future__ import annotations

import math
import sys

import torch

from fp8.config import Fp8Config
from model.config import ModelConfig
from model.transformer import Transformer
from parallel.mesh import Mesh
from tools.arguments import at_least, make_parser
from training.checkpoint import load_masters
from training.checkpoint_files import corruption
from training.errors import UserError, exit_status
from training.run_state import RunState, locate
from training.sample import generate
from training.tokenizer import Tokenizer, load_tokenizer


def load(checkpoint: str, recipe: str | None, tokenizer: str | None, device: torch.device) -> tuple[Transformer, Tokenizer]:
    """The model of a run or of one checkpoint, and its tokenizer.

    Args:
        recipe, tokenizer: other ones than the checkpoint names.

    Raises:
        UserError: no such checkpoint, or a tokenizer that is not the one it was trained with.
    """
    path = locate(checkpoint, lambda text: print(f"warning: {text}", file=sys.stderr), corruption)
    state = RunState.read(path)
    found = load_tokenizer(tokenizer or state.config["data"]["tokenizer"], "name an existing file with --tokenizer")
    if state.tokenizer not in ("", found.fingerprint):
        raise UserError(
            f"{found.path} is not the tokenizer that {path} was trained with: fingerprint {state.tokenizer[:12]} there, "
            f"{found.fingerprint[:12]} here; name the right one with --tokenizer"
        )
    name = recipe or state.config["fp8"]["recipe"]
    dtype = torch.bfloat16 if device.type == "cuda" and name != "fp32" else torch.float32
    try:
        with torch.device(device):
            model = Transformer(ModelConfig(**state.model), Fp8Config.of(state.config["fp8"], recipe).build(), Mesh.solo(), dtype)
    except ValueError as error:
        raise UserError(str(error)) from error
    load_masters(path, model, Mesh.solo())
    return model.eval(), found


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = make_parser("generate", __doc__)
    parser.add_argument("--checkpoint", required=True, help="folder of a run, or of one checkpoint")
    parser.add_argument("--prompt", default="", help="text to continue; empty: a new document")
    parser.add_argument("--tokens", type=at_least(1), default=100, help="at most so many new tokens")
    parser.add_argument("--samples", type=at_least(1), default=1, help="texts, each from the next seed")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 always takes the likeliest token")
    parser.add_argument("--top-k", type=at_least(0), default=50, help="draw from so many likeliest tokens; 0: from all")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--recipe", help="another recipe than the checkpoint's, for example bf16")
    parser.add_argument("--tokenizer", help="where the checkpoint's tokenizer lies now")
    args = parser.parse_args(arguments)
    if not 0 <= args.temperature < math.inf:
        raise UserError(f"--temperature {args.temperature:g} must be a finite number, 0 or more")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load(args.checkpoint, args.recipe, args.tokenizer, device)
    for i in range(args.samples):
        text = generate(
            model, tokenizer, args.prompt, args.tokens,
            temperature=args.temperature, top_k=args.top_k, seed=args.seed + i, device=device,
        )  # fmt: skip
        print(text if args.samples == 1 else f"--- {i}\n{text}")


if __name__ == "__main__":
    sys.exit(exit_status(main))
