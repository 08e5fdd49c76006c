"""The contact sheet of a comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ..decoding.heatmap import FAINT, INK, KINDS, PAPER, TITLES, colour, render

if TYPE_CHECKING:
    from .compare import Comparison, Row

SIDE, GAP, MARGIN = 288, 14, 24


def contact_sheet(comparison: Comparison, kind: str = "run", pictures: int = 4) -> Image.Image:
    """One column per method: name, figures, then each picture above its token map, all maps on one scale."""
    if kind not in KINDS:
        raise ValueError(f"the kind of a heat-map must be one of {', '.join(KINDS)}, got {kind!r}")
    rows = comparison.rows
    shown = min(pictures, len(rows[0].images))
    big, small = ImageFont.load_default(size=20), ImageFont.load_default(size=15)
    top = max(max(map(max, getattr(trace, kind))) for item in rows for trace in item.traces) if kind == "run" else None
    head, foot, line = 94, 44 if kind in ("run", "probability") else 0, 21
    width = 2 * MARGIN + len(rows) * SIDE + (len(rows) - 1) * GAP
    height = 2 * MARGIN + 40 + head + shown * 2 * (SIDE + GAP) + foot
    sheet = Image.new("RGB", (width, height), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN, MARGIN), f"“{comparison.prompt}”, seed {comparison.seed}", font=big, fill=INK)
    for column, item in enumerate(rows):
        x, y = MARGIN + column * (SIDE + GAP), MARGIN + 40
        for number, text in enumerate([_short(draw, item.name, small), *_figures(item)]):
            draw.text((x, y + number * line), text, font=small, fill=INK if number == 0 else FAINT)
        y += head
        for image, trace in list(zip(item.images, item.traces, strict=True))[:shown]:
            sheet.paste(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC), (x, y))
            y += SIDE + GAP
            drawn = render(trace, image, kind, legend=False, top=top)
            sheet.paste(drawn.resize((SIDE, SIDE), Image.Resampling.LANCZOS), (x, y))
            y += SIDE + GAP
    if foot:
        _scale(sheet, draw, kind, top, height - MARGIN - foot + 12, small)
    return sheet


def _short(draw: ImageDraw.ImageDraw, text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """The text, cut to a column's width."""
    if draw.textlength(text, font=font) <= SIDE:
        return text
    while text and draw.textlength(text + "…", font=font) > SIDE:
        text = text[:-1]
    return text + "…"


def _figures(item: Row) -> list[str]:
    law = "exact" if item.exact else "relaxed"
    same = ", same picture" if item.seeded and item.identical else ""
    return [f"{item.seconds:.2f} s, {item.speedup:.2f}x", f"{item.tpf:.2f} tokens per forward", law + same]


def _scale(
    sheet: Image.Image,
    draw: ImageDraw.ImageDraw,
    kind: str,
    top: int | None,
    y: int,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
) -> None:
    """A horizontal colour bar under the maps."""
    title = " ".join(TITLES[kind])
    low, high = ("1", str(top)) if kind == "run" else ("low", "1")
    x = MARGIN
    draw.text((x, y), title, font=font, fill=INK)
    x += round(draw.textlength(title, font=font)) + 16
    draw.text((x, y), low, font=font, fill=INK)
    x += round(draw.textlength(low, font=font)) + 8
    length = max(60, min(220, sheet.width - x - MARGIN - 30))
    ramp = colour(np.linspace(0.0, 1.0, length))[None].repeat(16, 0)
    sheet.paste(Image.fromarray(np.round(ramp).astype(np.uint8)), (x, y + 2))
    draw.rectangle((x, y + 2, x + length, y + 18), outline=INK)
    draw.text((x + length + 8, y), high, font=font, fill=INK)
