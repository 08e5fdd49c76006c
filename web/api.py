"""The demo's API: `/race`, `/explore` and `/compare` for gradio_client and plain HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gradio as gr

from ..bench.cases import parse_case
from ..decoding.heatmap import KINDS
from .streaming import Throttle
from .studio import ERRORS, MOST_REPEATS, Job, Stops, Studio, race_report, record, sentence

# A program wants the result: progress now and then is enough.
THROTTLE = {"share": 0.05, "least": 0.25}


class Api:
    """Named endpoints.

    Args:
        studio: does the work. stops: who is drawing. presets: (label, specification) of methods. drawing: the events' queue.
    """

    def __init__(self, studio: Studio, stops: Stops, presets: Sequence[tuple[str, str]], drawing: dict[str, Any]):
        self.studio, self.stops, self.presets, self.drawing = studio, stops, presets, drawing

    def add(self) -> None:
        """Three named endpoints over components that nobody sees; they name and describe the parameters."""
        defaults = self.studio.defaults
        with gr.Group(visible=False):

            def inputs() -> list[Any]:
                return [
                    gr.Number(defaults["guidance_scale"], label="guidance scale, from 1 = off"),
                    gr.Number(defaults["temperature"], label="temperature, from 0 = greedy"),
                    gr.Number(defaults["top_k"], label="top-k, the most probable codes kept, 0 = all", precision=0),
                    gr.Number(defaults["top_p"], label="top-p, the probability mass kept, up to 1 = all"),
                    gr.Textbox("", label="negative prompt, what guidance leads away from"),
                    gr.Textbox("", label="size in pixels, 'height x width' (default: the model's first)"),
                ]

            def subject() -> list[Any]:
                return [
                    gr.Textbox(None, label="prompt: what to draw"),
                    gr.Number(0, label="seed: the same one draws the same picture", precision=0),
                ]

            def method() -> Any:
                return gr.Textbox(self.presets[0][1], label="method, or method:option=value,option=value")

            def pictures(*labels: str) -> list[Any]:
                return [gr.Image(label=label, format="png", type="pil") for label in labels]

            gr.Button().click(
                self.race,
                [*subject(), method(), *inputs()],
                [*pictures("plain decoding's picture", "the method's picture", "token map"), gr.JSON(label="report")],
                api_name="race",
                api_description="Draw with plain decoding and with a method from one seed, in turns. Returns both pictures, the "
                "accepted-token map, and a report: speed_up, identical (checked on the tokens), seconds, tokens and traces.",
                **self.drawing,
            )
            gr.Button().click(
                self.explore,
                [*subject(), method(), *inputs(), gr.Textbox("run", label=f"kind of token map: {', '.join(KINDS)}")],
                [*pictures("picture", "token map"), gr.JSON(label="report")],
                api_name="explore",
                api_description="Draw one picture. Returns it, its token map, and a report: seconds, tokens and the whole trace.",
                **self.drawing,
            )
            methods = gr.Textbox(
                " ".join(spec for _, spec in self.presets[:4]),
                label="methods, separated by spaces: method:option=value,option=value …",
            )
            gr.Button().click(
                self.compare,
                [*subject(), methods, gr.Number(1, label=f"repeats, 1 to {MOST_REPEATS}", precision=0), *inputs()],
                [*pictures("contact sheet"), gr.JSON(label="report")],
                api_name="compare",
                api_description="Draw with plain decoding and with each method. Returns a contact sheet and the table as JSON.",
                **self.drawing,
            )

    def _called(self, request: gr.Request, count: int, work: Callable[..., Iterator[Job]]) -> Iterator[tuple[list[Any], Job]]:
        """Jobs of an API call; an error becomes one sentence for the caller."""
        with self.stops.run(request.session_hash) as stop:
            try:
                for job in work(stop, Throttle(**THROTTLE)):
                    drawn = [{"tokens": frame.tokens, "of": frame.total, "seconds": frame.seconds} for frame in job.frames]
                    yield [*(None for _ in range(count)), {"progress": drawn}], job
            except ERRORS as error:
                raise gr.Error(sentence(error), print_exception=False) from error

    def race(
        self,
        prompt: str,
        seed: int,
        method: str,
        guidance_scale: float | None,
        temperature: float | None,
        top_k: int | None,
        top_p: float | None,
        negative_prompt: str,
        size: str,
        request: gr.Request,
    ) -> Iterator[list[Any]]:
        """Both pictures, the method's token map, and the report."""
        settings = (guidance_scale, temperature, top_k, top_p, negative_prompt, size)

        def work(stop: Any, throttle: Throttle) -> Iterator[Job]:
            yield from self.studio.race(prompt, seed, method, self.studio.call(settings), stop, throttle)

        for progress, job in self._called(request, 3, work):
            if job.over:
                plain, fast = job.frames
                token_map = job.outputs[1].traces[0].heatmap(job.outputs[1].images[0])
                yield [plain.picture, fast.picture, token_map, race_report(prompt, int(seed), job)]
            else:
                yield progress

    def explore(
        self,
        prompt: str,
        seed: int,
        method: str,
        guidance_scale: float | None,
        temperature: float | None,
        top_k: int | None,
        top_p: float | None,
        negative_prompt: str,
        size: str,
        kind: str,
        request: gr.Request,
    ) -> Iterator[list[Any]]:
        """The picture, its token map, and the report."""
        settings = (guidance_scale, temperature, top_k, top_p, negative_prompt, size)

        def work(stop: Any, throttle: Throttle) -> Iterator[Job]:
            if kind not in KINDS:
                raise ValueError(f"the kind of a token map must be one of {', '.join(KINDS)}, got {kind!r}")
            yield from self.studio.explore(prompt, seed, parse_case(method), self.studio.call(settings), stop, throttle)

        for progress, job in self._called(request, 2, work):
            if job.over:
                frame, output = job.frames[0], job.outputs[0]
                report = {"prompt": prompt, "seed": int(seed), **record(frame, output, full=True)}
                yield [frame.picture, output.traces[0].heatmap(output.images[0], kind), report]
            else:
                yield progress

    def compare(
        self,
        prompt: str,
        seed: int,
        methods: str,
        repeats: int,
        guidance_scale: float | None,
        temperature: float | None,
        top_k: int | None,
        top_p: float | None,
        negative_prompt: str,
        size: str,
        request: gr.Request,
    ) -> Iterator[list[Any]]:
        """The contact sheet and the table."""
        settings = (guidance_scale, temperature, top_k, top_p, negative_prompt, size)

        def work(stop: Any, throttle: Throttle) -> Iterator[Job]:
            yield from self.studio.compare(prompt, seed, methods.split(), repeats, self.studio.call(settings), stop, throttle)

        for progress, job in self._called(request, 1, work):
            if job.result is not None:
                yield [job.result.sheet(), job.result.to_dict()]
            else:
                yield progress
