"""How long a step takes: matrix products, memory traffic and bytes on the wire, on rates that were measured or are stated.

floor      products, attention and the optimizer's traffic at the kernels' measured rates; all else hidden behind them
expected   plus the memory traffic of norms, quantisation, permutation and SwiGLU, recomputation, and the communication that stays
           in sight
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from fp8.recipe import Recipe
from model.config import ModelConfig
from parallel.sharded_optimizer import wire_for
from tools.plan_memory import Bytes, Layout, live_rows


@dataclass(frozen=True)
class Gpu:
    """Rates that kernels reach (not peaks): TFLOP/s, TB/s of a device copy, GB/s a GPU of NVLink and network.

    `measured` says whether the compute rates come from octet's own kernels (docs/performance.md) or are scaled from them.
    """

    name: str
    memory: int  # bytes that torch can use
    fp8: float
    bf16: float
    experts_fp8: float
    experts_bf16: float
    attention: tuple[float, float]  # forward, backward
    hbm: float
    nvlink: float
    network: float
    measured: bool
    node: int = 8


GPUS = {
    "h200": Gpu("H200", 139 << 30, 1200, 750, 950, 600, (500, 390), 4.25, 250, 40, True),
    "h100": Gpu("H100", 79 << 30, 1200, 750, 950, 600, (500, 390), 2.95, 250, 40, False),
    "h20": Gpu("H20", 95 << 30, 180, 112, 142, 90, (75, 58), 3.5, 250, 40, False),
    "h800": Gpu("H800", 79 << 30, 1200, 750, 950, 600, (500, 390), 2.95, 120, 40, False),
    "b200": Gpu("B200", 178 << 30, 2600, 1600, 2000, 1300, (1000, 780), 6.9, 500, 40, False),
}
# Fitted constants, each to steps of docs/performance.md measured on one and two H200s; tests/tools/test_plan_speed.py holds their
# forecasts against all of them, and docs/usage.md has the differences.
ELEMENTWISE = 1.15  # times a copy's seconds for as many bytes; `bench fused` has most kernels at 60% to 97% of the copy rate
GAP_SECONDS = 0.3e-3  # a layer's short kernels, forward and backward, as a CUDA graph
GATHERED_BYTES = 40  # an element of a rank's tokens in a MoE layer: packing, the other rank's tokens, sums that leave and return
BUCKET_TRAFFIC = 6  # bytes an element that is put into its wire's format and taken out again
EXPOSED = 0.6  # share of dispatch and combine that the shared expert does not hide
PEER_EXPOSED = 0.3  # with parallel.peer_copies: configs/small.yaml at ep=2, 4.7 ms of wire a step, takes 1.4 ms less (bench step)
HIDES = 0.5  # share of the last micro-batch's backward that hides gradient reduction; none where it was replayed as a CUDA graph
# Launched one by one, over the same kernels as a CUDA graph. One rank: all of Ling-mini at stage 2 1.1, six of its layers 1.16.
# Several, whose hosts wait for each other: all of Ling-mini at ep=2 1.3, six of its layers 1.3 to 1.4.
LAUNCHED, LAUNCHED_RANKS = 1.12, 1.25
OPTIMIZER_OVER_TRAFFIC = 1.2  # lean states of all of Ling-mini: 64 ms, FP32 ones of six layers: 40 ms and 5 ms for the norm
# Host time of a layer's launches in forward and backward, in sight where kernels are shorter: configs/small.yaml took 156 ms a
# micro-batch (13 layers), 62 ms as a CUDA graph.
HOST_SECONDS = 12e-3
ASSUMPTIONS = (
    "experts get equal shares of tokens (the busiest rank 10% more); no packing loss; no pipeline parallelism in octet",
    f"dispatch and combine: {EXPOSED:.0%} in sight, {PEER_EXPOSED:.0%} with parallel.peer_copies; gradients hide behind {HIDES:.0%}"
    " of a backward, behind nothing after a CUDA graph's",
    f"launched one by one (train.cuda_graphs=false) the same kernels take {LAUNCHED} times as long, on several GPUs"
    f" {LAUNCHED_RANKS}, and {HOST_SECONDS * 1e3:.0f} ms a layer and micro-batch at least; fitted to one and two H200s",
    "ep or dp groups within 8 consecutive ranks use NVLink; what goes further goes at the network's 40 GB/s a GPU (400 Gb/s NICs)",
)


@dataclass
class Speed:
    """Seconds of an optimizer step on one rank, and bytes that it sends, by kind."""

    parts: dict[str, float] = field(default_factory=dict)
    sent: dict[str, float] = field(default_factory=dict)
    floor: float = 0.0
    tokens: int = 0  # of the global batch

    @property
    def expected(self) -> float:
        return sum(self.parts.values())


def link_seconds(nbytes: float, ranks: int, stride: int, gpu: Gpu) -> float:
    """Seconds to send `nbytes` evenly to the other `ranks - 1` ranks of an axis whose members are `stride` apart."""
    near = min(ranks, max(gpu.node // stride, 1))
    far = (ranks - near) / max(ranks - 1, 1)
    return nbytes * ((1 - far) / gpu.nvlink + far / gpu.network) / 1e9


def _matrix_parameters(c: ModelConfig, tp: int) -> tuple[float, float, float]:
    """Parameters that each token passes on one rank, outside experts: all layers' linears, head; and routed experts a slot."""
    attention = c.hidden_size * (c.qkv_size + c.num_attention_heads * c.head_dim)
    moe_layers = c.num_hidden_layers - c.first_k_dense_replace + c.num_nextn_predict_layers
    dense = c.first_k_dense_replace * 3 * c.hidden_size * c.intermediate_size
    shared = moe_layers * 3 * c.hidden_size * c.shared_intermediate_size
    layers = c.num_hidden_layers + c.num_nextn_predict_layers
    linears = layers * attention + dense + shared + c.num_nextn_predict_layers * 2 * c.hidden_size**2 * tp
    heads = (1 + c.num_nextn_predict_layers) * c.vocab_size * c.hidden_size
    return linears / tp, heads / tp, 3 * c.hidden_size * c.moe_intermediate_size


GRADIENT_BYTES = {"fp32": 4, "bf16": 2, "fp8": 132 / 128, "fp8_lm": 1}  # an element on the wire, scale and padding included


@dataclass(frozen=True)
class Wires:
    """How sums travel (parallel.tp_wire, combine_wire, grad_wire), and whether new weights arrive under the next forward."""

    tp: str = "bf16"
    combine: str = "bf16"
    gradients: str = "fp32"
    overlap_gather: bool = False


def ranks_visited(c: ModelConfig, ep: int) -> float:
    """Expected number of ranks, its own apart, that own one of a token's experts.

    Choices are taken as even within the `topk_group` chosen groups; a rank owns several groups, or a part of one.
    """
    groups, chosen, k = c.n_group, c.topk_group, c.num_experts_per_tok
    if ep > groups:
        visited = chosen / groups * (1 - (1 - groups / (ep * chosen)) ** k)
    else:
        own = groups // ep
        odds = [
            math.comb(own, j) * math.comb(groups - own, chosen - j) / math.comb(groups, chosen) for j in range(min(own, chosen) + 1)
        ]
        visited = sum(p * (1 - (1 - j / chosen) ** k) for j, p in enumerate(odds))
    return visited * (ep - 1)


def sent_bytes(
    c: ModelConfig,
    recipe: Recipe,
    layout: Layout,
    seq_len: int,
    micro_batches: int,
    local: dict[str, int],
    hidden: torch.dtype = torch.bfloat16,
    wires: Wires | None = None,
) -> dict[str, float]:
    """Bytes that one rank sends in a step, by kind. `local`: see `local_parameters`."""
    b, tp, ep, wires = Bytes(recipe, hidden), layout.tp, layout.ep, wires or Wires()
    back, up = (b.activation if wire == "fp8" else b.hidden for wire in (wires.combine, wires.tp))
    whole = layout.micro_batch * seq_len
    t, D = whole // tp, c.hidden_size
    moe = c.num_hidden_layers - c.first_k_dense_replace + c.num_nextn_predict_layers
    layers = c.num_hidden_layers + c.num_nextn_predict_layers
    remote = ranks_visited(c, ep)
    trips = 2 + (layout.stage >= 2)  # x, dY, and x again
    heads = 1 + c.num_nextn_predict_layers
    # a block: x, dY and x again gathered, output and dX reduced; embedding both ways, the head's x gathered and its dX reduced
    tp_row = layers * 2 * (3 * b.activation + 2 * up) + heads * (3 * b.hidden + b.activation)
    found = {
        "dispatch": micro_batches * moe * t * remote * D * b.activation * trips,
        "combine": micro_batches * moe * t * remote * D * 2 * back,
        "tp": micro_batches * whole * D * tp_row * (tp - 1) / tp,
    }
    dp, edp, world = layout.dp, layout.edp, layout.world
    wide, split = GRADIENT_BYTES[wire_for(wires.gradients, recipe.is_fp8)], local["dense"] - local["replicated"]
    # to its owner, in every micro-batch under ZeRO-2; from there the sum goes on, or under ZeRO the new weight
    legs = wide * (micro_batches if layout.zero == 2 else 1) + (0 if layout.zero else wide)
    found["gradients dense"] = legs * (split * (dp - 1) / dp + local["replicated"] * (world - 1) / world)
    found["gradients experts"] = legs * local["experts"] * (edp - 1) / edp
    if layout.zero:
        found["weights dense"] = b.activation * split * (dp - 1) / dp + 4 * local["replicated"] * (world - 1) / world
        found["weights experts"] = b.activation * local["experts"] * (edp - 1) / edp
    return found


def forward_and_backward(
    c: ModelConfig, recipe: Recipe, layout: Layout, seq_len: int, gpu: Gpu, expert_parameters: int
) -> tuple[float, float, float, float]:
    """Seconds of a micro-batch's kernels on one rank: linears and head, routed experts, attention, passes over memory.

    Rows of experts are those that exist, padded to tiles, not the buffer that would hold any routing: kernels skip the rest.
    """
    b = Bytes(recipe, torch.bfloat16)
    whole = layout.micro_batch * seq_len
    t, D, f = whole // layout.tp, c.hidden_size, c.moe_intermediate_size
    layers = c.num_hidden_layers + c.num_nextn_predict_layers
    moe = layers - c.first_k_dense_replace
    linears, heads, expert = _matrix_parameters(c, layout.tp)
    rows = live_rows(c, layout, t)
    dense_rate, expert_rate = (gpu.fp8, gpu.experts_fp8) if b.fp8 else (gpu.bf16, gpu.experts_bf16)
    traffic = gpu.hbm * 1e12

    gemms = 6 * whole * (linears + heads) / (dense_rate * 1e12)
    product = 2 * rows * expert * moe / (expert_rate * 1e12)
    stream = expert_parameters * b.activation / traffic
    if b.fp8:  # wgrad reads and writes FP32 gradients; weights are transposed
        experts = 2 * max(product, stream) + max(product, expert_parameters * 8 / traffic) + 3 * stream
    else:  # gradients come out in BF16 and are brought into FP32
        experts = 3 * max(product, stream) + expert_parameters * 6 / traffic
    core = 2 * whole * seq_len * c.num_attention_heads / layout.tp * c.head_dim * layers / 1e12
    attention = core / gpu.attention[0] + 2.5 * core / gpu.attention[1]

    token_bytes = layers * D * (16 + 12 * b.activation) + moe * (c.num_experts * 24 + GATHERED_BYTES * D * layout.gathers)
    slot_bytes = D * (4 + 5 * b.activation) + f * (16 + 8 * b.activation)
    logit_bytes = 6 * whole * (1 + c.num_nextn_predict_layers) * c.vocab_size / layout.tp  # statistics, then their gradient
    element = (t * token_bytes + rows * moe * slot_bytes + logit_bytes) * ELEMENTWISE / traffic
    return gemms, experts, attention, element


def speed(
    c: ModelConfig,
    recipe: Recipe,
    layout: Layout,
    seq_len: int,
    global_batch: int,
    gpu: Gpu,
    local: dict[str, int],
    state_bytes: float,
    wires: Wires | None = None,
    cuda_graphs: bool = False,
) -> Speed:
    """Time of one step; `state_bytes` is what optimizer states take on this rank."""
    wires = wires or Wires()
    micro_batches = max(global_batch // (layout.micro_batch * layout.dp), 1)
    gemms, experts, attention, element = forward_and_backward(c, recipe, layout, seq_len, gpu, local["experts"])
    layers, traffic = c.num_hidden_layers + c.num_nextn_predict_layers, gpu.hbm * 1e12
    turned_once = 0.0
    if recipe.is_fp8 and layout.keep_transposed:
        turned_once = (micro_batches - 1) * 3 * local["experts"] * Bytes(recipe, torch.bfloat16).activation / traffic
    again = {0: 0.0, 1: 0.05, 2: 0.1, 3: 0.25, 4: 1.0}[layout.stage] * (gemms + experts + attention + element) / 3.2

    sent = sent_bytes(c, recipe, layout, seq_len, micro_batches, local, wires=wires)
    exposed = link_seconds(sent["dispatch"] + sent["combine"], layout.ep, 1, gpu) * (PEER_EXPOSED if layout.has_peer else EXPOSED)
    exposed += link_seconds(sent["tp"], layout.tp, 1, gpu) * 0.7
    axes = {"dense": (layout.dp, layout.tp), "experts": (layout.edp, layout.ep)}
    reduce = sum(link_seconds(sent[f"gradients {kind}"], *axis, gpu) for kind, axis in axes.items())
    gather = sum(link_seconds(sent.get(f"weights {kind}", 0.0), *axis, gpu) for kind, axis in axes.items())
    backward = (gemms + experts + attention) * 2 / 3
    rounds = micro_batches if layout.zero == 2 else 1
    reduce = max(reduce - (0 if cuda_graphs else HIDES * backward * rounds), 0.0)
    travelling = sum(local[kind] for kind, axis in axes.items() if axis[0] > 1)
    reduce += rounds * travelling * BUCKET_TRAFFIC / traffic
    if wires.overlap_gather and not cuda_graphs:  # a graph waits for all of them before it starts
        gather = max(gather - backward / 2, 0.0)
    owned = sum(local[kind] / (axis[0] if layout.zero else 1) for kind, axis in axes.items())
    optimizer = (owned * 6 + 2 * state_bytes) / traffic

    parts = {
        "linears and head": micro_batches * gemms, "experts": micro_batches * experts - turned_once,
        "attention": micro_batches * attention, "elementwise": micro_batches * (element + layers * GAP_SECONDS),
        "recompute": micro_batches * again,
    }  # fmt: skip
    kernels = sum(parts.values())
    slower = (LAUNCHED if layout.world == 1 else LAUNCHED_RANKS) * kernels
    parts["launches"] = 0.0 if cuda_graphs else max(slower, micro_batches * layers * HOST_SECONDS) - kernels
    parts |= {"communication": exposed, "gradient reduction": reduce, "weight gather": gather}
    parts["optimizer"] = optimizer * OPTIMIZER_OVER_TRAFFIC
    floor = micro_batches * (gemms + experts + attention) - turned_once + optimizer
    return Speed(parts, sent, floor, global_batch * seq_len)
