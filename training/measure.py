"""The figures of a trained family: entropy, prompt adherence, overlap of the draft."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..decoding.sampling import Sampling
from ..models.codecs.vq import VQCodec
from ..models.embedded import EmbeddedTarget
from .adherence import background_colour, nearest_name
from .bank import Bank, prompt_table
from .common import seeded
from .distill import overlap, sample_tokens
from .names import COLOURS, NAMES
from .target import GRID, cross_entropy

if TYPE_CHECKING:
    from .demo import Recipe


def measure(
    target: EmbeddedTarget,
    draft: EmbeddedTarget,
    codec: VQCodec,
    held: Bank,
    own: Bank,
    recipe: Recipe,
    reference: Path,
    seed: int,
) -> dict[str, float]:
    """Figures at the recipe's guidance, temperature 1 and full vocabulary.

    Returns:
        held_out (cross-entropy in nats per token), overlap (mean of 1 - TV between draft and guided target), entropy
        (mean, nats per token), name and colour (shares of `recipe.measured` pictures whose nearest reference, and
        whose border, are what the prompt says).
    """
    guidance = recipe.distillation.guidance
    figures = {
        "held_out": cross_entropy(target, held),
        "overlap": overlap(draft, target, own, guidance),
    }
    sampling = Sampling(guidance_scale=guidance)
    entropy, name, colour = adherence(target, codec, sampling, recipe.measured, reference, seed)
    return {**figures, "entropy": entropy, "name": name, "colour": colour}


def adherence(
    target: EmbeddedTarget, codec: VQCodec, sampling: Sampling, count: int, reference: Path, seed: int
) -> tuple[float, float, float]:
    """Mean entropy in nats per token, and the shares of right names and background colours, over `count` pictures."""
    prompts, device, table = prompt_table(), next(target.parameters()).device, list(COLOURS)
    generator = seeded(seed, 9)
    names = torch.randint(0, len(NAMES), (count,), generator=generator)
    colours = torch.randint(0, len(COLOURS), (count,), generator=generator)
    entropy, right_names, right_colours = 0.0, 0, 0
    for part in torch.arange(count).split(64):
        words = prompts[names[part], colours[part]].to(device)
        tokens, entropies = sample_tokens(target, words, sampling, generator)
        pixels = torch.cat([codec.decode(few).cpu().float() for few in tokens.view(-1, *GRID).split(16)])
        entropy += float(entropies.mean(1).sum())
        shown = zip(nearest_name(pixels, reference), background_colour(pixels), strict=True)
        for (name, colour), wanted, ground in zip(shown, names[part].tolist(), colours[part].tolist(), strict=True):
            right_names += name == NAMES[wanted]
            right_colours += colour == table[ground]
    return entropy / count, right_names / count, right_colours / count
