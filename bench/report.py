"""Numbers for people: totals over traces, text tables, facts about the machine."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..decoding.trace import Trace

HEADERS = (
    "method",
    "seconds",
    "speed-up",
    "TPF",
    "acceptance length",
    "expected length",
    "acceptance rate",
    "skipped rounds",
    "relaxation per token",
    "law",
)


@dataclass
class Totals:
    """Traces in sum: TPF, mean acceptance length, acceptance rate as each trace counts them.

    relaxation: mean cost per verified token, None where it cannot be measured; engine_share: of the time without codec;
    expected_length: per round, None where no coins are flipped; skip_ratio: of the rounds, those without a target forward.
    """

    tokens_per_forward: float
    mean_acceptance_length: float
    acceptance_rate: float
    exact: bool
    relaxation: float | None
    engine_share: float
    expected_length: float | None = None
    skip_ratio: float = 0.0

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> Totals:
        """Sum up; at least one trace."""
        tokens = sum(trace.tokens for trace in traces)
        rounds, forwards = sum(trace.rounds for trace in traces), sum(trace.target_forwards for trace in traces)
        judged = sum(trace.judged for trace in traces)
        costs = [trace.relaxation_per_token for trace in traces]
        known = [cost for cost in costs if cost is not None]
        return cls(
            tokens / max(1, forwards),
            tokens / max(1, rounds),
            sum(trace.accepted for trace in traces) / judged if judged else 0.0,
            all(trace.exact for trace in traces),
            sum(known) / len(known) if len(known) == len(costs) else None,
            sum(trace.engine_share for trace in traces) / len(traces),
            _per_round(traces),
            1.0 - forwards / rounds if rounds else 0.0,
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def _per_round(traces: Sequence[Trace]) -> float | None:
    """Expected tokens per round, over all rounds."""
    rounds = sum(trace.rounds for trace in traces)
    if not rounds or any(trace.expected_length is None for trace in traces):
        return None
    return sum((trace.expected_length or 0.0) * trace.rounds for trace in traces) / rounds


def row(name: str, seconds: float, speedup: float | None, totals: Totals, judged: bool = True) -> list[str]:
    """One line under `HEADERS`; a method that drafts nothing has no acceptance rate."""
    return [
        name,
        f"{seconds:.2f}",
        "" if speedup is None else f"{speedup:.2f}x",
        f"{totals.tokens_per_forward:.2f}",
        f"{totals.mean_acceptance_length:.2f}",
        "" if totals.expected_length is None or not judged else f"{totals.expected_length:.2f}",
        f"{totals.acceptance_rate:.0%}" if judged else "",
        f"{totals.skip_ratio:.0%}" if totals.skip_ratio else "",
        "" if totals.exact or totals.relaxation is None else f"{totals.relaxation:.4f}",
        "exact" if totals.exact else "relaxed",
    ]


def notes(name: str, traces: Sequence[Trace]) -> list[str]:
    """What the traces of a method want a user to know, each once."""
    return list(dict.fromkeys(f"{name}: {note}" for trace in traces for note in trace.notes))


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An aligned Markdown table; the first column is text, the others are aligned right. Columns without a value are left out."""
    filled = [column for column in range(len(headers)) if not rows or any(str(line[column]) for line in rows)]
    headers, rows = [headers[column] for column in filled], [[line[column] for column in filled] for line in rows]
    widths = [max(len(str(line[column])) for line in (headers, *rows)) for column in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        first = str(cells[0]).ljust(widths[0])
        return "| " + " | ".join([first, *(str(c).rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([line(headers), rule, *(line(cells) for cells in rows)])


def machine() -> dict[str, Any]:
    """Where and when: processor, cores, threads, versions, date."""
    import torch

    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
