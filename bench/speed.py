"""`foredraft bench`: the speed contract's ratios, measured in one run.

Speed-ups of every method at T = 1 with the full vocabulary and at the family's default setting, batch 1 and 4; the engine's share
of the wall-clock; plain decoding against a fair transformers peer; cost outside attention per token, long against short.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F

from ..decoding.sampling import Sampling
from ..pipelines import methods
from .cases import Case, Family
from .compare import AR
from .harness import HEADERS, Report, Result, measure, prompts_for
from .peer import Peer

NEAR = 288
FULL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
CASES = (
    Case("sjd", {"rule": "seeded"}, label="sjd seeded"),
    Case("sjd", {"rule": "exact", "tail": "gumbel"}, label="sjd gumbel"),
    Case("sjd", {"rule": "exact", "tail": "coupled"}, label="sjd coupled"),
    Case("sjd", {"rule": "exact", "tail": "resample"}, label="sjd resample"),
    Case("sjd", {"rule": "exact", "tail": "reuse"}, label="sjd++ reuse"),
    Case("sjd", {"rule": "seeded", "window": "auto"}, label="sjd seeded, window auto"),
    Case("speculative", {"rule": "seeded", "tree": "chain"}, label="speculative chain, seeded"),
    Case("speculative", {"rule": "seeded", "draft_length": "auto"}, label="speculative seeded, length auto"),
    Case("speculative", {"rule": "exact", "tree": "chain"}, label="speculative chain"),
    Case("speculative", {"rule": "exact", "tree": "static"}, label="speculative static tree"),
    Case("speculative", {"rule": "exact", "tree": "dynamic"}, label="speculative dynamic tree"),
    Case("cool_sd", {"rule": "seeded", "draft_length": 3}, label="head chain, seeded"),
    Case("cool_sd", {"rule": "exact", "draft_length": 3}, label="head chain, exact"),
    Case("cool_sd", label="cool-sd"),
    Case("vvs", label="vvs"),
)
# Speed-ups the draft head's methods should reach at T = 1, batch 1.
HEADS = (("head chain, exact", 1.2), ("cool-sd", 1.5), ("vvs", 1.6))


def run(family: Family, quick: bool, repeats: int) -> Report:
    """Measure everything; quick: few cases, small grids."""
    pipeline = family.pipeline(AR)
    prompts = prompts_for(family)
    defaults = {name: pipeline.family_default(name, value) for name, value in FULL.items()}
    settings = {"T = 1, full vocabulary": FULL}
    notes = []
    if defaults != FULL:
        settings["default setting"] = defaults
    else:
        notes.append("The family's default setting is T = 1 with the full vocabulary: one table shows both.")
    cases = [case for case in CASES if fits(family, case.method)]
    cases = cases[::3] if quick else cases
    tables, groups = [], {}
    for name, call in settings.items():
        for batch in (1, 4):
            title = f"{name}, batch {batch}"
            results = measure(family, cases, prompts, repeats, batch, call)
            groups[title] = results
            tables.append((title, HEADERS, [result.row() for result in results]))
    contract, data = [], {}
    for title, results in groups.items():
        contract += ratios(title, results)
    peers, data["peer"] = against_peer(family, prompts[0], repeats)
    lengths, data["long"] = long_against_short(family, prompts[0], repeats, quick)
    contract += [*peers, *lengths]
    tables.insert(0, ("The speed contract", ("ratio", "measured", "wanted"), contract))
    data["groups"] = {title: [result.to_dict() for result in results] for title, results in groups.items()}
    data["contract"] = contract
    return Report("speed", tables, data, lambda figure: plot(figure, groups), (13, 4.6 * len(settings)), notes)


def fits(family: Family, method: str) -> bool:
    """Whether the folder holds what the method needs."""
    from ..models.loading import read_index

    index = read_index(family.folder)
    return method in methods() and all(part in index for part in methods()[method].required_components())


def ratios(title: str, results: list[Result]) -> list[list[str]]:
    """The contract's lines of one setting."""
    named = {result.name: result for result in results}
    tails = [named[name] for name in ("sjd gumbel", "sjd coupled", "sjd resample") if name in named]
    batch, lines = results[0].batch, []
    if tails and batch == 1:
        best = max(tails, key=lambda result: result.speedup)
        wanted = ">= 1.6x" if title.startswith("T = 1") else ">= 1.8x"
        lines.append([f"best exact tail ({best.name}) over AR; {title}", f"{best.speedup:.2f}x", wanted])
        if "sjd seeded" in named:
            share = named["sjd seeded"].speedup / best.speedup
            lines.append([f"seeded against it; {title}", f"{share:.2f}", ">= 0.85"])
        if "sjd++ reuse" in named:
            share = named["sjd++ reuse"].speedup / best.speedup
            lines.append([f"SJD++ against it; {title}", f"{share:.2f}", ">= 1"])
    if batch == 1 and title.startswith("T = 1"):
        lines += [
            [f"{name} over AR; {title}", f"{named[name].speedup:.2f}x", f">= {wanted}x"]
            for name, wanted in HEADS
            if name in named
        ]
    worst = max(results, key=lambda result: median(result.engine))
    for result in [*results[:2], worst]:
        line = [f"engine share, {result.name}; {title}", f"{median(result.engine):.1%}"]
        lines.append([*line, "<= 10%" if batch == 1 else "<= 5%"])
    return lines


def against_peer(family: Family, prompt: str, repeats: int) -> tuple[list[list[str]], dict[str, Any]]:
    """Plain decoding and the transformers peer in turn, without the codec: peer's seconds by ours."""
    pipeline = family.pipeline(AR)
    scale = pipeline.family_default("guidance_scale", Sampling().guidance_scale)
    peer, case, call = Peer(pipeline.target, scale, 1.0), Case(AR), {**FULL, "output_type": "latent"}
    data: dict[str, Any] = {"ours": [], "static": [], "dynamic": []}
    count = family.draw(case, prompt, 0, **call)[0].tokens[0].numel()
    for cache in ("static", "dynamic"):
        peer.draw(1, 8, cache=cache)
    for number in range(repeats):
        data["ours"].append(family.draw(case, prompt, number, **call)[1])
        for cache in ("static", "dynamic"):
            data[cache].append(peer.draw(1, count, cache=cache))
    lines = []
    for cache, wanted in (("static", ">= 1x"), ("dynamic", "")):
        ratio = median(theirs / ours for theirs, ours in zip(data[cache], data["ours"], strict=True))
        data[f"ratio_{cache}"] = ratio
        lines.append([f"our AR against transformers' generate, {cache} cache, batch 1", f"{ratio:.2f}x", wanted])
    return lines, data


@contextmanager
def timed_attention(clock: list[float], now: Callable[[], float], last: int | None = None) -> Iterator[None]:
    """While open, the seconds spent in scaled dot-product attention, by the clock `now`, are added to clock[0].

    last: attention reads the newest `last` keys only, so that its stream of keys and values pushes nothing out of the
    processor's cache: the control that tells a cost of the engine from a cost of the machine.
    """
    plain = F.scaled_dot_product_attention

    def timed(query: Any, key: Any, value: Any, attn_mask: Any = None, **kwargs: Any) -> torch.Tensor:
        begun = now()
        if last is not None and key.shape[2] > last:
            key, value, attn_mask = key[:, :, -last:], value[:, :, -last:], attn_mask[..., -last:]
        out = plain(query, key, value, attn_mask=attn_mask, **kwargs)
        clock[0] += now() - begun
        return out

    F.scaled_dot_product_attention = timed
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain


def long_against_short(family: Family, prompt: str, repeats: int, quick: bool) -> tuple[list[list[str]], dict[str, Any]]:
    """Seconds per token outside attention, and of the engine alone, on a large and a small grid.

    A shallow target of the family's class with random weights decodes both; its pictures are of no interest. A long cache also
    slows what lies outside attention, by pushing weights out of the processor's cache; with attention confined to the newest
    keys that effect is gone, and what is left is the engine's own growth.
    """
    real = family.pipeline(AR)
    shape = {**real.target.config, "layers": min(4, real.target.config.layers)}
    tiny = type(real.target).from_config(shape).to(real.target.device).eval()
    if tiny.dtype != real.target.dtype:
        tiny = tiny.to(real.target.dtype)
    parts = {"target": tiny, "codec": real.codec, "tokenizer": real.tokenizer, "defaults": {"guidance_scale": 1.5}}
    cell = real.codec.config.downsample
    sides = (8, 16) if quick else (16, 64)
    data: dict[str, Any] = {}
    names = [name for name in (AR, "sjd") if fits(family, name)]
    pipelines = {name: methods()[name](**parts) for name in names}
    for pipeline in pipelines.values():
        pipeline.set_progress_bar_config(disable=True)
    for name in names:
        data[name] = {str(side * side): {"outside": [], "engine": [], "near": [], "rounds": []} for side in sides}
    for number in range(max(1, min(3, repeats))):
        for name, pipeline in pipelines.items():
            for side in sides:
                for _ in range(1 if side == sides[-1] else 3):
                    figures = _outside(pipeline, prompt, side * cell, number)
                    figures["near"] = _outside(pipeline, prompt, side * cell, number, NEAR)["outside"]
                    for key, value in figures.items():
                        data[name][str(side * side)][key].append(value)
    lines, (short, long) = [], (str(side * side) for side in sides)
    what = {
        "outside": ("outside attention", ""),
        "near": (f"outside attention, which reads {NEAR} keys only", "<= 1.2x"),
        "engine": ("of the engine alone", ""),
    }
    for name in names:
        for key, (words, wanted) in what.items():
            ratio = median(data[name][long][key]) / median(data[name][short][key])
            data[name][f"ratio_{key}"] = ratio
            lines.append([f"cost {words}, per token, {name}: {long} tokens against {short}", f"{ratio:.2f}x", wanted])
    return lines, data


def _outside(pipeline: Any, prompt: str, side: int, seed: int, last: int | None = None) -> dict[str, float]:
    """One run: seconds per token outside attention, of the engine, and rounds per token. last: see `timed_attention`.

    On a CPU the first is processor time, which other programs on the machine disturb less than wall-clock.
    """
    clock, now = [0.0], time.process_time if pipeline.target.device.type == "cpu" else time.perf_counter
    generator = torch.Generator().manual_seed(seed)
    with timed_attention(clock, now, last):
        begun = now()
        output = pipeline(prompt, height=side, width=side, generator=generator, output_type="latent", **FULL)
        total = now() - begun
    trace = output.traces[0]
    engine = sum(trace.parts.values()) - sum(trace.parts[part] for part in ("codec", "callback", "target", "draft_model"))
    return {
        "outside": (total - clock[0]) / trace.tokens,
        "engine": engine / trace.tokens,
        "rounds": trace.rounds / trace.tokens,
    }


def plot(figure: Any, groups: dict[str, list[Result]]) -> None:
    """One panel per setting and batch: speed-up with its range, and tokens per forward as a mark."""
    axes = figure.subplots(-(-len(groups) // 2), 2, squeeze=False, sharex=True)
    for axis, (title, results) in zip(axes.flat, groups.items(), strict=False):
        results = results[::-1]
        places = range(len(results))
        middle = [result.speedup for result in results]
        low = [value - min(result.speedups) for value, result in zip(middle, results, strict=True)]
        high = [max(result.speedups) - value for value, result in zip(middle, results, strict=True)]
        tints = ["#0072b2" if result.totals.exact else "#d55e00" for result in results]
        axis.barh(places, middle, xerr=[low, high], color=tints, ecolor="#444444", capsize=2, height=0.62)
        forwards = [result.totals.tokens_per_forward for result in results]
        axis.plot(forwards, places, "D", color="#009e73", markersize=5)
        names = [f"{result.name} ({median(result.engine):.0%})" for result in results]
        axis.set_yticks(places, names, fontsize=9)
        axis.axvline(1, color="#888888", linewidth=0.8, linestyle=":")
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("speed-up over plain decoding; tokens per forward")
    figure.suptitle(
        "Speed-up (bars; blue: exact, orange: relaxed; in brackets: the engine's share of time) and tokens per forward (marks)"
    )
