"""The page in a real browser, with the embedded family behind it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from foredraft.models.embedded import EmbeddedTarget
from foredraft.web.maps import data_url

DONE, WAIT = ".fd-race[data-over=true]", 120_000


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward takes a little longer than this model's, so that a fast machine leaves time to look and to press Stop."""
    score = EmbeddedTarget.score

    def slow(*arguments: Any) -> Any:
        time.sleep(0.015)
        return score(*arguments)

    monkeypatch.setattr(EmbeddedTarget, "score", slow)


@pytest.fixture
def visit(browser: Any, url: str) -> Iterator[Callable[..., Any]]:
    """Opens the page for another visitor; afterwards no page may have logged an error."""
    contexts, said = [], []

    def open_page(width: int = 1280, height: int = 900) -> Any:
        contexts.append(browser.new_context(viewport={"width": width, "height": height}))
        page = contexts[-1].new_page()
        page.set_default_timeout(WAIT)
        page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith((url, "data:", "blob:")) else said.append(request.url))
        page.goto(url)
        page.wait_for_selector("#race-run")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []


def ask(page: Any, prompt: str, seed: int = 0) -> None:
    page.fill("#prompt textarea, #prompt input", prompt)
    page.fill("#seed input", str(seed))


@pytest.fixture
def picture(pipe: Any) -> Callable[[str, int], str]:
    """The picture that Python draws, as the page shows it."""
    return lambda prompt, seed: data_url(pipe(prompt, generator=torch.Generator().manual_seed(seed)).images[0])


def sources(page: Any, place: str) -> list[str]:
    return page.eval_on_selector_all(f"{place} .fd-pair > .fd-square:first-child > img", "all => all.map(one => one.src)")


def wide(page: Any) -> bool:
    """Whether the page is wider than the screen."""
    return page.evaluate("document.documentElement.scrollWidth > innerWidth")


def test_a_race_streams_and_finishes_with_one_picture(visit: Callable[..., Any], picture: Callable[..., str]) -> None:
    page = visit()
    ask(page, "red apple on blue", 3)
    page.click("#race-run")
    page.wait_for_selector("#race-stop:not([disabled])")
    page.wait_for_selector(".fd-race[data-over=false] .fd-card[data-state=drawing] img")
    page.wait_for_selector(DONE)
    assert re.fullmatch(r"\d+\.\d\d×", page.inner_text(".fd-speed strong"))
    assert "verified: all 256 tokens are equal" in page.inner_text(".fd-message.fd-good")
    assert sources(page, "#race") == [picture("red apple on blue", 3)] * 2
    assert page.locator("#race .fd-over path").count() == 2 and len(page.get_attribute("#race .fd-over path >> nth=1", "d")) > 100
    style = page.eval_on_selector("#race img.fd-pixels", "one => getComputedStyle(one).imageRendering")
    assert style == "pixelated" and not wide(page)
    page.wait_for_selector("#race-stop:disabled")


def test_stop_ends_a_race_and_the_next_one_is_whole(visit: Callable[..., Any], picture: Callable[..., str]) -> None:
    page = visit()
    ask(page, "fox")
    page.click("#race-run")
    page.wait_for_selector(".fd-card[data-state=drawing] img")
    page.click("#race-stop")
    page.wait_for_selector(DONE)
    assert "Stopped" in page.inner_text(".fd-message.fd-warn") and page.locator(".fd-card[data-state=stopped]").count()
    page.click("#race-run")
    page.wait_for_selector(".fd-message.fd-good")
    assert sources(page, "#race") == [picture("fox", 0)] * 2


def test_bad_prompts_are_one_sentence_and_nothing_breaks(visit: Callable[..., Any]) -> None:
    page = visit()
    for prompt, said in (("", "the prompt is empty"), ("red aple", "apple")):
        ask(page, prompt)
        page.click("#race-run")
        page.wait_for_function("text => document.querySelector('#race .fd-error')?.innerText.includes(text)", arg=said)
        page.wait_for_selector("#race-stop:disabled")
    page.get_by_role("button", name="owl on yellow").click()
    page.wait_for_function("document.querySelector('#prompt textarea, #prompt input').value == 'owl on yellow'")
    page.press("#prompt textarea, #prompt input", "Enter")
    page.wait_for_selector(".fd-message.fd-good")


def test_two_visitors_at_once_get_their_own_pictures(visit: Callable[..., Any], picture: Callable[..., str]) -> None:
    pages = [visit(), visit()]
    prompts = ("t-rex on green", "polar bear")
    for seed, (page, prompt) in enumerate(zip(pages, prompts, strict=True)):
        ask(page, prompt, seed)
        page.click("#race-run")
    for seed, (page, prompt) in enumerate(zip(pages, prompts, strict=True)):
        page.wait_for_selector(".fd-message.fd-good")
        assert sources(page, "#race") == [picture(prompt, seed)] * 2


def test_explore_hides_what_does_not_apply_and_redraws_its_map(visit: Callable[..., Any]) -> None:
    page = visit(390, 844)
    page.get_by_role("tab", name="Explore").click()
    assert page.is_hidden("#sjd-tail") and page.is_hidden("#sjd-tau") and page.is_hidden("#speculative-tree")
    page.locator("#sjd-rule").get_by_text("exact", exact=True).click()
    page.wait_for_selector("#sjd-tail")
    page.locator("#sjd-tail").get_by_text("reuse", exact=True).click()
    page.wait_for_selector("#sjd-tau")
    page.wait_for_selector("#promise .fd-badge.fd-warn")
    ask(page, "fox")
    page.click("#explore-run")
    page.wait_for_selector("#downloads .fd-download")
    assert page.locator("#rounds rect").count() > 50 and "256 / 256" in page.inner_text("#numbers")
    before = page.get_attribute("#explore .fd-over img", "src")
    page.locator("#kind").get_by_text("probability", exact=True).click()
    page.wait_for_function("old => document.querySelector('#explore .fd-over img').src != old", arg=before)
    with page.expect_download() as saved:
        page.get_by_role("link", name="trace (JSON)").click()
    assert saved.value.suggested_filename == "fox.json" and not wide(page)


def test_compare_on_a_phone_has_a_row_per_method_and_no_sideways_scrolling(visit: Callable[..., Any]) -> None:
    page = visit(390, 844)
    page.get_by_role("tab", name="Compare").click()
    page.click("#compare-run")
    page.wait_for_selector("#compare .fd-card[data-state=drawing]")
    page.wait_for_selector("#compare .fd-table")
    rows = page.locator("#compare .fd-table tbody tr").count()
    assert rows == page.locator("#compare .fd-method").count() == page.locator("#compare .fd-card").count() >= 4
    assert "token for token" in page.inner_text("#compare") and not wide(page)


def test_a_visitor_who_leaves_makes_room_for_the_next(visit: Callable[..., Any]) -> None:
    leaving, waiting = visit(), visit()
    leaving.get_by_role("tab", name="Compare").click()
    leaving.fill("#repeats input[type=number]", "5")
    leaving.press("#repeats input[type=number]", "Tab")
    leaving.click("#compare-run")
    leaving.wait_for_selector("#compare .fd-card[data-state=drawing]")
    waiting.click("#race-run")
    leaving.close()
    waiting.wait_for_selector(".fd-card[data-state=drawing]", timeout=30_000)
    waiting.click("#race-stop")
    waiting.wait_for_selector(DONE)
