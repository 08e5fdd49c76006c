"""One Llama-family decoder for every discrete model family.

A family (one file beside this one) says how prompts, positions, grammar and output heads work; the transformer in between is
the same for all of them: pre-norm, fused q/k/v, rotary positions in interleaved (even, odd) pairs, SwiGLU. Checkpoints whose
rotary pairs are stored as two halves are permuted once when they are loaded, so there is a single code path here.

Source: Touvron et al. 2023 (Llama); Sun et al. 2024 (LlamaGen) for the 2-D rotary table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..decoding.cache import Cache
from ..decoding.layout import Layout


@dataclass(frozen=True)
class BackboneConfig:
    """Shape of a decoder. `kv_heads` < `heads` is grouped-query attention; `head_dim` defaults to dim / heads.

    qk_norm: queries and keys are normalised, per head (False: not; True: by `norm`, one gain for all heads; "heads": LayerNorm
    with a gain and a bias of each head's own). post_norm: the branches' outputs are normalised, not their inputs.
    """

    dim: int
    layers: int
    heads: int
    ffn: int
    kv_heads: int | None = None
    head_dim: int | None = None
    norm: str = "rms"
    eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool | str = False
    post_norm: bool = False

    @property
    def width(self) -> int:
        """Features per head."""
        return self.head_dim or self.dim // self.heads

    @property
    def groups(self) -> int:
        """Key/value heads."""
        return self.kv_heads or self.heads


def make_norm(kind: str, dim: int, eps: float) -> nn.Module:
    """`rms` (RMSNorm) or `layer` (LayerNorm without bias, a single fused kernel on the CPU)."""
    if kind == "rms":
        return nn.RMSNorm(dim, eps=eps)
    if kind == "layer":
        return nn.LayerNorm(dim, eps=eps, bias=False)
    raise ValueError(f"unknown norm {kind!r}; choose 'rms' or 'layer'")


class HeadNorm(nn.Module):
    """LayerNorm over the features of each head of [..., heads, width], with a gain and a bias per head (Chameleon)."""

    def __init__(self, heads: int, width: int, eps: float = 1e-5):
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(heads, width)), nn.Parameter(torch.zeros(heads, width)), eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., heads, width] -> the same."""
        return F.layer_norm(x, x.shape[-1:], eps=self.eps) * self.weight + self.bias


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Turn the (even, odd) feature pairs of x [R, T, H, hd] by the unit complex numbers rotary [R or 1, T, hd / 2]."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    turned = torch.view_as_complex(wide.unflatten(-1, (-1, 2))) * rotary.unsqueeze(2)
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


def axis_angles(index: Tensor, pairs: int, base: float) -> Tensor:
    """Angles index * base^(-i / pairs), i < pairs: float64 [..., pairs] for integer positions index [...]."""
    exponent = torch.arange(pairs, dtype=torch.float64, device=index.device) / pairs
    return index.double().unsqueeze(-1) * base**-exponent


class Attention(nn.Module):
    """Causal self-attention, with or without a position-indexed cache."""

    def __init__(self, config: BackboneConfig):
        super().__init__()
        self.heads, self.groups, self.width = config.heads, config.groups, config.width
        self.qkv = nn.Linear(config.dim, (self.heads + 2 * self.groups) * self.width, bias=config.qkv_bias)
        self.out = nn.Linear(self.heads * self.width, config.dim, bias=False)
        self.q_norm = self._make_norm(config, self.heads)
        self.k_norm = self._make_norm(config, self.groups)

    def _make_norm(self, config: BackboneConfig, heads: int) -> nn.Module | None:
        if config.qk_norm == "heads":
            return HeadNorm(heads, self.width)
        return make_norm(config.norm, self.width, config.eps) if config.qk_norm else None

    def forward(self, x: Tensor, rotary: Tensor, mask: Tensor, cache: Cache | None, layer: int, layout: Layout | None) -> Tensor:
        """x [R, T, D] -> [R, T, D]; mask additive float [R or 1, 1, T, S] over the keys that are read."""
        rows, steps, _ = x.shape
        queries_keys, value = self.qkv(x).split(((self.heads + self.groups) * self.width, self.groups * self.width), -1)
        queries_keys = queries_keys.view(rows, steps, self.heads + self.groups, self.width)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = queries_keys.split((self.heads, self.groups), 2)
            queries_keys = torch.cat((self.q_norm(query), self.k_norm(key)), 2)
        query, key = rotate(queries_keys, rotary).split((self.heads, self.groups), 2)
        value = value.view(rows, steps, self.groups, self.width)
        if cache is not None and layout is not None:
            key, value = cache.update(layer, layout, key, value)
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            enable_gqa=self.groups != self.heads,
        )
        return self.out(mixed.transpose(1, 2).reshape(rows, steps, self.heads * self.width))


class Block(nn.Module):
    """Attention and SwiGLU, each on the normalised residual stream, or with post_norm on the stream as it is."""

    def __init__(self, config: BackboneConfig):
        super().__init__()
        self.post_norm = config.post_norm
        self.attention_norm = make_norm(config.norm, config.dim, config.eps)
        self.attention = Attention(config)
        self.ffn_norm = make_norm(config.norm, config.dim, config.eps)
        self.gate_up = nn.Linear(config.dim, 2 * config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.dim, bias=False)

    def forward(self, x: Tensor, rotary: Tensor, mask: Tensor, cache: Cache | None, layer: int, layout: Layout | None) -> Tensor:
        """x [R, T, D] -> [R, T, D]."""
        if self.post_norm:
            x = x + self.attention_norm(self.attention(x, rotary, mask, cache, layer, layout))
            return x + self.ffn_norm(self._feed(x))
        x = x + self.attention(self.attention_norm(x), rotary, mask, cache, layer, layout)
        return x + self._feed(self.ffn_norm(x))

    def _feed(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Backbone(nn.Module):
    """The stack of blocks and the final norm."""

    def __init__(self, config: BackboneConfig):
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = make_norm(config.norm, config.dim, config.eps)

    def forward(
        self, x: Tensor, rotary: Tensor, mask: Tensor, cache: Cache | None = None, layout: Layout | None = None
    ) -> Tensor:
        """Features the output head reads.

        x: embeddings [R, T, D]; rotary: complex [R or 1, T, hd / 2]; mask: additive float [R or 1, 1, T, S].
        With a cache, keys and values go to the slots `layout` names, S is `layout.tier`, and the result is also kept in the
        cache's hidden plane. Returns [R, T, D].
        """
        for layer, block in enumerate(self.blocks):
            x = block(x, rotary, mask, cache, layer, layout)
        x = self.norm(x)
        if cache is not None and layout is not None:
            cache.update_hidden(layout, x)
        return x
