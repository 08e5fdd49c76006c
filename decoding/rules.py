"""Acceptance rules: pure functions on probability rows, no randomness inside.

A rule maps (p, q, x) to the probability f of keeping x and to the distribution G of the token that replaces it. The mass that is
kept is written min(q, w p) and never q * min(1, w p / q), which leaves spurious residual mass in float32. `depth` counts from 1:
the place in a chain, the depth in a tree. q None is the point mass at x. `cost` is what one test of a relaxed rule adds to the
total-variation bound (Cool-SD, Eq. 8): the sum of (q f - p)+.

Source: Leviathan et al. 2023 and Chen et al. 2023 (exact); Li et al. 2025, "Cool-SD" (weighted, Eq. 10-17); Jang et al. 2024,
"LANTERN", and Park et al. 2025, "LANTERN++" (pooled); So et al. 2025 (clustered, "GSD").
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .types import Rule, pick


def point_mass(x: Tensor, like: Tensor) -> Tensor:
    """One-hot rows [..., V] at x [...]."""
    return torch.zeros_like(like).scatter_(-1, x[..., None], 1.0)


def normalised(mass: Tensor, fallback: Tensor) -> Tensor:
    """mass [..., V] scaled to sum 1; rows without any mass become `fallback`."""
    total = mass.sum(-1, keepdim=True)
    return torch.where(total > 0, mass / total, fallback)


class Pointwise:
    """A rule whose f(x) depends on p(x) and q(x) alone: a verifier that knows these forms no whole distribution to test a token.

    Subclasses define `keep`, and no `accept` of their own.
    """

    def keep(self, p_x: Tensor, q_x: Tensor | None, depth: Tensor | int = 0) -> Tensor:
        """f [...] from p(x) and q(x) [...] (None = point mass)."""
        raise TypeError(f"{type(self).__name__} does not say what it keeps")

    def accept(self, p: Tensor, q: Tensor | None, x: Tensor, depth: Tensor | int = 0) -> Tensor:
        """f [...] from whole distributions."""
        return self.keep(pick(p, x), None if q is None else pick(q, x), depth)


def pointwise(rule: Rule) -> Pointwise | None:
    """The rule, if it is pointwise throughout."""
    return rule if isinstance(rule, Pointwise) and type(rule).accept is Pointwise.accept else None


class Exact(Pointwise):
    """f = min(1, p / q), G = norm((p - q)+): the output distribution is the target's."""

    exact = True

    def keep(self, p_x: Tensor, q_x: Tensor | None, depth: Tensor | int = 0) -> Tensor:
        """f [...]; zero where p(x) = 0 or q(x) = 0, so a forbidden token is never committed."""
        return p_x if q_x is None else torch.where(q_x > 0, p_x / q_x, 0.0).clamp_(max=1.0)

    def residual(self, p: Tensor, q: Tensor | None, x: Tensor, depth: Tensor | int = 0) -> Tensor:
        """G [..., V]; p itself where nothing is left."""
        if q is None:
            return normalised(p.scatter(-1, x[..., None], 0.0), p)
        return normalised((p - q).clamp_(min=0.0), p)


SCHEDULES = ("exponential", "linear")
LINEAR = 8


def annealed_weights(
    length: int, delta: float = 1.1, nu: float = 0.7, schedule: str = "exponential", clamp: bool = True
) -> tuple[float, ...]:
    """Cool-SD's weights w_1 .. w_L, which fall with the depth and average delta.

    exponential: proportional to exp(-nu i) (Eq. 16); linear: to 8 - i (Eq. 17), for L < 8 only. clamp: none below 1. A weight
    below 1 keeps the law of a round exact and merely shortens it, so max(w, 1) is the same law of one round, sooner.
    """
    if schedule == "linear":
        if length >= LINEAR:
            raise ValueError(f"the linear schedule ends at depth {LINEAR - 1}: draft_length must be below {LINEAR}, got {length}")
        shape = [float(LINEAR - depth) for depth in range(1, length + 1)]
    elif schedule == "exponential":
        shape = [math.exp(-nu * depth) for depth in range(length)]
    else:
        raise ValueError(f"unknown schedule {schedule!r}; choose one of {', '.join(SCHEDULES)}")
    total = sum(shape)
    weights = [delta * (length * each / total) for each in shape]
    return tuple(max(each, 1.0) for each in weights) if clamp else tuple(weights)


class Weighted(Pointwise):
    """f = min(1, w p / q), w by depth, and G = norm((p - q f)+) (Eq. 10 and 12): UniformRSD and Cool-SD.

    Where w < 1 the residual is not the exact rule's: G holds what q f leaves of p, and such a test is exact.

    weights: w_1 .. w_L, each above 0; deeper tokens take w_L.
    """

    def __init__(self, weights: Sequence[float]):
        if not weights or not all(0 < weight < math.inf for weight in weights):
            raise ValueError(f"weights must be positive numbers, at least one, got {list(weights)}")
        self.weights = tuple(float(weight) for weight in weights)
        self.exact = max(self.weights) <= 1.0
        self._table: Tensor | None = None

    def weight(self, depth: Tensor | int, like: Tensor) -> Tensor | float:
        """w of each depth, in the precision of `like`."""
        last = len(self.weights)
        if isinstance(depth, int):
            return self.weights[min(max(depth, 1), last) - 1]
        if self._table is None or self._table.dtype != like.dtype or self._table.device != like.device:
            self._table = torch.tensor(self.weights, dtype=like.dtype, device=like.device)
        return self._table[depth.clamp(1, last) - 1]

    def keep(self, p_x: Tensor, q_x: Tensor | None, depth: Tensor | int = 1) -> Tensor:
        """f [...]; zero where p(x) = 0 or q(x) = 0. depth broadcasts with x."""
        mass = self.weight(depth, p_x) * p_x
        if q_x is None:
            return mass.clamp_(max=1.0)
        return torch.where(q_x > 0, mass / q_x, 0.0).clamp_(max=1.0)

    def residual(self, p: Tensor, q: Tensor | None, x: Tensor, depth: Tensor | int = 1) -> Tensor:
        """G [..., V]; p itself where nothing is left."""
        if q is None:
            p_x = pick(p, x)
            left = p_x - (self.weight(depth, p) * p_x).clamp_(max=1.0)
            return normalised(p.scatter(-1, x[..., None], left.clamp_(min=0.0)[..., None]), p)
        return normalised((p - self._kept(p, q, depth)).clamp_(min=0.0), p)

    def cost(self, p: Tensor, q: Tensor | None, x: Tensor, depth: Tensor | int = 1) -> Tensor:
        """What one test adds to the total-variation bound: sum (q f - p)+ [...]."""
        if q is None:
            p_x = pick(p, x)
            return ((self.weight(depth, p) * p_x).clamp_(max=1.0) - p_x).clamp_(min=0.0)
        return (self._kept(p, q, depth) - p).clamp_(min=0.0).sum(-1)

    def _kept(self, p: Tensor, q: Tensor, depth: Tensor | int) -> Tensor:
        """q f for every code: [..., V]."""
        weight = self.weight(depth, p)
        return torch.minimum(q, (weight if isinstance(weight, float) else weight[..., None]) * p)


RESAMPLES = ("optimal", "paper")
LARGE = 8192


class Pooled:
    """f = min(1, sum_A p / q): x is kept by the probability of the codes that look like it. LANTERN and LANTERN++.

    A(x) holds x and the longest prefix of its nearest codes whose summed p, without x, stays strictly below `tvd` (LANTERN) or
    below lam * p(x) (LANTERN++). A code the target gives no probability may be kept if codes near it have some, as published;
    where the grammar forces a token no other is.

    near: the k nearest codes of each, nearest first, integer [V, k] (see `models/neighbours.py`). tvd, lam: one of them.
    resample: the law of the token after a rejected x. "optimal": norm((p - q f)+), which is norm((p - q)+) because f is never
    below the exact rule's (Cool-SD, Prop. 1). "paper": norm((p' - q)+), p' being p with the mass of A(x) moved onto x.
    """

    def __init__(self, near: Tensor, tvd: float | None = None, lam: float | None = None, resample: str = "optimal"):
        if (tvd is None) == (lam is None):
            raise ValueError("a pooled rule needs either tvd (LANTERN) or lam (LANTERN++)")
        if resample not in RESAMPLES:
            raise ValueError(f"unknown resample {resample!r}; choose one of {', '.join(RESAMPLES)}")
        self.near, self.tvd, self.lam, self.resample = near, tvd, lam, resample
        self.exact = (tvd or lam or 0.0) <= 0.0

    def accept(self, p: Tensor, q: Tensor | None, x: Tensor, depth: Tensor | int = 1) -> Tensor:
        """f [...]; zero where q(x) = 0."""
        mass = self.pooled(p, x)
        if q is None:
            return mass.clamp_(max=1.0)
        q_x = pick(q, x)
        return torch.where(q_x > 0, mass / q_x, 0.0).clamp_(max=1.0)

    def residual(self, p: Tensor, q: Tensor | None, x: Tensor, depth: Tensor | int = 1) -> Tensor:
        """The law of the token that replaces x [..., V]; p itself where nothing is left."""
        moved = p
        if self.resample == "paper":
            codes, values, member = self._near(p, x)
            moved = p.scatter(-1, codes, values.masked_fill(member, 0.0))
            moved.scatter_(-1, x[..., None], (pick(p, x) + (values * member).sum(-1))[..., None])
        if q is None:
            return normalised(moved.scatter(-1, x[..., None], 0.0), p)
        return normalised((moved - q).clamp_(min=0.0), p)

    def cost(self, p: Tensor, q: Tensor | None, x: Tensor, depth: Tensor | int = 1) -> Tensor:
        """What one test adds to the total-variation bound: sum (q f - p)+ [...].

        A table of more than `LARGE` entries is asked for the drafted x alone: (f - p / q)+ is that sum on average over x from q.
        """
        p_x = pick(p, x)
        if q is None:
            return (self.pooled(p, x).clamp_(max=1.0) - p_x).clamp_(min=0.0)
        if self.near.numel() > LARGE:
            q_x = pick(q, x)
            ratio = torch.where(q_x > 0, p_x / q_x, 1.0)
            return (self.accept(p, q, x) - ratio).clamp_(min=0.0)
        values = p[..., self.near.long()]
        mass = p + (values * self._member(values, p)).sum(-1)
        return (torch.minimum(q, mass) - p).clamp_(min=0.0).sum(-1)

    def pooled(self, p: Tensor, x: Tensor) -> Tensor:
        """Probability of A(x): [...]."""
        _, values, member = self._near(p, x)
        return pick(p, x) + (values * member).sum(-1)

    def _near(self, p: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The codes nearest to x, their probabilities, and whether each is in A(x): [..., k] each."""
        codes = self.near[x].long()
        values = p.gather(-1, codes)
        return codes, values, self._member(values, pick(p, x))

    def _member(self, values: Tensor, own: Tensor) -> Tensor:
        """Whether each neighbour is in A(x): probabilities of the neighbours [..., k] and of x [...] -> [..., k]."""
        if self.tvd is not None:
            return values.cumsum(-1) < self.tvd
        return values.cumsum(-1) < (self.lam or 0.0) * own[..., None]


class Clustered:
    """f = min(1, sum_C p / sum_C q) over a cluster C(x) of look-alike codes, G = norm((p - q f)+). Relaxed.

    C(x) holds x and those of the `reach` codes above and below it in the order of the target's probabilities whose probability
    differs by less than `gap` and whose squared embedding distance is below `radius`.

    codebook: [V, D]; it is scaled so that the mean distance to the nearest other code is 1.
    """

    exact = False

    def __init__(self, codebook: Tensor, reach: int = 7, gap: float = 0.15, radius: float = 0.5):
        distance = torch.cdist(codebook.double(), codebook.double())
        nearest = distance.clone().fill_diagonal_(torch.inf).min(1).values
        positive = nearest[nearest > 0]
        scale = positive.mean() if len(positive) else distance.new_ones(())
        self.near = (distance / scale).square() < radius
        self.reach, self.gap = reach, gap

    def clusters(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """For every code, the codes around it in rank order and whether they belong to its cluster: [..., V, 2 reach + 1]."""
        vocabulary = p.shape[-1]
        order = p.argsort(dim=-1, descending=True, stable=True)
        rank = torch.empty_like(order).scatter_(-1, order, torch.arange(vocabulary, device=p.device).expand_as(order))
        around = rank[..., None] + torch.arange(-self.reach, self.reach + 1, device=p.device)
        inside = (around >= 0) & (around < vocabulary)
        codes = order.gather(-1, around.clamp(0, vocabulary - 1).flatten(-2)).view(around.shape)
        values = p.gather(-1, codes.flatten(-2)).view(codes.shape)
        own = torch.arange(vocabulary, device=p.device)
        member = inside & ((values - p[..., None]).abs() < self.gap) & self.near[own[:, None], codes]
        return codes, member | (codes == own[:, None]) & inside

    def kept(self, p: Tensor, q: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
        """(f for every code, q f for every code): [..., V] each. q None = point mass at x."""
        law = point_mass(x, p) if q is None else q
        codes, member = self.clusters(p)
        pooled_p = (p.gather(-1, codes.flatten(-2)).view(codes.shape) * member).sum(-1)
        pooled_q = (law.gather(-1, codes.flatten(-2)).view(codes.shape) * member).sum(-1)
        possible = (pooled_q > 0) & (p > 0)
        ratio = torch.where(possible, pooled_p / pooled_q, 0.0).clamp_(max=1.0)
        # q f as min(q, pooled p times q's share of its cluster): exactly min(q, p) where a cluster holds one code.
        share = torch.where(possible, law / pooled_q, 0.0)
        return ratio, torch.where(possible, torch.minimum(law, pooled_p * share), 0.0)

    def accept(self, p: Tensor, q: Tensor | None, x: Tensor, depth: Tensor | int = 0) -> Tensor:
        """f [...]; zero where p(x) = 0 or q(x) = 0."""
        ratio, _ = self.kept(p, q, x)
        possible = pick(p, x) > 0
        if q is not None:
            possible &= pick(q, x) > 0
        return pick(ratio, x) * possible

    def residual(self, p: Tensor, q: Tensor | None, x: Tensor, depth: Tensor | int = 0) -> Tensor:
        """G [..., V]; p itself where nothing is left."""
        _, mass = self.kept(p, q, x)
        return normalised((p - mass).clamp_(min=0.0), p)

    def cost(self, p: Tensor, q: Tensor | None, x: Tensor, depth: Tensor | int = 0) -> Tensor:
        """What one test adds to the total-variation bound: sum (q f - p)+ [...]."""
        _, mass = self.kept(p, q, x)
        return (mass - p).clamp_(min=0.0).sum(-1)
