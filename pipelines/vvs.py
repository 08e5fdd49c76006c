"""VVS: in some rounds a path of the draft tree is committed unverified; the next round's forward fills in what is missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..decoding.drafters.head import HeadDrafter
from ..decoding.noise import SKIP, Noise
from ..decoding.rules import RESAMPLES, annealed_weights
from ..decoding.sequence import Sequence
from ..decoding.tree import Tree
from ..decoding.types import Draft, Scores, Verdict
from ..decoding.verify import Walk
from ..models.neighbours import METRICS
from .base import Method, Run
from .cool_sd import CoolSDPipeline
from .drafting import draft_nodes, head_drafter
from .options import MethodConfig, option

LANTERN = {"rule": ("lantern", "lantern++")}
SKIPS = {"schedule": ("dynamic", "uniform")}
DYNAMIC = {"schedule": ("dynamic",)}


@dataclass(frozen=True)
class VVSConfig(MethodConfig):
    """Knobs of partial verification skipping, on dynamic trees (EAGLE-2) and a rule (LANTERN)."""

    name: ClassVar[str] = "vvs"
    title: ClassVar[str] = "Partial verification skipping (VVS)"
    paper: ClassVar[str] = "Dong et al. 2025 (VVS); Jang et al. 2024 (LANTERN); Li et al. 2024 (EAGLE-2)"

    rule: str = option(
        "lantern",
        "of the verified rounds; lantern and lantern++: look-alike codes count together; annealed: Cool-SD, relaxed at first and "
        "strict later in a draft; exact: keeps the target's distribution if nothing is skipped",
        choices=("lantern", "lantern++", "exact", "annealed"),
    )
    tvd: float = option(
        0.1,
        "LANTERN: probability of look-alike codes that may count with a token; more is faster and less faithful",
        low=0.0,
        high=1.0,
        step=0.05,
        visible_if={"rule": ("lantern",)},
    )
    k: int = option(10, "how many nearest codes may count with a token (LANTERN: 1000)", low=1, high=4096, visible_if=LANTERN)
    schedule: str = option(
        "dynamic",
        "which verifications are skipped: dynamic: where the drafted paths look alike; uniform: every interval-th round; "
        "never: none (EAGLE-2 with the rule)",
        choices=("dynamic", "uniform", "never"),
    )
    interval: int = option(
        3,
        "uniform: one round in this many is skipped; less is faster and less faithful",
        low=2,
        high=10_000,
        visible_if={"schedule": ("uniform",)},
    )
    threshold: float = option(
        0.7,
        "dynamic: skip where the similarity of the drafted paths reaches this; less is faster and less faithful",
        low=-1.0,
        high=1.0,
        step=0.05,
        visible_if=DYNAMIC,
    )
    alpha: float = option(
        0.5,
        "dynamic: weight of each depth of the paths against the one before it",
        low=0.0,
        high=1.0,
        step=0.05,
        visible_if=DYNAMIC,
    )
    stride: int = option(2, "dynamic: every so-many-th path is compared", low=1, high=16, visible_if=DYNAMIC)
    selection: str = option(
        "uniform",
        "the path that is committed unverified: uniform: any, by chance; confidence: the draft's surest, which shows",
        choices=("uniform", "confidence"),
        visible_if=SKIPS,
    )
    truncate: bool = option(
        True, "commit no more of the path than the paths' mean length; off is faster and less faithful", visible_if=SKIPS
    )
    draft_length: int = option(4, "depth of the draft tree", low=1, high=32)
    total_nodes: int = option(10, "nodes drafted in a tree", low=1, high=128)
    branching: int = option(3, "children tried at each node while the tree grows", low=1, high=16)
    lam: float = option(
        2.0,
        "LANTERN++: look-alike codes may count up to this many times the token's own probability; more is faster, less faithful",
        low=0.0,
        high=20.0,
        step=0.5,
        visible_if={"rule": ("lantern++",)},
    )
    delta: float = option(
        1.1,
        "annealed: mean factor on the chance to keep a token; more is faster and less faithful",
        low=0.1,
        high=10.0,
        step=0.1,
        visible_if={"rule": ("annealed",)},
    )
    resample: str = option(
        "optimal",
        "what a rejected token is replaced from: optimal: Cool-SD's distribution; paper: LANTERN's",
        choices=RESAMPLES,
        visible_if=LANTERN,
    )
    metric: str = option(
        "raw",
        "which codes look alike: near as they are (raw) or scaled to length 1 (normalised), for codecs that scale them",
        choices=METRICS,
        visible_if=LANTERN,
    )

    def weights(self) -> tuple[float, ...]:
        """w_1 .. w_L under rule annealed."""
        return annealed_weights(self.draft_length, self.delta)

    @property
    def exact(self) -> bool:
        """Only if every round is verified by an exact rule."""
        if self.schedule != "never":
            return False
        if self.rule == "annealed":
            return max(self.weights()) <= 1.0
        return {"lantern": self.tvd <= 0.0, "lantern++": self.lam <= 0.0}.get(self.rule, True)


@dataclass
class Paths:
    """The paths of a draft tree, from the root to each leaf, over its valid nodes.

    leaf bool [B, K]: ends of paths; count [B]: how many; mean [B]: their mean length, rounded down (Eq. 1; 0 without paths).
    """

    tree: Tree
    leaf: Tensor
    count: Tensor
    mean: Tensor

    @classmethod
    def of(cls, draft: Draft) -> Paths:
        """Those of a draft with a tree."""
        tree = draft.tree
        if tree is None:
            raise ValueError("paths need a draft tree")
        rows, nodes = draft.tokens.shape
        valid = torch.ones_like(draft.tokens, dtype=torch.bool) if draft.valid is None else draft.valid
        inner = torch.zeros(rows, nodes + 1, dtype=torch.bool, device=valid.device)
        inner.scatter_(1, torch.where(valid, tree.parents + 1, 0), True)
        leaf = valid & ~inner[:, 1:]
        count = leaf.sum(1)
        return cls(tree, leaf, count, torch.div((tree.depth * leaf).sum(1), count.clamp(min=1), rounding_mode="floor"))

    def pick(self, uniform: Tensor) -> Tensor:
        """One leaf of each row, all equally likely: uniform [B] in (0, 1) -> [B]."""
        number = torch.minimum((uniform * self.count).long(), self.count - 1)
        return (self.leaf & (self.leaf.cumsum(1) == number[:, None] + 1)).long().argmax(1)

    def similarity(self, units: Tensor, tokens: Tensor, levels: int, alpha: float, stride: int) -> Tensor:
        """How much the paths look alike (Eq. 2): [B], -inf where there are no two to compare.

        The mean cosine between different paths at each depth, weighted by alpha ** depth; of all paths every `stride`-th is
        taken. units [V, D]: code embeddings of length 1; tokens [B, K]; levels: at least the depth of the tree.
        """
        taken = self.leaf & ((self.leaf.cumsum(1) - 1) % stride == 0)
        through = (self.tree.seen & taken[..., None]).sum(1)
        depths = torch.arange(1, levels + 1, device=tokens.device)
        at = ((self.tree.depth[:, None] == depths[:, None]) * through[:, None]).to(units.dtype)
        vectors = units[tokens]
        # Over ordered pairs of different paths: |sum u|^2 less the paths' products with themselves.
        itself = (at * vectors.square().sum(-1)[:, None]).sum(-1)
        count = at.sum(-1)
        mean = ((at @ vectors).square().sum(-1) - itself) / (count * (count - 1)).clamp(min=1)
        weight = alpha ** (depths - 1).to(units.dtype) * (count >= 2)
        whole = weight.sum(-1)
        return torch.where(whole > 0, (weight * mean).sum(-1) / whole, -torch.inf)


class SkippingDrafter:
    """Hands on dynamic trees; of some it has one path committed unverified instead.

    Each row decides for itself, never twice in a row and not in its first round.
    inner: drafts dynamic trees. codebook [V, D]: what the codes stand for. similarity [B]: of the last tree, if it was asked for.
    """

    def __init__(self, inner: HeadDrafter, codebook: Tensor, config: VVSConfig):
        self.inner, self.config = inner, config
        self.units = torch.nn.functional.normalize(codebook.double(), dim=-1)
        self.similarity: Tensor | None = None
        self._rounds = 0
        # Rows that skipped the last round (None: no row did), and whether all that are not finished did.
        self._skipped: Tensor | None = None
        self._idle = False

    @property
    def draft_forwards(self) -> int:
        """Forwards of the head."""
        return self.inner.draft_forwards

    def propose(self, sequence: Sequence, noise: Noise) -> Draft:
        """The inner tree, or one path of it for the rows that skip."""
        draft = self.inner.propose(sequence, noise)
        self._rounds += 1
        if not self._may_skip():
            self._skipped, self._idle = None, False
            return draft
        paths = Paths.of(draft)
        skip = self._decide(paths, draft) & sequence.active
        if self._skipped is not None:
            skip &= ~self._skipped
        some, self._idle = torch.stack((skip.any(), (skip | ~sequence.active).all())).tolist()
        self._skipped = skip if some else None
        return self._shortened(draft, paths, skip, sequence, noise) if some else draft

    def observe(self, sequence: Sequence, draft: Draft, scores: Scores | None, verdict: Verdict, noise: Noise) -> None:
        """Passed on."""
        self.inner.observe(sequence, draft, scores, verdict, noise)

    def _may_skip(self) -> bool:
        """Whether any row could skip this round; what is known without looking at the tree."""
        config = self.config
        if config.schedule == "uniform":
            return self._rounds % config.interval == 0
        return self._rounds > 1 and not self._idle

    def _decide(self, paths: Paths, draft: Draft) -> Tensor:
        """Which rows would skip: bool [B]."""
        config = self.config
        if config.schedule == "uniform":
            return torch.ones_like(paths.count, dtype=torch.bool)
        self.similarity = paths.similarity(self.units, draft.tokens, self.inner.reach, config.alpha, config.stride)
        return self.similarity >= config.threshold

    def _shortened(self, draft: Draft, paths: Paths, skip: Tensor, sequence: Sequence, noise: Noise) -> Draft:
        """The draft, in which rows that skip [B] have the nodes of one path first, and valid are only those to be committed."""
        tree, nodes = paths.tree, draft.nodes
        batch = torch.arange(len(skip), device=skip.device)
        if self.config.selection == "confidence" and self.inner.confidence is not None:
            leaf = self.inner.confidence.masked_fill(~paths.leaf, -torch.inf).argmax(1)
        else:
            leaf = paths.pick(noise.uniform(sequence.length[:, None] - 1, SKIP, dtype=torch.float64)[:, 0])
        length = tree.depth[batch, leaf]
        length = torch.minimum(length, paths.mean) if self.config.truncate else length * (paths.count > 0)
        step = torch.arange(nodes, device=skip.device)
        on_path = tree.seen[batch, leaf] & skip[:, None]
        order = torch.where(on_path, tree.depth - nodes - 1, step).argsort(1)
        valid = step < length[:, None]
        if self._idle:
            width = min(self.inner.reach, nodes)
            nobody = torch.zeros_like(skip)
            return Draft(draft.tokens.gather(1, order)[:, :width], valid=valid[:, :width], check=nobody)
        place = torch.empty_like(order).scatter_(1, order, step.expand_as(order))
        parents = tree.parents.gather(1, order)
        parents = torch.where(parents < 0, -1, place.gather(1, parents.clamp(min=0)))
        if draft.valid is not None:
            valid = torch.where(skip[:, None], valid, draft.valid)
        else:
            valid = valid | ~skip[:, None]
        return Draft(draft.tokens.gather(1, order), tree=Tree(parents), valid=valid, check=~skip)


class VVSPipeline(CoolSDPipeline):
    """A head on the target's own features drafts trees; most are verified in one forward, of the others one path is believed.

    Args:
        draft_head: trained on this target's features (`foredraft train head`).
    """

    config_class = VVSConfig

    def scratch(self, config: Any, device: torch.device) -> int:
        """Nodes of the tree."""
        return draft_nodes("dynamic", config.draft_length, config.branching, config.total_nodes)

    def method(self, run: Run) -> Method:
        """The head drafts, the skipping drafter chooses whom to ask."""
        config: VVSConfig = run.config
        length, nodes = config.draft_length, config.total_nodes
        inner = head_drafter(self.draft_head, self.target, run, "dynamic", length, config.branching, nodes)
        skips = config.schedule != "never"
        drafter = SkippingDrafter(inner, self.codec.codebook().to(run.device), config) if skips else inner
        return Method(drafter, Walk(self.rule(run.config, run.device)), measurable=not skips)
