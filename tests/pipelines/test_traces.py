"""What a call reports: the contract's fields and their arithmetic."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from foredraft.decoding.trace import Trace
from foredraft.decoding.types import SOURCES
from PIL import Image
from torch import Tensor

from ..tiny import PROMPTS, SEEDED, VARIANTS, generators, name_of

FIELDS = """seed exact rounds target_forwards draft_forwards drafted judged accepted tokens_per_forward mean_acceptance_length
acceptance_rate seconds min_margin relaxation_per_token""".split()
Pipe = Callable[..., Any]


def draw(pipe: Pipe, variant: tuple[str, dict[str, Any]], **call: Any) -> Any:
    """Four pictures of 64 tokens."""
    call = {"generator": generators(1, 2, 3, 4), "height": 32, "width": 32, "output_type": "latent", **call}
    return pipe(variant[0])(list(PROMPTS), **call, **variant[1])


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_fields_and_arithmetic(pipe: Pipe, variant: tuple[str, dict[str, Any]]) -> None:
    traces: list[Trace] = draw(pipe, variant).traces
    config = pipe(variant[0]).config_class(**variant[1])
    assert len(traces) == 4
    for trace in traces:
        assert all(hasattr(trace, name) for name in FIELDS)
        assert trace.method == variant[0] and trace.exact is config.exact and trace.batch == 4
        assert trace.complete and trace.tokens == 64 and trace.grid == (8, 8)
        assert trace.target_forwards == trace.rounds or variant[0] == "vvs"
        assert trace.skip_ratio == 1 - trace.target_forwards / trace.rounds and (trace.unverified > 0) == (trace.skip_ratio > 0)
        assert trace.tokens_per_forward == 64 / trace.target_forwards
        assert trace.mean_acceptance_length == 64 / trace.rounds
        assert 0 <= trace.accepted <= trace.judged <= trace.drafted
        assert trace.acceptance_rate == (trace.accepted / trace.judged if trace.judged else 0.0)
        # A verified round commits what it accepted and one token more, except where the image ends in between.
        assert 0 <= trace.accepted + trace.target_forwards + trace.unverified - 64 <= 1
        assert trace.seconds == pytest.approx(sum(trace.parts.values())) and trace.seconds > 0
        assert 0 <= trace.engine_share <= 1 and trace.parts["target"] > 0
        assert (trace.draft_forwards > 0) == (variant[0] in ("speculative", "cool_sd", "vvs")) == (trace.parts["draft_model"] > 0)


def test_plain_decoding_counts(pipe: Pipe) -> None:
    for trace in draw(pipe, ("ar", {})).traces:
        assert trace.target_forwards == trace.rounds == 64 and trace.tokens_per_forward == 1.0
        assert trace.drafted == trace.judged == trace.accepted == trace.draft_forwards == 0
        assert trace.round == torch.arange(64).view(8, 8).tolist()
        assert {value for row in trace.source for value in row} == {SOURCES.index("drawn")}


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_maps(pipe: Pipe, variant: tuple[str, dict[str, Any]]) -> None:
    for trace in draw(pipe, variant).traces:
        rounds, runs, sources = (torch.tensor(getattr(trace, name)).flatten() for name in ("round", "run", "source"))
        unverified = sources == SOURCES.index("unverified")
        chance = torch.tensor([[1.0 if value is None else value for value in line] for line in trace.probability])
        assert [value is None for line in trace.probability for value in line] == unverified.tolist()
        assert chance.shape == (8, 8) and bool(((chance > 0) & (chance <= 1)).all())
        assert rounds[0] == 0 and bool((rounds.diff() >= 0).all()) and bool((rounds.diff() <= 1).all())
        assert int(rounds[-1]) + 1 == trace.rounds
        sizes = torch.bincount(rounds)
        assert torch.equal(runs, sizes[rounds]) and int(sizes.sum()) == 64
        accepted = sources == SOURCES.index("accepted")
        # Every verified round ends with the one token that was not drafted, unless the image ended first.
        assert int(accepted.sum()) in (trace.accepted, trace.accepted - 1) and int(unverified.sum()) == trace.unverified
        ends = rounds.diff() > 0
        assert torch.equal(accepted[:-1] | unverified[:-1], ~ends | unverified[:-1])


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v[0] != "ar"][:8:3] + [VARIANTS[-1]], ids=name_of)
def test_probability_is_the_targets(pipe: Pipe, variant: tuple[str, dict[str, Any]], guidance: float) -> None:
    """p of every committed token equals an uncached forward's, guidance and warp included."""
    run = pipe(variant[0], torch.float64)
    out = run("red apple on blue", guidance_scale=guidance, temperature=0.8, output_type="latent", **variant[1])
    ids, flat = run.tokenizer(["red apple on blue"]), out.tokens.flatten(1)
    with torch.no_grad():
        logits: Tensor = run.target(ids, flat, (4, 4))
        if guidance != 1.0:
            free = run.target(torch.zeros_like(ids), flat, (4, 4))
            logits = free + guidance * (logits - free)
    p = (logits / 0.8).softmax(-1).gather(2, flat[..., None])[..., 0]
    assert torch.allclose(torch.tensor(out.traces[0].probability, dtype=torch.float64).flatten(), p[0], atol=1e-9)


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_margin_and_relaxation(pipe: Pipe, variant: tuple[str, dict[str, Any]]) -> None:
    exact = pipe(variant[0]).config_class(**variant[1]).exact
    for trace in draw(pipe, variant).traces:
        rule, tail = variant[1].get("rule", "seeded"), variant[1].get("tail")
        assert (trace.expected_length is None) == (rule == "seeded")
        assert trace.expected_length is None or 1 <= trace.expected_length < 9
        if rule == "seeded":
            assert 0 < trace.min_margin < 1, "the closest of 64 calls"
        else:
            assert trace.min_margin == math.inf
        if tail == "reuse" or trace.skip_ratio:
            assert trace.relaxation_per_token is None
        elif not exact:
            assert trace.relaxation_per_token is not None and trace.relaxation_per_token >= 0
        else:
            assert trace.relaxation_per_token == 0


@pytest.mark.parametrize("variant", SEEDED, ids=name_of)
def test_the_margin_is_plain_decodings(pipe: Pipe, variant: tuple[str, dict[str, Any]]) -> None:
    plain = pipe("ar", torch.float64)(list(PROMPTS), generator=generators(1, 2, 3, 4), output_type="latent").traces
    fast = pipe(variant[0], torch.float64)(
        list(PROMPTS), generator=generators(1, 2, 3, 4), output_type="latent", **variant[1]
    ).traces
    for one, other in zip(plain, fast, strict=True):
        assert one.min_margin == pytest.approx(other.min_margin, abs=1e-9)
        assert other.rounds <= one.rounds


def test_greedy_has_no_margin_and_no_rejections_of_its_own_draws(pipe: Pipe) -> None:
    trace = draw(pipe, ("sjd", {}), temperature=0.0).traces[0]
    assert trace.min_margin == math.inf
    assert all(value == 1.0 for row in trace.probability for value in row)


@pytest.mark.parametrize("variant", VARIANTS[:6], ids=name_of)
def test_json_round_trip(pipe: Pipe, variant: tuple[str, dict[str, Any]]) -> None:
    trace = draw(pipe, variant).traces[2]
    text = trace.to_json()
    assert Trace.from_json(text) == trace
    values = json.loads(text)
    assert values["sources"] == list(SOURCES) and values["tokens_per_forward"] == trace.tokens_per_forward
    json.dumps(trace.summary(), allow_nan=False)
    assert not {"round", "run", "source", "probability"} & set(trace.summary())


@pytest.mark.parametrize("kind", ["run", "round", "source", "probability"])
def test_heat_maps(pipe: Pipe, kind: str) -> None:
    out = pipe("sjd")("fox", generator=generators(1))
    picture = out.traces[0].heatmap(out.images[0], kind=kind)
    assert isinstance(picture, Image.Image) and picture.mode == "RGB"
    assert out.traces[0].heatmap(kind=kind).size[0] >= 16


def test_an_unknown_heat_map_is_named(pipe: Pipe) -> None:
    with pytest.raises(ValueError, match="runs") as error:
        pipe("sjd")("fox").traces[0].heatmap(kind="runs")
    assert "probability" in str(error.value)


def test_time_in_the_callback_is_nobody_elses(pipe: Pipe) -> None:
    """A slow callback shows in its own part, not in `own_seconds` and not in the engine's share."""

    def slow(*_: Any) -> None:
        time.sleep(0.03)

    trace = pipe("sjd")("fox", generator=torch.Generator().manual_seed(0), callback_on_step_end=slow).traces[0]
    assert trace.parts["callback"] >= 0.03 * trace.rounds and trace.parts["other"] < 0.03 * trace.rounds
    assert trace.own_seconds == pytest.approx(trace.seconds - trace.parts["callback"])
    assert Trace.from_json(trace.to_json()) == trace and trace.summary()["own_seconds"] == trace.own_seconds
