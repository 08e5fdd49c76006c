"""The corners of DESIGN.md's list: tiny images, trees over the end, exhausted siblings, ties, one row done long before others."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from foredraft.decoding.drafters.jacobi import INITS, TAILS, JacobiDrafter
from foredraft.decoding.drafters.model import ModelDrafter
from foredraft.decoding.noise import Noise
from foredraft.decoding.rules import Exact
from foredraft.decoding.sampling import Sampling
from foredraft.decoding.sequence import Sequence
from foredraft.decoding.tree import balanced_paths, chain_tree, static_tree
from foredraft.decoding.types import Draft, Drafter, Scores, Verdict, Verifier
from foredraft.decoding.verify import Match, Prefix, Walk
from torch import Tensor

from .stand_ins import WithReplacement, model_drafter
from .tabular import NoDraft, TabularTarget, random_table, run
from .test_seeded import assert_same_trace
from .tiny import DRAFT, SEEDS, TARGET, UNEQUAL, VOCABULARY, begin, decode_checked, replay, uncached_log_p

DEEP = static_tree(balanced_paths((2, 2, 1)))
Grid = tuple[int, int]
Make = Callable[[Tensor, Grid, Sampling], Drafter]


def own(ids: Tensor, grid: Grid, sampling: Sampling, **options: object) -> ModelDrafter:
    """A drafter over the tiny draft model."""
    return ModelDrafter(DRAFT, begin(DRAFT, ids, grid, sampling), **options)  # type: ignore[arg-type]


METHODS: dict[str, tuple[Make, Verifier]] = {
    "none": (lambda ids, grid, s: NoDraft(), Match()),
    "jacobi 1": (lambda ids, grid, s: JacobiDrafter(1, VOCABULARY, init="above", seeded=True), Match()),
    "jacobi 9": (lambda ids, grid, s: JacobiDrafter(9, VOCABULARY, init="sample_left", seeded=True), Match()),
    "chain": (lambda ids, grid, s: own(ids, grid, s, length=6, seeded=True), Match()),
    "tree": (lambda ids, grid, s: own(ids, grid, s, tree=DEEP, seeded=True), Match()),
    "dynamic": (lambda ids, grid, s: own(ids, grid, s, dynamic=(8, 4, 3), seeded=True), Match()),
}
SAMPLED: dict[str, tuple[Make, Verifier]] = {
    **{
        f"{tail} {init}": (
            lambda ids, grid, s, t=tail, i=init: JacobiDrafter(5, VOCABULARY, t, i, dtype=torch.float64),
            Prefix(Exact()),
        )
        for tail, init in itertools.chain(zip(TAILS, INITS[1:], strict=True), [("coupled", "sample_above")])
    },
    "chain, sampled": (lambda ids, grid, s: own(ids, grid, s, length=6), Prefix(Exact())),
    "tree, sampled": (lambda ids, grid, s: own(ids, grid, s, tree=DEEP), Walk(Exact())),
    "dynamic, walk": (lambda ids, grid, s: own(ids, grid, s, dynamic=(8, 4, 3)), Walk(Exact())),
    "single precision": (lambda ids, grid, s: JacobiDrafter(5, VOCABULARY, "coupled", "left"), Prefix(Exact())),
}
EVERY = {**METHODS, **SAMPLED}


@pytest.mark.parametrize("grid", [(1, 1), (1, 2), (2, 1), (1, 3), (3, 2)])
@pytest.mark.parametrize("name", EVERY)
def test_tiny_images(name, grid):
    """N = 1, N < K, the image's end inside the draft: scores, cache and, if seeded, the tokens."""
    make, verifier = EVERY[name]
    sampling = Sampling(guidance_scale=1.5)
    result = decode_checked(make(UNEQUAL, grid, sampling), verifier, UNEQUAL, grid, sampling)
    assert result.tokens.shape == (4, grid[0] * grid[1])
    assert all(trace.complete for trace in result.traces)
    if name in METHODS:
        replay(UNEQUAL, result.tokens, grid, sampling, SEEDS)
    if grid == (1, 1):
        assert all(trace.rounds == 1 for trace in result.traces)


class Oracle:
    """Row 0 is drafted perfectly, the other rows hopelessly: row 0 is complete long before them."""

    draft_forwards = 0

    def __init__(self, tokens: Tensor, tree: bool):
        self.tokens, self.tree = tokens, chain_tree(5) if tree else None

    def propose(self, sequence: Sequence, noise: Noise) -> Draft:
        """Five tokens, right or wrong."""
        index = sequence.length[:, None] - 1 + torch.arange(5)
        truth = self.tokens.gather(1, index.clamp(max=self.tokens.shape[1] - 1))
        truth[1:] = (truth[1:] + 1) % VOCABULARY
        return Draft(truth, tree=self.tree, valid=index < self.tokens.shape[1])

    def observe(self, sequence: Sequence, draft: Draft, scores: Scores | None, verdict: Verdict, noise: Noise) -> None:
        """Nothing to learn."""


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(guidance_scale=2.0)], ids=["plain", "guided"])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_one_row_finishes_long_before_the_others(tree, sampling):
    plain = decode_checked(NoDraft(), Match(), UNEQUAL, (3, 4), sampling, compare=False).tokens
    result = decode_checked(Oracle(plain, tree), Match(), UNEQUAL, (3, 4), sampling)
    assert torch.equal(result.tokens, plain)
    assert [trace.rounds for trace in result.traces] == [2, 12, 12, 12]
    assert result.traces[0].accepted == 10 and result.traces[1].accepted == 0
    assert result.traces[0].judged == 10 and result.traces[1].judged == 12


@pytest.mark.parametrize("name", EVERY)
def test_a_row_of_a_ragged_batch_is_the_row_alone(name):
    """Tokens, rounds, counts, maps: with prompts of unequal length and guidance."""
    make, verifier = EVERY[name]
    sampling, grid = Sampling(guidance_scale=1.5, top_k=5), (3, 3)
    together = decode_checked(make(UNEQUAL, grid, sampling), verifier, UNEQUAL, grid, sampling, compare=False)
    for row in range(4):
        ids, seed = UNEQUAL[row : row + 1], SEEDS[row : row + 1]
        alone = decode_checked(make(ids, grid, sampling), verifier, ids, grid, sampling, seed, compare=False)
        assert torch.equal(alone.tokens[0], together.tokens[row])
        assert_same_trace(alone.traces[0], together.traces[row])


@pytest.mark.parametrize("name", EVERY)
def test_forbidden_tokens_are_never_committed(name):
    """The target keeps 2 codes of 7, the draft all of them: every token of the image is one the target allows."""
    make, verifier = EVERY[name]
    narrow = Sampling(guidance_scale=1.5, top_k=2)
    ids, seeds = UNEQUAL.repeat(4, 1), torch.arange(16)
    result = decode_checked(make(ids, (3, 4), Sampling(guidance_scale=1.5)), verifier, ids, (3, 4), narrow, seeds, compare=False)
    log_p = uncached_log_p(TARGET, ids, result.tokens, (3, 4), narrow)
    assert (log_p.gather(2, result.tokens[..., None]) > -torch.inf).all()
    assert (log_p == -torch.inf).sum() == 16 * 12 * 5


@pytest.mark.parametrize("name", EVERY)
def test_greedy(name):
    """Temperature 0: p and q are one-hot, more siblings than q has support; every method gives the one greedy image."""
    make, verifier = EVERY[name]
    greedy = Sampling(guidance_scale=1.5, temperature=0.0)
    result = decode_checked(make(UNEQUAL, (2, 4), greedy), verifier, UNEQUAL, (2, 4), greedy)
    plain = decode_checked(NoDraft(), Prefix(Exact()), UNEQUAL, (2, 4), greedy, compare=False)
    assert torch.equal(result.tokens, plain.tokens)
    assert (torch.tensor([trace.probability for trace in result.traces]) == 1).all()


def test_more_siblings_than_the_draft_has_support():
    """Five siblings over a q of two codes: three are invalid, and so are their children."""
    table = torch.zeros(random_table(0, 3, 6).shape, dtype=torch.float64)
    table[:, 1], table[:, 4] = 0.7, 0.3
    draft = TabularTarget(table, 3)
    shape = static_tree([(0,), (1,), (2,), (3,), (4,), (0, 0), (2, 0), (4, 0)])
    drafter = model_drafter(draft, 500, tree=shape)

    class Watched:
        draft_forwards = 0

        def propose(self, sequence: Sequence, noise: Noise) -> Draft:
            proposed = drafter.propose(sequence, noise)
            assert proposed.valid is not None and proposed.q is not None
            fits = sequence.length <= 3
            assert (proposed.valid[fits].sum(1) <= 3).all()
            assert (proposed.valid[:, 2:5] == 0).all() and (proposed.valid[:, 6:] == 0).all()
            first, second = proposed.tokens[fits][:, 0], proposed.tokens[fits][:, 1]
            assert (first + second == 5).all()  # both codes, in either order
            assert not proposed.q.isnan().any()
            left = proposed.q[fits][:, 1].gather(1, second[:, None])
            assert (left == 1).all()  # what is left of q after the first sibling
            return proposed

        def observe(self, *rest: object) -> None:
            pass

    target = TabularTarget(random_table(40, 3, 6), 3)
    tokens = run(target, Watched(), Walk(Exact()), 500, 3).tokens
    assert tokens.unique().numel() == 6


def test_duplicate_siblings():
    """Two equal siblings: the second has nothing to win, its children are found all the same, and the cache is right."""

    class Twins:
        draft_forwards = 0

        def __init__(self) -> None:
            self.plain = decode_checked(NoDraft(), Match(), UNEQUAL, (3, 4), compare=False).tokens

        def propose(self, sequence: Sequence, noise: Noise) -> Draft:
            index = (sequence.length[:, None] - 1 + torch.arange(2)).clamp(max=11)
            one, two = self.plain.gather(1, index).T
            wrong = (two + 1) % VOCABULARY
            tree = static_tree([(0,), (1,), (0, 0), (1, 0)])
            valid = sequence.length[:, None] - 1 + tree.depth < sequence.limit
            return Draft(torch.stack((one, one, wrong, two), 1), tree=tree, valid=valid)

        def observe(self, *rest: object) -> None:
            pass

    result = decode_checked(Twins(), Match(), UNEQUAL, (3, 4))
    replay(UNEQUAL, result.tokens, (3, 4), Sampling(), SEEDS)
    assert all(trace.rounds == 4 for trace in result.traces)  # three tokens a round


def test_ties_between_parent_and_child():
    """A draft that is sure of itself gives a child its parent's confidence: the parent must be kept before the child."""
    hot = torch.nn.functional.one_hot(random_table(41, 6).argmax(1), 3).double()
    draft, target = TabularTarget(hot, 6), TabularTarget(random_table(42, 6), 6)
    for plan in ((1, 3, 3), (2, 3, 2), (3, 4, 3), (5, 3, 2), (40, 3, 3)):
        drafter = model_drafter(draft, 300, dynamic=plan)

        class Watched:
            draft_forwards = 0

            def propose(self, sequence: Sequence, noise: Noise, inner: ModelDrafter = drafter) -> Draft:
                proposed = inner.propose(sequence, noise)
                tree, valid = proposed.tree, proposed.valid
                assert tree is not None and valid is not None
                parents = tree.parents.expand_as(valid)
                assert (parents < torch.arange(parents.shape[1])).all() and (parents >= -1).all()
                above = valid.gather(1, parents.clamp(min=0)) | (parents < 0)
                assert (above | ~valid).all()  # a valid node has a valid parent
                return proposed

            def observe(self, *rest: object) -> None:
                pass

        for verifier in (Match(), Walk(Exact())):
            tokens = run(target, Watched(), verifier, 300, 6).tokens
            if isinstance(verifier, Match):
                assert torch.equal(tokens, run(target, NoDraft(), Match(), 300, 6).tokens)


def test_siblings_that_repeat_and_all_miss():
    """With replacement from a one-hot q, five times the same wrong code: one rejection, then the residual, never NaN."""
    table = torch.zeros(random_table(0, 3).shape, dtype=torch.float64)
    table[:, 2] = 1
    sure = torch.zeros_like(table)
    sure[:, :2] = 0.5
    tokens = run(
        TabularTarget(sure, 3),
        WithReplacement(TabularTarget(table, 3), static_tree(balanced_paths((5, 2)))),
        Walk(Exact()),
        400,
        3,
    ).tokens
    assert (tokens < 2).all() and tokens.double().mean().sub(0.5).abs() < 0.1


def test_prefix_refuses_trees():
    draft = Draft(torch.zeros(1, 2, dtype=torch.long), tree=chain_tree(2))
    scores = Scores(torch.zeros(1, 3, 2).log_softmax(-1), torch.tensor([[0, 1, 2]]))
    with pytest.raises(ValueError, match="Walk"):
        Prefix(Exact())(draft, scores, Noise(torch.tensor([0])))


@pytest.mark.parametrize(
    ("options", "message"), [({"window": 0}, "at least 1"), ({"tail": "gumble"}, "gumbel"), ({"init": "up"}, "above")]
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        JacobiDrafter(**{"window": 3, "vocabulary": 5, **options})
