"""`foredraft bench pictures`: do the pictures show what was asked for, and just as often under every way of decoding?

400 pictures of every name the embedded family knows, at its default settings, by plain decoding and by each tail of SJD. The
nearest training picture (see `training/adherence.py`) names a picture, the border's median tells its background. Standard
errors are those of a share, sqrt(s (1 - s) / n); an exact tail should lie within two of plain decoding.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

from ..decoding.heatmap import INK, PAPER
from ..training import adherence
from ..training.names import COLOURS, NAMES, prompt_text
from .cases import Case, Family, replaced_method
from .harness import Report
from .record import Laws, recording
from .report import Totals, machine

COUNT, QUICK, BATCH = 400, 16, 16
CASES = (
    Case("ar", label="plain decoding"),
    Case("sjd", {"rule": "seeded"}, label="sjd seeded"),
    Case("sjd", {"rule": "exact", "tail": "gumbel"}, label="sjd gumbel"),
    Case("sjd", {"rule": "exact", "tail": "coupled"}, label="sjd coupled"),
    Case("sjd", {"rule": "exact", "tail": "resample"}, label="sjd resample"),
    Case("sjd", {"rule": "exact", "tail": "reuse"}, label="sjd++ reuse"),
)
HEADERS = ("case", "name", "background", "from AR (s.e.)", "H(p)", "mean p", "TPF", "seconds each", "law")
WANTED_NAME, WANTED_COLOUR = 0.80, 0.95

COLUMNS, SCALE, GAP, MARGIN, CAPTION = 8, 2, 12, 16, 18
SHEET = """fox; red apple on yellow; owl on blue; rocket on purple; teapot on pink; butterfly; violin on green; house on blue;
penguin on red; banana on gray; tulip on white; whale on orange; cactus on yellow; crown on purple; pizza on green; bus on blue;
panda on pink; strawberry; sailboat on blue; jack-o-lantern on gray; octopus on yellow; hamburger on red; rainbow; bell on purple;
parrot on orange; watermelon on white; airplane on blue; guitar on pink; turtle on yellow; doughnut on blue; castle; key on red;
unicorn on purple; cherries on green; volcano on gray; soccer ball on green; koala on orange; mushroom on blue; robot;
skull on pink
""".replace("\n", " ").strip().split("; ")  # fmt: skip


@dataclass
class Shown:
    """One case. wrong: (prompt, nearest name) of the pictures that show something else."""

    name: str
    options: dict[str, Any]
    pictures: int
    names: float
    colours: float
    entropy: float | None
    probability: float
    totals: Totals
    seconds: float
    wrong: list[tuple[str, str]] = field(repr=False)

    def error(self, share: float) -> float:
        """Standard error of a share."""
        return float((share * (1 - share) / self.pictures) ** 0.5)

    def distance(self, other: Shown) -> tuple[float, float]:
        """How far names and colours are from another case's, in standard errors of the difference."""

        def far(own: float, its: float) -> float:
            spread = (self.error(own) ** 2 + other.error(its) ** 2) ** 0.5
            return 0.0 if own == its else (own - its) / max(1e-9, spread)

        return far(self.names, other.names), far(self.colours, other.colours)

    def row(self, plain: Shown) -> list[str]:
        """One line under `HEADERS`."""
        far = self.distance(plain)
        return [
            self.name,
            f"{self.names:.1%} ± {self.error(self.names):.1%}",
            f"{self.colours:.1%} ± {self.error(self.colours):.1%}",
            "" if self is plain else f"{far[0]:+.1f}, {far[1]:+.1f}",
            "" if self.entropy is None else f"{self.entropy:.2f}",
            f"{self.probability:.3f}",
            f"{self.totals.tokens_per_forward:.2f}",
            f"{self.seconds:.2f}",
            "exact" if self.totals.exact else "relaxed",
        ]

    def to_dict(self, plain: Shown) -> dict[str, Any]:
        """For JSON."""
        errors = {"names_error": self.error(self.names), "colours_error": self.error(self.colours)}
        return {**dataclasses.asdict(self), **errors, "standard_errors_from_plain": self.distance(plain)}


@dataclass
class Sheet(Report):
    """A report whose picture is the contact sheet."""

    image: Image.Image | None = None

    def write(self, json_path: Path, png_path: Path) -> None:
        """Write the data and the contact sheet."""
        record = {"bench": self.name, "machine": machine(), "notes": self.notes, **self.data}
        json_path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        if self.image is not None:
            self.image.save(png_path)


def subjects(count: int) -> list[tuple[str, str]]:
    """(name, colour) of pictures 0 .. count - 1: all names in turn, a few of them spread over the list where count is small."""
    stride = max(1, len(NAMES) // count)
    colours = list(COLOURS)
    picked = [(number * stride + number // len(NAMES)) % len(NAMES) for number in range(count)]
    return [(NAMES[place], colours[(5 * number + number // len(colours)) % len(colours)]) for number, place in enumerate(picked)]


def run(family: Family, quick: bool, repeats: int) -> Sheet:
    """Draw and judge; repeats is not used, a picture's seed is its number. quick: 16 pictures, two cases, half a sheet."""
    check(family)
    cases = CASES[:2] if quick else CASES
    shown = list(judge(family, cases, subjects(QUICK if quick else COUNT)))
    plain = shown[0]
    title = f"{plain.pictures} pictures of {len(set(subjects(plain.pictures)))} prompts, default settings"
    tables = [(title, HEADERS, [case.row(plain) for case in shown])]
    data = {"cases": [case.to_dict(plain) for case in shown], "sheet": SHEET}
    report = Sheet("pictures", tables, data, lambda figure: None, notes=notes(shown))
    report.image = contact_sheet(family, SHEET[:16] if quick else SHEET)
    return report


def check(family: Family) -> None:
    """Raise ValueError unless this is the embedded family with its reference pictures."""
    if list(getattr(family.pipeline("ar").tokenizer, "names", [])) != list(NAMES):
        raise ValueError(
            f"{family.folder} is not the embedded family: `bench pictures` compares with that family's training pictures"
        )
    if not reference(family).is_file():
        raise FileNotFoundError(f"no {reference(family)}: `foredraft train demo` writes the reference pictures")


def reference(family: Family) -> Path:
    """The training pictures' features: the family's own, or those of the embedded family of this package."""
    own = family.folder / adherence.REFERENCE.name
    return own if own.is_file() else adherence.REFERENCE


def judge(family: Family, cases: Sequence[Case], wanted: Sequence[tuple[str, str]], batch: int = BATCH) -> Iterator[Shown]:
    """Draw the wanted pictures with every case: picture i has seed i, whatever the case and the batch."""
    prompts = [prompt_text(name, colour) for name, colour in wanted]
    bar = tqdm(total=len(cases) * len(prompts), unit=" pictures", mininterval=5)
    for case in cases:
        bar.set_description(case.name)
        laws, traces, names, colours, begun = Laws(), [], [], [], time.perf_counter()
        noted = dataclasses.replace(case, build=recording(laws, case.build))
        for first in range(0, len(prompts), batch):
            texts = prompts[first : first + batch]
            generators = [torch.Generator().manual_seed(first + number) for number in range(len(texts))]
            output = draw(family, noted, texts, generators)
            pictures = output.images * 2 - 1
            names += adherence.nearest_name(pictures, reference(family))
            colours += adherence.background_colour(pictures)
            traces += output.traces
            bar.update(len(texts))
        seconds = (time.perf_counter() - begun) / len(prompts)
        right = [got == name for got, (name, _) in zip(names, wanted, strict=True)]
        same = [got == colour for got, (_, colour) in zip(colours, wanted, strict=True)]
        chances = torch.tensor([trace.probability for trace in traces], dtype=torch.float64)
        yield Shown(
            case.name,
            case.options,
            len(prompts),
            sum(right) / len(right),
            sum(same) / len(same),
            laws.entropy,
            float(chances.mean()),
            Totals.of(traces),
            seconds,
            [(text, got) for text, got, ok in zip(prompts, names, right, strict=True) if not ok],
        )
    bar.close()


def draw(family: Family, case: Case, texts: list[str], generators: list[torch.Generator]) -> Any:
    """One batch, as a float tensor in 0..1."""
    pipeline = family.pipeline(case.method)
    with replaced_method(pipeline, case.build):
        return pipeline(texts, generator=generators, output_type="pt", **case.call, **case.options)


def notes(shown: Sequence[Shown]) -> list[str]:
    """The acceptance, in sentences."""
    plain, lines = shown[0], []
    for what, share, least in (("name", plain.names, WANTED_NAME), ("background", plain.colours, WANTED_COLOUR)):
        verdict = "enough" if share >= least else "too few"
        lines.append(f"Plain decoding: {share:.1%} show the prompted {what}, {verdict} (at least {least:.0%} wanted).")
    exact = [case for case in shown[1:] if case.totals.exact]
    far = [case.name for case in exact if max(map(abs, case.distance(plain))) > 2]
    if exact:
        lines.append(
            f"More than two standard errors from plain decoding: {', '.join(far)}."
            if far
            else f"All {len(exact)} exact tails are within two standard errors of plain decoding."
        )
    return lines


def contact_sheet(family: Family, prompts: Sequence[str]) -> Image.Image:
    """The prompts drawn by the default method (SJD, seeded) at default settings, picture i with seed i, captions below."""
    images: list[Image.Image] = []
    pipeline = family.pipeline("sjd")
    for first in range(0, len(prompts), BATCH):
        texts = list(prompts[first : first + BATCH])
        generators = [torch.Generator().manual_seed(first + number) for number in range(len(texts))]
        images += pipeline(texts, generator=generators).images
    return arrange(images, prompts)


def arrange(images: Sequence[Image.Image], captions: Sequence[str]) -> Image.Image:
    """Pictures in rows of eight, enlarged twice, each with its caption centred below."""
    side = images[0].width * SCALE
    rows = -(-len(images) // COLUMNS)
    step = (side + GAP, side + CAPTION + GAP)
    sheet = Image.new("RGB", (2 * MARGIN + COLUMNS * step[0] - GAP, 2 * MARGIN + rows * step[1] - GAP), PAPER)
    canvas = ImageDraw.Draw(sheet)
    for number, (image, text) in enumerate(zip(images, captions, strict=True)):
        x, y = MARGIN + number % COLUMNS * step[0], MARGIN + number // COLUMNS * step[1]
        sheet.paste(image.resize((side, side), Image.Resampling.LANCZOS), (x, y))
        size = next(
            s for s in (13, 12, 11, 10, 9, 8) if s == 8 or canvas.textlength(text, ImageFont.load_default(s)) <= side + GAP
        )
        font = ImageFont.load_default(size)
        canvas.text((x + (side - canvas.textlength(text, font)) / 2, y + side + 3), text, font=font, fill=INK)
    return sheet


def main() -> None:
    """`python -m foredraft.bench.pictures [--sheet FILE] [--json FILE] [--only-sheet] [MODEL]`."""
    import argparse

    from .. import DEMO

    parser = argparse.ArgumentParser(prog="python -m foredraft.bench.pictures", description=__doc__)
    parser.add_argument("model", nargs="?", default=DEMO)
    parser.add_argument("--quick", action="store_true", help="16 pictures, two cases")
    parser.add_argument("--sheet", type=Path, default=Path("contact-sheet.png"), metavar="FILE")
    parser.add_argument("--json", type=Path, default=Path("bench-pictures.json"), metavar="FILE")
    parser.add_argument("--only-sheet", action="store_true", help="draw the contact sheet, judge nothing")
    options = parser.parse_args()
    family = Family(options.model, threads=1)
    if options.only_sheet:
        contact_sheet(family, SHEET).save(options.sheet)
        return
    report = run(family, options.quick, 1)
    report.write(options.json, options.sheet)
    print(report.text())


if __name__ == "__main__":
    main()
