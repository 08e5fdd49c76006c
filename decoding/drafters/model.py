"""A small sibling of the target drafts a chain or a tree, autoregressively. How drafts are grown: `grow`.

Source: Leviathan et al. 2023.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..noise import Noise
from ..planner import Planner
from ..sequence import Sequence
from ..tree import Tree
from ..types import Draft, Scores, Verdict, no_draft
from .grow import Grower


class DraftModel(Protocol):
    """The drafting half of a target: scores its own sequence."""

    def score(self, sequence: Sequence, draft: Draft) -> Scores:
        """One forward of the draft model."""
        ...


class ModelDrafter(Grower):
    """Drafts with a model of its own that has its own cache.

    model, own: the draft model and its sequence (made by its `begin` with scratch >= the tree's nodes). length, tree, dynamic,
    seeded: see `Grower`. planner: chooses each round's draft length (seeded chains only).
    """

    def __init__(
        self,
        model: DraftModel,
        own: Sequence,
        length: int = 4,
        tree: Tree | None = None,
        dynamic: tuple[int, int, int] | None = None,
        seeded: bool = False,
        planner: Planner | None = None,
    ):
        super().__init__(length, tree, dynamic, seeded)
        self.model, self.own, self.planner = model, own, planner
        if planner is not None:
            if not seeded or tree is not None or dynamic is not None:
                raise ValueError("a planner follows the clock, which only seeded chains may")
            planner.begin()
        self._empty = no_draft(len(own.length), own.length.device)
        self._grown = self._empty
        self._level = self._height = 0

    def propose(self, sequence: Sequence, noise: Noise) -> Draft:
        """Draft K tokens after the last committed one."""
        if self.planner is not None:
            self.length = self.planner.choose()
            if self.length == 0:
                return self._empty
        self.own.follow(sequence)
        before = self.own.model_seconds
        draft = self.draft(sequence, noise)
        sequence.draft_seconds += self.own.model_seconds - before
        return draft

    def observe(self, sequence: Sequence, draft: Draft, scores: Scores | None, verdict: Verdict, noise: Noise) -> None:
        """The next `propose` compares what was fed with what was committed; a planner learns what was kept."""
        if self.planner is not None:
            self.planner.note(verdict.accepted[sequence.active].tolist())

    def root(self) -> Scores:
        """One forward over the pending columns."""
        self._grown, self._level, self._height = self._empty, 0, 0
        return self._score(self._empty)

    def grow(self, tokens: Tensor, origin: Tensor) -> Scores:
        """See `Grower.grow`. The nodes fed so far are fed again, behind the pending columns."""
        grown, parents = self._grown, self._level + origin - 1
        if grown.tree is not None:
            parents = torch.cat((grown.tree.parents.expand(len(parents), -1), parents), 1)
        self._level = grown.nodes + 1
        self._height += 1
        self._grown = Draft(torch.cat((grown.tokens, tokens), 1), tree=Tree(parents, self._height))
        scores, width = self._score(self._grown), tokens.shape[1]
        return Scores(scores.log_p[:, -width:], scores.index[:, -width:], scores.span)

    def extend(self, token: Tensor) -> Scores:
        """The token becomes a pending column, so that it need not be fed again if it is kept."""
        self._append(token)
        return self._score(self._empty)

    def _score(self, draft: Draft) -> Scores:
        """One forward of the draft model, which feeds it all of its own tokens that are not cached yet."""
        self.draft_forwards += 1
        scores = self.model.score(self.own, draft)
        self.own.cached, self.own.pending = self.own.length, 1
        return scores

    def _append(self, token: Tensor) -> None:
        """Put a drafted token into the draft model's own sequence; rows at the end of the image stay as they are."""
        own = self.own
        if own.high < own.limit:
            own.tokens.scatter_(1, own.length[:, None], token[:, None])
            own.length = own.length + 1
        else:
            place = own.length.clamp(max=own.limit - 1)[:, None]
            own.tokens.scatter_(1, place, torch.where(own.active[:, None], token[:, None], own.tokens.gather(1, place)))
            own.length = torch.clamp(own.length + 1, max=own.limit)
        own.low, own.high, own.pending = min(own.low + 1, own.limit), min(own.high + 1, own.limit), 1
