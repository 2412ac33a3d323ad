"""The model again, as plainly as it can be said: one process, autograd, a loop over experts. What every layout must equal.

It shares with the model only pieces that tests/model checks against the published outputs: routing choice, RoPE, attention core.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8.qk_norm_rope import apply_rope
from fp8.rms_norm import rms_norm_ref
from fp8.route import select_experts
from fp8.swiglu import swiglu_ref
from model.attention import attend, rope_tables
from model.config import ModelConfig
from model.experts import routed_experts_ref
from model.loss import count_valid, mtp_inputs


@dataclass
class Reference:
    """Weights by global name, expert biases by router name, and the counts of the last forward."""

    config: ModelConfig
    weights: dict[str, Tensor]
    biases: dict[str, Tensor]
    counts: dict[str, Tensor] = field(default_factory=dict)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm_ref(x, self.weights[name], self.config.rms_norm_eps)

    def attention(self, h: Tensor, name: str, batch: int) -> Tensor:
        c, w = self.config, self.weights
        qkv = self.norm(h, f"{name}.norm") @ w[f"{name}.qkv"].t()
        heads, kv = c.num_attention_heads, c.num_key_value_heads
        q, k, v = qkv.unflatten(-1, (-1, c.head_dim)).split([heads, kv, kv], dim=1)
        positions = torch.arange(h.shape[0]) % (h.shape[0] // batch)
        rope = rope_tables(positions, c.rotary_dim, c.rope_theta, h.dtype)
        q, k = apply_rope(self.norm(q, f"{name}.q_norm"), *rope), apply_rope(self.norm(k, f"{name}.k_norm"), *rope)
        q, k, v = (t.unflatten(0, (batch, -1)) for t in (q, k, v))
        return attend(q, k, v, None).flatten(2).flatten(0, 1) @ w[f"{name}.out"].t()

    def mlp(self, x: Tensor, name: str) -> Tensor:
        return swiglu_ref(x @ self.weights[f"{name}.gate_up"].t()) @ self.weights[f"{name}.down"].t()

    def moe(self, h: Tensor, name: str, batch: int) -> tuple[Tensor, Tensor]:
        c, w, x = self.config, self.weights, self.norm(h, f"{name}.norm")
        logits = x @ w[f"{name}.router.weight"].t()
        scores, k, num_experts = torch.sigmoid(logits), c.num_experts_per_tok, c.num_experts
        ids = select_experts(scores.detach() + self.biases[f"{name}.router"], c.n_group, c.topk_group, k)
        self.counts[f"{name}.router"] = torch.bincount(ids.flatten(), minlength=num_experts)
        chosen = scores.gather(1, ids)
        weights = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor
        y = routed_experts_ref(x, ids, weights, w[f"{name}.experts.gate_up"], w[f"{name}.experts.down"])
        z = c.router_z_loss_weight * torch.logsumexp(logits, -1).square().mean()
        one_hot = F.one_hot(ids, num_experts).sum(1).float().unflatten(0, (batch, -1))
        share = F.logsigmoid(logits).softmax(-1).unflatten(0, (batch, -1))
        balance = (one_hot.mean(1) * num_experts / k * share.mean(1)).sum() / batch
        return y + self.mlp(x, f"{name}.shared"), z + c.aux_loss_weight * balance

    def layer(self, h: Tensor, name: str, batch: int, dense: bool) -> tuple[Tensor, Tensor | float]:
        h = h + self.attention(h, f"{name}.attention", batch)
        block = f"{name}.block"
        if dense:
            return h + self.mlp(self.norm(h, f"{block}.norm"), f"{block}.mlp"), 0.0
        y, aux = self.moe(h, block, batch)
        return h + y, aux

    def loss(self, tokens_BS: Tensor, labels_BS: Tensor, with_ce: bool = True) -> Tensor:
        """Mean cross-entropies of the global batch plus the weighted auxiliary losses."""
        c, w, batch = self.config, self.weights, tokens_BS.shape[0]
        valid = count_valid(tokens_BS, labels_BS)
        h, total = w["embedding"][tokens_BS.flatten()], torch.zeros(())
        for i in range(c.num_hidden_layers):
            h, aux = self.layer(h, f"layers.{i}", batch, i < c.first_k_dense_replace)
            total = total + aux
        x = self.norm(h, "norm")
        next_tokens, mtp_labels = mtp_inputs(tokens_BS, labels_BS, None)
        e = w["embedding"][next_tokens.flatten()]
        both = torch.cat([self.norm(e, "mtp.enorm"), self.norm(x, "mtp.hnorm")], dim=-1)
        h = both @ w["mtp.eh_proj"].t()
        h = h + self.attention(h, "mtp.attention", batch)
        y, aux = self.moe(h, "mtp.block", batch)
        y = self.norm(h + y, "mtp.final_norm")
        total = total + aux
        if with_ce:
            total = total + self._ce(x, labels_BS) / valid.ce + c.mtp_loss_weight * self._ce(y, mtp_labels) / valid.mtp
        return total

    def _ce(self, x: Tensor, labels_BS: Tensor) -> Tensor:
        return F.cross_entropy(x @ self.weights["head"].t(), labels_BS.flatten(), ignore_index=-100, reduction="sum")
