"""Acceptance Heatmap, Trace Stats, Speculative Compare."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from foredraft import NODE_CLASS_MAPPINGS
from foredraft.decoding.heatmap import KINDS
from foredraft.decoding.trace import Trace
from foredraft.nodes.host import image_batch, pictures_of
from foredraft.nodes.plot import _ticks
from PIL import Image

from ..tiny import sentence
from .conftest import Make
from .graphs import default_of, widgets_of
from .stand_in import InterruptProcessingException, Stage


@pytest.fixture
def drawn(node: Make, target: Any) -> tuple[torch.Tensor, Any]:
    """Two pictures and their record."""
    return node("ForedraftSampler", target=target, batch_size=2)


# -- heat map --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("legend", [True, False])
def test_heatmap_is_the_traces(node: Make, drawn: tuple[torch.Tensor, Any], kind: str, legend: bool) -> None:
    images, record = drawn
    (maps,) = node("ForedraftHeatmap", trace=record, images=images, kind=kind, legend=legend, opacity=0.5)
    assert maps.shape[0] == 2 and maps.shape[3] == 3 and maps.shape[1] >= 512 and maps.dtype == torch.float32
    for each, trace, picture in zip(pictures_of(maps), record.traces, pictures_of(images), strict=True):
        own = trace.heatmap(picture, kind, 0.5, legend)
        assert each.crop((0, 0, *own.size)).tobytes() == own.tobytes()


def test_heatmap_without_pictures(node: Make, drawn: tuple[torch.Tensor, Any]) -> None:
    (maps,) = node("ForedraftHeatmap", trace=drawn[1], opacity=1.0, legend=False)
    assert maps.shape == (2, 512, 512, 3)


def test_heatmap_of_other_pictures_is_refused(node: Make, drawn: tuple[torch.Tensor, Any]) -> None:
    with pytest.raises(ValueError) as error:
        node("ForedraftHeatmap", trace=drawn[1], images=drawn[0][:1])
    sentence(error, "1 pictures", "2 traces", "one sampler")


def test_pictures_there_and_back() -> None:
    sizes = [Image.new("RGB", (4, 3), (10, 20, 30)), Image.new("L", (6, 2), 255)]
    batch = image_batch(sizes)
    assert batch.shape == (2, 3, 6, 3) and float(batch.max()) == 1.0
    back = pictures_of(batch)
    assert back[0].getpixel((3, 2)) == (10, 20, 30) and back[0].getpixel((5, 2)) == (255, 255, 255)


# -- stats -----------------------------------------------------------------------------------------------------------


def test_stats(node: Make, drawn: tuple[torch.Tensor, Any]) -> None:
    record = drawn[1]
    for index, trace in enumerate(record.traces):
        tpf, length, rate, forwards, seconds, speedup, exact, text = node("ForedraftTraceStats", trace=record, index=index)
        assert (tpf, length, rate) == (trace.tokens_per_forward, trace.mean_acceptance_length, trace.acceptance_rate)
        assert (forwards, seconds, exact) == (trace.target_forwards, trace.seconds, True)
        assert speedup == record.speedup > 0
        assert Trace.from_json(text) == trace
        assert [type(value) for value in (forwards, exact, text)] == [int, bool, str]
    with pytest.raises(ValueError) as error:
        node("ForedraftTraceStats", trace=record, index=2)
    sentence(error, "no picture 2", "has 2")


def test_stats_in_words(drawn: tuple[torch.Tensor, Any], node: Make, target: Any) -> None:
    cls = NODE_CLASS_MAPPINGS["ForedraftTraceStats"]
    assert cls.OUTPUT_NODE is True
    (text,) = cls().read(drawn[1], 0)["ui"]["text"]
    assert "exact" in text and "16 tokens in" in text and "2 pictures" in text and "judged" in text
    _, plain = node("ForedraftSampler", target=target, method=node("ForedraftAutoregressive")[0])
    (text,) = cls().read(plain, 0)["ui"]["text"]
    assert "16 target forwards: 1.00 per forward" in text and "judged" not in text and "1 picture," in text


# -- comparison ------------------------------------------------------------------------------------------------------


def compare(stage: Stage, **inputs: Any) -> dict[str, Any]:
    """One run of the comparison."""
    cls = NODE_CLASS_MAPPINGS["ForedraftCompare"]
    values = {name: default_of("ForedraftCompare", name) for name in widgets_of("ForedraftCompare")}
    return cls().compare(**{**values, "node": "9", **inputs})


def test_compare(stage: Stage, node: Make, target: Any, draft: Any) -> None:
    chosen = {
        "method_1": node("ForedraftSJD")[0],
        "method_3": node("ForedraftSJD", rule="exact", tail="reuse")[0],
        "method_6": node("ForedraftSpeculative")[0],
    }
    out = compare(stage, target=target, draft=draft, batch_size=2, seed=4, repeats=2, **chosen)
    images, plot, table, sheet = out["result"]
    values, total = [value for value, _, _ in stage.progress], stage.progress[-1][1]
    assert values == sorted(values) and values[-1] == total == 16 * 4 * 2
    assert out["ui"]["text"] == [table]
    assert images.shape == (8, 16, 16, 3)
    plain, _ = node("ForedraftSampler", target=target, method=node("ForedraftAutoregressive")[0], seed=4, batch_size=2)
    eight_bit = plain.mul(255).round().div(255)
    for first in (0, 2, 6):
        assert torch.allclose(images[first : first + 2], eight_bit, atol=1e-6)
    assert not torch.allclose(images[4:6], eight_bit, atol=1e-2)
    lines = table.splitlines()
    names = ["ar", "sjd", "sjd rule=exact tail=reuse", "speculative"]
    assert [line.split("|")[1].strip() for line in lines[2:6]] == names
    assert "relaxed" in lines[4] and "sjd: all 2 pictures are plain decoding's, token for token" in lines
    assert plot.shape[0] == sheet.shape[0] == 1 and plot.shape[2] == 960
    assert len(pictures_of(plot)[0].getcolors(1 << 20)) > 8
    done = [data for _, data, _ in stage.events if data["done"] and data["node"] == "9"]
    assert [data["speedup"] is None for data in done] == [True, False, False, False] * 2
    assert [data["method"] for data in done] == names * 2
    assert [load["models"] for load in stage.loads[:1]] == [[target.patcher, draft.patchers[0]]]


def test_compare_alone_is_plain_against_seeded_sjd(stage: Stage, target: Any) -> None:
    images, _, table, _ = compare(stage, target=target)["result"]
    assert images.shape[0] == 2 and torch.equal(images[0], images[1])
    assert "| ar" in table and "| sjd" in table and "| speculative" not in table


def test_plain_decoding_is_not_compared_with_itself(stage: Stage, node: Make, target: Any) -> None:
    plain, sjd = node("ForedraftAutoregressive")[0], node("ForedraftSJD")[0]
    images, _, _, _ = compare(stage, target=target, method_1=plain, method_2=sjd)["result"]
    assert images.shape[0] == 2


def test_compare_can_be_interrupted(stage: Stage, target: Any) -> None:
    for after in (2, 9, 30):
        stage.checks, stage.interrupt_after = 0, after
        with pytest.raises(InterruptProcessingException):
            compare(stage, target=target)
    compare(stage, target=target)


def test_compare_says_what_is_missing(stage: Stage, node: Make, target: Any) -> None:
    with pytest.raises(ValueError) as error:
        compare(stage, target=target, method_1=node("ForedraftSpeculative")[0])
    sentence(error, "draft_model", "connect Load Draft")


@pytest.mark.parametrize("reach", [1.0, 1.3, 2.45, 4.0, 9.0, 40.0, 1000.0])
def test_ticks_of_the_plot(reach: float) -> None:
    ticks = _ticks(reach)
    assert 0.0 in ticks and 1.0 in ticks and len(ticks) <= 11 and max(ticks) <= reach
