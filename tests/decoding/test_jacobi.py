"""What stands in the window of a Jacobi drafter: carried-over slots, their laws, and how new slots begin."""

from __future__ import annotations

import pytest
import torch
from foredraft.decoding.drafters.jacobi import INITS, TAILS, JacobiDrafter
from foredraft.decoding.noise import DRAW, Noise
from foredraft.decoding.rules import Exact
from foredraft.decoding.sampling import draw
from foredraft.decoding.sequence import Sequence
from foredraft.decoding.types import Draft, Scores, Verdict
from foredraft.decoding.verify import Match, Prefix

from .tabular import TabularTarget, random_table, run

LENGTH, ROWS, WIDTH = 6, 40, 3  # a grid of 2 x 3
TARGET = TabularTarget(random_table(50, LENGTH), LENGTH)


class Watched(JacobiDrafter):
    """Compares every proposal with what the last round's scores and tokens say it must be."""

    def __init__(self, window: int, tail: str, init: str, seeded: bool):
        super().__init__(window, 3, tail=tail, init=init, seeded=seeded, dtype=torch.float64)
        self.laws: list[dict[int, torch.Tensor]] = [{} for _ in range(ROWS)]
        self.carried: list[dict[int, int]] = [{} for _ in range(ROWS)]  # tokens that must stand where they stood
        self.latest = [-1] * ROWS
        self.new_slots = self.old_slots = 0

    def propose(self, sequence: Sequence, noise: Noise) -> Draft:
        """The window, checked slot by slot."""
        draft = super().propose(sequence, noise)
        for row in range(ROWS):
            first = int(sequence.length[row]) - 1
            for slot in range(self.window):
                index = first + slot
                if index < LENGTH:
                    self.check(row, index, slot, draft, sequence)
        return draft

    def check(self, row: int, index: int, slot: int, draft: Draft, sequence: Sequence) -> None:
        """One slot: carried over, or new and then a copy, a sample or anything."""
        token, last = int(draft.tokens[row, slot]), self.latest[row]
        q = None if draft.q is None else draft.q[row, slot]
        assert q is None or (float(q.sum()) == pytest.approx(1.0) and float(q[token]) > 0)
        if index <= last:
            self.old_slots += 1
            assert token == self.carried[row].get(index, token)
            assert q is None or torch.equal(q, self.laws[row][index])
            return
        self.new_slots += 1
        source = -1
        if self.init.endswith("left"):
            source = last
        elif self.init.endswith("above"):
            above = [place for place in range(index - WIDTH, -1, -WIDTH) if place <= last]
            source = above[0] if above else last
        if source < 0:
            assert q is None or torch.allclose(q, torch.full((3,), 1 / 3, dtype=q.dtype))
        elif self.init.startswith("sample"):
            assert q is None or torch.equal(q, self.laws[row][source])
            assert float(self.laws[row][source][token]) > 0
        else:
            committed = source < int(sequence.length[row]) - 1
            shown = int(sequence.tokens[row, source + 1]) if committed else int(draft.tokens[row, slot - index + source])
            assert token == shown
            assert q is None or q.tolist() == [float(code == token) for code in range(3)]

    def observe(self, sequence: Sequence, draft: Draft, scores: Scores | None, verdict: Verdict, noise: Noise) -> None:
        """Note the newest laws and what must become of each slot."""
        super().observe(sequence, draft, scores, verdict, noise)
        assert scores is not None
        noisy = draw(scores.log_p, noise.log_exponential(scores.index, 3, DRAW, dtype=torch.float64))
        for row in range(ROWS):
            first = int(sequence.length[row]) - 1
            self.carried[row] = {}
            for slot in range(self.window + 1):
                index = first + slot
                if index >= LENGTH:
                    continue
                law = scores.p[row, slot]
                self.laws[row][index] = law
                if self.seeded or self.tail == "gumbel":
                    self.carried[row][index] = int(noisy[row, slot])
                elif self.tail in ("reuse", "coupled") and slot < self.window and draft.q is not None:
                    old, ratio = int(draft.tokens[row, slot]), self.tau if self.tail == "reuse" else 1.0
                    if float(law[old]) > ratio * float(draft.q[row, slot, old]):
                        self.carried[row][index] = old
            self.latest[row] = first + self.window


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("tail", [*TAILS, "seeded"])
@pytest.mark.parametrize("window", [1, 2, 4])
def test_every_slot_of_every_window(window, tail, init):
    """40 ragged rows of 2 x 3 tokens: tokens and laws of old and new slots."""
    seeded = tail == "seeded"
    drafter = Watched(window, "gumbel" if seeded else tail, init, seeded)
    run(TARGET, drafter, Match() if seeded else Prefix(Exact()), ROWS, LENGTH)
    assert drafter.new_slots >= ROWS * window
    assert drafter.old_slots >= ROWS // 2


def test_without_refinement_every_slot_is_new():
    """The paper's ablation: whatever was not accepted starts again."""

    class Fresh(JacobiDrafter):
        def propose(self, sequence: Sequence, noise: Noise) -> Draft:
            draft = super().propose(sequence, noise)
            last = sequence.tokens.gather(1, (sequence.length - 1)[:, None])
            inside = sequence.length[:, None] - 1 + torch.arange(self.window) < LENGTH
            if sequence.low > 1:
                assert ((draft.tokens == last) | ~inside).all()
                assert (
                    draft.q is not None
                    and ((draft.q.gather(2, last[:, None].expand(-1, self.window, 1))[..., 0] == 1) | ~inside).all()
                )
            return draft

    run(TARGET, Fresh(4, 3, tail="resample", init="left", refine=False, dtype=torch.float64), Prefix(Exact()), ROWS, LENGTH)
