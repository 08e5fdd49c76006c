"""The frontend extension: its functions run in Node where there is one; what it names exists; every node has its help."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foredraft import NODE_CLASS_MAPPINGS, WEB_DIRECTORY
from foredraft.decoding.heatmap import ANCHORS, colour
from foredraft.nodes.method import configure, method_nodes
from foredraft.nodes.progress import EVENT

from ..nodes.graphs import inputs_of
from ..nodes.stand_in import Stage, installed

ROOT = Path(__file__).resolve().parents[2]
WEB = ROOT / WEB_DIRECTORY
SCRIPTS = sorted(WEB.rglob("*.js"))
PAGES = [(name, language) for name in NODE_CLASS_MAPPINGS for language in ("en", "zh")]
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="Node.js is not installed")


def run(code: str, given: Any = None) -> Any:
    """What an ES module that sets `result` from `given` makes of it; `load` imports one of our files."""
    load = f"const load = (name) => import({json.dumps(WEB.as_uri())} + '/' + name);"
    text = f"{load}\nconst given = {json.dumps(given)};\nlet result;\n{code}\nprocess.stdout.write(JSON.stringify(result));"
    command = [str(NODE), "--no-warnings", "--input-type=module"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# -- what the files name ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_imports_are_there(path: Path) -> None:
    """Our own files, and the two modules every version of the frontend serves; nothing from the network."""
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r"""(?:from|import)\s*\(?\s*["']([^"']+)["']""", text):
        if name.startswith("../../"):
            assert name in ("../../scripts/app.js", "../../scripts/api.js")
        else:
            assert (path.parent / name).is_file(), f"{path.name} imports {name}"
    assert not re.search(r"https?://|\beval\(|new Function", text)


def test_named_nodes_and_events_exist() -> None:
    text = (WEB / "foredraft.js").read_text(encoding="utf-8")
    named = set(re.findall(r'"(Foredraft\w+)"', text))
    assert named and named <= set(NODE_CLASS_MAPPINGS)
    assert f'addEventListener("{EVENT}"' in text


@needs_node
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_parses(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    done = subprocess.run([str(NODE), "--input-type=module", "--check"], input=source, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# -- the map ---------------------------------------------------------------------------------------------------------


@needs_node
def test_colours_are_the_heat_maps() -> None:
    places = np.linspace(0.0, 1.0, 97)
    drawn = run("const { ANCHORS, colour } = await load('scale.js'); result = [ANCHORS, given.map(colour)];", places.tolist())
    assert drawn[0] == ANCHORS.tolist()
    assert np.abs(np.array(drawn[1]) - colour(places)).max() <= 0.5


@needs_node
def test_run_ends() -> None:
    cases: list[list[int]] = [[], [1, 1, 1], [3, 3, 3, 2, 2, 1], [2, 2, 2, 2], [3, 3], [4, 4, 1, 1], [2, 1, 2, 2]]
    found = run("const { runEnds } = await load('scale.js'); result = given.map(runEnds);", cases)
    # The last two are no raster order (a trace of another kind): a block ends where the value changes.
    assert found == [[], [0, 1, 2], [2, 4, 5], [1, 3], [1], [1, 2, 3], [0, 1, 3]]


@needs_node
def test_figures_for_people() -> None:
    code = "const s = await load('scale.js'); result = [given.map(s.figure), given.map(s.share), given.map(s.duration)];"
    figures, shares, durations = run(code, [0.634, 3.614, 12.34, 250.2, None])
    assert figures == ["0.63", "3.61", "12.3", "250", "–"]
    assert shares[0] == "63 %" and shares[-1] == "–"
    assert durations == ["0.63 s", "3.61 s", "12.3 s", "4:10 min", "–"]


@needs_node
def test_progress_keeps_what_a_run_drew() -> None:
    """One method updates its entry, the next adds one, a new round of the comparison and a new run begin afresh."""
    code = """
    const { Progress } = await load('live.js');
    const progress = new Progress();
    result = given.map((event) => {
      if (event === "start") progress.stale = true;
      else progress.take(event);
      return progress.entries.map(({ method, rounds }) => [method, rounds]);
    });"""

    def event(method: str, rounds: int, done: bool = False) -> dict[str, Any]:
        return {"method": method, "rounds": rounds, "done": done}

    ar, sjd, last = event("ar", 4, True), event("sjd", 1), event("sjd", 2, True)
    seen = run(code, [event("ar", 2), ar, sjd, last, event("sjd", 1), ar, "start", sjd])
    assert seen[0] == [["ar", 2]] and seen[1] == [["ar", 4]]
    assert seen[3] == [["ar", 4], ["sjd", 2]]
    assert seen[4] == [["ar", 4], ["sjd", 2], ["sjd", 1]], "the same method again, with other options"
    assert seen[5] == [["ar", 4]], "the comparison's next round"
    assert seen[6] == seen[5], "a run that has not reached the node leaves its map"
    assert seen[7] == [["sjd", 1]]


# -- widgets that hide -----------------------------------------------------------------------------------------------


def settings(config: Any) -> list[dict[str, Any]]:
    """Every combination of a method's menus and switches, the other fields at their defaults."""
    fields = dataclasses.fields(config)
    menus = [
        item.metadata["choices"] or ((True, False) if isinstance(item.default, bool) else (item.default,)) for item in fields
    ]
    return [dict(zip([item.name for item in fields], values, strict=True)) for values in itertools.product(*menus)]


@needs_node
@pytest.mark.parametrize("name", method_nodes())
def test_hidden_is_what_does_not_apply(name: str) -> None:
    """The browser hides exactly the widgets whose values `configure` replaces by defaults."""
    node = method_nodes()[name]
    config = node.pipeline.config_class
    cases = settings(config)
    code = """
    const { conditionsOf, applies } = await load('visibility.js');
    const conditions = conditionsOf({ input: given.input });
    const shown = (values, name) => !(name in conditions) || applies(conditions[name], values);
    result = given.cases.map((values) => Object.keys(values).filter((name) => shown(values, name)));"""
    shown = run(code, {"input": node.INPUT_TYPES(), "cases": cases})
    for values, names in zip(cases, shown, strict=True):
        text = {key: str(value) for key, value in values.items()}
        wanted = [
            item.name
            for item in dataclasses.fields(config)
            if all(text[other] in allowed for other, allowed in item.metadata["visible_if"].items())
        ]
        assert names == wanted, values
        if names:
            try:
                made = configure(config, values)
            except ValueError:
                continue
            assert all(made.applies(each) for each in names)


@needs_node
def test_hiding_keeps_values_and_places() -> None:
    code = """
    const { watchVisibility } = await load('visibility.js');
    const widget = (name, value) => ({ name, value, options: {}, computeSize: undefined });
    const node = {
      widgets: [widget("rule", "seeded"), widget("tail", "reuse"), widget("window", 5)],
      inputs: [{ widget: { name: "rule" } }, { widget: { name: "tail" } }],
      linked: new Set(),
      size: [300, 0],
      isInputConnected(slot) { return this.linked.has(slot); },
      computeSize() { return [300, 24 * this.widgets.filter((w) => !w.hidden).length]; },
      setSize(size) { this.size = size; },
    };
    const shown = () => node.widgets.filter((w) => !w.hidden).map((w) => w.name);
    const state = () => [shown(), node.widgets.map((w) => w.value), node.size[1]];
    const set = (value) => { node.widgets[0].value = value; node.widgets[0].callback(value); };
    watchVisibility(node, { tail: { rule: ["exact"] } });
    result = [state()];
    set("exact"); result.push(state());
    node.size[1] += 100;
    set("seeded"); result.push(state());
    node.linked.add(1); node.onConnectionsChange(); result.push(state());
    node.linked.clear(); node.linked.add(0); node.onConnectionsChange(); result.push(state());
    node.linked.clear(); node.onConnectionsChange(); result.push(state());
    node.widgets[0].value = "exact"; node.size[1] = 72; node.onConfigure(); result.push(state());"""
    first, exact, seeded, tail_linked, rule_linked, again, loaded = run(code)
    assert first == [["rule", "window"], ["seeded", "reuse", 5], 48]
    assert exact == [["rule", "tail", "window"], ["exact", "reuse", 5], 72]
    assert seeded == [["rule", "window"], ["seeded", "reuse", 5], 148], "the height a user gave stays"
    assert tail_linked[0] == ["rule", "tail", "window"], "a linked widget is shown"
    assert rule_linked[0] == ["rule", "tail", "window"], "what only the run will know hides nothing"
    assert again == seeded
    assert loaded == [["rule", "tail", "window"], ["exact", "reuse", 5], 72], "a loaded node keeps the size it brings"


# -- help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "language"), PAGES, ids=["-".join(page) for page in PAGES])
def test_help_names_every_input_and_output(name: str, language: str, tmp_path: Path) -> None:
    text = (WEB / "docs" / name / f"{language}.md").read_text(encoding="utf-8")
    cls = NODE_CLASS_MAPPINGS[name]
    words = set(re.findall(r"`([^`]+)`", text))
    # `method_1` to `method_6` stands for those between.
    spans = re.findall(r"`(\w+_)(\d+)` \S+ `\1(\d+)`", text)
    words |= {f"{stem}{number}" for stem, low, high in spans for number in range(int(low), int(high) + 1)}
    with installed(Stage(models=tmp_path)):
        types = inputs_of(name)
    assert {*types, *cls.RETURN_NAMES} <= words, {*types, *cls.RETURN_NAMES} - words
    for menu in (spec for spec, _ in types.values() if isinstance(spec, list)):
        assert {each for each in menu if "/" not in each} <= words
    assert "![" not in text and "http" not in text


@pytest.mark.parametrize("name", NODE_CLASS_MAPPINGS)
def test_chinese_help_uses_the_names_on_the_node(name: str) -> None:
    text = (WEB / "docs" / name / "zh.md").read_text(encoding="utf-8")
    named = json.loads((ROOT / "locales" / "zh" / "nodeDefs.json").read_text(encoding="utf-8"))
    for entry in named[name].get("inputs", {}).values():
        assert entry["name"] in text or re.search(r" \d$", entry["name"]), entry["name"]
    for quoted in re.findall("“([^”]+)”", text):
        assert quoted in {each["display_name"] for each in named.values()} or "/" in quoted


def test_no_help_for_nodes_that_are_gone() -> None:
    assert {path.name for path in (WEB / "docs").iterdir()} == set(NODE_CLASS_MAPPINGS)
