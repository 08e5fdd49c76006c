"""Negative controls: each breaks one law, and the check that passes the honest engine must fail it clearly."""

from __future__ import annotations

from collections.abc import Callable

import foredraft.decoding.drafters.grow as grow_module
import foredraft.decoding.verify as verify_module
import pytest
import torch
from foredraft.decoding.rules import Exact
from foredraft.decoding.tree import balanced_paths, static_tree
from foredraft.decoding.types import Drafter, Verifier
from foredraft.decoding.verify import Match, Prefix, Walk

from .stand_ins import (
    AcceptEverything,
    DropUnlikely,
    FreshCoins,
    GreedyFirst,
    NeighboursLaw,
    RecoverFromTarget,
    Retested,
    Slowest,
    StaleLaws,
    Tampered,
    draft_noise_stop,
    model_drafter,
    unnormalised,
    unstruck,
)
from .tabular import SAMPLES, Fit, TabularTarget, check_law, fit, jacobi_law, random_table, run, sequence_law

LENGTH = 4
TABLE = random_table(3, LENGTH)
TARGET = TabularTarget(TABLE, LENGTH)
DRAFT = TabularTarget(random_table(1003, LENGTH), LENGTH)
PAIRS = static_tree(balanced_paths((2, 2)))


def window(kind: type[Tampered] = Tampered, size: int = LENGTH, tail: str = "resample", init: str = "random") -> Drafter:
    """A Jacobi drafter (`Tampered` itself spoils nothing), W = L and random first drafts unless said otherwise."""
    return kind(size, 3, tail, init)


def measured(drafter: Drafter, verifier: Verifier) -> Fit:
    """The same check as in test_laws.py."""
    return fit(run(TARGET, drafter, verifier, SAMPLES, LENGTH).tokens, TABLE)


CONTROLS: dict[str, tuple[Callable[[], Drafter], Callable[[], Verifier], float]] = {
    "accept everything, chain": (lambda: model_drafter(DRAFT, SAMPLES, length=3), lambda: Prefix(AcceptEverything()), 0.1),
    "accept everything, jacobi": (window, lambda: Prefix(AcceptEverything()), 0.1),
    "accept everything, tree": (lambda: model_drafter(DRAFT, SAMPLES, tree=PAIRS), lambda: Walk(AcceptEverything()), 0.1),
    "reuse": (lambda: window(tail="reuse"), lambda: Prefix(Exact()), 0.03),
    "recover from p, jacobi": (window, lambda: Prefix(RecoverFromTarget()), 0.08),
    "recover from p, chain": (lambda: model_drafter(DRAFT, SAMPLES, length=3), lambda: Prefix(RecoverFromTarget()), 0.05),
    "recover from p, tree": (lambda: model_drafter(DRAFT, SAMPLES, tree=PAIRS), lambda: Walk(RecoverFromTarget()), 0.03),
    "stale q": (lambda: window(StaleLaws), lambda: Prefix(Exact()), 0.02),
    "neighbour's law, left": (lambda: window(NeighboursLaw, 1, init="sample_left"), lambda: Prefix(Exact()), 0.02),
    "neighbour's law, above": (lambda: window(NeighboursLaw, 1, init="sample_above"), lambda: Prefix(Exact()), 0.05),
    "first drafts by argmax": (lambda: window(GreedyFirst, 1, init="sample_left"), lambda: Prefix(Exact()), 0.05),
    "slowest of the batch": (lambda: window(Retested), lambda: Slowest(Prefix(Exact())), 0.03),
    "unlikely drafts dropped": (lambda: model_drafter(DRAFT, SAMPLES, DropUnlikely, length=3), lambda: Prefix(Exact()), 0.03),
    "match with the draft's noise, unseeded": (lambda: model_drafter(DRAFT, SAMPLES, DropUnlikely, length=3), Match, 0.0),
}


@pytest.mark.parametrize("name", [name for name in CONTROLS if "unseeded" not in name])
def test_fault_is_found(name):
    drafter, verifier, least = CONTROLS[name]
    result = measured(drafter(), verifier())
    print(f"{name}: {result}")
    assert not result.passes and result.tv > max(least, result.bound) and result.z > 20, str(result)


def test_seeded_decoding_forgives_a_dropped_draft():
    """Under `Match` what is drafted, and what is dropped, never matters: the very draft that fails above passes here."""
    drafter, verifier, _ = CONTROLS["match with the draft's noise, unseeded"]
    assert measured(drafter(), verifier()).passes


@pytest.mark.parametrize("fault", [unstruck, unnormalised])
def test_siblings_with_a_wrong_law_are_found(fault, monkeypatch):
    monkeypatch.setattr(grow_module, "struck", fault)
    for branching in ((3,), (2, 2)):
        result = measured(model_drafter(DRAFT, SAMPLES, tree=static_tree(balanced_paths(branching))), Walk(Exact()))
        print(f"{fault.__name__} {branching}: {result}")
        assert not result.passes and result.tv > result.bound and result.z > 20, str(result)


@pytest.mark.parametrize("kind", ["gumbel", "chain", "tree"])
def test_recovery_with_the_drafts_noise_is_found(kind, monkeypatch):
    """Where a rejection leaves a choice: with V = 3 and two siblings, or with W = L, it seldom does."""
    table = {"gumbel": random_table(4, 3), "chain": random_table(4, 3), "tree": random_table(3, 3, 4)}[kind]
    target, draft = TabularTarget(table, 3), TabularTarget(random_table(1003, 3, table.shape[1]), 3)

    def measure() -> Fit:
        drafter = {
            "gumbel": lambda: window(size=1, tail="gumbel", init="sample_left"),
            "chain": lambda: model_drafter(draft, SAMPLES, length=3),
            "tree": lambda: model_drafter(draft, SAMPLES, tree=PAIRS),
        }[kind]()
        verifier = Walk(Exact()) if kind == "tree" else Prefix(Exact())
        return fit(run(target, drafter, verifier, SAMPLES, 3).tokens, table)

    assert measure().passes
    monkeypatch.setattr(verify_module, "draw_stop", draft_noise_stop)
    result = measure()
    print(f"recovered with the draft's noise, {kind}: {result}")
    assert not result.passes and result.tv > result.bound and result.z > 20, str(result)


def test_truncation_alone_is_harmless():
    """The slowest row's length is no bias by itself if whatever was cut off is drawn anew; testing it again is."""
    assert measured(window(), Slowest(Prefix(Exact()))).passes
    assert measured(window(Retested), FreshCoins(Prefix(Exact()))).passes


def test_the_table_of_the_reuse_control_has_teeth():
    """Its exact distance, by enumeration, is at least 0.03; with a window of one slot reuse would be exact."""
    law = jacobi_law(TABLE, LENGTH, lambda new, old: float(new > 0.5 * old), fresh=True)
    assert 0.5 * float((law - sequence_law(TABLE, LENGTH)).abs().sum()) >= 0.03
    assert measured(window(size=1, tail="reuse"), Prefix(Exact())).passes


def test_the_check_itself():
    """Samples of the law pass, a bias of TV 0.011 does not, nor does one forbidden sequence."""
    law = sequence_law(TABLE, LENGTH)
    generator = torch.Generator().manual_seed(0)

    def counts(weights: torch.Tensor) -> torch.Tensor:
        draws = torch.multinomial(weights, SAMPLES, replacement=True, generator=generator)
        return torch.bincount(draws, minlength=len(law))

    assert check_law(counts(law), law).passes
    tilted = law.clone()
    half = len(law) // 2
    tilted[:half] *= 1 + 0.011 / float(law[:half].sum())
    tilted[half:] *= 1 - 0.011 / float(law[half:].sum())
    result = check_law(counts(tilted), law)
    assert result.z > 10 and not result.passes
    holes = law.clone()
    holes[5] = 0
    forbidden = counts(holes / holes.sum())
    assert check_law(forbidden, holes / holes.sum()).passes
    forbidden[5] = 1
    assert not check_law(forbidden, holes / holes.sum()).passes
