"""Token maps as pictures: which tokens were committed together, when, from where, and how probable they were.

`run` is the acceleration map of SJD++ (its Fig. 11): long runs are where decoding was fast.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .types import SOURCES

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont

    from .trace import Trace

KINDS = ("run", "round", "source", "probability")
MIN_SIDE = 512
TITLES = {
    "run": ("Tokens committed", "together"),
    "round": ("Round that", "committed the token"),
    "source": ("Where the token", "came from"),
    "probability": ("Target probability", "of the token"),
}

# Evenly spaced anchors from dark to light; lightness rises steadily, so the order survives colour blindness and grey.
ANCHORS = np.array(
    [
        (68, 1, 84),
        (71, 45, 123),
        (59, 82, 139),
        (44, 114, 142),
        (33, 145, 140),
        (40, 174, 128),
        (94, 201, 98),
        (173, 220, 48),
        (253, 231, 37),
    ],
    dtype=np.float64,
)
# Okabe and Ito's colour-blind safe set, in the order of SOURCES.
CATEGORIES = np.array(
    [(0, 158, 115), (213, 94, 0), (86, 180, 233), (0, 114, 178), (150, 150, 150), (240, 228, 66)], dtype=np.float64
)
MISSING = np.array((120, 120, 120), dtype=np.float64)
PAPER, INK, FAINT = (255, 255, 255), (34, 34, 34), (110, 110, 110)


@dataclass
class Scale:
    """Cell values in 0..1 (NaN: not decoded) as [H, W], and ticks (place in 0..1, label) for the colour bar."""

    values: np.ndarray
    ticks: list[tuple[float, str]]


def colour(values: np.ndarray) -> np.ndarray:
    """Numbers in 0..1 -> RGB [..., 3] in 0..255, interpolated between the anchors; NaN is grey."""
    place = np.clip(np.nan_to_num(values), 0.0, 1.0) * (len(ANCHORS) - 1)
    low = np.minimum(place.astype(int), len(ANCHORS) - 2)
    weight = (place - low)[..., None]
    mixed = ANCHORS[low] * (1 - weight) + ANCHORS[low + 1] * weight
    return np.where(np.isnan(values)[..., None], MISSING, mixed)


def render(
    trace: Trace,
    image: Image | None = None,
    kind: str = "run",
    opacity: float = 0.6,
    legend: bool = True,
    top: int | None = None,
) -> Image:
    """Draw one map of a trace.

    Args:
        trace: the record of an image of H x W tokens.
        image: the picture to lay the map over, any size; shown in grey, so that the map's colours keep their meaning.
        kind: "run" (how many tokens were committed together), "round", "source" or "probability" (logarithmic scale).
        opacity: 0 (only the picture) to 1 (only the map); ignored without an image.
        legend: add a panel with title, colour bar and the key figures on the right.
        top: the run or round at the light end of the scale, to compare maps; by default the largest one of this map.

    Returns:
        RGB picture; without the legend W c x H c pixels, with the smallest whole c that brings the longer side to 512.

    Raises:
        ValueError: unknown kind, or an opacity outside 0..1.
    """
    from PIL import Image as Images
    from PIL import ImageOps

    if kind not in KINDS:
        near = difflib.get_close_matches(str(kind), KINDS, n=1, cutoff=0.4)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"the kind of a heat-map must be one of {', '.join(KINDS)}, got {kind!r}{hint}")
    if not 0.0 <= opacity <= 1.0:
        raise ValueError(f"the opacity of a heat-map must be between 0 and 1, got {opacity}")
    rounds = np.array(trace.round)
    if kind == "source":
        sources = np.array(trace.source)
        cells = np.where((sources >= 0)[..., None], CATEGORIES[np.maximum(sources, 0)], MISSING)
        scale = None
    else:
        scale = _scale(trace, kind, top)
        cells = colour(scale.values)
    cells = np.where((rounds < 0)[..., None], MISSING, cells)
    height, width = rounds.shape
    cell = max(1, math.ceil(MIN_SIDE / max(height, width)))
    pixels = cells.repeat(cell, 0).repeat(cell, 1)
    if image is not None:
        size = (width * cell, height * cell)
        grey = ImageOps.autocontrast(image.convert("L")).resize(size, Images.Resampling.BICUBIC)
        ground = np.asarray(grey, dtype=np.float64)
        pixels = opacity * pixels + (1 - opacity) * ground[..., None]
    if cell >= 8 and (image is None or opacity > 0):
        _seams(pixels, rounds, cell)
    picture = Images.fromarray(np.round(pixels).astype(np.uint8))
    return _with_legend(picture, trace, kind, scale) if legend else picture


def _scale(trace: Trace, kind: str, top: int | None) -> Scale:
    """Values and ticks of the numeric kinds."""
    if kind == "probability":
        logs = np.log10(np.maximum(np.array(trace.probability, dtype=np.float64), 1e-30))
        logs[np.array(trace.round) < 0] = np.nan
        known = logs[~np.isnan(logs)]
        low = math.floor(max(-6.0, min(-1.0, float(np.percentile(known, 1))))) if known.size else -1
        marks = range(0, low - 1, -1)
        labels = [(1 - mark / low, f"{10.0**mark:g}".replace("e-0", "e-")) for mark in marks]
        return Scale(np.clip(1 - logs / low, 0.0, 1.0), labels)
    values = np.array(trace.run if kind == "run" else trace.round, dtype=np.float64)
    missing = np.array(trace.round) < 0
    values += kind == "round"  # people count rounds from 1
    last = float(max(2, top if top is not None else values[~missing].max(initial=2)))
    ticks = [((mark - 1) / (last - 1), str(mark)) for mark in _marks(1, int(last))]
    values = (values - 1) / (last - 1)
    values[missing] = np.nan
    return Scale(values, ticks)


def _marks(first: int, last: int) -> list[int]:
    """About six whole numbers from first to last, both among them."""
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 10**9) if (last - first) / step <= 7)
    marks = [
        first,
        *(mark for mark in range(step, last, step) if mark - first >= 0.6 * step and last - mark >= 0.6 * step),
    ]
    return [*marks, last]


def _seams(pixels: np.ndarray, rounds: np.ndarray, cell: int) -> None:
    """Darken, in place, a hair line around every cell and a bar wherever one round ends and the next begins."""
    pixels[cell::cell] *= 0.7
    pixels[:, cell::cell] *= 0.88
    thick = max(1, cell // 16)
    ends = rounds[:, 1:] != rounds[:, :-1]
    for y, x in zip(*np.nonzero(ends), strict=True):
        pixels[y * cell : (y + 1) * cell, (x + 1) * cell - thick // 2 : (x + 1) * cell + thick] *= 0.35


def _with_legend(picture: Image, trace: Trace, kind: str, scale: Scale | None) -> Image:
    """The map with a panel on its right: title, colour bar or swatches, key figures."""
    from PIL import Image as Images
    from PIL import ImageDraw, ImageFont

    side, margin = picture.height, 16
    unit = max(13, round(picture.width / 34))
    title, small = ImageFont.load_default(size=round(unit * 1.1)), ImageFont.load_default(size=unit)
    facts = _facts(trace)
    labels = _shares(trace) if scale is None else [label for _, label in scale.ticks]
    probe = ImageDraw.Draw(picture)
    room = [probe.textlength(text, font=title) for text in TITLES[kind]]
    room += [probe.textlength(text, font=small) for text in facts]
    room += [probe.textlength(text, font=small) + 3 * unit for text in labels]
    panel = round(max(room)) + margin + margin // 2
    needed = round(unit * (1.5 * (len(facts) + 2) + 1.6 * len(labels) + 3)) + 2 * margin
    canvas = Images.new("RGB", (picture.width + panel + 2 * margin, max(side + 2 * margin, needed)), PAPER)
    canvas.paste(picture, (margin, margin))
    draw = ImageDraw.Draw(canvas)
    x, y = margin + picture.width + margin, margin
    for line in TITLES[kind]:
        draw.text((x, y), line, font=title, fill=INK)
        y += round(unit * 1.45)
    y += unit
    bottom = canvas.height - margin - round(unit * 1.45 * len(facts)) - unit
    if scale is None:
        _swatches(draw, x, y, unit, small, labels)
    else:
        _bar(canvas, x, y, bottom - unit, unit, small, scale)
    y = canvas.height - margin - round(unit * 1.45 * len(facts)) + unit // 3
    for line in facts:
        draw.text((x, y), line, font=small, fill=FAINT)
        y += round(unit * 1.45)
    return canvas


def _facts(trace: Trace) -> list[str]:
    """What the panel says below the bar."""
    state = [] if trace.complete else ["(interrupted)"]
    return [
        f"{trace.method}, {'exact' if trace.exact else 'relaxed'}",
        f"{trace.tokens} tokens",
        f"{trace.target_forwards} forwards",
        f"{trace.tokens_per_forward:.2f} per forward",
        *state,
    ]


def _shares(trace: Trace) -> list[str]:
    """Name and share of every source that occurs."""
    codes = [code for row in trace.source for code in row if code >= 0]
    return [f"{SOURCES[code]} {codes.count(code) / len(codes):.0%}" for code in sorted(set(codes))]


def _swatches(draw: ImageDraw, x: int, y: int, unit: int, font: FreeTypeFont | ImageFont, labels: list[str]) -> None:
    for label in labels:
        tint = tuple(int(value) for value in CATEGORIES[SOURCES.index(label.split()[0])])
        draw.rectangle((x, y, x + unit, y + unit), fill=tint, outline=INK)
        draw.text((x + round(unit * 1.6), y + unit / 2), label, font=font, fill=INK, anchor="lm")
        y += round(unit * 1.6)


def _bar(canvas: Image, x: int, top: int, bottom: int, unit: int, font: FreeTypeFont | ImageFont, scale: Scale) -> None:
    """A vertical colour bar with ticks, large values on top."""
    from PIL import Image as Images
    from PIL import ImageDraw

    length = bottom - top
    ramp = colour(np.linspace(1.0, 0.0, length))[:, None].repeat(unit, 1)
    canvas.paste(Images.fromarray(np.round(ramp).astype(np.uint8)), (x, top))
    draw = ImageDraw.Draw(canvas)
    draw.rectangle((x, top, x + unit, bottom), outline=INK)
    for place, label in scale.ticks:
        at = bottom - round(place * length)
        draw.line((x + unit, at, x + unit + unit // 3, at), fill=INK)
        draw.text((x + round(unit * 1.6), at), label, font=font, fill=INK, anchor="lm")
