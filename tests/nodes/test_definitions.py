"""Node definitions: complete, in ComfyUI's form, and following the methods' configurations field by field."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
from typing import Any, ClassVar

import foredraft
import pytest
from foredraft import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
from foredraft.nodes.method import Choice, configure, exactness, method_nodes, node_id, to_widget, verdicts, widget
from foredraft.pipelines import methods
from foredraft.pipelines.autoregressive import AutoregressivePipeline
from foredraft.pipelines.options import MethodConfig, option
from foredraft.pipelines.sjd import SJDConfig
from foredraft.pipelines.speculative import SpeculativeConfig

from .conftest import Make
from .graphs import inputs_of, is_widget
from .stand_in import Stage

FIXED = ("LoadTarget", "LoadDraft", "Sampler", "Heatmap", "TraceStats", "Compare")
SOCKETS = {"FOREDRAFT_TARGET", "FOREDRAFT_DRAFT", "FOREDRAFT_METHOD", "FOREDRAFT_TRACE", "IMAGE"}
OUTPUTS = SOCKETS | {"INT", "FLOAT", "BOOLEAN", "STRING"}
METHODS = sorted(methods())


def test_ids() -> None:
    assert set(NODE_CLASS_MAPPINGS) == {f"Foredraft{name}" for name in FIXED} | {node_id(cls) for cls in methods().values()}
    assert {"ForedraftAutoregressive", "ForedraftSJD", "ForedraftSpeculative"} <= set(NODE_CLASS_MAPPINGS)
    assert set(NODE_DISPLAY_NAME_MAPPINGS) == set(NODE_CLASS_MAPPINGS)
    assert len(set(NODE_DISPLAY_NAME_MAPPINGS.values())) == len(NODE_CLASS_MAPPINGS)
    assert foredraft.WEB_DIRECTORY == "./web/comfyui"


@pytest.mark.parametrize("name", NODE_CLASS_MAPPINGS)
def test_a_node_is_complete(name: str, stage: Stage) -> None:
    cls = NODE_CLASS_MAPPINGS[name]
    assert cls.CATEGORY.split("/")[0] == "Foredraft"
    assert len(cls.DESCRIPTION) > 40 and cls.DESCRIPTION.endswith(".")
    assert len(cls.RETURN_TYPES) == len(cls.RETURN_NAMES) == len(cls.OUTPUT_TOOLTIPS) == len(set(cls.RETURN_NAMES))
    assert set(cls.RETURN_TYPES) <= OUTPUTS
    assert all(text.endswith(".") for text in cls.OUTPUT_TOOLTIPS)
    types = cls.INPUT_TYPES()
    assert json.loads(json.dumps(types)) is not None
    assert set(types) <= {"required", "optional", "hidden"}
    for each, (kind, options) in inputs_of(name).items():
        assert is_widget(kind) or kind in SOCKETS, each
        assert len(options["tooltip"]) > 10 and options["tooltip"].endswith("."), each
        assert not is_widget(kind) or "default" in options, each
        if isinstance(kind, list):
            assert options["default"] in kind
        if kind in ("INT", "FLOAT"):
            assert options["min"] <= options["default"] <= options["max"]
            exact = int if kind == "INT" else (int, float)
            assert all(isinstance(options[key], exact) for key in ("default", "min", "max"))


@pytest.mark.parametrize("name", NODE_CLASS_MAPPINGS)
def test_the_function_takes_every_input(name: str, stage: Stage) -> None:
    cls = NODE_CLASS_MAPPINGS[name]
    signature = inspect.signature(getattr(cls(), cls.FUNCTION))
    taken, open_ended = set(signature.parameters), any(p.kind == p.VAR_KEYWORD for p in signature.parameters.values())
    given = set(inputs_of(name)) | set(cls.INPUT_TYPES().get("hidden", {}))
    assert given <= taken or open_ended
    needed = {p.name for p in signature.parameters.values() if p.default is p.empty and p.kind != p.VAR_KEYWORD}
    assert needed <= set(cls.INPUT_TYPES()["required"])


def test_the_seed_is_comfyuis() -> None:
    for name in ("ForedraftSampler", "ForedraftCompare"):
        kind, options = inputs_of(name)["seed"]
        assert (kind, options["min"], options["max"], options["control_after_generate"]) == ("INT", 0, 2**64 - 1, True)


# -- methods ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_method_node_has_every_field_in_order(method: str, node: Make) -> None:
    pipeline = methods()[method]
    fields = dataclasses.fields(pipeline.config_class)
    widgets = inputs_of(node_id(pipeline))
    assert list(widgets) == [item.name for item in fields]
    for item in fields:
        kind, options = widgets[item.name]
        assert item.metadata["help"].rstrip(".")[1:] in options["tooltip"]
        if item.metadata["choices"]:
            assert kind == list(item.metadata["choices"])
        assert set(options.get("visible_if", {})) == set(item.metadata["visible_if"])
    (choice,) = node(node_id(pipeline))
    assert isinstance(choice, Choice) and choice.pipeline is pipeline
    assert choice.config == pipeline.config_class() and not choice.changed
    assert pipeline.config_class.from_options(choice.options) == choice.config


def test_widgets_of_sjd() -> None:
    fields = {item.name: widget(item) for item in dataclasses.fields(SJDConfig)}
    kind, options = fields["window"]
    assert (kind, options["default"], options["min"], options["max"]) == ("INT", 0, -1, 1024)
    assert "0 = automatic" in options["tooltip"] and "-1 = 'auto'" in options["tooltip"]
    kind, options = fields["tau"]
    assert (kind, options["default"], options["step"]) == ("FLOAT", 0.5, 0.05)
    assert options["visible_if"] == {"tail": ["reuse"], "rule": ["exact", "clustered"]}
    assert fields["refine"][0] == "BOOLEAN" and fields["refine"][1]["default"] is True


@pytest.mark.parametrize(
    ("cls", "field", "shown", "meant"),
    [
        (SJDConfig, "window", 0, None),
        (SJDConfig, "window", -1, "auto"),
        (SJDConfig, "window", 7, 7),
        (SpeculativeConfig, "draft_length", 0, "auto"),
        (SpeculativeConfig, "draft_length", 3, 3),
    ],
)
def test_special_values(cls: type[MethodConfig], field: str, shown: int, meant: Any) -> None:
    item = next(item for item in dataclasses.fields(cls) if item.name == field)
    assert getattr(configure(cls, {field: shown}), field) == meant
    assert to_widget(item, meant) == shown


def test_what_does_not_apply_is_ignored() -> None:
    """A hidden widget keeps what was chosen while it was visible."""
    assert configure(SJDConfig, {"rule": "seeded", "tail": "coupled", "tau": 1.5}) == SJDConfig()
    assert configure(SJDConfig, {"rule": "exact", "tail": "coupled"}).tail == "coupled"


def test_settings_that_make_no_sense_are_one_sentence(node: Make) -> None:
    with pytest.raises(ValueError, match="window='auto' follows the clock"):
        node("ForedraftSJD", rule="exact", window=-1)


def words(values: dict[str, Any]) -> dict[str, str]:
    """Settings as descriptions write them."""
    return {name: str(value) for name, value in values.items()}


@pytest.mark.parametrize("method", METHODS)
def test_the_description_tells_exact_from_relaxed(method: str) -> None:
    cls = methods()[method].config_class
    found = verdicts(cls)
    assert found[True] or found[False]
    assert exactness(cls) in NODE_CLASS_MAPPINGS[node_id(methods()[method])].DESCRIPTION
    menus = {
        item.name: item.metadata["choices"] or (True, False)
        for item in dataclasses.fields(cls)
        if item.metadata["choices"] or isinstance(item.default, bool)
    }
    for values in itertools.product(*menus.values()):
        chosen = dict(zip(menus, values, strict=True))
        exact = configure(cls, chosen).exact
        said = {verdict: [one for one in found[verdict] if one.items() <= words(chosen).items()] for verdict in found}
        assert said[exact] and not said[not exact], chosen


def test_exactness_of_sjd_in_words() -> None:
    assert exactness(SJDConfig) == (
        "Exact with rule seeded; rule exact, tail gumbel or coupled or resample. "
        "Relaxed with rule exact, tail reuse; rule clustered."
    )


@dataclasses.dataclass(frozen=True)
class NewConfig(MethodConfig):
    """A method of tomorrow."""

    name: ClassVar[str] = "new"
    title: ClassVar[str] = "New"
    paper: ClassVar[str] = "tomorrow"

    on: bool = option(True, "whether")
    scale: float = option(1e-4, "how much", low=0.0, high=1.0, step=1e-5, visible_if={"on": ("True",)})
    rows: int | None = option(None, "how many", low=2, high=9, automatic=True)
    free: int = option(5, "any number")

    @property
    def exact(self) -> bool:
        """Never."""
        return False


class NewPipeline(AutoregressivePipeline):
    """Does something new."""

    config_class = NewConfig


def test_a_new_method_appears_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.pipelines.methods", lambda: {"new": NewPipeline})
    made = method_nodes()
    assert list(made) == ["ForedraftNew"]
    types = made["ForedraftNew"].INPUT_TYPES()["required"]
    assert types["scale"][0] == "FLOAT" and types["scale"][1]["visible_if"] == {"on": [True]}
    assert types["rows"] == ("INT", {"tooltip": "How many (0 = automatic).", "default": 0, "min": 0, "max": 9, "step": 1})
    assert types["free"][1]["min"] < 0 < types["free"][1]["max"]
    assert "Relaxed: it changes the target's distribution." in made["ForedraftNew"].DESCRIPTION
    (choice,) = made["ForedraftNew"]().choose(on=False, scale=0.5, rows=0, free=-3)
    assert choice.config == NewConfig(on=False, free=-3)
    assert choice.changed == {"on": False, "free": -3}
