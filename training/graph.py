"""Forward and backward of a micro-batch as one CUDA graph: a launch instead of some thousands.

Below about 16 thousand tokens a micro-batch the host cannot launch kernels as fast as the GPU finishes them (docs/performance.md).
Nothing in a forward or backward on one rank reads a number back from the GPU, so the whole of it can be captured once and replayed.
Nor does it with replicas, and with experts whose tokens are gathered (parallel/dispatch.py): their collectives are captured too.
What is captured is what ran: replayed steps are bitwise those of the eager path. Gradients leave after the replay.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fp8.transposed import refresh_transposes
from fp8.weight import weights
from model.loss import Losses, NumValid
from parallel.mesh import Mesh
from parallel.traffic import Traffic

WARMUP = 2  # eager micro-batches of each kind before its capture: they compile kernels and allocate gradients


def _detached(losses: Losses) -> Losses:
    """Without the graph: one that lived on would tie a later capture to the stream that it ran on."""
    return Losses(**{name: value.detach() for name, value in vars(losses).items()})


class _Captured:
    """A graph, its input tensors and its losses. `traffic` counts what a replay sends."""

    def __init__(
        self, model: nn.Module, tokens_BS: Tensor, labels_BS: Tensor, num_valid: NumValid, pool: object, traffic: Traffic
    ) -> None:
        self.tokens_BS, self.labels_BS = tokens_BS.clone(), labels_BS.clone()
        self.num_valid = NumValid(num_valid.ce.clone(), num_valid.mtp.clone(), num_valid.tokens.clone())
        self.graph = torch.cuda.CUDAGraph()
        self.traffic = traffic
        with traffic.capture() as self.sent, torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            losses = model(self.tokens_BS, self.labels_BS, self.num_valid)  # other threads (the loader) may go on
            losses.total.backward()
        self.losses = _detached(losses)

    def replay(self, tokens_BS: Tensor, labels_BS: Tensor, num_valid: NumValid) -> Losses:
        """Runs the graph on these inputs; the losses are copies."""
        self.tokens_BS.copy_(tokens_BS)
        self.labels_BS.copy_(labels_BS)
        for name, value in vars(self.num_valid).items():
            value.copy_(getattr(num_valid, name))
        self.graph.replay()
        self.traffic.replayed(self.sent)
        return Losses(**{name: value.clone() for name, value in vars(self.losses).items()})


class GraphedMicroBatch:
    """Forward and backward of micro-batches, replayed where it may be.

    The first micro-batch of a step writes gradients and the later ones add to them, so there are two graphs; they share their
    memory. Activations live in that memory between steps, beside what the allocator has cached for the eager ones before. Gradients
    must stay where they are (not under ZeRO-2), and new weights must have arrived before a call. Kept transposes are brought up to
    date before the graph, which only reads them.

    Args:
        collectives: also where experts' collectives would be captured (gathered tokens).
    """

    def __init__(self, model: nn.Module, mesh: Mesh, collectives: bool = False) -> None:
        self.model, self.weights = model, [w for _, w in weights(model)]
        self.traffic = mesh.traffic
        self.fits = mesh.tp.size == 1 and (mesh.ep.size == 1 or (mesh.ep.gathers and collectives))
        self.pool: object = None
        self._seen: dict[tuple[object, ...], int] = {}
        self._graphs: dict[tuple[object, ...], _Captured] = {}

    def takes(self, tokens_BS: Tensor, cu_seqlens: Tensor | None) -> bool:
        """Whether this micro-batch can be replayed: no counts, no documents, nothing that the host does anew each step."""
        if not (self.fits and tokens_BS.is_cuda and cu_seqlens is None and self.model.training):
            return False
        if torch.are_deterministic_algorithms_enabled():
            return False
        return not any(w.health or w.observer or len(w.scales) or w.recipe.adaptive or w.adds_by_chance for w in self.weights)

    def __call__(self, tokens_BS: Tensor, labels_BS: Tensor, num_valid: NumValid) -> Losses:
        """Forward and backward; gradients are in the weights afterwards. `takes` must hold."""
        refresh_transposes(self.weights)
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
        ready = [w.on_grad_ready for w in self.weights]
        try:
            for weight in self.weights:  # nothing may leave in the graph: a reducer sends what it has not heard of when it finishes
                weight.on_grad_ready = None
            self._graphs[key] = _Captured(self.model, tokens_BS, labels_BS, num_valid, self.pool, self.traffic)  # marks uses
        finally:
            for weight, hook in zip(self.weights, ready, strict=True):
                weight.on_grad_ready = hook
        return self._graphs[key].replay(tokens_BS, labels_BS, num_valid)
