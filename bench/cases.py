"""What a comparison or a bench runs: cases, and one set of loaded models for all of them."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..models import loading
from ..pipelines import methods
from ..pipelines.output import SpeculativeOutput

SMALL = 20_000_000
"""Parameters below which one CPU thread is fastest: the matrices are too small to share."""


@dataclass(frozen=True)
class Case:
    """One way to draw: a method's short name, its options, arguments of the call, and what to print for it.

    prompts: instead of the bench's own. build: replaces the pipeline's `method(run)`, for baselines no pipeline offers.
    """

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)
    label: str = ""
    prompts: tuple[str, ...] = ()
    build: Callable[[Any, Any], Any] | None = None

    @property
    def name(self) -> str:
        """The label, or the method and its options."""
        given = " ".join(f"{key}={value}" for key, value in {**self.options, **self.call}.items())
        return self.label or f"{self.method} {given}".strip()


def parse_value(text: str) -> Any:
    """`none`, `true`, `false`, a whole number, a number, or the text itself."""
    named = {"none": None, "true": True, "false": False}
    if text.lower() in named:
        return named[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def parse_case(spec: Any) -> Case:
    """A Case from `"sjd"`, `"sjd:tail=coupled,rule=exact"` or `("sjd", {"tau": 0.4})`; checks names and values."""
    if isinstance(spec, Case):
        case = spec
    elif isinstance(spec, str):
        name, _, text = spec.partition(":")
        pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
        for key, sign, _ in pairs:
            if not sign:
                raise ValueError(f"{key!r} in {spec!r} has no value: write method:option=value,option=value")
        options = {key.strip().replace("-", "_"): parse_value(value.strip()) for key, _, value in pairs}
        case = Case(name.strip(), options)
    else:
        try:
            name, options = spec
            case = Case(str(name), dict(options))
        except (TypeError, ValueError) as error:
            raise TypeError(f"a method is 'name', 'name:option=value,...' or (name, options), got {spec!r}") from error
    method_class(case.method).config_class.from_options(case.options)
    return case


def method_class(name: str) -> Any:
    """The pipeline class of a method; ValueError names the nearest one."""
    known = methods()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"there is no method {name!r}: choose one of {', '.join(known)}{hint}")
    return known[name]


class Family:
    """The components of one model folder, loaded once and shared by the pipelines of all methods.

    Args:
        model: folder or Hub id.
        dtype: of the models. device: where they run.
        threads: CPU threads of torch; None = one for a target too small to profit from more, else torch's own number.
        defaults: replaces the family's sampling defaults.
    """

    def __init__(
        self,
        model: Any,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        threads: int | None = None,
        defaults: dict[str, Any] | None = None,
    ):
        self.folder = loading.resolve(model, {})
        self.dtype, self.device, self.threads = dtype, torch.device(device), threads
        self.options = {} if defaults is None else {"defaults": defaults}
        self._parts: dict[str, Any] = {}
        self._pipelines: dict[str, Any] = {}

    def pipeline(self, name: str) -> Any:
        """The pipeline of a method, over the shared components and without a progress bar."""
        if name not in self._pipelines:
            cls = method_class(name)
            shared = {part: self._parts[part] for part in cls.component_names() if part in self._parts}
            pipeline = cls.from_pretrained(self.folder, torch_dtype=self.dtype, **shared, **self.options)
            if self.device.type != "cpu":
                pipeline.to(self.device)
            self._parts.update({part: getattr(pipeline, part) for part in cls.component_names()})
            pipeline.set_progress_bar_config(disable=True)
            self._pipelines[name] = pipeline
            self._set_threads(pipeline.target)
        return self._pipelines[name]

    def _set_threads(self, target: torch.nn.Module) -> None:
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        elif self.device.type == "cpu" and sum(weight.numel() for weight in target.parameters()) < SMALL:
            torch.set_num_threads(1)

    def draw(self, case: Case, prompt: str | list[str], seed: int, **call: Any) -> tuple[SpeculativeOutput, float]:
        """One call, seeded as everywhere: output and wall-clock seconds."""
        pipeline = self.pipeline(case.method)
        with replaced_method(pipeline, case.build):
            begun = time.perf_counter()
            generator = torch.Generator().manual_seed(seed)
            output = pipeline(prompt, generator=generator, **{**call, **case.call}, **case.options)
            return output, time.perf_counter() - begun

    def warm_up(self, case: Case, prompt: str | list[str], rounds: int = 3, **call: Any) -> None:
        """The first rounds of a case, so that no first-use cost falls into a measurement."""

        def stop(pipeline: Any, number: int, count: int, tensors: dict[str, Any]) -> None:
            pipeline._interrupt = number + 1 >= rounds

        self.draw(case, prompt, 0, callback_on_step_end=stop, **call)


@contextmanager
def replaced_method(pipeline: Any, build: Callable[[Any, Any], Any] | None) -> Iterator[None]:
    """While open, `pipeline.method(run)` is `build(pipeline, run)`."""
    if build is None:
        yield
        return
    pipeline.method = lambda run: build(pipeline, run)
    try:
        yield
    finally:
        del pipeline.method
