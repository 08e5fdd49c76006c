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
        self._plan = None if tree is None else plan(tree)

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
        elif self.tree is not None and self._plan is not None:
            draft = self._static(noise, self.tree, self._plan)
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
            scores = self.extend(tokens[-1][:, 0]) if step else self.root()
            tokens.append(draw(scores.log_p, scores.noise(noise)))
            laws.append(scores.log_p)
        return Draft(torch.cat(tokens, 1), None if self.seeded else torch.cat(laws, 1).exp())

    def _static(self, noise: Noise, tree: Tree, shape: Plan) -> Draft:
        """Fill a fixed shape level by level; nodes without children are never fed."""
        drawn: list[Tensor] = []
        exist: list[Tensor] = []
        laws: list[Tensor] = []
        for level in shape.levels:
            if not drawn:
                scores = self.root()
            elif level.alone:
                scores = self.extend(drawn[-1].flatten(1)[:, level.fed[0]])
            else:
                scores = self.grow(drawn[-1].flatten(1)[:, level.fed], level.origin)
            codes, found = draw_distinct(scores.log_p, scores.noise(noise), shape.width)
            drawn.append(codes)
            exist.append(found)
            laws.append(scores.log_p)
        codes = torch.cat(drawn, 1)
        tokens, found = codes[:, shape.parent, shape.rank], torch.cat(exist, 1)[:, shape.parent, shape.rank]
        valid = ~(tree.seen & ~found[:, None]).any(-1)
        return Draft(
            tokens, None if self.seeded else struck(torch.cat(laws, 1).exp(), codes, shape.parent, shape.rank), tree, valid
        )

    def _dynamic(self, noise: Noise, total: int, levels: int, k: int) -> Draft:
        """EAGLE-2: expand the k most confident nodes of each level by their k best codes, then keep the best `total` nodes."""
        pool_tokens: list[Tensor] = []
        pool_parents: list[Tensor] = []
        pool_scores: list[Tensor] = []
        scores, offset = self.root(), 0
        beam_score = scores.log_p.new_zeros(1, 1)
        beam_pool = torch.full_like(beam_score, -1, dtype=torch.long)
        for level in range(1, levels + 1):
            log_q = scores.log_p
            if self.seeded:
                log_q = (log_q - scores.noise(noise)).log_softmax(-1)
            best = log_q.topk(min(k, log_q.shape[-1]), dim=-1)
            candidate, tokens = (beam_score[..., None] + best.values).flatten(1), best.indices.flatten(1)
            pool_tokens.append(tokens)
            pool_parents.append(beam_pool[..., None].expand_as(best.indices).flatten(1))
            pool_scores.append(candidate)
            if level == levels:
                break
            keep = candidate.topk(min(k, candidate.shape[1]), dim=1).indices.sort(1).values
            beam_score, beam_pool = candidate.gather(1, keep), offset + keep
            scores = self.grow(tokens.gather(1, keep), keep // best.indices.shape[-1])
            offset += candidate.shape[1]
        scores_all, parents_all = torch.cat(pool_scores, 1), torch.cat(pool_parents, 1)
        kept, new_parents = rank_dynamic(scores_all, parents_all, total)
        self.confidence = scores_all.gather(1, kept)
        valid = self.confidence > -torch.inf
        return Draft(torch.cat(pool_tokens, 1).gather(1, kept), None, Tree(new_parents, levels), valid)


@dataclass(frozen=True)
class Level:
    """One level of a static tree: the nodes of the level above that have children. fed [W]: their places among all codes drawn
    for that level (row * width + rank); origin [1, W]: the rows of the Scores above that those are children of; alone: whether
    the level above and all before it feed one node each."""

    fed: Tensor
    origin: Tensor
    alone: bool


@dataclass(frozen=True)
class Plan:
    """How a static tree of K nodes is filled. width: the most siblings; parent [K]: the row, among those of all levels' Scores,
    that each node is a child of; rank [K]: its place among its siblings."""

    levels: list[Level]
    width: int
    parent: Tensor
    rank: Tensor


def plan(tree: Tree) -> Plan:
    """What filling a static tree [1, K] needs, once. Nodes are in order of depth."""
    parents, depth, rank = tree.parents[0].tolist(), tree.depth[0].tolist(), tree.order[0].tolist()
    if depth != sorted(depth):
        raise ValueError("the nodes of a static tree must stand in order of depth")
    device, width = tree.parents.device, max(rank, default=0) + 1
    row = {-1: 0}  # of a node that has children, in the Scores that follow it
    place: dict[int, int] = {}  # of a node among the codes drawn for its level
    parent: list[int] = []
    levels: list[Level] = []
    above, before = [-1], 0
    for level in range(1, tree.levels + 1):
        fed = [node for node in above if node in parents]
        origin = [row[parents[node]] for node in fed] if levels else [0]
        row.update({node: number for number, node in enumerate(fed)})
        alone = len(fed) == 1 and all(each.alone for each in levels)
        places = [place.get(node, 0) for node in fed]
        levels.append(Level(torch.tensor(places, device=device), torch.tensor([origin], device=device), alone))
        above = [node for node, deep in enumerate(depth) if deep == level]
        place.update({node: row[parents[node]] * width + rank[node] for node in above})
        parent += [before + row[parents[node]] for node in above]
        before += len(fed)
    return Plan(levels, width, torch.tensor(parent, device=device), tree.order[0])


def struck(p: Tensor, codes: Tensor, parent: Tensor, rank: Tensor) -> Tensor:
    """Law of each sibling given the ones drawn before it: p [B, M, V], codes [B, M, C]; parent, rank [L] -> [B, L, V]."""
    laws, codes = p[:, parent], codes[:, parent]
    earlier = torch.arange(codes.shape[2], device=rank.device) < rank[:, None]
    laws.scatter_(2, codes, laws.gather(2, codes).masked_fill_(earlier, 0.0))
    return normalised(laws, laws)
