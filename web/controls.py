"""Every method's knobs as plain descriptions of controls, read from the fields of its configuration. No Gradio here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..bench.cases import Case, method_class
from ..pipelines.options import AUTO, MethodConfig

AUTOMATIC, MEASURED, FIXED = "automatic", "measured", "fixed"
WIDEST = 256
"""Values a slider may have; with more, a number is typed."""


@dataclass(frozen=True)
class Control:
    """One option.

    kind: "choice", "flag" or "number". modes: for a number that may be automatic (the family's own value) or measured (the clock
    decides), the ways to set it; empty otherwise. default_mode: one of them. number: the value that a fixed number starts from.
    """

    name: str
    help: str
    kind: str
    default: Any
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    step: float = 1.0
    modes: tuple[str, ...] = ()
    default_mode: str = FIXED
    number: float = 0.0

    @property
    def label(self) -> str:
        """The name as words."""
        return self.name.replace("_", " ")

    @property
    def slides(self) -> bool:
        """Whether the range is short enough for a slider."""
        return self.low is not None and self.high is not None and (self.high - self.low) / self.step <= WIDEST


def controls(config: type[MethodConfig], number: float = 16) -> list[Control]:
    """The controls of a method, in the order of its fields. number: what a fixed value starts from where none is known."""
    found = []
    for item in dataclasses.fields(config):
        meta, default = item.metadata, item.default
        common = {"name": item.name, "help": meta["help"], "default": default}
        if meta["choices"] is not None:
            found.append(Control(kind="choice", choices=tuple(meta["choices"]), **common))
        elif isinstance(default, bool):
            found.append(Control(kind="flag", **common))
        else:
            modes = tuple(
                mode for mode, there in ((AUTOMATIC, meta["automatic"]), (MEASURED, meta["timing"]), (FIXED, True)) if there
            )
            known = isinstance(default, int | float)
            found.append(
                Control(
                    kind="number",
                    low=meta["low"],
                    high=meta["high"],
                    step=float(meta["step"] or 1),
                    modes=modes if len(modes) > 1 else (),
                    default_mode=FIXED if known else MEASURED if default == AUTO else AUTOMATIC,
                    number=default if known else _inside(number, meta["low"], meta["high"]),
                    **common,
                )
            )
    return found


def _inside(value: float, low: float | None, high: float | None) -> float:
    value = value if low is None else max(value, low)
    return value if high is None else min(value, high)


def applies(config: type[MethodConfig], name: str, values: Mapping[str, Any]) -> bool:
    """Whether an option has an effect beside these values, which, unlike in `MethodConfig.applies`, may not fit together."""
    fields = config.__dataclass_fields__
    conditions = fields[name].metadata["visible_if"].items()
    return all(
        applies(config, other, values) and str(values.get(other, fields[other].default)) in allowed
        for other, allowed in conditions
    )


def options(config: type[MethodConfig], values: Mapping[str, Any], modes: Mapping[str, str]) -> dict[str, Any]:
    """The options that differ from the defaults, of those that apply. modes: for the controls that have modes."""
    given = {}
    for control in controls(config):
        mode = modes.get(control.name, FIXED)
        value = {AUTOMATIC: None, MEASURED: AUTO}.get(mode, values.get(control.name, control.default))
        if control.kind == "number" and isinstance(value, float) and control.step.is_integer() and value.is_integer():
            value = int(value)
        if applies(config, control.name, values) and value != control.default:
            given[control.name] = value
    return given


def presets(names: Sequence[str]) -> list[tuple[str, str]]:
    """(label, method specification) of every method but plain decoding: as it comes, and once with each of its other rules."""
    found = []
    for name in names:
        config = method_class(name).config_class
        rule = config.__dataclass_fields__.get("rule")
        rules = rule.metadata["choices"] or () if rule is not None else ()
        if not dataclasses.fields(config):
            continue
        if not rules:
            found.append((config.title, name))
        for value in sorted(rules, key=lambda value: value != rule.default):
            case = Case(name, {} if value == rule.default else {"rule": value})
            found.append((f"{config.title} · {value}", spec(case)))
    return found


def spec(case: Case) -> str:
    """A case as `parse_case` and the command line read it."""
    given = ",".join(f"{name}={_word(value)}" for name, value in case.options.items())
    return f"{case.method}:{given}" if given else case.method


def _word(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
