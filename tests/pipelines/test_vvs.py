"""Partial verification skipping: which rounds, which tokens, and what stands in the cache afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from foredraft.decoding.drafters.head import HeadDrafter
from foredraft.decoding.noise import Noise
from foredraft.decoding.sampling import Sampling
from foredraft.decoding.sequence import Sequence
from foredraft.decoding.trace import Trace
from foredraft.decoding.tree import Tree, balanced_paths, static_tree
from foredraft.decoding.types import UNVERIFIED, Draft, Scores, Verdict
from foredraft.decoding.verify import Match
from foredraft.models.head import DraftHead
from foredraft.pipelines.vvs import Paths, SkippingDrafter, VVSConfig
from torch import Tensor

from ..decoding.tiny import SEEDS, TARGET, UNEQUAL, VOCABULARY, Result, decode_checked, path_of, replay
from ..tiny import PROMPTS, generators, lively_head

Pipe = Callable[..., Any]
GRID = (3, 5)
ALWAYS: dict[str, Any] = {"threshold": -1.0, "stride": 1}
CODES = torch.randn(VOCABULARY, 3, generator=torch.Generator().manual_seed(4))
SHAPE: dict[str, Any] = {"draft_length": 3, "total_nodes": 6, "branching": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "dynamic": {"threshold": 0.5},
    "always": ALWAYS,
    "uniform": {"schedule": "uniform", "interval": 3},
    "long": {**ALWAYS, "truncate": False},
    "sure": {**ALWAYS, "truncate": False, "selection": "confidence"},
}
SAMPLINGS = {"plain": Sampling(), "guided": Sampling(guidance_scale=2.0)}


# -- what is known of a tree, path by path -----------------------------------------------------------------------------


def leaves_of(draft: Draft, row: int) -> list[list[int]]:
    """Every path of valid nodes, written out."""
    valid = [k for k in range(draft.nodes) if draft.valid is None or bool(draft.valid[row, k])]
    parents = [path_of(draft, row, k)[-2] if len(path_of(draft, row, k)) > 1 else -1 for k in valid]
    return [path_of(draft, row, k) for k in valid if k not in parents]


def similarity_of(draft: Draft, row: int, codes: Tensor, alpha: float, stride: int) -> float:
    """Eq. 2, pair by pair."""
    taken = leaves_of(draft, row)[::stride]
    above, below = 0.0, 0.0
    for depth in range(max((len(path) for path in taken), default=0)):
        here = [codes[draft.tokens[row, path[depth]]].double() for path in taken if len(path) > depth]
        pairs = [torch.cosine_similarity(a, b, dim=0) for a, b in itertools.permutations(here, 2)]
        if pairs:
            above += alpha**depth * float(torch.stack(pairs).mean())
            below += alpha**depth
    return above / below if below else -float("inf")


def some_drafts(count: int) -> Draft:
    """Random trees of 9 nodes over 7 codes; nodes below a certain depth are invalid in half of the rows."""
    generator = torch.Generator().manual_seed(7)
    parents = torch.stack([(torch.rand(count, generator=generator) * (k + 1)).long() - 1 for k in range(9)], 1)
    tree = Tree(parents)
    tokens = torch.randint(VOCABULARY, (count, 9), generator=generator)
    valid = (tree.depth <= 1 + torch.arange(count)[:, None] % 4) & (torch.arange(count)[:, None] % 5 > 0)
    return Draft(tokens, tree=tree, valid=torch.where(torch.arange(count)[:, None] % 2 > 0, valid, valid.any(1, keepdim=True)))


def test_paths_are_counted_as_written_out() -> None:
    draft = some_drafts(60)
    paths = Paths.of(draft)
    for row in range(60):
        lines = leaves_of(draft, row)
        assert sorted(line[-1] for line in lines) == paths.leaf[row].nonzero()[:, 0].tolist()
        assert int(paths.count[row]) == len(lines)
        assert int(paths.mean[row]) == (sum(map(len, lines)) // len(lines) if lines else 0)
    assert 0 in paths.count.tolist() and max(paths.count.tolist()) > 4


@pytest.mark.parametrize(("alpha", "stride"), [(0.5, 1), (0.5, 2), (1.0, 3), (0.0, 2)])
def test_similarity_is_that_of_all_pairs(alpha: float, stride: int) -> None:
    draft = some_drafts(60)
    units = torch.nn.functional.normalize(CODES.double(), dim=-1)
    found = Paths.of(draft).similarity(units, draft.tokens, 9, alpha, stride)
    wanted = torch.tensor([similarity_of(draft, row, CODES, alpha, stride) for row in range(60)], dtype=torch.float64)
    assert torch.allclose(found, wanted, atol=1e-6, rtol=0)
    assert wanted.isinf().any() and not wanted.isinf().all()


def test_a_path_with_itself_is_no_pair() -> None:
    """Two opposite codes: -1, which counting a path with itself would make 0."""
    tree = static_tree(balanced_paths((2,)))
    units = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    draft = Draft(torch.tensor([[0, 1], [1, 1]]), tree=Tree(tree.parents.expand(2, -1)))
    assert Paths.of(draft).similarity(units, draft.tokens, 1, 0.5, 1).tolist() == [-1.0, 1.0]
    assert Paths.of(draft).similarity(units, draft.tokens, 1, 0.5, 2).tolist() == [-float("inf")] * 2


def test_every_path_is_as_likely() -> None:
    draft = some_drafts(3)
    paths = Paths.of(Draft(draft.tokens, tree=draft.tree))
    steps = 60
    picked = torch.stack([paths.pick(torch.full((3,), (i + 0.5) / steps)) for i in range(steps)])
    for row in range(3):
        leaves, counts = picked[:, row].unique(return_counts=True)
        assert leaves.tolist() == paths.leaf[row].nonzero()[:, 0].tolist()
        assert int(counts.max()) - int(counts.min()) <= 1
    assert paths.leaf[0, paths.pick(torch.ones(3) - 1e-9)[0]]


# -- decoding over the tiny target, every round checked ----------------------------------------------------------------


def head() -> DraftHead:
    """For the tiny target."""
    torch.manual_seed(3)
    return lively_head(TARGET).double()


HEAD = head()


class Spy:
    """Hands on a skipping drafter; notes what its inner tree was, what became of it, and whether a new drafter would agree."""

    def __init__(self, ids: Tensor, sampling: Sampling, **options: Any):
        self.config = VVSConfig(**{**SHAPE, **options})
        self.conditioning, self.sampling = TARGET.condition(ids, None, sampling.guided), sampling
        self.drafter = SkippingDrafter(self.head_drafter(), CODES, self.config)
        self.trees: list[Draft] = []
        self.confidences: list[Tensor] = []
        self.handed: list[Draft] = []
        self.active: list[Tensor] = []
        own = self.drafter.inner.propose
        self.drafter.inner.propose = lambda *given: self.note(own(*given), *given)  # type: ignore[method-assign]

    @property
    def draft_forwards(self) -> int:
        """The inner one's."""
        return self.drafter.draft_forwards

    def head_drafter(self) -> HeadDrafter:
        """A drafter that has read nothing yet."""
        config = self.config
        own = HEAD.begin(TARGET, self.conditioning, GRID, self.sampling, config.branching * config.draft_length)
        return HeadDrafter(HEAD, TARGET, own, dynamic=(config.total_nodes, config.draft_length, config.branching))

    def note(self, draft: Draft, sequence: Sequence, noise: Noise) -> Draft:
        """Compare with a drafter without a past: stale features are read again once the target knows better."""
        inner = self.drafter.inner
        assert inner.confidence is not None and draft.tree is not None
        self.trees.append(Draft(draft.tokens, tree=draft.tree, valid=draft.valid))
        self.confidences.append(inner.confidence)
        self.active.append(sequence.active.clone())
        fresh = self.head_drafter()
        other = fresh.propose(sequence, noise)
        live = sequence.active
        assert torch.equal(other.tokens[live], draft.tokens[live]) and fresh.confidence is not None
        assert torch.allclose(fresh.confidence[live], inner.confidence[live], atol=1e-9, rtol=0)
        return draft

    def propose(self, sequence: Sequence, noise: Noise) -> Draft:
        """Passed on."""
        self.handed.append(self.drafter.propose(sequence, noise))
        return self.handed[-1]

    def observe(self, sequence: Sequence, draft: Draft, scores: Scores | None, verdict: Verdict, noise: Noise) -> None:
        """Passed on."""
        self.drafter.observe(sequence, draft, scores, verdict, noise)

    def skipped(self, row: int) -> list[bool]:
        """Per round in which the row was active: whether it went without a verdict."""
        pairs = [(draft, active) for draft, active in zip(self.handed, self.active, strict=True) if bool(active[row])]
        return [draft.check is not None and not bool(draft.check[row]) for draft, _ in pairs]


def decoded(setting: str, sampling: str = "plain") -> tuple[Spy, Result]:
    """Four ragged rows; cache, features and scores are compared with a fresh forward in every round."""
    spy = Spy(UNEQUAL, SAMPLINGS[sampling], **SETTINGS[setting])
    return spy, decode_checked(spy, Match(), UNEQUAL, GRID, SAMPLINGS[sampling])


def rounds_of(trace: Trace) -> list[tuple[int, bool]]:
    """Tokens of each round, and whether they were unverified."""
    flat = [pair for line in zip(trace.round, trace.source, strict=True) for pair in zip(*line, strict=True)]
    groups = itertools.groupby(flat, key=lambda pair: pair[0])
    return [(len(part), part[0][1] == UNVERIFIED) for part in (list(group) for _, group in groups)]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_skips(setting: str, sampling: str) -> None:
    """Post-verification leaves what a fresh forward would; verified tokens are the target's own, given the unverified ones."""
    spy, result = decoded(setting, sampling)
    replay(UNEQUAL, result.tokens, GRID, SAMPLINGS[sampling], SEEDS, result.verified)
    assert max(result.pendings) > 1 and not result.verified.all()
    for row, trace in enumerate(result.traces):
        rounds = rounds_of(trace)
        skips = [skipped for _, skipped in rounds]
        assert skips == spy.skipped(row)
        assert not skips[0] and not any(one and two for one, two in itertools.pairwise(skips))
        assert trace.target_forwards == trace.rounds - sum(skips)
        assert trace.skip_ratio == pytest.approx(sum(skips) / len(skips))
        assert trace.unverified == sum(length for length, skipped in rounds if skipped)
        if setting == "uniform":
            assert skips == [number % 3 == 0 for number in range(1, len(skips) + 1)]
        elif setting != "dynamic":  # every second round, where there are paths to compare
            trees = [tree for tree, active in zip(spy.trees, spy.active, strict=True) if bool(active[row])]
            several = [len(leaves_of(tree, row)) > 1 for tree in trees]
            assert skips[1:] == [two and not one for one, two in zip(skips, several[1:], strict=False)]
            assert 2 * sum(skips) >= len(skips) - 2
    if setting == "dynamic":
        assert any(draft.check is not None and draft.check.any() and not draft.check.all() for draft in spy.handed)


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_is_committed_is_the_beginning_of_a_path(setting: str) -> None:
    """gamma = min(length of the path, floor of the paths' mean length), inside the image."""
    spy, result = decoded(setting)
    ended = 0
    for row, trace in enumerate(result.traces):
        at, active = 0, [number for number, live in enumerate(spy.active) if bool(live[row])]
        for number, (length, skipped) in zip(active, rounds_of(trace), strict=True):
            if skipped:
                lines = leaves_of(spy.trees[number], row)
                took = result.tokens[row, at : at + length].tolist()
                tokens = {tuple(spy.trees[number].tokens[row, line].tolist()) for line in lines}
                mean = sum(map(len, lines)) // len(lines)
                if spy.config.truncate:
                    assert took in [list(line[: min(len(line), mean)]) for line in tokens]
                elif setting == "sure":
                    sure = max(lines, key=lambda line: float(spy.confidences[number][row, line[-1]]))
                    assert took == spy.trees[number].tokens[row, sure].tolist()
                else:
                    assert tuple(took) in tokens
                ended += at + length == result.tokens.shape[1]
            at += length
    assert ended or setting in ("uniform", "dynamic"), "an image ends inside an unverified path"


def test_dynamic_follows_the_threshold() -> None:
    """A row skips where its own paths look alike, and only there."""
    spy, result = decoded("dynamic")
    seen = set()
    for row in range(4):
        rested, first = True, True
        for number, active in enumerate(spy.active):
            if not bool(active[row]):
                continue
            alike = similarity_of(spy.trees[number], row, CODES, spy.config.alpha, spy.config.stride) >= spy.config.threshold
            check = spy.handed[number].check
            skips = check is not None and not bool(check[row])
            assert skips == (alike and rested and not first)
            seen.add((alike, rested, skips))
            rested, first = not skips, False
    assert {(True, True, True), (False, True, False)} <= seen


def test_stale_features_are_the_most_recent_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """After gamma unverified tokens the head reads the gamma newest features in order (Sec. 4.3)."""
    found: list[tuple[Tensor, Tensor]] = []
    read = HeadDrafter._features

    def features(self: HeadDrafter, sequence: Sequence, columns: Tensor) -> Tensor:
        given = read(self, sequence, columns)
        if sequence.pending > 1 and self.own.prefix is None and sequence.cache is not None:
            for row in range(len(columns)):
                gamma, final = int(sequence.length[row] - 1 - sequence.cached[row]), int(sequence.cached[row])
                for place, column in enumerate(columns[row].tolist()):
                    source = column - 1 if column - 1 < final else column - 1 - gamma
                    if gamma and source >= 0:
                        found.append((given[row, place], sequence.cache.hidden[row, sequence.prompt + source]))
        return given

    monkeypatch.setattr(HeadDrafter, "_features", features)
    decoded("long")
    assert len(found) > 10 and all(torch.equal(one, other) for one, other in found)


# -- the pipeline ------------------------------------------------------------------------------------------------------

TREE: dict[str, Any] = {"draft_length": 3, "total_nodes": 8, "branching": 3}
CALL: dict[str, Any] = {"height": 32, "width": 32, "output_type": "latent"}


@pytest.mark.parametrize("rule", ["lantern", "lantern++", "exact", "annealed"])
def test_without_skips_it_is_the_same_method_without_them(pipe: Pipe, rule: str) -> None:
    """interval = infinity and `never`: EAGLE-2 with the rule, bit by bit."""
    given: dict[str, Any] = {"generator": generators(1, 2), **CALL, "rule": rule, **TREE}
    plain = pipe("cool_sd")(list(PROMPTS[:2]), tree="dynamic", **given)
    for options in ({"schedule": "never"}, {"schedule": "uniform", "interval": 10_000}):
        other = pipe("vvs")(list(PROMPTS[:2]), **{**given, "generator": generators(1, 2)}, **options)
        assert torch.equal(other.tokens, plain.tokens)
        for one, two in zip(plain.traces, other.traces, strict=True):
            assert (one.round, one.source, one.probability) == (two.round, two.source, two.probability)
            assert (one.rounds, one.target_forwards, one.judged, one.drafted) == (
                two.rounds,
                two.target_forwards,
                two.judged,
                two.drafted,
            )
            assert two.skip_ratio == two.unverified == 0
    skipping = pipe("vvs")(list(PROMPTS[:2]), **{**given, "generator": generators(1, 2)}, threshold=-1.0)
    assert not torch.equal(skipping.tokens, plain.tokens)


@pytest.mark.parametrize(
    "options",
    [{"threshold": 0.1}, {"threshold": 0.1, "truncate": False, "rule": "exact"}, {"schedule": "uniform", "interval": 2}],
    ids=["dynamic", "long", "uniform"],
)
def test_a_row_of_a_batch_is_the_row_alone(pipe: Pipe, options: dict[str, Any]) -> None:
    """Tokens and counts; rows decide for themselves whether they skip."""
    drawn = pipe("vvs", torch.float64)
    together = drawn(list(PROMPTS), generator=generators(4, 5, 6, 7), **CALL, **TREE, **options)
    assert options.get("schedule") or len({trace.skip_ratio for trace in together.traces}) > 1
    for row, prompt in enumerate(PROMPTS):
        alone = drawn(prompt, generator=generators(4 + row), **CALL, **TREE, **options)
        one, two = alone.traces[0], together.traces[row]
        assert torch.equal(alone.tokens[0], together.tokens[row])
        for name in ("rounds", "target_forwards", "judged", "accepted", "drafted", "round", "run", "source", "skip_ratio"):
            assert getattr(one, name) == getattr(two, name), name
        unknown = [[[value is None for value in line] for line in trace.probability] for trace in (one, two)]
        assert unknown[0] == unknown[1] == [[value == UNVERIFIED for value in line] for line in one.source]


def test_uniform_schedule_counts(pipe: Pipe) -> None:
    for interval in (2, 3, 4):
        output = pipe("vvs")("fox", generator=generators(1), **CALL, schedule="uniform", interval=interval)
        trace = output.traces[0]
        assert trace.rounds - trace.target_forwards == trace.rounds // interval
        assert Trace.from_json(trace.to_json()).skip_ratio == trace.skip_ratio > 0
        assert trace.tokens_per_forward > trace.mean_acceptance_length


def test_exact_only_if_nothing_is_skipped() -> None:
    assert not VVSConfig().exact and VVSConfig().badge == "relaxed"
    assert not VVSConfig(rule="exact").exact and not VVSConfig(rule="exact", schedule="uniform", interval=10_000).exact
    for options in ({"rule": "exact"}, {"tvd": 0.0}, {"rule": "lantern++", "lam": 0.0}, {"rule": "annealed", "delta": 0.2}):
        assert VVSConfig(schedule="never", **options).exact  # type: ignore[arg-type]
    assert not VVSConfig(schedule="never").exact


def test_what_applies() -> None:
    assert VVSConfig().applies("threshold") and not VVSConfig().applies("interval") and VVSConfig().applies("selection")
    never = VVSConfig(schedule="never", rule="lantern++")
    assert not any(never.applies(name) for name in ("threshold", "interval", "selection", "truncate", "tvd", "delta"))
    assert never.applies("lam") and never.applies("k")
