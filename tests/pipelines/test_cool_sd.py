"""Cool-SD and its baselines as a pipeline: settings, exactness, neutral settings, the neighbour table, loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import foredraft
import pytest
import torch
from foredraft.decoding.rules import Exact, Pooled, Weighted
from foredraft.models.head import DraftHead
from foredraft.models.neighbours import nearest_codes
from foredraft.pipelines.cool_sd import CoolSDConfig, CoolSDPipeline
from foredraft.pipelines.drafting import draft_nodes
from torch import Tensor

from ..tiny import PROMPTS, build_pipeline, codes, generators, sentence

CALL = {"height": 32, "width": 32}
TREES: tuple[dict[str, Any], ...] = (
    {"draft_length": 3},
    {"tree": "static", "draft_length": 3, "total_nodes": 7},
    {"tree": "dynamic", "draft_length": 3, "total_nodes": 8},
)


def test_exactness_of_a_setting() -> None:
    exact: list[dict[str, Any]] = [
        {"rule": "exact"},
        {"rule": "seeded"},
        {"rule": "uniform", "delta": 1.0},
        {"rule": "annealed", "delta": 0.3},
        {"rule": "annealed", "delta": 0.3, "clamp": False},
        {"rule": "lantern", "tvd": 0.0},
        {"rule": "lantern++", "lam": 0.0},
    ]
    relaxed: list[dict[str, Any]] = [
        {},
        {"clamp": False},
        {"delta": 1.0},
        {"rule": "uniform"},
        {"rule": "lantern"},
        {"rule": "lantern++"},
        {"schedule": "linear"},
    ]
    for options in exact:
        assert CoolSDConfig(**options).exact and CoolSDConfig(**options).badge == "exact", options
    for options in relaxed:
        assert not CoolSDConfig(**options).exact and CoolSDConfig(**options).badge == "relaxed", options


def test_the_linear_schedule_refuses_long_drafts() -> None:
    with pytest.raises(ValueError) as error:
        CoolSDConfig(schedule="linear", draft_length=8)
    sentence(error, "linear", "below 8", "got 8")
    assert CoolSDConfig(schedule="linear", draft_length=7).weights()[0] > 1
    assert CoolSDConfig(rule="exact", schedule="linear", draft_length=8).exact, "what does not apply is not judged"


def test_options_apply_where_they_should() -> None:
    annealed, lantern = CoolSDConfig(), CoolSDConfig(rule="lantern", tree="static")
    assert [name for name in ("delta", "nu", "clamp", "k", "tvd", "lam", "total_nodes") if annealed.applies(name)] == [
        "delta",
        "nu",
        "clamp",
    ]
    assert [name for name in ("delta", "k", "tvd", "lam", "resample", "total_nodes", "branching") if lantern.applies(name)] == [
        "k",
        "tvd",
        "resample",
        "total_nodes",
    ]
    assert not CoolSDConfig(schedule="linear").applies("nu")


def test_the_rule_of_a_setting(pipe: Any) -> None:
    made: CoolSDPipeline = pipe("cool_sd")
    device = torch.device("cpu")
    assert isinstance(made.rule(CoolSDConfig(rule="exact"), device), Exact)
    uniform = made.rule(CoolSDConfig(rule="uniform", delta=1.7), device)
    assert isinstance(uniform, Weighted) and uniform.weights == (1.7,)
    cooled = made.rule(CoolSDConfig(clamp=False), device)
    assert isinstance(cooled, Weighted) and len(cooled.weights) == 5 and cooled.weights[0] == pytest.approx(2.855, abs=1e-3)
    for options, bound in (({"rule": "lantern", "tvd": 0.2}, (0.2, None)), ({"rule": "lantern++", "lam": 3.0}, (None, 3.0))):
        rule = made.rule(CoolSDConfig(**options, k=5, resample="paper"), device)
        assert isinstance(rule, Pooled) and (rule.tvd, rule.lam) == bound and rule.resample == "paper"
        assert torch.equal(rule.near, nearest_codes(made.codec.codebook(), 5))
    assert made.near(CoolSDConfig(rule="lantern", k=4096), device).shape == (48, 47), "clipped to the codebook"


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_neutral_settings_draw_the_exact_rules_pictures(pipe: Any, tree: dict[str, Any]) -> None:
    """Token for token: the same coins meet the same chances."""

    def tokens(**options: Any) -> Tensor:
        return codes(pipe("cool_sd"), list(PROMPTS), generator=generators(1, 2, 3, 4), **CALL, **tree, **options)

    exact = tokens(rule="exact")
    assert torch.equal(tokens(rule="uniform", delta=1.0), exact)
    assert torch.equal(tokens(rule="annealed", delta=0.3), exact)
    assert torch.equal(tokens(rule="lantern", tvd=0.0, resample="paper"), exact)
    assert torch.equal(tokens(rule="lantern++", lam=0.0), exact)
    assert not torch.equal(tokens(rule="uniform", delta=3.0), exact)
    assert not torch.equal(tokens(rule="lantern", tvd=0.5, k=20), exact)


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_more_relaxed_is_faster_and_costs_more(pipe: Any, tree: dict[str, Any]) -> None:
    def measured(**options: Any) -> tuple[float, float]:
        traces = pipe("cool_sd")(
            list(PROMPTS) * 4, generator=generators(*range(16)), output_type="latent", **CALL, **tree, **options
        ).traces
        forwards, cost = (sum(getattr(trace, name) for trace in traces) for name in ("target_forwards", "relaxation_per_token"))
        return forwards, cost

    ladders = [
        [{"rule": "exact"}, *({"rule": "uniform", "delta": delta} for delta in (1.5, 4.0))],
        [{"rule": "exact"}, *({"rule": "lantern", "k": 20, "tvd": tvd} for tvd in (0.1, 0.6))],
    ]
    for ladder in ladders:
        results = [measured(**options) for options in ladder]
        assert results[0][0] > results[-1][0] and results[0][1] == 0
        assert results[0][1] < results[1][1] < results[2][1]


def test_a_tree_has_as_many_nodes_as_asked(pipe: Any) -> None:
    made: CoolSDPipeline = pipe("cool_sd")
    for nodes, depth in ((1, 1), (7, 3), (16, 5), (60, 6)):
        config = CoolSDConfig(tree="static", total_nodes=nodes, draft_length=depth)
        paths = made.paths(config)
        assert paths is not None and len(set(paths)) == nodes and max(map(len, paths)) <= depth
        assert made.scratch(config, torch.device("cpu")) == nodes == draft_nodes("static", depth, 1, nodes, paths)
    shape = made.paths(CoolSDConfig(tree="static"))
    assert shape is not None and max(map(len, shape)) == 5, "sixteen nodes reach as deep as they may"


def test_a_head_for_another_target_is_refused(parts: dict[str, Any]) -> None:
    other = DraftHead(dim=48, heads=2)
    with pytest.raises(ValueError) as error:
        build_pipeline({**parts, "draft_head": other}, "cool_sd")
    sentence(error, "draft head", "48", "32")


def test_it_loads_and_saves(parts: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    made = build_pipeline(parts, "cool_sd")
    made.save_pretrained(tmp_path / "family")
    again: Any = foredraft.CoolSDPipeline.from_pretrained(tmp_path / "family")
    again.set_progress_bar_config(disable=True)
    assert torch.equal(codes(again, seed=4), codes(made, seed=4))
    with pytest.raises(ValueError) as error:
        foredraft.CoolSDPipeline.from_pretrained(folder)
    sentence(error, "draft_head", "CoolSDPipeline")
