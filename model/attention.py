"""Grouped-query attention: fused qkv in [Q | K | V] order, QK-norm before half-RoPE, causal core.

Shapes: T = B * S tokens (B sequences of S), D features, H query heads, K key/value heads, d head dimension, r rotary dimensions.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fp8.activation import Activation
from fp8.linear import quantize_activation
from fp8.qk_norm_rope import qk_norm_rope
from fp8.recipe import Recipe
from fp8.recompute import recompute_from
from fp8.residual import add_residual
from fp8.rms_norm import rms_norm_quantize
from fp8.stash import Stash
from fp8.weight import Weight
from model.config import ModelConfig
from parallel.linear import column_linear, row_linear
from parallel.mesh import Mesh
from parallel.split import split_weight


def rope_tables(positions_T: Tensor, rotary_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin) [T, 1, rotary_dim]: angles in FP32 over the rotary dimension (not the head's), then cast."""
    inv_freq = 1.0 / theta ** (torch.arange(0, rotary_dim, 2, device=positions_T.device, dtype=torch.float32) / rotary_dim)
    angles = positions_T.float()[:, None] * inv_freq
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


@dataclass
class KVCache:
    """Keys and values of earlier positions, by layer: [B, S, K, d] each. Grows as generation goes on."""

    layers: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Positions held."""
        return next(iter(self.layers.values()))[0].shape[1] if self.layers else 0

    def append(self, name: str, k_BSKd: Tensor, v_BSKd: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the new positions of one layer; returns all of them."""
        if name in self.layers:
            k_BSKd = torch.cat([self.layers[name][0], k_BSKd], dim=1)
            v_BSKd = torch.cat([self.layers[name][1], v_BSKd], dim=1)
        self.layers[name] = (k_BSKd, v_BSKd)
        return k_BSKd, v_BSKd

    def truncate(self, length: int) -> None:
        """Forgets the positions from `length` on."""
        self.layers = {name: (k[:, :length], v[:, :length]) for name, (k, v) in self.layers.items()}


def attend(q_BSHd: Tensor, k_BSKd: Tensor, v_BSKd: Tensor, cu_seqlens: Tensor | None, max_seqlen: int = 0) -> Tensor:
    """Causal attention core -> [B, S, H, d]; softmax in FP32, scale d^-1/2.

    Args:
        cu_seqlens: int32 ends of packed documents over the flattened B * S tokens (leading 0); no attention across them.
        k_BSKd, v_BSKd: may hold more (earlier) positions than the queries: the queries are the last ones.
    """
    if cu_seqlens is not None:
        return _attend_documents(q_BSHd, k_BSKd, v_BSKd, cu_seqlens, max_seqlen)
    q, k, v = (x.transpose(1, 2) for x in (q_BSHd, k_BSKd, v_BSKd))
    new, total = q.shape[2], k.shape[2]
    if new == total:
        with _fastest(q):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    else:
        mask = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return y.transpose(1, 2)


def _fastest(q: Tensor) -> AbstractContextManager:
    """On a GPU cuDNN first (forward and backward about twice as fast as flash on Hopper); under determinism flash, whose backward
    then adds in a fixed order."""
    if not q.is_cuda:
        return nullcontext()
    first = [] if torch.are_deterministic_algorithms_enabled() else [SDPBackend.CUDNN_ATTENTION]
    return sdpa_kernel([*first, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True)


def _attend_documents(q_BSHd: Tensor, k_BSKd: Tensor, v_BSKd: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Packed documents: the varlen kernel on a GPU (no T x T mask), one call a document on a CPU."""
    shape = q_BSHd.shape
    q, k, v = (x.flatten(0, 1) for x in (q_BSHd, k_BSKd, v_BSKd))
    if q.is_cuda:
        return _varlen(q, k, v, cu_seqlens, max_seqlen or shape[1]).view(shape)
    ends = cu_seqlens.tolist()
    parts = [attend(q[None, a:b], k[None, a:b], v[None, a:b], None)[0] for a, b in zip(ends[:-1], ends[1:], strict=True) if b > a]
    return torch.cat(parts).view(shape)


def _varlen(q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """torch.nn.attention.varlen under the argument names of torch 2.11 to 2.14."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    causal = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    if "enable_gqa" in known:
        causal["enable_gqa"] = True
    else:
        groups = q_THd.shape[1] // k_TKd.shape[1]
        k_TKd, v_TKd = (x.repeat_interleave(groups, dim=1) for x in (k_TKd, v_TKd))
    return varlen_attn(q_THd, k_TKd, v_TKd, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **causal)


@dataclass(frozen=True, eq=False)
class Context:
    """What every layer of one forward shares.

    Attributes:
        batch, seq_len: B and S; hidden states travel as [B * S, D].
        rope: (cos, sin) tables.
        cu_seqlens, max_seqlen: packed documents, or None and 0.
        num_tokens: 0-dim, tokens of the global batch: the divisor of the router's auxiliary losses.
        cache: keys and values of earlier positions, in generation.
        recomputing: this is the second run of a layer, in backward: nothing is counted again.
    """

    batch: int
    seq_len: int
    rope: tuple[Tensor, Tensor]
    cu_seqlens: Tensor | None
    max_seqlen: int
    num_tokens: Tensor
    cache: KVCache | None
    recomputing: bool = False

    def again(self) -> Context:
        """The context of the second run."""
        return replace(self, recomputing=True)


WHOLE_LAYER = 4  # activation stage from which a layer keeps nothing but its input
FREE_QKV = 3  # stage from which attention keeps its quantised input and output only


class Attention(nn.Module):
    """Pre-normed attention block: h [t, D] -> h + attention(norm(h)).

    Heads are split over tp; between them tokens are (t = T / tp under sequence parallel).
    """

    def __init__(self, config: ModelConfig, recipe: Recipe, mesh: Mesh, stash: Stash, name: str, stage: int) -> None:
        super().__init__()
        c, tp = config, mesh.tp
        self.config, self.tp, self.stash, self.name, self.stage = c, tp, stash, name, stage
        std, fp32, d = c.initializer_range, Recipe.fp32(), c.head_dim
        self.norm = Weight(c.hidden_size, recipe=fp32, init_std=None, decay=False, tp_partial=tp.sequence)
        q_rows, kv_rows = c.num_attention_heads * d, c.num_key_value_heads * d
        sections = [(q_rows, d), (kv_rows, d), (kv_rows, d)]
        self.qkv = split_weight((c.qkv_size, c.hidden_size), 0, tp, recipe, sections, init_std=std)
        self.q_norm = Weight(c.head_dim, recipe=fp32, init_std=None, decay=False, tp_partial=True)
        self.k_norm = Weight(c.head_dim, recipe=fp32, init_std=None, decay=False, tp_partial=True)
        self.out = split_weight((c.hidden_size, q_rows), 1, tp, recipe, init_std=std)

    def forward(self, h_TD: Tensor, ctx: Context) -> Tensor:
        eps = self.config.rms_norm_eps
        rebuild = self.stage >= 2
        x = rms_norm_quantize(h_TD, self.norm, eps, self.qkv, self.stash, f"{self.name}.norm", rebuild, plain=False)
        if self.stage >= FREE_QKV and torch.is_grad_enabled():
            y_TD = recompute_from(partial(self._core, ctx), x.edge, self.qkv.anchor, self.stash)
        else:
            y_TD = self._core(ctx, x.edge)
        out_TD = row_linear(quantize_activation(y_TD, self.out, self.stash, f"{self.name}.core"), self.out, self.tp)
        return add_residual(x.h_TD, out_TD)

    def _core(self, ctx: Context, x: Activation) -> Tensor:
        """Normed input [t, D] -> heads' outputs [T, H * d]: qkv, QK-norm, RoPE, attention."""
        c, eps = self.config, self.config.rms_norm_eps
        qkv = column_linear(x, self.qkv, self.tp).view(-1, self.qkv.data.shape[0] // c.head_dim, c.head_dim)
        q, k, v = qk_norm_rope(qkv, self.q_norm, self.k_norm, ctx.rope, c.num_attention_heads // self.tp.size, eps)
        q, k, v = (t.unflatten(0, (ctx.batch, ctx.seq_len)) for t in (q, k, v))
        if ctx.cache is not None:
            k, v = ctx.cache.append(self.name, k, v)
        return attend(q, k, v, ctx.cu_seqlens, ctx.max_seqlen).flatten(2).flatten(0, 1)
