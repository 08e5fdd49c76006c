"""Traces: sources and counts add up, JSON goes both ways, and nothing in a row depends on the batch."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict

import pytest
import torch
from foredraft.decoding.drafters.jacobi import JacobiDrafter
from foredraft.decoding.noise import DRAW, Noise
from foredraft.decoding.rules import Clustered, Exact
from foredraft.decoding.sampling import Sampling
from foredraft.decoding.sequence import Sequence
from foredraft.decoding.trace import Clock, Recorder, Trace
from foredraft.decoding.tree import balanced_paths, static_tree
from foredraft.decoding.types import ACCEPTED, BONUS, DRAWN, FORCED, RECOVERED, SOURCES, Drafter, Verifier
from foredraft.decoding.verify import Match, Prefix, Walk

from .stand_ins import model_drafter
from .tabular import NoDraft, TabularTarget, contexts, random_table, run, seeds
from .tiny import SEEDS, TARGET, UNEQUAL, VOCABULARY, begin, decode_checked, uncached_log_p

LENGTH, ROWS = 6, 40
TABLE = random_table(31, LENGTH)
TABULAR = TabularTarget(TABLE, LENGTH)
DRAFT = TabularTarget(0.6 * TABLE + 0.4 * random_table(32, LENGTH), LENGTH)
FORCED_AT = torch.tensor([-1, -1, 2, -1, -1, 1])


def refuse(constant: str) -> float:
    """NaN and Infinity are no JSON."""
    raise ValueError(f"{constant} is no JSON")


def assert_round_trip(trace: Trace) -> None:
    """Strict JSON, and the same trace again (nan = nan)."""
    text = trace.to_json()
    json.loads(text, parse_constant=refuse)
    again = Trace.from_json(text)
    assert repr(asdict(again)) == repr(asdict(trace))


def methods() -> dict[str, tuple[Drafter, Verifier]]:
    """One of each kind."""
    codebook = torch.tensor([[0.0], [0.2], [1.0]])
    tree = static_tree(balanced_paths((2, 2)))
    return {
        "none": (NoDraft(), Match()),
        "none, prefix": (NoDraft(), Prefix(Exact())),
        "jacobi": (JacobiDrafter(3, 3, init="left", seeded=True), Match()),
        "gumbel": (JacobiDrafter(3, 3, dtype=torch.float64), Prefix(Exact())),
        "clustered": (JacobiDrafter(3, 3, tail="coupled", dtype=torch.float64), Prefix(Clustered(codebook))),
        "chain": (model_drafter(DRAFT, ROWS, length=4), Prefix(Exact())),
        "tree": (model_drafter(DRAFT, ROWS, tree=tree), Walk(Exact())),
        "seeded tree": (model_drafter(DRAFT, ROWS, tree=tree, seeded=True), Match()),
        "dynamic": (model_drafter(DRAFT, ROWS, dynamic=(5, 3, 2)), Walk(Exact())),
    }


@pytest.mark.parametrize("forced", [None, FORCED_AT], ids=["free", "forced"])
@pytest.mark.parametrize("name", methods())
def test_counts_add_up(name, forced):
    drafter, verifier = methods()[name]
    result = run(TABULAR, drafter, verifier, ROWS, LENGTH, forced)
    for row, trace in enumerate(result.recorder.traces(result.sequence, seeds(ROWS), name, verifier.exact)):
        source = torch.tensor(trace.source).flatten()
        number = torch.tensor(trace.round).flatten()
        count = {label: int((source == kind).sum()) for kind, label in enumerate(SOURCES)}
        assert trace.complete and trace.tokens == LENGTH == sum(count.values())
        assert trace.grid == (2, 3) and trace.seed == row and trace.method == name and trace.exact is verifier.exact
        assert (number.diff() >= 0).all() and number.unique().tolist() == list(range(trace.rounds))
        assert trace.target_forwards == trace.rounds
        assert trace.tokens_per_forward == trace.mean_acceptance_length == LENGTH / trace.rounds
        assert trace.judged >= trace.accepted >= count["accepted"]
        assert trace.drafted >= trace.judged
        assert (trace.drafted == 0) == name.startswith("none")
        sizes = torch.bincount(number)
        assert torch.equal(torch.tensor(trace.run).flatten(), sizes[number])
        for step in range(trace.rounds):
            kinds = [kind for kind in source[number == step].tolist() if kind != FORCED]
            assert all(kind == ACCEPTED for kind in kinds[:-1])  # one token at most is the target's own
            assert not kinds or kinds[-1] in ((DRAWN,) if name.startswith("none") else (ACCEPTED, RECOVERED, BONUS))
        if forced is not None:
            assert ((source == FORCED) <= (forced >= 0)).all()
            if name.startswith("none"):
                assert torch.equal(source == FORCED, forced >= 0)
        chance = torch.tensor(trace.probability, dtype=torch.float64).flatten()
        assert torch.allclose(chance, looked_up(result.tokens[row], forced), atol=1e-6)
        assert (trace.min_margin < math.inf) == isinstance(verifier, Match)
        assert trace.min_margin > 0
        assert (trace.relaxation_per_token > 0) <= (name == "clustered")
        assert_round_trip(trace)


def looked_up(tokens: torch.Tensor, forced: torch.Tensor | None) -> torch.Tensor:
    """p of every token of a sequence, from the table: [N]."""
    code, chances = 0, []
    for index, token in enumerate(tokens.tolist()):
        free = forced is None or int(forced[index]) < 0
        chances.append(float(TABLE[contexts(3, index) + code, token]) if free else 1.0)
        code = code * 3 + token
    return torch.tensor(chances, dtype=torch.float64)


def test_the_clustered_rule_reports_its_cost():
    drafter, verifier = methods()["clustered"]
    result = run(TABULAR, drafter, verifier, ROWS, LENGTH)
    traces = result.recorder.traces(result.sequence, seeds(ROWS), "", False)
    assert sum(trace.relaxation_per_token or 0 for trace in traces) > 0
    unknown = result.recorder.traces(result.sequence, seeds(ROWS), "", False, measurable=False)
    assert all(trace.relaxation_per_token is None for trace in unknown)
    assert_round_trip(unknown[0])


def test_judged_ends_with_the_first_rejection():
    """By hand: a chain of four whose third token is refused: judged 3, accepted 2; a wholly accepted one: judged 4."""
    table = torch.full((contexts(3, LENGTH), 3), 0.0, dtype=torch.float64)
    table[:, 0] = 1.0  # the target writes zeros
    target = TabularTarget(table, LENGTH)
    other = table.clone()
    other[contexts(3, 2) : contexts(3, 3)] = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)  # the draft errs at index 2
    result = run(target, model_drafter(TabularTarget(other, LENGTH), 1, length=4), Prefix(Exact()), 1, LENGTH)
    trace = result.recorder.traces(result.sequence, seeds(1), "", True)[0]
    assert result.tokens.tolist() == [[0] * 6]
    # Round 0: two kept, one refused; round 1 starts at index 3: three drafts fit.
    assert trace.rounds == 2 and trace.drafted == 4 + 3 and trace.judged == 3 + 3 and trace.accepted == 2 + 3
    assert trace.acceptance_rate == 5 / 6
    assert [SOURCES[kind] for line in trace.source for kind in line] == ["accepted"] * 2 + ["recovered"] + ["accepted"] * 3


def test_probabilities_and_margins_on_a_transformer():
    """The trace's p of a token is the target's; the margin is the gap between the two best noisy scores."""
    sampling = Sampling(guidance_scale=2.0)
    result = decode_checked(
        JacobiDrafter(4, VOCABULARY, init="left", seeded=True), Match(), UNEQUAL, (3, 4), sampling, compare=False
    )
    log_p = uncached_log_p(TARGET, UNEQUAL, result.tokens, (3, 4), sampling)
    chance = log_p.gather(2, result.tokens[..., None])[..., 0].exp()
    index = torch.arange(12).expand(4, -1)
    noisy = log_p - Noise(SEEDS).log_exponential(index, VOCABULARY, DRAW, dtype=torch.float64)
    gap = noisy.topk(2).values.diff().neg()[..., 0]
    for row, trace in enumerate(result.traces):
        assert torch.allclose(torch.tensor(trace.probability, dtype=torch.float64).flatten(), chance[row], atol=1e-9)
        assert trace.min_margin == pytest.approx(float(gap[row].min()), abs=1e-9)


def test_stopping_early():
    """on_round ends the decoding: the trace says so, and what was not decoded is 0."""

    def stop(sequence: Sequence, recorder: Recorder) -> bool:
        return recorder.rounds == 2

    drafter = JacobiDrafter(3, 3, init="random", seeded=True)
    result = run(TABULAR, drafter, Match(), ROWS, LENGTH, on_round=stop)
    traces = result.recorder.traces(result.sequence, seeds(ROWS), "", True)
    plain = run(TABULAR, NoDraft(), Match(), ROWS, LENGTH).tokens
    assert any(not trace.complete for trace in traces)
    for row, trace in enumerate(traces):
        done = trace.tokens
        assert trace.rounds == 2 and done >= 2
        assert torch.equal(result.tokens[row, :done], plain[row, :done])
        assert (result.tokens[row, done:] == 0).all()
        assert_round_trip(trace)


def test_no_rounds_at_all():
    """A recorder that saw nothing still gives traces."""
    sequence = begin(TARGET, UNEQUAL, (1, 2), Sampling())
    trace = Recorder().traces(sequence, SEEDS, "", True)[0]
    assert trace.tokens == 0 and not trace.complete and trace.rounds == 0
    assert trace.tokens_per_forward == trace.mean_acceptance_length == trace.acceptance_rate == trace.engine_share == 0.0
    assert_round_trip(trace)


def test_forwards_before_the_clock_are_not_on_it():
    """A clock that begins after a long prefill books no negative time and no more than has passed."""
    sequence = begin(TARGET, UNEQUAL, (3, 4), Sampling())
    sequence.model_seconds = sequence.draft_seconds = 100.0
    clock = Clock()
    clock.lap("other", sequence)
    clock.lap("verify", sequence)
    assert all(value >= 0 for value in clock.parts.values()) and sum(clock.parts.values()) < 10


def test_the_clock_splits_the_whole():
    """Parts are not negative and sum to `seconds`; forwards are booked as forwards."""
    result = decode_checked(NoDraft(), Match(), UNEQUAL, (3, 4), compare=False)
    trace = result.traces[0]
    assert all(value >= 0 for value in trace.parts.values())
    assert sum(trace.parts.values()) == pytest.approx(trace.seconds)
    assert trace.parts["target"] > 0 and trace.parts["draft_model"] == 0.0
    assert 0 < trace.engine_share < 1


def test_a_callback_is_on_the_clock_apart():
    """Its seconds are booked under `callback` and fall into no lap."""
    sequence = begin(TARGET, UNEQUAL, (3, 4), Sampling())
    clock = Clock()
    begun = time.perf_counter()
    time.sleep(0.2)
    spent = time.perf_counter() - begun
    clock.callback(spent)
    clock.lap("other", sequence)
    assert clock.parts["callback"] == spent and 0 <= clock.parts["other"] < 0.2
