"""Trees under relaxed rules: sampled siblings and deterministic candidates, enumerated and as `Walk` decodes them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from foredraft.decoding.rules import Weighted, annealed_weights
from foredraft.decoding.tree import balanced_paths, static_tree
from foredraft.decoding.types import Rule
from foredraft.decoding.verify import Walk
from torch import Tensor

from .rounds import rows_of
from .stand_ins import model_drafter
from .tabular import SAMPLES, TabularTarget, check_law, count_sequences, run, sequence_law
from .test_relaxed import relaxed, tables
from .test_rules import TIGHT, laws
from .test_siblings import struck


def node(p: Tensor, q: Tensor, siblings: int, rule: Rule, depth: int) -> tuple[Tensor, Tensor, float, float]:
    """One node with sampled siblings, every draft enumerated: mass kept and mass recovered on each token [V], the cost of all
    tests, the expected number of kept tokens."""
    vocabulary = len(p)
    kept, recovered, cost, taken = torch.zeros_like(p), torch.zeros_like(p), 0.0, 0.0

    def descend(weight: float, now: Tensor, left: Tensor, number: int) -> None:
        nonlocal cost, taken, recovered
        if number == siblings or float(left.sum()) == 0:
            recovered += weight * now
            return
        for x in range(vocabulary):
            chance = weight * float(left[x])
            if chance == 0:
                continue
            code = torch.tensor([x])
            keep = float(rule.accept(now[None], left[None], code, depth))
            if hasattr(rule, "cost"):
                cost += chance * float(rule.cost(now[None], left[None], code, depth))
            kept[x] += chance * keep
            taken += chance * keep
            rest = rule.residual(now[None], left[None], code, depth)[0]
            descend(chance * (1 - keep), rest, struck(left, left, x), number + 1)

    descend(1.0, p, q, 0)
    return kept, recovered, cost, taken


def candidates(p: Tensor, codes: tuple[int, ...], rule: Rule, depth: int) -> Tensor:
    """Law after deterministic candidates: [V]."""
    law, now, alive = torch.zeros_like(p), p, 1.0
    for x in codes:
        code = torch.tensor([x])
        keep = float(rule.accept(now[None], None, code, depth))
        law[x] += alive * keep
        now, alive = rule.residual(now[None], None, code, depth)[0], alive * (1 - keep)
    return law + alive * now


@pytest.mark.parametrize("name", relaxed(4))
@pytest.mark.parametrize("siblings", [1, 2, 3])
def test_the_cost_of_all_tests_bounds_the_distance(name: str, siblings: int) -> None:
    """Rejections renormalise p, so a node's tests add up: TV <= the mean cost; nothing is lost or made on the way."""
    rule: Any = relaxed(4)[name]
    for p, q in zip(laws(60, 8, 4, 0.3), laws(61, 8, 4, 0.3), strict=True):
        kept, recovered, cost, taken = node(p, q, siblings, rule, 1)
        assert float((kept + recovered).sum()) == pytest.approx(1.0, abs=TIGHT)
        assert float(kept.sum()) == pytest.approx(taken, abs=TIGHT)
        assert 0.5 * float((kept + recovered - p).abs().sum()) <= cost + TIGHT


@pytest.mark.parametrize("weight", [0.4, 0.8, 1.0])
@pytest.mark.parametrize("zeros", [0.0, 0.5])
def test_weights_up_to_one_are_exact_in_trees(weight: float, zeros: float) -> None:
    """Sampled siblings and candidates alike, repeated candidates included."""
    rule = Weighted([weight])
    for p, q in zip(laws(62, 10, 4, zeros), laws(63, 10, 4, zeros), strict=True):
        for siblings in (1, 2, 3):
            kept, recovered, cost, _ = node(p, q, siblings, rule, 1)
            assert (kept + recovered - p).abs().max() < TIGHT and cost < TIGHT
        for codes in itertools.chain(itertools.permutations(range(4), 3), [(1, 1), (2, 0, 2)]):
            assert (candidates(p, codes, rule, 1) - p).abs().max() < TIGHT


@pytest.mark.parametrize("name", relaxed(4))
def test_sampled_siblings_follow_the_enumeration(name: str) -> None:
    """Two levels: a kept token's children are judged at depth 2, a recovered token starts a new round at depth 1."""
    table, other = tables(31, 2, 4)
    rule: Any = relaxed(4, 2)[name]
    kept, recovered, cost, taken = node(rows_of(table, 0)[0], rows_of(other, 0)[0], 2, rule, 1)
    law, expected = torch.zeros(4, 4, dtype=table.dtype), 1.0 + taken
    for x in range(4):
        p, q = rows_of(table, 1)[x], rows_of(other, 1)[x]
        below, fresh = node(p, q, 2, rule, 2), node(p, q, 2, rule, 1)
        law[x] = kept[x] * (below[0] + below[1]) + recovered[x] * (fresh[0] + fresh[1])
        cost += float(kept[x]) * below[2] + float(recovered[x]) * fresh[2]
        expected += float(kept[x]) * below[3]
    target, draft = TabularTarget(table, 2), TabularTarget(other, 2)
    drafter = model_drafter(draft, SAMPLES, tree=static_tree(balanced_paths((2, 2))))
    result = run(target, drafter, Walk(rule), SAMPLES, 2)
    fitted = check_law(count_sequences(result.tokens, 4), law.flatten())
    assert fitted.passes, str(fitted)
    log = result.recorder._log
    first = log[0].verdict
    assert first.expected is not None
    assert float(first.expected.mean()) == pytest.approx(expected, abs=5 * float(first.expected.std()) / SAMPLES**0.5)
    if not rule.exact:
        costs = torch.stack([entry.verdict.cost * (entry.added > 0) for entry in log]).sum(0)  # type: ignore[operator]
        assert float(costs.mean()) == pytest.approx(cost, abs=5 * float(costs.std()) / SAMPLES**0.5)
        assert not check_law(count_sequences(result.tokens, 4), sequence_law(table, 2)).passes


@pytest.mark.parametrize("name", relaxed(4))
def test_deterministic_candidates_follow_the_enumeration(name: str) -> None:
    """EAGLE-2's candidates, the draft's best three in order of confidence."""
    table, other = tables(32, 1, 4)
    rule: Any = relaxed(4, 1)[name]
    best = tuple(other[0].topk(3).indices.tolist())
    law = candidates(table[0], best, rule, 1)
    drafter = model_drafter(TabularTarget(other, 1), SAMPLES, dynamic=(3, 1, 3))
    tokens = run(TabularTarget(table, 1), drafter, Walk(rule), SAMPLES, 1).tokens
    fitted = check_law(count_sequences(tokens, 4), law)
    assert fitted.passes, str(fitted)


@pytest.mark.parametrize("shape", ["chain", "tree", "dynamic"])
def test_unclamped_weights_below_one_stay_exact_in_the_engine(shape: str) -> None:
    """delta low enough that no weight exceeds 1: shorter runs, the target's law."""
    table, other = tables(33, 4)
    rule = Weighted(annealed_weights(3, 0.45, clamp=False))
    assert rule.exact and 0.7 < rule.weights[0] < 1
    plans: dict[str, dict[str, Any]] = {
        "chain": {"length": 3},
        "tree": {"tree": static_tree(balanced_paths((2, 1, 1)))},
        "dynamic": {"dynamic": (4, 3, 2)},
    }
    drafter = model_drafter(TabularTarget(other, 4), SAMPLES, **plans[shape])
    tokens = run(TabularTarget(table, 4), drafter, Walk(rule), SAMPLES, 4).tokens
    fitted = check_law(count_sequences(tokens, 3), sequence_law(table, 4))
    assert fitted.passes, str(fitted)
