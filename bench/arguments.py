"""Command-line arguments and what they mean: models, sampling, and every option of every method."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch

from .. import DEMO
from ..decoding.heatmap import KINDS
from ..pipelines import methods
from .cases import Family, method_class, parse_value

CALL = ("height", "width", "guidance_scale", "temperature", "top_k", "top_p", "negative_prompt")
DTYPES = ("float32", "float64", "bfloat16", "float16")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Which model, where, and how precisely."""
    group = parser.add_argument_group("model")
    group.add_argument("--model", metavar="DIR", help="folder or Hub id (default: the embedded family)")
    group.add_argument("--dtype", choices=DTYPES, help="of the models (default: float32)")
    group.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps (default: cpu)")
    group.add_argument("--threads", type=count, help="CPU threads (default: 1 for a small model, else torch's choice)")


def add_call(parser: argparse.ArgumentParser) -> None:
    """Arguments of the pipelines' call; absent ones are the family's defaults."""
    group = parser.add_argument_group("sampling (default: the model family's values)")
    group.add_argument("--seed", type=int, default=0, help="the same seed draws the same picture (default: 0)")
    group.add_argument("--num", type=count, default=1, help="pictures (default: 1)")
    group.add_argument("--height", type=int, help="pixels")
    group.add_argument("--width", type=int, help="pixels")
    group.add_argument("--guidance-scale", type=float, help="classifier-free guidance, from 1 = off")
    group.add_argument("--temperature", type=float, help="from 0 = greedy")
    group.add_argument("--top-k", type=int, help="most probable codes kept; 0 = all")
    group.add_argument("--top-p", type=float, help="probability mass kept, up to 1 = all")
    group.add_argument("--negative-prompt", metavar="TEXT", help="what guidance leads away from")


def add_output(parser: argparse.ArgumentParser, what: str) -> None:
    """Where results go."""
    group = parser.add_argument_group("output")
    group.add_argument("--out", type=Path, metavar="FILE", help=what)
    group.add_argument("--heatmap-kind", choices=KINDS, default="run", help="what the token map shows (default: run)")
    group.add_argument("--json", type=Path, metavar="FILE", help="write figures and maps as JSON")


def add_methods(parser: argparse.ArgumentParser) -> None:
    """Every option of every method, from the fields of its configuration."""
    owners: dict[str, dict[str, Any]] = {}
    for name, pipeline in methods().items():
        for item in dataclasses.fields(pipeline.config_class):
            owners.setdefault(item.name, {})[name] = item
    groups: dict[tuple[str, ...], Any] = {}
    for field, items in owners.items():
        who = tuple(items)
        if who not in groups:
            groups[who] = parser.add_argument_group(f"options of {' and '.join(who)}")
        texts = list(dict.fromkeys(item.metadata["help"] for item in items.values()))
        text = texts[0] if len(texts) == 1 else "; ".join(f"{n}: {i.metadata['help']}" for n, i in items.items())
        first = next(iter(items.values()))
        default = "automatic" if first.default is None else str(first.default).lower()
        text = f"{text} (default: {default})".replace("%", "%%")
        flag, common = f"--{field.replace('_', '-')}", {"dest": f"option_{field}", "default": argparse.SUPPRESS}
        if isinstance(first.default, bool):
            groups[who].add_argument(flag, action=argparse.BooleanOptionalAction, help=text, **common)
            continue
        choices = list(dict.fromkeys(c for item in items.values() for c in item.metadata["choices"] or ()))
        shape = "{" + ",".join(choices) + "}" if choices else _shape(first.metadata)
        groups[who].add_argument(flag, metavar=shape, help=text, **common)


def _shape(meta: Any) -> str:
    """What a number may be: its range, and the words allowed beside it."""
    words = (["none"] if meta["automatic"] else []) + (["auto"] if meta["timing"] else [])
    low, high = meta["low"], meta["high"]
    return "|".join([f"{low:g}..{high:g}" if low is not None and high is not None else "N", *words])


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def method_options(options: argparse.Namespace) -> dict[str, Any]:
    """The method options given on the command line. Raises ValueError for another method's."""
    own = {item.name for item in dataclasses.fields(method_class(options.method).config_class)}
    given = {name[7:]: value for name, value in vars(options).items() if name.startswith("option_")}
    for name in given:
        if name not in own:
            fits = [n for n, p in methods().items() if name in p.config_class.__dataclass_fields__]
            raise ValueError(
                f"--{name.replace('_', '-')} is an option of {' and '.join(fits)}, not of {options.method}: "
                f"leave it out or choose --method {fits[0]}"
            )
    return {name: parse_value(value) if isinstance(value, str) else value for name, value in given.items()}


def call_options(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of a pipeline's call."""
    given = {name: getattr(options, name) for name in CALL if getattr(options, name) is not None}
    return {"num_images_per_prompt": options.num, **given}


def family(options: argparse.Namespace) -> Any:
    """The chosen model, ready to be loaded by the methods that use it."""
    try:
        device = torch.device(options.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"the device {options.device!r} is not available here: choose another, for example cpu") from error
    dtype = getattr(torch, options.dtype) if options.dtype else None
    return Family(options.model or DEMO, dtype, device, options.threads)
