"""A stand-in ComfyUI around every test, with the tiny family in its models folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from foredraft import NODE_CLASS_MAPPINGS

from ..tiny import folder, parts, pipe  # noqa: F401
from .graphs import default_of, widgets_of
from .stand_in import Stage, installed

Make = Callable[..., Any]


@pytest.fixture
def stage(tmp_path: Path, folder: Path, parts: dict[str, Any]) -> Iterator[Stage]:  # noqa: F811
    """ComfyUI's modules; `models/foredraft/tiny` is the tiny family with its draft model and its head."""
    tiny = tmp_path / "models" / "foredraft" / "tiny"
    shutil.copytree(folder, tiny)
    parts["draft_head"].save_pretrained(tiny / "draft_head")
    index = json.loads((tiny / "model_index.json").read_text())
    (tiny / "model_index.json").write_text(json.dumps({**index, "draft_head": ["foredraft.models.head", "DraftHead"]}))
    threads = torch.get_num_threads()
    with installed(Stage(tmp_path / "models")) as made, torch.inference_mode():
        yield made
    assert torch.get_num_threads() == threads


@pytest.fixture
def node(stage: Stage) -> Make:
    """`node(id, **inputs)`: run a node, widgets at their defaults unless given; a node with text returns its outputs too."""

    def run(name: str, **inputs: Any) -> Any:
        cls = NODE_CLASS_MAPPINGS[name]
        values = {each: default_of(name, each) for each in widgets_of(name)}
        out = getattr(cls(), cls.FUNCTION)(**{**values, **inputs})
        return out["result"] if isinstance(out, dict) else out

    return run


@pytest.fixture
def target(node: Make) -> Any:
    """The tiny target, loaded."""
    return node("ForedraftLoadTarget", model="tiny")[0]


@pytest.fixture
def draft(node: Make) -> Any:
    """Its small draft model, loaded."""
    return node("ForedraftLoadDraft", model="tiny/draft_model")[0]
