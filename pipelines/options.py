"""A method's knobs as a frozen dataclass whose field metadata is the single source of every user interface.

Pipeline arguments, CLI flags, ComfyUI widgets and web controls are all generated from these fields, so fields are appended and
never reordered: saved graphs store widget values by position.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

AUTO = "auto"


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    low: float | None = None,
    high: float | None = None,
    step: float | None = None,
    automatic: bool = False,
    timing: bool = False,
    visible_if: Mapping[str, tuple[str, ...]] | None = None,
) -> Any:
    """A field with its interface.

    choices: the values of a menu; low, high, step: the inclusive range of a number; automatic: None is allowed and means the
    family's own value (0 in a widget); timing: "auto" is allowed too and lets measured time decide; visible_if: the values of
    other fields under which this one applies.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "low": low,
        "high": high,
        "step": step,
        "automatic": automatic,
        "timing": timing,
        "visible_if": visible_if or {},
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class MethodConfig:
    """Base of every method's configuration. Subclasses set `name`, `title` and `paper` and add fields made by `option`."""

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            object.__setattr__(self, item.name, _checked(item, getattr(self, item.name)))
        self.check()

    def check(self) -> None:
        """Reject combinations that make no sense. Raises ValueError."""

    @property
    def exact(self) -> bool:
        """Whether the output distribution equals the target's."""
        return True

    @property
    def badge(self) -> str:
        """One word for interfaces: exact or relaxed."""
        return "exact" if self.exact else "relaxed"

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> MethodConfig:
        """Build from keyword arguments; an unknown name is an error that names the nearest valid one."""
        known = [item.name for item in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                raise TypeError(unknown_option(name, known, cls.title))
        return cls(**options)

    def applies(self, name: str) -> bool:
        """Whether field `name` has an effect under the other fields' values."""
        item = next(item for item in dataclasses.fields(self) if item.name == name)
        return all(str(getattr(self, other)) in values for other, values in item.metadata["visible_if"].items())


def unknown_option(name: str, known: list[str], where: str) -> str:
    """One sentence about an option nobody has."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"valid options are {', '.join(known)}" if known else "it has none"
    return f"{where} has no option {name!r}: {hint}"


def _checked(item: dataclasses.Field[Any], value: Any) -> Any:
    """The value in its field's own type, or ValueError in one sentence."""
    meta, name = item.metadata, item.name
    if value is None and meta["automatic"]:
        return None
    if value == AUTO and meta["timing"]:
        return AUTO
    if meta["choices"] is not None:
        if value not in meta["choices"]:
            near = difflib.get_close_matches(str(value), meta["choices"], n=1, cutoff=0.4)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{name} must be one of {', '.join(meta['choices'])}, got {value!r}{hint}")
        return value
    if isinstance(item.default, bool):
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")
        return value
    whole = meta["step"] is None or float(meta["step"]).is_integer()
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or (whole and int(value) != value):
        kind = "a whole number" if whole else "a number"
        raise ValueError(f"{name} must be {kind}, got {value!r}")
    low, high = meta["low"], meta["high"]
    if (low is not None and value < low) or (high is not None and value > high):
        raise ValueError(f"{name} must be between {low} and {high}, got {value}")
    return int(value) if whole else float(value)
