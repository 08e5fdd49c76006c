"""Exactness: 200,000 sequences per case, as one ragged batch, against the enumerated law (METHODS.md, 'Distribution tests')."""

from __future__ import annotations

import itertools

import pytest
import torch
from foredraft.decoding.drafters.jacobi import INITS, JacobiDrafter
from foredraft.decoding.noise import RECOVER
from foredraft.decoding.rules import Exact
from foredraft.decoding.tree import Tree, balanced_paths, chain_tree, static_tree
from foredraft.decoding.types import Drafter, Verifier
from foredraft.decoding.verify import Match, Prefix, Walk

from .stand_ins import FreshCoins, WithReplacement, model_drafter
from .tabular import SAMPLES, NoDraft, TabularTarget, check_law, fit, jacobi_law, random_table, run, sequence_law

EXACT_TAILS = ("resample", "coupled", "gumbel")
UNEVEN = static_tree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
SHAPES = {
    "chain": chain_tree(3),
    "wide": static_tree(balanced_paths((3,))),
    "pairs": static_tree(balanced_paths((2, 2))),
    "deep": static_tree(balanced_paths((2, 2, 1))),
    "uneven": UNEVEN,
}
COSTLY = {("deep", 0.4), ("uneven", 0.0), ("wide", 0.0), ("pairs", 0.4)}
Case = tuple[str, str, int, int]


def jacobi_cases() -> list[Case]:
    """Every (tail, init, W, L) with W in {1, 3, L}."""
    return [
        (tail, init, window, length)
        for tail, init, length in itertools.product(EXACT_TAILS, INITS, (3, 4))
        for window in sorted({1, 3, length})
    ]


def pairwise(cases: list[Case]) -> set[Case]:
    """A few cases that hold every pair of values that any case holds (greedy cover)."""

    def pairs(case: Case) -> set[tuple[object, ...]]:
        return {(i, case[i], j, case[j]) for i, j in itertools.combinations(range(len(case)), 2)}

    missing = set().union(*(pairs(case) for case in cases))
    chosen: set[Case] = set()
    while missing:
        best = max(cases, key=lambda case: len(pairs(case) & missing))
        chosen.add(best)
        missing -= pairs(best)
    return chosen


QUICK = pairwise(jacobi_cases())


def marked(cases: list[Case]) -> list[object]:
    """The pairwise cover runs always, the other cases are slow."""
    return [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in cases]


def tables(length: int, seed: int, zeros: float = 0.0) -> tuple[torch.Tensor, TabularTarget, TabularTarget]:
    """A target's table, the target, and a draft model that disagrees with it."""
    table = random_table(seed, length, zeros=zeros)
    other = random_table(seed + 1000, length, zeros=zeros / 2)
    return table, TabularTarget(table, length), TabularTarget(0.5 * (table + other), length)


def assert_law(target: TabularTarget, table: torch.Tensor, drafter: Drafter, verifier: Verifier) -> None:
    """The decoded sequences follow the table."""
    result = fit(run(target, drafter, verifier, SAMPLES, target.length).tokens, table)
    assert result.passes, str(result)


def test_the_cover_is_small_and_complete():
    assert len(QUICK) < 30
    assert len(jacobi_cases()) == 75


@pytest.mark.parametrize("length", [3, 4])
@pytest.mark.parametrize("verifier", [Match(), Prefix(Exact()), Walk(Exact())], ids=["match", "prefix", "walk"])
def test_plain_decoding(length, verifier):
    table, target, _ = tables(length, 7)
    assert_law(target, table, NoDraft(), verifier)


@pytest.mark.parametrize(("tail", "init", "window", "length"), marked(jacobi_cases()))
def test_jacobi(tail, init, window, length):
    table, target, _ = tables(length, 3)
    drafter = JacobiDrafter(window, 3, tail=tail, init=init, dtype=torch.float64)
    assert_law(target, table, drafter, Prefix(Exact()))


@pytest.mark.slow
@pytest.mark.parametrize(("tail", "init", "window", "length"), jacobi_cases())
def test_jacobi_on_a_table_with_zeros(tail, init, window, length):
    table, target, _ = tables(length, 11, zeros=0.4)
    drafter = JacobiDrafter(window, 3, tail=tail, init=init, dtype=torch.float64)
    assert_law(target, table, drafter, Prefix(Exact()))


@pytest.mark.parametrize("tail", EXACT_TAILS)
def test_jacobi_in_single_precision_without_refinement_or_with_zeros(tail):
    table, target, _ = tables(4, 11, zeros=0.4)
    assert_law(target, table, JacobiDrafter(3, 3, tail=tail, init="sample_above"), Prefix(Exact()))
    assert_law(target, table, JacobiDrafter(3, 3, tail=tail, init="sample_left", refine=False), Prefix(Exact()))


@pytest.mark.parametrize("tau", [0.0, 0.5])
def test_reuse_is_off_by_what_the_enumeration_says(tau):
    """The relaxed tail follows its own enumerated law, which is not the target's."""
    table, target, _ = tables(3, 3)
    law = jacobi_law(table, 3, lambda new, old: float(new > tau * old), fresh=True)
    drafter = JacobiDrafter(3, 3, tail="reuse", init="random", tau=tau, dtype=torch.float64)
    tokens = run(target, drafter, Prefix(Exact()), SAMPLES, 3).tokens
    code = (tokens * torch.tensor([9, 3, 1])).sum(1)
    result = check_law(torch.bincount(code, minlength=27), law)
    assert result.passes, str(result)
    assert 0.5 * float((law - sequence_law(table, 3)).abs().sum()) >= 0.03


def test_the_exact_tails_are_exact_by_enumeration():
    """The algorithm itself, apart from the engine: resample and coupled leave the law alone."""
    for seed in range(8):
        table = random_table(seed, 3, zeros=0.3 * (seed % 2))
        exact = sequence_law(table, 3)
        fresh = jacobi_law(table, 3, lambda new, old: 0.0, fresh=True)
        coupled = jacobi_law(table, 3, lambda new, old: min(1.0, new / old) if old > 0 else 0.0, fresh=False)
        assert float((fresh - exact).abs().max()) < 1e-12
        assert float((coupled - exact).abs().max()) < 1e-12


@pytest.mark.parametrize(("length", "drafts"), [(3, 1), (3, 2), (4, 4), (4, 6)])
@pytest.mark.parametrize("zeros", [0.0, 0.4])
def test_small_model_chain(length, drafts, zeros):
    table, target, draft = tables(length, 5, zeros)
    assert_law(target, table, model_drafter(draft, SAMPLES, length=drafts), Prefix(Exact()))


@pytest.mark.parametrize(
    ("shape", "zeros"),
    [
        pytest.param(shape, zeros, marks=pytest.mark.slow if (shape, zeros) in COSTLY else ())
        for shape, zeros in itertools.product(SHAPES, (0.0, 0.4))
    ],
)
def test_tree_without_replacement(shape, zeros):
    table, target, draft = tables(4, 5, zeros)
    assert_law(target, table, model_drafter(draft, SAMPLES, tree=SHAPES[shape]), Walk(Exact()))


@pytest.mark.parametrize("shape", ["chain", "wide", "uneven", "pairs", pytest.param("deep", marks=pytest.mark.slow)])
def test_tree_with_replacement(shape):
    table, target, draft = tables(4, 6)
    assert_law(target, table, WithReplacement(draft, SHAPES[shape]), Walk(Exact()))


@pytest.mark.parametrize(
    ("plan", "verifier"),
    [
        ((2, 2, 1), "walk"),
        ((4, 2, 2), "walk"),
        ((4, 2, 2), "match"),
        ((6, 3, 3), "walk"),
        *(
            pytest.param(plan, name, marks=pytest.mark.slow)
            for plan, name in [((6, 3, 3), "match"), ((9, 4, 2), "walk"), ((9, 4, 2), "match")]
        ),
    ],
)
def test_deterministic_candidates(plan, verifier):
    """EAGLE-2's top-k candidates are point masses: `Walk` and `Match` with any noise are both exact for them."""
    table, target, draft = tables(4, 8, zeros=0.2)
    chosen = Walk(Exact()) if verifier == "walk" else Match(stream=RECOVER)
    assert_law(target, table, model_drafter(draft, SAMPLES, dynamic=plan), chosen)


def test_match_with_foreign_noise_is_exact_for_sampled_drafts_too():
    """What the drafts were drawn with does not matter as long as the verifier looks at other noise."""
    table, target, draft = tables(4, 9)
    assert_law(target, table, model_drafter(draft, SAMPLES, length=3, seeded=True), Match(stream=RECOVER, salt=3))
    assert_law(target, table, JacobiDrafter(4, 3, init="left", seeded=True, refine=False), Match(salt=1))


def test_coins_of_a_stateful_generator():
    """Fresh coins in every round are as exact; the truncation control in test_controls.py builds on them."""
    table, target, _ = tables(4, 3)
    drafter = JacobiDrafter(4, 3, tail="resample", init="random", dtype=torch.float64)
    assert_law(target, table, drafter, FreshCoins(Prefix(Exact())))


def test_a_chain_is_a_tree_of_one_branch():
    """`Walk` over a chain written as a tree gives the very tokens of `Prefix`."""
    _, target, draft = tables(4, 5)
    rows = 20_000
    chain = run(target, model_drafter(draft, rows, length=3), Prefix(Exact()), rows, 4).tokens
    tree = run(target, model_drafter(draft, rows, tree=chain_tree(3)), Walk(Exact()), rows, 4).tokens
    assert torch.equal(chain, tree)


@pytest.mark.parametrize("shape", [UNEVEN, Tree(torch.tensor([[-1, -1, 0]]))])
def test_one_hot_laws(shape):
    """Deterministic target and draft: nothing but the one sequence, and no NaN on the way."""
    length = 4
    table = torch.nn.functional.one_hot(random_table(1, length).argmax(1), 3).double()
    other = torch.nn.functional.one_hot(random_table(2, length).argmax(1), 3).double()
    target = TabularTarget(table, length)
    for model in (target, TabularTarget(other, length)):
        for drafter, verifier in (
            (model_drafter(model, 50, tree=shape), Walk(Exact())),
            (model_drafter(model, 50, tree=shape, seeded=True), Match()),
            (model_drafter(model, 50, dynamic=(5, 3, 2)), Walk(Exact())),
            (model_drafter(model, 50, length=2), Prefix(Exact())),
            (WithReplacement(model, shape), Walk(Exact())),
        ):
            tokens = run(target, drafter, verifier, 50, length).tokens
            code = (tokens * torch.tensor([27, 9, 3, 1])).sum(1)
            assert (code == sequence_law(table, length).argmax()).all()
