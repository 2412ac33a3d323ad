"""Multi-token prediction: one more decoder layer that predicts the token after next.

    h'_i = eh_proj([enorm(emb(t_{i+1})) | hnorm(h_i)])      h_i: the trunk's output after the final norm
then a whole MoE layer, `final_norm`, and the trunk's own head. Embedding and head are shared.
Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2; layout of Ling 2.0.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from fp8.linear import linear, quantize_activation
from fp8.recipe import Recipe
from fp8.recompute import recompute
from fp8.rms_norm import rms_norm
from fp8.stash import Stash
from fp8.weight import Weight
from model.attention import WHOLE_LAYER, Attention, Context
from model.config import ModelConfig
from model.moe import MoE
from parallel.mesh import Mesh


class MTP(nn.Module):
    """(h [t, D] normed trunk output, e [t, D] embeddings of the next tokens) -> hidden states [t, D] before `final_norm`.

    Its projection is not split: under sequence parallel each tp rank runs its own tokens through the whole of it.
    """

    def __init__(self, config: ModelConfig, recipe: Recipe, mesh: Mesh, stash: Stash, name: str, stage: int) -> None:
        super().__init__()
        c, own = config, mesh.tp.sequence
        self.config, self.stash, self.name, self.whole = c, stash, name, stage >= WHOLE_LAYER
        stage = 0 if self.whole else stage  # while it is recomputed, everything stays
        norm = dict(recipe=Recipe.fp32(), init_std=None, decay=False, tp_partial=own)
        std = c.initializer_range
        self.enorm = Weight(c.hidden_size, **norm)
        self.hnorm = Weight(c.hidden_size, **norm)
        self.eh_proj = Weight(c.hidden_size, 2 * c.hidden_size, recipe=recipe, init_std=std, tp_partial=own)
        self.attention = Attention(c, recipe, mesh, stash, f"{name}.attention", stage)
        self.block = MoE(c, recipe, mesh, stash, f"{name}.block", stage)
        self.final_norm = Weight(c.hidden_size, **norm)

    def forward(self, h_TD: Tensor, e_TD: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        if self.whole and torch.is_grad_enabled():
            return recompute(partial(self._run, ctx), partial(self._run, ctx.again()), self.eh_proj.anchor, h_TD, e_TD)
        return self._run(ctx, h_TD, e_TD)

    def _run(self, ctx: Context, h_TD: Tensor, e_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        eps = self.config.rms_norm_eps
        both = torch.cat([rms_norm(e_TD, self.enorm, eps), rms_norm(h_TD, self.hnorm, eps)], dim=-1)
        x_TD = linear(quantize_activation(both, self.eh_proj, self.stash, f"{self.name}.eh"), self.eh_proj)
        return self.block(self.attention(x_TD, ctx), ctx)
