"""Training of the target, and of the draft's first stage, on the token bank's ground truth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from ..models.embedded import EmbeddedTarget
from .bank import Bank, prompt_table
from .common import Average, batches, load_whole, save_whole, seeded, trapezoid

GRID = (16, 16)


@dataclass(frozen=True)
class TargetRecipe:
    """How a token model is trained on ground truth.

    Attributes:
        shallow: the share of the steps for which a model of several layers has only every second one; then each is followed by a
            copy whose output matrices are zero, so that growing changes nothing at first (Wu et al., 2024, LLaMA Pro).
        hold: the share of the steps before the learning rate falls, in a straight line, to 0.
        dropout: the share of pictures whose prompt is emptied (for classifier-free guidance).
        corruption: each picture's input is corrupted at a rate from U(0, corruption); half of the corrupted tokens
            are random, half are another picture's at the same place.
    """

    steps: int = 4600
    batch: int = 16
    shallow: float = 0.45
    matrix_rate: float = 0.02
    other_rate: float = 3e-3
    hold: float = 0.4
    average: float = 0.997
    dropout: float = 0.1
    corruption: float = 0.15
    save_every: int = 200


class Optimiser:
    """Muon (Jordan et al., 2024) for the matrices inside the blocks, AdamW for embeddings, head and norms."""

    def __init__(self, model: nn.Module, recipe: TargetRecipe) -> None:
        inner = [p for name, p in model.named_parameters() if p.ndim == 2 and ".blocks." in f".{name}"]
        chosen = {id(p) for p in inner}
        others = [p for p in model.parameters() if id(p) not in chosen]
        self.parts = [
            (torch.optim.Muon(inner, lr=recipe.matrix_rate, weight_decay=0.01, momentum=0.95), recipe.matrix_rate),
            (torch.optim.AdamW(others, lr=recipe.other_rate, betas=(0.9, 0.98), weight_decay=0.0), recipe.other_rate),
        ]

    def step(self, factor: float) -> None:
        """One update with the learning rates scaled by `factor`; gradients are cleared."""
        for part, rate in self.parts:
            for group in part.param_groups:
                group["lr"] = rate * factor
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict]:
        """The states of both parts."""
        return [part.state_dict() for part, _ in self.parts]

    def load_state_dict(self, states: list[dict]) -> None:
        """Restore what `state_dict` returned."""
        for (part, _), state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


class DenseAttention(TorchFunctionMode):
    """Within it, attention is two matrix products and a softmax: for short sequences in bf16 on a CPU the training step
    is then a fifth faster than with the fused kernel. Elsewhere it changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention or args[0].device.type != "cpu":
            return func(*args, **(kwargs or {}))
        query, key, value = args
        rows, heads, steps, width = query.shape
        mask = kwargs["attn_mask"].expand(rows, heads, steps, steps).flatten(0, 1).to(query.dtype)
        scores = torch.baddbmm(mask, query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2), alpha=width**-0.5)
        mixed = scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value.flatten(0, 1)
        return mixed.view(rows, heads, steps, width)


def corrupt(tokens: Tensor, limit: float, vocabulary: int, generator: torch.Generator) -> Tensor:
    """Tokens [B, N] with a share from U(0, limit) of each row replaced, so that mistakes are met in training."""
    rate = limit * torch.rand(len(tokens), 1, generator=generator)
    draw = torch.rand(tokens.shape, generator=generator)
    noise = torch.randint(0, vocabulary, tokens.shape, generator=generator)
    mixed = torch.where(draw < rate, noise, tokens)
    return torch.where(draw < rate / 2, tokens.roll(1, 0), mixed)


@torch.no_grad()
def deepen(blocks: nn.ModuleList) -> None:
    """Make every second block a copy of the one before it that adds nothing."""
    for block, copy in zip(blocks[::2], blocks[1::2], strict=True):
        copy.load_state_dict(block.state_dict())
        copy.attention.out.weight.zero_()
        copy.down.weight.zero_()


def train_on_bank(
    model: EmbeddedTarget,
    banks: Mapping[float, Bank],
    recipe: TargetRecipe,
    checkpoint: Path,
    seed: int,
    device: torch.device,
    held_out: Bank | None = None,
    label: str = "target",
) -> EmbeddedTarget:
    """Next-token training of `model` on token banks, resuming from `checkpoint`; returns it with averaged weights.

    Args:
        banks: what is read from which share of the steps on, 0 first; all of one length.
        held_out: another bank, whose cross-entropy (nats per token, averaged weights) the bar shows.
    """
    model.to(device).train()
    prompts, vocabulary = prompt_table(), model.config.vocab_size
    blocks, grown = model.backbone.blocks, round(recipe.shallow * recipe.steps) if len(model.backbone.blocks) > 1 else 0
    state = load_whole(checkpoint)
    start = state["step"] if state else 0
    if grown and start <= grown:
        model.backbone.blocks = blocks[::2]
    optimiser, average = Optimiser(model, recipe), Average(model, recipe.average)
    if state:
        model.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        average.state = {name: value.to(device) for name, value in state["average"].items()}
    order = batches(len(banks[0]), recipe.batch, seed, start)
    figures: dict[str, str] = {}
    todo = range(start, recipe.steps)
    bar = tqdm(todo, initial=start, total=recipe.steps, desc=label, mininterval=5)
    for step in bar:
        if 0 < step == grown:
            deepen(blocks)
            model.backbone.blocks = blocks
            optimiser, average = Optimiser(model, recipe), Average(model, recipe.average)
        generator = seeded(seed, 3, step)
        bank = banks[max(share for share in banks if share * recipe.steps <= step)]
        words, tokens = bank.batch(next(order), prompts)
        words = words * (torch.rand(len(words), 1, generator=generator) >= recipe.dropout)
        inputs = corrupt(tokens, recipe.corruption, vocabulary, generator)
        with torch.autocast(device.type, torch.bfloat16), DenseAttention():
            logits = model(words.to(device), inputs.to(device), grid=GRID)
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens.to(device).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step(trapezoid(step, recipe.steps, recipe.hold))
        average.update(model, step)
        if step % 20 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}", **figures, refresh=False)
        if (step + 1) % recipe.save_every == 0 or step + 1 == recipe.steps:
            state = {"model": model.state_dict(), "optimiser": optimiser.state_dict(), "average": average.state}
            save_whole({**state, "step": step + 1}, checkpoint)
            if held_out is not None:
                figures = {"held_out": f"{_averaged_cross_entropy(model, average, held_out):.3f}"}
    model.load_state_dict(average.state)
    return model.eval()


def _averaged_cross_entropy(model: EmbeddedTarget, average: Average, held_out: Bank) -> float:
    current = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(average.state)
    value = cross_entropy(model, held_out, rows=96)
    model.load_state_dict(current)
    return value


@torch.no_grad()
def cross_entropy(model: EmbeddedTarget, bank: Bank, rows: int = 512) -> float:
    """Mean cross-entropy in nats per token on the first `rows` pictures of the bank, prompts given."""
    prompts, device = prompt_table(), next(model.parameters()).device
    total = 0.0
    parts = torch.randperm(len(bank), generator=seeded(0, 5))[:rows].split(32)
    for part in parts:
        words, tokens = bank.batch(part, prompts)
        with torch.autocast(device.type, torch.bfloat16), DenseAttention():
            logits = model(words.to(device), tokens.to(device), grid=GRID).float()
        total += float(F.cross_entropy(logits.flatten(0, 1), tokens.to(device).flatten())) * len(part)
    return total / sum(map(len, parts))
