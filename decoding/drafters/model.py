"""A small sibling of the target drafts a chain or a tree, autoregressively.

Chains and static trees sample: siblings are drawn without replacement (Gumbel-top-k on the position's own noise) and q of each is
struck of the siblings before it. Dynamic trees are chosen by confidence, which sampled tokens must never be (dropping a draft for
its own low q biases the output), so their candidates are the deterministic top-k: point masses, q None.

Source: Leviathan et al. 2023; Miao et al. 2024; Jeon et al. 2024 (without replacement); Li et al. 2024 (EAGLE-2, dynamic trees).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..noise import Noise
from ..planner import Planner
from ..rules import normalised
from ..sampling import draw, draw_distinct
from ..sequence import Sequence
from ..tree import Tree, rank_dynamic
from ..types import Draft, Scores, Verdict, no_draft


class DraftModel(Protocol):
    """The drafting half of a target: scores its own sequence."""

    def score(self, sequence: Sequence, draft: Draft) -> Scores:
        """One forward of the draft model."""
        ...


class ModelDrafter:
    """Drafts with a model of its own that has its own cache.

    model, own: the draft model and its sequence (made by its `begin` with scratch >= the tree's nodes). length: draft length of
    a chain. tree: a static shape to fill. dynamic (total, depth, k): expand the k best nodes of each level by their k best
    children, keep the `total` most confident nodes. seeded: candidates are ranked with the position's noise and no q is kept.
    planner: chooses each round's draft length (seeded chains only).
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
        self.model, self.own, self.length, self.tree, self.dynamic, self.seeded = (
            model,
            own,
            length,
            tree,
            dynamic,
            seeded,
        )
        self.draft_forwards = 0
        self.planner = planner
        if planner is not None:
            if not seeded or tree is not None or dynamic is not None:
                raise ValueError("a planner follows the clock, which only seeded chains may")
            planner.begin()

    def propose(self, sequence: Sequence, noise: Noise) -> Draft:
        """Draft K tokens after the last committed one."""
        if self.planner is not None:
            self.length = self.planner.choose()
            if self.length == 0:
                return no_draft(len(sequence.length), sequence.length.device)
        self._follow(sequence)
        before = self.own.model_seconds
        if self.dynamic is not None:
            draft = self._dynamic(noise, *self.dynamic)
        elif self.tree is not None:
            draft = self._static(noise, self.tree)
        else:
            draft = self._chain(noise)
        sequence.draft_seconds += self.own.model_seconds - before
        if draft.valid is None and sequence.high + self._reach() > sequence.limit:
            depth = torch.arange(1, draft.nodes + 1, device=sequence.length.device)[None]
            if draft.tree is not None:
                depth = draft.tree.depth
            draft.valid = sequence.length[:, None] - 1 + depth < sequence.limit
        elif draft.valid is not None and draft.tree is not None:
            draft.valid &= sequence.length[:, None] - 1 + draft.tree.depth < sequence.limit
        return draft

    def observe(self, sequence: Sequence, draft: Draft, scores: Scores | None, verdict: Verdict, noise: Noise) -> None:
        """The next `propose` compares what was fed with what was committed; a planner learns what was kept."""
        if self.planner is not None:
            self.planner.note(verdict.accepted[sequence.active].tolist())

    def _reach(self) -> int:
        if self.dynamic is not None:
            return self.dynamic[1]
        return self.tree.levels if self.tree is not None else self.length

    def _follow(self, sequence: Sequence) -> None:
        """Adopt the committed tokens; the cache stays valid up to the first column that was fed something else."""
        own = self.own
        column = own.steps(own.limit)
        fed = torch.minimum(own.cached, sequence.length - 1)
        wrong = (own.tokens != sequence.tokens) | (column >= fed[:, None])
        own.adopt(sequence.tokens.clone(), sequence.length, torch.where(wrong, column, own.limit).min(1).values)

    def _score(self, draft: Draft) -> Scores:
        """One forward of the draft model, which feeds it all of its own tokens that are not cached yet."""
        self.draft_forwards += 1
        scores = self.model.score(self.own, draft)
        self.own.cached = self.own.length
        return scores

    def _chain(self, noise: Noise) -> Draft:
        own, tokens, laws = self.own, [], []
        empty = no_draft(len(own.length), own.length.device)
        for step in range(self.length):
            scores = self._score(empty)
            log_q = scores.log_p[:, 0]
            token = draw(log_q, scores.noise(noise)[:, 0])
            tokens.append(token)
            if not self.seeded:
                laws.append(scores.p[:, 0])
            if step + 1 < self.length:
                self._append(token)
        return Draft(torch.stack(tokens, 1), None if self.seeded else torch.stack(laws, 1))

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

    def _static(self, noise: Noise, tree: Tree) -> Draft:
        """Fill a fixed shape level by level. The nodes drafted so far are fed again at each level, behind the pending columns."""
        rows, device = len(self.own.length), self.own.length.device
        depth, order = tree.depth[0], tree.order[0]
        nodes = depth.shape[0]
        tokens = torch.zeros(rows, nodes, dtype=torch.long, device=device)
        valid = torch.zeros(rows, nodes, dtype=torch.bool, device=device)
        laws: list[Tensor] = []
        first = 0
        for level in range(1, tree.levels + 1):
            members = (depth == level).nonzero()[:, 0]
            shape = Tree(tree.parents[:, :first]) if first else None
            scores = self._score(Draft(tokens[:, :first], tree=shape))
            width = int(order[members].max()) + 1
            codes, exist = draw_distinct(scores.log_p, scores.noise(noise), width)
            parent, rank = tree.parents[0, members] + 1, order[members]
            tokens[:, members] = codes[:, parent, rank]
            alive = torch.ones_like(exist[:, parent, rank]) if level == 1 else valid[:, parent - 1]
            valid[:, members] = exist[:, parent, rank] & alive
            if not self.seeded:
                laws.append(_struck(scores.p, codes, parent, rank))
            first += len(members)
        return Draft(tokens, None if self.seeded else torch.cat(laws, 1), Tree(tree.parents), valid)

    def _dynamic(self, noise: Noise, total: int, levels: int, k: int) -> Draft:
        """EAGLE-2: expand the k most confident nodes of each level by their k best codes, then keep the best `total` nodes."""
        own = self.own
        rows, device = len(own.length), own.length.device
        batch = torch.arange(rows, device=device)[:, None]
        fed = Draft(torch.zeros(rows, 0, dtype=torch.long, device=device))
        pool_tokens, pool_parents, pool_scores = [], [], []
        frontier = torch.zeros(rows, 1, dtype=torch.long, device=device)  # rows of the scores to expand
        beam_score = torch.zeros(rows, 1, device=device)
        beam_pool = torch.full((rows, 1), -1, dtype=torch.long, device=device)
        offset = 0
        for level in range(1, levels + 1):
            scores = self._score(fed)
            log_q = scores.log_p[batch, frontier]
            if self.seeded:
                log_q = (log_q - scores.noise(noise)[batch, frontier]).log_softmax(-1)
            best = log_q.topk(min(k, log_q.shape[-1]), dim=-1)
            candidate = (beam_score[..., None] + best.values).flatten(1)
            parent = beam_pool[..., None].expand(-1, -1, best.values.shape[-1]).flatten(1)
            pool_tokens.append(best.indices.flatten(1))
            pool_parents.append(parent)
            pool_scores.append(candidate)
            if level == levels:
                break
            chosen = candidate.topk(min(k, candidate.shape[1]), dim=1)
            keep = chosen.indices.sort(1).values
            origin = frontier.gather(1, torch.div(keep, best.values.shape[-1], rounding_mode="floor"))
            beam_score, beam_pool = candidate.gather(1, keep), offset + keep
            tokens = torch.cat((fed.tokens, best.indices.flatten(1).gather(1, keep)), 1)
            parents = origin - 1 if fed.tree is None else torch.cat((fed.tree.parents, origin - 1), 1)
            frontier = torch.arange(fed.nodes + 1, tokens.shape[1] + 1, device=device).expand(rows, -1)
            fed = Draft(tokens, tree=Tree(parents))
            offset += candidate.shape[1]
        scores_all, parents_all = torch.cat(pool_scores, 1), torch.cat(pool_parents, 1)
        kept, new_parents = rank_dynamic(scores_all, parents_all, total)
        valid = scores_all.gather(1, kept) > -torch.inf
        return Draft(torch.cat(pool_tokens, 1).gather(1, kept), None, Tree(new_parents), valid)


def _struck(p: Tensor, codes: Tensor, parent: Tensor, rank: Tensor) -> Tensor:
    """Law of each sibling given the ones drawn before it: p [B, M, V], codes [B, M, C]; parent, rank [L] -> [B, L, V]."""
    laws = p[:, parent]
    for earlier in range(int(rank.max()) if len(rank) else 0):
        later = rank > earlier
        struck = laws.scatter(2, codes[:, parent, earlier][..., None], 0.0)
        laws = torch.where(later[:, None], struck, laws)
    return normalised(laws, laws)
