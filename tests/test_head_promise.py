"""The shipped draft head: with a seed it draws plain decoding's very picture, and it drafts well enough to be worth it."""

from __future__ import annotations

from functools import cache
from typing import Any

import foredraft
import pytest
import torch
from foredraft.decoding.drafters.head import HeadDrafter
from foredraft.decoding.loop import decode
from foredraft.decoding.noise import Noise
from foredraft.decoding.rules import Exact
from foredraft.decoding.sampling import Sampling
from foredraft.decoding.trace import Recorder, Trace
from foredraft.decoding.tree import spine_paths, static_tree
from foredraft.decoding.types import Draft, Verifier, no_draft
from foredraft.decoding.verify import Match, Walk
from foredraft.models.embedded import EmbeddedTarget, WordTokenizer
from foredraft.models.head import DraftHead
from torch import Tensor

PROMPTS = (
    "fox",
    "red apple on blue",
    "owl",
    "rocket on purple",
    "teapot",
    "violin",
    "cat on green",
    "birthday cake",
    "shark",
    "key",
)
GRID = (16, 16)
DEFAULT = Sampling(guidance_scale=1.5, temperature=0.9, top_k=100)
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"length": 4},
    "static": {"tree": static_tree(spine_paths(3, 3))},
    "dynamic": {"dynamic": (10, 4, 3)},
}


@cache
def models(dtype: torch.dtype) -> tuple[EmbeddedTarget, DraftHead, WordTokenizer]:
    """The shipped family."""
    target = EmbeddedTarget.from_pretrained(foredraft.DEMO, subfolder="target").to(dtype).eval()
    head = DraftHead.from_pretrained(foredraft.DEMO, subfolder="draft_head").to(dtype).eval()
    head.check(target)
    return target, head, WordTokenizer.from_pretrained(f"{foredraft.DEMO}/tokenizer")


class Plain:
    """No draft."""

    draft_forwards = 0

    def propose(self, sequence: Any, noise: Noise) -> Draft:
        """K = 0."""
        return no_draft(len(sequence.length), sequence.length.device)

    def observe(self, *args: Any) -> None:
        """Nothing to learn."""


def drawn(
    dtype: torch.dtype, prompts: tuple[str, ...], sampling: Sampling, verifier: Verifier, shape: str | None, **options: Any
) -> tuple[Tensor, list[Trace]]:
    """Codes [B, 256] and traces; shape None: plain decoding."""
    target, head, tokenizer = models(dtype)
    conditioning = target.encode({"tokenizer": tokenizer}, list(prompts), None, sampling.guided, (16, 16))
    sequence, recorder = target.begin(conditioning, GRID, sampling, 16), Recorder()
    drafter: Any = Plain()
    if shape is not None:
        own = head.begin(target, conditioning, GRID, sampling, 12)
        drafter = HeadDrafter(head, target, own, **SHAPES[shape], **options)
    seeds = torch.arange(len(prompts)) + 77
    tokens = decode(target, drafter, verifier, sequence, Noise(seeds), recorder)
    return tokens, recorder.traces(sequence, seeds, "", True)


plain = cache(lambda prompts, sampling: drawn(torch.float64, prompts, sampling, Match(), None)[0])


@pytest.mark.parametrize("shape", SHAPES)
def test_same_picture_in_float64(shape: str) -> None:
    tokens, traces = drawn(torch.float64, PROMPTS[:2], DEFAULT, Match(), shape, seeded=True)
    assert torch.equal(tokens, plain(PROMPTS[:2], DEFAULT))
    assert all(trace.tokens_per_forward > 1.3 for trace in traces)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling", [DEFAULT, Sampling(), Sampling(guidance_scale=3.0, top_p=0.9)], ids=["default", "plain", "g 3"]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_more_pictures_in_float64(shape: str, sampling: Sampling) -> None:
    tokens, _ = drawn(torch.float64, PROMPTS, sampling, Match(), shape, seeded=True)
    assert torch.equal(tokens, plain(PROMPTS, sampling))


def test_it_drafts_well() -> None:
    """Chains of four under the exact rule: the model card's figure, with room for chance."""
    _, traces = drawn(torch.float32, PROMPTS[:4], DEFAULT, Walk(Exact()), "chain")
    assert sum(trace.tokens_per_forward for trace in traces) / 4 > 1.7
