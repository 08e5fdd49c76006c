"""The web demo: Race, Explore, Compare. `foredraft demo` starts it; it needs the optional gradio."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from ..bench.cases import Case, Family, method_class
from ..decoding.heatmap import KINDS
from . import controls, page
from .api import Api
from .maps import SHORT, download
from .streaming import AR, Models, Throttle
from .studio import ERRORS, MOST_REPEATS, Job, Stops, Studio, sentence

EXAMPLES = ("red apple on blue", "owl on yellow", "strawberry on green", "birthday cake on pink", "polar bear", "fox")
HEADER = """<header class="fd-header"><h1>Foredraft</h1><p>Autoregressive image models draw one token at a time, and each costs
a full pass through the model. <b>Speculative decoding</b> drafts several tokens ahead, lets the model check them all in one pass
and keeps what holds: fewer passes, and under rule <i>seeded</i> the very same picture.</p></header>"""
IDLE = '<div class="fd-idle">{}</div>'
WAITING = IDLE.format("Waiting for your turn. Visitors’ drawings run one after the other, so that the seconds mean something.")
# The page's own events are no part of the API; those that draw share one queue, so that a timed drawing has the machine.
PRIVATE: dict[str, Any] = {"api_visibility": "private"}
INSTANT: dict[str, Any] = {**PRIVATE, "queue": False, "show_progress": "hidden"}


class Page:
    """The Blocks and its handlers. at_once: how many drawings the server runs side by side; more than one blurs the timing."""

    def __init__(self, studio: Studio, at_once: int = 1):
        self.studio, self.stops = studio, Stops()
        self.drawing: dict[str, Any] = {"concurrency_id": "drawing", "concurrency_limit": at_once}
        # What a visitor meets first is the method that changes no picture.
        names = sorted(studio.models.names, key=lambda name: name != "sjd")
        self.presets = controls.presets(names)
        self.methods = [name for name in names if name != AR] + [AR]
        with gr.Blocks(title="Foredraft", analytics_enabled=False, delete_cache=(3600, 3600)) as self.blocks:
            gr.HTML(HEADER)
            self._prompt_bar()
            with gr.Tabs(elem_classes="fd-tabs"):
                with gr.Tab("Race", id="race"):
                    self._race_tab()
                with gr.Tab("Explore", id="explore"):
                    self._explore_tab()
                with gr.Tab("Compare", id="compare"):
                    self._compare_tab()
            Api(studio, self.stops, self.presets, self.drawing).add()
            self.blocks.unload(self._stop)

    # -- what every tab uses -----------------------------------------------------------------------------------------

    def _prompt_bar(self) -> None:
        defaults, examples = self.studio.defaults, self.studio.examples(EXAMPLES)
        with gr.Row(elem_classes="fd-prompt"):
            self.prompt = gr.Textbox(
                examples[0] if examples else "",
                label="Prompt",
                placeholder="what to draw",
                scale=6,
                min_width=220,
                elem_id="prompt",
            )
            with gr.Row(elem_classes="fd-seed"):
                self.seed = gr.Number(0, label="Seed", precision=0, min_width=110, elem_id="seed")
                dice = gr.Button("New seed", scale=0, min_width=110, elem_classes="fd-dice")
        dice.click(None, None, self.seed, js="() => Math.floor(Math.random() * 2 ** 31)", **PRIVATE)
        # Enter draws on the tab that is open.
        press = "() => { [...document.querySelectorAll('.fd-run')].find(b => b.offsetParent !== null)?.click() }"
        self.prompt.submit(None, None, None, js=press, **PRIVATE)
        with gr.Row(elem_classes="fd-chips"):
            for text in examples:
                chip = gr.Button(text, size="sm", min_width=60, scale=0)
                chip.click(None, None, self.prompt, js=f"() => {json.dumps(text)}", **PRIVATE)
        with gr.Accordion("Sampling", open=False, elem_id="sampling"):
            with gr.Row():
                guidance = gr.Slider(
                    1,
                    10,
                    defaults["guidance_scale"],
                    step=0.1,
                    label="Guidance",
                    info="1 is off",
                    min_width=200,
                    elem_id="guidance",
                )
                heat = gr.Slider(0, 2, defaults["temperature"], step=0.05, label="Temperature", info="0 is greedy", min_width=200)
                top_k = gr.Number(defaults["top_k"], label="Top-k", info="codes kept, 0 is all", precision=0, min_width=130)
                top_p = gr.Slider(0.05, 1, defaults["top_p"], step=0.05, label="Top-p", info="1 is all", min_width=200)
            with gr.Row():
                negative = gr.Textbox(
                    label="Negative prompt", info="what guidance leads away from", scale=3, min_width=220, elem_id="negative"
                )
                sizes = self.studio.sizes
                size = gr.Dropdown(
                    sizes, value=sizes[0] if sizes else None, label="Size", info="height x width", visible=len(sizes) > 1, scale=1
                )
        self.settings = [guidance, heat, top_k, top_p, negative, size]

    def _buttons(self, label: str, name: str) -> tuple[gr.Button, gr.Button]:
        run = gr.Button(label, variant="primary", scale=0, min_width=120, elem_classes="fd-run", elem_id=f"{name}-run")
        stop = gr.Button("Stop", interactive=False, scale=0, min_width=90, elem_classes="fd-stop", elem_id=f"{name}-stop")
        stop.click(self._stop, None, None, **INSTANT)
        # On a phone the result is below the fold.
        show = f"document.getElementById('{name}').scrollIntoView({{behavior: 'smooth'}})"
        look = f"() => {{ if (innerWidth < 700) setTimeout(() => {show}, 900) }}"
        run.click(None, None, None, js=look, **PRIVATE)
        return run, stop

    @staticmethod
    def _announce(run: gr.Button, view: gr.HTML) -> None:
        """Until the first frame: who waits is told why. Said by the browser itself, at once."""
        run.click(None, None, view, js=f"() => {json.dumps(WAITING)}", **PRIVATE)

    def _stop(self, request: gr.Request) -> None:
        self.stops.stop(request.session_hash)

    def _shown(
        self, request: gr.Request, blank: Sequence[Any], work: Callable[..., Iterator[Sequence[Any]]]
    ) -> Iterator[list[Any]]:
        """What `work(stop, throttle)` yields, and the stop button's state; an error is a sentence in the first output."""
        with self.stops.run(request.session_hash) as stop:
            yield [gr.skip(), *blank, gr.update(interactive=True)]
            try:
                for values in work(stop, Throttle()):
                    yield [*values, gr.skip()]
                yield [gr.skip() for _ in range(len(blank) + 1)] + [gr.update(interactive=False)]
            except ERRORS as error:
                yield [page.message(sentence(error), "error"), *blank, gr.update(interactive=False)]

    # -- race --------------------------------------------------------------------------------------------------------

    def _race_tab(self) -> None:
        with gr.Row(elem_classes="fd-controls"):
            method = self._method_menu("Method to race against plain decoding", elem_id="race-method", scale=5)
            run, stop = self._buttons("Race", "race")
        view = gr.HTML(
            IDLE.format("Plain decoding and a method draw the same prompt from the same seed, side by side."), elem_id="race"
        )
        inputs = [self.prompt, self.seed, method, *self.settings]
        self._announce(run, view)
        run.click(self._on_race, inputs, [view, stop], show_progress="minimal", **PRIVATE, **self.drawing)

    def _method_menu(self, label: str, **options: Any) -> gr.Dropdown:
        return gr.Dropdown(
            self.presets,
            value=self.presets[0][1],
            label=label,
            allow_custom_value=True,
            min_width=260,
            elem_classes="fd-menu",
            **options,
        )

    def _on_race(self, request: gr.Request, prompt: str, seed: Any, method: str, *settings: Any) -> Iterator[list[Any]]:
        def work(stop: Any, throttle: Throttle) -> Iterator[list[Any]]:
            for job in self.studio.race(prompt, seed, method, self.studio.call(settings), stop, throttle):
                yield [page.race(job.frames, job.outputs or None, job.showing)]

        yield from self._shown(request, [], work)

    # -- explore -----------------------------------------------------------------------------------------------------

    def _explore_tab(self) -> None:
        with gr.Row(elem_classes="fd-split"):
            with gr.Column(scale=2, min_width=300):
                titles = [(method_class(name).config_class.title, name) for name in self.methods]
                method = gr.Dropdown(
                    titles, value=self.methods[0], label="Method", elem_id="explore-method", elem_classes="fd-menu"
                )
                with gr.Row(elem_classes="fd-controls"):
                    run, stop = self._buttons("Draw", "explore")
                badge = gr.HTML(page.promise(Case(self.methods[0])), elem_id="promise")
                groups, fields = [], {}
                for name in self.methods:
                    with gr.Column(visible=name == self.methods[0], elem_classes="fd-options") as group:
                        fields[name] = self._fields(name)
                    groups.append(group)
            with gr.Column(scale=5, min_width=320):
                with gr.Row(elem_classes="fd-map-controls"):
                    kinds = [(SHORT[kind], kind) for kind in KINDS]
                    kind = gr.Radio(kinds, value="run", label="Token map", scale=5, min_width=260, elem_id="kind")
                    opacity = gr.Slider(0, 1, 0.6, step=0.05, label="Overlay", scale=2, min_width=180, elem_id="opacity")
                view = gr.HTML(
                    IDLE.format("One picture with any method and settings, and everything its trace knows."), elem_id="explore"
                )
                plot, numbers, links = gr.HTML(elem_id="rounds"), gr.HTML(elem_id="numbers"), gr.HTML(elem_id="downloads")
        state = gr.State(None, time_to_live=3600)
        everything = [part for name in self.methods for part in self._parts(fields[name])]
        method.change(self._chosen, [method, *everything], [*groups, badge], **INSTANT)
        for name in self.methods:
            parts = self._parts(fields[name])
            if parts:
                shown = [part for control, *rest in fields[name] for part in rest if part is not None]
                gr.on([part.input for part in parts], self._refresher(name), parts, [*shown, badge], **INSTANT)
        inputs = [self.prompt, self.seed, kind, opacity, method, *self.settings, *everything]
        outputs = [view, plot, numbers, links, state, stop]
        self._announce(run, view)
        run.click(self._on_explore, inputs, outputs, show_progress="minimal", **PRIVATE, **self.drawing)
        gr.on([kind.input, opacity.release], self._redraw, [state, kind, opacity], [view, links], **INSTANT)

    def _fields(self, method: str) -> list[tuple[controls.Control, Any, Any]]:
        """(control, component, its mode's component or None) of every option of a method."""
        config = method_class(method).config_class
        found, window = [], self.studio.models.any().family_default("window", {})
        for item in controls.controls(config, window.get("cpu", 16)):
            visible = controls.applies(config, item.name, {})
            common: dict[str, Any] = {"label": item.label.capitalize(), "info": item.help, "elem_id": f"{method}-{item.name}"}
            mode = None
            if item.modes:
                mode = gr.Radio(
                    list(item.modes),
                    value=item.default_mode,
                    visible=visible,
                    **{**common, "elem_id": f"{method}-{item.name}-mode"},
                )
                common = {**common, "label": f"{common['label']}, fixed", "info": None}
                visible = visible and item.default_mode == controls.FIXED
            if item.kind == "choice":
                menu = gr.Radio if len(item.choices) <= 4 else gr.Dropdown
                part: Any = menu(list(item.choices), value=item.default, visible=visible, **common)
            elif item.kind == "flag":
                part = gr.Checkbox(item.default, visible=visible, **common)
            elif item.slides:
                part = gr.Slider(item.low, item.high, item.number, step=item.step, visible=visible, **common)
            else:
                whole = 0 if item.step.is_integer() else None
                part = gr.Number(
                    item.number, minimum=item.low, maximum=item.high, step=item.step, precision=whole, visible=visible, **common
                )
            found.append((item, part, mode))
        return found

    @staticmethod
    def _parts(fields: list[tuple[controls.Control, Any, Any]]) -> list[Any]:
        """A method's components in a row: first the values, then the modes."""
        return [part for _, part, _ in fields] + [mode for _, _, mode in fields if mode is not None]

    @staticmethod
    def _case(method: str, values: Sequence[Any]) -> tuple[Case, dict[str, Any], dict[str, str]]:
        """The configured method that a row of `_parts` means, its values and its modes."""
        config = method_class(method).config_class
        items = controls.controls(config)
        given = dict(zip((item.name for item in items), values, strict=False))
        modes = dict(zip((item.name for item in items if item.modes), values[len(items) :], strict=True))
        return Case(method, controls.options(config, given, modes)), given, modes

    def _own(self, method: str, everything: Sequence[Any]) -> list[Any]:
        """The values of one method among those of all."""
        at = 0
        for name in self.methods:
            items = controls.controls(method_class(name).config_class)
            count = len(items) + sum(bool(item.modes) for item in items)
            if name == method:
                return list(everything[at : at + count])
            at += count
        raise ValueError(f"there is no method {method!r}: choose one of {', '.join(self.methods)}")

    def _promise(self, case: Case) -> str:
        try:
            return page.promise(case)
        except ERRORS as error:
            return page.message(sentence(error), "error")

    def _chosen(self, method: str, *everything: Any) -> list[Any]:
        case, _, _ = self._case(method, self._own(method, everything))
        return [*(gr.update(visible=name == method) for name in self.methods), self._promise(case)]

    def _refresher(self, method: str) -> Callable[..., list[Any]]:
        """Shows the options that apply, and what the method promises now."""
        config = method_class(method).config_class

        def refresh(*values: Any) -> list[Any]:
            case, given, modes = self._case(method, values)
            shown = []
            for item in controls.controls(config):
                there = controls.applies(config, item.name, given)
                shown.append(gr.update(visible=there and modes.get(item.name, controls.FIXED) == controls.FIXED))
                if item.modes:
                    shown.append(gr.update(visible=there))
            return [*shown, self._promise(case)]

        return refresh

    def _on_explore(
        self, request: gr.Request, prompt: str, seed: Any, kind: str, opacity: float, method: str, *values: Any
    ) -> Iterator[list[Any]]:
        settings, everything = values[: len(self.settings)], values[len(self.settings) :]

        def work(stop: Any, throttle: Throttle) -> Iterator[list[Any]]:
            case, _, _ = self._case(method, self._own(method, everything))
            for job in self.studio.explore(prompt, seed, case, self.studio.call(settings), stop, throttle):
                frame = job.frames[0]
                view, plot = page.explore(frame, kind, opacity), page.rounds_plot(frame)
                if frame.trace is None:
                    yield [view, plot, gr.skip(), gr.skip(), gr.skip()]
                else:
                    yield [view, plot, page.numbers(frame.trace), page.downloads(frame, prompt, kind, opacity), (frame, prompt)]

        yield from self._shown(request, ["", "", "", None], work)

    def _redraw(self, state: Any, kind: str, opacity: float) -> list[Any]:
        if state is None:
            return [gr.skip(), gr.skip()]
        frame, prompt = state
        return [page.explore(frame, kind, opacity), page.downloads(frame, prompt, kind, opacity)]

    # -- compare -----------------------------------------------------------------------------------------------------

    def _compare_tab(self) -> None:
        chosen = [spec for _, spec in self.presets][:4]
        with gr.Row(elem_classes="fd-controls"):
            methods = gr.Dropdown(
                [spec for _, spec in self.presets],
                value=chosen,
                multiselect=True,
                allow_custom_value=True,
                label="Methods beside plain decoding",
                info="choose, or type method:option=value,… and press Enter",
                scale=5,
                min_width=260,
                elem_id="compare-methods",
            )
            repeats = gr.Slider(
                1, MOST_REPEATS, 1, step=1, label="Repeats", info="seconds are medians", scale=1, min_width=160, elem_id="repeats"
            )
            run, stop = self._buttons("Compare", "compare")
        view = gr.HTML(IDLE.format("Several methods draw the same prompt, one after the other."), elem_id="compare")
        inputs = [self.prompt, self.seed, methods, repeats, *self.settings]
        self._announce(run, view)
        run.click(self._on_compare, inputs, [view, stop], show_progress="minimal", **PRIVATE, **self.drawing)

    def _on_compare(
        self, request: gr.Request, prompt: str, seed: Any, methods: list[str], repeats: int, *settings: Any
    ) -> Iterator[list[Any]]:
        def work(stop: Any, throttle: Throttle) -> Iterator[list[Any]]:
            for job in self.studio.compare(prompt, seed, methods, repeats, self.studio.call(settings), stop, throttle):
                if job.result is not None:
                    yield [page.comparison(job.result, job.frames) + _comparison_links(job)]
                else:
                    yield [page.progress(job)]

        yield from self._shown(request, [], work)


def _comparison_links(job: Job) -> str:
    """Downloads of a comparison: contact sheet and JSON."""
    if job.result is None:
        return ""
    buffer = io.BytesIO()
    job.result.sheet().save(buffer, "PNG")
    text = json.dumps(job.result.to_dict(), indent=1).encode()
    links = download("contact sheet (PNG)", "compare.png", buffer.getvalue(), "image/png")
    return f'<nav class="fd-downloads">{links}{download("figures (JSON)", "compare.json", text, "application/json")}</nav>'


def launch(
    family: Family,
    host: str = "127.0.0.1",
    port: int | None = None,
    share: bool = False,
    at_once: int = 1,
    wait: bool = True,
) -> gr.Blocks:
    """Serve the page; wait: until interrupted. port None: the first free one from 7860.

    Raises ValueError if the port or the host cannot be used.
    """
    models = Models(family)
    blocks = Page(Studio(models), at_once).blocks
    fonts = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
    theme = gr.themes.Base(
        primary_hue="emerald", neutral_hue="slate", font=fonts, font_mono=["ui-monospace", "Menlo", "Consolas", "monospace"]
    ).set(
        body_text_color_subdued="*neutral_500",
        body_text_color_subdued_dark="*neutral_400",
        block_info_text_color="*neutral_500",
        block_label_text_color="*neutral_600",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
    )
    try:
        blocks.queue(default_concurrency_limit=at_once, max_size=64).launch(
            server_name=host,
            server_port=port,
            share=share,
            quiet=True,
            prevent_thread_lock=True,
            footer_links=["api"],
            run_history=False,
            ssr_mode=False,
            enable_monitoring=False,
            theme=theme,
            css_paths=[Path(__file__).with_name("style.css")],
        )
    except OSError as error:
        where = f"{host}:{port}" if port is not None else f"{host} (ports 7860 to 7959)"
        raise ValueError(f"cannot serve on {where}: choose another --port or --host") from error
    for name, reason in models.refused.items():
        print(f"without {name}: {reason}")
    print(f"Foredraft is at {blocks.share_url or blocks.local_url}  (stop with Ctrl+C)", flush=True)
    if wait:
        blocks.block_thread()
    return blocks
