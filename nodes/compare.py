"""Speculative Compare: one prompt and seed through several methods, timed against plain decoding."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

from . import host
from .load import Draft, Target
from .method import Choice, default_choice
from .plot import speed_plot
from .progress import Watcher
from .sample import AR, build, call_arguments, on_device, prompt_inputs, scratch_of

SLOTS = 6


class Loaded:
    """The models as `foredraft.compare` asks for them: ready pipelines by method, timed calls. Watching is not timed."""

    def __init__(self, target: Target, draft: Draft | None, choices: list[Choice], node: Any):
        self.pipelines = {choice.config.name: build(target, draft, choice) for choice in choices}
        self.node, self.bar, self.before = node, None, 0
        self.single: float | None = None

    def pipeline(self, name: str) -> Any:
        """The pipeline of a method."""
        return self.pipelines[name]

    def draw(self, case: Any, prompt: str, seed: int, **call: Any) -> tuple[Any, float]:
        """One timed call: output and seconds."""
        pipeline = self.pipelines[case.method]
        config = pipeline.config_class.from_options(case.options)
        grid = pipeline._grid(call.get("height"), call.get("width"))
        images = call["num_images_per_prompt"]
        single = None if case.method == AR else self.single
        watcher = Watcher(self.node, case.name, config.exact, images, self.bar, grid, self.before, single)
        watched = 0.0

        def watch(*arguments: Any) -> None:
            nonlocal watched
            begun = perf_counter()
            watcher(*arguments)
            watched += perf_counter() - begun

        begun = perf_counter()
        output = pipeline(
            prompt,
            generator=torch.Generator().manual_seed(seed),
            callback_on_step_end=watch,
            callback_on_step_end_tensor_inputs=list(watcher.tensors),
            **call,
            **case.options,
        )
        seconds = perf_counter() - begun - watched
        self.before += grid[0] * grid[1]
        if case.method == AR:
            self.single = seconds / (grid[0] * grid[1])
        watcher.finish(output.traces, output.images[0])
        return output, seconds

    def warm_up(self, case: Any, prompt: str, rounds: int = 3, **call: Any) -> None:
        """The first rounds of a case, so that no first-use cost falls into a measurement."""

        def stop(pipeline: Any, number: int, count: int, tensors: dict[str, Any]) -> None:
            host.check_interrupt()
            pipeline._interrupt = number + 1 >= rounds

        generator = torch.Generator().manual_seed(0)
        pipeline = self.pipelines[case.method]
        pipeline(prompt, generator=generator, output_type="latent", callback_on_step_end=stop, **call, **case.options)


class Compare:
    """Draws one prompt with several methods and the same seed."""

    DESCRIPTION = (
        "Draws one prompt and seed with plain decoding and with every connected method, and measures what each saves. Without a "
        "method it compares SJD under rule seeded. Under rule seeded the pictures are the same; the table says so, or where not."
    )
    CATEGORY = "Foredraft"
    FUNCTION = "compare"
    OUTPUT_NODE = True
    RETURN_TYPES = ("IMAGE", "IMAGE", "STRING", "IMAGE")
    RETURN_NAMES = ("images", "plot", "table", "sheet")
    OUTPUT_TOOLTIPS = (
        "All pictures, plain decoding's first, then method by method.",
        "Bars: how much faster than plain decoding each method was.",
        "The same as a Markdown table, and which pictures are plain decoding's.",
        "Contact sheet: every method's pictures above their token maps.",
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """See ComfyUI."""
        repeats = {"default": 1, "min": 1, "max": 20, "tooltip": "Rounds of timing; figures are medians over them."}
        methods = {
            f"method_{number}": ("FOREDRAFT_METHOD", {"tooltip": "A method to compare; plain decoding is always there."})
            for number in range(1, SLOTS + 1)
        }
        return {
            "required": {**prompt_inputs("The model that draws, from Load Target."), "repeats": ("INT", repeats)},
            "optional": {
                "draft": ("FOREDRAFT_DRAFT", {"tooltip": "What drafts, from Load Draft; for the methods that need it."}),
                **methods,
            },
            "hidden": {"node": "UNIQUE_ID"},
        }

    def compare(
        self,
        target: Target,
        prompt: str,
        seed: int,
        repeats: int,
        draft: Draft | None = None,
        node: Any = None,
        **values: Any,
    ) -> dict[str, Any]:
        """Draw and time; see `foredraft.compare`."""
        from ..bench.cases import Case
        from ..bench.compare import compare
        from ..pipelines import methods

        chosen = [values.pop(f"method_{number}", None) for number in range(1, SLOTS + 1)]
        choices = [choice for choice in chosen if choice is not None] or [default_choice()]
        plain = Choice(methods()[AR], methods()[AR].config_class())
        choices = [plain, *(choice for choice in choices if choice.config.name != AR)]
        call = call_arguments(values)
        models = Loaded(target, draft, choices, node)
        pipelines = list(models.pipelines.values())
        grid = pipelines[0]._grid(call.get("height"), call.get("width"))
        device = target.patcher.load_device
        scratch = max(scratch_of(models.pipelines[choice.config.name], choice, device) for choice in choices)
        with on_device(target, draft, pipelines, call, scratch):
            models.bar = host.progress_bar(grid[0] * grid[1] * len(choices) * repeats)
            cases = [Case(choice.config.name, choice.changed) for choice in choices]
            result = compare(prompt, cases, seed=seed, repeats=repeats, family=models, **call)
        table = "\n".join([result.table(), "", *result.verdicts()]).strip()
        images = host.image_batch([picture for row in result.rows for picture in row.images])
        plot, sheet = host.image_batch([speed_plot(result)]), host.image_batch([result.sheet()])
        return {"ui": {"text": [table]}, "result": (images, plot, table, sheet)}
