"""Training of the VQ codec: reconstruction, commitment, an averaged codebook with restarts of dead codes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from ..models.codecs.vq import VQCodec
from .common import Average, half_state, load_whole, save_whole, seeded, trapezoid
from .data import Augmentation, colour_table, render


@dataclass(frozen=True)
class TokenizerRecipe:
    """How the codec is trained; `small_every`-th steps see 32 px pictures."""

    steps: int = 2400
    batch: int = 16
    learning_rate: float = 2e-3
    hold: float = 0.3
    commitment: float = 0.25
    codebook_decay: float = 0.98
    restart_every: int = 50
    small_every: int = 4
    average: float = 0.995
    save_every: int = 200


class CodebookAverage:
    """The codebook as a moving average of the latents that chose each code (VQ-VAE, appendix A.1), on the sphere."""

    def __init__(self, codec: VQCodec, decay: float) -> None:
        self.decay = decay
        self.sums = codec.codebook().clone()
        self.counts = torch.ones(len(self.sums), device=self.sums.device)

    @torch.no_grad()
    def update(self, codec: VQCodec, latents: Tensor, tokens: Tensor) -> None:
        """Fold in latents [M, D] and the codes [M] they chose."""
        hits = torch.zeros_like(self.counts).index_add_(0, tokens, torch.ones_like(tokens, dtype=torch.float32))
        sums = torch.zeros_like(self.sums).index_add_(0, tokens, latents.float())
        self.counts.lerp_(hits, 1 - self.decay)
        self.sums.lerp_(sums, 1 - self.decay)
        codec.codes.copy_(F.normalize(self.sums, dim=-1))

    @torch.no_grad()
    def restart(self, codec: VQCodec, latents: Tensor, generator: torch.Generator, threshold: float = 0.05) -> None:
        """Move codes chosen less than `threshold` times a step onto random latents [M, D] of the batch."""
        dead = (self.counts < threshold).nonzero()[:, 0]
        if len(dead) == 0:
            return
        picks = torch.randint(0, len(latents), (len(dead),), generator=generator).to(latents.device)
        self.sums[dead] = latents[picks].float()
        self.counts[dead] = 1.0
        codec.codes[dead] = F.normalize(latents[picks].float(), dim=-1)


def train_codec(
    codec: VQCodec,
    rgba: Tensor,
    ranges: Augmentation,
    recipe: TokenizerRecipe,
    checkpoint: Path,
    seed: int,
    device: torch.device,
) -> VQCodec:
    """Train `codec` on augmented pictures, resuming from `checkpoint`; returns it with averaged weights.

    Args:
        rgba: premultiplied pictures [N, 4, 64, 64] in [0, 1], on the CPU.
    """
    codec.to(device).train()
    optimiser = torch.optim.AdamW(codec.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=1e-4)
    book, average, start = CodebookAverage(codec, recipe.codebook_decay), Average(codec, recipe.average), 0
    if state := load_whole(checkpoint):
        codec.load_state_dict(state["codec"])
        optimiser.load_state_dict(state["optimiser"])
        book.sums, book.counts = state["sums"].to(device), state["counts"].to(device)
        average.state = {name: value.to(device) for name, value in state["average"].items()}
        start = state["step"]
    bar = tqdm(range(start, recipe.steps), initial=start, total=recipe.steps, desc="tokenizer", mininterval=5)
    for step in bar:
        for group in optimiser.param_groups:
            group["lr"] = recipe.learning_rate * trapezoid(step, recipe.steps, recipe.hold)
        generator = seeded(seed, 1, step)
        pixels = sample_pictures(rgba, recipe.batch, ranges, generator).to(device)
        if step % recipe.small_every == recipe.small_every - 1:
            pixels = F.avg_pool2d(pixels, 2)
        error = _step(codec, pixels, optimiser, book, recipe, step, generator)
        average.update(codec, step)
        if step % 20 == 0:
            bar.set_postfix(psnr=f"{10 * math.log10(4 / error):.2f}", refresh=False)
        if (step + 1) % recipe.save_every == 0 or step + 1 == recipe.steps:
            save_whole(
                {
                    "codec": codec.state_dict(), "optimiser": optimiser.state_dict(), "step": step + 1,
                    "sums": book.sums, "counts": book.counts, "average": average.state,
                },
                checkpoint,
            )  # fmt: skip
    # The averaged encoder goes with the codebook's own average, which is the last one.
    codec.load_state_dict({**average.state, "codes": codec.codes})
    # What ships is half precision: round here, so that all that follows sees the shipped tokenizer.
    codec.load_state_dict(half_state(codec.state_dict()))
    return codec.eval()


def _step(
    codec: VQCodec,
    pixels: Tensor,
    optimiser: torch.optim.Optimizer,
    book: CodebookAverage,
    recipe: TokenizerRecipe,
    step: int,
    generator: torch.Generator,
) -> float:
    """One update; returns the mean squared error of the reconstruction."""
    with torch.autocast(pixels.device.type, torch.bfloat16):
        latents = codec.project(pixels).float()
        tokens = codec.nearest(latents.detach())
        chosen = F.embedding(tokens, codec.codebook()).permute(0, 3, 1, 2)
        output = codec.decoder(latents + (chosen - latents).detach()).float()
    error = F.mse_loss(output, pixels)
    # The squared error is what PSNR measures; the absolute one keeps flat backgrounds flat.
    loss = error + 0.1 * F.l1_loss(output, pixels) + recipe.commitment * F.mse_loss(latents, chosen)
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(codec.parameters(), 1.0)
    optimiser.step()
    flat = latents.detach().permute(0, 2, 3, 1).flatten(0, 2)
    book.update(codec, flat, tokens.flatten())
    if (step + 1) % recipe.restart_every == 0 and step < 0.8 * recipe.steps:
        book.restart(codec, flat, generator)
    return float(error.detach())


def sample_pictures(rgba: Tensor, count: int, ranges: Augmentation, generator: torch.Generator) -> Tensor:
    """Random names on random backgrounds: float32 [count, 3, 64, 64] in [-1, 1]."""
    table = colour_table()
    names = torch.randint(0, len(rgba), (count,), generator=generator)
    colours = torch.randint(0, len(table), (count,), generator=generator)
    return render(rgba[names], table[colours], ranges, generator)


@torch.no_grad()
def reconstruction_psnr(codec: VQCodec, rgba: Tensor, ranges: Augmentation, seed: int, small: bool) -> float:
    """Mean PSNR in dB over 256 augmented pictures, at 64 px or (small) 32 px."""
    pixels = sample_pictures(rgba, 256, ranges, seeded(seed, 99))
    if small:
        pixels = F.avg_pool2d(pixels, 2)
    device = next(codec.parameters()).device
    output = torch.cat([codec.decode(codec.encode(part.to(device))).cpu() for part in pixels.split(32)])
    errors = (output - pixels).square().flatten(1).mean(1)
    return float((10 * torch.log10(4 / errors)).mean())
