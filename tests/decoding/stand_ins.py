"""Drafters and verifiers that only tests need: two honest ones, and the faults that the distribution check must find."""

from __future__ import annotations

from dataclasses import replace

import torch
from foredraft.decoding.drafters.jacobi import JacobiDrafter
from foredraft.decoding.drafters.model import ModelDrafter
from foredraft.decoding.noise import DRAW, Noise, splitmix64
from foredraft.decoding.planner import Planner
from foredraft.decoding.rules import Exact
from foredraft.decoding.sampling import draw
from foredraft.decoding.sequence import Sequence
from foredraft.decoding.tree import Tree
from foredraft.decoding.types import Draft, Scores, Verdict, Verifier, pick
from torch import Tensor

from .tabular import TabularTarget, fresh_sequence


class WithReplacement:
    """Fills a static tree with siblings drawn independently from q, so that they may repeat; q is nobody's to strike."""

    draft_forwards = 0

    def __init__(self, model: TabularTarget, tree: Tree):
        self.model, self.tree = model, tree

    def propose(self, sequence: Sequence, noise: Noise) -> Draft:
        """Node by node, each with noise of its own."""
        parents = self.tree.parents[0]
        tokens = torch.zeros(len(sequence.length), len(parents), dtype=torch.long)
        laws: list[Tensor] = []
        scores, scored = self.model.score(sequence, Draft(tokens[:, :0])), 0
        for node, parent in enumerate(parents.tolist()):
            if parent >= scored:  # the first node of a new level: its parents have their tokens by now
                scored = node
                scores = self.model.score(sequence, Draft(tokens[:, :node], tree=Tree(self.tree.parents[:, :node])))
            row = slice(parent + 1, parent + 2)
            log_e = noise.log_exponential(scores.index[:, row], self.model.vocabulary, DRAW, node, scores.log_p.dtype)
            tokens[:, node] = draw(scores.log_p[:, row], log_e)[:, 0]
            laws.append(scores.p[:, parent + 1])
        valid = sequence.length[:, None] - 1 + self.tree.depth < sequence.limit
        return Draft(tokens, torch.stack(laws, 1), self.tree, valid)

    def observe(self, sequence: Sequence, draft: Draft, scores: Scores | None, verdict: Verdict, noise: Noise) -> None:
        """Nothing to learn."""


class Scripted(Planner):
    """Draft lengths from a list, over and over: what the clock might have chosen."""

    def __init__(self, script: list[int]):
        super().__init__(tuple(script), max(script))
        self.script = script

    def choose(self) -> int:
        """The next length of the list."""
        self._length = self.script[self.rounds % len(self.script)]
        self.rounds += 1
        return self._length


class FreshCoins:
    """A verifier whose coins are new in every round, as those of a stateful generator are."""

    exact = True

    def __init__(self, inner: Verifier):
        self.inner, self.round = inner, 0

    def __call__(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        """See `Verifier`."""
        self.round += 1
        return self.inner(draft, scores, Noise(splitmix64(noise.seeds + (self.round << 40))))


class AcceptEverything(Exact):
    """Fault: every draft is kept."""

    def accept(self, p: Tensor, q: Tensor | None, x: Tensor, depth: Tensor | int = 0) -> Tensor:
        """f = 1."""
        return torch.ones_like(pick(p, x))


class RecoverFromTarget(Exact):
    """Fault: a rejected token is replaced by a draw from p."""

    def residual(self, p: Tensor, q: Tensor | None, x: Tensor, depth: Tensor | int = 0) -> Tensor:
        """G = p."""
        return p


class Tampered:
    """A Jacobi drafter whose proposals are spoiled on the way to the verifier; subclasses say how."""

    draft_forwards = 0

    def __init__(self, window: int, vocabulary: int, tail: str, init: str):
        self.window = window
        self.inner = JacobiDrafter(window, vocabulary, tail=tail, init=init, dtype=torch.float64)
        self.last: tuple[Draft, Verdict] | None = None

    def propose(self, sequence: Sequence, noise: Noise) -> Draft:
        """The inner drafter's window, spoiled."""
        draft = self.inner.propose(sequence, noise)
        self.spoil(draft, sequence, noise)
        return draft

    def observe(self, sequence: Sequence, draft: Draft, scores: Scores | None, verdict: Verdict, noise: Noise) -> None:
        """Passed on."""
        self.inner.observe(sequence, draft, scores, verdict, noise)
        self.last = (replace(draft), verdict)

    def spoil(self, draft: Draft, sequence: Sequence, noise: Noise) -> None:
        """Change the draft in place."""

    def shifted(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the slots of this window held in the last one: whether anything, token, law."""
        assert self.last is not None
        draft, verdict = self.last
        assert draft.q is not None
        slot = verdict.count[:, None] + torch.arange(self.window)
        at = slot.clamp(max=self.window - 1)
        return slot < self.window, draft.tokens.gather(1, at), draft.q.gather(1, at[..., None].expand_as(draft.q))


class StaleLaws(Tampered):
    """Fault: a redrawn slot keeps the q of the token it held before."""

    def spoil(self, draft: Draft, sequence: Sequence, noise: Noise) -> None:
        """New tokens, old laws."""
        if self.last is not None and draft.q is not None:
            had, _, law = self.shifted()
            draft.q = torch.where(had[..., None], law, draft.q)


class NeighboursLaw(Tampered):
    """Fault: a repeated token is stored with the law of the slot it was copied from. init is one of the sample_* ones."""

    def __init__(self, window: int, vocabulary: int, tail: str, init: str):
        super().__init__(window, vocabulary, tail, init)
        self.copies = JacobiDrafter(window, vocabulary, tail=tail, init=init.removeprefix("sample_"), dtype=torch.float64)

    def spoil(self, draft: Draft, sequence: Sequence, noise: Noise) -> None:
        """Tokens of one initialisation, laws of another; slots that are not new are the same in both."""
        draft.tokens = self.copies.propose(sequence, noise).tokens

    def observe(self, sequence: Sequence, draft: Draft, scores: Scores | None, verdict: Verdict, noise: Noise) -> None:
        """Passed on to both."""
        super().observe(sequence, draft, scores, verdict, noise)
        self.copies.observe(sequence, draft, scores, verdict, noise)


class GreedyFirst(Tampered):
    """Fault: new slots hold the most probable code, stored as if it had been sampled."""

    def spoil(self, draft: Draft, sequence: Sequence, noise: Noise) -> None:
        """argmax q where a slot is new."""
        if self.last is not None and draft.q is not None:
            known = (self.window + 1 - self.last[1].count)[:, None]
            new = torch.arange(self.window) >= known
            draft.tokens = torch.where(new, draft.q.argmax(-1), draft.tokens)


class Slowest(FreshCoins):
    """Fault, first half: every second row is truncated to the slower of a pair."""

    def __call__(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        """The verdict, cut."""
        verdict = super().__call__(draft, scores, noise)
        count = verdict.count.view(-1, 2).min(1).values.repeat_interleave(2)
        return replace(verdict, count=count, accepted=torch.minimum(verdict.accepted, count))


class Retested(Tampered):
    """Fault, second half: what the verifier settled and the cut threw away is tested again, against the old q."""

    def spoil(self, draft: Draft, sequence: Sequence, noise: Noise) -> None:
        """Cut rows keep accepted and recovered tokens, which follow p by now, with the laws they had before."""
        if self.last is not None and draft.q is not None:
            verdict = self.last[1]
            had, _, law = self.shifted()
            slot = verdict.count[:, None] + torch.arange(self.window)
            keep = had & (slot <= verdict.stop[:, None])
            settled = verdict.tokens.gather(1, slot.clamp(max=self.window))
            draft.tokens = torch.where(keep, settled, draft.tokens)
            draft.q = torch.where(keep[..., None], law, draft.q)


class DropUnlikely(ModelDrafter):
    """Fault: a sampled chain is cut before the first token whose own q is low."""

    def propose(self, sequence: Sequence, noise: Noise) -> Draft:
        """Only confident drafts are sent to the verifier."""
        draft = super().propose(sequence, noise)
        assert draft.q is not None
        likely = (pick(draft.q, draft.tokens) > 0.3).cumprod(1).bool()
        draft.valid = likely if draft.valid is None else draft.valid & likely
        return draft


def unstruck(p: Tensor, codes: Tensor, parent: Tensor, rank: Tensor) -> Tensor:
    """Fault: q of a sibling forgets the siblings drawn before it."""
    return p[:, parent]


def unnormalised(p: Tensor, codes: Tensor, parent: Tensor, rank: Tensor) -> Tensor:
    """Fault: q of a sibling is struck of the siblings before it and not renormalised."""
    laws = p[:, parent]
    for earlier in range(int(rank.max())):
        later = (rank > earlier)[:, None]
        laws = torch.where(later, laws.scatter(2, codes[:, parent, earlier][..., None], 0.0), laws)
    return laws


def draft_noise_stop(law: Tensor, scores: Scores, index: Tensor, noise: Noise) -> Tensor:
    """Fault: the recovered token is drawn with the noise that drew the draft."""
    log_e = noise.log_exponential(index[:, None], law.shape[-1], DRAW, dtype=torch.float64)[:, 0]
    return draw(law.double().log(), log_e)


def model_drafter(model: TabularTarget, rows: int, kind: type[ModelDrafter] = ModelDrafter, **options: object) -> ModelDrafter:
    """A drafter over a table, with a sequence of its own."""
    return kind(model, fresh_sequence(rows, model.length), **options)  # type: ignore[arg-type]
