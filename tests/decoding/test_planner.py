"""The planner: it learns what a round costs and keeps, and follows both."""

from __future__ import annotations

import foredraft.decoding.planner as planning
import pytest
from foredraft.decoding.drafters.jacobi import JacobiDrafter
from foredraft.decoding.planner import Planner

LENGTHS = (0, 4, 8, 16, 32)


def run(planner: Planner, rounds: int, chance: float, base: float, slope: float, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Play rounds whose clock is base + slope * length and whose drafts are each kept with `chance` (deterministic pattern)."""
    now: list[float] = [0.0]
    chosen = []
    monkeypatch.setattr(planning, "perf_counter", lambda: now[0])
    planner.begin()
    for number in range(rounds):
        length = planner.choose()
        chosen.append(length)
        run_length, mass = 0, (number * 0.618) % 1.0
        while run_length < length and mass < chance ** (run_length + 1):
            run_length += 1
        planner.note([run_length])
        now[0] += base + slope * length
    return chosen


def test_long_drafts_where_they_are_kept_and_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly free drafts that are nearly always kept: the longest candidate wins."""
    assert run(Planner(LENGTHS, 8), 200, 0.98, 1.0, 0.001, monkeypatch)[-60:].count(32) > 30


def test_short_drafts_where_long_ones_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the drafts are kept and each costs a tenth of a round: a few tokens ahead, no more."""
    assert run(Planner(LENGTHS, 8), 200, 0.5, 1.0, 0.1, monkeypatch)[-60:].count(4) > 30


def test_speculation_that_does_not_pay_is_switched_off_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept and drafts cost time: length 0, with a probe now and then, and a note that says so."""
    planner = Planner(LENGTHS, 8)
    chosen = run(planner, 400, 0.0, 1.0, 0.1, monkeypatch)
    assert chosen[100:].count(0) > 200
    assert any(length > 0 for length in chosen[150:])
    assert "did not pay" in planner.notes[0]


def test_a_change_of_mind_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that stop being kept: the planner comes down again."""
    planner = Planner(LENGTHS, 8)
    assert run(planner, 200, 0.98, 1.0, 0.001, monkeypatch)[-60:].count(32) > 30
    assert run(planner, 600, 0.0, 1.0, 0.1, monkeypatch)[-60:].count(0) > 30


def test_seconds_that_somebody_else_spends_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A callback that takes long after some rounds changes no choice; the control, which does not tell, chooses otherwise."""

    def choices(telling: bool, pause: float) -> list[int]:
        now, chosen, planner = [0.0], [], Planner(LENGTHS, 8)
        monkeypatch.setattr(planning, "perf_counter", lambda: now[0])
        for number in range(300):
            length = planner.choose()
            chosen.append(length)
            planner.note([length // 2])
            spent = pause if length > 8 and number % 3 else 0.0
            now[0] += 1.0 + 0.01 * length + spent
            if telling:
                planner.skip(spent)
        return chosen

    assert choices(True, 50.0) == choices(True, 0.0) != choices(False, 50.0)


def test_only_seeded_decoding_may_follow_the_clock() -> None:
    """Timing must never change a picture."""
    with pytest.raises(ValueError, match="clock"):
        JacobiDrafter(8, 16, seeded=False, planner=Planner(LENGTHS, 8))
