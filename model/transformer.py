"""BailingMoeV2 (Ling 2.0), top to bottom.

Shapes: B sequences of S tokens, T = B * S, t = T / tp of this rank under sequence parallel (else T), D features, V vocabulary.
Between layers the residual stream h is [t, D].

    h = embedding(tokens)
    each layer:   h += attention(norm(h));  h += mlp_or_moe(norm(h))
    x = norm(h);  loss = cross_entropy(x . head^T)  [+ mtp_loss_weight * loss of the token after next]  + router losses
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8.cross_entropy import head_loss
from fp8.gemm import gemm_nt
from fp8.recipe import Recipe
from fp8.recompute import recompute
from fp8.rms_norm import Normed, rms_norm_quantize
from fp8.stash import Stash
from fp8.weight import Weight, weights
from model.attention import WHOLE_LAYER, Attention, Context, KVCache, rope_tables
from model.config import ModelConfig
from model.loss import Losses, NumValid, mtp_inputs
from model.moe import DenseBlock, MoE
from model.mtp import MTP
from model.policy import Stages, apply_recipe, layer_kind, share_scales, stage_of
from parallel.collectives import all_gather
from parallel.mesh import Mesh
from parallel.sequence import gather_activation, sum_value, vocab_axis, vocab_embedding
from parallel.split import split_weight


class Layer(nn.Module):
    """h += attention(h); h += block(h). Returns (h, weighted auxiliary losses, z-loss for the log)."""

    def __init__(self, config: ModelConfig, recipe: Recipe, mesh: Mesh, stash: Stash, index: int, stage: int) -> None:
        super().__init__()
        name = f"layers.{index}"
        block = DenseBlock if index < config.first_k_dense_replace else MoE
        self.whole = stage >= WHOLE_LAYER
        stage = 0 if self.whole else stage  # while it is recomputed, everything stays
        self.attention = Attention(config, recipe, mesh, stash, f"{name}.attention", stage)
        self.block = block(config, recipe, mesh, stash, f"{name}.block", stage)

    def forward(self, h_TD: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        if self.whole and torch.is_grad_enabled():
            return recompute(partial(self._run, ctx), partial(self._run, ctx.again()), self.attention.qkv.anchor, h_TD)
        return self._run(ctx, h_TD)

    def _run(self, ctx: Context, h_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.block(self.attention(h_TD, ctx), ctx)


class Transformer(nn.Module):
    """The whole model on this rank.

    Args:
        recipe: numbers of every GEMM. Embedding, norms and router stay in high precision.
        mesh: the ranks each layer communicates on; `Mesh.solo()` for one process.
        dtype: of the residual stream; BF16 on a GPU, FP32 on a CPU and in the fp32 recipe.
        stage: activation policy, what is recomputed instead of kept (docs/numerics.md): 0 to 4 for all layers, or by layer class or
            name, e.g. {"dense": 1, "moe": 3, "layers.0": 4}.
    """

    def __init__(
        self,
        config: ModelConfig,
        recipe: Recipe,
        mesh: Mesh | None = None,
        dtype: torch.dtype = torch.bfloat16,
        stage: Stages = 0,
    ) -> None:
        super().__init__()
        c = config
        self.config, self.recipe, self.dtype, self.stash = c, recipe, dtype, Stash()
        self.mesh = mesh = Mesh.solo() if mesh is None else mesh
        uses = 1 + c.num_nextn_predict_layers  # embedding and head serve the MTP layer too
        plain = Recipe.fp32() if recipe.name == "fp32" else Recipe.bf16()
        vd, std = (c.vocab_size, c.hidden_size), c.initializer_range
        own = mesh.tp.sequence
        embedding_std = std if c.embedding_init_std is None else c.embedding_init_std
        self.embedding = split_weight(vd, 0, mesh.tp, plain, init_std=embedding_std, num_uses=uses)
        stages = [stage_of(stage, f"layers.{i}", layer_kind(c, i), c.num_hidden_layers) for i in range(c.num_hidden_layers)]
        self.layers = nn.ModuleList(Layer(c, recipe, mesh, self.stash, i, s) for i, s in enumerate(stages))
        self.norm = Weight(c.hidden_size, recipe=Recipe.fp32(), init_std=None, decay=False, tp_partial=own)
        self.head = split_weight(vd, 0, mesh.tp, recipe, init_std=std, num_uses=uses)
        mtp_stage = stage_of(stage, "mtp", "mtp", c.num_hidden_layers)
        self.mtp = MTP(c, recipe, mesh, self.stash, "mtp", mtp_stage) if c.num_nextn_predict_layers else None
        apply_recipe(self, recipe, c.num_hidden_layers)
        share_scales(self, mesh)
        for name, weight in weights(self):
            weight.name = name

    def _context(self, tokens_BS: Tensor, positions_BS: Tensor | None, **rest: object) -> Context:
        c, (batch, seq_len) = self.config, tokens_BS.shape
        if positions_BS is None:
            cache = rest["cache"]
            start = cache.length if cache is not None else 0
            positions_BS = torch.arange(start, start + seq_len, device=tokens_BS.device).expand(batch, seq_len)
        rope = rope_tables(positions_BS.flatten(), c.rotary_dim, c.rope_theta, self.dtype)
        return Context(batch, seq_len, rope, **rest)

    def _trunk(self, tokens_BS: Tensor, ctx: Context) -> tuple[Normed, Tensor, Tensor]:
        """Final-normed hidden states, and the layers' auxiliary losses and z-losses summed."""
        h_TD = vocab_embedding(tokens_BS.flatten(), self.embedding, self.mesh.tp, self.dtype)
        aux_sum = z_sum = torch.zeros((), device=tokens_BS.device)
        for layer in self.layers:
            h_TD, aux, z = layer(h_TD, ctx)
            aux_sum, z_sum = aux_sum + aux, z_sum + z
        return self._head_input(h_TD, self.norm, "norm"), aux_sum, z_sum

    def _head_input(self, h_TD: Tensor, norm: Weight, name: str) -> Normed:
        plain = self.mtp is not None and norm is self.norm  # the MTP layer reads the trunk's output
        return rms_norm_quantize(h_TD, norm, self.config.rms_norm_eps, self.head, self.stash, name, plain=plain)

    def _loss(self, x: Normed, labels_BS: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        c, tp = self.config, self.mesh.tp
        edge, vocab = gather_activation(x.edge, tp), vocab_axis(self.head, tp)
        return head_loss(edge, self.head, labels_BS.flatten(), scale, c.head_z_loss_weight, c.loss_chunk, vocab)

    def _mtp_hidden(self, x: Normed, next_tokens_BS: Tensor, ctx: Context) -> tuple[Normed, Tensor, Tensor]:
        e_TD = vocab_embedding(next_tokens_BS.flatten(), self.embedding, self.mesh.tp, self.dtype)
        h_TD, aux, z = self.mtp(x.x_TD, e_TD, ctx)
        return self._head_input(h_TD, self.mtp.final_norm, "mtp.norm"), aux, z

    def forward(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor,
        num_valid: NumValid,
        positions_BS: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int = 0,
    ) -> Losses:
        """Loss of one micro-batch.

        Args:
            tokens_BS, labels_BS: int64; labels are the next token, -100 where ignored.
            num_valid: counts of the global batch (all ranks, all micro-batches).
            positions_BS, cu_seqlens, max_seqlen: packed documents that must not see each other.
        """
        c = self.config
        isolated = positions_BS if cu_seqlens is not None else None
        rest = dict(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, num_tokens=num_valid.tokens, cache=None)
        ctx = self._context(tokens_BS, positions_BS, **rest)
        x, aux, z = self._trunk(tokens_BS, ctx)
        total, ce_sum = self._loss(x, labels_BS, 1.0 / num_valid.ce.clamp(min=1))
        next_tokens, mtp_labels = mtp_inputs(tokens_BS, labels_BS, isolated)
        mtp_sum = torch.zeros_like(ce_sum)
        if self.mtp is not None:
            y, mtp_aux, mtp_z = self._mtp_hidden(x, next_tokens, ctx)
            mtp_loss, mtp_sum = self._loss(y, mtp_labels, c.mtp_loss_weight / num_valid.mtp.clamp(min=1))
            total, aux, z = total + mtp_loss, aux + mtp_aux, z + mtp_z
        num_moe = c.num_hidden_layers - c.first_k_dense_replace + c.num_nextn_predict_layers
        counts = (labels_BS != -100).sum(), (mtp_labels != -100).sum()
        aux, z = sum_value(aux, self.mesh.tp), sum_value(z, self.mesh.tp)
        return Losses(total + aux, ce_sum, mtp_sum, *counts, z / max(num_moe, 1), aux.detach())

    @torch.no_grad()
    def logits(self, tokens_BS: Tensor, cache: KVCache | None = None) -> Tensor:
        """Next-token logits [B, S, V] fp32 of `tokens` that follow what `cache` holds; appends to the cache.

        Any S under any tp: tokens behind the last one, which no token before them sees, fill up what does not split.
        """
        seq_len, tp = tokens_BS.shape[1], self.mesh.tp.size
        end = seq_len + (cache.length if cache is not None else 0)
        tokens_BS = F.pad(tokens_BS, (0, -seq_len % tp))
        rest = dict(cu_seqlens=None, max_seqlen=0, num_tokens=torch.tensor(1, device=tokens_BS.device), cache=cache)
        x, _, _ = self._trunk(tokens_BS, self._context(tokens_BS, None, **rest))
        if cache is not None and tokens_BS.shape[1] > seq_len:
            cache.truncate(end)
        return self._logits(x, tokens_BS.shape)[:, :seq_len]

    def _logits(self, x: Normed, shape: torch.Size) -> Tensor:
        tp = self.mesh.tp
        logits_Tv = gemm_nt(gather_activation(x.edge, tp).q, self.head.q, dtype=self.dtype).float()
        return all_gather(logits_Tv.t(), tp, "tp").t().unflatten(0, shape)

    @torch.no_grad()
    def mtp_logits(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        """Logits [B, S, V] fp32 for the token after next."""
        rest = dict(cu_seqlens=None, max_seqlen=0, num_tokens=torch.tensor(1, device=tokens_BS.device), cache=None)
        ctx = self._context(tokens_BS, None, **rest)
        x, _, _ = self._trunk(tokens_BS, ctx)
        y, _, _ = self._mtp_hidden(x, mtp_inputs(tokens_BS, labels_BS, None)[0], ctx)
        return self._logits(y, tokens_BS.shape)


def _generator(device: torch.device, *key: object) -> torch.Generator:
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


@torch.no_grad()
def initial_values(model: nn.Module, seed: int) -> Iterator[tuple[str, Weight, Tensor]]:
    """(name, weight, fp32 values) of every parameter: a function of seed, global name and (for experts) global expert id.

    Every layout therefore starts from the same model. Matrices are normal with `init_std`, norm weights one.
    """
    for name, weight in weights(model):
        device, shape = weight.data.device, weight.global_shape
        if weight.init_std is None:
            yield name, weight, torch.ones(weight.data.shape, device=device)
            continue
        value = torch.empty(weight.data.shape, dtype=torch.float32, device=device)
        if weight.expert:
            (piece,) = weight.pieces
            for local in range(value.shape[0]):
                value[local].normal_(0, weight.init_std, generator=_generator(device, seed, name, piece.offset[0] + local))
        else:
            whole = torch.empty(shape, dtype=torch.float32, device=device)
            whole.normal_(0, weight.init_std, generator=_generator(device, seed, name))
            for piece in weight.pieces:
                sizes = [s.stop - s.start for s in piece.local]
                value[piece.local] = whole[tuple(slice(o, o + n) for o, n in zip(piece.offset, sizes, strict=True))]
        yield name, weight, value
