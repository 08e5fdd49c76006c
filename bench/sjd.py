"""`foredraft bench sjd`: what the knobs of SJD and SJD++ do.

After the ablations of SJD++: sampling randomness against vanilla Jacobi decoding (Fig. 5), refinement switched off (Fig. 12),
initialisation on plain pictures (Fig. 13), window size (Table 10).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..decoding.drafters.jacobi import INITS, TAILS, JacobiDrafter
from ..decoding.verify import Match
from ..pipelines.base import Method
from .cases import Case, Family
from .harness import HEADERS, Report, Result, measure, prompts_for

PLAIN = ("star on white", "sun on yellow")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")


def vanilla_jacobi(pipeline: Any, run: Any) -> Method:
    """Jacobi decoding as it was for greedy text: redraw the window independently, keep what happens to be drawn again.

    The comparison draw is plain decoding's own, so the law is the target's; acceptance is sum_x p(x) q(x), near 1 only
    where sampling is nearly greedy.
    """
    dtype = torch.float64 if run.dtype == torch.float64 else torch.float32
    window = pipeline.window(run.config, run.device)
    drafter = JacobiDrafter(window, pipeline.target.vocab_size, "resample", run.config.init, dtype=dtype)
    return Method(drafter, Match())


def sjd(tail: str, call: dict[str, Any] | None = None, label: str = "", **options: Any) -> Case:
    """SJD with an exact tail, or SJD++ ("reuse"), or "seeded"."""
    law = {"rule": "seeded"} if tail == "seeded" else {"rule": "exact", "tail": tail}
    return Case("sjd", {**law, **options}, call or {}, label)


def sweeps(quick: bool, plain: tuple[str, ...]) -> dict[str, list[Case]]:
    """All cases, by sweep."""
    windows = (1, 8, 16) if quick else (1, 4, 8, 12, 16, 24, 32, 64)
    tops = (1, 10) if quick else (1, 10, 100, 0)
    taus = (0.0, 0.5) if quick else (0.0, 0.25, 0.5, 0.75, 1.0)
    inits = ("above", "random") if quick else INITS
    window = [sjd(tail, None, f"{tail} W={w}", window=w) for w in windows for tail in ("seeded", "resample", "reuse")]
    init = [sjd("resample", None, f"init {name}", init=name) for name in inits]
    pattern = [
        Case("sjd", case.options, label=f"{case.label}, plain picture", prompts=plain)
        for case in (sjd("resample", None, f"init {name}", init=name) for name in inits)
    ]
    randomness = []
    for top in tops:
        name, call = f"top-{top}" if top else "all codes", {"top_k": top}
        randomness += [
            Case("sjd", {"rule": "seeded"}, call, f"Jacobi, {name}", build=vanilla_jacobi),
            sjd("resample", call, f"SJD, {name}"),
            sjd("reuse", call, f"SJD++, {name}"),
            sjd("seeded", call, f"seeded, {name}"),
        ]
    greedy = [sjd("seeded", {"temperature": 0.0}, "greedy Jacobi, T=0")]
    refine = [
        sjd("resample", None, f"refine {'on' if on else 'off'}, init {name}", refine=on, init=name)
        for name in ("random", "left", "above")
        for on in (True, False)
    ]
    return {
        "window": window,
        "tail": [sjd(tail, None, f"tail {tail}") for tail in ("seeded", *TAILS)],
        "init": [*init, *pattern],
        "tau": [sjd("reuse", None, f"tau {tau:g}", tau=tau) for tau in taus],
        "randomness": [*greedy, *randomness],
        "refine": refine,
    }


def run(family: Family, quick: bool, repeats: int) -> Report:
    """Measure all sweeps in one interleaved run at T = 1, full vocabulary."""
    plan = sweeps(quick, tuple(prompts_for(family, PLAIN)))
    cases = [case for group in plan.values() for case in group]
    call = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    results = measure(family, cases, prompts_for(family), repeats, call=call, laws=1)
    parts, at = {}, 1
    for name, group in plan.items():
        parts[name] = results[at : at + len(group)]
        at += len(group)
    tables = [(name, HEADERS, [results[0].row(), *(result.row() for result in part)]) for name, part in parts.items()]
    tables.append(("Window size in SJD++ (Table 10)", *_table10(parts["window"])))
    data = {"ar": results[0].to_dict(), "sweeps": {name: [r.to_dict() for r in part] for name, part in parts.items()}}
    return Report("sjd", tables, data, lambda figure: plot(figure, parts), (15, 8.5))


def _table10(results: Iterable[Result]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Window, forwards per image (NFE), forwards per token (step compression), TPF and speed-up of SJD++."""
    rows = [
        [
            str(result.options["window"]),
            f"{result.forwards:.1f}",
            f"{result.forwards / result.tokens:.3f}",
            f"{result.totals.tokens_per_forward:.2f}",
            f"{result.speedup:.2f}x",
        ]
        for result in results
        if result.options.get("tail") == "reuse"
    ]
    return ("window", "NFE", "step compression", "TPF", "speed-up"), rows


def plot(figure: Any, parts: dict[str, list[Result]]) -> None:
    """Six panels."""
    axes = figure.subplots(2, 3)
    figure.suptitle("SJD and SJD++: tokens per forward, T = 1 and the full vocabulary unless said otherwise")
    _lines(axes[0][0], parts["window"], "window", ("seeded", "resample", "reuse"), "Window (Table 10)", speed=True)
    _bars(axes[0][1], parts["tail"], "Tail", "tail ")
    _randomness(axes[0][2], [result for result in parts["randomness"] if "temperature" not in result.name])
    plain = [result for result in parts["init"] if "plain" in result.name]
    usual = [result for result in parts["init"] if "plain" not in result.name]
    _pairs(axes[1][0], [("usual pictures", usual), ("plain pictures", plain)], "Initialisation (Fig. 13)", "init ")
    _bars(axes[1][1], parts["tau"], "SJD++: tau", "tau ")
    on = [result for result in parts["refine"] if " on," in result.name]
    off = [result for result in parts["refine"] if " off," in result.name]
    _pairs(axes[1][2], [("refined", on), ("not refined", off)], "Refinement (Fig. 12)", "refine on, init ")


def _tpf(result: Result) -> float:
    return result.totals.tokens_per_forward


def _axis(axis: Any, title: str, label: str = "tokens per forward") -> None:
    axis.set_title(title, fontsize=11)
    axis.set_ylabel(label)
    axis.axhline(1, color="#888888", linewidth=0.8, linestyle=":")
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_ylim(bottom=0)


def _lines(axis: Any, results: list[Result], key: str, kinds: tuple[str, ...], title: str, speed: bool) -> None:
    """Tokens per forward over an option, one line per tail; dashed: speed-up over plain decoding."""
    for kind, colour in zip(kinds, COLOURS, strict=False):
        chosen = [result for result in results if result.name.startswith(kind)]
        places = [result.options[key] for result in chosen]
        axis.plot(places, [_tpf(result) for result in chosen], "o-", color=colour, label=kind)
        if speed:
            axis.plot(places, [result.speedup for result in chosen], "--", color=colour, linewidth=1)
    axis.set_xscale("log", base=2)
    ticks = sorted({result.options[key] for result in results})
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.set_xlabel("tokens drafted per forward (dashed: speed-up)")
    axis.legend(frameon=False, fontsize=8)
    _axis(axis, title, "tokens per forward, speed-up")


def _bars(axis: Any, results: list[Result], title: str, prefix: str) -> None:
    """Tokens per forward with the speed-up written on the bar."""
    names = [result.name.removeprefix(prefix) for result in results]
    bars = axis.bar(names, [_tpf(result) for result in results], color=COLOURS[0])
    axis.bar_label(bars, [f"{result.speedup:.2f}x" for result in results], fontsize=8)
    _axis(axis, f"{title} (on the bars: speed-up)")


def _pairs(axis: Any, series: list[tuple[str, list[Result]]], title: str, prefix: str) -> None:
    """Grouped bars."""
    names = [result.name.removeprefix(prefix) for result in series[0][1]]
    width = 0.8 / len(series)
    for number, (label, results) in enumerate(series):
        places = [place + (number - (len(series) - 1) / 2) * width for place in range(len(results))]
        bars = axis.bar(places, [_tpf(result) for result in results], width, color=COLOURS[number], label=label)
        axis.bar_label(bars, fmt="%.1f", fontsize=7)
    axis.margins(y=0.3)
    axis.set_xticks(range(len(names)), names, fontsize=8)
    axis.legend(frameon=False, fontsize=8)
    _axis(axis, title)


def _randomness(axis: Any, results: list[Result]) -> None:
    """Fig. 5: methods over top-k."""
    series: dict[str, list[Result]] = {}
    for result in results:
        kind, _, _ = result.name.partition(", ")
        if "greedy" not in kind:
            series.setdefault(kind, []).append(result)
    _pairs(axis, list(series.items()), "Sampling randomness (Fig. 5)", "")
    count = len(next(iter(series.values())))
    axis.set_xticks(range(count), [result.name.partition(", ")[2] for result in next(iter(series.values()))])
