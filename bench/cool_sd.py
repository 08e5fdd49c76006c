"""`foredraft bench cool_sd`: the ablations of Cool-SD on the embedded family.

After the paper: how far the drafter is from the target (Table 3), the annealing schedule (Fig. 5, with the clamp and the
published form beside it), LANTERN++'s residual over k (Fig. 4), and Cool-SD beside SJD (Table 2). See `quality.py` for what is
measured; finished settings are kept as in `pareto`.
"""

from __future__ import annotations

from typing import Any

from .cases import Case, Family
from .harness import Report, measure, prompts_for
from .pareto import WINDOW, Sweep, curves
from .quality import ANEW, CALL, HEADERS, Drawing, Point, available
from .quality import measure as measure_quality

DELTAS = (1.1, 2.0, 3.0)
KS = (3, 10, 30, 100, 300)


def schedules() -> list[Sweep]:
    """Fig. 5: each schedule over its budget, drafts of five tokens."""
    shapes: dict[str, dict[str, Any]] = {
        "exponential": {"rule": "annealed"},
        "linear": {"rule": "annealed", "schedule": "linear"},
        "uniform": {"rule": "uniform"},
        "exponential, as published": {"rule": "annealed", "clamp": False},
    }
    return [Sweep(name, "cool_sd", options, "delta", DELTAS) for name, options in shapes.items()]


def residuals() -> list[Sweep]:
    """Fig. 4: LANTERN++ with its own residual and with the optimal one, over k."""
    rule = {"rule": "lantern++", "lam": 2.0}
    return [Sweep(f"LANTERN++, {name}", "cool_sd", {**rule, "resample": name}, "k", KS) for name in ("paper", "optimal")]


def neighbours() -> list[Sweep]:
    """Table 2: Cool-SD and what is lossless."""
    return [
        Sweep("EAGLE, exact", "cool_sd", {"rule": "exact"}),
        Sweep("SJD", "sjd", {**WINDOW, "rule": "exact", "tail": "resample"}),
        Sweep("SJD, coupled", "sjd", {**WINDOW, "rule": "exact", "tail": "coupled"}),
    ]


def run(family: Family, quick: bool, repeats: int, drawing: Drawing = ANEW) -> Report:
    """All ablations."""
    groups = {"schedule": schedules(), "residual": residuals(), "SJD": neighbours()}
    planned = {name: [s for sweep in sweeps for s in sweep.settings(quick)] for name, sweeps in groups.items()}
    settings, notes = available(family, [setting for part in planned.values() for setting in part])
    points = measure_quality(family, settings, quick, repeats, drawing, "cool_sd")
    found = {point.name: point for point in points}
    parts = {name: [found[s.name] for s in part if s.name in found] for name, part in planned.items()}
    cooled = [point for point in parts["schedule"] if point.series == "exponential"]
    tables = [
        ("Annealing schedule (Fig. 5)", HEADERS, _rows(points[0], parts["schedule"])),
        ("LANTERN++: residual over k (Fig. 4)", HEADERS, _rows(points[0], parts["residual"])),
        ("Cool-SD and SJD (Table 2)", HEADERS, _rows(points[0], [*parts["SJD"], *cooled])),
    ]
    if repeats and any(setting.case.method == "cool_sd" for setting in settings):
        tables.insert(0, ("Drafter against target: mean TV(p, q) (Table 3)", *table3(family, 1 if quick else 8)))
    data = {"plain": points[0].to_dict(), **{name: [point.to_dict() for point in part] for name, part in parts.items()}}
    data["tv"] = tables[0][2] if len(tables) > 3 else []
    return Report("cool_sd", tables, data, lambda figure: plot(figure, points[0], parts), (16, 9), notes)


def _rows(plain: Point, points: list[Point]) -> list[list[str]]:
    return [point.row() for point in (plain, *points)]


def table3(family: Family, pictures: int) -> tuple[tuple[str, ...], list[list[str]]]:
    """TV(p, q) of the draft head where a draft is tested, H(p) and acceptance, over ways of sampling, chains of five."""
    calls: dict[str, dict[str, Any]] = {
        "T = 1, all codes": CALL,
        "the family's default": {},
        "T = 1, no guidance": {**CALL, "guidance_scale": 1.0},
    }
    rows = []
    for name, call in calls.items():
        result = measure(family, [Case("cool_sd", {"rule": "exact"})], prompts_for(family), 1, pictures, call, laws=1)[1]
        tv = "" if result.tv is None else f"{result.tv:.3f}"
        rows.append([name, tv, f"{result.entropy:.2f}", f"{result.totals.acceptance_rate:.0%}"])
    return ("sampling", "TV(p, q)", "H(p)", "accepted"), rows


def plot(figure: Any, plain: Point, parts: dict[str, list[Point]]) -> None:
    """Acceptance length over divergence for the schedules and for Table 2; divergence over k for the residuals."""
    figure.suptitle("Cool-SD's ablations, T = 1, chains of five (up and left is better)")
    axes = figure.subplots(2, 2)

    def length(point: Point) -> float:
        return point.totals.mean_acceptance_length

    for axis, title, place, error in (
        (axes[0][0], "Schedule (Fig. 5): divergence (nats per place)", lambda p: p.divergence, lambda p: p.divergence_error),
        (axes[0][1], "Schedule (Fig. 5): log-likelihood lost (nats per token)", lambda p: p.lost, lambda p: p.lost_error),
    ):
        curves(axis, [plain, *parts["schedule"]], place, error, length)
        axis.set_title(title, fontsize=11)
        axis.set_ylabel("acceptance length")
        axis.legend(frameon=False, fontsize=8)
    _over_k(axes[1][0], plain, parts["residual"])
    cooled = [point for point in parts["schedule"] if point.series == "exponential"]
    both = [plain, *parts["SJD"], *cooled]
    curves(axes[1][1], both, lambda p: p.divergence, lambda p: p.divergence_error, lambda p: p.speedup)
    axes[1][1].set_title("Cool-SD and SJD (Table 2): speed-up over divergence", fontsize=11)
    axes[1][1].set_ylabel("speed-up, one picture")
    axes[1][1].legend(frameon=False, fontsize=8)


def _over_k(axis: Any, plain: Point, points: list[Point]) -> None:
    """Fig. 4: divergence over k, one line per residual."""
    low, high = plain.divergence - plain.divergence_error, plain.divergence + plain.divergence_error
    axis.axhspan(low, high, color="#dddddd", label="plain decoding")
    for name, colour in zip(dict.fromkeys(point.series for point in points), ("#d55e00", "#0072b2"), strict=False):
        line = [point for point in points if point.series == name]
        places = [point.options["k"] for point in line]
        axis.errorbar(
            places,
            [point.divergence for point in line],
            yerr=[point.divergence_error for point in line],
            fmt="o-",
            color=colour,
            label=name,
        )
    if points:
        axis.set_xscale("log")
        ticks = sorted({point.options["k"] for point in points})
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.set_xlabel("k")
    axis.set_ylabel("divergence (nats per place)")
    axis.set_title("LANTERN++: whose residual (Fig. 4)", fontsize=11)
    axis.legend(frameon=False, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
