"""`foredraft.compare` and the cases it reads."""

import json

import foredraft
import pytest
import torch
from foredraft.bench.cases import Case, Family, parse_case
from foredraft.bench.compare import compare, verdict


def test_specifications():
    assert parse_case("sjd") == Case("sjd")
    assert parse_case("sjd:tail=coupled,rule=exact") == Case("sjd", {"tail": "coupled", "rule": "exact"})
    assert parse_case("speculative:draft-length=2") == Case("speculative", {"draft_length": 2})
    assert parse_case(("sjd", {"window": 3})) == Case("sjd", {"window": 3})
    assert parse_case("sjd:window=none,refine=false,tau=0.25").options == {"window": None, "refine": False, "tau": 0.25}
    assert parse_case("sjd:window=3").name == "sjd window=3"


@pytest.mark.parametrize("spec", ["sjt", "sjd:tail", "sjd:tial=x", "sjd:tail=x", ("sjd", {"window": 0}), 3])
def test_bad_specifications(spec):
    with pytest.raises((ValueError, TypeError)):
        parse_case(spec)


def test_compare_is_public_and_complete(folder):
    methods = ["sjd", ("sjd", {"rule": "exact", "tail": "reuse"}), "speculative:tree=dynamic"]
    result = foredraft.compare("fox", methods, model=folder, seed=3, num_images_per_prompt=2, temperature=0.9)
    assert [row.method for row in result.rows] == ["ar", "sjd", "sjd", "speculative"]
    plain, seeded, reuse, tree = result.rows
    assert plain.tpf == 1 and plain.speedup == 1
    assert seeded.identical and tree.identical and seeded.tpf > 1
    assert not reuse.exact and reuse.relaxation is None
    assert all(len(row.images) == 2 and row.seconds > 0 for row in result.rows)
    assert result.table().count("\n") == 5
    assert len(result.verdicts()) == 2 and all("token for token" in line for line in result.verdicts())
    json.dumps(result.to_dict())
    sheet = result.sheet()
    assert sheet.width > 4 * 288 and sheet.height > 4 * 288
    for kind in ("round", "source", "probability"):
        assert result.sheet(kind).width == sheet.width


def test_components_are_loaded_once(folder):
    family = Family(folder)
    one, two = family.pipeline("sjd"), family.pipeline("speculative")
    assert one.target is two.target and one.codec is two.codec and family.pipeline("sjd") is one


def test_seeds_agree_with_the_pipelines(folder):
    row = compare("fox", ["ar"], folder, seed=5).rows[0]
    pipe = foredraft.AutoregressivePipeline.from_pretrained(folder)
    direct = pipe("fox", generator=torch.Generator().manual_seed(5))
    assert torch.equal(row.tokens, direct.tokens)


def test_verdict_tells_the_truth(folder):
    row = compare("fox", ["sjd"], folder).rows[1]
    changed = row.tokens.clone()
    changed[0, 1, 2] += 1
    text = verdict("sjd", changed, row.tokens, row.traces)
    assert "1 of 1 pictures differ" in text and "token 10" in text


def test_bad_calls(folder):
    with pytest.raises(ValueError, match="repeats"):
        compare("fox", repeats=0, model=folder)
    with pytest.raises(ValueError, match="fox"):
        compare("fxo", model=folder)
    with pytest.raises(ValueError, match="did you mean 'sjd'"):
        compare("fox", ["sjdd"], model=folder)
