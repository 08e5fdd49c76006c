"""The cache, hidden plane included, equals a fresh forward after every round; so do the scores of every node."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from foredraft.decoding.cache import Cache
from foredraft.decoding.drafters.jacobi import JacobiDrafter
from foredraft.decoding.drafters.model import ModelDrafter
from foredraft.decoding.noise import Noise
from foredraft.decoding.rules import Exact
from foredraft.decoding.sampling import Sampling
from foredraft.decoding.sequence import Sequence
from foredraft.decoding.tree import balanced_paths, static_tree
from foredraft.decoding.types import Draft, Drafter, Scores, Verdict, Verifier
from foredraft.decoding.verify import Match, Prefix, Walk

from .stand_ins import Scripted
from .tabular import NoDraft
from .tiny import DRAFT, TARGET, UNEQUAL, VOCABULARY, WORDLESS, assert_cache, begin, decode_checked, replay, tiny

GRID = (3, 4)
SAMPLINGS = {
    "plain": Sampling(),
    "guided": Sampling(guidance_scale=2.0),
    "top-k": Sampling(guidance_scale=1.5, temperature=0.9, top_k=4, top_p=0.95),
}
TREE = static_tree(balanced_paths((2, 2)))
DEEP = static_tree(balanced_paths((3, 2, 1)))


class Compared:
    """A drafter with a cache of its own, every draft of which equals that of a new one that feeds everything afresh."""

    draft_forwards = 0

    def __init__(self, ids: torch.Tensor, sampling: Sampling, **options: object):
        self.ids, self.sampling, self.options = ids, sampling, options
        self.inner = self.make(GRID)

    def make(self, grid: tuple[int, int], **changed: object) -> ModelDrafter:
        """A new drafter over the tiny draft model."""
        options = {**self.options, **changed}
        return ModelDrafter(DRAFT, begin(DRAFT, self.ids, grid, self.sampling), **options)  # type: ignore[arg-type]

    def propose(self, sequence: Sequence, noise: Noise) -> Draft:
        """The inner drafter's draft."""
        draft = self.inner.propose(sequence, noise)
        if draft.nodes == 0:
            return draft
        changed = {"planner": None, "length": draft.nodes} if self.inner.planner is not None else {}
        fresh = self.make(sequence.grid, **changed).propose(sequence, noise)
        valid = torch.ones_like(draft.tokens, dtype=torch.bool) if draft.valid is None else draft.valid
        valid = valid & sequence.active[:, None]
        assert ((draft.tokens == fresh.tokens) | ~valid).all()
        if draft.q is not None and fresh.q is not None:
            assert ((draft.q - fresh.q).abs().amax(-1) * valid < 1e-9).all()
        return draft

    def observe(self, sequence: Sequence, draft: Draft, scores: Scores | None, verdict: Verdict, noise: Noise) -> None:
        """Passed on."""
        self.inner.observe(sequence, draft, scores, verdict, noise)


Make = Callable[[torch.Tensor, Sampling], Drafter]
SEEDED: dict[str, Make] = {
    "none": lambda ids, sampling: NoDraft(),
    "jacobi 1": lambda ids, sampling: JacobiDrafter(1, VOCABULARY, init="left", seeded=True),
    "jacobi 5": lambda ids, sampling: JacobiDrafter(5, VOCABULARY, init="above", seeded=True),
    "jacobi 20": lambda ids, sampling: JacobiDrafter(20, VOCABULARY, init="sample_above", seeded=True),
    "chain": lambda ids, sampling: Compared(ids, sampling, length=4, seeded=True),
    "chain, planned": lambda ids, sampling: Compared(ids, sampling, seeded=True, planner=Scripted([2, 0, 4, 0, 0, 1])),
    "jacobi, planned": lambda ids, sampling: JacobiDrafter(6, VOCABULARY, seeded=True, planner=Scripted([0, 6, 1, 0, 3])),
    "static": lambda ids, sampling: Compared(ids, sampling, tree=TREE, seeded=True),
    "deep": lambda ids, sampling: Compared(ids, sampling, tree=DEEP, seeded=True),
    "dynamic": lambda ids, sampling: Compared(ids, sampling, dynamic=(7, 3, 3), seeded=True),
}
SAMPLED: dict[str, tuple[Make, Verifier]] = {
    "gumbel": (lambda ids, s: JacobiDrafter(4, VOCABULARY, "gumbel", "sample_left", dtype=torch.float64), Prefix(Exact())),
    "coupled": (lambda ids, s: JacobiDrafter(5, VOCABULARY, "coupled", "above", dtype=torch.float64), Prefix(Exact())),
    "chain": (lambda ids, sampling: Compared(ids, sampling, length=4), Prefix(Exact())),
    "static": (lambda ids, sampling: Compared(ids, sampling, tree=TREE), Walk(Exact())),
    "dynamic": (lambda ids, sampling: Compared(ids, sampling, dynamic=(9, 3, 2)), Walk(Exact())),
    "dynamic, match": (lambda ids, sampling: Compared(ids, sampling, dynamic=(5, 4, 2)), Match()),
}


def autoregressive(ids: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The reference tokens."""
    return decode_checked(NoDraft(), Match(), ids, GRID, sampling, compare=False).tokens


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", SEEDED)
def test_seeded_on_a_transformer(name, sampling):
    """Ragged rows, prompts of 2, 4, 1 and 0 words, with and without guidance: cache, scores, and the same image."""
    chosen = SAMPLINGS[sampling]
    result = decode_checked(SEEDED[name](UNEQUAL, chosen), Match(), UNEQUAL, GRID, chosen)
    assert torch.equal(result.tokens, autoregressive(UNEQUAL, chosen))
    replay(UNEQUAL, result.tokens, GRID, chosen, torch.tensor([5, 6, 7, 8]))
    assert result.columns > 100
    if name not in ("none", "jacobi 1"):
        assert sum(trace.accepted for trace in result.traces) > 0


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_on_a_transformer(name):
    make, verifier = SAMPLED[name]
    chosen = SAMPLINGS["guided"]
    result = decode_checked(make(UNEQUAL, chosen), verifier, UNEQUAL, GRID, chosen)
    assert all(trace.complete for trace in result.traces)
    assert sum(trace.accepted for trace in result.traces) > 0


@pytest.mark.parametrize("sampling", ["plain", "guided"])
@pytest.mark.parametrize("ids", [WORDLESS, UNEQUAL[2:3], UNEQUAL[:1]], ids=["no words", "one word", "one row"])
def test_short_prompts(ids, sampling):
    """A prompt of length 1 or 0, and a cache without any prompt slot."""
    chosen = SAMPLINGS[sampling]
    plain = autoregressive(ids, chosen)
    for name in ("jacobi 5", "static", "dynamic"):
        result = decode_checked(SEEDED[name](ids, chosen), Match(), ids, GRID, chosen)
        assert torch.equal(result.tokens, plain)


@pytest.mark.parametrize("name", ["static", "deep", "dynamic"])
def test_without_the_copy_the_cache_is_wrong(name, monkeypatch):
    """The control: if the accepted path stays in its scratch slots, the comparison notices."""
    monkeypatch.setattr(Cache, "move", lambda self, source, target: None)
    with pytest.raises(AssertionError):
        decode_checked(SEEDED[name](UNEQUAL, Sampling()), Match())


def test_a_stale_column_is_noticed():
    """The control of the control: one wrong feature, key or value anywhere below `cached` fails the comparison."""
    sequence = decode_checked(NoDraft(), Match(), UNEQUAL, GRID, SAMPLINGS["guided"], compare=False).sequence
    assert assert_cache(TARGET, UNEQUAL, sequence) == 8 * 12
    for plane in ("keys", "values", "hidden"):
        values = getattr(sequence.cache, plane)
        view = values[..., 5, sequence.prompt + 11, :] if plane == "hidden" else values[1, 5, sequence.prompt + 11]
        with torch.inference_mode():
            kept = view.clone()
            view += 1e-6
            with pytest.raises(AssertionError):
                assert_cache(TARGET, UNEQUAL, sequence)
            view.copy_(kept)
    assert_cache(TARGET, UNEQUAL, sequence)


def test_idle_rows_write_only_to_the_trash():
    """Once a row is complete nothing it reads changes any more, whatever the other rows do."""
    sequence = begin(TARGET, UNEQUAL, GRID, Sampling())
    sequence.tokens = torch.randint(VOCABULARY, sequence.tokens.shape, generator=torch.Generator().manual_seed(0))
    sequence.length = torch.tensor([13, 4, 13, 2])
    sequence.cached = sequence.length - 1
    sequence._uneven = True
    sequence.refresh()
    cache = sequence.cache
    assert cache is not None
    before = [plane.clone() for plane in (cache.keys, cache.values, cache.hidden)]
    for draft in (
        Draft(torch.zeros(4, 0, dtype=torch.long)),
        Draft(torch.ones(4, 5, dtype=torch.long), valid=(torch.arange(5) < torch.tensor([[0], [5], [0], [2]]))),
        Draft(torch.ones(4, 6, dtype=torch.long), tree=TREE, valid=torch.tensor([[False], [True], [False], [True]]).expand(4, 6)),
    ):
        with torch.inference_mode():
            TARGET.score(sequence, draft)
        for old, plane in zip(before, (cache.keys, cache.values, cache.hidden), strict=True):
            rows = 0 if plane is cache.hidden else 1
            for row in (0, 2):
                mine, theirs = plane.select(rows, row), old.select(rows, row)
                slots = 0 if plane is cache.hidden else 1
                assert torch.equal(mine.narrow(slots, 0, cache.trash), theirs.narrow(slots, 0, cache.trash))
            assert not torch.equal(plane.select(rows, 1), old.select(rows, 1))


def test_two_models_two_sequences():
    """The cache belongs to the sequence: decodings of one model may be interleaved."""
    other = tiny(seed=3)
    plain = autoregressive(UNEQUAL, Sampling())
    first, second = begin(TARGET, UNEQUAL, GRID, Sampling()), begin(other, UNEQUAL, GRID, Sampling())
    noise = Noise(torch.tensor([5, 6, 7, 8]))
    with torch.inference_mode():
        while not first.done:
            for model, sequence in ((TARGET, first), (other, second)):
                draft = NoDraft().propose(sequence, noise)
                verdict = Match()(draft, model.score(sequence, draft), noise)
                sequence.commit(verdict.tokens, verdict.count, verdict.accepted)
                sequence.refresh()
    assert torch.equal(first.tokens[:, 1:], plain)
    assert not torch.equal(second.tokens[:, 1:], plain)
