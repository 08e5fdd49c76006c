"""Speculative Jacobi decoding: the target's own last iteration is the draft.

A window of W unaccepted tokens is scored in one forward; whatever follows the first rejection is refined by the new
distributions and tried again. Exactness rests on one law: given everything left of a slot, its token was drawn from the stored q.

Source: Teng et al. 2025 (SJD, tail `resample`) and its extension SJD++ (`reuse`); maximal coupling for `coupled`; the Gumbel-max
trick for `gumbel` and for seeded decoding (Wiggers and Hoogeboom 2020, "predictive sampling").
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..noise import DRAFT, DRAW, TAIL, Noise
from ..planner import Planner
from ..rules import normalised, point_mass
from ..sampling import draw, inverse_cdf, rows_at
from ..sequence import Sequence
from ..types import Draft, Scores, Verdict, pick, row

TAILS = ("gumbel", "coupled", "resample", "reuse")
INITS = ("above", "left", "sample_above", "sample_left", "random")


class JacobiLaws:
    """What the tokens of a window were drawn from; formed only where it is asked for.

    tokens [B, W]. new [B, W]: slots filled this round; their token is a point mass, uniform over the V codes where spread [B, W],
    or of law born [B, W, V] if that is given. old: log-probabilities of the last forward [B, M, V], and the row [B, W] of them
    that each other slot was drawn from (None: every slot is new).
    """

    def __init__(
        self,
        tokens: Tensor,
        new: Tensor,
        spread: Tensor | None,
        born: Tensor | None,
        old: tuple[Tensor, Tensor] | None,
        vocabulary: int,
        dtype: torch.dtype,
    ):
        self.tokens, self.new, self.spread, self.born = tokens, new, spread, born
        self.old, self.vocabulary, self.dtype = old, vocabulary, dtype
        self._dense: Tensor | None = None

    def pick(self, x: Tensor) -> Tensor:
        """See `Laws`."""
        if self.born is not None:
            first = pick(self.born, x)
        else:
            first = (x == self.tokens).to(self.dtype)
        if self.spread is not None:
            first = torch.where(self.spread, 1.0 / self.vocabulary, first)
        if self.old is None:
            return first
        log_p, rows = self.old
        return torch.where(self.new, first, log_p.flatten(1).gather(1, rows * self.vocabulary + x).exp())

    def row(self, at: Tensor) -> Tensor:
        """See `Laws`."""
        at = at[:, None]
        tokens, new, spread = self.tokens.gather(1, at), self.new.gather(1, at), None
        if self.spread is not None:
            spread = self.spread.gather(1, at)
        born = None if self.born is None else row(self.born, at[:, 0])[:, None]
        old = None if self.old is None else (self.old[0], self.old[1].gather(1, at))
        return JacobiLaws(tokens, new, spread, born, old, self.vocabulary, self.dtype).dense()[:, 0]

    def dense(self) -> Tensor:
        """See `Laws`."""
        if self._dense is None:
            shape = (*self.tokens.shape, self.vocabulary)
            law = self.born
            if law is None:
                law = torch.zeros(shape, dtype=self.dtype, device=self.tokens.device).scatter_(2, self.tokens[..., None], 1.0)
            if self.spread is not None:
                law = torch.where(self.spread[..., None], 1.0 / self.vocabulary, law)
            if self.old is not None:
                log_p, rows = self.old
                law = torch.where(self.new[..., None], law, rows_at(log_p, rows).exp())
            self._dense = law
        return self._dense


class JacobiDrafter:
    """One run of Jacobi iterations over B images.

    window: W >= 1 slots. tail: how unaccepted slots are redrawn. init: where new slots come from. tau: `reuse` keeps a token if
    p_new / p_old > tau. seeded: tokens are the target's own draws from each position's noise, no q is kept. refine False replaces
    the unaccepted slots by newly initialised ones (the paper's ablation). planner: chooses each round's window, at most `window`.
    """

    draft_forwards = 0

    def __init__(
        self,
        window: int,
        vocabulary: int,
        tail: str = "gumbel",
        init: str = "above",
        tau: float = 0.5,
        seeded: bool = False,
        refine: bool = True,
        dtype: torch.dtype = torch.float32,
        planner: Planner | None = None,
    ):
        if window < 1:
            raise ValueError(f"the Jacobi window must hold at least 1 token, got {window}")
        if tail not in TAILS:
            raise ValueError(f"unknown tail {tail!r}; choose one of {', '.join(TAILS)}")
        if init not in INITS:
            raise ValueError(f"unknown init {init!r}; choose one of {', '.join(INITS)}")
        self.window, self.vocabulary, self.tail, self.init, self.tau = window, vocabulary, tail, init, tau
        self.seeded, self.refine, self.dtype, self.planner = seeded, refine, dtype, planner
        if planner is not None:
            if not seeded:
                raise ValueError("a planner follows the clock, which only seeded decoding may")
            planner.begin()
        self.iteration = 0
        self._canvas: Tensor | None = None
        self._last: Tensor | None = None
        self._old: Tensor | None = None
        self._first: Tensor | None = None
        self._laws: Tensor | None = None

    def propose(self, sequence: Sequence, noise: Noise) -> Draft:
        """The window: K = W tokens after the last committed one, new slots initialised."""
        window = self.window if self.planner is None else self.planner.choose()
        index = sequence.ahead(window + 1)[:, :window]
        if self._canvas is None or self._last is None:
            room = self.window + 1 + sequence.limit
            self._canvas = torch.zeros(len(index), room, dtype=torch.long, device=index.device)
            self._canvas[:, : sequence.limit - 1] = sequence.tokens[:, 1:]
            self._last = index[:, :1] - 1
        tokens, laws = self._initialise(sequence, noise, index, self._canvas, self._last)
        valid = index < sequence.limit - 1 if sequence.high + window > sequence.limit else None
        self.iteration += 1
        return Draft(tokens, laws, valid=valid)

    def observe(self, sequence: Sequence, draft: Draft, scores: Scores | None, verdict: Verdict, noise: Noise) -> None:
        """Write what was committed, and the refined tokens after it, to the canvas; keep the laws of the refined ones."""
        if scores is None or self._canvas is None:
            raise ValueError("Jacobi decoding scores every round")
        window = draft.nodes
        if self.planner is not None:
            self.planner.note(verdict.accepted[sequence.active].tolist())
        place = sequence.ahead(window + 1)
        if self.init.startswith("sample"):
            self._remember(sequence, scores)
        if self.seeded and verdict.drawn is not None and self.refine:
            # What was accepted is the target's own draw, so the draws are both the committed tokens and the next window.
            self._canvas.scatter_(1, place, verdict.drawn)
            self._last = place[:, -1:]
            return
        committed = sequence.steps(window + 1) < verdict.count[:, None]
        if not self.refine:
            self._canvas.scatter_(1, place, verdict.tokens)
            self._last = place[:, :1] + verdict.count[:, None] - 1
            return
        tokens = torch.where(committed, verdict.tokens, self._redraw(draft, scores, noise))
        self._canvas.scatter_(1, place, tokens)
        self._last = place[:, -1:]
        self._old, self._first = scores.log_p, place[:, :1]

    def _redraw(self, draft: Draft, scores: Scores, noise: Noise) -> Tensor:
        """A token for every row of the scores, of law p, as far as it was not committed: [B, W + 1]. The last had none before."""
        if self.tail == "gumbel":
            return draw(scores.log_p, scores.noise(noise))
        p, index, salt = scores.p, scores.index, 2 * self.iteration
        if self.tail == "resample":
            return inverse_cdf(p, noise.uniform(index, TAIL, salt, p.dtype))
        uniform, coin = noise.uniform_pair(index, TAIL, salt, p.dtype)
        window, p_x, q_x = draft.nodes, scores.likelihood(draft.tokens), draft.likelihood()
        q = draft.q if self.tail == "coupled" else q_x
        if q is None or q_x is None:
            raise ValueError(f"tail {self.tail!r} needs the law of the last window")
        if self.tail == "reuse":
            keep, law = p_x > self.tau * q_x, p
        else:
            keep = coin[:, :window] * q_x < p_x
            law = torch.cat((normalised((p[:, :window] - q).clamp_(min=0.0), p[:, :window]), p[:, window:]), 1)
        fresh = inverse_cdf(law, uniform)
        return torch.cat((torch.where(keep, draft.tokens, fresh[:, :window]), fresh[:, window:]), 1)

    def _initialise(
        self, sequence: Sequence, noise: Noise, index: Tensor, canvas: Tensor, last: Tensor
    ) -> tuple[Tensor, JacobiLaws | None]:
        """Tokens [B, W] of the window at `index` and, unless seeded, their laws q.

        last [B, 1]: the last image-token index that holds a token, committed or drafted (-1 before the first); slots up to it
        read the canvas, the others are new.
        """
        source = self._source(index, last, sequence)
        missing = None
        if self.init == "random" or sequence.low == 1:
            missing = source < 0
        tokens, law = canvas.gather(1, source.clamp(min=0) if missing is not None else source), None
        new = index > last
        forced = self._forced(sequence, index)
        free = new if forced is None else new & (forced < 0)
        if self._laws is not None:
            law, drawable = self._law(source.clamp(min=0)), free
            copied = self._forced(sequence, source.clamp(min=0))
            if copied is not None:
                drawable = free & (copied < 0)  # a forced column has no law: its token is repeated
            law = torch.where(drawable[..., None], law, point_mass(tokens, law))
            tokens = torch.where(drawable, self._sample(law, index, noise), tokens)
        if missing is not None:
            uniform = noise.uniform(index, DRAFT, self.iteration, torch.float64)
            random = (uniform * self.vocabulary).long().clamp_(max=self.vocabulary - 1)
            tokens = torch.where(missing, random, tokens)
        if forced is not None:
            tokens = torch.where(forced >= 0, forced, tokens)
        if self.seeded:
            return tokens, None
        spread = missing if missing is None or forced is None else missing & (forced < 0)
        born = None
        if law is not None:
            born = torch.where(free[..., None], law, point_mass(tokens, law))
        old, behind = None, new
        if self._old is not None and self._first is not None and self.refine:
            old = (self._old, (index - self._first).clamp_(0, self.window))
            if forced is not None:
                behind = new | (forced >= 0)
        return tokens, JacobiLaws(tokens, behind, spread, born, old, self.vocabulary, self.dtype)

    def _forced(self, sequence: Sequence, index: Tensor) -> Tensor | None:
        """The forced token at image-token indices [B, W], -1 where the model chooses; None: this family forces nothing."""
        if sequence.forced is None:
            return None
        return torch.nn.functional.pad(sequence.forced, (0, self.window + 1), value=-1)[index]

    def _source(self, index: Tensor, last: Tensor, sequence: Sequence) -> Tensor:
        """The image-token index whose token a slot shows: its own if it has one, else the one it copies; -1 = none: [B, W]."""
        width = sequence.grid[1]
        if self.init == "random":
            return torch.where(index > last, -1, index)
        if self.init.endswith("left"):
            return torch.minimum(index, last)
        if index.shape[1] <= width < sequence.low:
            return torch.where(index > last, index - width, index)
        rows_up = torch.div(index - last + (width - 1), width, rounding_mode="floor").clamp_(min=0)
        above = index - width * rows_up
        return torch.where(above >= 0, above, torch.minimum(index, last))

    def _sample(self, law: Tensor, index: Tensor, noise: Noise) -> Tensor:
        """Draw a neighbour's law [B, W, V] with the slot's own noise."""
        if self.seeded or self.tail == "gumbel":
            return draw(law.log(), noise.log_exponential(index, self.vocabulary, DRAW, dtype=law.dtype))
        return inverse_cdf(law, noise.uniform(index, TAIL, 2 * self.iteration + 1, law.dtype))

    def _remember(self, sequence: Sequence, scores: Scores) -> None:
        """Keep the newest law of every position the window has seen, in a ring as long as a row and a window."""
        ring = sequence.grid[1] + self.window + 1
        if self._laws is None:
            shape = (len(scores.index), ring + 1, self.vocabulary)
            self._laws = torch.zeros(shape, dtype=scores.p.dtype, device=scores.p.device)
        inside = scores.index < sequence.limit - 1
        place = torch.where(inside, scores.index % ring, ring)
        self._laws.scatter_(1, place[..., None].expand_as(scores.p), scores.p)

    def _law(self, index: Tensor) -> Tensor:
        if self._laws is None:
            raise ValueError("no law is known before the first forward")
        ring = self._laws.shape[1] - 1
        return rows_at(self._laws, index % ring)
