"""Cool-SD and what it is compared with: a draft head, and rules that keep more than the exact one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..decoding.rules import RESAMPLES, SCHEDULES, Exact, Pooled, Weighted, annealed_weights
from ..decoding.tree import ranked_paths
from ..decoding.types import Rule
from ..decoding.verify import Match, Walk
from ..models.head import DraftHead
from ..models.neighbours import METRICS, nearest_codes
from ..models.target import DiscreteTarget
from .base import Method, Run, SpeculativeDecodingPipeline
from .drafting import draft_nodes, head_drafter
from .options import MethodConfig, option

ANNEALED = {"rule": ("annealed",)}
LANTERN = {"rule": ("lantern", "lantern++")}


@dataclass(frozen=True)
class CoolSDConfig(MethodConfig):
    """Knobs of Cool-SD, UniformRSD, LANTERN, LANTERN++ and plain EAGLE."""

    name: ClassVar[str] = "cool_sd"
    title: ClassVar[str] = "Draft head (Cool-SD, LANTERN, EAGLE)"
    paper: ClassVar[str] = (
        "Li et al. 2025 (Cool-SD); Jang et al. 2024 (LANTERN); Park et al. 2025 (LANTERN++); Li et al. 2024 (EAGLE)"
    )

    rule: str = option(
        "annealed",
        "annealed: Cool-SD, relaxed at first and strict later in a draft; uniform: equally relaxed; lantern and lantern++: "
        "look-alike codes count together; exact: the target's distribution (EAGLE); seeded: the same picture as plain decoding "
        "with this seed",
        choices=("annealed", "exact", "uniform", "lantern", "lantern++", "seeded"),
    )
    tree: str = option(
        "chain",
        "shape of the draft: chain; static: a fixed tree of sampled siblings (EAGLE-1); dynamic: the most confident nodes "
        "(EAGLE-2)",
        choices=("chain", "static", "dynamic"),
    )
    draft_length: int = option(5, "tokens drafted ahead (the depth of a tree)", low=1, high=32)
    total_nodes: int = option(16, "nodes drafted in a tree", low=1, high=128, visible_if={"tree": ("static", "dynamic")})
    delta: float = option(
        1.1,
        "how relaxed: the factor on the chance to keep a token (annealed: its mean over the draft); more is faster and less "
        "faithful",
        low=0.1,
        high=10.0,
        step=0.1,
        visible_if={"rule": ("annealed", "uniform")},
    )
    nu: float = option(
        0.7,
        "how fast the exponential schedule falls from one drafted token to the next",
        low=0.0,
        high=5.0,
        step=0.05,
        visible_if={"schedule": ("exponential",), **ANNEALED},
    )
    schedule: str = option(
        "exponential",
        "how the relaxation falls along the draft; linear reaches to a draft length of 7",
        choices=SCHEDULES,
        visible_if=ANNEALED,
    )
    clamp: bool = option(
        True, "never stricter than the exact rule: longer runs at the same fidelity per round; off is the published form",
        visible_if=ANNEALED,
    )  # fmt: skip
    k: int = option(10, "how many nearest codes may count with a token (LANTERN: 1000)", low=1, high=4096, visible_if=LANTERN)
    tvd: float = option(
        0.1,
        "LANTERN: probability of look-alike codes that may count with a token; more is faster and less faithful",
        low=0.0,
        high=1.0,
        step=0.05,
        visible_if={"rule": ("lantern",)},
    )
    lam: float = option(
        2.0,
        "LANTERN++: look-alike codes count up to this many times the token's own probability; more is faster and less faithful",
        low=0.0,
        high=20.0,
        step=0.5,
        visible_if={"rule": ("lantern++",)},
    )
    resample: str = option(
        "optimal",
        "what a rejected token is replaced from: optimal: Cool-SD's distribution; paper: LANTERN's",
        choices=RESAMPLES,
        visible_if=LANTERN,
    )
    branching: int = option(
        4, "children tried at each node while a dynamic tree grows", low=1, high=16, visible_if={"tree": ("dynamic",)}
    )
    metric: str = option(
        "raw",
        "which codes look alike: near as they are (raw) or scaled to length 1 (normalised), for codecs that scale them",
        choices=METRICS,
        visible_if=LANTERN,
    )

    def check(self) -> None:
        """The linear schedule reaches 0 at depth 8."""
        if self.rule == "annealed":
            self.weights()

    def weights(self) -> tuple[float, ...]:
        """w_1 .. w_L under rule annealed or uniform."""
        if self.rule == "uniform":
            return (self.delta,)
        return annealed_weights(self.draft_length, self.delta, self.nu, self.schedule, self.clamp)

    @property
    def exact(self) -> bool:
        """A weight above 1 and a pool of more than one code are relaxed."""
        if self.rule in ("annealed", "uniform"):
            return max(self.weights()) <= 1.0
        return {"lantern": self.tvd <= 0.0, "lantern++": self.lam <= 0.0}.get(self.rule, True)


class CoolSDPipeline(SpeculativeDecodingPipeline):
    """A head on the target's own features drafts; the target verifies a draft in one forward, by a rule that may be relaxed.

    Args:
        draft_head: trained on this target's features (`foredraft train head`).
    """

    config_class: ClassVar[type[MethodConfig]] = CoolSDConfig

    def __init__(
        self,
        target: DiscreteTarget,
        codec: Any,
        tokenizer: Any,
        draft_head: DraftHead,
        defaults: dict[str, Any] | None = None,
        text_encoder: Any = None,
    ):
        super().__init__(target, codec, tokenizer, defaults, text_encoder)
        draft_head.check(target)
        self.register_modules(draft_head=draft_head)
        self._near: dict[tuple[int, str, torch.device], torch.Tensor] = {}

    def paths(self, config: CoolSDConfig) -> list[tuple[int, ...]] | None:
        """The nodes of the static tree."""
        return ranked_paths(config.total_nodes, config.draft_length) if config.tree == "static" else None

    def scratch(self, config: Any, device: torch.device) -> int:
        """Nodes of the draft."""
        return draft_nodes(config.tree, config.draft_length, config.branching, config.total_nodes, self.paths(config))

    def near(self, config: CoolSDConfig, device: torch.device) -> torch.Tensor:
        """The nearest codes of each: int32 [V, k], looked up once."""
        key = (config.k, config.metric, device)
        if key not in self._near:
            self._near[key] = nearest_codes(self.codec.codebook().to(device), config.k, config.metric)
        return self._near[key]

    def rule(self, config: CoolSDConfig, device: torch.device) -> Rule:
        """The acceptance rule of every setting but seeded."""
        if config.rule in ("annealed", "uniform"):
            return Weighted(config.weights())
        if config.rule == "lantern":
            return Pooled(self.near(config, device), tvd=config.tvd, resample=config.resample)
        if config.rule == "lantern++":
            return Pooled(self.near(config, device), lam=config.lam, resample=config.resample)
        return Exact()

    def method(self, run: Run) -> Method:
        """The head drafts; seeded matches tokens, the other rules walk the chain or tree."""
        config: CoolSDConfig = run.config
        seeded = config.rule == "seeded"
        drafter = head_drafter(
            self.draft_head,
            self.target,
            run,
            config.tree,
            config.draft_length,
            config.branching,
            config.total_nodes,
            seeded=seeded,
            paths=self.paths(config),
        )
        return Method(drafter, Match() if seeded else Walk(self.rule(config, run.device)))
