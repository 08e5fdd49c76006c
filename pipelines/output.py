"""What a pipeline returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diffusers.utils import BaseOutput
from torch import Tensor

from ..decoding.trace import Trace


@dataclass
class SpeculativeOutput(BaseOutput):
    """images: PIL images (or a float array [B, H, W, 3] in 0..1, a tensor [B, 3, H, W] in 0..1, or the codes); tokens: codes
    [B, h, w]; traces: one per image."""

    images: Any
    tokens: Tensor
    traces: list[Trace]
