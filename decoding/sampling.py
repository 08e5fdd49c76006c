"""From raw logits to the distribution tokens are sampled from: guide, then warp, then draw.

The order is fixed for targets and drafters alike: classifier-free guidance, temperature, top-k, top-p, grammar, softmax.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How a distribution is made. temperature 0 is greedy; top_k 0 and top_p 1 keep every code; guidance_scale 1 runs no
    unconditional rows."""

    guidance_scale: float = 1.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for name in ("guidance_scale", "temperature", "top_k", "top_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value in (math.inf, -math.inf):
                raise ValueError(f"{name} must be a finite number, got {value!r}")
        if self.top_k != self.top_k or int(self.top_k) != self.top_k:
            raise ValueError(f"top_k must be a whole number of at least 0 (0 = keep every code), got {self.top_k!r}")
        if not self.guidance_scale >= 1.0:
            raise ValueError(f"guidance_scale must be at least 1 (1 = no guidance), got {self.guidance_scale}")
        if not self.temperature >= 0.0:
            raise ValueError(f"temperature must be at least 0 (0 = greedy), got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0 (0 = keep every code), got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1] (1 = keep every code), got {self.top_p}")

    @property
    def guided(self) -> bool:
        """Whether unconditional rows are run."""
        return self.guidance_scale != 1.0


def guide(logits: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance u + scale * (c - u) over rows stacked as [conditional, unconditional]: [2B, ...] -> [B, ...]."""
    conditional, unconditional = logits.chunk(2)
    return torch.lerp(unconditional, conditional, scale)


def widen(logits: Tensor) -> Tensor:
    """At least float32: probabilities are never formed in half precision."""
    return logits if logits.dtype == torch.float64 else logits.float()


def kth_largest(logits: Tensor, k: int) -> Tensor:
    """The k-th largest value of each row [..., V] -> [..., 1]. On a CPU by numpy's selection, about twice as fast as a top-k."""
    if logits.device.type != "cpu":
        return logits.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    place = logits.shape[-1] - k
    return torch.from_numpy(np.partition(logits.numpy(), place, axis=-1)[..., place, None])


def warp(logits: Tensor, sampling: Sampling) -> Tensor:
    """Temperature, top-k and top-p: logits [..., V] -> normalised log-probabilities [..., V], -inf where nothing is kept.

    Codes that tie with the last one top-k keeps are kept too.
    """
    logits = widen(logits)
    if sampling.temperature == 0.0:
        best = logits.argmax(-1, keepdim=True)
        return torch.full_like(logits, -torch.inf).scatter_(-1, best, 0.0)
    if sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    vocabulary = logits.shape[-1]
    if 0 < sampling.top_k < vocabulary:
        logits = torch.where(logits < kth_largest(logits, sampling.top_k), -torch.inf, logits)
    if sampling.top_p < 1.0:
        values, codes = logits.sort(dim=-1, descending=True, stable=True)
        mass = values.softmax(-1)
        before = mass.cumsum(-1) - mass
        values = values.masked_fill(before >= sampling.top_p, -torch.inf)
        logits = torch.full_like(logits, -torch.inf).scatter_(-1, codes, values)
    return logits.log_softmax(-1)


def apply_grammar(log_p: Tensor, index: Tensor, forced: Tensor) -> Tensor:
    """One-hot rows where the grammar forces a token. log_p [B, M, V]; index [B, M] image-token index; forced [N], -1 = free."""
    token = forced[index.clamp(max=forced.shape[0] - 1)]
    only = torch.full_like(log_p, -torch.inf).scatter_(-1, token.clamp(min=0)[..., None], 0.0)
    return torch.where((token >= 0)[..., None], only, log_p)


def rows_at(rows: Tensor, at: Tensor) -> Tensor:
    """rows [B, M, V] at at [B, L] -> [B, L, V]: whole rows are copied, which is faster than a gather."""
    if len(rows) == 1:
        return rows.index_select(1, at[0])
    images, count, vocabulary = rows.shape
    first = torch.arange(0, images * count, count, device=at.device)
    return rows.reshape(-1, vocabulary).index_select(0, (at + first[:, None]).view(-1)).view(images, -1, vocabulary)


def draw(log_p: Tensor, log_e: Tensor) -> Tensor:
    """Gumbel-max in its exponential form: argmin(E / p) = argmax(log p - log E). log_p, log_e = log E [..., V] -> [...].

    One form only, the same for the target and every drafter, so that equal distributions give equal tokens.
    """
    return (log_p - log_e).argmax(-1)


def draw_with_margin(log_p: Tensor, log_e: Tensor) -> tuple[Tensor, Tensor]:
    """`draw`, and the gap between the two best noisy scores [...] (inf where a single code is possible)."""
    values, codes = (log_p - log_e).topk(min(2, log_p.shape[-1]), dim=-1)
    if values.shape[-1] < 2:
        return codes[..., 0], torch.full_like(values[..., 0], torch.inf)
    return codes[..., 0], values[..., 0] - values[..., 1]


def draw_distinct(log_p: Tensor, log_e: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`count` codes without replacement, in the order they are drawn (Gumbel-top-k; Kool et al. 2019).

    Returns codes [..., count] and whether each exists (False once the support is exhausted) [..., count].
    """
    best = (log_p - log_e).topk(min(count, log_p.shape[-1]), dim=-1)
    return best.indices, best.values > -torch.inf


def inverse_cdf(probability: Tensor, uniform: Tensor) -> Tensor:
    """A draw from unnormalised weights [..., V] by one uniform number [...] in (0, 1); codes of weight 0 are never drawn."""
    mass = probability.cumsum(-1)
    total = mass[..., -1:]
    # Below the total in every rounding, so that a code of weight 0 at the end is out of reach too.
    level = torch.minimum(uniform[..., None].to(mass.dtype) * total, total * (1.0 - 2.0**-22))
    return torch.searchsorted(mass, level, right=True)[..., 0].clamp_(max=probability.shape[-1] - 1)
