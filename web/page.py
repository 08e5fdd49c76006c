"""What the page shows, as HTML and SVG text: pure functions of frames and traces. No Gradio here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ..bench.cases import Case, method_class
from ..bench.compare import AR, Comparison, is_seeded, verdict
from ..decoding.trace import Trace
from ..decoding.types import SOURCES
from .maps import HELP, download, legend, mapped, png, shown, top_of
from .streaming import Frame
from .studio import Job

# -- words -----------------------------------------------------------------------------------------------------------


def message(text: str, kind: str = "info") -> str:
    """One sentence in a box. kind: info, good, warn or error."""
    role = "alert" if kind == "error" else "status"
    return f'<div class="fd-message fd-{kind}" role="{role}">{escape(text)}</div>'


def badge(case: Case) -> str:
    """What a configured method promises, in a word: same picture, exact or relaxed."""
    config = method_class(case.method).config_class.from_options(case.options)
    word, kind = ("relaxed", "warn") if not config.exact else ("same picture", "good") if is_seeded(case) else ("exact", "info")
    return f'<span class="fd-badge fd-{kind}">{word}</span>'


PROMISE = {
    "same picture": "Seeded: token for token the picture that plain decoding draws from this seed, sooner.",
    "exact": "Exact: another picture, from the same distribution as plain decoding's.",
    "relaxed": "Relaxed: faster, and the distribution of pictures may differ from plain decoding's.",
}


def promise(case: Case) -> str:
    """The badge and what it means. Raises ValueError where the options do not fit together."""
    mark = badge(case)
    text = next(text for word, text in PROMISE.items() if f">{word}<" in mark)
    return f'<div class="fd-promise">{mark}<span>{text}</span></div>'


def method_title(case: Case) -> str:
    """The method's title and what is set, for a heading."""
    if case.method == AR:
        return "Plain decoding"
    title = method_class(case.method).config_class.title
    given = ", ".join(f"{name} {value}" for name, value in case.options.items())
    return f"{title}: {given}" if given else title


def facts(pairs: Mapping[str, str], style: str = "") -> str:
    """Numbers with their names."""
    return f'<dl class="fd-facts {style}">' + "".join(f"<div><dt>{k}</dt><dd>{v}</dd></div>" for k, v in pairs.items()) + "</dl>"


# -- the race --------------------------------------------------------------------------------------------------------


def card(frame: Frame, top: int) -> str:
    """One side: picture, map, progress, numbers."""
    state = "done" if frame.complete else "stopped" if frame.over else "waiting" if not frame.tokens else "drawing"
    mark = badge(frame.case) if frame.case.method != AR else ""
    name = escape(method_title(frame.case))
    numbers = {
        "seconds": f"{frame.seconds:.2f}",
        "tokens per forward": f"{frame.tokens_per_forward:.2f}" if frame.rounds else "–",
        "forwards": str(frame.forwards),
    }
    return (
        f'<section class="fd-card" data-state="{state}"><header><h3>{name}</h3>{mark}</header><div class="fd-pair">'
        f"{shown(frame, name)}{mapped(frame, 'run', top)}</div>"
        f"{_bar(frame)}{facts(numbers, 'fd-three')}</section>"
    )


def _bar(frame: Frame) -> str:
    """How much is drawn."""
    return f'<div class="fd-bar"><i style="width:{100 * frame.tokens / frame.total:.1f}%"></i></div>'


def speed_up(frames: Sequence[Frame]) -> float | None:
    """How much faster the second side is: seconds where both are done, else tokens per second of own work."""
    plain, fast = frames
    if plain.complete and fast.complete:
        return plain.seconds / fast.seconds
    if plain.rate < 1e-9 or fast.rate < 1e-9:
        return None
    return fast.rate / plain.rate


def race(frames: Sequence[Frame], outputs: Sequence[Any] | None = None, showing: float = 0.0) -> str:
    """Both sides, the speed-up and what can be said about the pictures. outputs: of both sides, at the end."""
    plain, fast = frames
    factor, top = speed_up(frames), top_of(frames)
    over = all(frame.over for frame in frames)
    number = "–" if factor is None else f"{factor:.2f}×"
    word = "as fast" if factor is None or factor >= 0.995 else "as fast (slower)"
    words = f"{word} as plain decoding" if over else f"{word} so far"
    said = message("Drawing both from the same prompt and seed …") if outputs is None else outcome(frames, outputs)
    foot = ""
    if over:
        foot = (
            '<p class="fd-foot">Both pictures were really decoded, in turns of a few rounds: whichever had used less time went '
            "next, so both met the same machine. A side’s seconds are its own work only; making and sending this page took "
            f"another {showing:.2f} s and counts for neither.</p>"
        )
    return (
        f'<div class="fd-race" data-over="{str(over).lower()}"><div class="fd-banner">'
        f'<div class="fd-speed"><strong>{number}</strong><span>{words}</span></div>{said}</div>'
        f'<div class="fd-sides">{card(plain, top)}{card(fast, top)}</div>{legend(fast, "run", top)}{foot}</div>'
    )


def outcome(frames: Sequence[Frame], outputs: Sequence[Any]) -> str:
    """One sentence about the two pictures, checked on their tokens."""
    plain, fast = frames
    if not (plain.complete and fast.complete):
        return message("Stopped. What was drawn so far is shown; nothing is compared.", "warn")
    base, other = (output.tokens for output in outputs)
    config = method_class(fast.case.method).config_class.from_options(fast.case.options)
    if is_seeded(fast.case):
        if bool((base == other).all()):
            return message(f"✓ The same picture, verified: all {fast.total} tokens are equal.", "good")
        return message(f"Not verified: {verdict(fast.case.name, other, base, outputs[0].traces)}.", "error")
    if config.exact:
        return message("Two pictures of one distribution: an exact rule keeps the law, not the picture. Rule seeded keeps both.")
    return message("A relaxed rule: the picture, and the distribution it comes from, may differ from plain decoding's.", "warn")


# -- explore ---------------------------------------------------------------------------------------------------------


def explore(frame: Frame, kind: str, opacity: float) -> str:
    """Picture and token map side by side, with legend and headline numbers."""
    state = "done" if frame.complete else "stopped" if frame.over else "drawing"
    numbers = {
        "seconds": f"{frame.seconds:.2f}",
        "tokens per forward": f"{frame.tokens_per_forward:.2f}" if frame.rounds else "–",
        "forwards": str(frame.forwards),
    }
    stopped = message("Stopped. What was drawn so far is shown.", "warn") if frame.over and not frame.complete else ""
    return (
        f'<section class="fd-card fd-wide" data-state="{state}">{stopped}<div class="fd-pair">'
        f"{shown(frame, frame.case.name)}{mapped(frame, kind, opacity=opacity)}</div>"
        f"{_bar(frame)}"
        f'{facts(numbers, "fd-three")}{legend(frame, kind)}<p class="fd-foot">{HELP[kind]}</p></section>'
    )


def rounds_plot(frame: Frame) -> str:
    """Tokens committed by every round, as bars: accepted drafts below, everything else above."""
    if not frame.rounds:
        return ""
    accepted = [count - 1 for count in frame.rounds]
    if frame.trace is not None:
        accepted = [0] * len(frame.rounds)
        for rounds, sources in zip(frame.trace.round, frame.trace.source, strict=True):
            for number, source in zip(rounds, sources, strict=True):
                if number >= 0:
                    accepted[number] += SOURCES[source] in ("accepted", "unverified")
    wide, high, left, foot = 720, 170, 34, 34
    top = max(4, *frame.rounds)
    step = (wide - left) / max(len(frame.rounds), 24)
    unit = (high - foot - 8) / top
    bars = []
    for number, (count, kept) in enumerate(zip(frame.rounds, accepted, strict=True)):
        x, y = left + number * step, high - foot
        thick = max(0.6, step - (1.5 if step > 5 else 0.4))
        bars.append(
            f'<rect class="fd-kept" x="{x:.1f}" y="{y - kept * unit:.1f}" width="{thick:.1f}" height="{kept * unit:.1f}"/>'
        )
        own = (count - kept) * unit
        bars.append(f'<rect class="fd-own" x="{x:.1f}" y="{y - count * unit:.1f}" width="{thick:.1f}" height="{own:.1f}"/>')
    marks = [0, *range(_tick(top), top + 1, _tick(top))]
    lines = (
        f'<line x1="{left}" x2="{wide}" y1="{high - foot - m * unit:.1f}" y2="{high - foot - m * unit:.1f}"/>'
        f'<text x="{left - 6}" y="{high - foot - m * unit + 4:.1f}" text-anchor="end">{m}</text>'
        for m in marks
    )
    every = _tick(len(frame.rounds))
    below = (
        f'<text x="{left + (n - 0.5) * step:.1f}" y="{high - foot + 15}" text-anchor="middle">{n}</text>'
        for n in [1, *range(every, len(frame.rounds) + 1, every)]
        if n == 1 or every > 1
    )
    return (
        '<figure class="fd-plot"><figcaption>Tokens committed per round '
        '<span><i class="fd-kept"></i>accepted from the draft</span>'
        '<span><i class="fd-own"></i>the target’s own</span></figcaption>'
        f'<svg viewBox="0 0 {wide} {high}" role="img" aria-label="tokens committed per round">'
        f"{''.join(lines)}{''.join(bars)}{''.join(below)}"
        f'<text x="{(left + wide) / 2:.0f}" y="{high - 3}" text-anchor="middle">round</text></svg></figure>'
    )


def _tick(top: int) -> int:
    """A round step that gives about five marks."""
    rough = max(1.0, top / 5)
    power = 10 ** math.floor(math.log10(rough))
    return int(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough))


def numbers(trace: Trace) -> str:
    """Everything a trace counts."""
    margin = "–" if math.isinf(trace.min_margin) else f"{trace.min_margin:.1e}"
    cost = "not measurable" if trace.relaxation_per_token is None else f"{trace.relaxation_per_token:.4f}"
    pairs = {
        "distribution": "exact" if trace.exact else "relaxed",
        "tokens": f"{trace.tokens} / {trace.grid[0] * trace.grid[1]}",
        "rounds": str(trace.rounds),
        "target forwards": str(trace.target_forwards),
        "draft forwards": str(trace.draft_forwards),
        "acceptance length": f"{trace.mean_acceptance_length:.2f}",
        "acceptance rate": f"{trace.acceptance_rate:.0%}" if trace.judged else "–",
        "drafted": str(trace.drafted),
        "judged": str(trace.judged),
        "accepted": str(trace.accepted),
        "relaxation per token": cost,
        "smallest margin": margin,
        "engine’s share of time": f"{trace.engine_share:.0%}",
    }
    notes = "".join(message(note) for note in trace.notes)
    return f'<section class="fd-card fd-wide">{facts(pairs)}{notes}</section>'


def downloads(frame: Frame, prompt: str, kind: str, opacity: float) -> str:
    """Links to the picture, its token map and the trace."""
    if frame.trace is None or frame.picture is None:
        return ""
    name = "".join(letter if letter.isalnum() else "-" for letter in prompt.lower()).strip("-") or "picture"
    drawn = frame.trace.heatmap(frame.picture.convert("RGB"), kind, opacity)
    links = (
        download("picture (PNG)", f"{name}.png", png(frame.picture), "image/png"),
        download("token map (PNG)", f"{name}-{kind}.png", png(drawn), "image/png"),
        download("trace (JSON)", f"{name}.json", frame.trace.to_json(indent=1).encode(), "application/json"),
    )
    return f'<nav class="fd-downloads">{"".join(links)}</nav>'


# -- compare ---------------------------------------------------------------------------------------------------------


def progress(job: Job) -> str:
    """The pictures so far, while a comparison runs or after it was stopped."""
    if job.over:
        head = message("Stopped. What was drawn so far is shown; nothing is compared.", "warn")
    else:
        turn = f", round {job.turn} of {job.turns}" if job.turns > 1 else ""
        head = message(f"Drawing with {len(job.frames)} methods in turns{turn} …")
    top = top_of(job.frames)
    return f'{head}<div class="fd-sides fd-many">{"".join(card(frame, top) for frame in job.frames)}</div>'


def comparison(result: Comparison, frames: Sequence[Frame]) -> str:
    """Table, chart, verdicts and pictures."""
    top = top_of(frames)
    cards = "".join(card(frame, top) for frame in frames)
    said = "".join(
        message(f"{'✓ ' if 'token for token' in text else ''}{text}.", "good" if "token for token" in text else "info")
        for text in result.verdicts()
    )
    return (
        f'<div class="fd-compared">{chart(result)}{table(result)}{said}<div class="fd-sides fd-many">{cards}</div>'
        f'{legend(frames[-1], "run", top)}<p class="fd-foot">All were drawn in turns, always the one that had used the '
        "least time, so they met the same machine; seconds are a method’s own work.</p></div>"
    )


def table(result: Comparison) -> str:
    """The comparison as a table; one that is too wide scrolls by itself."""
    heads = ("method", "seconds", "speed-up", "tokens per forward", "acceptance length", "acceptance rate", "picture")
    lines = []
    for item in result.rows:
        judged = any(trace.judged for trace in item.traces)
        law = "the baseline" if item.method == AR else "the same" if item.identical else "exact" if item.exact else "relaxed"
        cells = (
            f"{item.seconds:.2f}",
            f"{item.speedup:.2f}×",
            f"{item.tpf:.2f}",
            f"{item.mal:.2f}",
            f"{item.acceptance:.0%}" if judged else "–",
            law,
        )
        row = "".join(f"<td>{cell}</td>" for cell in cells)
        lines.append(f"<tr><th scope='row'>{escape(plain_name(item.name))}</th>{row}</tr>")
    head = "".join(f"<th scope='col'>{name}</th>" for name in heads)
    body = "".join(lines)
    return f'<div class="fd-scroll"><table class="fd-table"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def chart(result: Comparison) -> str:
    """Speed-up and tokens per forward of every method, as bars on one scale."""
    top = max([1.0, *(max(item.speedup, item.tpf) for item in result.rows)])

    def bar(style: str, value: float, text: str) -> str:
        return f'<div class="fd-line"><i class="{style}" style="width:{80 * value / top:.1f}%"></i><span>{text}</span></div>'

    rows = "".join(
        f'<div class="fd-method"><b>{escape(plain_name(item.name))}</b>{bar("fd-kept", item.speedup, f"{item.speedup:.2f}×")}'
        f"{bar('fd-own', item.tpf, f'{item.tpf:.2f}')}</div>"
        for item in result.rows
    )
    return (
        '<figure class="fd-plot fd-chart"><figcaption><span><i class="fd-kept"></i>speed-up over plain decoding</span>'
        f'<span><i class="fd-own"></i>tokens per forward</span></figcaption><div class="fd-bars">{rows}</div></figure>'
    )


def plain_name(name: str) -> str:
    """A case's name, with words for plain decoding."""
    return "plain decoding" if name == AR else name
