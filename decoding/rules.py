"""Acceptance rules: pure functions on probability rows, no randomness inside.

A rule maps (p, q, x) to the probability f of keeping x and to the distribution G of the token that replaces it. The mass that is
kept is written min(q, w p) and never q * min(1, w p / q), which leaves spurious residual mass in float32.

Source: Leviathan et al. 2023 and Chen et al. 2023 (exact); So et al. 2025 (clustered, "GSD").
"""

from __future__ import annotations

import torch
from torch import Tensor

from .types import Rule, pick


def point_mass(x: Tensor, like: Tensor) -> Tensor:
    """One-hot rows [..., V] at x [...]."""
    return torch.zeros_like(like).scatter_(-1, x[..., None], 1.0)


def normalised(mass: Tensor, fallback: Tensor) -> Tensor:
    """mass [..., V] scaled to sum 1; rows without any mass become `fallback`."""
    total = mass.sum(-1, keepdim=True)
    empty = total <= 0
    return torch.where(empty, fallback, mass / total.masked_fill(empty, 1.0))


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

    def cost(self, p: Tensor, q: Tensor | None, x: Tensor) -> Tensor:
        """What one test adds to the total-variation bound: sum (q f - p)+ [...]."""
        _, mass = self.kept(p, q, x)
        return (mass - p).clamp_(min=0.0).sum(-1)
