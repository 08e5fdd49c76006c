"""Verifiers flip the coins, once for every rule.

`Match` draws the target's own token at every node and follows the child that equals it (seeded decoding). `Prefix` tests a chain
from left to right. `Walk` tests the children of a tree's current node in order, replacing p by its residual after each rejection.

Source: Leviathan et al. 2023 (chain); Miao et al. 2024 and Chen et al. 2024 (trees, siblings without replacement); Wiggers and
Hoogeboom 2020 (the shared noise of `Match`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from .noise import COIN, DRAW, RECOVER, Noise
from .rules import pointwise
from .sampling import draw_with_margin, inverse_cdf, rows_at
from .tree import Tree
from .types import BONUS, DRAWN, UNVERIFIED, Draft, Rule, Scores, Verdict, row


class _Costly(Protocol):
    def cost(self, p: Tensor, q: Tensor | None, x: Tensor, depth: Tensor | int) -> Tensor: ...


def draw_stop(law: Tensor, scores: Scores, index: Tensor, noise: Noise) -> Tensor:
    """The recovered or bonus token of each row, from its own stream (never the draft's): law [B, V], index [B] -> [B]."""
    return inverse_cdf(law.double(), scores.uniform(noise, index[:, None], RECOVER, dtype=torch.float64)[:, 0])


def _valid(draft: Draft) -> Tensor:
    return torch.ones_like(draft.tokens, dtype=torch.bool) if draft.valid is None else draft.valid


def _finish(tokens: Tensor, last: Tensor, accepted: Tensor) -> Tensor:
    """Accepted tokens [B, D] followed by the last one: [B, D + 1]."""
    wide = torch.cat((tokens, last[:, None]), 1)
    return wide.scatter(1, accepted[:, None], last[:, None])


class Match:
    """Seeded verification: keep a draft iff it equals the target's own draw from the position's noise.

    The output is plain autoregressive decoding's, token for token. `stream` and `salt` choose the noise; with a stream no drafter
    looks at, this is an exact verifier for any deterministic draft.
    """

    exact = True

    def __init__(self, stream: int = DRAW, salt: int = 0):
        self.stream, self.salt = stream, salt

    def __call__(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        """See `Verifier`."""
        log_p = scores.log_p
        rows, nodes = draft.tokens.shape
        if (self.stream, self.salt) == (DRAW, 0):
            log_e = scores.noise(noise)
        else:
            log_e = noise.log_exponential(scores.index, log_p.shape[-1], self.stream, self.salt, log_p.dtype)
        drawn, gap = draw_with_margin(log_p, log_e)
        if nodes == 0:
            one = torch.ones_like(drawn[:, 0])
            zero = torch.zeros_like(one)
            return Verdict(drawn, one, None, zero, zero, zero, one * DRAWN, drawn=drawn, margin=gap)
        if draft.tree is None:
            agree = drawn[:, :nodes] == draft.tokens
            if draft.trust is not None:
                agree |= draft.trust
            if draft.valid is not None:
                agree &= draft.valid
            accepted = agree.cumprod(1).sum(1)
            stop, path = accepted, None
            limit: Tensor | int = nodes if draft.valid is None else draft.valid.sum(1)
            rejected, margin = accepted < limit, gap
            judged = accepted + rejected
            # Accepted tokens are the target's own draws, so the draws are what is committed (trusted ones excepted).
            tokens = drawn
            if draft.trust is not None:
                tokens = _finish(draft.tokens, drawn.gather(1, stop[:, None])[:, 0], accepted)
        else:
            tree = draft.tree
            parent = (tree.parents + 1).expand(rows, -1)
            agree = (drawn.gather(1, parent) == draft.tokens) & _valid(draft)
            if draft.trust is not None:
                agree |= draft.trust & _valid(draft)
            _, accepted, stop, path, rejected = _descend(draft, tree, agree)
            judged = accepted + rejected
            last = drawn.gather(1, stop[:, None])[:, 0]
            tokens = _finish(draft.tokens.gather(1, path.clamp(min=0)), last, accepted)
            margin = gap.gather(1, torch.nn.functional.pad(path.clamp(min=-1) + 1, (1, 0)))
        trusted = _trusted(draft, path, accepted)
        if trusted is not None:
            judged = judged - trusted
        source = BONUS - rejected.long()
        return Verdict(tokens, accepted + 1, path, accepted, judged, stop, source, drawn, margin, trusted=trusted)


def _descend(draft: Draft, tree: Tree, kept: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Where kept nodes lead from the root, if kept [B, K] is true of one sibling at most.

    Returns reached [B, K]: nodes kept with all their ancestors; how many [B]; the row [B] of Scores at the last of them; path
    [B, levels]: these in order of depth, -1 beyond; whether the last has valid children, none of which was kept [B].
    """
    reached = ~(tree.seen & ~kept[:, None]).any(-1)
    depth = torch.where(reached, tree.depth, 0)
    accepted, end = depth.max(1)
    stop = torch.where(accepted > 0, end + 1, 0)
    path = torch.full((len(kept), tree.levels + 1), -1, dtype=torch.long, device=kept.device)
    place = torch.arange(kept.shape[1], device=kept.device).expand_as(depth)
    path.scatter_(1, torch.where(reached, depth - 1, tree.levels), place)
    refused = tree.parents + 1 == stop[:, None]
    if draft.valid is not None:
        refused &= draft.valid
    return reached, accepted, stop, path[:, :-1], refused.any(1)


def _trusted(draft: Draft, path: Tensor | None, accepted: Tensor) -> Tensor | None:
    """How many of the accepted nodes were kept without a test: [B], or None if every node is tested."""
    if draft.trust is None:
        return None
    if path is None:
        inside = torch.arange(draft.nodes, device=accepted.device) < accepted[:, None]
        return (draft.trust & inside).sum(1)
    return (draft.trust.gather(1, path.clamp(min=0)) & (path >= 0)).sum(1)


class Prefix:
    """Test a chain from left to right; the first rejection ends it and is replaced by a draw from the rule's residual."""

    def __init__(self, rule: Rule):
        self.rule, self.exact = rule, rule.exact
        self._pointwise = pointwise(rule)

    def __call__(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        """See `Verifier`."""
        if draft.tree is not None:
            raise ValueError("Prefix tests chains; use Walk for a draft tree")
        nodes = draft.nodes
        cost = trusted = None
        if nodes == 0:
            accepted = judged = torch.zeros_like(scores.index[:, 0])
            law, source = scores.p[:, 0], torch.full_like(accepted, DRAWN)
            expected = torch.ones_like(law[:, 0])
        else:
            depth = torch.arange(1, nodes + 1, device=draft.tokens.device)
            if self._pointwise is not None:
                keep = self._pointwise.keep(scores.likelihood(draft.tokens), draft.likelihood(), depth)
            else:
                keep = self.rule.accept(scores.p[:, :nodes], draft.q, draft.tokens, depth)
            kept = scores.uniform(noise, scores.index[:, :nodes], COIN, dtype=keep.dtype) < keep
            if draft.trust is not None:
                kept |= draft.trust
                keep = keep.masked_fill(draft.trust, 1.0)
            if draft.valid is not None:
                kept &= draft.valid
                keep = keep * draft.valid
            accepted = kept.cumprod(1).sum(1)
            expected = keep.cumprod(1).sum(1) + 1.0
            limit: Tensor | int = nodes if draft.valid is None else draft.valid.sum(1)
            rejected = accepted < limit
            judged = accepted + rejected
            trusted = _trusted(draft, None, accepted)
            if trusted is not None:
                judged = judged - trusted
            p_stop, at = scores.law(accepted), accepted.clamp(max=nodes - 1)
            residual = self.rule.residual(p_stop, draft.law(at), draft.tokens.gather(1, at[:, None])[:, 0], at + 1)
            law, source = torch.where(rejected[:, None], residual, p_stop), BONUS - rejected.long()
            cost = None if self.rule.exact else self._cost(draft, scores.p, judged)
        last = draw_stop(law, scores, scores.index.gather(1, accepted[:, None])[:, 0], noise)
        tokens = _finish(draft.tokens, last, accepted)
        return Verdict(
            tokens, accepted + 1, None, accepted, judged, accepted, source, cost=cost, expected=expected, trusted=trusted
        )

    def _cost(self, draft: Draft, p: Tensor, judged: Tensor) -> Tensor:
        """Sum of a relaxed rule's cost over the judged [B] tokens, which follow the trusted ones: [B]."""
        rule: _Costly = self.rule  # type: ignore[assignment]
        depth = torch.arange(1, draft.nodes + 1, device=p.device)
        cost = rule.cost(p[:, : draft.nodes], draft.q, draft.tokens, depth)
        order = depth.expand_as(draft.tokens)
        if draft.trust is not None:
            order = torch.where(draft.trust, draft.nodes + 1, (~draft.trust).cumsum(1))
        return (cost * (order <= judged[:, None])).sum(1)


class Walk:
    """Descend a tree: test the current node's children in order, each against what the earlier siblings have left of p."""

    def __init__(self, rule: Rule):
        self.rule, self.exact, self.chain = rule, rule.exact, Prefix(rule)

    def __call__(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        """See `Verifier`.

        What a test needs does not depend on how the tests before it end, so all nodes [B, F, C] are tested at once: C siblings
        in each of F families. Only the tests on the way down count.
        """
        if draft.tree is None:
            return self.chain(draft, scores, noise)
        tree, (rows, nodes) = draft.tree, draft.tokens.shape
        families, q = tree.families, draft.q
        at, there, shape = families.at.expand(rows, -1), families.exist, (rows, *families.kids.shape[1:])
        flat = families.nodes.flatten(1).expand(rows, -1)
        if draft.valid is not None:
            there = there & draft.valid.gather(1, flat).view(shape)
        x, index = draft.tokens.gather(1, flat).view(shape), scores.index.gather(1, at)
        if q is not None:
            q = rows_at(q, flat).view(*shape, -1)
        depth = families.depth
        laws = [rows_at(scores.log_p, at).exp()]
        for sibling in range(shape[2]):
            left = self.rule.residual(laws[-1], None if q is None else q[:, :, sibling], x[:, :, sibling], depth)
            laws.append(torch.where(there[:, :, sibling, None], left, laws[-1]))
        law = torch.stack(laws[:-1], 2)
        keep = self.rule.accept(law, q, x, depth[..., None])
        coins = [scores.uniform(noise, index, COIN, sibling, keep.dtype) for sibling in range(shape[2])]
        taken = torch.stack(coins, 2) < keep
        if draft.trust is not None:
            trust = draft.trust.gather(1, flat).view(shape)
            taken, keep = taken | trust, keep.masked_fill(trust, 1.0)
        taken = taken & there
        early = taken.cumsum(2) == taken  # up to the first sibling that is taken, that one included
        kept = torch.zeros(rows, nodes + 1, dtype=torch.bool, device=at.device)
        kept.scatter_(1, torch.where(taken & early, families.kids, nodes).flatten(1), True)
        reached, accepted, stop, path, rejected = _descend(draft, tree, kept[:, :-1])
        visited = torch.nn.functional.pad(reached, (1, 0), value=True).gather(1, at)
        tested = there & early & visited[..., None]
        # Tokens kept so far less the chances they were given is a martingale, so the chances add up to what to expect.
        expected = torch.where(tested, keep, 0.0).flatten(1).sum(1) + 1.0
        if draft.trust is not None:
            tested = tested & ~trust
        cost = None if self.rule.exact else self._cost(law, q, x, depth, tested)
        here = at == stop[:, None]
        residual = row(laws[-1], here.byte().argmax(1))
        final = torch.where(rejected[:, None], residual, scores.law(stop))
        last = draw_stop(final, scores, scores.index.gather(1, stop[:, None])[:, 0], noise)
        tokens = _finish(draft.tokens.gather(1, path.clamp(min=0)), last, accepted)
        judged, trusted = tested.flatten(1).sum(1), _trusted(draft, path, accepted)
        source = BONUS - rejected.long()
        return Verdict(tokens, accepted + 1, path, accepted, judged, stop, source, cost=cost, expected=expected, trusted=trusted)

    def _cost(self, law: Tensor, q: Tensor | None, x: Tensor, depth: Tensor, tested: Tensor) -> Tensor:
        """Sum of a relaxed rule's cost over the tested [B, F, C] nodes: [B]."""
        rule: _Costly = self.rule  # type: ignore[assignment]
        here = tested.nonzero(as_tuple=True)
        depth = depth.expand(len(tested), -1)[here[:2]]
        cost = law.new_zeros(tested.shape)
        cost[here] = rule.cost(law[here], None if q is None else q[here], x[here], depth)
        return cost.flatten(1).sum(1)


def unverified(draft: Draft) -> Verdict:
    """Commit every valid node, in order and without the target (a skipped verification)."""
    valid = _valid(draft)
    count = valid.sum(1)
    zero = torch.zeros_like(count)
    source = torch.full_like(count, UNVERIFIED)
    scored = torch.zeros_like(valid[:, :0].any(1))
    return Verdict(draft.tokens, count, None, zero, zero, zero, source, expected=count.double(), scored=scored)


def merge(checked: Tensor, verdict: Verdict, draft: Draft) -> Verdict:
    """The verdict where checked [B], an unverified commit elsewhere. An unverified row's valid nodes are its first ones, and no
    more of them than the tree is deep."""
    skipped = unverified(draft)
    width = verdict.tokens.shape[1]
    tokens = torch.nn.functional.pad(skipped.tokens, (0, max(0, width - draft.nodes)))[:, :width]
    count = torch.where(checked, verdict.count, skipped.count.clamp(max=width))
    return replace(
        verdict,
        tokens=torch.where(checked[:, None], verdict.tokens, tokens),
        count=count,
        accepted=torch.where(checked, verdict.accepted, 0),
        judged=torch.where(checked, verdict.judged, 0),
        source=torch.where(checked, verdict.source, UNVERIFIED),
        cost=None if verdict.cost is None else torch.where(checked, verdict.cost, 0.0),
        expected=None if verdict.expected is None else torch.where(checked, verdict.expected, count),
        scored=checked,
    )
