"""One node per method, made from the fields of its configuration: a new file in pipelines/ is a new node.

How a field becomes a widget: `choices` a menu, a bool a switch, a number a number with its range. A number that may be automatic
(None in Python) is 0 = automatic; one that may be left to the clock ("auto") is -1, or 0 where it cannot be automatic. A field
that does not apply under the others (`visible_if`) is hidden by the browser, and its value is ignored here.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

from ..pipelines.options import AUTO, MethodConfig

LARGEST = 2**31 - 1
COMBINATIONS = 4096


@dataclass(frozen=True)
class Choice:
    """FOREDRAFT_METHOD: a pipeline class and its checked configuration."""

    pipeline: Any
    config: MethodConfig

    @property
    def title(self) -> str:
        """For people."""
        return self.config.title

    @property
    def options(self) -> dict[str, Any]:
        """The options as arguments of the pipeline's call."""
        return {item.name: getattr(self.config, item.name) for item in dataclasses.fields(self.config)}

    @property
    def changed(self) -> dict[str, Any]:
        """The options that are not at their defaults."""
        fields = dataclasses.fields(self.config)
        return {item.name: self.options[item.name] for item in fields if self.options[item.name] != item.default}


def default_choice() -> Choice:
    """SJD, seeded: the same picture, faster."""
    from ..pipelines import methods

    pipeline = methods()["sjd"]
    return Choice(pipeline, pipeline.config_class())


# -- fields and widgets ----------------------------------------------------------------------------------------------


def is_whole(item: dataclasses.Field[Any]) -> bool:
    """Whether a numeric field holds whole numbers."""
    step = item.metadata["step"]
    return step is None or float(step).is_integer()


def clock_value(item: dataclasses.Field[Any]) -> int | None:
    """The widget value that stands for "auto", if the field knows it."""
    if not item.metadata["timing"]:
        return None
    return -1 if item.metadata["automatic"] else 0


def widget(item: dataclasses.Field[Any]) -> tuple[Any, dict[str, Any]]:
    """ComfyUI's (type, options) of a field."""
    meta = item.metadata
    options: dict[str, Any] = {"tooltip": tooltip(item)}
    if meta["visible_if"]:
        switch = {"True": True, "False": False}
        options["visible_if"] = {name: [switch.get(v, v) for v in values] for name, values in meta["visible_if"].items()}
    if meta["choices"] is not None:
        return list(meta["choices"]), {"default": item.default, **options}
    if isinstance(item.default, bool):
        return "BOOLEAN", {"default": item.default, **options}
    clock = clock_value(item)
    low = [value for value in (meta["low"], 0 if meta["automatic"] else None, clock) if value is not None]
    cast = int if is_whole(item) else float
    options |= {
        "default": cast(to_widget(item, item.default)),
        "min": cast(min(low)) if meta["low"] is not None else -LARGEST,
        "max": cast(meta["high"]) if meta["high"] is not None else LARGEST,
        "step": cast(meta["step"] or 1),
    }
    return "INT" if is_whole(item) else "FLOAT", options


def tooltip(item: dataclasses.Field[Any]) -> str:
    """The field's help, and what its special values mean."""
    special = ["0 = automatic"] if item.metadata["automatic"] else []
    if item.metadata["timing"]:
        special.append(f"{clock_value(item)} = 'auto'")
    text = item.metadata["help"]
    return text[0].upper() + text[1:] + (f" ({', '.join(special)})." if special else ".")


def to_widget(item: dataclasses.Field[Any], value: Any) -> Any:
    """A field's value as its widget shows it."""
    return clock_value(item) if value == AUTO else 0 if value is None else value


def from_widget(item: dataclasses.Field[Any], value: Any) -> Any:
    """A widget's value as the field takes it."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and clock_value(item) == value:
        return AUTO
    return None if number and item.metadata["automatic"] and value == 0 else value


def configure(cls: type[MethodConfig], values: dict[str, Any]) -> MethodConfig:
    """The configuration of a node's widget values; fields that do not apply keep their defaults."""
    chosen: dict[str, Any] = {}
    for item in dataclasses.fields(cls):
        value = from_widget(item, values[item.name]) if item.name in values else item.default
        chosen[item.name] = value
    for item in dataclasses.fields(cls):
        if not all(str(chosen[other]) in allowed for other, allowed in item.metadata["visible_if"].items()):
            chosen[item.name] = item.default
    return cls(**chosen)


# -- what is exact ---------------------------------------------------------------------------------------------------


def verdicts(cls: type[MethodConfig]) -> dict[bool, list[dict[str, str]]]:
    """Exact or not -> the settings of the menus and switches that decide it; other fields at their defaults."""
    items = [item for item in dataclasses.fields(cls) if item.metadata["choices"] or isinstance(item.default, bool)]
    menus = [item.metadata["choices"] or (True, False) for item in items]
    seen: dict[tuple[Any, ...], bool] = {}
    for values in itertools.islice(itertools.product(*menus), COMBINATIONS):
        try:
            config = configure(cls, {item.name: value for item, value in zip(items, values, strict=True)})
        except ValueError:
            continue
        seen[values] = config.exact
    matters = [
        number
        for number in range(len(items))
        if any(
            seen.get((*values[:number], other, *values[number + 1 :]), exact) != exact
            for values, exact in seen.items()
            for other in menus[number]
        )
    ]
    found: dict[bool, list[dict[str, str]]] = {True: [], False: []}
    for values, exact in seen.items():
        config = configure(cls, {item.name: value for item, value in zip(items, values, strict=True)})
        setting = {items[number].name: str(values[number]) for number in matters if config.applies(items[number].name)}
        if setting not in found[exact]:
            found[exact].append(setting)
    return found


def exactness(cls: type[MethodConfig]) -> str:
    """One line per verdict: under which settings the method is exact, and under which it is relaxed."""
    found = verdicts(cls)
    if not found[False]:
        return "Exact: it never changes the target's distribution."
    if not found[True]:
        return "Relaxed: it changes the target's distribution."
    return f"Exact with {_settings(cls, found[True])}. Relaxed with {_settings(cls, found[False])}."


def _settings(cls: type[MethodConfig], settings: list[dict[str, str]]) -> str:
    """Settings in words; those that differ in the last field only are joined."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for setting in settings:
        *head, (name, value) = setting.items()
        groups.setdefault((tuple(head), name), []).append(value)
    words = []
    for (head, name), values in groups.items():
        menu = next(item for item in dataclasses.fields(cls) if item.name == name).metadata["choices"] or (True, False)
        last = [] if head and len(values) == len(menu) else [f"{name} {' or '.join(values)}"]
        words.append(", ".join([*(f"{key} {value}" for key, value in head), *last]))
    return "; ".join(words)


# -- nodes -----------------------------------------------------------------------------------------------------------


class MethodNode:
    """Base of the method nodes."""

    pipeline: Any
    CATEGORY = "Foredraft/methods"
    FUNCTION = "choose"
    RETURN_TYPES = ("FOREDRAFT_METHOD",)
    RETURN_NAMES = ("method",)
    OUTPUT_TOOLTIPS = ("The configured method, for the sampler and the comparison.",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """See ComfyUI. The order is that of the fields: saved graphs store values by position."""
        return {"required": {item.name: widget(item) for item in dataclasses.fields(cls.pipeline.config_class)}}

    def choose(self, **values: Any) -> tuple[Choice]:
        """Check the settings; a combination that makes no sense is a ValueError in one sentence."""
        return (Choice(self.pipeline, configure(self.pipeline.config_class, values)),)


def node_id(pipeline: Any) -> str:
    """`SJDPipeline` -> `ForedraftSJD`. Saved graphs hold it, so a pipeline class keeps its name."""
    return f"Foredraft{pipeline.__name__.removesuffix('Pipeline')}"


def method_nodes() -> dict[str, type[MethodNode]]:
    """Node id -> class, for every method there is."""
    from ..pipelines import methods

    made = {}
    for pipeline in methods().values():
        config = pipeline.config_class
        text = f"{config.title}. {(pipeline.__doc__ or '').strip().splitlines()[0]} {exactness(config)} Source: {config.paper}."
        made[node_id(pipeline)] = type(node_id(pipeline), (MethodNode,), {"pipeline": pipeline, "DESCRIPTION": text})
    return made
