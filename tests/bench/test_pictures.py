"""`foredraft bench pictures`: what is counted, and the contact sheet."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from foredraft.bench import pictures
from foredraft.bench.cases import Family
from foredraft.bench.pictures import CASES, SHEET, Shown, arrange, judge, notes, subjects
from foredraft.bench.report import Totals
from foredraft.models.codecs.vq import VQCodec
from foredraft.models.embedded import EmbeddedTarget, WordTokenizer
from foredraft.pipelines.sjd import SJDPipeline
from foredraft.training import adherence
from foredraft.training.names import COLOURS, NAMES, word_table
from PIL import Image

EXACT = Totals(2.0, 2.0, 0.5, True, 0.0, 0.1)


def shown(names: float, colours: float, exact: bool = True, name: str = "case") -> Shown:
    """A case of 400 pictures with these shares."""
    return Shown(name, {}, 400, names, colours, 1.0, 0.2, replace(EXACT, exact=exact), 0.1, [])


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A tiny untrained family with the shipped one's names, 32 px."""
    folder, words = tmp_path_factory.mktemp("family"), word_table()
    torch.manual_seed(0)
    target = EmbeddedTarget(vocab_size=32, words=len(words) + 1, dim=16, layers=1, heads=2, ffn=16)
    codec = VQCodec(vocab_size=32, code_dim=4, width=16, upper_width=8)
    tokenizer = WordTokenizer(NAMES, COLOURS, words)
    defaults = {"guidance_scale": 1.5, "grids": [[8, 8]], "window": {"cpu": 4}}
    SJDPipeline(target, codec, tokenizer, defaults).save_pretrained(folder)
    art = (torch.rand(len(NAMES), 4, 64, 64, generator=torch.Generator().manual_seed(1)) * 255).to(torch.uint8)
    adherence.save_reference(art, folder / adherence.REFERENCE.name)
    return Family(folder, threads=1)


def test_subjects() -> None:
    wanted = subjects(400)
    assert len({name for name, _ in wanted}) == len(NAMES) >= 250 and len(set(wanted)) == 400
    assert {colour for _, colour in wanted} == set(COLOURS)
    counts = [sum(colour == each for _, colour in wanted) for each in COLOURS]
    assert max(counts) - min(counts) <= 2, "every background about as often"
    few = subjects(16)
    assert len(set(few)) == 16 and few[-1][0] in NAMES[200:], "a small number is spread over the list"


def test_the_sheet_is_of_known_prompts() -> None:
    tokenizer = WordTokenizer(NAMES, COLOURS, word_table())
    assert len(SHEET) == len(set(SHEET)) == 40 and tokenizer(SHEET).shape == (40, 8)
    for text in SHEET:
        name, _, colour = text.partition(" on ")
        assert name in NAMES and (not colour or colour in COLOURS), text


def test_standard_errors() -> None:
    one, other = shown(0.8, 0.95), shown(0.84, 0.95)
    assert one.error(0.8) == pytest.approx(0.02) and one.error(1.0) == 0
    far = other.distance(one)
    assert far[0] == pytest.approx(0.04 / (0.8 * 0.2 / 400 + 0.84 * 0.16 / 400) ** 0.5) and far[1] == 0
    assert one.distance(one) == (0.0, 0.0) and shown(1.0, 1.0).distance(shown(1.0, 1.0)) == (0.0, 0.0)


def test_notes() -> None:
    plain = shown(0.85, 0.97)
    good = notes([plain, shown(0.86, 0.96, name="close"), shown(0.2, 0.2, exact=False, name="relaxed")])
    assert "85.0%" in good[0] and "enough" in good[0] and "97.0%" in good[1]
    assert good[2] == "All 1 exact tails are within two standard errors of plain decoding."
    bad = notes([shown(0.7, 0.9), shown(0.4, 0.9, name="far off")])
    assert "too few" in bad[0] and "too few" in bad[1] and "far off" in bad[2]


def test_judge(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares count the right pictures, and a seeded case draws plain decoding's pictures in any batch."""
    wanted = subjects(6)
    plain, seeded = judge(family, CASES[:2], wanted, batch=4)
    alone = next(judge(family, CASES[:1], wanted, batch=1))
    assert (plain.names, plain.colours, plain.wrong) == (seeded.names, seeded.colours, seeded.wrong)
    assert alone.wrong == plain.wrong and alone.probability == pytest.approx(plain.probability, rel=1e-4)
    assert plain.pictures == 6 and len(plain.wrong) == 6 - round(6 * plain.names)
    assert plain.entropy is not None and 0 < plain.entropy < 3.5 and 0 < plain.probability < 1
    assert seeded.totals.tokens_per_forward >= plain.totals.tokens_per_forward == 1.0
    answers = iter([name for name, _ in wanted[:5]] + ["nothing"])
    monkeypatch.setattr(adherence, "nearest_name", lambda images, path: [next(answers) for _ in images])
    monkeypatch.setattr(adherence, "background_colour", lambda images: ["red"] * len(images))
    again = next(judge(family, CASES[:1], wanted))
    assert again.names == pytest.approx(5 / 6) and [got for _, got in again.wrong] == ["nothing"]
    assert again.colours == sum(colour == "red" for _, colour in wanted) / 6


def test_run_writes_json_and_sheet(family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "QUICK", 4)
    report = pictures.run(family, True, 1)
    report.write(tmp_path / "a.json", tmp_path / "a.png")
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["bench"] == "pictures" and [case["name"] for case in data["cases"]] == ["plain decoding", "sjd seeded"]
    assert data["cases"][1]["standard_errors_from_plain"] == [0.0, 0.0] and data["notes"] == report.notes
    assert "plain decoding" in report.text() and "4 pictures" in report.text()
    sheet = Image.open(tmp_path / "a.png")
    assert sheet.mode == "RGB" and sheet.width > sheet.height


def test_arrange() -> None:
    side = 64 * pictures.SCALE
    images = [Image.new("RGB", (64, 64), (200, number, 0)) for number in range(40)]
    sheet = arrange(images, ["a caption that is far too long to fit below its picture"] + ["fox"] * 39)
    step = (side + pictures.GAP, side + pictures.CAPTION + pictures.GAP)
    assert sheet.size == (2 * pictures.MARGIN + 8 * step[0] - pictures.GAP, 2 * pictures.MARGIN + 5 * step[1] - pictures.GAP)
    for number in (0, 7, 8, 39):
        x, y = pictures.MARGIN + number % 8 * step[0], pictures.MARGIN + number // 8 * step[1]
        assert sheet.getpixel((x + side // 2, y + side // 2)) == (200, number, 0)
        caption = sheet.crop((x, y + side + 1, x + side, y + side + pictures.CAPTION))
        assert caption.getextrema()[0][0] < 120, "there is ink below the picture"


def test_other_families_are_refused(family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other: Any = family.pipeline("ar").components
    names = WordTokenizer(["fox"], COLOURS, word_table())
    SJDPipeline(**{**other, "tokenizer": names}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="not the embedded family"):
        pictures.run(Family(tmp_path), True, 1)
    monkeypatch.setattr(pictures, "reference", lambda family: tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="absent.*train demo"):
        pictures.run(family, True, 1)
