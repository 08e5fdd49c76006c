"""How hard the target is and how well the draft knows it: mean entropy of p and mean TV(p, q), from an untimed run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..decoding.noise import Noise
from ..decoding.types import Draft, Scores, Verdict, Verifier


@dataclass
class Laws:
    """Sums over the positions seen so far."""

    entropy_sum: float = 0.0
    committed: int = 0
    tv_sum: float = 0.0
    tested: int = 0

    @property
    def entropy(self) -> float | None:
        """Mean entropy of p, in nats per committed token."""
        return self.entropy_sum / self.committed if self.committed else None

    @property
    def tv(self) -> float | None:
        """Mean total-variation distance between p and q where a draft was tested, in 0..1."""
        return self.tv_sum / self.tested if self.tested else None


class RecordingVerifier:
    """Hands everything to another verifier and notes the laws that pass by.

    inner: the verifier that decides. laws: what is added to. count: N, tokens of an image. Entropy is taken at the positions that
    were committed, TV where the first draft of a position was tested (later siblings of a tree have a q of what is left).
    """

    def __init__(self, inner: Verifier, laws: Laws, count: int):
        self.inner, self.laws, self.count, self.exact = inner, laws, count, inner.exact

    def __call__(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        """The inner verifier's verdict."""
        verdict = self.inner(draft, scores, noise)
        batch = torch.arange(len(draft.tokens), device=draft.tokens.device)[:, None]
        step = torch.arange(_depth(draft) + 1, device=batch.device)
        if verdict.path is None:
            rows = step.expand(len(batch), -1)
        else:
            rows = torch.nn.functional.pad(verdict.path + 1, (1, 0)).clamp(min=0)
        inside = (step <= verdict.accepted[:, None]) & (scores.index[batch, rows] < self.count)
        log_p = scores.log_p[batch, rows].double()
        entropy = -(log_p.exp() * log_p.clamp(min=-1e4)).sum(-1)
        self.laws.entropy_sum += float((entropy * inside).sum())
        self.laws.committed += int(inside.sum())
        if draft.nodes:
            self._compare(draft, log_p.exp(), rows, inside, batch)
        return verdict

    def _compare(self, draft: Draft, p: Tensor, rows: Tensor, inside: Tensor, batch: Tensor) -> None:
        """Add TV(p, q) of the first draft token after every committed prefix: p [B, D, V] at score rows [B, D]."""
        if draft.tree is None:
            node = torch.where(rows < draft.nodes, rows, -1)
        else:
            node = draft.tree.children.expand(len(rows), -1, -1)[batch, rows, 0]
        safe = node.clamp(min=0)
        tested = inside & (node >= 0)
        if draft.valid is not None:
            tested &= draft.valid[batch, safe]
        if draft.trust is not None:
            tested &= ~draft.trust[batch, safe]
        if draft.q is None:
            distance = 1.0 - p.gather(2, draft.tokens[batch, safe][..., None])[..., 0]
        else:
            distance = 0.5 * (p - draft.q[batch, safe]).abs().sum(-1)
        self.laws.tv_sum += float((distance * tested).sum())
        self.laws.tested += int(tested.sum())


def _depth(draft: Draft) -> int:
    return draft.nodes if draft.tree is None else draft.tree.levels


def recording(laws: Laws, build: Any = None) -> Any:
    """A replacement of a pipeline's `method(run)` that records into `laws`; build: the case's own replacement.

    Seeded drafters keep no q. Here they are asked for it, which leaves their tokens as they are: a seeded token is the draw from
    that q with the position's noise. Dynamic trees, which rank their nodes by the noise, and drafts of automatic length are
    measured as they are, as point masses.
    """

    def method(pipeline: Any, run: Any) -> Any:
        made = type(pipeline).method(pipeline, run) if build is None else build(pipeline, run)
        fixed = all(getattr(made.drafter, name, None) is None for name in ("dynamic", "planner"))
        if fixed and getattr(made.drafter, "seeded", False):
            made.drafter.seeded = False
        made.verifier = RecordingVerifier(made.verifier, laws, run.grid[0] * run.grid[1])
        return made

    return method
