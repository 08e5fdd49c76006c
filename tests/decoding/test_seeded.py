"""The headline promise: whatever drafts, `Match` gives plain autoregressive decoding's tokens, to the last one.

Also: a row run alone is the row of the batch, and grammar-forced tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch
from foredraft.decoding.drafters.jacobi import INITS, TAILS, JacobiDrafter
from foredraft.decoding.rules import Clustered, Exact
from foredraft.decoding.trace import Trace
from foredraft.decoding.tree import balanced_paths, static_tree
from foredraft.decoding.types import Drafter, Verifier
from foredraft.decoding.verify import Match, Prefix, Walk

from .stand_ins import Scripted, WithReplacement, model_drafter
from .tabular import SAMPLES, NoDraft, TabularTarget, fit, random_table, run, seeds

LENGTH = 4
TABLE = random_table(13, LENGTH, zeros=0.2)
TARGET = TabularTarget(TABLE, LENGTH)
DRAFT = TabularTarget(0.5 * (TABLE + random_table(14, LENGTH)), LENGTH)
PAIRS = static_tree(balanced_paths((2, 2)))
Make = Callable[[int], Drafter]


def seeded_drafters() -> dict[str, Make]:
    """Every drafter in its seeded form; each makes one for a number of rows."""
    made: dict[str, Make] = {}
    for init in INITS:
        for window in (1, 3, LENGTH, LENGTH + 3):
            made[f"jacobi {init} W={window}"] = lambda rows, w=window, i=init: JacobiDrafter(w, 3, init=i, seeded=True)
    made["jacobi without refinement"] = lambda rows: JacobiDrafter(3, 3, init="sample_above", seeded=True, refine=False)
    made["chain 1"] = lambda rows: model_drafter(DRAFT, rows, length=1, seeded=True)
    made["chain 6"] = lambda rows: model_drafter(DRAFT, rows, length=6, seeded=True)
    made["unseeded chain"] = lambda rows: model_drafter(DRAFT, rows, length=3)
    for branching in ((3,), (2, 2), (2, 2, 1)):
        shape = static_tree(balanced_paths(branching))
        made[f"static {branching}"] = lambda rows, s=shape: model_drafter(DRAFT, rows, tree=s, seeded=True)
    for lengths in ([0, 5, 1, 3, 0, 0, 2], [6, 1, 0, 4]):
        made[f"jacobi planned {lengths}"] = lambda rows, p=lengths: JacobiDrafter(6, 3, seeded=True, planner=Scripted(p))
        made[f"jacobi planned {lengths}, sample_above"] = lambda rows, p=lengths: JacobiDrafter(
            6, 3, init="sample_above", seeded=True, planner=Scripted(p)
        )
        made[f"chain planned {lengths}"] = lambda rows, p=lengths: model_drafter(DRAFT, rows, seeded=True, planner=Scripted(p))
    made["siblings that repeat"] = lambda rows: WithReplacement(DRAFT, PAIRS)
    for plan in ((2, 2, 1), (4, 2, 2), (9, 4, 2)):
        made[f"dynamic {plan}"] = lambda rows, p=plan: model_drafter(DRAFT, rows, dynamic=p, seeded=True)
        made[f"dynamic {plan}, unseeded"] = lambda rows, p=plan: model_drafter(DRAFT, rows, dynamic=p)
    return made


SEEDED = seeded_drafters()
ROWS = 20_000


@pytest.fixture(scope="module")
def plain() -> torch.Tensor:
    """Autoregressive tokens of seeds 0 .. SAMPLES - 1."""
    return run(TARGET, NoDraft(), Match(), SAMPLES, LENGTH).tokens


def test_the_reference_follows_the_law(plain):
    assert fit(plain, TABLE).passes
    independent = run(TARGET, NoDraft(), Match(salt=1), SAMPLES, LENGTH).tokens
    assert 0.05 < float((independent == plain).all(1).double().mean()) < 0.6


@pytest.mark.parametrize("name", SEEDED)
def test_same_tokens(name, plain):
    result = run(TARGET, SEEDED[name](ROWS), Match(), ROWS, LENGTH)
    assert torch.equal(result.tokens, plain[:ROWS])


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEDED)
def test_same_tokens_in_full(name, plain):
    result = run(TARGET, SEEDED[name](SAMPLES), Match(), SAMPLES, LENGTH)
    assert torch.equal(result.tokens, plain)


def test_sharing_the_noise_pays():
    """Drafts of the position's own noise agree often: fewer than 0.6 N rounds on average."""
    rows, rounds = 2000, {}
    for name, drafter in (("shared", model_drafter(DRAFT, rows, length=3, seeded=True)), ("none", NoDraft())):
        result = run(TARGET, drafter, Match(), rows, LENGTH)
        rounds[name] = sum(trace.rounds for trace in result.recorder.traces(result.sequence, seeds(rows), "", True))
    assert rounds["none"] == LENGTH * rows
    assert rounds["shared"] < 0.6 * rounds["none"]


def mixed_cases() -> dict[str, tuple[Make, Callable[[], Verifier]]]:
    """One of each kind of drafter and verifier."""
    codebook = torch.tensor([[0.0], [0.3], [1.0]])
    made: dict[str, tuple[Make, Callable[[], Verifier]]] = {
        f"{tail} {init}": (
            lambda rows, t=tail, i=init: JacobiDrafter(3, 3, tail=t, init=i, dtype=torch.float64),
            lambda: Prefix(Exact()),
        )
        for tail, init in zip(TAILS, INITS[1:], strict=True)
    }
    made["clustered"] = (
        lambda rows: JacobiDrafter(4, 3, tail="coupled", init="random", dtype=torch.float64),
        lambda: Prefix(Clustered(codebook)),
    )
    made["chain"] = (lambda rows: model_drafter(DRAFT, rows, length=3), lambda: Prefix(Exact()))
    made["static"] = (lambda rows: model_drafter(DRAFT, rows, tree=PAIRS), lambda: Walk(Exact()))
    made["dynamic"] = (lambda rows: model_drafter(DRAFT, rows, dynamic=(4, 2, 2)), lambda: Walk(Exact()))
    made["seeded"] = (SEEDED["jacobi sample_above W=3"], Match)
    made["seeded dynamic"] = (SEEDED["dynamic (4, 2, 2)"], Match)
    return made


MIXED = mixed_cases()


@pytest.mark.parametrize("name", MIXED)
def test_a_row_alone_is_the_row_of_the_batch(name):
    """200 rows: tokens, rounds, counts and maps. Neither the neighbours nor the place in the batch matter."""
    make, verifier = MIXED[name]
    rows = 200
    together = run(TARGET, make(rows), verifier(), rows, LENGTH)
    traces = together.recorder.traces(together.sequence, seeds(rows), "", True)
    for row in range(0, rows, 4 if name == "seeded" else 20):
        alone = run(TARGET, make(1), verifier(), seeds(1, row), LENGTH)
        assert torch.equal(alone.tokens[0], together.tokens[row])
        assert_same_trace(alone.recorder.traces(alone.sequence, seeds(1, row), "", True)[0], traces[row])
    backwards = run(TARGET, make(rows), verifier(), seeds(rows).flip(0), LENGTH)
    assert torch.equal(backwards.tokens.flip(0), together.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXED)
def test_every_row_alone(name):
    make, verifier = MIXED[name]
    together = run(TARGET, make(200), verifier(), 200, LENGTH)
    traces = together.recorder.traces(together.sequence, seeds(200), "", True)
    for row in range(200):
        alone = run(TARGET, make(1), verifier(), seeds(1, row), LENGTH)
        assert torch.equal(alone.tokens[0], together.tokens[row])
        assert_same_trace(alone.recorder.traces(alone.sequence, seeds(1, row), "", True)[0], traces[row])


def assert_same_trace(one: Trace, other: Trace) -> None:
    """Everything but the clock and the size of the batch; probabilities up to rounding."""
    a, b = asdict(one), asdict(other)
    for name in ("seconds", "parts", "batch"):
        del a[name], b[name]
    assert (a["expected_length"] is None) == (b["expected_length"] is None)
    for name in ("probability", "min_margin", "relaxation_per_token", "expected_length"):
        mine, its = (torch.tensor(math.nan if t[name] is None else t[name]) for t in (a, b))
        assert torch.allclose(mine, its, atol=1e-6, equal_nan=True)
        del a[name], b[name]
    assert a == b
