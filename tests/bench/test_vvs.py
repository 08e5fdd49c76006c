"""What `bench vvs` adds to the method: replaced verdicts, stale features, and what it reads from a run."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from foredraft.bench.cases import method_class
from foredraft.bench.vvs import NEVER, Replacing, StaleHead, aged, groups, lengths, replacing, stale
from foredraft.decoding.drafters.head import HeadDrafter
from foredraft.decoding.noise import Noise
from foredraft.decoding.sampling import Sampling
from foredraft.decoding.types import Draft, Scores, Verdict
from foredraft.decoding.verify import Match
from torch import Tensor

from ..decoding.tiny import TARGET, UNEQUAL, Result, begin, decode_checked, path_of
from ..tiny import generators, lively_head, parts, pipe  # noqa: F401

GRID = (3, 4)
HEAD = lively_head(TARGET).double()


def drafter() -> HeadDrafter:
    """Trees of six nodes, three deep."""
    own = HEAD.begin(TARGET, TARGET.condition(UNEQUAL, None, False), GRID, Sampling(), 9)
    return HeadDrafter(HEAD, TARGET, own, dynamic=(6, 3, 2))


class Noting:
    """A verifier that keeps what it was asked and what it said."""

    exact = True

    def __init__(self, inner: Any):
        self.inner, self.seen = inner, []

    def __call__(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        """The inner verdict."""
        verdict = self.inner(draft, scores, noise)
        confidence = None if self.inner.__class__ is Match else self.inner.drafter.confidence
        self.seen.append((Draft(draft.tokens, tree=draft.tree, valid=draft.valid), verdict, confidence))
        return verdict


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_replaced_verdicts_commit_the_surest_path_of_that_length(share: float) -> None:
    """The cache holds the path's own keys; the number of tokens is the verdict's, as far as a path reaches."""
    own, judge = drafter(), Noting(Match())
    outer = Noting(Replacing(judge, own, share))
    result: Result = decode_checked(own, outer, UNEQUAL, GRID)
    replaced = 0
    for (draft, verdict, _), (_, other, sure) in zip(judge.seen, outer.seen, strict=True):
        for row in range(4):
            if draft.valid is not None and not bool(draft.valid[row].any()):
                continue  # finished
            valid = [k for k in range(draft.nodes) if draft.valid is None or bool(draft.valid[row, k])]
            lines = [path_of(draft, row, k) for k in valid]
            ends = [line for line in lines if not any(len(o) > len(line) and o[: len(line)] == line for o in lines)]
            count = min(int(verdict.count[row]), max(map(len, ends)))
            best = max((line for line in ends if len(line) >= count), key=lambda line: float(sure[row, line[-1]]))
            took = other.tokens[row, : int(other.count[row])].tolist()
            same = took == verdict.tokens[row, : int(verdict.count[row])].tolist()
            line = took == draft.tokens[row, best[:count]].tolist()
            assert same if share == 0 else line if share == 1 else same or line
            replaced += line and not same
            assert int(other.accepted[row] - other.trusted[row]) <= int(other.judged[row])
    assert (replaced > 0) == (share > 0) and all(trace.complete for trace in result.traces)


def test_fresh_features_are_the_heads_own(pipe: Any) -> None:  # noqa: F811
    """s = -1 changes nothing, r = 0 changes nothing; s = 0 does."""
    run = pipe("vvs")

    def draw(build: Any) -> Tensor:
        run.method = (lambda given: build(run, given)) if build else type(run).method.__get__(run)
        options = {"height": 32, "width": 32, "output_type": "latent", **NEVER}
        return run("fox", generator=generators(3), **options).tokens

    try:
        plain = draw(None)
        for build in (stale(-1, -1), stale(-1, -1, True), stale(-1, 3), replacing(0.0)):
            assert torch.equal(draw(build), plain)
        assert not torch.equal(draw(stale(0, 0)), plain) and not torch.equal(draw(replacing(1.0)), plain)
    finally:
        del run.method


def test_sources_of_stale_features_by_hand() -> None:
    sequence = begin(TARGET, UNEQUAL, GRID, Sampling())
    sequence.length, sequence.cached = torch.tensor([7, 7, 7, 7]), torch.tensor([6, 6, 4, 4])
    columns = torch.arange(7).expand(4, -1)
    for (fresh, old), alternate, wanted in (
        ((-1, 0), False, [[-1, 0, 1, 2, 3, 4, 5]] * 2 + [[-1, 0, 1, 2, 3, 2, 3]] * 2),
        ((0, 2), False, [[-1, 0, 1, 2, 3, 2, 3]] * 2 + [[-1, 0, 1, 2, 3, 0, 1]] * 2),
        ((-1, 1), True, [[-1, 0, 1, 2, 3, 1, 2]] * 4),
    ):
        head = StaleHead(drafter(), (fresh, old), alternate)
        head._known = torch.full((4,), 5)  # two tokens were committed since
        head._round = 2
        assert head.sources(sequence, columns).tolist() == wanted


def test_ages_and_lengths() -> None:
    own = drafter()
    result = decode_checked(own, Match(), UNEQUAL, GRID, compare=False)
    found = aged(result.sequence, 3)
    cache, prompt = result.sequence.cache, result.sequence.prompt
    assert cache is not None
    features = cache.hidden[:4, prompt : prompt + int(result.sequence.cached.min())]
    for gap in (1, 2, 3):
        pairs = [torch.cosine_similarity(row[a], row[a - gap], dim=0) for row in features for a in range(gap, features.shape[1])]
        assert float(found[gap - 1]) == pytest.approx(float(torch.stack(pairs).mean()), abs=1e-9)
    for trace in result.traces:
        assert sum(lengths(trace)) == 12 and len(lengths(trace)) == trace.rounds and min(lengths(trace)) >= 1


def test_settings_are_of_known_options_and_distinct() -> None:
    for quick in (False, True):
        settings = list(itertools.chain(*groups(quick).values()))
        assert len({setting.name for setting in settings}) == len(settings) > 12
        for setting in settings:
            method_class(setting.case.method).config_class.from_options(setting.case.options)
            assert setting.case.call["top_k"] == 0
