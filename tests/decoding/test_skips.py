"""Commits without a verdict: skipped rounds, rows skipped one by one, trusted runs between repaired positions."""

from __future__ import annotations

import math

import pytest
import torch
from foredraft.decoding.drafters.model import ModelDrafter
from foredraft.decoding.noise import DRAFT as DRAFT_STREAM
from foredraft.decoding.noise import Noise
from foredraft.decoding.rules import Exact
from foredraft.decoding.sampling import Sampling
from foredraft.decoding.sequence import Sequence
from foredraft.decoding.trace import Trace
from foredraft.decoding.tree import Tree, balanced_paths, static_tree
from foredraft.decoding.types import SOURCES, UNVERIFIED, Draft, Drafter, Scores, Verdict, Verifier
from foredraft.decoding.verify import Match, Prefix, Walk
from torch import Tensor

from .tabular import NoDraft
from .test_trace import assert_round_trip
from .tiny import DRAFT, SEEDS, UNEQUAL, VOCABULARY, Result, begin, decode_checked, replay

GRID = (3, 4)
SAMPLINGS = {"plain": Sampling(), "guided": Sampling(guidance_scale=2.0)}
TREE = static_tree(balanced_paths((2, 2)))


class Skipping:
    """A tree in most rounds; in every `interval`-th round each row commits its own number of first branches unverified.

    gammas [B]: how many tokens row b commits in a skipped round, 0 included. lone: only those rows skip, the others are verified
    in the same round (the nodes of a skipped row come first and form a chain).
    """

    draft_forwards = 0

    def __init__(self, inner: ModelDrafter, gammas: list[int], interval: int = 3, lone: bool = False, tree: bool = True):
        self.inner, self.gammas, self.interval, self.lone, self.tree = inner, torch.tensor(gammas), interval, lone, tree
        self.round = 0

    def propose(self, sequence: Sequence, noise: Noise) -> Draft:
        """The inner tree, or its first path."""
        self.round += 1
        draft = self.inner.propose(sequence, noise)
        if self.round % self.interval:
            return draft
        room = sequence.limit - sequence.length
        count = torch.minimum(self.gammas, room)[:, None]
        path = [0, 2]  # the first child and its first child in a balanced (2, 2) tree
        if not self.lone:
            return Draft(draft.tokens[:, path], valid=torch.arange(2) < count, check=torch.zeros(len(room), dtype=torch.bool))
        skips = self.gammas > 0
        valid = torch.ones_like(draft.tokens, dtype=torch.bool) if draft.valid is None else draft.valid
        if not self.tree:
            chain = torch.where(skips[:, None], torch.arange(2) < count, valid[:, path])
            return Draft(draft.tokens[:, path], valid=chain, check=~skips)
        nodes = draft.nodes
        chained = torch.cat((draft.tokens[:, path], draft.tokens[:, 2:] * 0), 1)
        line = torch.arange(-1, nodes - 1).clamp(max=0)
        parents = torch.where(skips[:, None], line, TREE.parents)
        return Draft(
            torch.where(skips[:, None], chained, draft.tokens),
            None,
            Tree(parents),
            torch.where(skips[:, None], torch.arange(nodes) < count, valid),
            check=~skips,
        )

    def observe(self, sequence: Sequence, draft: Draft, scores: Scores | None, verdict: Verdict, noise: Noise) -> None:
        """Nothing to learn."""


def skipping(sampling: Sampling, gammas: list[int], **options: object) -> Skipping:
    """Over the tiny draft model, seeded."""
    own = begin(DRAFT, UNEQUAL, GRID, sampling)
    return Skipping(ModelDrafter(DRAFT, own, tree=TREE, seeded=True), gammas, **options)  # type: ignore[arg-type]


def assert_counts(trace: Trace, tokens: int = 12) -> None:
    """Sources add up to the tokens, verdicts to the counts."""
    flat = [value for row in trace.source for value in row]
    count = {name: flat.count(number) for number, name in enumerate(SOURCES)}
    assert sum(count.values()) == len(flat) == trace.tokens == tokens
    assert trace.judged >= trace.accepted
    assert trace.complete
    assert not math.isnan(trace.min_margin)
    assert_round_trip(trace)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("gammas", [[2, 2, 2, 2], [2, 0, 1, 2], [0, 2, 0, 0]])
def test_skip_then_tree(sampling, gammas):
    """Ragged pending (1 + gamma in one row, 1 in another), then a tree over it; cache, features and scores afterwards."""
    result = decode_checked(skipping(SAMPLINGS[sampling], gammas), Match(), UNEQUAL, GRID, SAMPLINGS[sampling])
    assert max(result.pendings) > 1
    assert 0 < int((~result.verified).sum())
    replay(UNEQUAL, result.tokens, GRID, SAMPLINGS[sampling], SEEDS, result.verified)
    for trace, gamma in zip(result.traces, gammas, strict=True):
        assert_counts(trace)
        assert trace.target_forwards <= trace.rounds
        assert (trace.target_forwards < trace.rounds) == (gamma > 0)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_mixed_check(sampling, tree):
    """Some rows of a round are verified and others are not."""
    gammas = [2, 0, 1, 0]
    result = decode_checked(
        skipping(SAMPLINGS[sampling], gammas, lone=True, tree=tree), Match(), UNEQUAL, GRID, SAMPLINGS[sampling]
    )
    replay(UNEQUAL, result.tokens, GRID, SAMPLINGS[sampling], SEEDS, result.verified)
    for trace, gamma, row in zip(result.traces, gammas, result.verified.tolist(), strict=True):
        assert_counts(trace)
        assert all(row) == (gamma == 0)
        assert (trace.target_forwards < trace.rounds) == (gamma > 0)


def test_rows_that_never_skip_are_not_disturbed():
    """In the mixed batch a verified row equals plain decoding, and its counts equal those of the row alone."""
    plain = decode_checked(NoDraft(), Match(), UNEQUAL, GRID, compare=False).tokens
    result = decode_checked(skipping(Sampling(), [2, 0, 1, 0], lone=True), Match(), UNEQUAL, GRID)
    assert torch.equal(result.tokens[[1, 3]], plain[[1, 3]])
    assert result.traces[1].min_margin > 0


class Trusting:
    """MuLo-SD's repair, reduced: a given block whose kept positions are trusted and whose rejected ones the target redraws.

    Every round commits the kept run before the next rejected position, and that position as the bonus.
    """

    draft_forwards = 0

    def __init__(self, block: Tensor, kept: Tensor):
        self.block, self.kept = block, kept

    def propose(self, sequence: Sequence, noise: Noise) -> Draft:
        """Runs of different lengths per row."""
        first, count = sequence.length - 1, self.block.shape[1]
        index = first[:, None] + torch.arange(count)
        inside = index < count
        kept = self.kept.gather(1, index.clamp(max=count - 1)) & inside
        run = kept.cumprod(1).bool()
        width = int(run.sum(1).max())
        tokens = self.block.gather(1, index.clamp(max=count - 1))[:, :width]
        return Draft(tokens, valid=run[:, :width], trust=run[:, :width])

    def observe(self, sequence: Sequence, draft: Draft, scores: Scores | None, verdict: Verdict, noise: Noise) -> None:
        """Nothing to learn."""


REJECTED = [[0, 5, 6, 11], [3], [], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]


def repaired(verifier: Verifier, sampling: Sampling) -> tuple[Result, Tensor, Tensor]:
    """Four rows in different phases of their repair."""
    kept = torch.ones(4, 12, dtype=torch.bool)
    for row, positions in enumerate(REJECTED):
        kept[row, positions] = False
    block = torch.randint(VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(2))
    return decode_checked(Trusting(block, kept), verifier, UNEQUAL, GRID, sampling), block, kept


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("verifier", [Match(), Prefix(Exact()), Walk(Exact())], ids=["match", "prefix", "walk"])
def test_repair(verifier, sampling):
    """Kept tokens stay, the others are the target's own draws in their new context; one forward per repaired position."""
    result, block, kept = repaired(verifier, SAMPLINGS[sampling])
    assert torch.equal(result.tokens[kept], block[kept])
    if isinstance(verifier, Match):
        replay(UNEQUAL, result.tokens, GRID, SAMPLINGS[sampling], SEEDS, ~kept)
    for trace, positions in zip(result.traces, REJECTED, strict=True):
        ends_repaired = bool(positions) and positions[-1] == 11
        assert trace.rounds == trace.target_forwards == len(positions) + (not ends_repaired)
        assert_counts(trace)
        assert trace.judged == 0
        assert trace.acceptance_rate == 0.0


def test_trusted_tokens_are_kept_even_where_the_rule_forbids():
    """`trust` overrides p = 0; an invalid node is never kept, trusted or not."""
    log_p = torch.full((2, 3, 4), -torch.inf, dtype=torch.float64)
    log_p[..., 1] = 0.0
    scores = Scores(log_p, torch.tensor([[0, 1, 2], [0, 1, 2]]))
    draft = Draft(
        torch.tensor([[3, 3], [3, 3]]),
        valid=torch.tensor([[True, True], [True, False]]),
        trust=torch.ones(2, 2, dtype=torch.bool),
    )
    for verifier in (Match(), Prefix(Exact())):
        verdict = verifier(draft, scores, Noise(torch.tensor([1, 2])))
        assert verdict.accepted.tolist() == [2, 1]
        assert verdict.tokens[0].tolist() == [3, 3, 1]
        assert verdict.tokens[1, :2].tolist() == [3, 1]
        assert verdict.judged.tolist() == [0, 0]


def test_trust_in_a_tree_continues_below_the_trusted_node():
    """A trusted node in a tree is entered without a test, its children are judged as ever."""
    tree = static_tree([(0,), (1,), (0, 0), (1, 0)])
    log_p = torch.full((1, 5, 4), -torch.inf, dtype=torch.float64)
    log_p[0, :, 2] = 0.0
    scores = Scores(log_p, torch.tensor([[0, 1, 1, 2, 2]]))
    draft = Draft(torch.tensor([[3, 2, 2, 1]]), tree=tree, trust=torch.tensor([[True, False, False, False]]))
    verdict = Walk(Exact())(draft, scores, Noise(torch.tensor([1])))
    assert verdict.accepted.tolist() == [2] and verdict.path.tolist() == [[0, 2]]
    assert verdict.tokens[0].tolist() == [3, 2, 2]


@pytest.mark.parametrize("verifier", [Match(), Prefix(Exact())], ids=["match", "prefix"])
def test_unverified_tokens_are_exactly_the_valid_ones(verifier):
    """A skipped round commits `valid` nodes in order and caches nothing."""

    class Once:
        draft_forwards = 0

        def __init__(self) -> None:
            self.first = True

        def propose(self, sequence: Sequence, noise: Noise) -> Draft:
            if not self.first:
                return NoDraft().propose(sequence, noise)
            self.first = False
            uniform = noise.uniform(torch.arange(3)[None], DRAFT_STREAM)
            tokens = (uniform * VOCABULARY).long()
            valid = torch.arange(3) < torch.tensor([[3], [1], [0], [2]])
            return Draft(tokens, valid=valid, check=torch.zeros(4, dtype=torch.bool))

        def observe(self, sequence: Sequence, draft: Draft, scores: Scores | None, verdict: Verdict, noise: Noise) -> None:
            pass

    drafter: Drafter = Once()
    result = decode_checked(drafter, verifier, UNEQUAL, GRID)
    assert result.lengths[0] == [4, 2, 1, 3] and result.pendings[0] == 4
    expected = (Noise(SEEDS).uniform(torch.arange(3)[None], DRAFT_STREAM) * VOCABULARY).long()
    for row, count in enumerate([3, 1, 0, 2]):
        assert torch.equal(result.tokens[row, :count], expected[row, :count])
        assert [value for line in result.traces[row].source for value in line].count(UNVERIFIED) == count
        assert_counts(result.traces[row])
