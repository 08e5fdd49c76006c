"""Controls read from configurations, and options read back from controls."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from foredraft.bench.cases import Case, parse_case
from foredraft.pipelines import methods
from foredraft.pipelines.options import MethodConfig, option
from foredraft.pipelines.sjd import SJDConfig
from foredraft.web.controls import AUTOMATIC, FIXED, MEASURED, applies, controls, options, presets, spec


@dataclass(frozen=True)
class NewConfig(MethodConfig):
    """Every kind of field there is."""

    name: ClassVar[str] = "new"
    title: ClassVar[str] = "New"
    paper: ClassVar[str] = ""

    rule: str = option("b", "which", choices=("a", "b"))
    count: int | None = option(None, "how many", low=1, high=4096, automatic=True)
    length: int | str = option("auto", "how long", low=1, high=64, timing=True)
    share: float = option(0.5, "how much", low=0.0, high=1.0, step=0.01, visible_if={"rule": ("a",)})
    part: float = option(0.1, "of it", low=0.0, high=1.0, step=0.1, visible_if={"share": ("0.5",)})
    on: bool = option(False, "whether")


def test_every_field_becomes_a_control() -> None:
    found = {item.name: item for item in controls(NewConfig, number=16)}
    assert list(found) == [field.name for field in dataclasses.fields(NewConfig)]
    assert found["rule"].kind == "choice" and found["rule"].choices == ("a", "b")
    assert found["count"].modes == (AUTOMATIC, FIXED) and found["count"].default_mode == AUTOMATIC
    assert found["count"].number == 16 and not found["count"].slides
    assert found["length"].modes == (MEASURED, FIXED) and found["length"].default_mode == MEASURED and found["length"].slides
    assert found["share"].step == 0.01 and found["share"].slides and not found["share"].modes
    assert found["on"].kind == "flag" and found["on"].label == "on"


def test_what_does_not_apply_is_hidden_and_left_out() -> None:
    assert not applies(NewConfig, "share", {}) and applies(NewConfig, "share", {"rule": "a"})
    assert not applies(NewConfig, "part", {}), "hidden because what it hangs on is hidden"
    assert applies(NewConfig, "part", {"rule": "a"}) and not applies(NewConfig, "part", {"rule": "a", "share": 0.4})
    assert options(NewConfig, {"share": 0.7}, {}) == {}
    assert options(NewConfig, {"rule": "a", "share": 0.7, "part": 0.3}, {}) == {"rule": "a", "share": 0.7}


def test_modes_mean_none_auto_or_the_number() -> None:
    values = {"count": 8.0, "length": 5}
    assert options(NewConfig, values, {"count": AUTOMATIC, "length": MEASURED}) == {}
    given = options(NewConfig, values, {"count": FIXED, "length": FIXED})
    assert given == {"count": 8, "length": 5} and isinstance(given["count"], int)


@pytest.mark.parametrize("method", methods())
def test_defaults_of_every_method_are_no_options(method: str) -> None:
    config: Any = methods()[method].config_class
    items = controls(config)
    values = {item.name: item.default if item.kind != "number" else item.number for item in items}
    modes = {item.name: item.default_mode for item in items if item.modes}
    assert options(config, values, modes) == {}


def test_hidden_values_cannot_make_a_method_contradict_itself() -> None:
    """A tail chosen under another rule is left out when the rule goes back to seeded."""
    given = options(SJDConfig, {"rule": "seeded", "tail": "coupled"}, {})
    assert given == {} and SJDConfig.from_options(given).rule == "seeded"


def test_presets_are_specifications_the_command_line_reads() -> None:
    found = presets(["ar", "sjd", "speculative"])
    specs = [text for _, text in found]
    assert specs[0] == "sjd" and "sjd:rule=exact" in specs and "speculative" in specs and "ar" not in specs
    for _, text in found:
        assert spec(parse_case(text)) == text
    case = Case("sjd", {"window": None, "refine": False, "rule": "exact", "tau": 0.4})
    assert parse_case(spec(case)).options == case.options
