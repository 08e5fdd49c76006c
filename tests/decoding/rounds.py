"""Decoding with a draft chain, enumerated: laws, expected lengths and bounds of any rule, apart from the verifiers.

Tables are those of tabular.py: one row per prefix. A state is (tokens so far, depth in the round); its weights are [V ** tokens].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from foredraft.decoding.types import Rule
from torch import Tensor

from .tabular import contexts, sequence_law


@dataclass
class Step:
    """One test at every prefix [M]. kept [M, V] = q f; moved [M, V]: mass that the residuals put on each token."""

    kept: Tensor
    moved: Tensor

    def bound(self, p: Tensor) -> Tensor:
        """The step's term of Eq. 8: [M]."""
        return 0.5 * (self.kept + self.moved - p).abs().sum(-1)


def step(rule: Rule, p: Tensor, q: Tensor, depth: int) -> Step:
    """Every x of every row, through the rule's own functions."""
    rows, vocabulary = p.shape
    x = torch.arange(vocabulary).expand(rows, -1)
    wide_p, wide_q = (law[:, None].expand(-1, vocabulary, -1) for law in (p, q))
    keep = rule.accept(wide_p, wide_q, x, depth)
    residual = rule.residual(wide_p, wide_q, x, depth)
    return Step(q * keep, ((q * (1 - keep))[..., None] * residual).sum(1))


def rows_of(table: Tensor, tokens: int) -> Tensor:
    """Rows of all prefixes of `tokens` tokens: [V ** tokens, V]."""
    vocabulary = table.shape[1]
    first = contexts(vocabulary, tokens)
    return table[first : first + vocabulary**tokens]


@dataclass
class Enumerated:
    """law [V ** N]; expected: E[tau + 1] of the first round; cost: what `rule.cost` adds up to on average; bound: Eq. 8 added up
    likewise (of the first round where it is continued by the target); stops: P(tau = i) of the first round."""

    law: Tensor
    expected: float
    cost: float
    bound: float
    stops: list[float]


def enumerate_chain(table: Tensor, other: Tensor, length: int, drafts: int, rule: Rule, rounds: bool = True) -> Enumerated:
    """Chains of `drafts` tokens from `other`, judged by the rule, until `length` tokens are there.

    rounds False: one round, continued by the target, as in Theorem 2.
    """
    one = torch.ones(1, dtype=table.dtype)
    states: dict[int, Tensor] = {0: one}  # depth in the round -> weights; -1: the target goes on alone
    expected, cost, bound, first = 1.0, 0.0, 0.0, True
    alive, stops = one, []
    for tokens in range(length):
        p, q = rows_of(table, tokens), rows_of(other, tokens)
        following: dict[int, Tensor] = {}

        def add(depth: int, weights: Tensor, into: dict[int, Tensor] = following) -> None:
            into[depth] = into.get(depth, 0.0) + weights.flatten()

        for depth, weights in states.items():
            after = 0 if rounds else -1
            if depth in (-1, drafts):
                add(after, weights[:, None] * p)
                continue
            tested = step(rule, p, q, depth + 1)
            add(depth + 1, weights[:, None] * tested.kept)
            add(after, weights[:, None] * tested.moved)
            bound += float((weights * tested.bound(p)).sum())
            if hasattr(rule, "cost"):
                x = torch.zeros(len(p), dtype=torch.long)
                cost += float((weights * rule.cost(p, q, x, depth + 1)).sum())
        if first:
            first = tokens + 1 < drafts
            if tokens < drafts:
                tested = step(rule, p, q, tokens + 1)
                stops.append(float((alive * (q - tested.kept).sum(-1)).sum()))
                alive = (alive[:, None] * tested.kept).flatten()
                expected += float(alive.sum())
        states = following
    stops.append(float(alive.sum()))
    return Enumerated(sum(states.values()), expected, cost, bound, stops)


def distance(law: Tensor, table: Tensor, length: int) -> float:
    """TV of a law over sequences from the table's."""
    return 0.5 * float((law - sequence_law(table, length)).abs().sum())
