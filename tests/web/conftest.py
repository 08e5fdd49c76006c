"""The tiny family for what needs no picture, the embedded one behind a server for the page, and a browser."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from foredraft import DEMO, SJDPipeline
from foredraft.bench.cases import Family
from foredraft.web.streaming import Models
from foredraft.web.studio import Studio

from ..tiny import folder, parts  # noqa: F401

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def missing(what: str) -> None:
    """Skip, or fail where everything must be there."""
    if os.environ.get("FOREDRAFT_CI"):
        pytest.fail(f"{what} is missing, and this is CI")
    pytest.skip(f"{what} is not installed")


@pytest.fixture(scope="session")
def models(folder: Path) -> Models:  # noqa: F811
    """The tiny family's pipelines."""
    return Models(Family(folder, threads=1))


@pytest.fixture
def studio(models: Models) -> Studio:
    """One round per turn: a fast machine shows no fewer frames."""
    made = Studio(models)
    made.turn = 0.0
    return made


@pytest.fixture(scope="session")
def pipe() -> Any:
    """The embedded family's default pipeline, as a script would load it."""
    loaded = SJDPipeline.from_pretrained(DEMO)
    loaded.set_progress_bar_config(disable=True)
    return loaded


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """Address of a running demo of the embedded family."""
    try:
        import gradio  # noqa: F401
    except ModuleNotFoundError:
        missing("gradio")
    from foredraft.web.demo import launch

    threads = torch.get_num_threads()
    blocks = launch(Family(DEMO, threads=1), wait=False)
    yield blocks.local_url
    blocks.close(verbose=False)
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, as the system has it."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        missing("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        missing("playwright")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        yield opened
        opened.close()
