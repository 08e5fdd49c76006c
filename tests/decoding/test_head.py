"""Drafts of a head equal those of an uncached head, its cache stays right, and what is decoded with it follows the target."""

from __future__ import annotations

from collections.abc import Callable

import foredraft.decoding.drafters.grow as grow_module
import pytest
import torch
from foredraft.decoding.cache import Cache
from foredraft.decoding.drafters.head import HeadDrafter
from foredraft.decoding.loop import decode
from foredraft.decoding.noise import DRAW, Noise
from foredraft.decoding.rules import Exact, normalised
from foredraft.decoding.sampling import Sampling, guide, warp
from foredraft.decoding.sequence import Sequence
from foredraft.decoding.trace import Recorder
from foredraft.decoding.tree import balanced_paths, spine_paths, static_tree
from foredraft.decoding.types import Draft, Drafter, Scores, Verdict, Verifier
from foredraft.decoding.verify import Match, Prefix, Walk
from foredraft.models.embedded import EmbeddedTarget
from foredraft.models.head import DraftHead
from torch import Tensor

from .stand_ins import unstruck
from .tabular import Fit, NoDraft, check_law, count_sequences
from .test_skips import Skipping
from .tiny import SEEDS, TARGET, UNEQUAL, VOCABULARY, WORDLESS, decode_checked, path_of, replay

GRID = (3, 4)
SAMPLINGS = {
    "plain": Sampling(),
    "guided": Sampling(guidance_scale=2.0),
    "top-k": Sampling(guidance_scale=1.5, temperature=0.9, top_k=4, top_p=0.95),
}
TREE = static_tree(balanced_paths((2, 2)))
DEEP = static_tree(balanced_paths((3, 2, 1)))
SPINE = static_tree(spine_paths(3, 3))


def lively(target: EmbeddedTarget, seed: int = 0) -> DraftHead:
    """A head with random weights whose every input counts."""
    torch.manual_seed(seed)
    head = DraftHead.for_target(target, ffn=24).double().eval()
    with torch.no_grad():
        for weight in (head.blocks[0].attention.out.weight, head.blocks[0].down.weight):
            weight.mul_(10.0)
    return head


HEAD = lively(TARGET)


class Reference:
    """The head without a cache: the whole sequence and one path of drafted nodes, forward by forward."""

    def __init__(self, ids: Tensor, sequence: Sequence, stale: str = "recent"):
        self.ids, self.sequence, self.stale = ids, sequence, stale
        self.known: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    def log_q(self, row: int, path: tuple[int, ...]) -> Tensor:
        """Law of the token after the committed ones of a row and the drafted tokens of a path: [V]."""
        if (row, path) not in self.known:
            self.known[row, path] = self._after(row, list(path))
        return self.known[row, path]

    def _after(self, row: int, path: list[int]) -> Tensor:
        sequence, words = self.sequence, self.ids[row : row + 1]
        if sequence.sampling.guided:
            words = torch.cat((words, torch.zeros_like(words)))
        prompt, pads = words.shape[1], (words == 0).sum(1)
        length, cached = int(sequence.length[row]), int(sequence.cached[row])
        tokens = sequence.tokens[row, 1:].clone()
        tokens[length - 1 : length - 1 + len(path)] = torch.tensor(path, dtype=torch.long)
        with torch.inference_mode():
            x, rotary, mask = TARGET.teacher_inputs(words, tokens.expand(len(words), -1), sequence.grid)
            features = TARGET.backbone(x, rotary, mask)
            before = torch.zeros_like(features)
            for slot in range(1, features.shape[1]):
                source = slot - 1 - prompt  # the column whose feature is read
                if source >= cached:
                    source = source - (length - 1 - cached) if self.stale == "recent" else cached - 1
                if source < 0 and slot >= prompt:
                    source = -1
                before[:, slot] = features[:, source + prompt]
            before[pads == prompt, prompt] = 0.0
            if (
                cached < length - 1
            ):  # without a prompt there is nothing before column 0, which a missing feature may be taken from
                for slot in range(prompt + cached + 1, prompt + length):
                    source = slot - 1 - prompt - (length - 1 - cached) if self.stale == "recent" else cached - 1
                    if source < 0:
                        before[pads == prompt, slot] = 0.0
            place = torch.arange(features.shape[1])
            hidden = place > place[:, None]
            first = torch.clamp(pads + 1, max=prompt)
            hidden = hidden | ((place < first[:, None])[:, None] & (place != place[:, None]))
            shown = torch.zeros(hidden.shape, dtype=x.dtype).masked_fill_(hidden, -torch.inf)[:, None]
            for step in range(len(path) + 1):
                at = prompt + length - 1 + step
                prediction = HEAD(x, before, rotary, shown)[:, at]
                if step < len(path):
                    before[:, at + 1] = prediction
            raw = TARGET.logits(prediction)
            if sequence.sampling.guided:
                raw = guide(raw, sequence.sampling.guidance_scale)
            return warp(raw, sequence.sampling).flatten()


class Checked:
    """A head's drafter, every node of which is compared with the reference."""

    draft_forwards = 0

    def __init__(self, ids: Tensor, sampling: Sampling, grid: tuple[int, int] = GRID, scratch: int = 32, **options: object):
        conditioning = TARGET.condition(ids, None, sampling.guided)
        own = HEAD.begin(TARGET, conditioning, grid, sampling, scratch)
        self.ids, self.inner = ids, HeadDrafter(HEAD, TARGET, own, **options)  # type: ignore[arg-type]
        self.compared = 0

    def propose(self, sequence: Sequence, noise: Noise) -> Draft:
        """The inner drafter's draft."""
        draft = self.inner.propose(sequence, noise)
        reference = Reference(self.ids, sequence, self.inner.stale)
        index = (sequence.length - 1)[:, None] + torch.arange(sequence.limit)
        log_e = noise.log_exponential(index.clamp(max=sequence.limit - 1), VOCABULARY, DRAW, dtype=torch.float64)
        for row in range(len(draft.tokens)):
            if not bool(sequence.active[row]):
                continue
            for node in range(draft.nodes):
                if draft.valid is None or bool(draft.valid[row, node]):
                    self.compare(draft, row, node, reference, log_e)
        return draft

    def compare(self, draft: Draft, row: int, node: int, reference: Reference, log_e: Tensor) -> None:
        """Token, law and confidence of one node."""
        *parents, _ = path_of(draft, row, node)
        tokens = draft.tokens[row].tolist()
        line = tuple(tokens[k] for k in parents)
        log_q, token = reference.log_q(row, line), tokens[node]
        noisy = log_q - log_e[row, len(line)]
        earlier = [] if draft.tree is None else [k for k in range(node) if path_of(draft, row, k)[:-1] == parents]
        if self.inner.dynamic is not None:
            assert self.inner.confidence is not None and draft.q is None
            total = 0.0
            for depth, k in enumerate((*parents, node)):
                law = reference.log_q(row, line[:depth])
                if self.inner.seeded:
                    law = (law - log_e[row, depth]).log_softmax(-1)
                total += float(law[tokens[k]])
            assert abs(float(self.inner.confidence[row, node]) - total) < 1e-8
        else:
            # In order of the position's noise, without the siblings drawn before.
            rank = int((noisy > noisy[token]).sum())
            assert rank == len(earlier) and all(noisy[tokens[k]] > noisy[token] for k in earlier)
        if self.inner.seeded or self.inner.dynamic is not None:
            assert draft.q is None
        else:
            assert draft.q is not None
            law = log_q.exp()
            law[[tokens[k] for k in earlier]] = 0.0
            assert (draft.q[row, node] - normalised(law, law)).abs().max() < 1e-9
        self.compared += 1

    def observe(self, sequence: Sequence, draft: Draft, scores: Scores | None, verdict: Verdict, noise: Noise) -> None:
        """Passed on."""
        self.inner.observe(sequence, draft, scores, verdict, noise)


SHAPES: dict[str, dict[str, object]] = {
    "chain": {"length": 4},
    "long chain": {"length": 15},
    "static": {"tree": TREE},
    "deep": {"tree": DEEP},
    "spine": {"tree": SPINE},
    "dynamic": {"dynamic": (7, 3, 3)},
    "dynamic, all": {"dynamic": (40, 3, 2)},
}


def plain(ids: Tensor, sampling: Sampling, grid: tuple[int, int] = GRID) -> Tensor:
    """Autoregressive tokens."""
    return decode_checked(NoDraft(), Match(), ids, grid, sampling, compare=False).tokens


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_seeded(shape, sampling):
    """Ragged rows, prompts of 2, 4, 1 and 0 words: every node equals the uncached head's, the tokens equal plain decoding's."""
    chosen = SAMPLINGS[sampling]
    drafter = Checked(UNEQUAL, chosen, seeded=True, **SHAPES[shape])
    result = decode_checked(drafter, Match(), UNEQUAL, GRID, chosen, compare=False)
    assert torch.equal(result.tokens, plain(UNEQUAL, chosen))
    assert drafter.compared > 50
    assert sum(trace.accepted for trace in result.traces) > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_sampled(shape):
    """Laws of siblings without replacement, and both caches after every round."""
    drafter = Checked(UNEQUAL, SAMPLINGS["guided"], **SHAPES[shape])
    result = decode_checked(drafter, Walk(Exact()), UNEQUAL, GRID, SAMPLINGS["guided"])
    assert all(trace.complete for trace in result.traces)
    assert drafter.compared > 50 and result.columns > 100


@pytest.mark.parametrize("ids", [WORDLESS, UNEQUAL[2:3], UNEQUAL[:1]], ids=["no words", "one word", "one row"])
@pytest.mark.parametrize("grid", [(1, 1), (1, 2), (3, 1)])
def test_small_images(ids, grid):
    """One token; the end of the image inside a tree; a prompt of length 1 or 0."""
    for sampling in (SAMPLINGS["plain"], SAMPLINGS["guided"]):
        expected = plain(ids, sampling, grid)
        for shape in ("chain", "deep", "dynamic"):
            drafter = Checked(ids, sampling, grid, seeded=True, **SHAPES[shape])
            assert torch.equal(decode_checked(drafter, Match(), ids, grid, sampling, compare=False).tokens, expected)


def test_no_nodes():
    """K = 0: no forward of the head, and plain decoding."""
    drafter = Checked(UNEQUAL, Sampling(), length=0, seeded=True)
    assert torch.equal(decode_checked(drafter, Match(), compare=False).tokens, plain(UNEQUAL, Sampling()))
    assert drafter.inner.draft_forwards == 0


@pytest.mark.parametrize("stale", ["recent", "last"])
@pytest.mark.parametrize("sampling", ["plain", "guided"])
@pytest.mark.parametrize("gammas", [[2, 2, 2, 2], [2, 0, 1, 2], [0, 2, 0, 0]])
def test_missing_features(gammas, sampling, stale):
    """After a skipped verification: stale features for the missing ones, and the true ones as soon as there are any."""
    chosen = SAMPLINGS[sampling]
    drafter = Checked(UNEQUAL, chosen, tree=TREE, seeded=True, stale=stale)
    skipping = Skipping(drafter, gammas)  # type: ignore[arg-type]
    result = decode_checked(skipping, Match(), UNEQUAL, GRID, chosen, compare=False)
    assert max(result.pendings) > 1 and drafter.compared > 50
    replay(UNEQUAL, result.tokens, GRID, chosen, SEEDS, result.verified)


def test_a_row_that_skips_alone():
    """Ragged pending: rows of one round with and without missing features."""
    drafter = Checked(UNEQUAL, SAMPLINGS["guided"], tree=TREE, seeded=True)
    skipping = Skipping(drafter, [2, 0, 1, 0], lone=True)  # type: ignore[arg-type]
    decode_checked(skipping, Match(), UNEQUAL, GRID, SAMPLINGS["guided"], compare=False)
    assert drafter.compared > 50


@pytest.mark.parametrize("shape", ["static", "dynamic"])
def test_without_the_copy_features_are_wrong(shape, monkeypatch):
    """The control: if the accepted path's features stay in their scratch slots, the comparison notices."""
    monkeypatch.setattr(Cache, "move", lambda self, source, target: None)
    with pytest.raises(AssertionError):
        decode_checked(Checked(UNEQUAL, Sampling(), seeded=True, **SHAPES[shape]), Match(), compare=False)


@pytest.mark.parametrize("fault", ["stand-ins kept", "accepted columns not read"])
def test_a_stale_head_cache_is_noticed(fault, monkeypatch):
    """Controls: columns read with a stand-in for a missing feature are not read again; nor accepted ones after a draft."""
    root, follow = HeadDrafter.root, Sequence.follow

    def spoiled(self: HeadDrafter) -> Scores:
        scores = root(self)
        self.own.cached = self.own.length
        return scores

    def forgetful(self: Sequence, other: Sequence) -> None:
        follow(self, other)
        self.cached, self.pending = self.length - 1, 1

    if fault == "stand-ins kept":
        monkeypatch.setattr(HeadDrafter, "root", spoiled)
    else:
        monkeypatch.setattr(Sequence, "follow", forgetful)
    drafter = Skipping(Checked(UNEQUAL, Sampling(), tree=TREE, seeded=True), [2, 1, 2, 1])  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        decode_checked(drafter, Match(), compare=False)


@pytest.mark.parametrize("shape", ["chain", "deep", "dynamic"])
def test_a_row_alone_is_the_row_of_the_batch(shape):
    """Tokens, rounds and counts; one row finishes long before the others."""

    def result(rows: slice) -> tuple[Tensor, list[tuple[int, int, int]]]:
        drafter = Checked(UNEQUAL[rows], SAMPLINGS["guided"], seeded=True, **SHAPES[shape]).inner
        run = decode_checked(drafter, Match(), UNEQUAL[rows], GRID, SAMPLINGS["guided"], SEEDS[rows], compare=False)
        return run.tokens, [(trace.rounds, trace.accepted, trace.judged) for trace in run.traces]

    tokens, counts = result(slice(None))
    for row in range(4):
        alone, count = result(slice(row, row + 1))
        assert torch.equal(alone[0], tokens[row]) and count == counts[row : row + 1]


def test_room_and_features_are_needed():
    """Errors say what to do."""
    drafter = Checked(UNEQUAL, Sampling(), scratch=2, tree=DEEP, seeded=True).inner
    with pytest.raises(ValueError, match="room for 2"):
        decode_checked(drafter, Match(), compare=False)
    with pytest.raises(ValueError, match="unknown stale 'newest'; choose one of recent, last"):
        Checked(UNEQUAL, Sampling(), stale="newest")


def test_only_parents_are_fed():
    """A spine of 3 x 3 nodes costs the pending columns and two levels of one node each."""
    drafter = Checked(UNEQUAL[:1], Sampling(), tree=SPINE, seeded=True, scratch=2).inner
    result = decode_checked(drafter, Match(), UNEQUAL[:1], compare=False)
    assert drafter.draft_forwards == 3 * result.traces[0].rounds


# -- laws ----------------------------------------------------------------------------------------------------------------------

SMALL, ROWS, WORDS = 3, 60_000, torch.tensor([[0, 5]])


def small_target() -> EmbeddedTarget:
    """V = 3, so that the law of its images can be enumerated."""
    torch.manual_seed(3)
    model = EmbeddedTarget(words=8, max_words=2, layers=1, dim=8, heads=1, ffn=8, vocab_size=SMALL).eval()
    with torch.no_grad():
        for weight in (model.head.weight, model.codes.weight, model.word_table.weight, model.start):
            weight.mul_(40.0)
        for block in model.backbone.blocks:
            block.attention.out.weight.mul_(10.0)
            block.down.weight.mul_(10.0)
    return model


SMALL_TARGET = small_target()
SMALL_HEAD = lively(SMALL_TARGET, 4).float()
SMALL_SAMPLING = Sampling(guidance_scale=1.5, temperature=1.3)


def enumerated(length: int) -> Tensor:
    """Probability of every image, numbered as a base-3 integer."""
    images = torch.cartesian_prod(*[torch.arange(SMALL)] * length).view(-1, length)
    words = WORDS.expand(len(images), -1)
    with torch.inference_mode():
        both = SMALL_TARGET.double()(torch.cat((words, torch.zeros_like(words))), images.repeat(2, 1), (length, 1))
        log_p = warp(guide(both, SMALL_SAMPLING.guidance_scale), SMALL_SAMPLING)
    SMALL_TARGET.float()
    return log_p.gather(2, images[..., None]).sum((1, 2)).exp()


def measured(verifier: Verifier, length: int = 3, **options: object) -> Fit:
    """The images of many rows against the law."""
    conditioning = SMALL_TARGET.condition(WORDS.expand(ROWS, -1), None, True)
    with torch.inference_mode():
        sequence = SMALL_TARGET.begin(conditioning, (length, 1), SMALL_SAMPLING, 8)
        own = SMALL_HEAD.begin(SMALL_TARGET, conditioning, (length, 1), SMALL_SAMPLING, 4)
    drafter = HeadDrafter(SMALL_HEAD, SMALL_TARGET, own, **options)  # type: ignore[arg-type]
    tokens = decode(SMALL_TARGET, drafter, verifier, sequence, Noise(torch.arange(ROWS)), Recorder())
    return check_law(count_sequences(tokens, SMALL), enumerated(length))


LAWS: dict[str, tuple[Callable[[], Verifier], dict[str, object]]] = {
    "chain": (lambda: Prefix(Exact()), {"length": 2}),
    "static": (lambda: Walk(Exact()), {"tree": static_tree(balanced_paths((2, 2)))}),
    "dynamic": (lambda: Walk(Exact()), {"dynamic": (4, 2, 2)}),
}


@pytest.mark.parametrize("name", LAWS)
def test_law(name):
    verifier, options = LAWS[name]
    result = measured(verifier(), **options)
    print(f"{name}: {result}")
    assert result.passes, str(result)


def unnormalised(p: Tensor, codes: Tensor, parent: Tensor, rank: Tensor) -> Tensor:
    """Fault: siblings are struck from q and the rest is not renormalised."""
    laws = p[:, parent]
    for earlier in range(int(rank.max())):
        without = laws.scatter(2, codes[:, parent, earlier][..., None], 0.0)
        laws = torch.where((rank > earlier)[:, None], without, laws)
    return laws


class KeepsP(Exact):
    """Fault: p is not replaced by the residual between two siblings; what both leave is the honest one of the second."""

    def __init__(self) -> None:
        self.asked = 0

    def residual(self, p: Tensor, q: Tensor | None, x: Tensor, depth: Tensor | int = 0) -> Tensor:
        """p itself at every other call."""
        self.asked += 1
        return p if self.asked % 2 else super().residual(p, q, x, depth)


@pytest.mark.parametrize("fault", ["q not updated", "q not renormalised", "p not updated"])
def test_tree_controls(fault, monkeypatch):
    """Each breaks the law of siblings, and the check that passes the honest tree must fail it."""
    rule: Exact = KeepsP() if fault == "p not updated" else Exact()
    if fault != "p not updated":
        monkeypatch.setattr(grow_module, "struck", unstruck if fault == "q not updated" else unnormalised)
    result = measured(Walk(rule), tree=static_tree(balanced_paths((2, 2))))
    print(f"{fault}: {result}")
    assert not result.passes and result.tv > result.bound and result.z > 20, str(result)


def test_seeded_law():
    """Under `Match` the head's drafts never matter: the very tokens of plain decoding, all rows."""
    words = WORDS.expand(2000, -1)
    conditioning = SMALL_TARGET.condition(words, None, True)
    runs = []
    for seeded in (False, True):
        with torch.inference_mode():
            sequence = SMALL_TARGET.begin(conditioning, (2, 2), SMALL_SAMPLING, 8)
            own = SMALL_HEAD.begin(SMALL_TARGET, conditioning, (2, 2), SMALL_SAMPLING, 4)
        drafter: Drafter = HeadDrafter(SMALL_HEAD, SMALL_TARGET, own, dynamic=(4, 2, 2), seeded=True) if seeded else NoDraft()
        runs.append(decode(SMALL_TARGET, drafter, Match(), sequence, Noise(torch.arange(2000)), Recorder()))
    assert float((runs[0] == runs[1]).all(1).float().mean()) > 0.998  # float32: ties
