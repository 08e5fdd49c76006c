"""The harness: timing, laws, reports, and both benches at their smallest."""

import json
import math

import pytest
import torch
from foredraft import cli
from foredraft.bench import harness, report
from foredraft.bench.cases import Case
from foredraft.bench.harness import measure
from foredraft.bench.peer import PairGuidance, Peer
from foredraft.bench.record import Laws, RecordingVerifier, recording
from foredraft.bench.sjd import vanilla_jacobi
from foredraft.decoding.noise import Noise
from foredraft.decoding.rules import Exact
from foredraft.decoding.types import Draft, Scores
from foredraft.decoding.verify import Match, Prefix
from PIL import Image

SEEDED, EXACT = Case("sjd", {"rule": "seeded"}), Case("sjd", {"rule": "exact", "tail": "resample"})


def test_measure(family):
    results = measure(family, [SEEDED, EXACT, Case("speculative", {"tree": "static"})], ["fox", "red apple"], 3, batch=2)
    plain = results[0]
    assert [result.method for result in results] == ["ar", "sjd", "sjd", "speculative"]
    assert plain.speedups == [1.0] * 3 and plain.tv is None and plain.tokens == 64 and plain.forwards == 64
    for result in results:
        assert len(result.seconds) == 3 and len(result.row()) == len(harness.HEADERS)
        assert 0 < result.entropy < math.log(32) and 0 < result.engine[0] < 1
        json.dumps(result.to_dict())
    assert all(0 < result.tv < 1 for result in results[1:])


def test_plain_decoding_is_timed_before_every_block(family, monkeypatch):
    drawn = []
    draw = type(family).draw

    def spy(self, case, *args, **kwargs):
        drawn.append(case.method)
        return draw(self, case, *args, **kwargs)

    monkeypatch.setattr(type(family), "draw", spy)
    measure(family, [SEEDED, EXACT, SEEDED], ["fox"], 1, laws=0, block=2)
    assert drawn[4:] == ["ar", "sjd", "ar", "sjd", "sjd"]


@pytest.mark.parametrize(
    "case",
    [
        SEEDED,
        EXACT,
        Case("sjd", {"window": "auto"}),
        Case("speculative", {"draft_length": "auto"}),
        *(Case("speculative", {"tree": t, "rule": r}) for t in ("chain", "static", "dynamic") for r in ("seeded", "exact")),
    ],
)
def test_recording_changes_no_token(family, case):
    laws = Laws()
    plain, _ = family.draw(case, "fox", 1)
    noted, _ = family.draw(Case(case.method, case.options, build=recording(laws)), "fox", 1)
    assert torch.equal(plain.tokens, noted.tokens)
    judged = plain.traces[0].judged
    assert laws.committed == 64
    # In a chain every test is a first one; the siblings of a tree are left out.
    if "auto" in case.options.values():
        return  # rounds follow the clock
    assert 0 < laws.tested <= judged if "tree" in case.options else laws.tested == judged
    assert "method" not in vars(family.pipeline(case.method))


def test_laws_by_hand():
    p = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0], [0.25, 0.5, 0.25]], dtype=torch.float64)
    q = torch.tensor([[[0.25, 0.25, 0.5], [1.0, 0.0, 0.0]]], dtype=torch.float64)
    scores = Scores(p.log()[None], torch.tensor([[0, 1, 2]]))
    laws = Laws()
    # Token 0 is kept surely (p >= q), then token 0 of an equal law is kept: three tokens are committed.
    RecordingVerifier(Prefix(Exact()), laws, 9)(Draft(torch.tensor([[0, 0]]), q), scores, Noise(torch.tensor([1])))
    assert laws.committed == 3 and laws.tested == 2
    assert laws.entropy == pytest.approx(2 * 1.5 * math.log(2) / 3)
    assert laws.tv == pytest.approx((0.25 + 0.0) / 2)
    # Without a q the draft is a point mass: TV = 1 - p(x), here of a token the target never draws.
    sure = torch.tensor([[[0.0, 0.75, 0.25], [0.5, 0.25, 0.25]]], dtype=torch.float64)
    point = Laws()
    never = Scores(sure.log(), torch.tensor([[0, 1]]))
    RecordingVerifier(Match(), point, 9)(Draft(torch.tensor([[0]])), never, Noise(torch.tensor([1])))
    assert (point.tv, point.tested, point.committed) == (1.0, 1, 1)


def test_laws_stop_at_the_end_of_the_image():
    p = torch.full((1, 3, 4), 0.25, dtype=torch.float64)
    laws = Laws()
    scores = Scores(p.log(), torch.tensor([[7, 8, 8]]))
    draft = Draft(torch.tensor([[1, 1]]), p[:, :2], valid=torch.tensor([[False, False]]))
    RecordingVerifier(Prefix(Exact()), laws, 8)(draft, scores, Noise(torch.tensor([1])))
    assert laws.committed == 1 and laws.tested == 0


def test_vanilla_jacobi_draws_plain_decodings_picture(family):
    plain, _ = family.draw(Case("ar"), "fox", 2)
    jacobi, _ = family.draw(Case("sjd", {"rule": "seeded"}, build=vanilla_jacobi), "fox", 2)
    assert torch.equal(plain.tokens, jacobi.tokens) and jacobi.traces[0].tokens_per_forward > 1


def test_peer_has_the_targets_size_and_keeps_pairs_together(family):
    target = family.pipeline("ar").target
    peer = Peer(target, 1.5, 1.0)
    inner = sum(weight.numel() for weight in target.backbone.parameters())
    own = sum(weight.numel() for name, weight in peer.model.named_parameters() if "layers" in name or "model.norm" in name)
    assert own == inner
    assert all(peer.draw(2, 5, cache=cache) > 0 for cache in ("static", "dynamic"))
    scores = PairGuidance(3.0, 1.0)(torch.zeros(4, 1), torch.randn(4, 8))
    assert torch.equal(scores[:2], scores[2:]) and ((scores == 0).sum(1) == 1).all()
    assert Peer(target, 1.0, 1.0).draw(1, 3) > 0


def test_benches_are_found_by_their_files():
    assert {"speed", "sjd"} <= set(harness.benches()) and "harness" not in harness.benches()


@pytest.mark.parametrize("name", ("speed", "sjd"))
def test_quick_bench_writes_json_and_plot(name, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", name, "--quick", "--model", str(folder), "--threads", "1"]) == 0
    out = capsys.readouterr().out
    record = json.loads((tmp_path / f"bench-{name}.json").read_text())
    assert record["bench"] == name and record["machine"]["threads"] == 1 and record["machine"]["processor"]
    assert Image.open(tmp_path / f"bench-{name}.png").width > 1000
    assert "H(p)" in out and "TV(p,q)" in out
    assert ("The speed contract" if name == "speed" else "Table 10") in out
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"bench-{name}.json", f"bench-{name}.png"]


def test_bench_without_matplotlib_says_what_to_install(folder, monkeypatch, capsys, tmp_path):
    import sys

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["bench", "--quick", "--model", str(folder)]) == 2
    assert "pip install 'foredraft[bench]'" in capsys.readouterr().err


def test_tables_are_aligned():
    lines = report.table(("a", "b"), [["x", "1"], ["longer", "22"]]).splitlines()
    assert len({len(line) for line in lines}) == 1 and lines[1].endswith("-:|")
