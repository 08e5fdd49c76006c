"""What the page and the API do, over one set of models. No Gradio here: every job is a generator of what there is to show."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from ..bench.cases import Case, parse_case
from ..bench.compare import Comparison, is_seeded, tabulate
from .streaming import AR, SLICE, Drawing, Frame, Models, Throttle, race

ERRORS = (ValueError, TypeError, OSError, FloatingPointError)
SETTINGS = ("guidance_scale", "temperature", "top_k", "top_p", "negative_prompt", "size")
MOST_REPEATS = 5


def sentence(error: BaseException) -> str:
    """An error in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def whole(seed: Any) -> int:
    """A seed. Raises ValueError for anything but a whole number."""
    if isinstance(seed, bool) or not isinstance(seed, int | float) or seed != seed or int(seed) != seed:
        raise ValueError(f"the seed must be a whole number, got {seed!r}")
    if not -(2**63) <= int(seed) < 2**63:
        raise ValueError(f"the seed must fit into 64 bits, got {int(seed)}")
    return int(seed)


class Stops:
    """Who is drawing: the runs of every visitor, so that they can be ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[str | None, set[threading.Event]] = defaultdict(set)

    @contextlib.contextmanager
    def run(self, visitor: str | None) -> Iterator[threading.Event]:
        """An event for one run of a visitor."""
        stop = threading.Event()
        with self._lock:
            self._runs[visitor].add(stop)
        try:
            yield stop
        finally:
            with self._lock:
                self._runs[visitor].discard(stop)
                if not self._runs[visitor]:
                    del self._runs[visitor]

    def stop(self, visitor: str | None) -> None:
        """End the visitor's runs within a round."""
        with self._lock:
            for stop in self._runs.get(visitor, ()):
                stop.set()


class Job:
    """What one run has come to. frames: of its drawings so far; over: whether all have ended; outputs: theirs, then.

    turn of turns: which repeat of a comparison this is; result: the comparison, unless it was stopped; showing: seconds that went
    into showing, which no drawing's seconds contain.
    """

    def __init__(self, turns: int = 1) -> None:
        self.turn, self.turns = 1, turns
        self.frames: list[Frame] = []
        self.outputs: list[Any] = []
        self.over = False
        self.result: Comparison | None = None
        self.showing = 0.0

    def finish(self, drawings: Sequence[Drawing]) -> None:
        """Keep the outputs if every drawing is over."""
        self.over = all(drawing.finished for drawing in drawings)
        if self.over:
            self.outputs = [drawing.output for drawing in drawings]


class Studio:
    """Race, explore and compare.

    Every job yields its `Job` whenever there is something new to show, and a last time when it is over. Closing the generator, or
    setting `stop`, ends the decoding within one round and leaves the pipelines reusable. turn: seconds that one drawing works
    before the next may.
    """

    turn = SLICE

    def __init__(self, models: Models):
        self.models = models
        pipeline = models.any()
        fallbacks = (("guidance_scale", 1.0), ("temperature", 1.0), ("top_k", 0), ("top_p", 1.0))
        self.defaults = {name: pipeline.family_default(name, fallback) for name, fallback in fallbacks}
        cell = pipeline.codec.config.downsample
        self.sizes = [f"{height * cell} x {width * cell}" for height, width in pipeline.family_default("grids", [])]

    def examples(self, prompts: Sequence[str]) -> list[str]:
        """Those of the prompts that this family understands."""
        pipeline, known = self.models.any(), []
        for prompt in prompts:
            with contextlib.suppress(*ERRORS):
                pipeline.target.encode(pipeline.components, [prompt], None, False, pipeline._grid(None, None))
                known.append(prompt)
        return known

    def call(self, values: Sequence[Any]) -> dict[str, Any]:
        """Values in the order of `SETTINGS` as arguments of a pipeline's call; empty ones are the family's own."""
        given = {name: value for name, value in zip(SETTINGS, values, strict=True) if value not in (None, "")}
        size = given.pop("size", None)
        if size is not None:
            if size not in self.sizes:
                raise ValueError(f"this model draws {', '.join(self.sizes)} pixels (height x width), got {size}")
            given["height"], given["width"] = (int(side) for side in size.split(" x "))
        return given

    def race(
        self, prompt: str, seed: Any, method: str, call: dict[str, Any], stop: threading.Event, throttle: Throttle
    ) -> Iterator[Job]:
        """Plain decoding and a method, in turns."""
        job = Job()
        with self.models.drawings([Case(AR), parse_case(method)], prompt, whole(seed), call) as drawings:
            for job.frames in race(drawings, stop, throttle, self.turn):
                job.finish(drawings)
                job.showing = throttle.seconds
                yield job

    def explore(
        self, prompt: str, seed: Any, case: Case, call: dict[str, Any], stop: threading.Event, throttle: Throttle
    ) -> Iterator[Job]:
        """One picture."""
        job = Job()
        with self.models.drawings([case], prompt, whole(seed), call) as drawings:
            for job.frames in race(drawings, stop, throttle, self.turn):
                job.finish(drawings)
                yield job

    def compare(
        self,
        prompt: str,
        seed: Any,
        methods: Sequence[str],
        repeats: Any,
        call: dict[str, Any],
        stop: threading.Event,
        throttle: Throttle,
    ) -> Iterator[Job]:
        """Plain decoding and every method, in turns, `repeats` times."""
        if not isinstance(repeats, int) or not 1 <= repeats <= MOST_REPEATS:
            raise ValueError(f"repeats must be a whole number between 1 and {MOST_REPEATS}, got {repeats!r}")
        if not methods:
            raise ValueError("no method is chosen: choose at least one to compare with plain decoding")
        named = {case.name: case for case in [Case(AR), *(parse_case(method) for method in methods)]}
        cases = list(named.values())
        seconds: list[list[float]] = [[] for _ in cases]
        outputs: list[Any] = []
        job = Job(repeats)
        for job.turn in range(1, repeats + 1):
            with self.models.drawings(cases, prompt, whole(seed), call) as drawings:
                for job.frames in race(drawings, stop, throttle, self.turn):
                    job.finish(drawings)
                    job.showing = throttle.seconds
                    job.over = job.over and not all(frame.complete for frame in job.frames)
                    yield job
                if job.over:
                    return
                outputs = outputs or job.outputs
                for times, drawing in zip(seconds, drawings, strict=True):
                    times.append(drawing.output.traces[0].own_seconds)
        job.result, job.over = tabulate(prompt, whole(seed), cases, seconds, outputs), True
        yield job


def record(frame: Frame, output: Any, full: bool = False) -> dict[str, Any]:
    """A finished drawing for JSON: method, figures, codes; full: the maps too."""
    trace = json.loads(output.traces[0].to_json()) if full else output.traces[0].summary()
    return {
        "method": frame.case.method,
        "options": frame.case.options,
        "seconds": frame.seconds,
        "tokens": output.tokens[0].tolist(),
        "trace": trace,
    }


def race_report(prompt: str, seed: int, job: Job) -> dict[str, Any]:
    """What a race has shown. identical: whether every token of the two pictures is equal; seeded: whether they had to be."""
    plain, fast = job.frames
    whole_pictures = plain.complete and fast.complete
    return {
        "prompt": prompt,
        "seed": seed,
        "complete": whole_pictures,
        "speed_up": plain.seconds / fast.seconds if whole_pictures else None,
        "tokens_per_forward": fast.tokens_per_forward,
        "identical": bool((job.outputs[0].tokens == job.outputs[1].tokens).all()) if whole_pictures else None,
        "seeded": is_seeded(fast.case),
        "streaming_seconds": job.showing,
        "plain": record(plain, job.outputs[0]),
        "method": record(fast, job.outputs[1]),
    }
