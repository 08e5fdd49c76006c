"""One-step trees by enumeration: siblings with and without replacement and deterministic candidates, to 1e-12.

The residual is handed from sibling to sibling exactly as `Walk` does it; the controls break one link each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from foredraft.decoding.rules import Exact, normalised
from torch import Tensor

from .test_rules import TIGHT, laws

RULE = Exact()
Strike = Callable[[Tensor, Tensor, int], Tensor]


def struck(q: Tensor, left: Tensor, x: int) -> Tensor:
    """q of the next sibling drawn without replacement."""
    mass = left.clone()
    mass[x] = 0
    return normalised(mass[None], mass[None])[0]


def kept(q: Tensor, left: Tensor, x: int) -> Tensor:
    """q of the next sibling drawn with replacement."""
    return q


def tree_law(
    p: Tensor, q: Tensor, siblings: int, drawn: Strike, believed: Strike, rule: Exact = RULE, update: bool = True
) -> Tensor:
    """Law of the token after a root with sampled siblings, enumerated over every draft: [V].

    drawn: how q really changes after a sibling; believed: what the verifier is told; update: whether it uses the residual.
    """
    vocabulary = len(p)
    law = torch.zeros_like(p)
    for tokens in itertools.product(range(vocabulary), repeat=siblings):
        weight, left, told, now = torch.ones((), dtype=p.dtype), q, q, p
        alive = torch.ones((), dtype=p.dtype)
        probability, kept_mass = [], []
        for x in tokens:
            weight = weight * left[x]
            probability.append(x)
            keep = rule.accept(now[None], told[None], torch.tensor([x]))[0]
            kept_mass.append((x, alive * keep))
            alive = alive * (1 - keep)
            if update:
                now = rule.residual(now[None], told[None], torch.tensor([x]))[0]
            left, told = drawn(q, left, x), believed(q, told, x)
            if float(left.sum()) == 0:  # exhausted: the remaining siblings are invalid
                break
        if float(weight) == 0:
            continue
        # A branch that ended early is met once for every choice of the siblings that do not exist.
        repeats = vocabulary ** (siblings - len(probability))
        for x, mass in kept_mass:
            law[x] += weight * mass / repeats
        law += weight * alive * now / repeats
    assert not law.isnan().any()
    return law


@pytest.mark.parametrize("siblings", [1, 2, 3, 4])
@pytest.mark.parametrize("zeros", [0.0, 0.5])
def test_without_replacement(siblings, zeros):
    rows = 12 if siblings < 4 else 4
    for p, q in zip(laws(20, rows, 4, zeros), laws(21, rows, 4, zeros), strict=True):
        assert (tree_law(p, q, siblings, struck, struck) - p).abs().max() < TIGHT


@pytest.mark.parametrize("siblings", [1, 2, 3])
@pytest.mark.parametrize("zeros", [0.0, 0.5])
def test_with_replacement_duplicates_included(siblings, zeros):
    for p, q in zip(laws(22, 12, 4, zeros), laws(23, 12, 4, zeros), strict=True):
        assert (tree_law(p, q, siblings, kept, kept) - p).abs().max() < TIGHT


def test_one_hot_laws():
    """One-hot p or q, or both: a draft that cannot be the token, siblings beyond q's support."""
    hot = torch.eye(3, dtype=torch.float64)
    dense = laws(24, 1, 3)[0]
    for p, q in ((hot[0], hot[0]), (hot[0], hot[1]), (dense, hot[1]), (hot[2], dense)):
        for siblings in (1, 2, 3):
            assert (tree_law(p, q, siblings, struck, struck) - p).abs().max() < TIGHT
            assert (tree_law(p, q, siblings, kept, kept) - p).abs().max() < TIGHT


@pytest.mark.parametrize("zeros", [0.0, 0.5])
def test_deterministic_candidates(zeros):
    """EAGLE-2's candidates: q = 1 for each; after a rejection p loses that code and is renormalised. Repeats are harmless."""
    for p in laws(25, 20, 4, zeros):
        for tokens in [(2,), (0, 1), (3, 1, 0), (1, 1), (0, 1, 2, 3), (2, 0, 2)]:
            law, now, alive = torch.zeros_like(p), p, 1.0
            for x in tokens:
                keep = RULE.accept(now[None], None, torch.tensor([x]))[0]
                law[x] += alive * keep
                now, alive = RULE.residual(now[None], None, torch.tensor([x]))[0], alive * (1 - keep)
            law += alive * now
            assert not law.isnan().any()
            assert (law - p).abs().max() < TIGHT


class FromTarget(Exact):
    """Fault: the residual is p."""

    def residual(self, p: Tensor, q: Tensor | None, x: Tensor, depth: Tensor | int = 0) -> Tensor:
        """G = p."""
        return p


def unnormalised(q: Tensor, left: Tensor, x: int) -> Tensor:
    """Fault: the sibling is struck and the rest not renormalised."""
    mass = left.clone()
    mass[x] = 0
    return mass


@pytest.mark.parametrize(
    ("believed", "rule", "update"),
    [(kept, RULE, True), (unnormalised, RULE, True), (struck, RULE, False), (struck, FromTarget(), True)],
    ids=["q not updated", "q not renormalised", "p not updated", "recover from p"],
)
def test_controls(believed, rule, update):
    worst = 0.0
    for p, q in zip(laws(26, 12, 4), laws(27, 12, 4), strict=True):
        law = tree_law(p, q, 2, struck, believed, rule, update)
        worst = max(worst, 0.5 * float((law - p).abs().sum()))
    assert worst > 0.02
