"""What the page says and shows."""

from __future__ import annotations

import base64
import copy
import io
import json
import re
import threading
from typing import Any

import numpy as np
import pytest
from foredraft.bench.cases import Case
from foredraft.decoding.trace import Trace
from foredraft.web import maps, page
from foredraft.web.streaming import Models, Throttle
from foredraft.web.studio import Studio, race_report, whole
from PIL import Image

CALL: dict[str, Any] = {"height": 32, "width": 32}


def run(studio: Studio, job: str, *arguments: Any, stopped: bool = False) -> list[Any]:
    """(over, frames, job) whenever a job showed something."""
    stop = threading.Event()
    if stopped:
        stop.set()
    work = getattr(studio, job)("fox", 0, *arguments, CALL, stop, Throttle(share=0.99, least=0.0))
    return [(item.over, item.frames, copy.copy(item)) for item in work]


def pictures(html: str) -> list[Image.Image]:
    return [Image.open(io.BytesIO(base64.b64decode(text))) for text in re.findall(r"data:image/\w+;base64,([\w+/=]+)", html)]


@pytest.mark.parametrize("text", ["", "sjd:rule=exact", "sjd:rule=exact,tail=reuse"])
def test_a_race_says_what_is_true_of_the_pictures(studio: Studio, text: str) -> None:
    over, frames, job = run(studio, "race", text or "sjd")[-1]
    html = page.race(frames, job.outputs, 0.1)
    assert over and 'data-over="true"' in html and html.count("fd-card") == 2 and html.count('data-state="done"') == 2
    said = "verified: all 64 tokens are equal" if not text else "relaxed rule" if "reuse" in text else "keeps the law"
    assert said in html and f"{page.speed_up(frames):.2f}×" in html
    images = pictures(html)
    assert len(images) == 4 and images[0].size == (32, 32) and images[1].size == (8, 8)
    if not text:
        assert np.array_equal(np.array(images[0]), np.array(images[2]))
    report = race_report("fox", 0, job)
    assert report["identical"] is (text == "") and report["seeded"] is (text == "")
    assert report["speed_up"] == frames[0].seconds / frames[1].seconds and json.dumps(report)


def test_unequal_tokens_are_never_called_verified(studio: Studio) -> None:
    _, frames, job = run(studio, "race", "sjd")[-1]
    job.outputs[1].tokens[0, 2, 3] += 1
    said = page.outcome(frames, job.outputs)
    assert "Not verified" in said and "✓" not in said and "token 19" in said and "fd-error" in said


def test_a_stopped_race_claims_nothing(studio: Studio) -> None:
    _, frames, job = run(studio, "race", "sjd", stopped=True)[-1]
    html = page.race(frames, job.outputs, 0.0)
    assert "Stopped" in html and "verified" not in html and html.count('data-state="stopped"') == 2
    assert race_report("fox", 0, job)["identical"] is None


def test_the_map_fills_in_and_its_last_state_is_the_trace(studio: Studio) -> None:
    seen = run(studio, "race", "sjd")
    filled = []
    for _, (_, fast), _ in seen:
        picture, rounds = maps.token_map(fast, "run", 8)
        alpha = np.array(picture.convert("RGBA"))[..., 3]
        assert (alpha > 0).sum() == fast.tokens == sum(value >= 0 for row in rounds for value in row)
        filled.append(fast.tokens)
    assert filled == sorted(filled) and filled[0] < filled[-1] == 64
    trace: Trace = seen[-1][1][1].trace
    assert rounds == trace.round


def test_a_live_map_shows_what_the_finished_one_shows(studio: Studio) -> None:
    """The map made of round lengths alone equals the trace's on the tokens both have."""
    seen = run(studio, "race", "sjd")
    whole_map = np.array(maps.token_map(seen[-1][1][1], "run", 8)[0].convert("RGB")).reshape(-1, 3)
    for _, (_, fast), _ in seen:
        part = np.array(maps.token_map(fast, "run", 8)[0].convert("RGB")).reshape(-1, 3)
        assert np.array_equal(part[: fast.tokens], whole_map[: fast.tokens])


@pytest.mark.parametrize("kind", ["run", "round", "source", "probability"])
def test_explore_shows_every_kind_of_map(studio: Studio, kind: str) -> None:
    seen = run(studio, "explore", Case("sjd"))
    for _, (frame,), _ in seen:
        html = page.explore(frame, kind, 0.35)
        assert ("opacity:0.35" in html) == bool(frame.tokens)
    frame = seen[-1][1][0]
    assert len(pictures(html)) == 3 and maps.HELP[kind] in html and "64 / 64" in page.numbers(frame.trace)
    assert ("accepted" in maps.legend(frame, "source")) and "gradient" in maps.legend(frame, "run")
    links = page.downloads(frame, "Red fox!", kind, 0.5)
    files = dict(re.findall(r'download="([^"]+)" href="data:[^,]+,([\w+/=]+)"', links))
    assert sorted(files) == sorted([f"red-fox-{kind}.png", "red-fox.json", "red-fox.png"])
    assert Trace.from_json(base64.b64decode(files["red-fox.json"]).decode()) == frame.trace
    assert Image.open(io.BytesIO(base64.b64decode(files["red-fox.png"]))).size == (32, 32)


def test_the_plot_adds_up(studio: Studio) -> None:
    frame = run(studio, "explore", Case("sjd"))[-1][1][0]
    plot = page.rounds_plot(frame)
    bars = {kind: [float(h) for h in re.findall(rf'class="fd-{kind}"[^>]*height="([\d.]+)"', plot)] for kind in ("kept", "own")}
    assert len(bars["kept"]) == len(bars["own"]) == frame.trace.rounds
    share = sum(bars["kept"]) / (sum(bars["kept"]) + sum(bars["own"]))
    assert share == pytest.approx(frame.trace.accepted / 64, abs=0.02)
    text = page.numbers(frame.trace)
    assert f"<dd>{frame.trace.rounds}</dd>" in text and f"{frame.trace.acceptance_rate:.0%}" in text


def test_compare_shows_rows_bars_and_pictures(studio: Studio) -> None:
    seen = run(studio, "compare", ["sjd", "sjd:rule=exact,tail=reuse"], 2)
    assert {item.turn for _, _, item in seen} == {1, 2}
    assert "in turns" in page.progress(seen[0][2]) or seen[0][2].over
    over, frames, job = seen[-1]
    html = page.comparison(job.result, frames)
    assert over and job.result.repeats == 2 and html.count("<tr>") == 4 and html.count("fd-method") == 3
    assert "sjd rule=exact tail=reuse" in html and "relaxed" in html and "token for token" in html
    assert job.result.rows[0].seconds > 0 and job.result.rows[1].identical


def test_a_stopped_comparison_has_no_result(studio: Studio) -> None:
    over, _, job = run(studio, "compare", ["sjd"], 1, stopped=True)[-1]
    assert over and job.result is None and "nothing is compared" in page.progress(job)


def test_bad_input_is_one_sentence(studio: Studio, models: Models) -> None:
    for methods, repeats in (([], 1), (["sjd"], 0), (["sjdd"], 1), (["sjd:rul=exact"], 1)):
        with pytest.raises((ValueError, TypeError)) as error:
            run(studio, "compare", methods, repeats)
        assert "\n" not in str(error.value)
    for seed in (None, 1.5, "a", True, 2**64):
        with pytest.raises(ValueError, match="seed"):
            whole(seed)
    with pytest.raises(ValueError, match="16 x 16"):
        studio.call([None, None, None, None, None, "5 x 5"])
    assert studio.call([1.5, None, 0, None, "", "32 x 32"]) == {"guidance_scale": 1.5, "top_k": 0, "height": 32, "width": 32}
    assert studio.examples(["fox", "foxx", ""]) == ["fox"] and models.names[0] == "ar"


def test_prompts_cannot_inject_markup(studio: Studio) -> None:
    assert "<b>" not in page.message("<b>&", "error") and 'role="alert"' in page.message("x", "error")
    frame = run(studio, "explore", Case("sjd"))[-1][1][0]
    assert "<script" not in page.downloads(frame, '"><script>', "run", 0.5)


def test_badges() -> None:
    assert "same picture" in page.badge(Case("sjd")) and ">exact<" in page.badge(Case("sjd", {"rule": "exact"}))
    assert "relaxed" in page.promise(Case("sjd", {"rule": "clustered"}))


def test_large_photos_are_sent_small() -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (1024, 1024, 3), dtype=np.uint8))
    assert maps.data_url(noise).startswith("data:image/webp") and pictures(maps.data_url(noise))[0].size == (512, 512)
    small = Image.new("RGB", (64, 64), (1, 2, 3))
    assert maps.data_url(small).startswith("data:image/png")
