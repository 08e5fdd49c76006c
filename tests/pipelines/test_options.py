"""A method's options: one source for pipeline arguments, flags, widgets and web controls."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import foredraft
import pytest
from foredraft import pipelines
from foredraft.pipelines import methods
from foredraft.pipelines.base import SpeculativeDecodingPipeline
from foredraft.pipelines.options import MethodConfig, option
from foredraft.pipelines.sjd import SJDConfig
from foredraft.pipelines.speculative import SpeculativeConfig

from ..tiny import sentence

CONFIGS: list[type[MethodConfig]] = [cls.config_class for cls in methods().values()]
FIELDS = [(config, item) for config in CONFIGS for item in dataclasses.fields(config)]


def test_the_methods_of_the_contract() -> None:
    found = methods()
    assert list(found)[0] == "ar" and {"sjd", "speculative"} <= set(found)
    for name, cls in found.items():
        assert cls.config_class.name == name
        assert getattr(foredraft, cls.__name__) is cls, f"foredraft offers {cls.__name__}"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_every_method_introduces_itself(config: type[MethodConfig]) -> None:
    assert config.title and config.paper and config.__doc__
    assert config.name.isidentifier()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_options_do_not_collide_with_the_call(config: type[MethodConfig]) -> None:
    shared = set(inspect.signature(SpeculativeDecodingPipeline.__call__).parameters)
    assert not shared & {item.name for item in dataclasses.fields(config)}


@pytest.mark.parametrize(("config", "item"), FIELDS, ids=lambda value: getattr(value, "name", ""))
def test_every_field_can_be_shown(config: type[MethodConfig], item: dataclasses.Field[Any]) -> None:
    """Help, a valid default, and choices or a whole range: what a widget needs."""
    meta = item.metadata
    assert len(meta["help"]) > 15 and not meta["help"].endswith(".")
    default = getattr(config(), item.name)
    assert default == item.default
    if meta["choices"] is not None:
        assert default in meta["choices"] and len(set(meta["choices"])) == len(meta["choices"]) > 1
    elif not isinstance(item.default, bool):
        assert meta["low"] is not None and meta["high"] is not None and meta["low"] < meta["high"]
        assert meta["automatic"] if default is None else meta["low"] <= default <= meta["high"]
    fields = {other.name: other for other in dataclasses.fields(config)}
    for other, values in meta["visible_if"].items():
        assert other in fields and other != item.name
        assert set(values) <= set(fields[other].metadata["choices"] or ("True", "False"))


@pytest.mark.parametrize(("config", "item"), FIELDS, ids=lambda value: getattr(value, "name", ""))
def test_values_outside_a_field_are_refused(config: type[MethodConfig], item: dataclasses.Field[Any]) -> None:
    meta, bad = item.metadata, [object(), [], float("nan"), float("inf"), "nonsense"]
    if meta["choices"] is None and not isinstance(item.default, bool):
        bad += [meta["low"] - 1, meta["high"] + 1, True, str(meta["low"]), -float("inf")]
        bad += [] if meta["step"] is not None and not float(meta["step"]).is_integer() else [meta["low"] + 0.5]
    elif isinstance(item.default, bool):
        bad += [1, 0, "True"]
    if not meta["automatic"]:
        bad.append(None)
    if not meta["timing"]:
        bad.append("auto")
    for value in bad:
        with pytest.raises(ValueError) as error:
            config.from_options({item.name: value})
        sentence(error, item.name, "must be")


@pytest.mark.parametrize(("config", "item"), FIELDS, ids=lambda value: getattr(value, "name", ""))
def test_values_at_the_ends_of_a_range_are_taken(config: type[MethodConfig], item: dataclasses.Field[Any]) -> None:
    for name in ("low", "high"):
        if item.metadata[name] is not None:
            value = getattr(config.from_options({item.name: item.metadata[name]}), item.name)
            assert value == item.metadata[name] and isinstance(value, float if isinstance(item.default, float) else int)


def test_whole_numbers_given_as_floats_become_integers() -> None:
    assert isinstance(SJDConfig(window=8.0).window, int)  # type: ignore[arg-type]
    assert isinstance(SJDConfig(tau=1).tau, float)


@pytest.mark.parametrize(
    ("options", "near"),
    [({"windw": 3}, "'window'"), ({"tale": "gumbel"}, "'tail'"), ({"rules": "exact"}, "'rule'"), ({"zzz": 1}, "window")],
)
def test_an_unknown_option_names_the_nearest(options: dict[str, Any], near: str) -> None:
    with pytest.raises(TypeError) as error:
        SJDConfig.from_options(options)
    sentence(error, repr(next(iter(options))), near, "no option")


def test_a_method_without_options_says_so() -> None:
    with pytest.raises(TypeError) as error:
        methods()["ar"].config_class.from_options({"window": 3})
    sentence(error, "Autoregressive", "'window'", "none")


@pytest.mark.parametrize(
    ("options", "near"),
    [({"rule": "exat"}, "'exact'"), ({"tail": "gumble", "rule": "exact"}, "'gumbel'"), ({"init": "abov"}, "'above'")],
)
def test_an_unknown_choice_names_the_nearest(options: dict[str, Any], near: str) -> None:
    with pytest.raises(ValueError) as error:
        SJDConfig.from_options(options)
    sentence(error, near, "must be one of")


@pytest.mark.parametrize("tail", ["coupled", "resample", "reuse"])
def test_seeded_has_one_tail(tail: str) -> None:
    with pytest.raises(ValueError) as error:
        SJDConfig(tail=tail)
    sentence(error, "tail", "rule", "seeded")


@pytest.mark.parametrize("rule", ["exact", "clustered"])
def test_the_clock_may_decide_only_under_seeded(rule: str) -> None:
    assert SJDConfig(window="auto").window == "auto"
    with pytest.raises(ValueError) as error:
        SJDConfig(window="auto", rule=rule)
    sentence(error, "window", "seeded")


@pytest.mark.parametrize("options", [{"rule": "exact"}, {"tree": "static"}, {"tree": "dynamic"}], ids=str)
def test_the_clock_may_decide_only_the_length_of_seeded_chains(options: dict[str, Any]) -> None:
    assert SpeculativeConfig(draft_length="auto").draft_length == "auto"
    with pytest.raises(ValueError) as error:
        SpeculativeConfig(draft_length="auto", **options)
    sentence(error, "draft_length", "seeded", "chain")


@pytest.mark.parametrize(
    ("options", "exact"),
    [
        ({}, True),
        ({"rule": "exact"}, True),
        ({"rule": "exact", "tail": "coupled"}, True),
        ({"rule": "exact", "tail": "resample", "init": "random"}, True),
        ({"rule": "exact", "tail": "reuse"}, False),
        ({"rule": "clustered"}, False),
        ({"rule": "clustered", "tail": "reuse"}, False),
        ({"refine": False}, True),
        ({"rule": "exact", "refine": False}, True),
    ],
    ids=str,
)
def test_sjd_badges(options: dict[str, Any], exact: bool) -> None:
    config = SJDConfig(**options)
    assert config.exact is exact and config.badge == ("exact" if exact else "relaxed")


@pytest.mark.parametrize("rule", ["seeded", "exact"])
@pytest.mark.parametrize("tree", ["chain", "static", "dynamic"])
def test_drafting_with_a_model_is_exact(rule: str, tree: str) -> None:
    assert SpeculativeConfig(rule=rule, tree=tree).badge == "exact"
    assert methods()["ar"].config_class().badge == "exact"


def test_applies() -> None:
    assert not SJDConfig().applies("tail") and SJDConfig(rule="exact").applies("tail")
    assert not SJDConfig(rule="exact").applies("tau") and SJDConfig(rule="exact", tail="reuse").applies("tau")
    assert SpeculativeConfig(tree="dynamic").applies("total_nodes") and not SpeculativeConfig().applies("branching")


def test_fields_keep_their_order() -> None:
    """Saved graphs store widget values by position: fields are appended, never reordered."""
    assert [item.name for item in dataclasses.fields(SJDConfig)][:6] == ["rule", "tail", "init", "window", "tau", "refine"]
    names = [item.name for item in dataclasses.fields(SpeculativeConfig)]
    assert names[:5] == ["rule", "tree", "draft_length", "branching", "total_nodes"]


def test_option_needs_nothing_but_default_and_help() -> None:
    @dataclasses.dataclass(frozen=True)
    class Config(MethodConfig):
        """One free number."""

        amount: int = option(3, "an amount of something")

    Config.name, Config.title, Config.paper = "x", "X", "none"
    assert Config(amount=10**9).amount == 10**9


NEW_METHOD = '''
"""A method that exists by its file existing."""
from dataclasses import dataclass
from typing import ClassVar

from .autoregressive import AutoregressivePipeline
from .options import MethodConfig, option

@dataclass(frozen=True)
class NewConfig(MethodConfig):
    """Of the new method."""
    name: ClassVar[str] = "brand_new"
    title: ClassVar[str] = "Brand new"
    paper: ClassVar[str] = "none yet"
    level: int = option(1, "how new it is, from 1 to 3", low=1, high=3)

class BrandNewPipeline(AutoregressivePipeline):
    """Plain decoding under another name."""
    config_class = NewConfig
'''


@pytest.fixture
def new_method(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A method file that lies beside the others, for the length of a test."""
    (tmp_path / "aa_brand_new.py").write_text(NEW_METHOD)
    monkeypatch.setattr(pipelines, "__path__", [*pipelines.__path__, str(tmp_path)])
    methods.cache_clear()
    yield "brand_new"
    methods.cache_clear()
    module = f"{pipelines.__name__}.aa_brand_new"
    sys.modules.pop(module, None)
    vars(pipelines).pop("aa_brand_new", None)


def test_a_dropped_in_file_is_a_method(new_method: str, parts: dict[str, Any]) -> None:
    from ..tiny import build_pipeline, codes

    assert list(methods())[0] == "ar" and new_method in methods()
    run = build_pipeline(parts, new_method)
    assert codes(run, level=3).shape == (1, 4, 4)
    with pytest.raises(TypeError) as error:
        codes(run, levle=3)
    sentence(error, "Brand new", "'level'")


def test_the_dropped_in_file_is_gone_afterwards() -> None:
    assert "brand_new" not in methods()
