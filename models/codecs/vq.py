"""The embedded family's tokenizer: a small VQ codec with a local encoder, 4 x 4 pixels per token.

After VQGAN (Esser et al., 2021, arXiv:2012.09841) with the l2-normalised codebook of ViT-VQGAN (Yu et al., 2022,
arXiv:2110.04627, section 3.2). The encoder sees only a token's neighbourhood (no normalisation over the picture), so
a token means the same at every place and in every size: 64 px give a grid of 16 x 16, 32 px one of 8 x 8.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.utils.accelerate_utils import apply_forward_hook
from torch import Tensor, nn


class LocalNorm(nn.Module):
    """Root-mean-square normalisation over the channels of each position of [B, C, H, W]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-5) * self.weight


class ResidualBlock(nn.Module):
    """norm, SiLU, convolution, twice, added to the input; [B, C, H, W] -> the same."""

    def __init__(self, channels: int, kernel: int, groups: int | None) -> None:
        super().__init__()
        norms = [LocalNorm(channels) if groups is None else nn.GroupNorm(groups, channels) for _ in range(2)]
        self.norm1, self.norm2 = norms
        self.conv1 = nn.Conv2d(channels, channels, kernel, padding=kernel // 2)
        self.conv2 = nn.Conv2d(channels, channels, kernel, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        x_in = x
        x = self.conv1(F.silu(self.norm1(x)))
        return x_in + self.conv2(F.silu(self.norm2(x)))


class VQCodec(ModelMixin, ConfigMixin):
    """Pictures <-> tokens.

    Args:
        vocab_size: number of codes V.
        code_dim: dimensions of a code, which lies on the unit sphere.
        width: channels at the token grid; the decoder's upper half has `upper_width`.
        downsample: pixels per token along each side; fixed at 4 by the architecture.
    """

    @register_to_config
    def __init__(
        self,
        vocab_size: int = 512,
        code_dim: int = 8,
        width: int = 96,
        upper_width: int = 64,
        downsample: int = 4,
    ) -> None:
        super().__init__()
        if downsample != 4:
            raise ValueError(f"VQCodec has 4 x 4 pixels per token, not downsample={downsample}; use 4.")
        self.encoder = nn.Sequential(
            nn.PixelUnshuffle(4),
            nn.Conv2d(48, width, 3, padding=1),
            ResidualBlock(width, 3, None),
            ResidualBlock(width, 1, None),
            LocalNorm(width),
            nn.Conv2d(width, code_dim, 1),
        )
        self.register_buffer("codes", F.normalize(torch.randn(vocab_size, code_dim), dim=-1))
        self.decoder = nn.Sequential(
            nn.Conv2d(code_dim, width, 3, padding=1),
            ResidualBlock(width, 3, 8),
            ResidualBlock(width, 3, 8),
            nn.Conv2d(width, 4 * upper_width, 1),
            nn.PixelShuffle(2),
            ResidualBlock(upper_width, 3, 8),
            nn.GroupNorm(8, upper_width),
            nn.SiLU(),
            nn.Conv2d(upper_width, 12, 3, padding=1),
            nn.PixelShuffle(2),
        )

    def codebook(self) -> Tensor:
        """The codes as they are looked up: float32 [V, code_dim], l2-normalised."""
        return F.normalize(self.codes.float(), dim=-1)

    def project(self, pixels: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] in [-1, 1] -> unquantised codes on the unit sphere [B, code_dim, H/4, W/4]."""
        return F.normalize(self.encoder(pixels), dim=1)

    def nearest(self, latents: Tensor) -> Tensor:
        """The code nearest to each latent: [B, code_dim, h, w] -> LongTensor [B, h, w]."""
        scores = torch.einsum("bdhw,vd->bhwv", latents.float(), self.codebook())
        return scores.argmax(-1)

    def embed(self, tokens: Tensor) -> Tensor:
        """LongTensor [B, h, w] -> codes [B, code_dim, h, w] in the decoder's dtype."""
        codes = F.embedding(tokens, self.codebook().to(self.dtype))
        return codes.permute(0, 3, 1, 2)

    @apply_forward_hook
    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] in [-1, 1], H and W multiples of 4 -> LongTensor [B, H/4, W/4]."""
        if pixels.shape[-1] % 4 or pixels.shape[-2] % 4:
            height, width = pixels.shape[-2:]
            raise ValueError(f"A picture of {height} x {width} px has no whole token grid; use multiples of 4.")
        return self.nearest(self.project(pixels.to(self.dtype)))

    @apply_forward_hook
    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Tensor:
        """LongTensor [B, h, w] -> pixels [B, 3, 4h, 4w] in [-1, 1]."""
        return self.decoder(self.embed(tokens)).clamp(-1, 1)
