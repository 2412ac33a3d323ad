"""Optimizer states in host memory (optim.offload): which visit the GPU, how many bytes of them at a time, how long a step takes.

fp8/offload.py sends them in the model's order, the next one up while those before it come down, with three on the GPU at the most.
The two directions do not slow each other, but few of a model's weights are large and many are small: a large one that travels has
little beside it. So a step takes less than both directions one after the other, and more than one of them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from fp8.optimizer import States
from fp8.recipe import Recipe
from fp8.state_codecs import new_state
from fp8.weight import Weight, weights
from model.config import ModelConfig
from model.transformer import Transformer
from tools.plan_memory import Layout

HOST_LINK = 54  # GB/s of pinned copies each way, and of both at once (`tools.bench optimizer --offload`, one H200)
AT_A_TIME = 3  # states on the GPU


def visitors(config: ModelConfig, recipe: Recipe, states: States, layout: Layout) -> tuple[int, ...]:
    """Bytes of this rank's states of each weight that visit the GPU, in the order of their visits."""
    shards = (layout.dp, layout.edp) if layout.zero else (1, 1)
    return _visitors(config, replace(recipe, overrides=()), states, layout.tp, layout.ep, *shards)


@functools.lru_cache(maxsize=1024)
def _visitors(config: ModelConfig, recipe: Recipe, states: States, tp: int, ep: int, dense: int, expert: int) -> tuple[int, ...]:
    """`dense`, `expert`: ranks that share the states of such a weight. MoE layers are alike: one is looked at."""
    first = config.first_k_dense_replace
    again = max(config.num_hidden_layers - first - 1, 0)
    small = replace(config, num_hidden_layers=config.num_hidden_layers - again)
    with torch.device("meta"):
        model = Transformer(small, recipe, Layout(tp * ep, tp, ep).mesh())
    before: list[int] = []
    layer: list[int] = []
    after: list[int] = []
    for name, weight in weights(model):
        if weight.data.dtype == torch.float32:  # norms and routers: their states stay on the GPU
            continue
        nbytes = _state_bytes(weight, states) // (expert if weight.expert else dense)
        repeated = name.startswith(f"layers.{first}.")
        (layer if repeated else after if layer else before).append(nbytes)
    return (*before, *layer * (again + 1), *after)


def _state_bytes(weight: Weight, states: States) -> int:
    parts = [new_state(codec, weight.data.shape, weight.data.device) for codec in states.codecs(weight).values()]
    return sum(t.nbytes for part in parts for t in part.values())


def bytes_at_a_time(sizes: Sequence[int]) -> int:
    """The most that is on the GPU at once."""
    return max((sum(sizes[i : i + AT_A_TIME]) for i in range(len(sizes))), default=0)


def visit_seconds(sizes: Sequence[float], rate: float = HOST_LINK * 1e9) -> float:
    """Seconds from the first state's departure until the last one is back, at `rate` bytes a second each way."""
    up, back = 0.0, [0.0] * AT_A_TIME
    for nbytes in sizes:
        up = max(up, back[-AT_A_TIME]) + nbytes / rate
        back.append(max(up, back[-1]) + nbytes / rate)
    return back[-1]
