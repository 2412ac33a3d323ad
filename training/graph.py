"""Forward and backward of a micro-batch as one CUDA graph: a launch instead of some thousands.

Below about 16 thousand tokens a micro-batch the host cannot launch kernels as fast as the GPU finishes them (docs/performance.md).
Nothing in a forward or backward on one rank reads a number back from the GPU, so the whole of it can be captured once and replayed.
What is captured is what ran: replayed steps are bitwise those of the eager path.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fp8.weight import weights
from model.loss import Losses, NumValid
from parallel.mesh import Mesh

WARMUP = 2  # eager micro-batches of each kind before its capture: they compile kernels and allocate gradients


def _detached(losses: Losses) -> Losses:
    """Without the graph: one that lived on would tie a later capture to the stream that it ran on."""
    return Losses(**{name: value.detach() for name, value in vars(losses).items()})


class _Captured:
    """A graph, its input tensors and its losses."""

    def __init__(self, model: nn.Module, tokens_BS: Tensor, labels_BS: Tensor, num_valid: NumValid, pool: object) -> None:
        self.tokens_BS, self.labels_BS = tokens_BS.clone(), labels_BS.clone()
        self.num_valid = NumValid(num_valid.ce.clone(), num_valid.mtp.clone(), num_valid.tokens.clone())
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):  # the loader may go on
            losses = model(self.tokens_BS, self.labels_BS, self.num_valid)
            losses.total.backward()
        self.losses = _detached(losses)

    def replay(self, tokens_BS: Tensor, labels_BS: Tensor, num_valid: NumValid) -> Losses:
        """Runs the graph on these inputs; the losses are copies."""
        self.tokens_BS.copy_(tokens_BS)
        self.labels_BS.copy_(labels_BS)
        for name, value in vars(self.num_valid).items():
            value.copy_(getattr(num_valid, name))
        self.graph.replay()
        return Losses(**{name: value.clone() for name, value in vars(self.losses).items()})


class GraphedMicroBatch:
    """Forward and backward of micro-batches, replayed where it may be.

    The first micro-batch of a step writes gradients and the later ones add to them, so there are two graphs; they share their
    memory. Activations live in that memory between steps, beside what the allocator has cached for the eager ones before.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self.model, self.weights = model, [w for _, w in weights(model)]
        self.solo = mesh.world.size == 1
        self.pool: object = None
        self._seen: dict[tuple[object, ...], int] = {}
        self._graphs: dict[tuple[object, ...], _Captured] = {}

    def takes(self, tokens_BS: Tensor, cu_seqlens: Tensor | None) -> bool:
        """Whether this micro-batch can be replayed: one rank, no documents, nothing that the host does anew each step."""
        if not (self.solo and tokens_BS.is_cuda and cu_seqlens is None and self.model.training):
            return False
        if torch.are_deterministic_algorithms_enabled():
            return False
        return not any(
            w.health or w.observer or len(w.scales) or w.recipe.adaptive or w.adds_by_chance for w in self.weights
        )

    def __call__(self, tokens_BS: Tensor, labels_BS: Tensor, num_valid: NumValid) -> Losses:
        """Forward and backward; gradients are in the weights afterwards. `takes` must hold."""
        written = any(w.has_grad for w in self.weights)
        key = (tokens_BS.shape, written)
        if key in self._graphs:
            losses = self._graphs[key].replay(tokens_BS, labels_BS, num_valid)
            for weight in self.weights:
                weight.note_replayed_uses()
            return losses
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] <= WARMUP:
            losses = self.model(tokens_BS, labels_BS, num_valid)
            losses.total.backward()
            return _detached(losses)
        torch.cuda.synchronize()
        self.pool = torch.cuda.graph_pool_handle() if self.pool is None else self.pool
        self._graphs[key] = _Captured(self.model, tokens_BS, labels_BS, num_valid, self.pool)  # marks the weights as used
        return self._graphs[key].replay(tokens_BS, labels_BS, num_valid)
