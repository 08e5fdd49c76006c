"""Tokens the grammar dictates: committed without a forward of their own, drafted at once, one-hot, and never in the way."""

from __future__ import annotations

import itertools

import pytest
import torch
from foredraft.decoding.drafters.jacobi import INITS, JacobiDrafter
from foredraft.decoding.noise import Noise
from foredraft.decoding.rules import Exact
from foredraft.decoding.sequence import Sequence
from foredraft.decoding.tree import balanced_paths, static_tree
from foredraft.decoding.types import FORCED, Draft
from foredraft.decoding.verify import Match, Prefix, Walk

from .stand_ins import model_drafter
from .tabular import SAMPLES, NoDraft, TabularTarget, contexts, fit, random_table, run, seeds

LENGTH = 4
PATTERNS = {
    "middle": [-1, 2, -1, -1],
    "two": [-1, 1, 0, -1],
    "last": [-1, -1, -1, 2],
    "first": [1, -1, -1, -1],
    "rows": [-1, 2, -1, 2],
}
FREE = random_table(17, LENGTH)
TARGET = TabularTarget(FREE, LENGTH)
DRAFT = TabularTarget(0.5 * (FREE + random_table(18, LENGTH)), LENGTH)


def with_grammar(pattern: list[int]) -> torch.Tensor:
    """The table as the grammar leaves it: one-hot rows at forced indices."""
    table = FREE.clone()
    for index, token in enumerate(pattern):
        if token >= 0:
            first = contexts(3, index)
            table[first : first + 3**index] = torch.nn.functional.one_hot(torch.tensor(token), 3).double()
    return table


@pytest.mark.parametrize("pattern", PATTERNS)
def test_forced_tokens_cost_no_forward(pattern):
    forced = torch.tensor(PATTERNS[pattern])
    before = TARGET.calls
    result = run(TARGET, NoDraft(), Match(), 64, LENGTH, forced)
    assert TARGET.calls - before == int((forced < 0).sum())
    at = forced >= 0
    assert (result.tokens[:, at] == forced[at]).all()
    trace = result.recorder.traces(result.sequence, seeds(64), "", True)[3]
    assert trace.complete and trace.tokens == LENGTH
    flat = [value for row in trace.source for value in row]
    assert [value == FORCED for value in flat] == at.tolist()
    assert all(p == 1.0 for p, is_forced in zip(itertools.chain(*trace.probability), at.tolist(), strict=True) if is_forced)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("init", INITS)
def test_jacobi_slots_hold_forced_tokens_at_once(pattern, init):
    """In every proposal, not only once the slot has been scored; and seeded decoding stays plain decoding."""
    forced = torch.tensor(PATTERNS[pattern])
    plain = run(TARGET, NoDraft(), Match(), 300, LENGTH, forced).tokens

    class Watched(JacobiDrafter):
        def propose(self, sequence: Sequence, noise: Noise) -> Draft:
            draft = super().propose(sequence, noise)
            index = sequence.length[:, None] - 1 + torch.arange(self.window)
            wanted = torch.nn.functional.pad(forced, (0, LENGTH + self.window), value=-1)[index]
            assert ((wanted < 0) | (draft.tokens == wanted)).all()
            return draft

    for window in (1, 2, 3, LENGTH):
        seeded = run(TARGET, Watched(window, 3, init=init, seeded=True), Match(), 300, LENGTH, forced)
        assert torch.equal(seeded.tokens, plain)
        run(TARGET, Watched(window, 3, tail="resample", init=init, dtype=torch.float64), Prefix(Exact()), 300, LENGTH, forced)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_seeded_trees_and_chains(pattern):
    forced = torch.tensor(PATTERNS[pattern])
    plain = run(TARGET, NoDraft(), Match(), 2000, LENGTH, forced).tokens
    shape = static_tree(balanced_paths((2, 2)))
    for options in ({"length": 3}, {"tree": shape}, {"dynamic": (4, 2, 2)}):
        result = run(TARGET, model_drafter(DRAFT, 2000, seeded=True, **options), Match(), 2000, LENGTH, forced)
        assert torch.equal(result.tokens, plain)


CASES = [
    (tail, init, window, list(PATTERNS)[(i + j + k) % len(PATTERNS)])
    for (i, tail), (j, init), (k, window) in itertools.product(
        enumerate(("resample", "coupled", "gumbel")), enumerate(INITS), enumerate((1, 2, 4))
    )
]
ROWS = [case for case in CASES if case[3] == "rows"]
QUICK = {*CASES[1::4], *ROWS[1:2]}  # each tail, init, window and pattern at least once; the others are slow


@pytest.mark.parametrize(
    ("tail", "init", "window", "pattern"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_law_with_forced_tokens(tail, init, window, pattern):
    drafter = JacobiDrafter(window, 3, tail=tail, init=init, dtype=torch.float64)
    result = fit(
        run(TARGET, drafter, Prefix(Exact()), SAMPLES, LENGTH, torch.tensor(PATTERNS[pattern])).tokens,
        with_grammar(PATTERNS[pattern]),
    )
    assert result.passes, str(result)


@pytest.mark.parametrize("pattern", ["middle", "two"])
def test_law_of_trees_with_forced_tokens(pattern):
    forced = torch.tensor(PATTERNS[pattern])
    drafter = model_drafter(DRAFT, SAMPLES, tree=static_tree(balanced_paths((2, 2))))
    result = fit(run(TARGET, drafter, Walk(Exact()), SAMPLES, LENGTH, forced).tokens, with_grammar(PATTERNS[pattern]))
    assert result.passes, str(result)


def test_a_picture_that_is_forced_throughout_needs_no_forward():
    before = TARGET.calls
    result = run(TARGET, NoDraft(), Match(), 5, LENGTH, torch.tensor([2, 1, 0, 2]))
    assert TARGET.calls == before
    assert (result.tokens == torch.tensor([2, 1, 0, 2])).all()
