"""Acceptance Heatmap and Trace Stats: what a trace looks like, and its numbers."""

from __future__ import annotations

from typing import Any

import torch

from ..decoding.heatmap import KINDS
from ..decoding.trace import Trace
from . import host
from .sample import Record


class Heatmap:
    """Draws which tokens were accepted together."""

    DESCRIPTION = (
        "Draws the map of a trace over its picture. run: how many tokens were committed together (bright is fast); round: when; "
        "source: accepted, recovered, bonus, ...; probability: how sure the target was."
    )
    CATEGORY = "Foredraft"
    FUNCTION = "draw"
    RETURN_TYPES = ("IMAGE",)
    RETURN_NAMES = ("heatmap",)
    OUTPUT_TOOLTIPS = ("One map per picture, at least 512 pixels high.",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """See ComfyUI."""
        return {
            "required": {
                "trace": ("FOREDRAFT_TRACE", {"tooltip": "From the Speculative Sampler."}),
                "kind": (list(KINDS), {"default": KINDS[0], "tooltip": "What the colours mean."}),
                "opacity": (
                    "FLOAT",
                    {
                        "default": 0.6,
                        "min": 0.0,
                        "max": 1.0,
                        "step": 0.05,
                        "tooltip": "Of the colours over the picture; 1 hides the picture.",
                    },
                ),
                "legend": ("BOOLEAN", {"default": True, "tooltip": "A panel with the scale and the key figures."}),
            },
            "optional": {"images": ("IMAGE", {"tooltip": "The pictures of the same sampler, to lie under the colours."})},
        }

    def draw(
        self, trace: Record, kind: str, opacity: float, legend: bool, images: torch.Tensor | None = None
    ) -> tuple[torch.Tensor]:
        """One map per trace."""
        pictures: list[Any] = [None] * len(trace.traces)
        if images is not None:
            pictures = host.pictures_of(images)
            if len(pictures) != len(trace.traces):
                raise ValueError(
                    f"there are {len(pictures)} pictures and {len(trace.traces)} traces: connect both outputs of one sampler"
                )
        drawn = [each.heatmap(picture, kind, opacity, legend) for each, picture in zip(trace.traces, pictures, strict=True)]
        return (host.image_batch(drawn),)


class TraceStats:
    """The numbers of one picture's trace."""

    DESCRIPTION = "The numbers of a trace: tokens per forward, acceptance, seconds, and everything else as JSON."
    CATEGORY = "Foredraft"
    FUNCTION = "read"
    OUTPUT_NODE = True
    RETURN_TYPES = ("FLOAT", "FLOAT", "FLOAT", "INT", "FLOAT", "FLOAT", "BOOLEAN", "STRING")
    RETURN_NAMES = (
        "tokens_per_forward",
        "acceptance_length",
        "acceptance_rate",
        "target_forwards",
        "seconds",
        "speedup",
        "exact",
        "json",
    )
    OUTPUT_TOOLTIPS = (
        "Tokens per pass through the target; plain decoding has 1.",
        "Mean number of tokens committed per round.",
        "Share of the judged draft tokens that were accepted.",
        "Passes through the target.",
        "Wall-clock of the whole batch.",
        "Estimate against plain decoding, from one measured plain step; 0 where it is unknown.",
        "Whether the method, as it was set, keeps the target's distribution.",
        "The whole trace with its maps; Trace.from_json reads it.",
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """See ComfyUI."""
        return {
            "required": {
                "trace": ("FOREDRAFT_TRACE", {"tooltip": "From the Speculative Sampler."}),
                "index": ("INT", {"default": 0, "min": 0, "max": 63, "tooltip": "Which picture of the batch, from 0."}),
            }
        }

    def read(self, trace: Record, index: int) -> dict[str, Any]:
        """The numbers as outputs, and a few lines of text for the browser."""
        if index >= len(trace.traces):
            raise ValueError(f"there is no picture {index}: the batch has {len(trace.traces)}, counted from 0")
        one = trace.traces[index]
        numbers = (one.tokens_per_forward, one.mean_acceptance_length, one.acceptance_rate, one.target_forwards, one.seconds)
        result = (*numbers, trace.speedup or 0.0, one.exact, one.to_json())
        return {"ui": {"text": [stats_text(trace, one)]}, "result": result}


def stats_text(record: Record, trace: Trace) -> str:
    """A few lines for people."""
    lines = [
        f"{record.title} ({'exact' if trace.exact else 'relaxed'})",
        f"{trace.tokens} tokens in {trace.target_forwards} target forwards: {trace.tokens_per_forward:.2f} per forward",
    ]
    if trace.judged:
        lines.append(f"{trace.accepted} of {trace.judged} judged draft tokens accepted ({trace.acceptance_rate:.0%})")
    faster = f", about {record.speedup:.2f}x plain decoding" if record.speedup else ""
    lines.append(f"{trace.seconds:.2f} s for {trace.batch} picture{'s' * (trace.batch > 1)}{faster}")
    return "\n".join([*lines, *trace.notes])
