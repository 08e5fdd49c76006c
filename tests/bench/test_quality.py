"""Benches `pareto` and `cool_sd`: what is measured, what is kept when they are ended, and both at their smallest."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from foredraft import cli
from foredraft.bench import cool_sd, harness, pareto, pictures, quality, report, vvs
from foredraft.bench.cases import Family
from foredraft.bench.pareto import SWEEPS, Sweep
from foredraft.bench.quality import Drawing, Partial, Point, Setting, divergence, histogram, jensen_shannon
from foredraft.bench.report import Totals
from foredraft.models.codecs.vq import VQCodec
from foredraft.models.embedded import EmbeddedTarget, WordTokenizer
from foredraft.models.head import DraftHead
from foredraft.pipelines.cool_sd import CoolSDPipeline
from foredraft.training import adherence
from foredraft.training.names import COLOURS, NAMES, word_table
from PIL import Image
from tqdm import tqdm

RELAXED = Totals(2.0, 2.0, 0.5, False, 0.01, 0.1, 2.1)


def point(name: str, **changes: Any) -> Point:
    """A point whose figures do not matter."""
    return replace(Point(name, "", {}, 400, RELAXED, 0.1, 0.01, -1.0, 0.0, 0.02, 0.8, 0.3, [2.0, 1.0, 3.0]), **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny untrained family with the shipped one's names and a draft head, 32 px."""
    place, words = tmp_path_factory.mktemp("family"), word_table()
    torch.manual_seed(0)
    target = EmbeddedTarget(vocab_size=32, words=len(words) + 1, dim=16, layers=1, heads=2, ffn=16)
    torch.nn.init.normal_(target.head.weight, std=0.6)
    codec = VQCodec(vocab_size=32, code_dim=4, width=16, upper_width=8)
    tokenizer = WordTokenizer(NAMES, COLOURS, words)
    defaults = {"guidance_scale": 1.5, "grids": [[8, 8]], "window": {"cpu": 4}}
    CoolSDPipeline(target, codec, tokenizer, DraftHead.for_target(target), defaults).save_pretrained(place)
    art = (torch.rand(len(NAMES), 4, 64, 64, generator=torch.Generator().manual_seed(1)) * 255).to(torch.uint8)
    adherence.save_reference(art, place / adherence.REFERENCE.name)
    return place


@pytest.fixture
def family(folder: Path) -> Family:
    return Family(folder, threads=1)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four pictures per setting, a few settings."""
    monkeypatch.setattr(quality, "QUICK", 4)
    monkeypatch.setattr(quality, "BATCH", {"cpu": 3})
    monkeypatch.setattr(pareto, "SWEEPS", (SWEEPS[0], SWEEPS[2], SWEEPS[6]))
    monkeypatch.setattr(cool_sd, "KS", (3,))
    monkeypatch.setattr(cool_sd, "DELTAS", (2.0,))


def test_jensen_shannon_by_hand() -> None:
    same = torch.tensor([[2.0, 2.0, 0.0]], dtype=torch.float64)
    other = torch.tensor([[0.0, 0.0, 5.0]], dtype=torch.float64)
    assert jensen_shannon(same, 3 * same) == 0.0
    assert jensen_shannon(same, other) == pytest.approx(math.log(2))
    half = torch.tensor([[1.0, 3.0]], dtype=torch.float64), torch.tensor([[3.0, 1.0]], dtype=torch.float64)
    assert jensen_shannon(*half) == pytest.approx(math.log(2) + 0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    both = torch.cat((same, other)), torch.cat((same, same))
    assert jensen_shannon(*both) == pytest.approx(math.log(2) / 2), "the mean over places"


def test_histograms_count_every_place() -> None:
    tokens = torch.tensor([[0, 2], [0, 1], [1, 2]])
    assert histogram(tokens, 3).tolist() == [[2, 1, 0], [0, 1, 2]]


def test_the_jackknife_knows_the_spread() -> None:
    """Its error is about the standard deviation over repetitions, and two samples of one law differ only by chance."""
    generator = torch.Generator().manual_seed(0)
    law = torch.rand(10, 6, generator=generator)
    reference = torch.multinomial(law, 400, True, generator=generator).T
    values, errors = zip(
        *(divergence(torch.multinomial(law, 400, True, generator=generator).T, reference, 6) for _ in range(60)), strict=True
    )
    spread = float(torch.tensor(values).std())
    assert 0.5 * spread < sum(errors) / 60 < 2 * spread
    moved = torch.multinomial(law.flip(1), 400, True, generator=generator).T
    far, error = divergence(moved, reference, 6)
    assert far > max(values) + 5 * error
    assert divergence(reference[:1], reference, 6)[1] == 0.0


def test_the_command_lines_table_shows_the_diagnostics() -> None:
    cells = dict(zip(report.HEADERS, report.row("a", 1.0, None, RELAXED), strict=True))
    assert (cells["expected length"], cells["relaxation per token"], cells["law"]) == ("2.10", "0.0100", "relaxed")
    plain = dict(zip(report.HEADERS, report.row("b", 1.0, None, replace(RELAXED, exact=True), judged=False), strict=True))
    assert plain["expected length"] == plain["relaxation per token"] == ""


def test_points_survive_json() -> None:
    one = point("a")
    assert Point.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    assert one.speedup == 2.0 and len(one.row()) == len(quality.HEADERS) and one.row()[-1] == "relaxed"
    assert one.names_error == pytest.approx(0.02)
    assert point("exact", totals=replace(RELAXED, exact=True, expected_length=None)).row()[4] == ""


def test_partial_files(tmp_path: Path) -> None:
    path, key = tmp_path / "bench.partial.json", {"count": 4, "files": [("a", 1)]}
    first = Partial(path, key)
    first.put("one", {"x": 1})
    assert Partial(path, key).done == {"one": {"x": 1}} and len(list(tmp_path.iterdir())) == 1
    assert Partial(path, {**key, "count": 5}).done == {}, "other settings begin anew"
    path.write_text("half a fi")
    assert Partial(path, key).done == {}
    nothing = Partial(None, key)
    nothing.put("one", 1)
    assert nothing.done == {"one": 1}


def test_sweeps_are_of_known_options_and_distinct() -> None:
    from foredraft.bench.cases import method_class

    names = [setting.name for sweep in SWEEPS for setting in sweep.settings()]
    assert len(names) == len(set(names)) > 20
    for sweep in (*SWEEPS, *cool_sd.schedules(), *cool_sd.residuals(), *cool_sd.neighbours()):
        for setting in sweep.settings():
            case = setting.case
            config = method_class(case.method).config_class.from_options(case.options)
            assert case.call["temperature"] == 1.0 and case.call["top_k"] == 0
            if sweep.knob:
                assert config.applies(sweep.knob) and f"{sweep.knob}=" in setting.name
        quick = sweep.settings(quick=True)
        assert len(quick) == min(2, len(sweep.settings())) and quick[0] == sweep.settings()[0]
    assert {"annealed", "uniform", "lantern", "lantern++"} <= {str(sweep.options.get("rule")) for sweep in SWEEPS}


def test_settings_are_resumed(family: Family, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended after some settings, the bench draws only the others, and says the same in the end; timing may come later."""
    path = tmp_path / "some.partial.json"
    settings = [setting for sweep in pareto.SWEEPS for setting in sweep.settings(True)]
    whole = quality.measure(family, settings, True, 1, Drawing())
    drawn: list[str] = []
    real = quality.judge

    def interrupted(setting: Setting, *rest: Any) -> Point:
        if len(drawn) == 3:
            raise KeyboardInterrupt
        drawn.append(setting.name)
        return real(setting, *rest)

    monkeypatch.setattr(quality, "judge", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quality.measure(family, settings, True, 0, Drawing(partial=path))
    assert len(json.loads(path.read_text())["done"]) == 4, "three settings and the reference"
    assert [len(each.speedups) for each in quality.measure(family, settings, True, 0, Drawing(None, path, True))] == [0] * 3
    timed = quality.measure(family, settings, True, 1, Drawing(None, path, True))
    assert [len(each.speedups) for each in timed] == [0, 1, 1] and timed[1].name == settings[0].name
    drawn.append("resumed")
    again = quality.measure(family, settings, True, 1, Drawing(partial=path))
    assert drawn[4:] == [setting.name for setting in settings[2:]]
    for one, other in zip(whole, again, strict=True):
        assert replace(one, speedups=[], totals=replace(one.totals, engine_share=0)) == replace(
            other, speedups=[], totals=replace(other.totals, engine_share=0)
        )
    floor = again[0]
    assert floor.series == "plain decoding" and 0 < floor.divergence < math.log(2) and floor.speedups == []
    assert all(len(each.speedups) == 1 for each in again[1:])
    assert again[1].tv is not None and 0 < again[1].tv < 1


def test_the_reference_and_the_settings_share_no_noise(family: Family, small: None) -> None:
    """Drafts and plain decoding use the same noise for the same seed; common seeds would make every loss look small."""
    one = quality.draw(family, quality.PLAIN.case, 3, 0, _Bar())
    other = quality.draw(family, quality.PLAIN.case, 3, quality.OTHER, _Bar())
    assert not torch.equal(one.tokens, other.tokens) and one.tokens.shape == (3, 64) and one.codes == 32
    again = quality.draw(family, quality.PLAIN.case, 3, 0, _Bar())
    assert torch.equal(one.tokens, again.tokens) and (one.log_p < 0).all()


class _Bar:
    """A progress bar that shows nothing."""

    def update(self, count: int) -> None:
        """Nothing."""


def test_missing_components_are_left_out(family: Family, tmp_path: Path) -> None:
    fitting, notes = quality.available(family, [s for sweep in SWEEPS for s in sweep.settings(True)])
    assert notes == [] and len(fitting) == len([s for sweep in SWEEPS for s in sweep.settings(True)])
    fitting, notes = quality.available(family, Sweep("small draft", "speculative", {"rule": "exact"}).settings())
    assert fitting == [] and len(notes) == 1 and "draft_model" in notes[0]


def test_what_the_points_say() -> None:
    floor = point("plain decoding", totals=replace(RELAXED, exact=True))
    good = point("good", divergence=0.11, totals=replace(RELAXED, tokens_per_forward=3.0))
    bad = point("bad", divergence=0.3, totals=replace(RELAXED, tokens_per_forward=9.0))
    wrong = point("wrong", divergence=0.3, totals=replace(RELAXED, exact=True))
    lines = pareto.read([floor, good, bad])
    assert "0.1000" in lines[0] and "good, 3.00" in lines[-1]
    assert "wrong" in pareto.read([floor, wrong, bad])[1] and len(pareto.read([floor, wrong, bad])) == 2
    assert "within three errors" in pareto.read([floor, replace(wrong, divergence=0.12)])[1]


def test_likelihood_is_that_of_the_traces(family: Family) -> None:
    """One forward over a finished picture says what the rounds said; for unverified tokens there is nothing else."""
    case = quality.PLAIN.case
    output, _ = family.draw(case, ["fox", "owl on white"], 0)
    chances = torch.tensor([trace.probability for trace in output.traces]).flatten(1).log().mean(1)
    found = quality.likelihood(family, case, ["fox", "owl on white"], output.tokens.flatten(1))
    assert torch.allclose(found, chances, atol=1e-4)
    skipping = replace(case, method="vvs", options={"schedule": "uniform", "interval": 2})
    drawn = quality.draw(family, skipping, 2, 0, tqdm(disable=True))
    assert drawn.log_p.shape == (2,) and bool((drawn.log_p < 0).all()) and any(trace.unverified for trace in drawn.traces)


@pytest.mark.parametrize("name", ["pareto", "cool_sd", "vvs"])
def test_quick_benches(name: str, folder: Path, small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert name in harness.benches() and harness.resumes(harness.bench(name)) and not harness.resumes(harness.bench("sjd"))
    code = cli.main(["bench", name, "--quick", "--model", str(folder), "--threads", "1", "--out", str(tmp_path)])
    out = capsys.readouterr()
    assert code == 0, out.err
    record = json.loads((tmp_path / f"bench-{name}.json").read_text())
    assert record["bench"] == name and "divergence" in out.out and "plain decoding" in out.out
    assert Image.open(tmp_path / f"bench-{name}.png").width > 1500
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"bench-{name}.json", f"bench-{name}.png"]
    if name == "pareto":
        assert [each["name"] for each in record["points"]][1:3] == ["EAGLE, exact", "Cool-SD, delta=1.1"]
    elif name == "vvs":
        assert all(record[part] for part in (*vvs.TITLES, "similarity", "features", "lengths"))
        assert record["schedule"][0]["totals"]["skip_ratio"] == 0 < record["reuse"][0]["totals"]["skip_ratio"]
        assert "Table 4" in out.out and "paths of a tree" in out.out
    else:
        assert {"schedule", "residual", "SJD", "tv", "plain"} <= set(record) and len(record["tv"]) == 3
        assert "Table 3" in out.out and "Fig. 5" in out.out


def test_other_families_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: Family) -> None:
    monkeypatch.setattr(pictures, "reference", lambda family: tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="train demo"):
        pareto.run(family, True, 1)
