"""`foredraft bench pareto`: what every relaxed method gains for what it loses.

Each method's knob is swept over the embedded family at T = 1 and the full vocabulary; exact methods stand beside them. See
`quality.py` for what is measured. 400 pictures per setting take minutes each: finished settings are kept, and a bench that was
ended goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .cases import Case, Family
from .harness import Report
from .quality import ANEW, CALL, HEADERS, Drawing, Point, Setting, available, measure

MARKS = "osD^"
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#8c564b",
    "#7f7f7f",
    "#bcbd22",
    "#17becf",
    "#000000",
)


@dataclass(frozen=True)
class Sweep:
    """A curve: one method, one knob. values: what the knob is set to, the first and last of them when it is quick."""

    series: str
    method: str
    options: dict[str, Any]
    knob: str = ""
    values: tuple[Any, ...] = ()
    call: dict[str, Any] = field(default_factory=dict)

    def settings(self, quick: bool = False) -> list[Setting]:
        """One setting per value, or the only one."""
        call = {**CALL, **self.call}
        if not self.knob:
            return [Setting(self.series, Case(self.method, self.options, call))]
        values = dict.fromkeys((self.values[0], self.values[-1]) if quick else self.values)
        cases = [(value, Case(self.method, {**self.options, self.knob: value}, call)) for value in values]
        return [Setting(self.series, case, f"{self.knob}={value:g}") for value, case in cases]


WINDOW = {"window": 16}
"""The family's own on a CPU, wherever the pictures are drawn."""

# A relaxed method joins by a line here. LANTERN's k = 1000 is for 16,384 codes; 32 is about that share of the embedded family's.
SWEEPS = (
    Sweep("EAGLE, exact", "cool_sd", {"rule": "exact"}),
    Sweep("SJD, exact", "sjd", {**WINDOW, "rule": "exact", "tail": "coupled"}),
    Sweep("Cool-SD", "cool_sd", {"rule": "annealed"}, "delta", (1.1, 1.5, 2.0, 3.0, 4.0)),
    Sweep("Cool-SD, as published", "cool_sd", {"rule": "annealed", "clamp": False}, "delta", (1.1, 2.0, 4.0)),
    Sweep("UniformRSD", "cool_sd", {"rule": "uniform"}, "delta", (1.1, 1.5, 2.0, 3.0)),
    Sweep("LANTERN, k=32", "cool_sd", {"rule": "lantern", "k": 32}, "tvd", (0.05, 0.1, 0.2, 0.4)),
    Sweep("LANTERN++, k=10", "cool_sd", {"rule": "lantern++"}, "lam", (0.5, 1.0, 2.0, 5.0)),
    Sweep("EAGLE-2 + LANTERN", "vvs", {"schedule": "never", "k": 32}, "tvd", (0.1, 0.2, 0.4)),
    Sweep("VVS, uniform", "vvs", {"schedule": "uniform", "k": 32}, "interval", (4, 3, 2)),
    Sweep("VVS, dynamic", "vvs", {"k": 32}, "threshold", (0.8, 0.7, 0.6, 0.4)),
    Sweep("LANTERN++, its residual", "cool_sd", {"rule": "lantern++", "resample": "paper"}, "lam", (2.0, 5.0)),
    Sweep("SJD++", "sjd", {**WINDOW, "rule": "exact", "tail": "reuse"}, "tau", (0.75, 0.5, 0.25, 0.0)),
    Sweep("GSD", "sjd", {**WINDOW, "rule": "clustered", "tail": "coupled"}),
)


def run(family: Family, quick: bool, repeats: int, drawing: Drawing = ANEW) -> Report:
    """Measure every sweep the folder has the components for."""
    settings, notes = available(family, [setting for sweep in SWEEPS for setting in sweep.settings(quick)])
    points = measure(family, settings, quick, repeats, drawing)
    title = f"{points[0].pictures} pictures per setting, T = 1, full vocabulary; speed-up of one picture at a time"
    tables = [(title, HEADERS, [point.row() for point in points])]
    data = {"points": [point.to_dict() for point in points]}
    return Report("pareto", tables, data, lambda figure: plot(figure, points), (16, 9), [*read(points), *notes])


def read(points: list[Point]) -> list[str]:
    """What the points say, in sentences."""
    floor, others = points[0], points[1:]
    exact = [point for point in others if point.totals.exact]
    at = f"{floor.divergence:.4f} ± {floor.divergence_error:.4f}"
    lines = [f"Floor: plain decoding with other seeds is {at} nats away from itself."]
    far = [point.name for point in exact if _above(point, floor) > 3]
    if exact:
        lines.append(
            f"Exact, and yet more than three errors above the floor: {', '.join(far)}."
            if far
            else f"All {len(exact)} exact settings are within three errors of the floor."
        )
    kept = [point for point in others if not point.totals.exact and _above(point, floor) <= 2]
    if kept:
        best = max(kept, key=lambda point: point.totals.tokens_per_forward)
        lines.append(
            f"Fewest forwards among the relaxed settings that {floor.pictures} pictures do not tell from exact decoding by "
            f"divergence: {best.name}, {best.totals.tokens_per_forward:.2f} tokens per forward."
        )
    return lines


def _above(point: Point, floor: Point) -> float:
    """How far a divergence is above the floor, in errors of the difference (taken as independent)."""
    return (point.divergence - floor.divergence) / max(1e-9, (point.divergence_error**2 + floor.divergence_error**2) ** 0.5)


# -- the plot --------------------------------------------------------------------------------------------------------

Axis = tuple[str, Callable[[Point], float], Callable[[Point], float]]
LOSSES: tuple[Axis, ...] = (
    ("divergence from exact decoding (nats per place)", lambda p: p.divergence, lambda p: p.divergence_error),
    ("log-likelihood lost (nats per token)", lambda p: p.lost, lambda p: p.lost_error),
    ("pictures that miss the prompt", lambda p: 1 - p.names, lambda p: p.names_error),
)
GAINS: tuple[tuple[str, Callable[[Point], float]], ...] = (
    ("acceptance length", lambda p: p.totals.mean_acceptance_length),
    ("speed-up, one picture", lambda p: p.speedup),
)


def plot(figure: Any, points: list[Point]) -> None:
    """Gains over losses: up and left is better; the grey band is plain decoding with other seeds, one error each way."""
    figure.suptitle("Relaxed methods, T = 1: what they gain for what they lose (up and left is better)")
    panels = figure.subplots(len(GAINS), len(LOSSES), sharey="row")
    for line, (gain, height) in zip(panels, GAINS, strict=True):
        for axis, (loss, place, error) in zip(line, LOSSES, strict=True):
            curves(axis, points, place, error, height)
            axis.set_xlabel(loss)
        line[0].set_ylabel(gain)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)


def curves(
    axis: Any,
    points: list[Point],
    place: Callable[[Point], float],
    error: Callable[[Point], float],
    height: Callable[[Point], float],
) -> None:
    """One panel: a line per series, knob values beside its ends, the floor as a band."""
    floor = points[0]
    axis.axvspan(place(floor) - error(floor), place(floor) + error(floor), color="#dddddd", label="plain decoding")
    axis.axvline(place(floor), color="#888888", linewidth=0.8)
    names = list(dict.fromkeys(point.series for point in points[1:]))
    for number, name in enumerate(names):
        curve = [point for point in points[1:] if point.series == name]
        where, high = [place(point) for point in curve], [height(point) for point in curve]
        axis.errorbar(
            where,
            high,
            xerr=[error(point) for point in curve],
            fmt=MARKS[number // len(COLOURS)] + ("-" if len(curve) > 1 else ""),
            color=COLOURS[number % len(COLOURS)],
            linewidth=1.2,
            elinewidth=0.6,
            markersize=4,
            label=name,
        )
        for point in {id(each): each for each in (curve[0], curve[-1])}.values():
            axis.annotate(point.knob, (place(point), height(point)), (4, 4), textcoords="offset points", fontsize=7)
    axis.spines[["top", "right"]].set_visible(False)
