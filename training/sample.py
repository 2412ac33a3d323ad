"""Text from a model, with a key/value cache and randomness of its own: a training run can sample without a trace."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model.attention import KVCache
from training.tokenizer import Tokenizer


def next_token(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Draws from softmax(logits / temperature) over the `top_k` best (0: all); temperature 0 takes the best."""
    if temperature == 0:
        return int(logits_V.argmax())
    if 0 < top_k < logits_V.numel():
        worst_kept = logits_V.topk(top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < worst_kept, float("-inf"))
    # On the CPU: the same draw on every device and on every rank.
    probabilities = torch.softmax(logits_V.double() / temperature, dim=-1).cpu()
    return int(torch.multinomial(probabilities, 1, generator=generator))


@torch.no_grad()
def generate(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    num_tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> str:
    """`prompt` and its continuation by up to `num_tokens` tokens, less where the document or the model's context ends.

    Ids past the tokenizer's vocabulary (padding rows of the head) are never drawn. Every rank of a model-parallel run
    calls it.
    """
    ids = tokenizer.encode(prompt) or [tokenizer.eos_id]
    limit = model.config.max_position_embeddings
    ids = ids[-max(limit - num_tokens, 1) :]
    generator = torch.Generator("cpu").manual_seed(seed)
    cache, new, was_training = KVCache(), [], model.training
    model.eval()
    try:
        pending = ids
        while len(new) < num_tokens and len(ids) + len(new) < limit:
            logits_BSV = model.logits(torch.tensor([pending], device=device), cache)
            token = next_token(logits_BSV[0, -1, : tokenizer.vocab_size], temperature, top_k, generator)
            if token == tokenizer.eos_id:
                break
            new.append(token)
            pending = [token]
    finally:
        model.train(was_training)
    return tokenizer.decode(tokenizer.encode(prompt) + new)
