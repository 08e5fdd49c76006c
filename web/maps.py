"""Pictures and token maps as pieces of HTML, small enough for a page that changes ten times a second. No Gradio here."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from ..decoding.heatmap import ANCHORS, CATEGORIES, TITLES, render
from ..decoding.types import SOURCES
from .streaming import Frame

SHORT = {"run": "accepted together", "round": "round", "source": "source", "probability": "probability"}
HELP = {
    "run": "How many tokens were committed together with each one: light runs are where one forward gave many tokens.",
    "round": "Which round committed each token: broad bands of one colour are many tokens from one forward.",
    "source": "Where each token came from: accepted from the draft, or the target's own.",
    "probability": "The target's probability of each token, on a logarithmic scale.",
}
LEAST_TOP = 8
"""Least length of run at the light end of a live scale, so that colours do not jump while the first runs come in."""


def data_url(picture: Image.Image, largest: int = 512) -> str:
    """The picture as a data URL: PNG, and WebP (lossy, at most `largest` px) where PNG would be too much for a live page."""
    if max(picture.size) > largest:
        picture = picture.copy()
        picture.thumbnail((largest, largest))
    photo = max(picture.size) > 128 and len(picture.getcolors(1 << 20) or range(1 << 20)) > 4096
    buffer = io.BytesIO()
    if photo:
        picture.save(buffer, "WEBP", quality=88)
    else:
        picture.save(buffer, "PNG")
    kind = "webp" if photo else "png"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def download(label: str, name: str, content: bytes, kind: str) -> str:
    """A link that saves a file; the file is in the link, so nothing stays on the server."""
    text = base64.b64encode(content).decode()
    return f'<a class="fd-download" download="{escape(name)}" href="data:{kind};base64,{text}">{escape(label)}</a>'


def png(picture: Image.Image) -> bytes:
    """A PNG file."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def top_of(frames: Sequence[Frame]) -> int:
    """One scale for the run maps of several frames: the longest run, at least `LEAST_TOP`."""
    return max([LEAST_TOP, *(length for frame in frames for length in frame.rounds)])


def token_map(frame: Frame, kind: str = "run", top: int | None = None) -> tuple[Image.Image, list[list[int]]]:
    """The token map of a frame, one pixel per token, clear where nothing is decoded; and the round of every token, -1 = none.

    Source and probability are known when the drawing is over; until then the map shows runs.
    """
    height, width = frame.grid
    if frame.trace is not None:
        record: Any = frame.trace
    else:
        kind = kind if kind in ("run", "round") else "run"
        lengths = np.array(frame.rounds, dtype=int)
        cells = np.full((2, height * width), -1)
        cells[0, : frame.tokens] = np.repeat(np.arange(len(lengths)), lengths)
        cells[1, : frame.tokens] = np.repeat(lengths, lengths)
        rounds, runs = cells.reshape(2, height, width).tolist()
        record = SimpleNamespace(round=rounds, run=runs)
    # Nearest takes the middle of every cell, where no seam is.
    picture = render(record, None, kind, legend=False, top=top if kind == "run" else None)
    picture = picture.resize((width, height), Image.Resampling.NEAREST)
    if not frame.complete:
        picture.putalpha(Image.fromarray(np.where(np.array(record.round) < 0, 0, 255).astype(np.uint8)))
    return picture, record.round


def shown(frame: Frame, alt: str) -> str:
    """The picture in its frame; blank while there is none."""
    return _framed(frame, "" if frame.picture is None else _pixels(frame.picture, alt))


def mapped(frame: Frame, kind: str = "run", top: int | None = None, opacity: float | None = None) -> str:
    """The token map in its frame, a bar wherever a round ends; with an opacity, over the picture in grey."""
    if not frame.tokens:
        return _framed(frame, "")
    below = ""
    if opacity is not None and frame.picture is not None:
        grey = ImageOps.autocontrast(frame.picture.convert("L"))
        if frame.picture.mode == "RGBA":
            grey.putalpha(frame.picture.getchannel("A"))
        below = _pixels(grey, "")
    cells, rounds = token_map(frame, kind, top)
    ends = "".join(
        f"M{x + 1} {y}v1" for y, row in enumerate(rounds) for x in range(len(row) - 1) if row[x] != row[x + 1] and row[x] >= 0
    )
    height, width = frame.grid
    seams = f'<svg viewBox="0 0 {width} {height}" aria-hidden="true"><path d="{ends}"/></svg>'
    layer = f'<div class="fd-over" style="opacity:{1 if opacity is None else opacity:g}">'
    return _framed(frame, f"{below}{layer}{_pixels(cells, f'token map: {SHORT[kind]}')}{seams}</div>")


def _pixels(picture: Image.Image, alt: str) -> str:
    return f'<img class="fd-pixels" src="{data_url(picture)}" alt="{escape(alt)}">'


def _framed(frame: Frame, inside: str) -> str:
    height, width = frame.grid
    return f'<div class="fd-square" style="aspect-ratio:{width}/{height}">{inside}</div>'


def legend(frame: Frame, kind: str, top: int | None = None) -> str:
    """What the colours of a map mean."""
    if kind == "source":
        if frame.trace is None:
            return '<div class="fd-legend">known when the picture is done</div>'
        codes = [code for row in frame.trace.source for code in row if code >= 0]
        swatches = (
            f'<span><i style="background:{_rgb(CATEGORIES[code])}"></i>'
            f"{SOURCES[code]} {codes.count(code) / len(codes):.0%}</span>"
            for code in sorted(set(codes))
        )
        return f'<div class="fd-legend">{"".join(swatches)}</div>'
    if kind == "probability" and frame.trace is None:
        return '<div class="fd-legend">known when the picture is done</div>'
    longest = max([2, *frame.rounds]) if top is None else top
    ends = {"run": ("1", str(longest)), "round": ("first", "last"), "probability": ("low", "1")}[kind]
    ramp = ", ".join(_rgb(colour) for colour in ANCHORS)
    title = " ".join(TITLES[kind])
    return (
        f'<div class="fd-legend"><span>{title}</span><span class="fd-scale">{ends[0]}'
        f'<b style="background:linear-gradient(90deg, {ramp})"></b>{ends[1]}</span></div>'
    )


def _rgb(colour: Any) -> str:
    return "rgb({:.0f} {:.0f} {:.0f})".format(*colour)
