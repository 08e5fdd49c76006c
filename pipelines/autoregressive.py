"""Plain autoregressive decoding: the baseline every speed-up is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..decoding.noise import Noise
from ..decoding.sequence import Sequence
from ..decoding.types import Draft, Scores, Verdict, no_draft
from ..decoding.verify import Match
from .base import Method, Run, SpeculativeDecodingPipeline
from .options import MethodConfig


@dataclass(frozen=True)
class AutoregressiveConfig(MethodConfig):
    """One token per forward."""

    name: ClassVar[str] = "ar"
    title: ClassVar[str] = "Autoregressive"
    paper: ClassVar[str] = "the definition"


class NoDrafter:
    """Proposes nothing."""

    draft_forwards = 0

    def propose(self, sequence: Sequence, noise: Noise) -> Draft:
        """K = 0."""
        return no_draft(len(sequence.length), sequence.length.device)

    def observe(self, sequence: Sequence, draft: Draft, scores: Scores | None, verdict: Verdict, noise: Noise) -> None:
        """Nothing to learn."""


class AutoregressivePipeline(SpeculativeDecodingPipeline):
    """Draws one token per target forward, from the same noise as every seeded method."""

    config_class = AutoregressiveConfig

    def scratch(self, config: Any, device: torch.device) -> int:
        """No draft nodes."""
        return 0

    def method(self, run: Run) -> Method:
        """Nobody drafts; the target's draw is committed."""
        return Method(NoDrafter(), Match())
