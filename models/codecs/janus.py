"""The VQ tokenizer of LlamaGen and Janus: transformers' `JanusVQVAE` on any grid.

16384 codes of 8 dimensions on the unit sphere, 16 x 16 pixels per token (LlamaGen's VQ-8: 8 x 8). The codebook is l2-normalised
when it is looked up, and so are the encoder's features before the nearest code is taken.

Source: Sun et al. 2024 (LlamaGen, arXiv:2406.06525, section 2.1); Wu et al. 2024 (Janus, arXiv:2410.13848).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.utils.accelerate_utils import apply_forward_hook
from torch import Tensor

from ..checkpoint import Checkpoint
from ..weights import Part, Recipe


class JanusCodec(ModelMixin, ConfigMixin):
    """Pictures <-> tokens.

    Args:
        vocab_size: number of codes V; code_dim: dimensions of a code.
        latent_channels, base_channels, channel_multiplier, num_res_blocks: sizes of the convolutional encoder and decoder.
        downsample: pixels per token along each side, 2^(levels - 1).
    """

    @register_to_config
    def __init__(
        self,
        vocab_size: int = 16384,
        code_dim: int = 8,
        latent_channels: int = 256,
        base_channels: int = 128,
        channel_multiplier: Sequence[int] = (1, 1, 2, 2, 4),
        num_res_blocks: int = 2,
        downsample: int = 16,
    ) -> None:
        super().__init__()
        from transformers import JanusVQVAE
        from transformers.models.janus.configuration_janus import JanusVQVAEConfig

        if downsample != 2 ** (len(channel_multiplier) - 1):
            raise ValueError(
                f"{len(channel_multiplier)} levels make {2 ** (len(channel_multiplier) - 1)} pixels per token, "
                f"not downsample={downsample}"
            )
        self.vq = JanusVQVAE(
            JanusVQVAEConfig(
                num_embeddings=vocab_size,
                embed_dim=code_dim,
                latent_channels=latent_channels,
                base_channels=base_channels,
                channel_multiplier=list(channel_multiplier),
                num_res_blocks=num_res_blocks,
            )
        )

    def codebook(self) -> Tensor:
        """The codes as they are looked up: float32 [V, code_dim], l2-normalised."""
        return F.normalize(self.vq.quantize.embedding.weight.float(), dim=-1)

    @apply_forward_hook
    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] in [-1, 1], H and W multiples of `downsample` -> LongTensor [B, h, w]."""
        cell, (height, width) = self.config.downsample, pixels.shape[-2:]
        if height % cell or width % cell:
            raise ValueError(f"A picture of {height} x {width} px has no whole token grid; use multiples of {cell}.")
        latents = F.normalize(self.vq.quant_conv(self.vq.encoder(pixels.to(self.dtype))).float(), dim=1)
        return torch.einsum("bdhw,vd->bhwv", latents, self.codebook()).argmax(-1)

    @apply_forward_hook
    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Tensor:
        """LongTensor [B, h, w] -> pixels [B, 3, h * downsample, w * downsample], nominally in [-1, 1] (not clamped)."""
        codes = F.normalize(self.vq.quantize.embedding(tokens), dim=-1)
        return self.vq.decoder(self.vq.post_quant_conv(codes.permute(0, 3, 1, 2).contiguous()))


# -- checkpoints -----------------------------------------------------------------------------------------------------

# transformers' names -> LlamaGen's own.
_RENAMED = (
    (r"^(encoder|decoder)\.(?:down|up)\.(\d+)\.block\.", r"\1.conv_blocks.\2.res."),
    (r"^(encoder|decoder)\.(?:down|up)\.(\d+)\.", r"\1.conv_blocks.\2."),
    (r"\.mid\.block_1\.", ".mid.0."),
    (r"\.mid\.attn_1\.", ".mid.1."),
    (r"\.mid\.block_2\.", ".mid.2."),
)


def original_name(name: str) -> str:
    """LlamaGen's name of one of JanusVQVAE's tensors."""
    for pattern, replacement in _RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


def codec_part(checkpoint: Checkpoint, prefix: str = "", style: str = "llamagen") -> Part:
    """The codec in a checkpoint, its sizes read from the tensors.

    style: "llamagen" (the original files; Janus's, with a prefix) or "transformers". Keys outside the prefix belong to others.
    """
    original = style == "llamagen"

    def shape(name: str) -> tuple[int, ...]:
        key = prefix + (original_name(name) if original else name)
        if key not in checkpoint:
            raise ValueError(f"{checkpoint.where} has no tensor {key!r}: it is not LlamaGen's or Janus's image tokenizer")
        return checkpoint.shape(key)

    def count(pattern: str) -> int:
        found = (re.match(re.escape(prefix) + pattern, key) for key in checkpoint.entries)
        return 1 + max((int(match.group(1)) for match in found if match), default=-1)

    codes, dim = shape("quantize.embedding.weight")
    levels = count(r"encoder\.conv_blocks\.(\d+)\." if original else r"encoder\.down\.(\d+)\.")
    base = shape("encoder.conv_in.weight")[0]
    config: dict[str, Any] = {
        "vocab_size": codes,
        "code_dim": dim,
        "latent_channels": shape("quant_conv.weight")[1],
        "base_channels": base,
        "channel_multiplier": [shape(f"encoder.down.{level}.block.0.conv1.weight")[0] // base for level in range(levels)],
        "num_res_blocks": count(r"encoder\.conv_blocks\.0\.res\.(\d+)\." if original else r"encoder\.down\.0\.block\.(\d+)\."),
        "downsample": 2 ** (levels - 1),
    }
    with torch.device("meta"):
        names = JanusCodec(**config).state_dict()
    recipes = {}
    for name in names:
        bare = name.removeprefix("vq.")
        recipes[name] = Recipe((prefix + (original_name(bare) if original else bare),))
    own = re.escape(prefix)
    ignore = (rf"^{own}quantize\.codebook_used$", r"^(discriminator|loss|perceptual_loss)\.")
    return Part("JanusCodec", config, recipes, checkpoint, ignore if prefix == "" else ignore[:1])
