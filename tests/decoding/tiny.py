"""A tiny real transformer in float64, and references that use neither its cache nor its layout."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from foredraft.decoding.loop import decode
from foredraft.decoding.noise import DRAW, Noise
from foredraft.decoding.sampling import Sampling, draw, guide, warp
from foredraft.decoding.sequence import Sequence
from foredraft.decoding.trace import Recorder, Trace
from foredraft.decoding.types import UNVERIFIED, Draft, Drafter, Scores, Verifier
from foredraft.models.embedded import EmbeddedTarget
from torch import Tensor

VOCABULARY, SCRATCH = 7, 64
SEEDS = torch.tensor([5, 6, 7, 8])
# Two, four, one and no words: conditional and unconditional rows of unequal length.
UNEQUAL = torch.tensor([[0, 0, 3, 4], [3, 4, 5, 6], [0, 0, 0, 7], [0, 0, 0, 0]])
WORDLESS = torch.zeros(2, 4, dtype=torch.long)


def tiny(layers: int = 2, seed: int = 0) -> EmbeddedTarget:
    """Random weights, large enough to give laws that depend on every token."""
    torch.manual_seed(seed)
    model = EmbeddedTarget(words=20, layers=layers, dim=32, heads=2, ffn=48, vocab_size=VOCABULARY).double().eval()
    with torch.no_grad():
        for weight in (model.head.weight, model.codes.weight, model.word_table.weight, model.start):
            weight.mul_(20.0)
        for block in model.backbone.blocks:
            block.attention.out.weight.mul_(10.0)
            block.down.weight.mul_(10.0)
    return model


TARGET = tiny()


def related() -> EmbeddedTarget:
    """A draft model that often agrees: the target with its weights shaken."""
    model = tiny()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype) * weight.std() * 0.3)
    return model


DRAFT = related()


def begin(model: EmbeddedTarget, ids: Tensor, grid: tuple[int, int], sampling: Sampling) -> Sequence:
    """A fresh sequence with room for any draft of these tests."""
    return model.begin(model.condition(ids, None, sampling.guided), grid, sampling, SCRATCH)


def uncached_log_p(model: EmbeddedTarget, ids: Tensor, tokens: Tensor, grid: tuple[int, int], sampling: Sampling) -> Tensor:
    """Warped log-probabilities [B, N, V] of one causal pass over whole images [B, N]."""
    with torch.inference_mode():
        raw = model(ids, tokens, grid)
        if sampling.guided:
            raw = guide(torch.cat((raw, model(torch.zeros_like(ids), tokens, grid))), sampling.guidance_scale)
        return warp(raw, sampling)


def path_of(draft: Draft, row: int, node: int) -> list[int]:
    """The nodes from the root down to a node."""
    if draft.tree is None:
        return list(range(node + 1))
    parents = draft.tree.parents.expand(len(draft.tokens), -1)[row].tolist()
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


@dataclass
class Checked:
    """The target, every score of which is compared with an uncached pass over that node's path."""

    model: EmbeddedTarget
    ids: Tensor
    calls: int = 0
    compared: int = 0

    def score(self, sequence: Sequence, draft: Draft) -> Scores:
        """The model's own scores."""
        scores = self.model.score(sequence, draft)
        self.calls += 1
        count = sequence.limit - 1
        rows, nodes, images = [], [], []
        for row in range(len(draft.tokens)):
            for node in range(-1, draft.nodes):
                path = path_of(draft, row, node) if node >= 0 else []
                first = int(sequence.length[row]) - 1
                valid = draft.valid is None or all(bool(draft.valid[row, k]) for k in path)
                if not valid or first + len(path) >= count:
                    continue
                assert int(scores.index[row, node + 1]) == first + len(path)
                image = sequence.tokens[row, 1:].clone()
                image[first:] = 0
                image[first : first + len(path)] = draft.tokens[row, path]
                rows.append(row)
                nodes.append(node + 1)
                images.append(image)
        if rows:
            log_p = uncached_log_p(self.model, self.ids[rows], torch.stack(images), sequence.grid, sequence.sampling)
            at = scores.index[rows, nodes]
            expected = log_p[torch.arange(len(rows)), at].exp()
            assert (scores.p[rows, nodes] - expected).abs().max() < 1e-9
            self.compared += len(rows)
        return scores


def assert_cache(model: EmbeddedTarget, ids: Tensor, sequence: Sequence) -> int:
    """Keys, values and features of every final column equal those of one fresh forward. Returns how many were compared."""
    assert (sequence.cached <= sequence.length - 1).all()
    fresh = begin(model, ids, sequence.grid, sequence.sampling)
    fresh.tokens = sequence.tokens.clone()
    fresh.length = sequence.length.clamp(max=sequence.limit - 1)
    fresh.cached = torch.zeros_like(fresh.length)
    fresh._uneven = True
    fresh.refresh()
    with torch.inference_mode():
        model.features(fresh, Draft(torch.zeros(len(ids), 0, dtype=torch.long)))
    cache, other = sequence.cache, fresh.cache
    assert cache is not None and other is not None
    repeat = cache.rows // len(ids)
    prompts = torch.cat((ids, torch.zeros_like(ids))) if repeat == 2 else ids
    tokens = sequence.tokens[:, 1:].repeat(repeat, 1)
    with torch.inference_mode():
        features = model.teacher_features(prompts, tokens, sequence.grid)
    compared = 0
    for row, cached in enumerate(sequence.cached.repeat(repeat).tolist()):
        final = slice(sequence.prompt, sequence.prompt + cached)
        for mine, theirs in ((cache.keys, other.keys), (cache.values, other.values)):
            assert torch.allclose(mine[:, row, final], theirs[:, row, final], atol=1e-9, rtol=0)
        assert torch.allclose(cache.hidden[row, final], other.hidden[row, final], atol=1e-9, rtol=0)
        assert torch.allclose(cache.hidden[row, final], features[row, :cached], atol=1e-9, rtol=0)
        compared += cached
    return compared


def replay(
    ids: Tensor, tokens: Tensor, grid: tuple[int, int], sampling: Sampling, seeds: Tensor, judged: Tensor | None = None
) -> None:
    """Every token (where judged [B, N]) is the target's own draw given the tokens before it."""
    log_p = uncached_log_p(TARGET, ids, tokens, grid, sampling)
    index = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    drawn = draw(log_p, Noise(seeds).log_exponential(index, VOCABULARY, DRAW, dtype=log_p.dtype))
    assert ((drawn == tokens) | (~judged if judged is not None else drawn < 0)).all()


@dataclass
class Result:
    """A finished decoding with everything that was checked on the way."""

    tokens: Tensor
    traces: list[Trace]
    sequence: Sequence
    lengths: list[list[int]] = field(default_factory=list)
    pendings: list[int] = field(default_factory=list)
    columns: int = 0

    @property
    def verified(self) -> Tensor:
        """Where the target had a say: bool [B, N]."""
        return torch.stack([torch.tensor(trace.source).flatten() != UNVERIFIED for trace in self.traces])


def decode_checked(
    drafter: Drafter,
    verifier: Verifier,
    ids: Tensor = UNEQUAL,
    grid: tuple[int, int] = (3, 4),
    sampling: Sampling | None = None,
    seeds: Tensor | None = None,
    compare: bool = True,
) -> Result:
    """Decode with the tiny target; scores, cache and features are compared with fresh passes in every round."""
    chosen = sampling or Sampling()
    seeds = SEEDS[: len(ids)] if seeds is None else seeds
    sequence, recorder = begin(TARGET, ids, grid, chosen), Recorder()
    result = Result(torch.zeros(0), [], sequence)
    final = sequence.tokens.clone()
    settled = torch.zeros_like(sequence.cached)

    def check(now: Sequence, log: Recorder) -> bool:
        nonlocal final, settled
        column = torch.arange(now.limit)
        assert (now.cached >= settled).all()
        assert ((now.tokens == final) | (column >= settled[:, None])).all()  # columns below `cached` never change
        final, settled = now.tokens.clone(), now.cached.clone()
        result.lengths.append(now.length.tolist())
        result.pendings.append(now.pending)
        if compare:
            result.columns += assert_cache(TARGET, ids, now)
        return False

    target = Checked(TARGET, ids) if compare else TARGET
    result.tokens = decode(target, drafter, verifier, sequence, Noise(seeds), recorder, check)
    result.traces = recorder.traces(sequence, seeds, "", True)
    return result
