"""Classic speculative decoding with a small draft model: chain, static tree, dynamic tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..decoding.drafters.model import ModelDrafter
from ..decoding.rules import Exact
from ..decoding.verify import Match, Walk
from ..models.target import DiscreteTarget
from .base import Method, Run, SpeculativeDecodingPipeline
from .drafting import draft_nodes, tree_shape
from .options import AUTO, MethodConfig, option

LENGTHS = (0, 1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class SpeculativeConfig(MethodConfig):
    """Knobs of drafting with a small model."""

    name: ClassVar[str] = "speculative"
    title: ClassVar[str] = "Speculative decoding with a small draft model"
    paper: ClassVar[str] = "Leviathan et al. 2023; Chen et al. 2023; trees: Miao et al. 2024, Li et al. 2024 (EAGLE-2)"

    rule: str = option(
        "seeded",
        "seeded: the same picture as plain decoding with this seed; exact: the same distribution, another picture",
        choices=("seeded", "exact"),
    )
    tree: str = option(
        "chain",
        "shape of the draft: chain; static: a fixed tree of sampled siblings; dynamic: the most confident nodes",
        choices=("chain", "static", "dynamic"),
    )
    draft_length: int | str = option(
        4,
        "tokens drafted ahead (the depth of a tree); 'auto' measures (seeded chains only)",
        low=1,
        high=32,
        timing=True,
    )
    branching: int = option(
        3, "children tested at each depth of a tree", low=1, high=16, visible_if={"tree": ("static", "dynamic")}
    )
    total_nodes: int = option(12, "nodes kept in a dynamic tree", low=1, high=128, visible_if={"tree": ("dynamic",)})

    def check(self) -> None:
        """Timing may decide only where it cannot change the picture."""
        if self.draft_length == AUTO and (self.rule != "seeded" or self.tree != "chain"):
            raise ValueError("draft_length='auto' follows the clock and is allowed only under rule='seeded' with tree='chain'")

    @property
    def length(self) -> int:
        """Draft length; the longest one if it is chosen by the clock."""
        return max(LENGTHS) if self.draft_length == AUTO else int(self.draft_length)


class SpeculativePipeline(SpeculativeDecodingPipeline):
    """A small sibling of the target drafts; the target verifies a whole draft in one forward.

    Args:
        draft_model: the sibling (q); it must share the target's codebook and tokenizer.
    """

    config_class = SpeculativeConfig

    def __init__(
        self,
        target: DiscreteTarget,
        codec: Any,
        tokenizer: Any,
        draft_model: DiscreteTarget,
        defaults: dict[str, Any] | None = None,
        text_encoder: Any = None,
    ):
        super().__init__(target, codec, tokenizer, defaults, text_encoder)
        self.register_modules(draft_model=draft_model)
        if draft_model.vocab_size != target.vocab_size:
            raise ValueError(
                f"the draft model has {draft_model.vocab_size} codes and the target {target.vocab_size}: "
                "they must share one codebook, load a draft made for this target"
            )

    def scratch(self, config: Any, device: torch.device) -> int:
        """Nodes of the draft."""
        return draft_nodes(config.tree, config.length, config.branching, config.total_nodes)

    def method(self, run: Run) -> Method:
        """The draft model drafts; seeded matches tokens, exact walks the tree."""
        config: SpeculativeConfig = run.config
        shape, dynamic = tree_shape(config.tree, config.length, config.branching, config.total_nodes, run.device)
        scratch = config.length * max(config.branching, 1) + 1
        conditioning = self.draft_model.encode(self.components, run.prompts, run.negative, run.sampling.guided, run.size)
        own = self.draft_model.begin(conditioning, run.grid, run.sampling, scratch)
        seeded = config.rule == "seeded"
        planner = self.planner(run, LENGTHS, 4) if config.draft_length == AUTO else None
        drafter = ModelDrafter(self.draft_model, own, config.length, shape, dynamic, seeded, planner)
        return Method(drafter, Match() if seeded else Walk(Exact()))
