"""The workflows as data, and the two forms ComfyUI knows: the saved graph of the browser and the prompt of the API.

`python -m tests.nodes.write` writes them. A new method gets its workflow here by existing.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foredraft import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
from foredraft.nodes.load import TARGET_PARTS
from foredraft.nodes.method import exactness, node_id
from foredraft.pipelines import methods

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS, TWINS = ROOT / "workflows", Path(__file__).with_name("api")
WIDGET_TYPES = ("INT", "FLOAT", "STRING", "BOOLEAN")


class PreviewImage:
    """As far as graphs see ComfyUI's own node."""

    RETURN_TYPES: tuple[str, ...] = ()

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"images": ("IMAGE", {})}}


CORE = {"PreviewImage": PreviewImage}
FOX = {"prompt": "fox", "seed": 7}
TITLES = {"PreviewImage": "Preview Image", "MarkdownNote": "Markdown Note"}


@dataclass
class Node:
    """A node of a graph. values: widgets that are not at their defaults; links: input -> (node, output number)."""

    kind: str
    place: tuple[int, int]
    size: tuple[int, int]
    values: dict[str, Any] = field(default_factory=dict)
    links: dict[str, tuple[Node, int]] = field(default_factory=dict)
    title: str = ""
    id: int = 0


def definition(kind: str) -> Any:
    """The class of a node: ours, or a stand-in for ComfyUI's own."""
    return CORE[kind] if kind in CORE else NODE_CLASS_MAPPINGS[kind]


def inputs_of(kind: str) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Every visible input in order: name -> (type, options)."""
    types = definition(kind).INPUT_TYPES()
    both = {**types.get("required", {}), **types.get("optional", {})}
    return {name: (spec[0], spec[1] if len(spec) > 1 else {}) for name, spec in both.items()}


def is_widget(kind: Any) -> bool:
    """Whether an input of this type is a widget; a list is a menu."""
    return isinstance(kind, list) or kind in WIDGET_TYPES


def widgets_of(kind: str) -> dict[str, dict[str, Any]]:
    """The widgets of a node in order."""
    return {name: options for name, (type_, options) in inputs_of(kind).items() if is_widget(type_)}


def default_of(kind: str, name: str) -> Any:
    """A widget's value in a fresh node."""
    type_, options = inputs_of(kind)[name]
    return options.get("default", type_[0] if isinstance(type_, list) else None)


# -- the graphs ------------------------------------------------------------------------------------------------------


def note(text: str, height: int) -> Node:
    """A note in the upper left corner."""
    return Node("MarkdownNote", (0, 0), (400, height), {"text": text})


def loaders(top: int, parts: list[str]) -> tuple[list[Node], Node, Node | None]:
    """Load Target and a chain of one Load Draft per part."""
    target = Node("ForedraftLoadTarget", (40, top), (340, 110))
    nodes, draft = [target], None
    for number, part in enumerate(parts):
        links = {} if draft is None else {"draft": (draft, 0)}
        draft = Node("ForedraftLoadDraft", (40, top + 160 * (number + 1)), (340, 110), {"model": f"demo/{part}"}, links)
        nodes.append(draft)
    return nodes, target, draft


def method_graph(pipeline: Any) -> list[Node]:
    """One method: its picture, its map, its numbers."""
    config = pipeline.config_class
    parts = [name for name in pipeline.component_names() if name not in TARGET_PARTS]
    needs = f" It drafts with {' and '.join(parts)}: Load Draft." if parts else " It needs no draft model."
    first = pipeline.__doc__.strip().splitlines()[0]
    text = f"## {config.title}\n\n{first}{needs}\n\n{exactness(config)}\n\nSource: {config.paper}."
    nodes, target, draft = loaders(320, parts)
    top = 320 + 160 * len(nodes)
    method = Node(node_id(pipeline), (40, top), (360, 60 + 26 * len(widgets_of(node_id(pipeline)))))
    links = {"target": (target, 0), "method": (method, 0), **({"draft": (draft, 0)} if draft else {})}
    sampler = Node("ForedraftSampler", (460, 0), (420, 1020), FOX, links)
    picture = Node("PreviewImage", (940, 0), (340, 380), {}, {"images": (sampler, 0)})
    stats = Node("ForedraftTraceStats", (940, 440), (340, 320), {}, {"trace": (sampler, 1)})
    heatmap = Node("ForedraftHeatmap", (1340, 0), (340, 150), {}, {"trace": (sampler, 1), "images": (sampler, 0)})
    shown = Node("PreviewImage", (1340, 210), (560, 460), {}, {"images": (heatmap, 0)})
    return [note(text, 280), *nodes, method, sampler, picture, stats, heatmap, shown]


def comparison() -> list[Node]:
    """Plain decoding against SJD in three settings and a small draft model."""
    text = (
        "## One prompt, one seed, five ways of decoding\n\n"
        "Plain decoding is always there. *SJD* with rule seeded and the small draft model draw its picture, token for token; "
        "rule exact with tail coupled draws another picture of the same distribution; tail reuse (SJD++) is relaxed.\n\n"
        "Connect other methods to compare them. More repeats make the times steadier."
    )
    nodes, target, draft = loaders(320, ["draft_model"])
    settings = [
        ("ForedraftSJD", {}, "SJD, seeded"),
        ("ForedraftSJD", {"rule": "exact", "tail": "coupled"}, "SJD, exact"),
        ("ForedraftSJD", {"rule": "exact", "tail": "reuse"}, "SJD++, relaxed"),
        ("ForedraftSpeculative", {}, "Small draft model, seeded"),
    ]
    chosen = [
        Node(kind, (460, 270 * number), (340, 220), values, title=title) for number, (kind, values, title) in enumerate(settings)
    ]
    links = {"target": (target, 0), "draft": (draft, 0)}
    links |= {f"method_{number + 1}": (node, 0) for number, node in enumerate(chosen)}
    compare = Node("ForedraftCompare", (860, 0), (420, 1160), {**FOX, "repeats": 3}, links)
    shown = [
        Node("PreviewImage", (1340, 0), (720, 440), {}, {"images": (compare, 1)}, "Speed-up"),
        Node("PreviewImage", (1340, 500), (720, 440), {}, {"images": (compare, 3)}, "Pictures and token maps"),
        Node("PreviewImage", (2120, 0), (340, 380), {}, {"images": (compare, 0)}, "Pictures"),
    ]
    return [note(text, 280), *nodes, *chosen, compare, *shown]


def gallery() -> list[Node]:
    """The four kinds of token map of one picture."""
    text = (
        "## Four maps of one picture\n\n"
        "*run*: how many tokens were committed together, bright is fast. *round*: when. *source*: accepted drafts, recovered and "
        "bonus tokens. *probability*: how sure the target was.\n\nFlat backgrounds come in long runs, outlines token by token."
    )
    nodes, target, _ = loaders(320, [])
    method = Node("ForedraftSJD", (40, 480), (340, 220))
    values = {"prompt": "owl on blue", "seed": 7}
    sampler = Node("ForedraftSampler", (460, 0), (420, 1020), values, {"target": (target, 0), "method": (method, 0)})
    shown = [Node("PreviewImage", (460, 1090), (420, 380), {}, {"images": (sampler, 0)})]
    for number, kind in enumerate(("run", "round", "source", "probability")):
        x, y = 940 + 620 * (number % 2), 700 * (number // 2)
        links = {"trace": (sampler, 1), "images": (sampler, 0)}
        heatmap = Node("ForedraftHeatmap", (x, y), (560, 150), {"kind": kind, "opacity": 0.7}, links, f"Heatmap: {kind}")
        shown += [heatmap, Node("PreviewImage", (x, y + 200), (560, 440), {}, {"images": (heatmap, 0)})]
    return [note(text, 280), *nodes, method, sampler, *shown]


def graphs() -> dict[str, list[Node]]:
    """Every workflow by its file name, nodes numbered from 1."""
    made = {pipeline.__module__.rpartition(".")[2]: method_graph(pipeline) for pipeline in methods().values()}
    made |= {"compare": comparison(), "heatmap-gallery": gallery()}
    for nodes in made.values():
        for number, node in enumerate(nodes, start=1):
            node.id = number
    return made


# -- the two forms ---------------------------------------------------------------------------------------------------


def title_of(node: Node) -> str:
    """What the browser writes above a node."""
    return node.title or TITLES.get(node.kind) or NODE_DISPLAY_NAME_MAPPINGS[node.kind]


def to_api(nodes: list[Node]) -> dict[str, Any]:
    """The prompt that `POST /prompt` takes."""
    prompt = {}
    for node in nodes:
        if node.kind == "MarkdownNote":
            continue
        inputs = {name: node.values.get(name, default_of(node.kind, name)) for name in widgets_of(node.kind)}
        inputs |= {name: [str(source.id), slot] for name, (source, slot) in node.links.items()}
        prompt[str(node.id)] = {"inputs": inputs, "class_type": node.kind, "_meta": {"title": title_of(node)}}
    return prompt


def to_saved(name: str, nodes: list[Node]) -> dict[str, Any]:
    """The graph as the browser saves it (version 0.4)."""
    links: list[list[Any]] = []
    leaving: dict[tuple[int, int], list[int]] = {}
    entering: dict[tuple[int, str], int] = {}
    for node in nodes:
        for wire, (source, slot) in node.links.items():
            number = len(links) + 1
            kind = definition(source.kind).RETURN_TYPES[slot]
            place = [each["name"] for each in slots_of(node.kind)].index(wire)
            links.append([number, source.id, slot, node.id, place, kind])
            leaving.setdefault((source.id, slot), []).append(number)
            entering[node.id, wire] = number
    saved = [_saved_node(node, order, leaving, entering) for order, node in enumerate(nodes)]
    return {
        "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"foredraft/workflows/{name}")),
        "revision": 0,
        "last_node_id": len(nodes),
        "last_link_id": len(links),
        "nodes": saved,
        "links": links,
        "groups": [],
        "config": {},
        "extra": {},
        "version": 0.4,
    }


def slots_of(kind: str) -> list[dict[str, Any]]:
    """Input slots in the order of saved graphs: sockets first, then the widgets' own."""
    sockets = [{"name": name, "type": type_} for name, (type_, _) in inputs_of(kind).items() if not is_widget(type_)]
    widgets = [
        {"name": name, "type": "COMBO" if isinstance(type_, list) else type_, "widget": {"name": name}}
        for name, (type_, _) in inputs_of(kind).items()
        if is_widget(type_)
    ]
    return [*sockets, *widgets]


def _saved_node(node: Node, order: int, leaving: dict[tuple[int, int], list[int]], entering: dict[Any, int]) -> dict[str, Any]:
    common = {
        "id": node.id,
        "type": node.kind,
        "pos": list(node.place),
        "size": list(node.size),
        "flags": {},
        "order": order,
        "mode": 0,
    }
    if node.title:
        common["title"] = node.title
    if node.kind == "MarkdownNote":
        text = [node.values["text"]]
        return {
            **common,
            "inputs": [],
            "outputs": [],
            "properties": {},
            "widgets_values": text,
            "color": "#432",
            "bgcolor": "#653",
        }
    values = []
    for name, options in widgets_of(node.kind).items():
        values.append(node.values.get(name, default_of(node.kind, name)))
        if options.get("control_after_generate"):
            values.append("fixed")
    cls = definition(node.kind)
    names = getattr(cls, "RETURN_NAMES", cls.RETURN_TYPES)
    outputs = [
        {"name": name, "type": kind, "links": leaving.get((node.id, slot)) or None}
        for slot, (name, kind) in enumerate(zip(names, cls.RETURN_TYPES, strict=True))
    ]
    inputs = [{**slot, "link": entering.get((node.id, slot["name"]))} for slot in slots_of(node.kind)]
    origin = {} if node.kind in CORE else {"cnr_id": "foredraft"}
    properties = {**origin, "Node name for S&R": node.kind}
    return {**common, "inputs": inputs, "outputs": outputs, "properties": properties, "widgets_values": values}
