"""The named endpoints, the controls of the page, and the command that starts it."""

from __future__ import annotations

import builtins
import json
import socket
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from foredraft import SJDPipeline, cli
from foredraft.bench import cases
from foredraft.bench.cases import Family
from foredraft.decoding.trace import Trace
from foredraft.pipelines import methods
from foredraft.pipelines.options import option
from foredraft.pipelines.sjd import SJDConfig
from foredraft.web import streaming
from foredraft.web.controls import controls
from foredraft.web.streaming import Models
from foredraft.web.studio import Studio
from PIL import Image

from ..tiny import folder  # noqa: F401
from .conftest import missing

SETTINGS = ["guidance_scale", "temperature", "top_k", "top_p", "negative_prompt", "size"]


@pytest.fixture(scope="module")
def client(url: str) -> Any:
    from gradio_client import Client

    return Client(url, verbose=False)


def test_three_endpoints_with_names_and_defaults(client: Any) -> None:
    info = client.view_api(return_format="dict", print_info=False)
    assert info["unnamed_endpoints"] == {}
    names = {name: [item["parameter_name"] for item in at["parameters"]] for name, at in info["named_endpoints"].items()}
    assert names == {
        "/race": ["prompt", "seed", "method", *SETTINGS],
        "/explore": ["prompt", "seed", "method", *SETTINGS, "kind"],
        "/compare": ["prompt", "seed", "methods", "repeats", *SETTINGS],
    }
    for at in info["named_endpoints"].values():
        assert [item["parameter_name"] for item in at["parameters"] if not item["parameter_has_default"]] == ["prompt"]
        assert all(len(item["label"]) > 3 for item in [*at["parameters"], *at["returns"]])


def test_the_web_draws_what_python_and_the_command_line_draw(client: Any, pipe: Any, tmp_path: Any, capsys: Any) -> None:
    plain, fast, token_map, report = client.predict(prompt="red apple on blue", seed=5, api_name="/race")
    assert report["seeded"] and report["identical"] and report["complete"] and report["speed_up"] > 0
    assert report["plain"]["tokens"] == report["method"]["tokens"]
    out = pipe("red apple on blue", generator=torch.Generator().manual_seed(5))
    assert out.tokens[0].tolist() == report["method"]["tokens"]
    file = tmp_path / "apple.png"
    assert cli.main(["generate", "red apple on blue", "--seed", "5", "--out", str(file)]) == 0
    drawn = np.array(Image.open(file))
    for path in (plain, fast):
        assert np.array_equal(np.array(Image.open(path).convert("RGB")), drawn)
    assert min(Image.open(token_map).size) >= 512


def test_explore_returns_the_whole_trace_and_settings_arrive(client: Any, pipe: Any) -> None:
    call = {"guidance_scale": 1.0, "temperature": 0.7, "top_k": 20}
    method = "sjd:rule=exact,tail=coupled"
    image, token_map, report = client.predict(prompt="fox", seed=2, method=method, **call, kind="source", api_name="/explore")
    trace = Trace.from_json(json.dumps(report["trace"]))
    assert trace.complete and trace.exact and trace.method == "sjd" and report["options"] == {"rule": "exact", "tail": "coupled"}
    out = pipe("fox", generator=torch.Generator().manual_seed(2), rule="exact", tail="coupled", **call)
    assert out.tokens[0].tolist() == report["tokens"] and out.traces[0].source == trace.source
    assert Image.open(image).size == (64, 64) and Image.open(token_map).width > 512


def test_compare_returns_a_row_per_method(client: Any) -> None:
    sheet, report = client.predict(prompt="fox", methods="sjd", api_name="/compare")
    assert [row["name"] for row in report["rows"]] == ["ar", "sjd"]
    assert report["rows"][1]["identical"] and report["rows"][0]["speedup"] == 1.0 and Image.open(sheet).width > 2 * 288


@pytest.mark.parametrize(
    ("endpoint", "call", "said"),
    [
        ("/race", {"prompt": ""}, "the prompt is empty"),
        ("/race", {"prompt": "red aple"}, "apple"),
        ("/race", {"prompt": "fox", "method": "sjdd"}, "did you mean 'sjd'"),
        ("/race", {"prompt": "fox", "method": "sjd:rule=exakt"}, "did you mean 'exact'"),
        ("/explore", {"prompt": "fox", "method": "sjd:windw=3"}, "did you mean 'window'"),
        ("/explore", {"prompt": "fox", "guidance_scale": 1, "negative_prompt": "red"}, "guidance_scale above 1"),
        ("/explore", {"prompt": "fox", "size": "5 x 5"}, "64 x 64"),
        ("/explore", {"prompt": "fox", "kind": "heat"}, "one of run"),
        ("/compare", {"prompt": "fox", "repeats": 99}, "repeats"),
    ],
)
def test_errors_are_one_sentence(client: Any, endpoint: str, call: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception) as error:
        client.predict(**call, api_name=endpoint)
    assert said in str(error.value) and "\n" not in str(error.value) and "Traceback" not in str(error.value)


def test_cancelling_a_job_frees_the_server(client: Any) -> None:
    job = client.submit(prompt="fox", methods="sjd speculative", repeats=5, api_name="/compare")
    while not job.outputs():
        assert not job.done()
    job.cancel()
    _, _, report = client.predict(prompt="cat", seed=1, api_name="/explore")
    assert report["trace"]["complete"]


# -- controls and command --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LaterConfig(SJDConfig):
    """A method somebody adds."""

    name: ClassVar[str] = "later"
    title: ClassVar[str] = "A later method"

    charm: float = option(0.25, "how charming", low=0.0, high=1.0, step=0.05, visible_if={"rule": ("exact",)})


class LaterPipeline(SJDPipeline):
    """Its pipeline."""

    config_class = LaterConfig


def test_a_method_added_later_appears_by_itself(folder: Any, monkeypatch: Any) -> None:  # noqa: F811
    if not importable("gradio"):
        missing("gradio")
    from foredraft.web.demo import Page

    more = {**methods(), "later": LaterPipeline}
    for module in (cases, streaming):
        monkeypatch.setattr(module, "methods", lambda: more)
    built = Page(Studio(Models(Family(folder, threads=1))))
    assert "later" in built.methods and "later:rule=exact" in dict(map(reversed, built.presets))
    parts = {part["props"].get("elem_id"): part["props"] for part in built.blocks.config["components"]}
    assert parts["later-charm"]["value"] == 0.25 and not parts["later-charm"]["visible"]
    assert parts["sjd-tau"]["maximum"] == 2.0 and parts["sjd-rule"]["choices"][0][0] == "seeded"
    items = controls(LaterConfig)
    values = {item.name: parts[f"later-{item.name}"]["value"] for item in items}
    modes = [parts[f"later-{item.name}-mode"]["value"] for item in items if item.modes]
    refresh, at = built._refresher("later"), [item.name for item in items for _ in range(1 + bool(item.modes))].index("charm")
    for rule, visible, word in (("seeded", False, "same picture"), ("exact", True, ">exact<")):
        shown = refresh(*{**values, "rule": rule}.values(), *modes)
        assert shown[at]["visible"] is visible and word in shown[-1]
    measured = refresh(*{**values, "rule": "exact"}.values(), "measured")
    assert "fd-error" in measured[-1] and "seeded" in measured[-1], "a contradiction is said before anything is drawn"


def importable(name: str) -> bool:
    try:
        builtins.__import__(name)
    except ModuleNotFoundError:
        return False
    return True


def test_without_gradio_one_sentence_says_what_to_install(monkeypatch: Any, capsys: Any) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gradio" else real(name, *rest))
    assert cli.main(["demo"]) == 2
    said = capsys.readouterr().err.strip()
    assert "gradio" in said and "pip install 'foredraft[demo]'" in said and "\n" not in said


def test_a_taken_port_is_one_sentence(folder: Any, capsys: Any) -> None:  # noqa: F811
    if not importable("gradio"):
        missing("gradio")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["demo", "--model", str(folder), "--port", str(port)]) == 2
    said = capsys.readouterr().err.strip()
    assert str(port) in said and "--port" in said and "\n" not in said


def test_a_model_that_is_not_there_is_one_sentence(tmp_path: Any, capsys: Any) -> None:
    if not importable("gradio"):
        missing("gradio")
    assert cli.main(["demo", "--model", str(tmp_path / "none")]) == 2
    assert "no folder" in capsys.readouterr().err
