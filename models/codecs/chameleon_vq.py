"""Chameleon's image tokenizer, the half that draws: VQGAN codes to pixels, 16 x 16 pixels per token.

Shared by Chameleon, Lumina-mGPT and Anole. Parameters are called as in Meta's `vqgan.ckpt`, so that no map is needed: `up.0` is
the level of full resolution. Codes are looked up as they are, not normalised, and attention stands at the lowest resolution only.

Source: Gafni et al. 2022 (Make-A-Scene); Esser et al. 2021 (VQGAN); Chameleon team 2024, arXiv:2405.09818.
"""

from __future__ import annotations

import re
from collections.abc import Sequence as Items
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.utils.accelerate_utils import apply_forward_hook
from torch import Tensor, nn

from ..checkpoint import Checkpoint, Source
from ..weights import Part, Recipe

GROUPS, EPS = 32, 1e-6


class ResidualBlock(nn.Module):
    """norm, SiLU, convolution, twice, added to the input: [B, C, H, W] -> [B, C', H, W]."""

    def __init__(self, channels: int, out: int):
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, channels, EPS)
        self.conv1 = nn.Conv2d(channels, out, 3, padding=1)
        self.norm2 = nn.GroupNorm(GROUPS, out, EPS)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.nin_shortcut = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        return self.nin_shortcut(x) + self.conv2(F.silu(self.norm2(h)))


class AttentionBlock(nn.Module):
    """One head of attention over all places of [B, C, H, W], added to the input."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, channels, EPS)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        query, key, value = (part(h).flatten(2).transpose(1, 2)[:, None] for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(query, key, value)[:, 0]
        return x + self.proj_out(mixed.transpose(1, 2).reshape(x.shape))


class Middle(nn.Module):
    """The lowest resolution."""

    def __init__(self, channels: int):
        super().__init__()
        self.block_1 = ResidualBlock(channels, channels)
        self.attn_1 = AttentionBlock(channels)
        self.block_2 = ResidualBlock(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x)))


class Upsample(nn.Module):
    """Twice the size: nearest neighbour, then a convolution."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Level(nn.Module):
    """Residual blocks at one resolution, and the step to the next."""

    def __init__(self, channels: int, out: int, blocks: int, last: bool):
        super().__init__()
        self.block = nn.ModuleList(ResidualBlock(channels if first == 0 else out, out) for first in range(blocks))
        self.upsample = nn.Identity() if last else Upsample(out)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.block:
            x = block(x)
        return self.upsample(x)


class Decoder(nn.Module):
    """Latents [B, latent, h, w] -> pixels [B, 3, h * 2^(levels - 1), ...]."""

    def __init__(self, latent: int, width: int, multipliers: Items[int], blocks: int):
        super().__init__()
        widths = [width * factor for factor in multipliers]
        above = [*widths[1:], widths[-1]]
        self.conv_in = nn.Conv2d(latent, widths[-1], 3, padding=1)
        self.mid = Middle(widths[-1])
        self.up = nn.ModuleList(
            Level(channels, out, blocks + 1, level == 0) for level, (channels, out) in enumerate(zip(above, widths, strict=True))
        )
        self.norm_out = nn.GroupNorm(GROUPS, widths[0], EPS)
        self.conv_out = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid(self.conv_in(x))
        for level in reversed(self.up):
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class Codebook(nn.Module):
    """The table of codes."""

    def __init__(self, codes: int, dim: int):
        super().__init__()
        self.embedding = nn.Embedding(codes, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """LongTensor [..., h, w] -> [..., h, w, dim]."""
        return self.embedding(tokens)


class ChameleonCodec(ModelMixin, ConfigMixin):
    """Tokens -> pictures.

    Args:
        vocab_size: number of codes V.
        code_dim: dimensions of a code.
        latent: channels the decoder begins with; width: its channels at full resolution.
        multipliers: channels of each level, full resolution first, as multiples of `width` (32 must divide them all).
        blocks: residual blocks of a level, less one.
        downsample: pixels per token along each side; follows from the levels.
    """

    @register_to_config
    def __init__(
        self,
        vocab_size: int = 8192,
        code_dim: int = 256,
        latent: int = 256,
        width: int = 128,
        multipliers: Items[int] = (1, 1, 2, 2, 4),
        blocks: int = 2,
        downsample: int = 16,
    ):
        super().__init__()
        if downsample != 2 ** (len(multipliers) - 1):
            raise ValueError(
                f"a decoder of {len(multipliers)} levels has {2 ** (len(multipliers) - 1)} pixels per token, "
                f"not downsample={downsample}: the codec's config is damaged"
            )
        self.quantize = Codebook(vocab_size, code_dim)
        self.post_quant_conv = nn.Conv2d(code_dim, latent, 1)
        self.decoder = Decoder(latent, width, multipliers, blocks)

    def codebook(self) -> Tensor:
        """The codes as they are looked up: float32 [V, code_dim]."""
        return self.quantize.embedding.weight.float()

    @apply_forward_hook
    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Tensor:
        """LongTensor [B, h, w] -> pixels [B, 3, 16h, 16w] in [-1, 1]."""
        latents = self.post_quant_conv(self.quantize(tokens).permute(0, 3, 1, 2))
        return self.decoder(latents).clamp(-1, 1)


# -- checkpoints -----------------------------------------------------------------------------------------------------

# Where the Hub has it without a gate: it is the same in the whole family.
PUBLISHED = "GAIR/Anole-7b-v0.1/tokenizer/vqgan.ckpt"
PREFIXES = ("", "model.vqmodel.", "vqmodel.")


def codec_source(source: Source, checkpoint: Checkpoint) -> tuple[Checkpoint | None, str]:
    """The image tokenizer's tensors and their prefix: the file or folder named, else the checkpoint's own, else a `vqgan` file.

    (None, "") if there is none. Meta keeps `vqgan.ckpt` in a folder `tokenizer` beside the models.
    """
    key = "decoder.conv_in.weight"
    named = source.named.get("codec")
    if named is not None:
        found = named.weights
        prefix = next((prefix for prefix in PREFIXES if found is not None and prefix + key in found), None)
        if found is None or prefix is None:
            raise ValueError(f"{named.path} holds no decoder of Chameleon's image tokenizer: give {PUBLISHED}, for example")
        return found, prefix
    if f"model.vqmodel.{key}" in checkpoint:
        return checkpoint, "model.vqmodel."
    above = (source.folder, source.folder.parent, source.folder.parent.parent)
    for folder in (source.folder, *(place / "tokenizer" for place in above)):
        for suffix in (".safetensors", ".ckpt"):
            path = folder / f"vqgan{suffix}"
            if path.is_file():
                return Checkpoint([path]), ""
    return None, ""


def codec_part(checkpoint: Checkpoint, prefix: str, shared: bool) -> Part:
    """The decoder half of the image tokenizer, its sizes read from the tensors. shared: the decoder's checkpoint holds it too."""

    def shape(name: str) -> tuple[int, ...]:
        if prefix + name not in checkpoint:
            raise ValueError(f"{checkpoint.where} has no tensor {prefix + name!r}: it is not Chameleon's image tokenizer")
        return checkpoint.shape(prefix + name)

    def count(pattern: str) -> int:
        found = (re.match(re.escape(prefix) + pattern, key) for key in checkpoint.entries)
        return 1 + max((int(match.group(1)) for match in found if match), default=-1)

    codes, code_dim = shape("quantize.embedding.weight")
    levels, width = count(r"decoder\.up\.(\d+)\."), shape("decoder.norm_out.weight")[0]
    top = shape("decoder.up.0.block.0.conv1.weight")[0]
    config: dict[str, Any] = {
        "vocab_size": codes,
        "code_dim": code_dim,
        "latent": shape("post_quant_conv.weight")[0],
        "width": width,
        "multipliers": [shape(f"decoder.up.{level}.block.0.conv1.weight")[0] // top for level in range(levels)],
        "blocks": count(r"decoder\.up\.0\.block\.(\d+)\.") - 1,
        "downsample": 2 ** (levels - 1),
    }
    with torch.device("meta"):
        names = ChameleonCodec(**config).state_dict()
    own = re.escape(prefix)
    ignore = (rf"^{own}(encoder|quant_conv|loss)\.", *(() if shared else (rf"^(?!{own})",)))
    return Part("ChameleonCodec", config, {name: Recipe((prefix + name,)) for name in names}, checkpoint, ignore)
