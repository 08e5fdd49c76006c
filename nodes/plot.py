"""The speed-up plot of a comparison, drawn with Pillow so that the nodes need no extra."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont

from ..decoding.heatmap import FAINT, INK, PAPER

if TYPE_CHECKING:
    from ..bench.compare import Comparison, Row

WIDTH, MARGIN, BAR, STEP = 960, 32, 30, 78
RULE = (222, 222, 222)
# Okabe and Ito's blue, vermilion and grey: told apart by the colour-blind, and named beside the bars anyway.
PLAIN, EXACT, RELAXED = (150, 150, 150), (0, 114, 178), (213, 94, 0)


def speed_plot(comparison: Comparison) -> Image.Image:
    """One bar per method, as long as its speed-up over plain decoding; below it what it means for the picture."""
    big, small = ImageFont.load_default(size=22), ImageFont.load_default(size=17)
    rows = comparison.rows
    top = MARGIN + 64
    picture = Image.new("RGB", (WIDTH, top + STEP * len(rows) + 46), PAPER)
    draw = ImageDraw.Draw(picture)
    draw.text((MARGIN, MARGIN - 8), "Speed-up over plain decoding", font=big, fill=INK)
    rounds = f", median of {comparison.repeats} rounds" if comparison.repeats > 1 else ""
    draw.text((MARGIN, MARGIN + 22), f"“{comparison.prompt.strip()}”, seed {comparison.seed}{rounds}", font=small, fill=FAINT)
    reach = max(1.0, *(row.speedup for row in rows))
    room = WIDTH - 2 * MARGIN - 80
    floor = top + STEP * len(rows)
    for tick in _ticks(reach):
        x = MARGIN + tick / reach * room
        draw.line((x, top, x, floor), fill=INK if tick == 1 else RULE)
        draw.text((x, floor + 6), f"{tick:g}x", font=small, fill=FAINT, anchor="ma")
    for number, row in enumerate(rows):
        y = top + number * STEP + 4
        colour = PLAIN if number == 0 else EXACT if row.exact else RELAXED
        end = MARGIN + max(2.0, row.speedup / reach * room)
        draw.rectangle((MARGIN, y, end, y + BAR), fill=colour)
        draw.text((end + 8, y + BAR / 2), f"{row.speedup:.2f}x", font=big, fill=INK, anchor="lm")
        draw.rectangle((MARGIN, y + BAR + 4, MARGIN + draw.textlength(row.name, font=small) + 2, y + BAR + 27), fill=PAPER)
        draw.text((MARGIN, y + BAR + 6), row.name, font=small, fill=INK)
        text = f"   {figures(row, number == 0)}"
        x = MARGIN + draw.textlength(row.name, font=small)
        draw.rectangle((x, y + BAR + 4, x + draw.textlength(text, font=small), y + BAR + 27), fill=PAPER)
        draw.text((x, y + BAR + 6), text, font=small, fill=FAINT)
    return picture


def figures(row: Row, baseline: bool) -> str:
    """What is said of a method beside its name."""
    said = [f"{row.seconds:.2f} s", f"{row.tpf:.2f} tokens per forward"]
    if not baseline:
        same = row.seeded and row.identical
        said.append("the same picture" if same else "the same distribution" if row.exact else "relaxed")
    return ", ".join(said)


def _ticks(reach: float) -> list[float]:
    """Round speed-ups from 0 to reach, 1 among them."""
    step = next(step for step in (0.25, 0.5, 1.0, 2.0, 5.0, math.inf) if reach / step <= 8)
    return sorted({1.0, *(step * number for number in range(int(reach / step) + 1))}) if step < math.inf else [0.0, 1.0]
