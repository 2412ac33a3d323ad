"""The values a new run starts from: random, or the masters of another checkpoint (an import, a merge, another run)."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import torch
from torch import nn

from fp8.optimizer import AdamW
from fp8.recipe import FORMATS
from fp8.weight import weights
from model.transformer import Transformer, initial_values
from parallel.mesh import Mesh
from training.checkpoint import load_masters
from training.checkpoint_files import verify
from training.config import Config
from training.process import gather
from training.run_state import RunState, Warn, locate

# A trained model is far below ln V on any text it can read; one whose weights landed in the wrong places is at ln V or above.
TRAINED_SHARE = 0.75


def set_starting_values(
    config: Config, model: nn.Module, optimizer: AdamW, mesh: Mesh, tokenizer: str, data: str, warn: Warn
) -> None:
    """Gives every master, weight and expert bias its first value; moments are zero, steps and samples count from zero.

    Raises:
        UserError: `checkpoint.init_from` is no checkpoint, a damaged one, or one of another model or tokenizer.
    """
    if config.checkpoint.init_from is None:
        for name, _, value in initial_values(model, config.train.seed):
            optimizer.set_master(name, value)
        return

    def check(candidate: Path) -> str | None:
        found = gather(verify(candidate, mesh.world.rank, mesh.world.size), mesh.world)
        return "; ".join(problem for part in found for problem in part) or None

    path = locate(config.checkpoint.init_from, warn, check)
    state = RunState.read(path)
    if not state.tokenizer:
        warn(f"{path} came without a tokenizer: make sure that data.tokenizer is the model's own")
    # An import has seen no data of ours, and another run's order does not matter here.
    dataclasses.replace(state, tokenizer=state.tokenizer or tokenizer, data=data).check(path, config.model, tokenizer, data, warn)
    load_masters(path, model, mesh, optimizer.set_master)
    warn(f"starting from the weights of {path}")


def set_gradient_format(model: Transformer, fmt: str) -> None:
    """What gradients of matrices accumulate in; before the first backward and before a GradReducer is built.

    Embedding and head stay in FP32: one adds a term for each token, the other one for each chunk of the loss, within a use. So
    do FP32 weights (norms, router).
    """
    for _, weight in weights(model):
        if weight.data.dim() > 1 and weight.data.dtype != torch.float32 and weight not in (model.embedding, model.head):
            weight.grad_dtype = FORMATS[fmt]


def first_loss_problem(config: Config, loss: float) -> str | None:
    """What is wrong when a run that starts from trained weights begins with `loss` nats a token; None when it is plausible."""
    random = math.log(config.model.vocab_size)
    if config.checkpoint.init_from is None or loss < TRAINED_SHARE * random:
        return None
    return (
        f"the first loss, {loss:.2f}, is no better than a random model's (ln {config.model.vocab_size} = {random:.2f}) although "
        f"checkpoint.init_from={config.checkpoint.init_from}: is data.tokenizer the model's own, model.rope_theta the "
        "checkpoint's, the checkpoint trained at all?"
    )
