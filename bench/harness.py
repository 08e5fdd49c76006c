"""The one harness of all benches: interleaved timing, counts, laws, a report with JSON and a plot.

A bench is a file beside this one with `run(family, quick, repeats) -> Report`; its name is the file's.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from .cases import Case, Family
from .compare import AR
from .record import Laws, recording
from .report import Totals, machine, table

NAMES = ("fox", "red apple on blue", "owl on white", "rocket", "teapot on green", "butterfly", "violin", "house on yellow")
HEADERS = ("case", "seconds", "min..max", "speed-up", "TPF", "length", "accepted", "engine", "H(p)", "TV(p,q)", "law")


def benches() -> tuple[str, ...]:
    """Names of all benches: the files here that define `run(family, ...)`."""
    here = sorted(Path(__file__).parent.glob("*.py"))
    return tuple(path.stem for path in here if re.search(r"\ndef run\(\s*family:", path.read_text(encoding="utf-8")))


def bench(name: str) -> Callable[..., Report]:
    """The `run` of a bench: (family, quick, repeats), and a `quality.Drawing` where it `resumes`.

    Raises ValueError that names the nearest one.
    """
    known = benches()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"there is no bench {name!r}: choose one of {', '.join(known)}{hint}")
    return importlib.import_module(f".{name}", __package__).run


def resumes(run: Callable[..., Report]) -> bool:
    """Whether a bench keeps its finished settings in a file and goes on from there."""
    return "drawing" in inspect.signature(run).parameters


def check_plotting() -> None:
    """Raise ModuleNotFoundError in one sentence if the plots cannot be drawn: before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the benches draw with matplotlib: pip install 'foredraft[bench]'") from error


def prompts_for(family: Family, wanted: Sequence[str] = NAMES) -> list[str]:
    """The wanted prompts, as far as the family can read them; else its own names."""
    tokenizer = family.pipeline(AR).tokenizer
    known = getattr(tokenizer, "ids", None)
    if known is None:
        return list(wanted)
    return [text for text in wanted if all(word in known for word in text.split())] or list(tokenizer.names)


@dataclass
class Result:
    """One case, measured. seconds, speedups, engine: one number per round; batch: images drawn at once.

    speedups: seconds of plain decoding just before, by the case's own. entropy in nats; tv in 0..1.
    """

    name: str
    method: str
    options: dict[str, Any]
    call: dict[str, Any]
    batch: int
    totals: Totals
    forwards: float
    tokens: int
    seconds: list[float] = field(default_factory=list)
    speedups: list[float] = field(default_factory=list)
    engine: list[float] = field(default_factory=list)
    entropy: float | None = None
    tv: float | None = None

    @property
    def speedup(self) -> float:
        """Median over the rounds."""
        return median(self.speedups)

    def row(self) -> list[str]:
        """One line under `HEADERS`."""
        return [
            self.name,
            f"{median(self.seconds):.3f}",
            f"{min(self.seconds):.2f}..{max(self.seconds):.2f}",
            f"{self.speedup:.2f}x",
            f"{self.totals.tokens_per_forward:.2f}",
            f"{self.totals.mean_acceptance_length:.2f}",
            f"{self.totals.acceptance_rate:.0%}" if self.tv is not None else "",
            f"{median(self.engine):.1%}",
            "" if self.entropy is None else f"{self.entropy:.2f}",
            "" if self.tv is None else f"{self.tv:.3f}",
            "exact" if self.totals.exact else "relaxed",
        ]

    def to_dict(self) -> dict[str, Any]:
        """For JSON, medians included."""
        values = dataclasses.asdict(self)
        summary = {"seconds_median": median(self.seconds), "speedup": self.speedup, "engine_share": median(self.engine)}
        return {**values, **summary}


def measure(
    family: Family,
    cases: Sequence[Case],
    prompts: Sequence[str],
    repeats: int,
    batch: int = 1,
    call: dict[str, Any] | None = None,
    laws: int = 2,
    block: int = 8,
) -> list[Result]:
    """Time cases round-robin, plain decoding first in every round, and record their laws afterwards.

    Args:
        family: the models. cases: what to run; "ar" is put in front unless it is there.
        prompts: round r draws `batch` of them, starting at r, with seed r: the same for every case.
        repeats: rounds. batch: images at once. call: arguments for every case. laws: untimed rounds with recording.
        block: plain decoding is timed anew before every so many cases, so that a ratio compares neighbours in time.

    Returns:
        one `Result` per case, plain decoding first.
    """
    call = dict(call or {})
    plain = next((case for case in cases if case.method == AR), Case(AR))
    cases = [plain, *(case for case in cases if case is not plain)]

    def texts(case: Case, number: int) -> list[str]:
        own = case.prompts or prompts
        return [own[(number * batch + i) % len(own)] for i in range(batch)]

    for case in cases:
        family.warm_up(case, texts(case, 0), **call)
    traces: list[list[Any]] = [[] for _ in cases]
    seconds: list[list[float]] = [[] for _ in cases]
    speedups: list[list[float]] = [[] for _ in cases]
    engine: list[list[float]] = [[] for _ in cases]
    bar = tqdm(total=repeats * len(cases), unit=" runs", leave=False, disable=None)
    for number in range(repeats):
        base = 0.0
        for place, case in enumerate(cases):
            if place and place % block == 0:
                base = family.draw(plain, texts(plain, number), number, **call)[1]
            output, taken = family.draw(case, texts(case, number), number, **call)
            base = base or taken
            seconds[place].append(taken)
            speedups[place].append(base / taken)
            engine[place].append(output.traces[0].engine_share)
            traces[place] += output.traces
            bar.update()
    bar.close()
    results = []
    for place, case in enumerate(cases):
        forwards = sum(trace.target_forwards for trace in traces[place]) / len(traces[place])
        result = Result(
            case.name,
            case.method,
            case.options,
            {**call, **case.call},
            batch,
            Totals.of(traces[place]),
            forwards,
            traces[place][0].tokens,
            seconds[place],
            speedups[place],
            engine[place],
        )
        noted = Laws()
        recorded = dataclasses.replace(case, build=recording(noted, case.build))
        for number in range(min(laws, repeats)):
            family.draw(recorded, texts(case, number), number, **call)
        result.entropy, result.tv = noted.entropy, noted.tv
        results.append(result)
    return results


@dataclass
class Report:
    """What a bench found. tables: (title, headers, rows); data: everything, for JSON; plot: draws on a matplotlib figure."""

    name: str
    tables: list[tuple[str, Sequence[str], list[list[str]]]]
    data: dict[str, Any]
    plot: Callable[[Any], None]
    size: tuple[float, float] = (12, 7)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The tables and notes as Markdown."""
        facts = machine()
        head = f"{facts['processor']}, {facts['threads']} thread(s), torch {facts['torch']}, {facts['date']}"
        parts = [head, *(f"{title}\n\n{table(headers, rows)}" for title, headers, rows in self.tables), *self.notes]
        return "\n\n".join(parts)

    def write(self, json_path: Path, png_path: Path) -> None:
        """Write the data and the plot."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        record = {"bench": self.name, "machine": machine(), "notes": self.notes, **self.data}
        json_path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        figure = Figure(figsize=self.size, layout="constrained")
        FigureCanvasAgg(figure)
        self.plot(figure)
        figure.savefig(png_path, dpi=130)
