"""A fair peer for plain decoding: transformers' `generate` on a Llama of the target's size.

Fair means: static cache, conditional and unconditional rows as one batch of two, guidance by a processor over the pair. (The
library's own guidance processor runs a second forward per token.)
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList


class PairGuidance(LogitsProcessor):
    """Guides the first half of the rows by the second and draws one token for both.

    The draw is made here because both rows must go on with the same token; `generate` then takes the only one left.
    """

    def __init__(self, scale: float, temperature: float):
        self.scale, self.temperature = scale, temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Logits [2B, V] -> [2B, V], 0 at the drawn token and -inf elsewhere."""
        conditional, unconditional = scores.chunk(2)
        guided = torch.lerp(unconditional, conditional, self.scale) / self.temperature
        token = torch.multinomial(guided.softmax(-1), 1)
        return torch.full_like(scores, -torch.inf).scatter_(1, token.repeat(2, 1), 0.0)


class Sampler(LogitsProcessor):
    """Draws one token per row, for runs without guidance."""

    def __init__(self, temperature: float):
        self.temperature = temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Logits [B, V] -> [B, V], 0 at the drawn token and -inf elsewhere."""
        token = torch.multinomial((scores / self.temperature).softmax(-1), 1)
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)


class Peer:
    """A randomly initialised Llama with the layers, widths, heads and vocabulary of a target.

    target: a `DiscreteTarget`. scale, temperature: as our own run uses them; scale 1 runs no unconditional rows.
    """

    def __init__(self, target: Any, scale: float, temperature: float):
        shape = target.backbone.config
        config = LlamaConfig(
            vocab_size=target.vocab_size,
            hidden_size=shape.dim,
            intermediate_size=shape.ffn,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.groups,
            head_dim=shape.width,
            max_position_embeddings=8192,
            bos_token_id=0,
            eos_token_id=None,
            pad_token_id=None,
            attn_implementation="sdpa",
        )
        weight = next(target.parameters())
        self.model = LlamaForCausalLM(config).to(weight.device, weight.dtype).eval()
        self.guided = scale != 1.0
        self.processor = PairGuidance(scale, temperature) if self.guided else Sampler(temperature)

    @torch.inference_mode()
    def draw(self, batch: int, count: int, prompt: int = 2, cache: str = "static") -> float:
        """Generate `count` tokens for `batch` images after `prompt` tokens; returns seconds."""
        ids = torch.zeros(batch * (2 if self.guided else 1), prompt, dtype=torch.long, device=self.model.device)
        begun = time.perf_counter()
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            use_cache=True,
            cache_implementation=cache if cache == "static" else None,
            logits_processor=LogitsProcessorList([self.processor]),
        )
        seconds = time.perf_counter() - begun
        if out.shape[1] != prompt + count:
            raise RuntimeError(f"the peer stopped after {out.shape[1] - prompt} of {count} tokens")
        return seconds
