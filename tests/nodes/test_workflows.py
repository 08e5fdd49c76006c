"""Workflows and texts: up to date, consistent with the nodes, and complete for every method."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from foredraft import NODE_CLASS_MAPPINGS
from foredraft.nodes.method import node_id
from foredraft.pipelines import methods
from PIL import Image

from .graphs import CORE, ROOT, TWINS, WORKFLOWS, definition, graphs, inputs_of, is_widget, to_api, widgets_of
from .stand_in import Stage
from .write import files, run, texts

NAMES = sorted(path.stem for path in WORKFLOWS.glob("*.json"))
# What vue-i18n would read as syntax.
SYNTAX = re.compile(r"[@${}|%]")


def saved(name: str) -> dict[str, Any]:
    """A workflow as it is committed."""
    return json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))


def locale(language: str, name: str = "nodeDefs") -> dict[str, Any]:
    """Texts as they are committed."""
    return json.loads((ROOT / "locales" / language / f"{name}.json").read_text(encoding="utf-8"))


def test_generated_files_are_up_to_date(tmp_path: Path) -> None:
    """If this fails: `python -m tests.nodes.write --pictures`."""
    from .stand_in import installed

    with installed(Stage(tmp_path)):
        made = files()
    old = [
        name for name, text in made.items() if not (ROOT / name).is_file() or (ROOT / name).read_text(encoding="utf-8") != text
    ]
    assert old == []
    assert {f"workflows/{name}.json" for name in NAMES} <= set(made), "a workflow nobody writes"
    assert {path.name for path in TWINS.iterdir()} == {f"{name}.json" for name in NAMES}


def test_every_method_has_a_workflow() -> None:
    held = {name: {node["type"] for node in saved(name)["nodes"]} for name in NAMES}
    for pipeline in methods().values():
        assert node_id(pipeline) in held[pipeline.__module__.rpartition(".")[2]]
    assert {"compare", "heatmap-gallery"} <= set(held)
    assert set(NODE_CLASS_MAPPINGS) <= set().union(*held.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_workflow_has_its_picture(name: str) -> None:
    """ComfyUI shows a template by the .jpg of its name."""
    with Image.open(WORKFLOWS / f"{name}.jpg") as picture:
        assert picture.height >= 256 and len(picture.convert("RGB").getcolors(1 << 24)) > 100


@pytest.mark.parametrize("name", NAMES)
def test_nodes_and_widgets(name: str, stage: Stage) -> None:
    graph = saved(name)
    assert graph["version"] == 0.4
    assert len({node["id"] for node in graph["nodes"]}) == len(graph["nodes"])
    assert graph["last_node_id"] == max(node["id"] for node in graph["nodes"])
    notes = [node for node in graph["nodes"] if node["type"] == "MarkdownNote"]
    assert len(notes) == 1 and len(notes[0]["widgets_values"][0]) > 100
    for node in graph["nodes"]:
        if node["type"] == "MarkdownNote":
            continue
        assert node["type"] in NODE_CLASS_MAPPINGS or node["type"] in CORE
        inputs = inputs_of(node["type"])
        # Every input is there by name and type, and nothing else.
        assert {slot["name"] for slot in node["inputs"]} == set(inputs)
        for slot in node["inputs"]:
            kind = inputs[slot["name"]][0]
            assert slot["type"] == ("COMBO" if isinstance(kind, list) else kind)
            assert ("widget" in slot) == is_widget(kind)
        outputs = [(slot["name"], slot["type"]) for slot in node["outputs"]]
        cls = definition(node["type"])
        assert outputs == list(zip(getattr(cls, "RETURN_NAMES", ()), cls.RETURN_TYPES, strict=True))
        values = list(node["widgets_values"])
        for widget, options in widgets_of(node["type"]).items():
            kind, value = inputs[widget][0], values.pop(0)
            if isinstance(kind, list):
                assert value in kind or value.startswith("demo"), (widget, value)
            else:
                expected = {"INT": int, "FLOAT": (int, float), "STRING": str, "BOOLEAN": bool}[kind]
                assert isinstance(value, expected) and (kind == "BOOLEAN" or not isinstance(value, bool)), (widget, value)
                assert kind in ("STRING", "BOOLEAN") or options["min"] <= value <= options["max"], (widget, value)
            if options.get("control_after_generate"):
                assert values.pop(0) == "fixed"
        assert values == []


@pytest.mark.parametrize("name", NAMES)
def test_links(name: str, stage: Stage) -> None:
    graph = saved(name)
    nodes = {node["id"]: node for node in graph["nodes"]}
    assert graph["last_link_id"] == max(link[0] for link in graph["links"])
    assert len({link[0] for link in graph["links"]}) == len(graph["links"])
    for number, source, slot, sink, place, kind in graph["links"]:
        output, entry = nodes[source]["outputs"][slot], nodes[sink]["inputs"][place]
        assert number in output["links"] and entry["link"] == number
        assert output["type"] == entry["type"] == kind
    used = {link[0] for link in graph["links"]}
    assert {slot["link"] for node in graph["nodes"] for slot in node["inputs"]} - {None} == used
    assert {link for node in graph["nodes"] for slot in node["outputs"] for link in slot["links"] or []} == used
    for node in (each for each in graph["nodes"] if each["type"] != "MarkdownNote"):
        required = definition(node["type"]).INPUT_TYPES().get("required", {})
        for slot in node["inputs"]:
            assert "widget" in slot or slot["name"] not in required or slot["link"] is not None, (node["type"], slot["name"])


def converted(graph: dict[str, Any]) -> dict[str, Any]:
    """A saved graph as a prompt, by the browser's rules."""
    links = {link[0]: [str(link[1]), link[2]] for link in graph["links"]}
    prompt = {}
    for node in graph["nodes"]:
        if node["type"] == "MarkdownNote":
            continue
        values, inputs = list(node["widgets_values"]), {}
        for widget, options in widgets_of(node["type"]).items():
            inputs[widget] = values.pop(0)
            if options.get("control_after_generate"):
                values.pop(0)
        inputs |= {slot["name"]: links[slot["link"]] for slot in node["inputs"] if slot["link"] is not None}
        prompt[str(node["id"])] = {"inputs": inputs, "class_type": node["type"]}
    return prompt


@pytest.mark.parametrize("name", NAMES)
def test_the_api_twin_is_the_graph(name: str, stage: Stage) -> None:
    twin = json.loads((TWINS / f"{name}.json").read_text(encoding="utf-8"))
    assert {number: {key: node[key] for key in ("inputs", "class_type")} for number, node in twin.items()} == converted(
        saved(name)
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model", ["tiny", pytest.param("demo", marks=pytest.mark.slow)])
def test_a_workflow_runs(name: str, model: str, stage: Stage) -> None:
    """Through the same classes ComfyUI would call; quickly with the tiny model's folder and words."""
    prompt = json.loads((TWINS / f"{name}.json").read_text(encoding="utf-8"))
    for node in prompt.values():
        inputs = node["inputs"]
        if "repeats" in inputs:
            inputs["repeats"] = 1
        if model == "tiny" and "model" in inputs:
            inputs["model"] = inputs["model"].replace("demo", "tiny")
        if model == "tiny" and "prompt" in inputs:
            inputs["prompt"] = "fox"
    shown = run(prompt)
    assert len(shown) == sum(node["class_type"] == "PreviewImage" for node in prompt.values())
    assert all(len(picture.getcolors(1 << 24)) > 8 for batch in shown.values() for picture in batch)


def test_graphs_without_the_draft_of_a_method_do_not_pass(stage: Stage) -> None:
    """The control of the test above."""
    prompt = to_api(graphs()["speculative"])
    for node in prompt.values():
        node["inputs"].pop("draft", None)
    with pytest.raises(ValueError, match="connect Load Draft"):
        run(prompt)


# -- texts -----------------------------------------------------------------------------------------------------------


def test_every_text_has_a_chinese_twin(stage: Stage) -> None:
    english, chinese = texts(), locale("zh")
    assert locale("en") == english
    assert set(chinese) == set(english)
    for name, entry in english.items():
        other = chinese[name]
        assert set(other) == set(entry), name
        assert list(other.get("inputs", {})) == list(entry.get("inputs", {})), name
        assert list(other["outputs"]) == list(entry["outputs"]), name
        for text in leaves(other):
            assert text.strip(), name
        described = [
            other["description"],
            *(each["tooltip"] for each in [*other.get("inputs", {}).values(), *other["outputs"].values()]),
        ]
        assert all(re.search(r"[\u4e00-\u9fff]", text) for text in described), name
    assert locale("zh", "main")["dataTypes"].keys() == locale("en", "main")["dataTypes"].keys()


def leaves(value: Any) -> list[str]:
    """Every text in a tree."""
    return [value] if isinstance(value, str) else [text for each in value.values() for text in leaves(each)]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_texts_hold_no_syntax_of_the_browser(language: str) -> None:
    wrong = [text for name in ("nodeDefs", "main") for text in leaves(locale(language, name)) if SYNTAX.search(text)]
    assert wrong == []
