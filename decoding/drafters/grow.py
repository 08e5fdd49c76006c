"""Drafts grown level by level: a chain, a static tree, a dynamic tree. Who scores the nodes is the subclass's affair.

Chains and static trees sample: siblings are drawn without replacement (Gumbel-top-k on the position's own noise) and q of each is
struck of the siblings before it. Dynamic trees are chosen by confidence, which sampled tokens must never be (dropping a draft for
its own low q biases the output), so their candidates are the deterministic top-k: point masses, q None.

Source: Miao et al. 2024; Jeon et al. 2024 (without replacement); Li et al. 2024 (EAGLE-2, dynamic trees).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..noise import Noise
from ..rules import normalised
from ..sampling import draw, draw_distinct
from ..sequence import Sequence
from ..tree import Tree, rank_dynamic
from ..types import Draft, Scores, Verdict, no_draft


class Grower:
    """Drafts K tokens with an own autoregressive scorer.

    length: draft length of a chain. tree: a static shape to fill. dynamic (total, depth, k): expand the k best nodes of each
    level by their k best children, keep the `total` most confident nodes. seeded: candidates are ranked with the position's
    noise and no q is kept. confidence [B, K]: cumulative log confidence of the nodes of the last dynamic tree.
    """

    def __init__(
        self,
        length: int = 4,
        tree: Tree | None = None,
        dynamic: tuple[int, int, int] | None = None,
        seeded: bool = False,
    ):
        self.length, self.tree, self.dynamic, self.seeded = length, tree, dynamic, seeded
        self.draft_forwards = 0
        self.confidence: Tensor | None = None
        self._levels = None if tree is None else plan(tree)

    def root(self) -> Scores:
        """What follows the committed tokens: one row per image. Forgets the nodes grown before."""
        raise NotImplementedError

    def grow(self, tokens: Tensor, origin: Tensor) -> Scores:
        """Feed the next level's nodes that will have children.

        tokens [B, W]; origin [B or 1, W]: the row of the previous Scores (root's or grow's) that each is a child of.
        """
        raise NotImplementedError

    def extend(self, token: Tensor) -> Scores:
        """`grow` of a chain: token [B]."""
        return self.grow(token[:, None], torch.zeros(1, 1, dtype=torch.long, device=token.device))

    def observe(self, sequence: Sequence, draft: Draft, scores: Scores | None, verdict: Verdict, noise: Noise) -> None:
        """Nothing to learn: the next `propose` compares what was fed with what was committed."""

    @property
    def reach(self) -> int:
        """Depth of the draft."""
        if self.dynamic is not None:
            return self.dynamic[1]
        return self.tree.levels if self.tree is not None else self.length

    def draft(self, sequence: Sequence, noise: Noise) -> Draft:
        """The whole draft; nodes past the end of the image are invalid."""
        self.confidence = None
        if self.reach == 0:
            return no_draft(len(sequence.length), sequence.length.device)
        if self.dynamic is not None:
            draft = self._dynamic(noise, *self.dynamic)
        elif self.tree is not None and self._levels is not None:
            draft = self._static(noise, self.tree, self._levels)
        else:
            draft = self._chain(noise)
        if sequence.high + self.reach > sequence.limit:
            depth = torch.arange(1, draft.nodes + 1, device=sequence.length.device)[None]
            if draft.tree is not None:
                depth = draft.tree.depth
            inside = sequence.length[:, None] - 1 + depth < sequence.limit
            draft.valid = inside if draft.valid is None else draft.valid & inside
        return draft

    def _chain(self, noise: Noise) -> Draft:
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        for step in range(self.length):
            scores = self.extend(tokens[-1]) if step else self.root()
            tokens.append(draw(scores.log_p, scores.noise(noise))[:, 0])
            if not self.seeded:
                laws.append(scores.p[:, 0])
        return Draft(torch.stack(tokens, 1), None if self.seeded else torch.stack(laws, 1))

    def _static(self, noise: Noise, tree: Tree, levels: list[Level]) -> Draft:
        """Fill a fixed shape level by level; nodes without children are never fed."""
        tokens: list[Tensor] = []
        valid: list[Tensor] = []
        laws: list[Tensor] = []
        scores, alive = self.root(), None
        for level in levels:
            if tokens:
                scores, alive = self.grow(tokens[-1][:, level.fed], level.origin), valid[-1][:, level.fed]
            codes, exist = draw_distinct(scores.log_p, scores.noise(noise), level.width)
            here = exist[:, level.parent, level.rank]
            tokens.append(codes[:, level.parent, level.rank])
            valid.append(here if alive is None else here & alive[:, level.parent])
            if not self.seeded:
                laws.append(struck(scores.p, codes, level.parent, level.rank))
        return Draft(torch.cat(tokens, 1), None if self.seeded else torch.cat(laws, 1), tree, torch.cat(valid, 1))

    def _dynamic(self, noise: Noise, total: int, levels: int, k: int) -> Draft:
        """EAGLE-2: expand the k most confident nodes of each level by their k best codes, then keep the best `total` nodes."""
        pool_tokens: list[Tensor] = []
        pool_parents: list[Tensor] = []
        pool_scores: list[Tensor] = []
        scores, offset = self.root(), 0
        beam_score = scores.log_p.new_zeros(len(scores.log_p), 1)
        beam_pool = torch.full_like(beam_score, -1, dtype=torch.long)
        for level in range(1, levels + 1):
            log_q = scores.log_p
            if self.seeded:
                log_q = (log_q - scores.noise(noise)).log_softmax(-1)
            best = log_q.topk(min(k, log_q.shape[-1]), dim=-1)
            width = best.values.shape[-1]
            candidate = (beam_score[..., None] + best.values).flatten(1)
            tokens = best.indices.flatten(1)
            pool_tokens.append(tokens)
            pool_parents.append(beam_pool.repeat_interleave(width, 1))
            pool_scores.append(candidate)
            if level == levels:
                break
            keep = candidate.topk(min(k, candidate.shape[1]), dim=1).indices.sort(1).values
            beam_score, beam_pool = candidate.gather(1, keep), offset + keep
            scores = self.grow(tokens.gather(1, keep), torch.div(keep, width, rounding_mode="floor"))
            offset += candidate.shape[1]
        scores_all, parents_all = torch.cat(pool_scores, 1), torch.cat(pool_parents, 1)
        kept, new_parents = rank_dynamic(scores_all, parents_all, total)
        self.confidence = scores_all.gather(1, kept)
        valid = self.confidence > -torch.inf
        return Draft(torch.cat(pool_tokens, 1).gather(1, kept), None, Tree(new_parents), valid)


@dataclass(frozen=True)
class Level:
    """One level of a static tree. fed [W]: the nodes of the level above that have children, by their place in that level; origin
    [1, W]: the rows of the Scores above that those are children of; parent [L]: the row of this level's Scores that each node is
    a child of; rank [L]: its place among its siblings; width: the most siblings."""

    fed: Tensor
    origin: Tensor
    parent: Tensor
    rank: Tensor
    width: int


def plan(tree: Tree) -> list[Level]:
    """What the levels of a static tree [1, K] need, once. Nodes are in order of depth."""
    parents, depth, order = tree.parents[0], tree.depth[0], tree.order[0]
    if bool((depth.diff() < 0).any()):
        raise ValueError("the nodes of a static tree must stand in order of depth")
    grown = torch.zeros(len(parents) + 1, dtype=torch.bool, device=parents.device)
    grown[parents + 1] = True
    row = torch.zeros(len(parents) + 1, dtype=torch.long, device=parents.device)  # of a fed node in its level's Scores
    above = parents.new_full((1,), -1)  # the root
    levels: list[Level] = []
    for level in range(1, tree.levels + 1):
        members = (depth == level).nonzero()[:, 0]
        fed = grown[above + 1].nonzero()[:, 0]
        origin = row[parents[above[fed]] + 1] if levels else fed
        row[above[fed] + 1] = torch.arange(len(fed), device=parents.device)
        rank = order[members]
        levels.append(Level(fed, origin[None], row[parents[members] + 1], rank, int(rank.max()) + 1))
        above = members
    return levels


def struck(p: Tensor, codes: Tensor, parent: Tensor, rank: Tensor) -> Tensor:
    """Law of each sibling given the ones drawn before it: p [B, M, V], codes [B, M, C]; parent, rank [L] -> [B, L, V]."""
    laws = p[:, parent]
    for earlier in range(int(rank.max()) if len(rank) else 0):
        later = rank > earlier
        without = laws.scatter(2, codes[:, parent, earlier][..., None], 0.0)
        laws = torch.where(later[:, None], without, laws)
    return normalised(laws, laws)
