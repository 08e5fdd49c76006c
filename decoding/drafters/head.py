"""A draft head continues the target's features: chains, static and dynamic trees, one small forward per level.

The head's cache keeps the drafted nodes in its first slots and the prompt and the columns behind them. What lies in a column was
read with the target's own feature or is read again: predictions of the head feed the nodes of one draft and nothing else.

Source: Li et al. 2024 (EAGLE, EAGLE-2); VVS for features that are missing after a skipped verification.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from ..layout import ChainLayouts, Layout
from ..noise import Noise
from ..sampling import apply_grammar, guide, rows_at, warp, widen
from ..sequence import Sequence
from ..tree import Tree
from ..types import Draft, Scores
from .grow import Grower

STALE = ("recent", "last")
TIER = 16


@dataclass
class HeadSequence(Sequence):
    """A head's own sequence. Its cache begins with `scratch` slots for drafted nodes, which `prompt` and `pad` count too.

    prefix [R, P, D]: embeddings of the prompt, until it has been read; bare [R]: rows without a prompt, before whose column 0
    there is no feature.
    """

    scratch: int = 0
    prefix: Tensor | None = None
    bare: Tensor | None = None


class Head(Protocol):
    """A model that predicts the target's features."""

    def prefill(self, target: HeadTarget, own: HeadSequence, hidden: Tensor) -> None:
        """Read the prompt with the target's features of its slots, hidden [R, P, D]."""
        ...

    def step(self, target: HeadTarget, own: HeadSequence, tokens: Tensor, features: Tensor, layout: Layout) -> Tensor:
        """One forward over tokens [B, T] in layout.columns, features [R, T, D] of the columns before: predictions [R, T, D]."""
        ...


class HeadTarget(Protocol):
    """What a drafter needs of the target: its output head."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Features [..., D] -> [..., V]."""
        ...


class HeadDrafter(Grower):
    """Drafts with a head over the target's features, guided and warped as the target is.

    own: made by the head's `begin`, with scratch >= the nodes that are fed. length, tree, dynamic, seeded: see `Grower`.
    stale: what stands for features the target has not computed yet (after a skipped verification). "recent": the newest ones,
    as many as are missing, in order; "last": the newest one for all.
    """

    def __init__(
        self,
        head: Head,
        target: HeadTarget,
        own: HeadSequence,
        length: int = 4,
        tree: Tree | None = None,
        dynamic: tuple[int, int, int] | None = None,
        seeded: bool = False,
        stale: str = "recent",
    ):
        super().__init__(length, tree, dynamic, seeded)
        if stale not in STALE:
            raise ValueError(f"unknown stale {stale!r}; choose one of {', '.join(STALE)}")
        cache, pad = own.cache, own.pad
        if cache is None or pad is None:
            raise ValueError("this sequence has no cache: make it with the head's begin()")
        self.head, self.target, self.own, self.stale = head, target, own, stale
        self._cache, self._repeat = cache, cache.rows // len(own.length)
        self._plans = ChainLayouts(pad, own.prompt, cache.slots, cache.keys.dtype)
        # Additive masks: row k shows drafted node k alone; of a chain, all nodes up to k.
        hidden = torch.full((own.scratch, own.scratch), -torch.inf, dtype=cache.keys.dtype, device=pad.device)
        self._single, self._lower = hidden.clone().fill_diagonal_(0.0), hidden.triu(1)[None]
        self._rows = torch.arange(cache.rows, device=pad.device)[:, None] * cache.slots
        self._flat = [(self._rows + node).flatten() for node in range(own.scratch)]
        self._sequence: Sequence | None = None

    def propose(self, sequence: Sequence, noise: Noise) -> Draft:
        """Draft K tokens after the last committed one."""
        own, before = self.own, self.own.model_seconds
        self._sequence = sequence
        own.follow(sequence)
        draft = self.draft(sequence, noise)
        sequence.draft_seconds += own.model_seconds - before
        return draft

    def root(self) -> Scores:
        """Read the committed columns that are new or were read with a feature that was not final."""
        own, sequence = self.own, self._sequence
        if sequence is None or sequence.cache is None:
            raise ValueError("a draft head reads the features in the target's cache, and this sequence has none")
        if own.prefix is not None:
            self.head.prefill(self.target, own, sequence.cache.hidden[:, : sequence.prompt])
            own.prefix = None
        if own.low == own.high:
            columns = own.steps(own.low)[own.low - own.pending :].expand(len(own.length), -1)
            layout = self._plans.even(own.low - own.pending, columns)
        else:
            columns = (own.length[:, None] - own.pending + own.steps(own.pending)).clamp_(min=0)
            tier = min(-(-(own.prompt + own.high) // TIER) * TIER, self._cache.slots)
            done = (own.length >= own.limit)[:, None].expand_as(columns) if own.high >= own.limit else None
            layout = self._plans.ragged(columns, tier, done)
        hidden = self._step(own.tokens.gather(1, columns), self._features(sequence, columns), layout)
        # What was read with a feature that is not final is read again.
        own.cached = torch.minimum(own.length, sequence.cached + 1)
        self._hidden, self._tier, self._base = hidden[:, -1:], layout.tier, layout.mask[:, :, -1:, own.scratch :]
        self._seen, self._depth, self._first = self._single.new_full((1, 1, own.scratch), -torch.inf), 0, 0
        self._place = (own.length - 1)[:, None]
        return self._scores()

    def extend(self, token: Tensor) -> Scores:
        """See `Grower.extend`."""
        node = self._first
        if node == len(self._flat):
            raise ValueError(f"the draft feeds {node + 1} nodes and the head's cache has room for {node}")
        if node == 0:
            rows = self._cache.rows
            base = self._base.expand(rows, -1, len(self._flat), -1)
            self._chained = torch.cat((self._lower.expand(rows, 1, -1, -1), base), -1)
        self._depth, self._first, self._seen = self._depth + 1, node + 1, self._lower[:, node : node + 1]
        layout = Layout(self._place + self._depth, self._flat[node], self._chained[:, :, node : node + 1], self._tier)
        self._hidden = self._step(token[:, None], self._hidden, layout)
        return self._scores()

    def grow(self, tokens: Tensor, origin: Tensor) -> Scores:
        """See `Grower.grow`; the features fed are the head's own predictions at the parents."""
        own, width, last = self.own, tokens.shape[1], self._first + tokens.shape[1]
        if last > own.scratch:
            raise ValueError(f"the draft feeds {last} nodes and the head's cache has room for {own.scratch}")
        self._depth += 1
        if self._seen.shape[1] > 1 or width > 1:
            rows = max(len(origin), len(self._seen))
            origin = origin.expand(rows, -1)
            seen = self._seen.expand(rows, -1, -1).gather(1, origin[..., None].expand(-1, -1, own.scratch))
            origin = origin.expand(len(tokens), -1)
            features = rows_at(self._hidden, origin.repeat(self._repeat, 1) if self._repeat > 1 else origin)
        else:
            seen, features = self._seen, self._hidden
        self._seen = torch.maximum(seen, self._single[self._first : last])
        shown = self._seen if len(self._seen) == 1 else self._seen.repeat(self._repeat, 1, 1)
        rows = self._cache.rows
        mask = torch.cat((shown[:, None].expand(rows, -1, -1, -1), self._base.expand(rows, -1, width, -1)), -1)
        flat = (self._rows + own.steps(last)[self._first :]).reshape(-1)
        layout = Layout((self._place + self._depth).expand(-1, width), flat, mask, self._tier)
        self._hidden, self._first = self._step(tokens, features, layout), last
        return self._scores()

    def _step(self, tokens: Tensor, features: Tensor, layout: Layout) -> Tensor:
        begun = perf_counter()
        hidden = self.head.step(self.target, self.own, tokens, features, layout)
        self.own.model_seconds += perf_counter() - begun
        self.draft_forwards += 1
        return hidden

    def _scores(self) -> Scores:
        """Guided and warped laws after the nodes fed last; all of them predict one index, and so index is [B, 1]."""
        own = self.own
        begun = perf_counter()
        raw = widen(self.target.logits(self._hidden))
        own.model_seconds += perf_counter() - begun
        if self._repeat > 1:
            raw = guide(raw, own.sampling.guidance_scale)
        log_p = warp(raw, own.sampling)
        index, span = self._place + self._depth, (own.low - 1 + self._depth, own.high + self._depth)
        if span[1] >= own.limit:
            index = index.clamp(max=own.limit - 1)
        if own.forced is not None:
            log_p = apply_grammar(log_p, index.expand(-1, log_p.shape[1]), own.forced)
        return Scores(log_p, index, span, contiguous=own.low == own.high)

    def sources(self, sequence: Sequence, columns: Tensor) -> Tensor:
        """Whose features are read for columns [B, T]: the columns before, or what stands for them; -1 = the prompt's last."""
        source = columns - 1
        if sequence.pending > 1:
            final = sequence.cached[:, None]
            missing = sequence.length[:, None] - 1 - final
            older = source - missing if self.stale == "recent" else final - 1
            source = torch.where(source < final, source, older).clamp_(min=-1)
        return source

    def _features(self, sequence: Sequence, columns: Tensor) -> Tensor:
        """The target's features of the columns before columns [B, T]: [R, T, D]; zero before a column 0 without a prompt."""
        cache, bare = sequence.cache, self.own.bare
        if cache is None or bare is None:
            raise ValueError("no features here")
        source = self.sources(sequence, columns)
        source = source.repeat(self._repeat, 1) if self._repeat > 1 else source
        features = cache.hidden_at((source + sequence.prompt).clamp_(min=0))
        if self.own.low <= self.own.pending or sequence.pending > 1:
            features = features.masked_fill(((source < 0) & bare[:, None])[..., None], 0.0)
        return features
