"""Distillation of the draft from the frozen target's guided distribution, half of it on the target's own pictures.

The draft reads one row and imitates what the target samples from with classifier-free guidance (two rows). The loss
moves from the forward KL divergence to the total-variation distance, which is one minus the acceptance probability
(Zhou et al., 2024, DistillSpec, arXiv:2310.08461, section 4).
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..decoding.sampling import Sampling, guide
from ..decoding.types import no_draft
from ..models.embedded import EmbeddedTarget
from .bank import Bank, prompt_table
from .common import Average, batches, load_whole, save_whole, seeded, trapezoid
from .target import GRID, DenseAttention, Optimiser, TargetRecipe, corrupt


@dataclass(frozen=True)
class DistillRecipe:
    """How the draft is distilled.

    Attributes:
        guidance: the scale of the target's guidance that is imitated, at temperature 1 and full vocabulary.
        own_pictures: how many pictures of the target's own, for random prompts, make up half of every batch.
        sample_batch: pictures sampled together.
        corruption: of the other half's inputs, as in TargetRecipe.
    """

    guidance: float = 1.5
    own_pictures: int = 768
    sample_batch: int = 64
    steps: int = 800
    batch: int = 16
    matrix_rate: float = 0.01
    other_rate: float = 1.5e-3
    hold: float = 0.2
    average: float = 0.99
    corruption: float = 0.1
    save_every: int = 100


@torch.inference_mode()
def sample_tokens(target: EmbeddedTarget, words: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Plain autoregressive sampling, one token per forward, for training and for the model card's figures.

    Args:
        words: LongTensor [B, 8].
        generator: CPU generator of the draws.

    Returns:
        Tokens [B, 256] and the entropy in nats of each token's distribution [B, 256].
    """
    conditioning = target.condition(words, None, sampling.guided)
    sequence = target.begin(conditioning, GRID, sampling, scratch=0)
    empty = no_draft(len(words), words.device)
    one, none = torch.ones_like(sequence.length), torch.zeros_like(sequence.length)
    entropies = []
    while not sequence.done:
        log_p = target.score(sequence, empty).log_p[:, 0]
        tokens = torch.multinomial(log_p.exp().cpu(), 1, generator=generator)
        sequence.commit(tokens.to(words.device), one, none)
        sequence.refresh()
        entropies.append(torch.special.entr(log_p.exp()).sum(-1))
    return sequence.tokens[:, 1:].clone(), torch.stack(entropies, 1)


def own_bank(
    target: EmbeddedTarget,
    pictures: int,
    batch: int,
    samplings: Items[Sampling],
    path: Path,
    seed: int,
    label: str = "own pictures",
) -> Bank:
    """The target's own pictures for random prompts, `batch` at a time, each batch in the next way of `samplings`; resumes from
    `path`."""
    prompts, device = prompt_table(), next(target.parameters()).device
    state = load_whole(path) or {"tokens": torch.zeros(0, 256), "names": torch.zeros(0), "colours": torch.zeros(0)}
    parts = {name: [value.to(torch.int16)] for name, value in state.items()}
    rounds, start = -(-pictures // batch), len(state["tokens"]) // batch
    for turn in tqdm(range(start, rounds), initial=start, total=rounds, desc=label, mininterval=5):
        generator = seeded(seed, 7, turn)
        names = torch.randint(0, prompts.shape[0], (batch,), generator=generator)
        colours = torch.randint(0, prompts.shape[1], (batch,), generator=generator)
        tokens, _ = sample_tokens(target, prompts[names, colours].to(device), samplings[turn % len(samplings)], generator)
        for name, value in (("tokens", tokens), ("names", names), ("colours", colours)):
            parts[name].append(value.cpu().to(torch.int16))
        save_whole({name: torch.cat(values) for name, values in parts.items()}, path)
    return Bank(**{name: torch.cat(values) for name, values in parts.items()})


@torch.no_grad()
def guided_probabilities(target: EmbeddedTarget, words: Tensor, inputs: Tensor, guidance: float) -> Tensor:
    """The guided distribution at every place of teacher-forced tokens: [B, 8], [B, N] -> float32 [B, N, V]."""
    both = torch.cat([words, torch.zeros_like(words)])
    with torch.autocast(words.device.type, torch.bfloat16), DenseAttention():
        logits = target(both, inputs.repeat(2, 1), grid=GRID)
    return guide(logits.float(), guidance).softmax(-1)


def distill(
    draft: EmbeddedTarget,
    target: EmbeddedTarget,
    bank: Bank,
    own: Bank,
    recipe: DistillRecipe,
    checkpoint: Path,
    seed: int,
    device: torch.device,
) -> EmbeddedTarget:
    """Distil the draft, resuming from `checkpoint`; returns it with averaged weights."""
    draft.to(device).train()
    target.to(device).eval()
    prompts, half = prompt_table(), recipe.batch // 2
    rates = TargetRecipe(matrix_rate=recipe.matrix_rate, other_rate=recipe.other_rate)
    optimiser, average, start = Optimiser(draft, rates), Average(draft, recipe.average), 0
    if state := load_whole(checkpoint):
        draft.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        average.state = {name: value.to(device) for name, value in state["average"].items()}
        start = state["step"]
    data_order, own_order = batches(len(bank), half, seed + 1, start), batches(len(own), half, seed, start)
    bar = tqdm(range(start, recipe.steps), initial=start, total=recipe.steps, desc="distillation", mininterval=5)
    for step in bar:
        generator = seeded(seed, 8, step)
        words, tokens = bank.batch(next(data_order), prompts)
        tokens = corrupt(tokens, recipe.corruption, target.config.vocab_size, generator)
        own_words, own_tokens = own.batch(next(own_order), prompts)
        words, tokens = torch.cat([words, own_words]).to(device), torch.cat([tokens, own_tokens]).to(device)
        p = guided_probabilities(target, words, tokens, recipe.guidance)
        with torch.autocast(device.type, torch.bfloat16), DenseAttention():
            logits = draft(words, tokens, grid=GRID)
        log_q = logits.float().log_softmax(-1)
        divergence = (p * (p.clamp_min(1e-9).log() - log_q)).sum(-1).mean()
        variation = (p - log_q.exp()).abs().sum(-1).mean() / 2
        share = step / recipe.steps
        ((1 - share) * divergence + share * variation).backward()
        nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimiser.step(trapezoid(step, recipe.steps, recipe.hold))
        average.update(draft, step)
        if step % 20 == 0:
            bar.set_postfix(overlap=f"{1 - variation.item():.3f}", refresh=False)
        if (step + 1) % recipe.save_every == 0 or step + 1 == recipe.steps:
            state = {"model": draft.state_dict(), "optimiser": optimiser.state_dict(), "average": average.state}
            save_whole({**state, "step": step + 1}, checkpoint)
    draft.load_state_dict(average.state)
    return draft.eval()


@torch.no_grad()
def overlap(draft: EmbeddedTarget, target: EmbeddedTarget, own: Bank, guidance: float, rows: int = 128) -> float:
    """Mean of 1 - TV between draft and guided target on the target's own pictures: the chance to accept one token."""
    prompts, device, total = prompt_table(), next(target.parameters()).device, 0.0
    parts = torch.arange(len(own))[-rows:].split(16)
    for part in parts:
        words, tokens = (value.to(device) for value in own.batch(part, prompts))
        p = guided_probabilities(target, words, tokens, guidance)
        q = draft(words, tokens, grid=GRID).float().softmax(-1)
        total += float(torch.minimum(p, q).sum(-1).mean()) * len(part)
    return total / sum(map(len, parts))
