"""The planner: it learns what a round costs and keeps, and follows both."""

from __future__ import annotations

import foredraft.decoding.planner as planning
import pytest
from foredraft.decoding.drafters.jacobi import JacobiDrafter
from foredraft.decoding.planner import Planner

LENGTHS = (0, 4, 8, 16, 32)


def run(planner: Planner, rounds: int, chance: float, base: float, slope: float, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Play rounds whose clock is base + slope * length and whose drafts are each kept with `chance` (deterministic pattern)."""
    now, chosen, kept = [0.0], [], 0.0
    monkeypatch.setattr(planning, "perf_counter", lambda: now[0])
    planner.begin()
    for number in range(rounds):
        length = planner.choose()
        chosen.append(length)
        run_length, mass = 0, (number * 0.618) % 1.0
        while run_length < length and mass < chance ** (run_length + 1):
            run_length += 1
        kept += run_length
        planner.note([run_length])
        now[0] += base + slope * length
    return chosen


def test_long_drafts_where_they_are_kept_and_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly free drafts that are nearly always kept: the longest candidate wins."""
    assert run(Planner(LENGTHS, 8), 60, 0.98, 1.0, 0.001, monkeypatch)[-1] == 32


def test_short_drafts_where_long_ones_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the drafts are kept and each costs a tenth of a round: a few tokens ahead, no more."""
    assert run(Planner(LENGTHS, 8), 60, 0.5, 1.0, 0.1, monkeypatch)[-1] == 4


def test_speculation_that_does_not_pay_is_switched_off_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept and drafts cost time: length 0, with a probe now and then, and a note that says so."""
    planner = Planner(LENGTHS, 8)
    chosen = run(planner, 120, 0.0, 1.0, 0.1, monkeypatch)
    assert chosen[20] == 0 and chosen.count(0) > 90
    assert any(length > 0 for length in chosen[60:])
    assert "did not pay" in planner.notes[0]


def test_expected_tokens_extend_beyond_what_was_tried() -> None:
    """Untried lengths continue the last chance geometrically; more drafts never commit fewer tokens."""
    planner = Planner(LENGTHS, 8)
    planner._length = 8
    planner.note([8, 4, 2, 0])
    expected = [planner.tokens(length) for length in range(33)]
    assert expected == sorted(expected)
    assert expected[8] == pytest.approx(1 + (8 + 4 + 2 + 0) / 4, abs=0.5) and expected[32] > expected[8]


def test_only_seeded_decoding_may_follow_the_clock() -> None:
    """Timing must never change a picture."""
    with pytest.raises(ValueError, match="clock"):
        JacobiDrafter(8, 16, seeded=False, planner=Planner(LENGTHS, 8))
