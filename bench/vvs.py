"""`foredraft bench vvs`: the ablations of partial verification skipping on the embedded family.

After the paper: what verification decides (replacing its result, Table 4), stale features (Tables 3, 5 and 6, Fig. 3), how much
drafted paths look alike (Fig. 2), which path is committed and how much of it (Table 2, Fig. 8), and the schedules beside the same
method without skips (Fig. 7). See `quality.py` for what is measured; finished settings are kept as in `pareto`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..decoding.drafters.head import HeadDrafter
from ..decoding.noise import SKIP, Noise
from ..decoding.sequence import Sequence
from ..decoding.trace import Trace
from ..decoding.types import Draft, Scores, Verdict, Verifier
from ..pipelines.vvs import Paths, SkippingDrafter
from .cases import Case, Family
from .harness import Report, prompts_for
from .pareto import Sweep, curves
from .quality import ANEW, CALL, Drawing, Point, Setting, available
from .quality import measure as measure_quality

HEADERS = ("setting", "TPF", "length", "skipped", "speed-up", "divergence", "log p lost", "names")
SHARES = (0.0, 0.25, 0.33, 0.5, 1.0)
STALENESS = (-1, 0, 1, 2, 3)
BLENDS = ((-1, -1), (-1, 0), (-1, 1), (-1, 5), (0, 0))
REUSED = ((0, 0), (-1, 3), (-1, 0))
NEIGHBOURS = {"k": 32}
"""LANTERN's share of the codebook, see `pareto`."""
NEVER = {"schedule": "never", **NEIGHBOURS}
THIRD = {"schedule": "uniform", "interval": 3, **NEIGHBOURS}
REACH = 8

Build = Callable[[Any, Any], Any]


# -- what no pipeline offers -------------------------------------------------------------------------------------------


class Replacing:
    """Judges with another verifier, and commits in a share of the rounds the surest path of the tree instead (Table 4).

    As many tokens are committed as the verdict held, or as the longest path has. share in 0..1.
    """

    def __init__(self, inner: Verifier, drafter: HeadDrafter, share: float):
        self.inner, self.drafter, self.share, self.exact = inner, drafter, share, False

    def __call__(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        """The verdict, or the surest path."""
        verdict, sure = self.inner(draft, scores, noise), self.drafter.confidence
        if sure is None or draft.tree is None or verdict.path is None:
            raise ValueError("only the drafts of dynamic trees can be replaced")
        tree, paths = draft.tree, Paths.of(draft)
        batch = torch.arange(len(sure), device=sure.device)
        wanted = torch.minimum(verdict.count, (tree.depth * paths.leaf).max(1).values)
        leaf = sure.masked_fill(~paths.leaf | (tree.depth < wanted[:, None]), -torch.inf).argmax(1)
        width = verdict.path.shape[1]
        order = torch.where(tree.seen[batch, leaf], tree.depth, draft.nodes + 1).argsort(1)[:, :width]
        path = torch.where(torch.arange(width, device=sure.device) < wanted[:, None], order, -1)
        tokens = torch.nn.functional.pad(draft.tokens.gather(1, order), (0, 1))
        chosen = scores.uniform(noise, scores.index[:, :1], SKIP, 1)[:, 0] < self.share
        return replace(
            verdict,
            tokens=torch.where(chosen[:, None], tokens, verdict.tokens),
            count=torch.where(chosen, wanted, verdict.count),
            path=torch.where(chosen[:, None], path, verdict.path),
            accepted=torch.where(chosen, wanted, verdict.accepted),
            trusted=torch.where(chosen, (wanted - verdict.accepted).clamp(min=0), 0),
        )


def replacing(share: float) -> Build:
    """The pipeline's own method, of whose verdicts a share is replaced."""

    def build(pipeline: Any, run: Any) -> Any:
        made = type(pipeline).method(pipeline, run)
        return replace(made, verifier=Replacing(made.verifier, made.drafter, share))

    return build


class StaleHead(HeadDrafter):
    """A head that reads older features than it could.

    staleness (s1, s2): -1: the features of the columns before, as ever; s >= 0: for the n columns that were committed last, those
    of the n columns before them, and s columns further back. s1 where everything was verified and s2 after a skip; with
    alternate, every other round.
    """

    def __init__(self, other: HeadDrafter, staleness: tuple[int, int], alternate: bool):
        super().__init__(other.head, other.target, other.own, other.length, other.tree, other.dynamic)
        self.staleness, self.alternate = staleness, alternate
        self._round = 0
        self._known: Tensor | None = None

    def propose(self, sequence: Sequence, noise: Noise) -> Draft:
        """See `HeadDrafter`."""
        self._round += 1
        draft = super().propose(sequence, noise)
        self._known = sequence.length
        return draft

    def sources(self, sequence: Sequence, columns: Tensor) -> Tensor:
        """See `HeadDrafter`."""
        fresh, stale = self.staleness
        length, source = sequence.length[:, None], columns - 1
        after_skip = length - 1 > sequence.cached[:, None]
        if self.alternate:
            extra = torch.full_like(length, (stale, fresh)[self._round % 2])
        else:
            extra = torch.where(after_skip, stale, fresh)
        new = length - (torch.ones_like(length) if self._known is None else self._known[:, None])
        moved = (extra >= 0) & (source >= length - 1 - new)
        return torch.where(moved, source - new - extra, source).clamp(min=-1)


def stale(s1: int, s2: int, alternate: bool = False) -> Build:
    """The pipeline's own method over a head that reads stale features."""

    def build(pipeline: Any, run: Any) -> Any:
        made = type(pipeline).method(pipeline, run)
        if not isinstance(made.drafter, SkippingDrafter):
            return replace(made, drafter=StaleHead(made.drafter, (s1, s2), alternate))
        made.drafter.inner = StaleHead(made.drafter.inner, (s1, s2), alternate)
        return made

    return build


@dataclass
class Watcher:
    """Notes the similarity of every tree, and of the target's features in each finished image, by their distance 1..REACH."""

    paths: list[float] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)

    def build(self, pipeline: Any, run: Any) -> Any:
        """The pipeline's own method, watched."""
        made = type(pipeline).method(pipeline, run)
        own = made.drafter.observe

        def observe(sequence: Sequence, draft: Draft, scores: Scores | None, verdict: Verdict, noise: Noise) -> None:
            own(sequence, draft, scores, verdict, noise)
            alike = made.drafter.similarity
            if alike is not None:
                self.paths += [value for value in alike.tolist() if value > -torch.inf]
            if bool((sequence.length + verdict.count >= sequence.limit).all()):
                self.features.append(aged(sequence, REACH))

        made.drafter.observe = observe
        return made


def aged(sequence: Sequence, reach: int) -> Tensor:
    """Mean cosine of the target's features of final columns that lie 1..reach apart: [reach]; conditional rows."""
    cache = sequence.cache
    if cache is None:
        raise ValueError("this sequence has no features")
    rows, final = len(sequence.length), int(sequence.cached.min())
    features = cache.hidden[:rows, sequence.prompt : sequence.prompt + final].double()
    pairs = [torch.cosine_similarity(features[:, gap:], features[:, :-gap], dim=-1).mean() for gap in range(1, reach + 1)]
    return torch.stack(pairs).cpu()


def lengths(trace: Trace) -> list[int]:
    """Tokens committed in each round."""
    counts = [0] * trace.rounds
    for line in trace.round:
        for number in line:
            counts[number] += 1
    return counts


# -- the settings ------------------------------------------------------------------------------------------------------


def single(series: str, options: dict[str, Any], build: Build | None = None, knob: str = "") -> Setting:
    """One setting of the method."""
    return Setting(series, Case("vvs", options, CALL, build=build), knob)


def groups(quick: bool) -> dict[str, list[Setting]]:
    """Table by table."""
    ends = slice(None, None, 4) if quick else slice(None)
    chosen = {
        "uniform path, truncated": {},
        "surest path": {"selection": "confidence", "truncate": False},
        "surest path, truncated": {"selection": "confidence"},
        "uniform path": {"truncate": False},
    }
    sweeps = [
        Sweep("no skips", "vvs", NEVER, "tvd", (0.1, 0.2, 0.4)),
        Sweep("uniform, tvd=0.1", "vvs", THIRD, "interval", (4, 3, 2)),
        Sweep("dynamic, tvd=0.1", "vvs", NEIGHBOURS, "threshold", (0.8, 0.7, 0.6)),
        *([] if quick else [Sweep("uniform, tvd=0.2", "vvs", {**THIRD, "tvd": 0.2}, "interval", (4, 3, 2))]),
        *([] if quick else [Sweep("dynamic, tvd=0.2", "vvs", {**NEIGHBOURS, "tvd": 0.2}, "threshold", (0.8, 0.7, 0.6))]),
    ]
    return {
        "replaced": [single("replaced", NEVER, replacing(share), f"r={share:.0%}") for share in SHARES[ends]],
        "staleness": [single("staleness", NEVER, stale(s, s), f"s={s:+d}") for s in STALENESS[ends]],
        "blend": [single("blend", NEVER, stale(*pair, True), "s={:+d}, {:+d}".format(*pair)) for pair in BLENDS[ends]],
        "reuse": [single("reuse", {**THIRD, "tvd": 0.2}, stale(*pair), "s={:+d}, {:+d}".format(*pair)) for pair in REUSED[ends]],
        "selection": [
            single(name, {**THIRD, "tvd": tvd, **options}, knob=f"tvd={tvd:g}")
            for tvd in ((0.1,) if quick else (0.1, 0.2))
            for name, options in chosen.items()
        ],
        "schedule": [setting for sweep in sweeps for setting in sweep.settings(quick)],
    }


TITLES = {
    "replaced": "Verified tokens replaced by the surest path, no skips (Table 4)",
    "staleness": "Features of staleness s, no skips (Table 5)",
    "blend": "Two kinds of features in turn, no skips (Table 6)",
    "reuse": "Features after a verified and after a skipped round, every third skipped, tvd=0.2 (Table 3)",
    "selection": "Which path is committed, and how much of it, every third round (Table 2)",
    "schedule": "Schedules (Table 1, Fig. 7)",
}


def run(family: Family, quick: bool, repeats: int, drawing: Drawing = ANEW) -> Report:
    """All ablations."""
    planned = groups(quick)
    settings, notes = available(family, [setting for part in planned.values() for setting in part])
    points = measure_quality(family, settings, quick, repeats, drawing, "vvs")
    found = {point.name: point for point in points}
    parts = {name: [found[s.name] for s in part if s.name in found] for name, part in planned.items()}
    tables = [(TITLES[name], HEADERS, [row(point) for point in (points[0], *part)]) for name, part in parts.items()]
    watcher, rounds = Watcher(), {}
    if settings and repeats:
        rounds = watch(family, watcher, 1 if quick else 32)
        tables.append(("How alike (Figs. 2 and 3)", ("", "mean", "at least 0.5", "0.7", "0.9"), alike(watcher)))
    data = {"plain": points[0].to_dict(), **{name: [point.to_dict() for point in part] for name, part in parts.items()}}
    data["similarity"] = watcher.paths
    data["features"] = [row.tolist() for row in watcher.features]
    data["lengths"] = rounds
    return Report("vvs", tables, data, lambda figure: plot(figure, points[0], parts, watcher, rounds), (17, 10), notes)


def row(point: Point) -> list[str]:
    """One line under `HEADERS`."""
    totals = point.totals
    return [
        point.name,
        f"{totals.tokens_per_forward:.2f}",
        f"{totals.mean_acceptance_length:.2f}",
        f"{totals.skip_ratio:.0%}" if totals.skip_ratio else "",
        f"{point.speedup:.2f}x",
        f"{point.divergence:.4f} ± {point.divergence_error:.4f}",
        f"{point.lost:.3f} ± {point.lost_error:.3f}",
        f"{point.names:.1%} ± {point.names_error:.1%}",
    ]


def watch(family: Family, watcher: Watcher, pictures: int) -> dict[str, list[list[int]]]:
    """Draw for the figures: similarities while nothing is skipped, and tokens per round with and without truncation."""
    prompts = prompts_for(family)
    cases = {
        "": Case("vvs", {"threshold": 1.0, **NEIGHBOURS}, CALL, build=watcher.build),
        "truncated": Case("vvs", {**THIRD, "interval": 2}, CALL),
        "whole paths": Case("vvs", {**THIRD, "interval": 2, "truncate": False}, CALL),
    }
    drawn: dict[str, list[list[int]]] = {name: [] for name in cases if name}
    for name, case in cases.items():
        for number in range(pictures):
            output, _ = family.draw(case, prompts[number % len(prompts)], number)
            if name:
                drawn[name].append(lengths(output.traces[0]))
    return drawn


def alike(watcher: Watcher) -> list[list[str]]:
    """Two lines: the paths of a tree, and neighbouring features."""
    lines = []
    for name, values in (("paths of a tree", watcher.paths), ("features of neighbours", [float(f[0]) for f in watcher.features])):
        if values:
            each = torch.tensor(values)
            shares = [f"{float((each >= bound).double().mean()):.0%}" for bound in (0.5, 0.7, 0.9)]
            lines.append([name, f"{float(each.mean()):.2f}", *shares])
    return lines


# -- the plot ----------------------------------------------------------------------------------------------------------


def plot(figure: Any, plain: Point, parts: dict[str, list[Point]], watcher: Watcher, rounds: dict[str, list[list[int]]]) -> None:
    """Six panels."""
    figure.suptitle("Partial verification skipping, T = 1: the paper's ablations")
    axes = figure.subplots(2, 3)
    _histogram(axes[0][0], watcher)
    _ages(axes[0][1], watcher, parts["staleness"], parts["blend"])
    _rounds(axes[0][2], rounds)
    for axis, name, title in (
        (axes[1][0], "replaced", "Verified tokens replaced (Table 4)"),
        (axes[1][1], "selection", "Which path, and how much (Table 2)"),
        (axes[1][2], "schedule", "Schedules (Fig. 7): up and left is better"),
    ):
        curves(
            axis,
            [plain, *parts[name]],
            lambda point: point.divergence,
            lambda point: point.divergence_error,
            lambda point: point.totals.tokens_per_forward,
        )
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("divergence from exact decoding (nats per place)")
        axis.set_ylabel("tokens per forward")
        axis.legend(frameon=False, fontsize=8)


def _histogram(axis: Any, watcher: Watcher) -> None:
    """Fig. 2: similarity of the paths of a tree."""
    if watcher.paths:
        axis.hist(watcher.paths, bins=40, density=True, color="#56b4e9")
        share = float((torch.tensor(watcher.paths) >= 0.7).double().mean())
        axis.axvline(0.7, color="#d55e00", linewidth=1.2, label=f"default threshold: {share:.0%} of the trees above")
        axis.legend(frameon=False, fontsize=8)
    axis.set_title("Similarity of drafted paths (Fig. 2)", fontsize=11)
    axis.set_xlabel("similarity S")
    axis.set_ylabel("density")
    axis.spines[["top", "right"]].set_visible(False)


def _ages(axis: Any, watcher: Watcher, staleness: list[Point], blend: list[Point]) -> None:
    """Figs. 3 and 4: features by distance; acceptance length by staleness, alone and blended with fresh ones."""
    if watcher.features:
        mean = torch.stack(watcher.features).mean(0)
        axis.plot(range(1, len(mean) + 1), mean.tolist(), "s--", color="#888888", label="cosine of features this far apart")
    second = axis.twinx()
    for points, label, colour in ((staleness, "s in every round", "#d55e00"), (blend[:-1], "s in every other round", "#0072b2")):
        places = [int(point.knob.rpartition("=" if points is staleness else ",")[2]) + 1 for point in points]
        heights = [point.totals.mean_acceptance_length for point in points]
        second.plot(places, heights, "o-", color=colour, label=label)
    second.set_ylabel("acceptance length")
    second.set_ylim(bottom=1)
    axis.set_ylim(0, 1)
    axis.set_xlabel("distance of the features = staleness s + 1")
    axis.set_ylabel("cosine")
    axis.set_title("Stale features (Figs. 3 and 4)", fontsize=11)
    (one, names), (two, others) = axis.get_legend_handles_labels(), second.get_legend_handles_labels()
    second.legend(one + two, names + others, frameon=False, fontsize=8)
    axis.spines[["top"]].set_visible(False)


def _rounds(axis: Any, rounds: dict[str, list[list[int]]]) -> None:
    """Fig. 8: tokens per round; the thin line is one picture, the thick one the mean over all."""
    for (name, runs), colour in zip(rounds.items(), ("#0072b2", "#d55e00"), strict=False):
        shown = runs[0]
        shortest = min(len(run) for run in runs)
        mean = torch.tensor([run[:shortest] for run in runs]).double().mean(0)
        axis.plot(shown, color=colour, linewidth=0.6, alpha=0.5)
        axis.plot(mean.tolist(), color=colour, linewidth=1.6, label=f"{name}: variance {_spread(runs):.2f}")
    axis.set_title("Tokens per round, every second skipped (Fig. 8)", fontsize=11)
    axis.set_xlabel("round")
    axis.set_ylabel("tokens")
    if rounds:
        axis.legend(frameon=False, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _spread(runs: list[list[int]]) -> float:
    """Variance of the rounds' tokens."""
    return float(torch.tensor([value for run in runs for value in run]).double().var())
