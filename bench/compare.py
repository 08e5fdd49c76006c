"""`foredraft.compare`: the same prompt and seed through several methods, timed in one run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..decoding.trace import Trace
from .cases import Case, Family, method_class, parse_case
from .report import HEADERS, Totals, notes, row, table

if TYPE_CHECKING:
    from PIL.Image import Image

AR = "ar"


@dataclass
class Row:
    """One method. seconds: median wall-clock of the batch; speedup: median over the repeats of AR's seconds by its own.

    identical: whether the codes equal plain decoding's, token for token. relaxation: see `Trace.relaxation_per_token`.
    """

    name: str
    method: str
    options: dict[str, Any]
    seconds: float
    speedup: float
    tpf: float
    mal: float
    acceptance: float
    exact: bool
    relaxation: float | None
    identical: bool
    seeded: bool
    images: list[Image] = field(repr=False)
    tokens: Tensor = field(repr=False)
    traces: list[Trace] = field(repr=False)


@dataclass
class Comparison:
    """Rows in the order asked for, plain autoregressive decoding first."""

    prompt: str
    seed: int
    repeats: int
    rows: list[Row]

    def table(self) -> str:
        """A Markdown table."""
        lines = []
        for item in self.rows:
            judged = any(trace.judged for trace in item.traces)
            lines.append(row(item.name, item.seconds, item.speedup, Totals.of(item.traces), judged))
        return table(HEADERS, lines)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the pictures and the maps."""
        keep = ("name", "method", "options", "seconds", "speedup", "tpf", "mal", "acceptance", "exact", "relaxation")
        rows = [
            {**{name: getattr(item, name) for name in keep}, "identical": item.identical, "traces": _summaries(item)}
            for item in self.rows
        ]
        return {"prompt": self.prompt, "seed": self.seed, "repeats": self.repeats, "rows": rows}

    def verdicts(self) -> list[str]:
        """One sentence per seeded method: whether its pictures are plain decoding's. Then what the traces note."""
        base = self.rows[0]
        said = [verdict(item.name, item.tokens, base.tokens, base.traces) for item in self.rows if item.seeded]
        return [*said, *(note for item in self.rows for note in notes(item.name, item.traces))]

    def sheet(self, kind: str = "run", pictures: int = 4) -> Image:
        """A contact sheet: one column per method, each picture above its token map (`kind`, one scale for all)."""
        from .sheet import contact_sheet

        return contact_sheet(self, kind, pictures)

    def __str__(self) -> str:
        return self.table()


def _summaries(item: Row) -> list[dict[str, Any]]:
    return [trace.summary() for trace in item.traces]


def verdict(name: str, tokens: Tensor, baseline: Tensor, traces: list[Trace]) -> str:
    """Say whether codes [B, H, W] equal the baseline's, and if not, where and how close the call was."""
    pictures = "the picture is" if len(tokens) == 1 else f"all {len(tokens)} pictures are"
    differ = (tokens != baseline).flatten(1)
    if not differ.any():
        return f"{name}: {pictures} plain decoding's, token for token"
    rows = differ.any(1).nonzero()[:, 0].tolist()
    first = int(differ[rows[0]].nonzero()[0])
    margin = traces[rows[0]].min_margin
    return (
        f"{name}: {len(rows)} of {len(tokens)} pictures differ from plain decoding's, the first from token {first}; "
        f"its smallest margin was {margin:.1e}, and a margin near the rounding error decides a token either way"
    )


def is_seeded(case: Case) -> bool:
    """Whether a case draws plain decoding's picture by construction."""
    config = method_class(case.method).config_class.from_options(case.options)
    return getattr(config, "rule", None) == "seeded" and case.build is None


@torch.no_grad()
def compare(
    prompt: str,
    methods: Iterable[Any] = (AR, "sjd"),
    model: Any = None,
    seed: int = 0,
    repeats: int = 1,
    warmup: bool = True,
    family: Family | None = None,
    **call: Any,
) -> Comparison:
    """Draw one prompt with several methods and the same seed, and time them against plain decoding.

    Args:
        prompt: what to draw.
        methods: names, `"name:option=value,..."`, or (name, options); plain decoding ("ar") is always run first.
        model: folder or Hub id; `foredraft.DEMO` if None. family: one that is loaded already, instead.
        seed: as in `torch.Generator().manual_seed(seed)`.
        repeats: rounds of timing; every round draws with every method in turn, seconds and speed-ups are medians.
        warmup: draw a few tokens with every method before timing.
        **call: arguments of the pipelines' call: num_images_per_prompt, guidance_scale, temperature, top_k, ...

    Returns:
        `Comparison`; print it, or use `.table()`, `.to_dict()`, `.sheet()` and `.rows`.

    Raises:
        ValueError or TypeError in one sentence: unknown method or option, a model that lacks a method's components.
    """
    if not isinstance(repeats, int) or repeats < 1:
        raise ValueError(f"repeats must be a whole number of at least 1, got {repeats!r}")
    cases = [parse_case(spec) for spec in ([methods] if isinstance(methods, str) else methods)]
    plain = next((case for case in cases if case.method == AR), Case(AR))
    cases = [plain, *(case for case in cases if case is not plain)]
    if family is None:
        from .. import DEMO

        family = Family(DEMO if model is None else model)
    for case in cases:
        family.pipeline(case.method)
    if warmup:
        for case in cases:
            family.warm_up(case, prompt, **call)
    seconds: list[list[float]] = [[] for _ in cases]
    outputs: list[Any] = [None] * len(cases)
    for _ in range(repeats):
        for number, case in enumerate(cases):
            output, taken = family.draw(case, prompt, seed, **call)
            seconds[number].append(taken)
            outputs[number] = outputs[number] or output
    return tabulate(prompt, seed, cases, seconds, outputs)


def tabulate(
    prompt: str, seed: int, cases: Sequence[Case], seconds: Sequence[Sequence[float]], outputs: Sequence[Any]
) -> Comparison:
    """The comparison of what was drawn: plain decoding first; seconds: of every case, one per repeat; outputs: one per case."""
    rows = []
    for case, times, output in zip(cases, seconds, outputs, strict=True):
        totals = Totals.of(output.traces)
        rows.append(
            Row(
                case.name,
                case.method,
                case.options,
                median(times),
                median(base / own for base, own in zip(seconds[0], times, strict=True)),
                totals.tokens_per_forward,
                totals.mean_acceptance_length,
                totals.acceptance_rate,
                totals.exact,
                totals.relaxation,
                bool((output.tokens == outputs[0].tokens).all()),
                is_seeded(case),
                output.images,
                output.tokens,
                output.traces,
            )
        )
    return Comparison(prompt, seed, len(seconds[0]), rows)
