"""The words of the engine, as types.

Glossary. B images; K drafted tokens; V codebook entries; N tokens of an image.
p target distribution, q draft distribution, both after guidance and warp. *Accepted*: a drafted token that was kept.
*Recovered*: the token drawn from the residual after a rejection. *Bonus*: the extra token when all drafts were kept.
*Forced*: a token the grammar dictates. A *round* is draft, score, verify, commit. *Draft length*: K of a chain, depth of a tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from .noise import DRAW, Noise
from .sampling import rows_at
from .sequence import Sequence
from .tree import Tree

# RECOVERED + 1 = BONUS, which verifiers rely on.
ACCEPTED, RECOVERED, BONUS, DRAWN, FORCED, UNVERIFIED = range(6)
SOURCES = ("accepted", "recovered", "bonus", "drawn", "forced", "unverified")


class Laws(Protocol):
    """The distributions a draft was drawn from, where forming all of them [B, K, V] costs more than what is asked of them."""

    def pick(self, x: Tensor) -> Tensor:
        """Probability of codes x [B, K], one per node: [B, K]."""
        ...

    def row(self, at: Tensor) -> Tensor:
        """The law of node at [B] of each row: [B, V]."""
        ...

    def dense(self) -> Tensor:
        """All of them: [B, K, V]."""
        ...


@dataclass
class Draft:
    """Tokens proposed for one round.

    tokens [B, K]; laws: the distribution each was drawn from, given every node drawn before it: [B, K, V], something that makes
    it on demand, or None for a deterministic draft (a point mass); tree None = chain; valid [B, K] or None = all (in a chain a
    prefix of each row). trust [B, K]: scored but not judged, kept whatever the rule says. check [B]: rows where it is False
    commit their valid nodes, in order, without a verdict of the target.
    """

    tokens: Tensor
    laws: Tensor | Laws | None = None
    tree: Tree | None = None
    valid: Tensor | None = None
    trust: Tensor | None = None
    check: Tensor | None = None

    @property
    def nodes(self) -> int:
        """K."""
        return self.tokens.shape[1]

    @property
    def q(self) -> Tensor | None:
        """`laws` as a tensor [B, K, V], made when first asked for; None for a deterministic draft."""
        if self.laws is not None and not isinstance(self.laws, Tensor):
            self.laws = self.laws.dense()
        return self.laws

    @q.setter
    def q(self, rows: Tensor | None) -> None:
        self.laws = rows

    def likelihood(self) -> Tensor | None:
        """q of the drafted tokens [B, K]."""
        if self.laws is None:
            return None
        return pick(self.laws, self.tokens) if isinstance(self.laws, Tensor) else self.laws.pick(self.tokens)

    def law(self, at: Tensor) -> Tensor | None:
        """q of node at [B] of each row: [B, V]."""
        if self.laws is None:
            return None
        return row(self.laws, at) if isinstance(self.laws, Tensor) else self.laws.row(at)


def pick(rows: Tensor, x: Tensor) -> Tensor:
    """rows [..., V] at codes x [...] -> [...]."""
    return rows.gather(-1, x[..., None])[..., 0]


def row(rows: Tensor, at: Tensor) -> Tensor:
    """rows [B, M, V] at at [B] -> [B, V]."""
    return rows_at(rows, at[:, None])[:, 0]


@dataclass
class Scores:
    """The target's opinion of one round.

    log_p [B, K + 1, V]: normalised log-probabilities after guidance and warp; row 0 follows the last committed token, row
    k + 1 follows draft node k. index [B, K + 1]: the image-token index each row predicts (N where it would lie past the end).
    span: host integers with span[0] <= index < span[1], if they are known; contiguous: every row of index is that very range
    (before it is clipped at N).
    """

    log_p: Tensor
    index: Tensor
    span: tuple[int, int] | None = None
    contiguous: bool = False
    _p: Tensor | None = field(default=None, repr=False)

    @property
    def p(self) -> Tensor:
        """Probabilities [B, K + 1, V], made when first asked for."""
        if self._p is None:
            self._p = self.log_p.exp()
        return self._p

    def likelihood(self, x: Tensor) -> Tensor:
        """p of codes x [B, M] at the first M rows: [B, M]."""
        return pick(self.log_p[:, : x.shape[1]], x).exp()

    def law(self, at: Tensor) -> Tensor:
        """p at row at [B] of each image: [B, V]."""
        return row(self.log_p, at).exp() if self._p is None else row(self._p, at)

    def noise(self, noise: Noise) -> Tensor:
        """log E of the DRAW stream at every row: [B, K + 1, V]. Do not write into the result."""
        vocabulary, dtype = self.log_p.shape[-1], self.log_p.dtype
        if self.span is None:
            return noise.log_exponential(self.index, vocabulary, DRAW, dtype=dtype)
        return noise.draws(self.index, self.span, self.contiguous, vocabulary, dtype)

    def uniform(self, noise: Noise, index: Tensor, stream: int, salt: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """One number in (0, 1) for each of some of this round's indices [B, M]: [B, M]."""
        if self.span is None:
            return noise.uniform(index, stream, salt, dtype)
        return noise.uniform_table(-(-self.span[1] // 512) * 512, stream, salt, dtype).gather(1, index)


@dataclass
class Verdict:
    """What to commit.

    tokens [B, M]: the accepted path and then the recovered or bonus token; count [B] = accepted + 1; path [B, D]: the accepted
    nodes of a tree in order, -1 beyond (None: a chain); accepted, judged [B]: draft tokens kept, and tested (up to and including
    the first rejection; siblings count); stop [B]: the row of Scores the last token was drawn from; source [B]: of the last token
    (RECOVERED or BONUS); drawn [B, K + 1]: the target's own draw at every row (`Match` only); margin [B, M]: gap between the two
    best noisy scores of each committed token (`Match` only); cost [B]: what a relaxed rule's tests add to the total-variation
    bound; expected [B]: tokens the round commits on average over the coins, or an estimate with that mean (Cool-SD, Eq. 7; the
    end of the image is not looked at; None: no coins are flipped); scored [B]: False where the row was committed without a
    forward (None: every row was scored); trusted [B]: how many of the accepted nodes were kept without a test (None: none).
    """

    tokens: Tensor
    count: Tensor
    path: Tensor | None
    accepted: Tensor
    judged: Tensor
    stop: Tensor
    source: Tensor
    drawn: Tensor | None = None
    margin: Tensor | None = None
    cost: Tensor | None = None
    expected: Tensor | None = None
    scored: Tensor | None = None
    trusted: Tensor | None = None


class Rule(Protocol):
    """How much of a draft token survives. Pure: no randomness inside."""

    exact: bool

    def accept(self, p: Tensor, q: Tensor | None, x: Tensor, depth: Tensor | int) -> Tensor:
        """Probability of keeping x: p, q [..., V] (q None = point mass at x), x [...] -> [...]."""
        ...

    def residual(self, p: Tensor, q: Tensor | None, x: Tensor, depth: Tensor | int) -> Tensor:
        """Distribution of the token that replaces a rejected x: [..., V], summing to 1."""
        ...


class Drafter(Protocol):
    """Proposes tokens and learns what became of them. One object per run."""

    def propose(self, sequence: Sequence, noise: Noise) -> Draft:
        """Draft tokens for the columns after `sequence.length`."""
        ...

    def observe(self, sequence: Sequence, draft: Draft, scores: Scores | None, verdict: Verdict, noise: Noise) -> None:
        """Called before the verdict is committed."""
        ...


class Verifier(Protocol):
    """Flips the coins: once, for every rule."""

    exact: bool

    def __call__(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        """Decide which draft tokens stay and what follows them."""
        ...


class TargetModel(Protocol):
    """What the loop needs of a model."""

    def score(self, sequence: Sequence, draft: Draft) -> Scores:
        """One forward over the pending columns and the draft."""
        ...


def no_draft(rows: int, device: torch.device) -> Draft:
    """The empty draft: K = 0."""
    return Draft(torch.zeros(rows, 0, dtype=torch.long, device=device))
