"""What every discrete family shares: one cached, guided, warped forward per round.

A family subclasses `DiscreteTarget` and says how its prompt becomes embeddings, where its positions lie and which head reads the
features. The forward itself, and all bookkeeping of slots and masks, is here, once.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.utils.accelerate_utils import apply_forward_hook
from torch import Tensor

from ..decoding.cache import Cache
from ..decoding.layout import ChainLayouts, Layout, causal_mask, fed_columns, fed_slots, tree_mask
from ..decoding.sampling import Sampling, apply_grammar, guide, warp, widen
from ..decoding.sequence import Sequence
from ..decoding.trace import not_a_number
from ..decoding.types import Draft, Scores
from .backbone import Backbone

TIER = 16


@dataclass
class Conditioning:
    """A prompt, ready for the decoder.

    Cache rows R are the B conditional rows and, with guidance, the B unconditional rows after them. prefix [R, P, D]:
    embeddings left-padded to P; pad [R]: how many of them are padding; start [R, D]: embedding of column 0.
    """

    prefix: Tensor
    pad: Tensor
    start: Tensor
    rows: int


def visible(tokens: Tensor, lattice: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """The picture's codes [B, h, w] among the image tokens [B, N] of a lattice."""
    return tokens.view(-1, *lattice)[:, : grid[0], : grid[1]]


def visible_count(tokens: Tensor, lattice: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """How many of the picture's codes are among the first tokens [B] of a lattice: [B]."""
    rows = torch.div(tokens, lattice[1], rounding_mode="floor")
    return rows * grid[1] + (tokens % lattice[1]).clamp(max=grid[1])


class DiscreteTarget(ModelMixin, ConfigMixin):
    """A decoder over codes. Subclasses define `backbone`, `embed`, `logits`, `rotary`, `prompt_rotary` and `encode`."""

    backbone: Backbone
    vocab_size: int
    guided_draft = False
    quantization: str | None = None

    @property
    def home(self) -> torch.device:
        """Where inputs must lie: the device forwards run on, wherever offloading keeps the weights in the meantime."""
        for module in self.modules():
            device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
            if device is not None:
                return torch.device(device)
        return self.device

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings of codes [..., T] -> [..., T, D]."""
        raise TypeError(f"{type(self).__name__} does not say how its tokens are embedded")

    def embed_at(self, tokens: Tensor, columns: Tensor, grid: tuple[int, int]) -> Tensor:
        """Input embeddings of tokens [B, T] in columns [B, T] of a lattice: [B, T, D]. A family whose forced columns hold no code
        says here what stands in them."""
        return self.embed(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """Output head: features [..., D] -> [..., V]."""
        raise TypeError(f"{type(self).__name__} has no output head")

    def rotary(self, columns: Tensor, grid: tuple[int, int]) -> Tensor:
        """Rotary factors (complex [..., T, hd / 2]) of image columns [..., T]; column 0 is the start column."""
        raise TypeError(f"{type(self).__name__} does not say where its tokens are")

    def prompt_rotary(self, slots: int) -> Tensor:
        """Rotary factors (complex [1, P, hd / 2]) of the prompt's slots."""
        raise TypeError(f"{type(self).__name__} does not say where its prompt is")

    def encode(
        self,
        components: dict[str, Any],
        prompts: list[str],
        negative: list[str] | None,
        guided: bool,
        grid: tuple[int, int],
    ) -> Conditioning:
        """Prompts (and negative prompts, None = the family's unconditional prompt) -> Conditioning of B or, guided, 2B rows.

        grid: codes of the picture (rows, columns), which some families name in the prompt.
        """
        raise TypeError(f"{type(self).__name__} does not say how prompts are read")

    def lattice(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Image tokens (rows, columns) of a picture of `grid` codes; the codes are the first columns, all others are forced.

        Raises ValueError where the model cannot draw such a grid.
        """
        return grid

    def forced(self, grid: tuple[int, int]) -> Tensor | None:
        """Grammar: the token forced at each index of a lattice, -1 where the model chooses [N]; None = nothing is forced.

        A forced column that holds no code (a row end) is forced to code 0, and `embed_at` gives it the embedding it has.
        """
        return None

    @apply_forward_hook
    @torch.inference_mode()
    def begin(
        self,
        conditioning: Conditioning,
        grid: tuple[int, int],
        sampling: Sampling,
        scratch: int,
    ) -> Sequence:
        """A fresh sequence with the prompt in its cache.

        grid: the lattice. scratch: the largest number of draft nodes a round may feed. The prompt's prefill is not counted as a
        target forward.
        """
        rows, prompt = conditioning.prefix.shape[:2]
        count = grid[0] * grid[1]
        config = self.backbone.config
        device, dtype = conditioning.prefix.device, conditioning.prefix.dtype
        slots = prompt + count + 1 + scratch + 1
        cache = Cache(config.layers, rows, slots, config.groups, config.width, config.dim, dtype, device)
        sequence = Sequence(
            tokens=torch.zeros(conditioning.rows, count + 1, dtype=torch.long, device=device),
            length=torch.ones(conditioning.rows, dtype=torch.long, device=device),
            cached=torch.zeros(conditioning.rows, dtype=torch.long, device=device),
            cache=cache,
            grid=grid,
            sampling=sampling,
            prompt=prompt,
            pad=conditioning.pad,
            start=conditioning.start,
            forced=self.forced(grid),
        )
        if prompt:
            places = torch.arange(prompt, device=device).expand(rows, prompt)
            # A padded slot reads itself alone, so that no row of the mask is empty; nobody reads a padded slot.
            reads = torch.minimum(conditioning.pad[:, None], places)
            mask = causal_mask(places, torch.zeros_like(conditioning.pad), prompt, dtype)
            keys = torch.arange(prompt, device=device)
            mask = mask.masked_fill((keys < reads[..., None])[:, None], -torch.inf)
            layout = Layout(places, cache.flat(places), mask, prompt)
            begun = perf_counter()
            self.backbone(conditioning.prefix, self.prompt_rotary(prompt), mask, cache, layout)
            sequence.model_seconds += perf_counter() - begun
        sequence.append_forced()
        sequence.refresh()
        return sequence

    def layout(self, sequence: Sequence, draft: Draft) -> Layout:
        """Slots, columns and mask of the next forward."""
        cache, pad = sequence.cache, sequence.pad
        if cache is None or pad is None:
            raise ValueError("this sequence has no cache: make it with begin()")
        pending, nodes, prompt, tree = sequence.pending, draft.nodes, sequence.prompt, draft.tree
        length, dtype = sequence.length, cache.keys.dtype
        rows = length.shape[0]
        tier = min(-(-(prompt + sequence.high + nodes) // TIER) * TIER, cache.slots)
        if tree is None and pending == 1:
            if sequence.chains is None:
                sequence.chains = ChainLayouts(pad, prompt, cache.slots, dtype)
            columns = sequence.ahead(nodes + 1)
            ends = sequence.high + max(nodes, 1) > sequence.limit
            if sequence.low == sequence.high and not ends and draft.valid is None:
                return sequence.chains.even(sequence.low - 1, columns)
            idle = None
            if ends:
                idle = (columns >= sequence.limit) | (length >= sequence.limit)[:, None]
            if draft.valid is not None:
                unfit = torch.nn.functional.pad(~draft.valid, (1, 0))
                idle = unfit if idle is None else idle | unfit
            return sequence.chains.ragged(columns, tier, idle)
        repeat = cache.rows // rows
        depth = sequence.steps(nodes + 1)[None, 1:] if tree is None else tree.depth
        columns = fed_columns(length, pending, depth.expand(rows, -1))
        slots = fed_slots(length, pending, nodes, prompt)
        reads = slots.repeat(repeat, 1)
        if tree is None or nodes == 0:
            mask = causal_mask(reads, pad, tier, dtype)
        else:
            seen = tree.seen.expand(rows, -1, -1).repeat(repeat, 1, 1)
            mask = tree_mask(reads, pad, tier, dtype, (length + prompt).repeat(repeat), seen)
        idle = (columns >= sequence.limit) | (length >= sequence.limit)[:, None]
        if draft.valid is not None:
            idle[:, pending:] |= ~draft.valid
        writes = slots.masked_fill(idle, cache.trash).repeat(repeat, 1)
        return Layout(columns, cache.flat(writes), mask, tier)

    @torch.inference_mode()
    def features(self, sequence: Sequence, draft: Draft) -> Tensor:
        """Run the decoder over the pending columns and the draft: hidden states [R, pending + K, D].

        Adds the forward's own seconds to `sequence.model_seconds`; planning slots and masks does not count.
        """
        layout = self.layout(sequence, draft)
        begun = perf_counter()
        pending, columns = sequence.pending, layout.columns
        fed = sequence.tokens.gather(1, columns[:, :pending])
        if draft.nodes:
            fed = torch.cat((fed, draft.tokens), 1)
        x, rotary = self.embed_at(fed, columns, sequence.grid), self.rotary(columns, sequence.grid)
        repeat = 1 if sequence.cache is None else sequence.cache.rows // fed.shape[0]
        if repeat > 1:
            x = x.repeat(repeat, 1, 1)
            rotary = rotary.repeat(repeat, 1, 1) if rotary.shape[0] > 1 else rotary
        if sequence.low <= pending and sequence.start is not None:
            first = (columns == 0).repeat(repeat, 1)[..., None]
            x = torch.where(first, sequence.start[:, None], x)
        hidden = self.backbone(x, rotary, layout.mask, sequence.cache, layout)
        sequence.model_seconds += perf_counter() - begun
        return hidden

    @torch.inference_mode()
    def score(self, sequence: Sequence, draft: Draft) -> Scores:
        """One forward over the pending columns and the draft, guided and warped."""
        hidden = self.features(sequence, draft)
        begun = perf_counter()
        raw = self.logits(hidden[:, -(draft.nodes + 1) :])
        sequence.model_seconds += perf_counter() - begun
        return self.warped(sequence, draft, raw)

    def warped(self, sequence: Sequence, draft: Draft, raw: Tensor) -> Scores:
        """Raw logits [R, K + 1, V] -> Scores: guidance, temperature, top-k, top-p, grammar."""
        rows = len(sequence.length)
        raw = widen(raw)
        if raw.shape[0] != rows:
            raw = guide(raw, sequence.sampling.guidance_scale)
        log_p = warp(raw, sequence.sampling)
        if sequence.low == 1 and bool(log_p[..., 0].isnan().any()):
            who = "the draft model, " if self.guided_draft else ""
            raise FloatingPointError(not_a_number(f"{who}{type(self).__name__}", self.dtype))
        tree, nodes = draft.tree, draft.nodes
        reach = nodes if tree is None else tree.levels
        span = (sequence.low - 1, sequence.high + reach)
        if tree is None:
            index = sequence.ahead(nodes + 1)
        else:
            index = (sequence.length[:, None] - 1) + torch.nn.functional.pad(tree.depth, (1, 0))
        if span[1] >= sequence.limit:
            index = index.clamp(max=sequence.limit - 1)
        if sequence.forced is not None:
            log_p = apply_grammar(log_p, index, sequence.forced)
        return Scores(log_p, index, span, contiguous=tree is None and sequence.low == sequence.high)
