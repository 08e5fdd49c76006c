"""Speculative Sampler: a target, a method and a prompt become pictures and their traces."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch

from ..decoding.trace import Trace
from . import host
from .load import Cost, Draft, Target
from .method import Choice, default_choice
from .progress import Watcher

AR = "ar"
WARM, TIMED = 3, 9
COST_SECONDS = 30.0
OWN = -1
"""A number below zero in a sampling widget is the family's own value."""


@dataclass
class Record:
    """FOREDRAFT_TRACE: one trace per picture, how the method is called, and the estimated speed-up (None: unknown)."""

    traces: list[Trace]
    title: str
    speedup: float | None = None


# -- inputs ----------------------------------------------------------------------------------------------------------


def prompt_inputs(target: str) -> dict[str, Any]:
    """The inputs the sampler and the comparison share, in the order in which saved graphs store them."""
    own = "below 0: the model family's own value"
    return {
        "target": ("FOREDRAFT_TARGET", {"tooltip": target}),
        "prompt": (
            "STRING",
            {
                "default": "fox",
                "multiline": True,
                "dynamicPrompts": True,
                "tooltip": "What to draw. The demo model knows names such as fox, and backgrounds: red apple on blue.",
            },
        ),
        "negative_prompt": (
            "STRING",
            {
                "default": "",
                "multiline": True,
                "dynamicPrompts": True,
                "tooltip": "What guidance leads away from; needs guidance above 1. Empty: the family's own.",
            },
        ),
        "seed": (
            "INT",
            {
                "default": 0,
                "min": 0,
                "max": 2**64 - 1,
                "control_after_generate": True,
                "tooltip": "One seed, one picture: the same as torch.Generator().manual_seed(seed) in Python and --seed in the "
                "shell, and under rule seeded the same for every method.",
            },
        ),
        "batch_size": ("INT", {"default": 1, "min": 1, "max": 64, "tooltip": "Pictures drawn at once."}),
        "width": ("INT", {"default": 0, "min": 0, "max": 8192, "step": 4, "tooltip": "Pixels; 0: the family's own width."}),
        "height": ("INT", {"default": 0, "min": 0, "max": 8192, "step": 4, "tooltip": "Pixels; 0: the family's own height."}),
        "guidance_scale": (
            "FLOAT",
            {"default": OWN, "min": OWN, "max": 100.0, "step": 0.1, "tooltip": f"Classifier-free guidance, 1 is off; {own}."},
        ),
        "temperature": (
            "FLOAT",
            {"default": OWN, "min": OWN, "max": 10.0, "step": 0.05, "tooltip": f"0 takes the most probable token; {own}."},
        ),
        "top_k": (
            "INT",
            {"default": OWN, "min": OWN, "max": 2**20, "tooltip": f"Most probable codes kept, 0 keeps all; {own}."},
        ),
        "top_p": (
            "FLOAT",
            {"default": OWN, "min": OWN, "max": 1.0, "step": 0.01, "tooltip": f"Probability mass kept, 1 keeps all; {own}."},
        ),
    }


def call_arguments(values: dict[str, Any]) -> dict[str, Any]:
    """Widget values as arguments of a pipeline's call; what is left to the family is left out."""
    given: dict[str, Any] = {"num_images_per_prompt": values["batch_size"]}
    if values["negative_prompt"].strip():
        given["negative_prompt"] = values["negative_prompt"]
    given |= {name: values[name] for name in ("width", "height") if values[name] > 0}
    given |= {name: values[name] for name in ("guidance_scale", "temperature", "top_k", "top_p") if values[name] >= 0}
    return given


# -- running ---------------------------------------------------------------------------------------------------------


def build(target: Target, draft: Draft | None, choice: Choice) -> Any:
    """The method's pipeline over the loaded components. Raises ValueError where a component is missing or does not fit."""
    parts = {**target.parts, **(draft.parts if draft else {})}
    cls = choice.pipeline
    wanted = inspect.signature(cls.__init__).parameters
    absent = [name for name in cls.component_names() if name not in parts and wanted[name].default is inspect.Parameter.empty]
    if absent:
        raise ValueError(
            f"the method {choice.title!r} needs a {absent[0]}: "
            f"connect Load Draft to the draft input and choose a {absent[0]} in it"
        )
    pipeline = cls(defaults=target.defaults, **{name: parts[name] for name in cls.component_names() if name in parts})
    pipeline.set_progress_bar_config(disable=True)
    pipeline._planners = target.planners.setdefault((choice.config.name, draft.name if draft else ""), {})
    return pipeline


def memory_needed(pipelines: list[Any], call: dict[str, Any], grid: tuple[int, int], scratch: int) -> int:
    """Bytes that one call needs beside the weights: key/value caches of the target and its drafts, logits, decoded pixels."""
    images, tokens = call["num_images_per_prompt"], grid[0] * grid[1]
    rows, needed = 2 * images, 0
    models = {id(part): part for pipeline in pipelines for part in pipeline.components.values() if hasattr(part, "backbone")}
    for model in models.values():
        shape = model.backbone.config
        wide = next(model.parameters()).element_size()
        slots = tokens + scratch + 64
        needed += rows * slots * wide * (2 * shape.layers * shape.groups * shape.width + shape.dim)
        fed = scratch + 1
        needed += (
            rows
            * fed
            * (4 * wide * (shape.dim + shape.ffn) + 6 * 8 * getattr(model, "vocab_size", 0) + 4 * wide * shape.heads * slots)
        )
    cell = pipelines[0].codec.config.downsample
    # Some 64 channels at full size, twice, are alive at once in a convolutional decoder.
    return needed + images * tokens * cell * cell * 128 * 4


@contextmanager
def suitable_threads(target: Target, device: torch.device) -> Iterator[None]:
    """One CPU thread while a target too small to share is drawn with, as the `foredraft` command does; then as before."""
    from ..bench.cases import SMALL

    before = torch.get_num_threads()
    small = sum(weight.numel() for weight in target.parts["target"].parameters()) < SMALL
    try:
        if device.type == "cpu" and small:
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def on_device(target: Target, draft: Draft | None, pipelines: list[Any], call: dict[str, Any], scratch: int) -> Iterator[None]:
    """Everything in place for calls of these pipelines: models on their device in one request, room for the caches, threads."""
    grid = pipelines[0]._grid(call.get("height"), call.get("width"))
    used = {name for pipeline in pipelines for name in pipeline.components}
    drafts = [each for each in (draft.patchers if draft else []) if used & set(dict(each.model.named_children()))]
    patchers = [target.patcher, *drafts]
    with host.memory_advice("draw fewer pictures at once, choose a 16-bit dtype in the loaders, or close other models"):
        device = host.load(patchers, memory_needed(pipelines, call, grid, scratch))
        with suitable_threads(target, device):
            yield


def scratch_of(pipeline: Any, choice: Choice, device: torch.device) -> int:
    """How many draft nodes a round may feed."""
    return pipeline.scratch(choice.config, device)


def call_shape(target: Target, call: dict[str, Any]) -> tuple[Any, ...]:
    """What the time of a plain decoding step depends on."""
    names = ("num_images_per_prompt", "width", "height", "guidance_scale", "top_k", "top_p")
    return (str(target.parts["target"].device), *(call.get(name) for name in names))


def step_cost(target: Target, prompt: str, call: dict[str, Any]) -> float | None:
    """Seconds of one plain decoding step of such a call: the median of a few; None if the picture has too few tokens for that.

    Twelve tokens are drawn by plain decoding for it, and the figure is kept with the target for a while, by the shape of the
    call: a machine's pace changes with what else it does. The mean step of a picture drawn by plain decoding takes its place.
    Early steps read a short cache, so it errs on the low side, and the speed-up estimated from it too.
    """
    from ..pipelines import methods

    key = call_shape(target, call)
    if key not in target.costs or perf_counter() - target.costs[key].measured > COST_SECONDS:
        pipeline = build(target, None, Choice(methods()[AR], methods()[AR].config_class()))
        times: list[float] = []

        def watch(running: Any, number: int, count: int, tensors: dict[str, Any]) -> None:
            host.check_interrupt()
            tensors["length"].cpu()
            times.append(perf_counter())
            running._interrupt = len(times) == WARM + TIMED

        generator = torch.Generator().manual_seed(0)
        pipeline(prompt, generator=generator, output_type="latent", callback_on_step_end=watch, **call)
        steps = [after - before for before, after in zip(times[WARM - 1 :], times[WARM:], strict=False)]
        if not steps:
            return None
        target.costs[key] = Cost(median(steps), perf_counter())
    return target.costs[key].seconds


class Sampler:
    """Draws pictures with a speculative method."""

    DESCRIPTION = (
        "Draws pictures with an autoregressive model, faster: the method drafts tokens ahead, the target verifies them in one "
        "pass. Without a method it is speculative Jacobi decoding under rule seeded: the same picture as plain decoding. "
        "The live panel's speed-up is an estimate from one measured plain step; Speculative Compare measures."
    )
    CATEGORY = "Foredraft"
    FUNCTION = "sample"
    RETURN_TYPES = ("IMAGE", "FOREDRAFT_TRACE")
    RETURN_NAMES = ("images", "trace")
    OUTPUT_TOOLTIPS = ("The pictures.", "What happened token by token, for Acceptance Heatmap and Trace Stats.")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """See ComfyUI."""
        return {
            "required": prompt_inputs("The model that draws, from Load Target."),
            "optional": {
                "draft": ("FOREDRAFT_DRAFT", {"tooltip": "What drafts, from Load Draft; only for methods that need it."}),
                "method": ("FOREDRAFT_METHOD", {"tooltip": "How to draft and verify; none: SJD with rule seeded."}),
            },
            "hidden": {"node": "UNIQUE_ID"},
        }

    def sample(
        self,
        target: Target,
        prompt: str,
        seed: int,
        draft: Draft | None = None,
        method: Choice | None = None,
        node: Any = None,
        **values: Any,
    ) -> tuple[torch.Tensor, Record]:
        """Draw. IMAGE is float32 [B, H, W, 3] in 0..1 on the CPU."""
        choice = method or default_choice()
        call = call_arguments(values)
        pipeline = build(target, draft, choice)
        grid = pipeline._grid(call.get("height"), call.get("width"))
        scratch = scratch_of(pipeline, choice, target.patcher.load_device)
        with on_device(target, draft, [pipeline], call, scratch):
            plain = choice.config.name == AR
            single = None if plain else step_cost(target, prompt, call)
            bar = host.progress_bar(grid[0] * grid[1])
            watcher = Watcher(node, choice.title, choice.config.exact, values["batch_size"], bar, grid, single=single)
            output = pipeline(
                prompt,
                generator=torch.Generator().manual_seed(seed),
                output_type="pt",
                callback_on_step_end=watcher,
                callback_on_step_end_tensor_inputs=list(watcher.tensors),
                **call,
                **choice.options,
            )
            images = output.images.permute(0, 2, 3, 1).to("cpu", torch.float32).contiguous()
            speedup = watcher.finish(output.traces, host.pictures_of(images[:1])[0])
            if plain:
                trace = output.traces[0]
                single = (trace.seconds - trace.parts["codec"]) / max(1, trace.rounds)
                target.costs[call_shape(target, call)] = Cost(single, perf_counter())
        return images, Record(output.traces, choice.title, 1.0 if plain else speedup)
