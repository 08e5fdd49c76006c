"""Drawing in slices: a call of a pipeline that can be held after any round, looked at, and ended; and who may use which pipeline.

Watching must not cost the speed that is watched. A drawing is held while a page is made from it, so its seconds count only its
own work; `Throttle` keeps the pages to a fixed share of the time and adds theirs up apart.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from ..bench.cases import Case, Family, method_class
from ..decoding.trace import Trace
from ..pipelines import methods

if TYPE_CHECKING:
    from PIL.Image import Image

AR = "ar"
SLICE = 0.03
"""Seconds a drawing runs before another one may: several rounds, so that handing over costs nothing one could measure."""


@dataclass
class Frame:
    """One drawing at one moment.

    seconds: its own work so far; tokens of total are committed; rounds: how many tokens each round committed; trace: once it is
    over; picture: RGBA while it is incomplete (what is not decoded is clear), None before anything is there.
    """

    case: Case
    grid: tuple[int, int]
    seconds: float
    tokens: int
    total: int
    rounds: list[int]
    picture: Image | None
    trace: Trace | None

    @property
    def over(self) -> bool:
        """Whether it ended, complete or stopped."""
        return self.trace is not None

    @property
    def complete(self) -> bool:
        """Whether every token is there."""
        return self.trace is not None and self.trace.complete

    @property
    def tokens_per_forward(self) -> float:
        """TPF; while it runs, tokens per round."""
        if self.trace is not None:
            return self.trace.tokens_per_forward
        return self.tokens / max(1, len(self.rounds))

    @property
    def forwards(self) -> int:
        """Target forwards; while it runs, rounds."""
        return len(self.rounds) if self.trace is None else self.trace.target_forwards

    @property
    def rate(self) -> float:
        """Tokens per second of own work."""
        return self.tokens / self.seconds if self.seconds else 0.0


class Drawing:
    """One picture, drawn by a thread of its own that runs only inside `advance`.

    Args:
        pipeline: used by nobody else until `close`.
        case: the method (for its options). prompt, seed, call: as in the pipeline's call; one picture.
    """

    def __init__(self, pipeline: Any, case: Case, prompt: str, seed: int, call: dict[str, Any]):
        self.pipeline, self.case, self.output, self.finished, self.seconds = pipeline, case, None, False, 0.0
        self._arguments = {**call, **case.call, **case.options}
        self._prompt, self._seed = prompt, seed
        self._error: BaseException | None = None
        self._stopping = self._closing = False
        self._rounds: list[int] = []
        self._tokens: torch.Tensor | None = None
        self._resumed = self._until = 0.0
        self._go, self._held = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name="foredraft-drawing", daemon=True)
        self._thread.start()

    def advance(self, seconds: float = SLICE) -> bool:
        """Draw for about `seconds`, whole rounds and at least one; returns whether the drawing is over.

        Raises what the pipeline raises: ValueError or TypeError in one sentence, before a model ran.
        """
        if not self.finished:
            self._until = perf_counter() + seconds
            self._go.release()
            self._held.acquire()
        if self._error is not None:
            raise self._error
        return self.finished

    def stop(self) -> None:
        """End within one round; what was drawn so far stays."""
        self._stopping = True
        while not self.finished:
            self.advance()

    def close(self) -> None:
        """End within one round, whatever happened; one that has not begun never does."""
        self._stopping = self._closing = True
        while not self.finished:
            self._go.release()
            self._held.acquire()
        self._thread.join()

    @torch.inference_mode()
    def frame(self) -> Frame:
        """What is there now."""
        grid = self._grid()
        total, tokens = grid[0] * grid[1], sum(self._rounds)
        if self.output is None:
            return Frame(self.case, grid, self.seconds, tokens, total, list(self._rounds), self._partial(grid, tokens), None)
        trace: Trace = self.output.traces[0]
        picture = self.output.images[0]
        if not trace.complete:
            picture = self._masked(picture, grid, trace.tokens)
        return Frame(self.case, grid, trace.own_seconds, trace.tokens, total, committed(trace), picture, trace)

    def _grid(self) -> tuple[int, int]:
        return self.pipeline._grid(self._arguments.get("height"), self._arguments.get("width"))

    def _partial(self, grid: tuple[int, int], count: int) -> Image | None:
        """The picture so far. Missing tokens repeat the known ones, so that the codec's norms see nothing foreign."""
        if self._tokens is None or not count:
            return None
        known = self._tokens[:1, :count]
        total = grid[0] * grid[1]
        filled = known.repeat(1, -(-total // count))[:, :total]
        return self._masked(self.pipeline._pictures(filled.view(1, *grid), "pil")[0], grid, count)

    @staticmethod
    def _masked(picture: Image, grid: tuple[int, int], count: int) -> Image:
        """The picture with the tokens from `count` on (raster order) made clear."""
        from PIL import Image as Images

        height, width = grid
        cells = bytes(255 if cell < count else 0 for cell in range(height * width))
        mask = Images.frombytes("L", (width, height), cells).resize(picture.size, Images.Resampling.NEAREST)
        picture = picture.convert("RGBA")
        picture.putalpha(mask)
        return picture

    def _run(self) -> None:
        self._go.acquire()
        self._resumed = perf_counter()
        try:
            if not self._closing:
                generator = torch.Generator().manual_seed(self._seed)
                call = {**self._arguments, "generator": generator, "callback_on_step_end": self._on_round}
                self.output = self.pipeline(self._prompt, **call)
        except BaseException as error:  # handed to whoever waits in `advance`
            self._error = error
        finally:
            self.seconds += perf_counter() - self._resumed
            self.finished = True
            self._tokens = None
            self._held.release()

    def _on_round(self, pipeline: Any, number: int, count: int, tensors: dict[str, Any]) -> None:
        self._rounds.append(count - sum(self._rounds))
        if not self._stopping and perf_counter() < self._until:
            return
        self.seconds += perf_counter() - self._resumed
        if not self._stopping:
            self._tokens = tensors["tokens"]
            self._held.release()
            self._go.acquire()
        pipeline._interrupt = self._stopping
        self._resumed = perf_counter()


def committed(trace: Trace) -> list[int]:
    """How many tokens each round of a trace committed."""
    counts = [0] * trace.rounds
    for row in trace.round:
        for number in row:
            if number >= 0:
                counts[number] += 1
    return counts


class Throttle:
    """When to show something: never more than `share` of the time, never more often than every `least` seconds.

    seconds: what showing took so far.
    """

    def __init__(self, share: float = 0.15, least: float = 0.1):
        self.share, self.least, self.seconds = share, least, 0.0
        self._last, self._cost = float("-inf"), 0.0

    def due(self) -> bool:
        """Whether the next frame may be shown."""
        return perf_counter() - self._last >= max(self.least, self._cost * (1 / self.share - 1))

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Around the making and sending of a frame."""
        begun = perf_counter()
        try:
            yield
        finally:
            self._last = perf_counter()
            self._cost = self._last - begun
            self.seconds += self._cost


class Models:
    """One loaded family, and pipelines over it that are lent to one drawing at a time.

    The models are shared and never change; a pipeline (its interrupt flag, its planners) belongs to one drawing while it is lent.

    Args:
        family: the components. Every method is tried; `names` holds those that this family can run, `refused` why the others not.
    """

    def __init__(self, family: Family):
        self.family = family
        self._free: dict[str, list[Any]] = {}
        self._first: dict[str, Any] = {}
        self._warm: set[str] = set()
        self._lock = threading.Lock()
        self.refused: dict[str, str] = {}
        for name in methods():
            try:
                pipeline = family.pipeline(name)
            except (ValueError, TypeError, OSError) as error:
                if name == AR:
                    raise
                self.refused[name] = " ".join(str(error).split())
                continue
            self._first[name], self._free[name] = pipeline, [pipeline]

    @property
    def names(self) -> list[str]:
        """Methods that this family can run, plain decoding first."""
        return list(self._first)

    def any(self) -> Any:
        """A pipeline to ask about the family; do not draw with it."""
        return self._first[AR]

    @contextmanager
    def lend(self, method: str) -> Iterator[Any]:
        """A pipeline of a method that nobody else uses meanwhile. Raises ValueError: this family has no such method."""
        if method not in self._first:
            method_class(method)
            raise ValueError(f"this model cannot run {method}: choose one of {', '.join(self.names)}")
        with self._lock:
            pipeline = self._free[method].pop() if self._free[method] else self._another(method)
        try:
            yield pipeline
        finally:
            with self._lock:
                self._free[method].append(pipeline)

    def _another(self, method: str) -> Any:
        first = self._first[method]
        pipeline = type(first).from_pipe(first)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def warm_up(self, case: Case, prompt: str, call: dict[str, Any]) -> None:
        """The first rounds of a case, once, so that no first-use cost falls into anybody's seconds."""
        if case.name in self._warm:
            return
        with self.lend(case.method) as pipeline:
            drawing = Drawing(pipeline, case, prompt, 0, call)
            try:
                drawing.advance(0.0)
                drawing.advance(0.0)
            finally:
                drawing.close()
        self._warm.add(case.name)

    @contextmanager
    def drawings(self, cases: Sequence[Case], prompt: str, seed: int, call: dict[str, Any]) -> Iterator[list[Drawing]]:
        """Drawings that have not begun, one per case; at the end they are ended and the pipelines given back."""
        for case in cases:
            self.warm_up(case, prompt, call)
        with ExitStack() as stack:
            drawn = []
            for case in cases:
                drawn.append(Drawing(stack.enter_context(self.lend(case.method)), case, prompt, seed, call))
                stack.callback(drawn[-1].close)
            yield drawn


def race(drawings: Sequence[Drawing], stop: threading.Event, throttle: Throttle, turn: float = SLICE) -> Iterator[list[Frame]]:
    """Run drawings in turns, always the one that has used the least time of its own, and show all of them now and then.

    So they meet the same machine at the same moment, and at every frame they are equally far in time. The last frame is yielded
    when all are over. stop: ends them within one round. turn: seconds that one draws before the next may.
    """
    running = list(drawings)
    while running:
        first = min(running, key=lambda drawing: drawing.seconds)
        if stop.is_set():
            first.stop()
        elif not first.advance(turn) and throttle.due():
            with throttle.showing():
                yield [drawing.frame() for drawing in drawings]
        running = [drawing for drawing in running if not drawing.finished]
    with throttle.showing():
        frames = [drawing.frame() for drawing in drawings]
    yield frames
