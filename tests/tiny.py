"""A tiny untrained family with lively distributions, for tests of everything but what a picture shows."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from foredraft.models.codecs.vq import VQCodec
from foredraft.models.embedded import EmbeddedTarget, WordTokenizer
from foredraft.models.head import DraftHead
from foredraft.pipelines import methods
from foredraft.pipelines.speculative import SpeculativePipeline
from torch import Tensor

VOCABULARY = 48
NAMES = ("fox", "red apple", "polar bear", "honey pot", "cat")
COLOURS = {"white": (250, 250, 250), "red": (226, 92, 88), "blue": (108, 160, 232)}
PROMPTS = ("fox", "red apple on blue", "polar bear", "cat on red")
DEFAULTS: dict[str, Any] = {
    "guidance_scale": 1.5,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "grids": [[4, 4], [8, 8], [3, 5]],
    "window": {"cpu": 6, "cuda": 6},
}
# Every method, each rule, tail, start and tree at least once.
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("ar", {}),
    ("sjd", {}),
    ("sjd", {"init": "sample_left", "window": 3}),
    ("sjd", {"init": "random", "window": 20}),
    ("sjd", {"rule": "exact"}),
    ("sjd", {"rule": "exact", "tail": "coupled", "init": "left"}),
    ("sjd", {"rule": "exact", "tail": "resample", "init": "sample_above"}),
    ("sjd", {"rule": "exact", "tail": "reuse"}),
    ("sjd", {"rule": "clustered", "tail": "coupled"}),
    ("sjd", {"refine": False}),
    ("speculative", {}),
    ("speculative", {"tree": "static", "draft_length": 3, "branching": 2}),
    ("speculative", {"tree": "dynamic"}),
    ("speculative", {"rule": "exact"}),
    ("speculative", {"rule": "exact", "tree": "static", "draft_length": 2}),
    ("speculative", {"rule": "exact", "tree": "dynamic", "total_nodes": 8}),
    ("cool_sd", {"rule": "annealed"}),
    ("cool_sd", {"rule": "seeded", "draft_length": 3}),
    ("cool_sd", {"rule": "seeded", "tree": "static", "draft_length": 3, "total_nodes": 7}),
    ("cool_sd", {"rule": "seeded", "tree": "dynamic", "draft_length": 3, "total_nodes": 9}),
    ("cool_sd", {"rule": "exact"}),
    ("cool_sd", {"rule": "exact", "tree": "static", "draft_length": 2, "total_nodes": 6}),
    ("cool_sd", {"rule": "uniform", "delta": 2.0, "draft_length": 3}),
    (
        "cool_sd",
        {"rule": "annealed", "schedule": "linear", "clamp": False, "tree": "static", "draft_length": 4, "total_nodes": 8},
    ),
    ("cool_sd", {"rule": "lantern", "tree": "dynamic", "k": 1000, "total_nodes": 8, "draft_length": 3}),
    ("cool_sd", {"rule": "lantern++", "resample": "paper", "k": 4, "draft_length": 3, "tree": "static"}),
    ("vvs", {"rule": "lantern", "threshold": 0.2, "total_nodes": 6, "draft_length": 3}),
    ("vvs", {"schedule": "uniform", "interval": 2, "rule": "exact", "selection": "confidence"}),
    ("vvs", {"schedule": "uniform", "truncate": False, "rule": "lantern++"}),
    ("vvs", {"schedule": "never", "rule": "annealed", "delta": 2.0}),
)
SEEDED = tuple(variant for variant in VARIANTS if variant[0] != "ar" and variant[1].get("rule", "seeded") == "seeded")


def name_of(variant: tuple[str, dict[str, Any]]) -> str:
    """A test id."""
    return "-".join([variant[0], *(str(value) for value in variant[1].values())])


def build_parts() -> dict[str, Any]:
    """Components of the family, float32. The draft is the target's first block, so that it is often right."""
    words = sorted({word for text in (*NAMES, *COLOURS, "on") for word in text.split()})
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": VOCABULARY, "words": len(words) + 1, "dim": 32, "heads": 2, "ffn": 48}
    target = EmbeddedTarget(layers=2, **shape).eval()
    with torch.no_grad():
        for name, weight in target.named_parameters():
            # Untrained weights answer uniformly; these answer with about 2.5 nats, and every input counts.
            if "norm" not in name:
                weight.mul_(14.0 if name.startswith("head") else 6.0)
    draft = EmbeddedTarget(layers=1, guided=True, **shape).eval()
    draft.load_state_dict({name: target.state_dict()[name].clone() for name in draft.state_dict()})
    return {
        "target": target,
        "codec": VQCodec(vocab_size=VOCABULARY, code_dim=4, width=16, upper_width=8).eval(),
        "tokenizer": WordTokenizer(NAMES, COLOURS, words, max_words=8),
        "draft_model": draft,
        "draft_head": lively_head(target),
        "defaults": DEFAULTS,
    }


def lively_head(target: EmbeddedTarget) -> DraftHead:
    """A head that is sometimes right: it repeats the target's last feature, moved a little by the token that followed."""
    head = DraftHead.for_target(target).eval()
    with torch.no_grad():
        head.fc.weight[:, head.fc.in_features // 2 :].add_(torch.eye(head.fc.out_features))
    return head


def build_pipeline(parts: dict[str, Any], method: str, dtype: torch.dtype | None = None) -> Any:
    """A method's pipeline without a progress bar; with a dtype, over copies of the models."""
    cls = methods()[method]
    chosen = {name: parts[name] for name in (*cls.component_names(), "defaults") if name in parts}
    if dtype is not None:
        chosen = copy.deepcopy(chosen)
        for part in chosen.values():
            if isinstance(part, torch.nn.Module):
                part.to(dtype)
    pipe = cls(**chosen)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def save_family(parts: dict[str, Any], folder: Path) -> Path:
    """The family as a folder."""
    names = [name for name in (*SpeculativePipeline.component_names(), "defaults") if name in parts]
    pipe = SpeculativePipeline(**{name: parts[name] for name in names})
    pipe.save_pretrained(folder)
    return folder


def generators(*seeds: int) -> list[torch.Generator]:
    """One CPU generator per seed."""
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def codes(pipe: Any, prompt: str | list[str] = "fox", seed: int = 0, **call: Any) -> Tensor:
    """Tokens [B, h, w] of one call."""
    call.setdefault("generator", torch.Generator().manual_seed(seed))
    return pipe(prompt, output_type="latent", **call).tokens


def states_equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Whether two models hold the same tensors bit for bit, dtype included."""
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


def sentence(error: pytest.ExceptionInfo[Any], *parts: str) -> str:
    """The error's message, checked to be one plain sentence that holds every one of `parts` (ignoring case)."""
    text = str(error.value)
    assert text == text.strip() and "\n" not in text, f"more than one line: {text!r}"
    assert 15 <= len(text) <= 420, f"not a sentence: {text!r}"
    assert not re.search(r"[.!?] +[A-Z]", text), f"more than one sentence: {text!r}"
    for part in parts:
        assert part.lower() in text.lower(), f"{part!r} is not in {text!r}"
    return text


@pytest.fixture(scope="session")
def parts() -> dict[str, Any]:
    """Components, float32. Do not change them."""
    return build_parts()


@pytest.fixture(scope="session")
def folder(parts: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The family on disk. Do not change it."""
    return save_family(parts, tmp_path_factory.mktemp("family"))


@pytest.fixture(scope="session")
def pipe(parts: dict[str, Any]) -> Callable[..., Any]:
    """`pipe(method, dtype=None)`: the pipeline of a method, made once."""

    @cache
    def made(method: str, dtype: torch.dtype | None = None) -> Any:
        return build_pipeline(parts, method, dtype)

    return made
