"""Drawings that are held, raced and ended; pipelines that are lent."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from foredraft.bench.cases import Case
from foredraft.web import streaming
from foredraft.web.streaming import AR, Drawing, Models, Throttle, committed, race

from ..tiny import PROMPTS, sentence

SJD = Case("sjd")


def alone(models: Models, case: Case, prompt: str, seed: int = 0) -> torch.Tensor:
    """Codes as the pipeline draws them by itself."""
    with models.lend(case.method) as pipeline:
        return pipeline(prompt, generator=torch.Generator().manual_seed(seed), output_type="latent", **case.options).tokens


def begin(models: Models, case: Case, prompt: str = "fox", **call: Any) -> Any:
    return models.drawings([case], prompt, 0, call)


@pytest.mark.parametrize("case", [Case(AR), SJD, Case("sjd", {"rule": "exact"}), Case("speculative", {"tree": "dynamic"})])
def test_held_after_every_round_it_draws_what_the_pipeline_draws(models: Models, case: Case) -> None:
    with begin(models, case, height=32, width=32) as (drawing,):
        held = 1
        while not drawing.advance(0.0):
            frame = drawing.frame()
            assert len(frame.rounds) == held and 0 < frame.tokens <= 64 and sum(frame.rounds) == frame.tokens
            assert frame.picture.size == (32, 32) and frame.trace is None
            held += 1
        frame = drawing.frame()
        assert frame.complete and frame.rounds == committed(frame.trace) and len(frame.rounds) == held - 1
        with models.lend(case.method) as pipeline:
            call = {"height": 32, "width": 32, **case.options}
            whole = pipeline("fox", generator=torch.Generator().manual_seed(0), **call)
        assert torch.equal(drawing.output.tokens, whole.tokens)


def test_what_is_not_decoded_is_clear(models: Models) -> None:
    with begin(models, Case(AR), height=32, width=32) as (drawing,):
        for _ in range(9):
            drawing.advance(0.0)
        alpha = drawing.frame().picture.getchannel("A").resize((8, 8), 0)
        assert list(alpha.tobytes()) == [255] * 9 + [0] * 55


def test_stop_ends_within_one_round_and_the_pipeline_goes_on(models: Models) -> None:
    for case in (Case(AR), SJD):
        with begin(models, case, height=32, width=32) as (drawing,):
            drawing.advance(0.0)
            drawing.advance(0.0)
            drawing.stop()
            frame = drawing.frame()
            assert frame.over and not frame.complete and len(frame.rounds) == frame.trace.rounds == 2
            pipeline = drawing.pipeline
        assert pipeline in models._free[case.method] and not pipeline.interrupt
        generator = torch.Generator().manual_seed(0)
        tokens = pipeline("fox", generator=generator, output_type="latent").tokens
        assert torch.equal(tokens, alone(models, case, "fox"))


def test_close_before_the_first_round_draws_nothing(models: Models) -> None:
    calls = []
    with models.lend("sjd") as pipeline:
        drawing = Drawing(pipeline, SJD, "fox", 0, {"callback_on_step_end_tensor_inputs": ["tokens"]})
        drawing._on_round = lambda *args: calls.append(args)  # type: ignore[method-assign]
        drawing.close()
    assert not calls and drawing.finished and drawing.output is None


def test_an_abandoned_race_gives_everything_back(models: Models) -> None:
    """A visitor who leaves closes the generator; nothing keeps drawing."""
    before = {name: len(free) for name, free in models._free.items()}
    threads = threading.active_count()

    def visitor() -> Any:
        with models.drawings([Case(AR), SJD], "fox", 0, {"height": 32, "width": 32}) as drawings:
            yield from race(drawings, threading.Event(), Throttle(share=0.99, least=0.0))

    watching = visitor()
    next(watching)
    assert sum(len(free) for free in models._free.values()) == sum(before.values()) - 2
    watching.close()
    assert {name: len(free) for name, free in models._free.items()} == before
    assert threading.active_count() == threads


def test_errors_come_out_of_advance_and_leave_the_pipeline(models: Models) -> None:
    with pytest.raises(ValueError) as error, begin(models, SJD, "") as (drawing,):
        drawing.advance()
    sentence(error, "empty")
    with pytest.raises(ValueError) as error, begin(models, SJD, "foxx") as (drawing,):
        drawing.advance()
    sentence(error, "foxx", "fox")
    with pytest.raises(ValueError) as error, models.lend("sjdd"):
        pass
    sentence(error, "sjdd", "sjd")
    assert alone(models, SJD, "fox").shape == (1, 4, 4)


def test_a_race_keeps_both_equally_far_in_time_and_equal_in_tokens(models: Models) -> None:
    with models.drawings([Case(AR), SJD], "fox", 3, {"height": 32, "width": 32}) as drawings:
        for frames in race(drawings, threading.Event(), Throttle(share=0.99, least=0.0)):
            last = frames
        plain, fast = drawings
        assert all(frame.complete for frame in last)
        assert torch.equal(plain.output.tokens, fast.output.tokens)


def test_a_stopped_race_ends_both(models: Models) -> None:
    stop = threading.Event()
    stop.set()
    with models.drawings([Case(AR), SJD], "fox", 0, {"height": 32, "width": 32}) as drawings:
        (frames,) = race(drawings, stop, Throttle())
        assert [len(frame.rounds) for frame in frames] == [1, 1]
        assert all(frame.over and not frame.complete for frame in frames)


def test_looking_costs_no_seconds(models: Models) -> None:
    """While a drawing is held its clock stands, and its trace knows how long it was held."""
    with begin(models, Case(AR)) as (drawing,):
        for _ in range(4):
            drawing.advance(0.0)
            before = drawing.seconds
            time.sleep(0.1)
            assert drawing.seconds == before
        while not drawing.advance():
            pass
        trace = drawing.output.traces[0]
    assert trace.parts["callback"] >= 0.4
    assert trace.own_seconds == pytest.approx(trace.seconds - trace.parts["callback"])
    assert trace.own_seconds < trace.seconds - 0.39 and drawing.seconds == pytest.approx(trace.own_seconds, abs=0.35)


def test_throttle_keeps_to_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(streaming, "perf_counter", lambda: now[0])
    throttle = Throttle(share=0.25, least=0.5)
    assert throttle.due()
    for cost, rest in ((0.4, 1.2), (0.01, 0.5)):
        with throttle.showing():
            now[0] += cost
        now[0] += rest - 0.001
        assert not throttle.due(), "a quarter of the time at most, and never more often than every half second"
        now[0] += 0.002
        assert throttle.due()
    assert throttle.seconds == pytest.approx(0.41)


@pytest.mark.parametrize("case", [SJD, Case("sjd", {"window": "auto"}), Case("speculative")], ids=lambda case: case.name)
def test_drawings_at_once_are_those_drawn_alone(models: Models, case: Case) -> None:
    """Shared models, own pipelines: threads that draw at the same time do not touch each other's pictures."""
    wanted = [alone(models, case, prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    got: list[torch.Tensor | None] = [None] * len(PROMPTS)

    def visit(number: int) -> None:
        with models.drawings([case], PROMPTS[number], number, {}) as (drawing,):
            while not drawing.advance(0.0):
                time.sleep(0)
            got[number] = drawing.output.tokens

    visitors = [threading.Thread(target=visit, args=(number,)) for number in range(len(PROMPTS))]
    for visitor in visitors:
        visitor.start()
    for visitor in visitors:
        visitor.join(60)
    assert all(one is not None and torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


def test_lent_pipelines_are_different_objects_over_the_same_models(models: Models) -> None:
    with models.lend("sjd") as one, models.lend("sjd") as other:
        assert one is not other and one.target is other.target and one.codec is other.codec
    with models.lend("sjd") as again:
        assert again in (one, other)
