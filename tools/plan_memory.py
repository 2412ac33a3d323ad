"""Bytes that a rank needs, by class. Weights, gradients and states are counted on the model itself, built without memory; kept
activations and working memory follow the formulas below, which tests hold against the model's own accounts.

Shapes: T tokens of a micro-batch, t of them on this rank (T / tp under sequence parallel), R rows of the expert buffer, D features,
f expert width, F width of a dense MLP on this rank, q qkv rows on this rank, E experts, V vocabulary rows on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fp8.grouped_gemm import padded_rows
from fp8.optimizer import States
from fp8.recipe import BLOCK, Recipe
from model.config import ModelConfig
from parallel.mesh import Mesh
from parallel.send_plan import slot_bytes
from training.held_bytes import static, unconnected_mesh

BUCKET_BYTES = 64 << 20  # parallel/grad_reduce.py
# CUDA context, cuBLAS workspaces and what the caching allocator cannot fill: measured as reserved minus allocated, plus context.
OVERHEAD_BYTES = 2 << 30
# Working memory when no activation is kept: states that visit the GPU; new weights of all owners on their way, all sent at once
AFTER_STEP = ("optimizer", "weight gather")


@dataclass(frozen=True)
class Layout:
    """Ranks and policy of one plan.

    Attributes:
        stage: activation policy, 0 to 4 (model/policy.py).
        micro_batch: sequences a rank takes at once.
        zero: masters and moments (1), gradients too (2), split over the ranks that hold the same weight (dp, or edp for experts).
        balance: rows of the busiest expert rank over the mean; 1 is even.
        keep_transposed, peer_copies: fp8.keep_transposed, parallel.peer_copies (where `has_peer`).
    """

    world: int = 1
    tp: int = 1
    ep: int = 1
    stage: int = 0
    micro_batch: int = 1
    zero: int = 0
    balance: float = 1.1
    keep_transposed: bool = False
    peer_copies: bool = False

    @property
    def dp(self) -> int:
        return self.world // self.tp

    @property
    def edp(self) -> int:
        return self.world // self.ep

    @property
    def gathers(self) -> bool:
        """As parallel.dispatch=auto decides."""
        return self.ep == 2

    @property
    def has_peer(self) -> bool:
        """Whether gathered rows go by copy engines."""
        return self.gathers and self.peer_copies

    def mesh(self) -> Mesh:
        """Axes of the right sizes, without process groups: enough to build a model."""
        return unconnected_mesh(self.world, self.tp, self.ep)


@dataclass
class Memory:
    """Bytes of one rank by class, and what is alive at the peak."""

    static: dict[str, int] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)  # activations from forward to backward, by where they are kept
    working: dict[str, int] = field(default_factory=dict)  # short-lived; only the largest counts
    host: int = 0  # optimizer states in pinned host memory

    @property
    def peak(self) -> int:
        """Largest sum alive at once, as the allocator counts it."""
        step = max((v for k, v in self.working.items() if k not in AFTER_STEP), default=0)
        after = max((self.working.get(k, 0) for k in AFTER_STEP), default=0)
        return sum(self.static.values()) + max(sum(self.kept.values()) + step, after)


class Bytes:
    """Bytes of rows in the formats of a recipe."""

    def __init__(self, recipe: Recipe, hidden: torch.dtype) -> None:
        self.hidden = hidden.itemsize
        spec = recipe.activation
        rows = spec.tile is not None and spec.tile[0] == 1
        per_row = 4 / spec.tile[1] if rows else 0.0
        self.activation = spec.dtype.itemsize + per_row  # of one element, scales included
        self.fp8 = spec.is_fp8
        self.as_they_are = spec.dtype == hidden  # nothing is rounded, so a GEMM's input is kept without a copy
        self.turns_tokens = spec.tile == (1, BLOCK)  # wgrad's X comes from the tokens again: at ep = 1 no rows are kept


def expert_rows(c: ModelConfig, layout: Layout, tokens: int) -> int:
    """Rows of a rank's padded expert buffer: the worst case where nobody counts, else the expected one times the balance."""
    if layout.ep == 1 or layout.gathers:
        return padded_rows(tokens * c.num_experts_per_tok * layout.ep, c.num_experts // layout.ep)
    return live_rows(c, layout, tokens)


def live_rows(c: ModelConfig, layout: Layout, tokens: int) -> int:
    """Rows that the busiest rank's experts get, expected: its share times the balance, half a tile more for each expert."""
    slots = tokens * c.num_experts_per_tok * (layout.balance if layout.ep > 1 else 1)
    return int(slots) + c.num_experts // layout.ep * (BLOCK // 2)


def kept_by_layer(
    c: ModelConfig, recipe: Recipe, layout: Layout, seq_len: int, hidden: torch.dtype, stage: int
) -> dict[str, float]:
    """Bytes that forward keeps of one dense layer, one MoE layer (entries `moe ...`) and of what lies around them."""
    b, tp = Bytes(recipe, hidden), layout.tp
    whole = layout.micro_batch * seq_len
    t = whole // tp
    D, E, d = c.hidden_size, c.num_experts, c.head_dim
    heads, kv = c.num_attention_heads // tp, max(c.num_key_value_heads // tp, 1)
    rows = expert_rows(c, layout, t)
    norms = 0 if stage >= 2 else 1
    attention = norms * t * D * b.activation + whole * heads * d * b.activation  # norm's output, input of `out`
    if stage < 3:  # q and k before their norms (views of qkv), q, k, o and the log-sum-exp of the core
        outputs = 1 if b.as_they_are else 2  # q; o, unless it is the input of `out` itself
        attention += whole * ((heads + 2 * kv) * d + outputs * heads * d + kv * d) * b.hidden + whole * heads * 4
    shared = c.shared_intermediate_size // tp
    moe = norms * t * D * b.activation
    moe += whole * shared * b.activation * (2 + (stage < 1))
    moe += rows * (2 * c.moe_intermediate_size * b.activation + 4 + 8)  # pre-activations, routing weights, slot of each row
    moe += rows * c.moe_intermediate_size * b.activation * (stage < 1)
    if layout.gathers:
        moe += layout.ep * t * D * b.activation * norms  # all tokens of the axis
    elif layout.ep > 1 or not b.turns_tokens:
        moe += rows * D * b.activation * norms
    router = t * E * 4 * 2 + t * c.num_experts_per_tok * (8 * 2 + 4 * 3)  # logits and scores; ids, rows, weights
    dense = norms * t * D * b.activation + whole * c.intermediate_size // tp * b.activation * (2 + (stage < 1))
    residual = 2 * t * D * b.hidden
    return {"attention": attention, "moe": moe + router, "dense": dense, "residual": residual}


def kept(c: ModelConfig, recipe: Recipe, layout: Layout, seq_len: int, hidden: torch.dtype) -> dict[str, int]:
    """Bytes that forward keeps until backward, of all layers."""
    b, t = Bytes(recipe, hidden), layout.micro_batch * seq_len // layout.tp
    D, moe_layers = c.hidden_size, c.num_hidden_layers - c.first_k_dense_replace
    found: dict[str, float] = {}

    def add(name: str, value: float) -> None:
        found[name] = found.get(name, 0) + value

    one = kept_by_layer(c, recipe, layout, seq_len, hidden, layout.stage)
    whole_layers = layout.stage >= 4
    for kind, count in (("dense", c.first_k_dense_replace), ("moe", moe_layers + c.num_nextn_predict_layers)):
        for part in () if whole_layers else ("attention", kind, "residual"):
            add(part, count * one[part])
    if whole_layers:  # a layer's input
        add("residual", c.num_hidden_layers * t * D * b.hidden)
    if c.num_nextn_predict_layers:  # embeddings of the next tokens, the trunk's output, and both of them quantised
        add("mtp", t * D * (2 * b.hidden + (0 if whole_layers else 2 * b.activation)))
    add("residual", 2 * layout.micro_batch * seq_len * c.rotary_dim * b.hidden)  # rotary tables
    heads = 1 + c.num_nextn_predict_layers
    add("head", heads * t * D * 2 * b.hidden)  # the final norm's input; dX, made in forward
    return {name: int(value) for name, value in found.items()}


def working(c: ModelConfig, recipe: Recipe, layout: Layout, seq_len: int, hidden: torch.dtype) -> dict[str, int]:
    """Peak of the short-lived tensors of each candidate for the largest: the head's chunk, expert forward and backward."""
    b, t = Bytes(recipe, hidden), layout.micro_batch * seq_len // layout.tp
    D, f, V = c.hidden_size, c.moe_intermediate_size, c.vocab_size // layout.tp
    rows, chunk = expert_rows(c, layout, t), min(c.loss_chunk, layout.micro_batch * seq_len)
    experts = c.num_experts // layout.ep
    turned = not layout.keep_transposed
    transposed = turned * V * D * b.activation if b.fp8 else V * D * b.hidden
    # BF16 logits, their gradient in BF16, and in FP8 along both dimensions
    head = chunk * V * (2 * b.hidden + (2 * b.activation if b.fp8 else b.hidden)) + transposed
    # gate_up's dgrad: dh both ways (its pre-activations have gone), dX; the transposed weight, or BF16's own wgrad twice
    own = experts * 2 * f * D * (turned * b.activation if b.fp8 else 2 * b.hidden)
    backward = rows * (2 * f * b.activation + D * b.hidden) + own
    forward = rows * (D * (b.activation + b.hidden) + 2 * f * b.hidden + f * (b.hidden + b.activation))
    if layout.stage >= 4:
        one = kept_by_layer(c, recipe, layout, seq_len, hidden, 0)
        backward += one["attention"] + one["moe"] + one["residual"]
    return {"head": int(head), "experts forward": int(forward), "experts backward": int(backward)}


def largest_gradient(c: ModelConfig, layout: Layout) -> int:
    """Elements of the largest weight of this rank whose gradient travels; a weight above BUCKET_BYTES travels alone."""
    experts = c.num_experts // layout.ep * 2 * c.moe_intermediate_size if layout.edp > 1 else 0
    return max(experts, c.vocab_size // layout.tp if layout.dp > 1 else 0) * c.hidden_size


def communication_buffers(c: ModelConfig, layout: Layout, seq_len: int, gradients: torch.dtype = torch.float32) -> int:
    """Payloads in flight: dispatch and combine, the tp gather; gradient buckets are views of `main_grad` unless ZeRO-2 lets it go.

    Then one gradient exists twice while it is put into its bucket, beside the one before it, half as large (`down` after
    `gate_up`), as it was sent and as it arrives.
    """
    t, D = layout.micro_batch * seq_len // layout.tp, c.hidden_size
    found = 0.0
    if layout.ep > 1:
        copies = min(c.num_experts_per_tok, layout.ep) * t
        found += 2 * copies * D * 1.05 + 2 * copies * D * 2
    if layout.tp > 1:
        found += layout.micro_batch * seq_len * D * 3.1
    if layout.zero == 2 and layout.dp > 1:
        return int(found + max(3 * largest_gradient(c, layout) * gradients.itemsize, 4 * BUCKET_BYTES))
    return int(found + (2 * BUCKET_BYTES if layout.dp > 1 else 0))


def peer_buffers(c: ModelConfig, recipe: Recipe, layout: Layout, seq_len: int, hidden: torch.dtype = torch.bfloat16) -> int:
    """What parallel/peer.py holds for good, outside of the allocator: both ranks' rows and slots, and sums on their way back."""
    b, t = Bytes(recipe, hidden), layout.micro_batch * seq_len // layout.tp
    gathered = 2 * (c.hidden_size * b.activation + slot_bytes(c.num_experts_per_tok))
    return int(t * (gathered + c.hidden_size * b.hidden)) if layout.has_peer else 0


def memory(
    c: ModelConfig,
    recipe: Recipe,
    states: States,
    layout: Layout,
    seq_len: int,
    hidden: torch.dtype = torch.bfloat16,
    gradients: torch.dtype = torch.float32,
) -> Memory:
    """What one rank needs; `hidden` is the residual stream's type, `gradients` the accumulators'."""
    count = static(c, recipe, states, layout.tp, layout.ep, gradients)
    shards = {"dense": layout.dp, "expert": layout.edp} if layout.zero else {"dense": 1, "expert": 1}
    held = {"weights": count["dense weights"] + count["expert weights"], "gradients": 0, "states": 0}
    held["transposes"] = layout.keep_transposed * (count["dense transposes"] + count["expert transposes"])
    for kind, size in shards.items():
        held["states"] += count[f"{kind} states"] // size
        own = 4 * count[f"{kind} parameters"] // size  # owners' sums, in FP32
        held["gradients"] += own if layout.zero == 2 and size > 1 else count[f"{kind} gradients"]
    held["communication"] = communication_buffers(c, layout, seq_len, gradients)
    held["peer buffers"] = peer_buffers(c, recipe, layout, seq_len, hidden)
    short = working(c, recipe, layout, seq_len, hidden)
    if layout.zero:
        parts = {kind: count[f"{kind} weights"] * (size + 1) // size for kind, size in shards.items() if size > 1}
        short["weight gather"] = sum(parts.values())  # what is sent, and what arrives
    return Memory(held, kept(c, recipe, layout, seq_len, hidden), short)


def local_parameters(c: ModelConfig, recipe: Recipe, states: States, layout: Layout) -> dict[str, int]:
    """Parameters that one rank holds: "dense", "experts"; and "replicated", those dense ones that tp does not split."""
    found = static(c, recipe, states, layout.tp, layout.ep)
    return {"dense": found["dense parameters"], "experts": found["expert parameters"], "replicated": found["dense replicated"]}
