"""A target whose distribution is a table over every prefix, so that the law of its sequences can be enumerated.

Contexts are prefixes of 0 .. N - 1 tokens, numbered in order of length and then as base-V integers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from foredraft.decoding.loop import decode
from foredraft.decoding.noise import Noise
from foredraft.decoding.sampling import Sampling, apply_grammar
from foredraft.decoding.sequence import Sequence
from foredraft.decoding.trace import Recorder
from foredraft.decoding.types import Draft, Drafter, Scores, TargetModel, Verdict, Verifier, no_draft
from torch import Tensor

GRIDS = {1: (1, 1), 3: (3, 1), 4: (2, 2), 6: (2, 3)}
SAMPLES = 200_000
KEPT_NOISE = 5_000  # up to so many rows the scores say which columns they span, so that noise is kept between rounds


def contexts(vocabulary: int, length: int) -> int:
    """How many prefixes of 0 .. length - 1 tokens there are."""
    return sum(vocabulary**size for size in range(length))


def random_table(seed: int, length: int, vocabulary: int = 3, zeros: float = 0.0, sharp: float = 1.0) -> Tensor:
    """Rows of Dirichlet(1) probabilities, one per context: float64 [contexts, V].

    zeros: share of the entries that are exactly 0 (never a whole row); sharp > 1 makes the rows more peaked.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (contexts(vocabulary, length), vocabulary)
    mass = -torch.rand(shape, generator=generator, dtype=torch.float64).log()
    mass = mass.pow(sharp)
    if zeros:
        keep = torch.rand(shape, generator=generator) >= zeros
        keep.scatter_(1, torch.randint(vocabulary, (shape[0], 1), generator=generator), True)
        mass *= keep
    return mass / mass.sum(1, keepdim=True)


def sequence_law(table: Tensor, length: int) -> Tensor:
    """Probability of every sequence, numbered as a base-V integer: [V ** length]."""
    vocabulary, law, first = table.shape[1], torch.ones(1, dtype=torch.float64), 0
    for size in range(length):
        rows = table[first : first + vocabulary**size]
        law, first = (law[:, None] * rows).flatten(), first + vocabulary**size
    return law


class TabularTarget:
    """Scores drafts by looking their prefixes up. Needs no cache."""

    def __init__(self, table: Tensor, length: int):
        self.length, self.vocabulary = length, table.shape[1]
        past = table.new_full((1, table.shape[1]), 1.0 / table.shape[1])  # rows past the end may hold anything
        self.log_p = torch.cat((table, past)).log()
        self.first = torch.tensor([contexts(self.vocabulary, size) for size in range(length + 1)])
        self.calls = 0

    def score(self, sequence: Sequence, draft: Draft) -> Scores:
        """One lookup per node; shapes as `TargetModel` says."""
        self.calls += 1
        vocabulary, nodes = self.vocabulary, draft.nodes
        code = torch.zeros_like(sequence.length)
        for column in range(1, self.length + 1):
            code = torch.where(column < sequence.length, code * vocabulary + sequence.tokens[:, column], code)
        codes = code[:, None].repeat(1, nodes + 1)
        for node in range(nodes):
            parent = codes[:, node]
            if draft.tree is not None and len(draft.tree.parents) == 1:
                parent = codes[:, int(draft.tree.parents[0, node]) + 1]
            elif draft.tree is not None:
                parent = codes.gather(1, draft.tree.parents[:, node, None] + 1)[:, 0]
            codes[:, node + 1] = (parent * vocabulary + draft.tokens[:, node]).clamp_(max=vocabulary ** (self.length + 1))
        if draft.tree is None:
            depth = torch.arange(nodes + 1)[None]
        else:
            depth = torch.nn.functional.pad(draft.tree.depth, (1, 0))
        index = (sequence.length[:, None] - 1 + depth).clamp(max=self.length)
        place = torch.where(index < self.length, self.first[index] + codes, len(self.log_p) - 1)
        log_p = self.log_p[place]
        if sequence.forced is not None:
            log_p = apply_grammar(log_p, index, sequence.forced)
        if len(code) > KEPT_NOISE:
            return Scores(log_p, index)
        reach = nodes if draft.tree is None else draft.tree.levels
        span = (sequence.low - 1, sequence.high + reach)
        return Scores(log_p, index, span, contiguous=draft.tree is None and sequence.low == sequence.high)


def fresh_sequence(rows: int, length: int, forced: Tensor | None = None) -> Sequence:
    """An empty image of `length` tokens per row."""
    sequence = Sequence(
        tokens=torch.zeros(rows, length + 1, dtype=torch.long),
        length=torch.ones(rows, dtype=torch.long),
        cached=torch.zeros(rows, dtype=torch.long),
        cache=None,
        grid=GRIDS.get(length, (1, length)),
        sampling=Sampling(),
        forced=forced,
    )
    sequence.append_forced()
    sequence.refresh()
    return sequence


def seeds(rows: int, start: int = 0) -> Tensor:
    """Consecutive seeds: the hash must make them independent."""
    return torch.arange(start, start + rows)


class NoDraft:
    """Plain autoregressive decoding."""

    draft_forwards = 0

    def propose(self, sequence: Sequence, noise: Noise) -> Draft:
        """K = 0."""
        return no_draft(len(sequence.length), sequence.length.device)

    def observe(self, sequence: Sequence, draft: Draft, scores: Scores | None, verdict: Verdict, noise: Noise) -> None:
        """Nothing to learn."""


@dataclass
class Run:
    """A finished decoding."""

    tokens: Tensor
    sequence: Sequence
    recorder: Recorder


def run(
    target: TargetModel,
    drafter: Drafter,
    verifier: Verifier,
    rows: int | Tensor,
    length: int,
    forced: Tensor | None = None,
    on_round: Callable[[Sequence, Recorder], bool] | None = None,
) -> Run:
    """Decode `rows` images (or the images of the given seeds)."""
    chosen = seeds(rows) if isinstance(rows, int) else rows
    sequence = fresh_sequence(len(chosen), length, forced)
    recorder = Recorder()
    tokens = decode(target, drafter, verifier, sequence, Noise(chosen), recorder, on_round)
    return Run(tokens, sequence, recorder)


def count_sequences(tokens: Tensor, vocabulary: int) -> Tensor:
    """How often each sequence occurs: [V ** N]."""
    code = torch.zeros(len(tokens), dtype=torch.long)
    for column in tokens.T:
        code = code * vocabulary + column
    return torch.bincount(code, minlength=vocabulary ** tokens.shape[1])


@dataclass(frozen=True)
class Fit:
    """How far an empirical law lies from the exact one, and how far it may."""

    tv: float
    bound: float
    z: float

    @property
    def passes(self) -> bool:
        """METHODS.md, 'Distribution tests': TV below its bound and chi-square z below 5."""
        return self.tv < self.bound and self.z < 5.0

    def __str__(self) -> str:
        return f"TV {self.tv:.4f} (bound {self.bound:.4f}), z {self.z:.1f}"


def check_law(counts: Tensor, law: Tensor) -> Fit:
    """Compare counts [M] with the law [M]. Cells expected less than 10 times are pooled for chi-square."""
    total = float(counts.sum())
    observed = counts.double() / total
    tv = 0.5 * float((observed - law).abs().sum())
    spread = float((law * (1 - law)).clamp(min=0).sqrt().sum())
    bound = 0.5 * math.sqrt(2 / (math.pi * total)) * spread + 5 * 0.30 / math.sqrt(total)
    if bool((counts[law == 0] > 0).any()):
        return Fit(tv, bound, math.inf)
    large = law * total >= 10
    expected = torch.cat(((law * total)[large], (law * total)[~large].sum()[None]))
    seen = torch.cat((counts.double()[large], counts.double()[~large].sum()[None]))
    real = expected > 0
    chi = float(((seen - expected)[real].square() / expected[real]).sum())
    freedom = int(real.sum()) - 1
    return Fit(tv, bound, (chi - freedom) / math.sqrt(2 * max(1, freedom)))


def fit(tokens: Tensor, table: Tensor) -> Fit:
    """`check_law` of decoded tokens [B, N] against a table."""
    vocabulary = table.shape[1]
    return check_law(count_sequences(tokens, vocabulary), sequence_law(table, tokens.shape[1]))


def jacobi_law(table: Tensor, length: int, keep: Callable[[float, float], float], fresh: bool) -> Tensor:
    """The exact law of Jacobi decoding with W = N and random first drafts, by enumeration and apart from the engine.

    A slot left over from the last window keeps its token with probability keep(p_new, p_old); otherwise it is redrawn from p_new
    (fresh) or from norm((p_new - p_old)+). Returns [V ** length].
    """
    vocabulary = table.shape[1]
    rows = table.tolist()
    first = [contexts(vocabulary, size) for size in range(length + 1)]
    law = [0.0] * vocabulary**length

    def row(prefix: tuple[int, ...]) -> list[float]:
        code = 0
        for token in prefix:
            code = code * vocabulary + token
        return rows[first[len(prefix)] + code]

    def rest(p: list[float], q: list[float]) -> list[float]:
        mass = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
        total = sum(mass)
        return [m / total for m in mass] if total > 0 else p

    def advance(prefix: tuple[int, ...], drafts: tuple[int, ...], laws: list[list[float]], weight: float) -> None:
        if len(prefix) == length:
            law[sum(t * vocabulary ** (length - 1 - i) for i, t in enumerate(prefix))] += weight
            return
        p = [row(prefix + drafts[:k]) for k in range(len(drafts))]
        alive = weight
        for stop, x in enumerate(drafts):
            accept = min(1.0, p[stop][x] / laws[stop][x])
            refuse, alive = alive * (1 - accept), alive * accept
            if refuse > 0:
                tail = range(stop + 1, len(drafts))
                new = []
                for k in tail:
                    stay = keep(p[k][drafts[k]], laws[k][drafts[k]])
                    other = p[k] if fresh else rest(p[k], laws[k])
                    new.append([(1 - stay) * other[v] + stay * (v == drafts[k]) for v in range(vocabulary)])
                for y, chance in enumerate(rest(p[stop], laws[stop])):
                    for redrawn in itertools.product(range(vocabulary), repeat=len(new)):
                        step = refuse * chance * math.prod(n[v] for n, v in zip(new, redrawn, strict=True))
                        if step > 0:
                            advance(prefix + drafts[:stop] + (y,), redrawn, [p[k] for k in tail], step)
        if alive > 0:
            advance(prefix + drafts, (), [], alive)

    uniform = [[1 / vocabulary] * vocabulary] * length
    for drafts in itertools.product(range(vocabulary), repeat=length):
        advance((), drafts, uniform, vocabulary**-length)
    return torch.tensor(law, dtype=torch.float64)
