"""What every stage shares: resumable checkpoints, averaged weights, a schedule by fixed step counts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def save_whole(state: Any, path: Path) -> None:
    """Write `state` under a temporary name and rename it, so that an interrupted write leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + ".partial")
    torch.save(state, partial)
    partial.replace(path)


def load_whole(path: Path) -> dict[str, Any] | None:
    """The state at `path`, or None where there is none."""
    if not path.is_file():
        return None
    return torch.load(path, map_location="cpu", weights_only=True)


def trapezoid(step: int, steps: int, hold: float, warmup: int = 50) -> float:
    """Learning-rate factor: a short warm-up, then 1 until `hold` of the steps, then a straight line to 0."""
    decay = (steps - step) / max(1.0, steps * (1 - hold))
    return min(1.0, (step + 1) / warmup, decay)


class Average:
    """Exponential moving average of a module's floating-point state."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.state = {name: value.detach().clone() for name, value in module.state_dict().items()}

    @torch.no_grad()
    def update(self, module: nn.Module, step: int) -> None:
        """Fold in the weights after `step`; early steps average over fewer."""
        decay = min(self.decay, (step + 1) / (step + 10))
        for name, value in module.state_dict().items():
            if value.is_floating_point():
                self.state[name].lerp_(value, 1 - decay)
            else:
                self.state[name].copy_(value)


def batches(count: int, batch: int, seed: int, start: int = 0) -> Iterator[Tensor]:
    """Endless index batches [batch], a new order each pass; `start` batches are skipped, as after a resume."""
    per_pass = count // batch
    epoch, offset = divmod(start, per_pass)
    while True:
        order = torch.randperm(count, generator=seeded(seed, epoch))
        for first in range(offset * batch, per_pass * batch, batch):
            yield order[first : first + batch]
        epoch, offset = epoch + 1, 0


def seeded(*keys: int) -> torch.Generator:
    """A CPU generator that is a function of the keys alone, e.g. (seed, stage, step)."""
    return torch.Generator().manual_seed(random.Random(repr(keys)).getrandbits(63))  # noqa: S311 (no secret)


def half_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state with its floating-point tensors in half precision, contiguous."""
    return {name: (value.half() if value.is_floating_point() else value).contiguous().clone() for name, value in state.items()}
