"""What happened while an image was drawn: per token, per round, and in sum."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .sequence import Sequence
from .types import ACCEPTED, FORCED, SOURCES, UNVERIFIED, Draft, Scores, Verdict

if TYPE_CHECKING:
    from PIL.Image import Image

PARTS = ("target", "draft_model", "draft", "verify", "other", "codec", "callback")


@dataclass
class Trace:
    """The record of one image of H x W tokens. Tokens that the grammar adds to a picture's codes (row ends) are left out.

    round, run, source, probability: nested lists [H][W]. round: which round committed the token (from 0); run: how many tokens
    were committed together with it; source: an index into `SOURCES`; probability: the target's p of the token (1 where forced,
    None where it was committed unverified).
    target_forwards counts scoring forwards, not the prompt's prefill; judged: draft tokens tested, up to and including a
    rejection; drafted: all that were proposed. seconds: wall-clock of the whole batch, `parts` splits it: target and draft_model
    are the models' forwards (output head included), callback is what the caller's own function took after each round, the rest is
    the engine and the codec. min_margin: the smallest gap between the two best noisy scores (seeded decoding and plain AR; inf
    elsewhere): a float32 tie is possible where it is tiny; the
    border of top-k and top-p is not looked at. relaxation_per_token: mean cost per verified token; only its average over images
    bounds the distance to the exact distribution (0 for exact rules, None where it cannot be measured). expected_length: tokens
    a round commits on average over the verifier's coins, given what was drafted (Cool-SD, Eq. 7; the end of the image is not
    looked at; None where no coins are flipped): as the acceptance length, with less noise. seed names the image's noise; notes:
    what else a user should know.
    """

    method: str
    seed: int
    exact: bool
    grid: tuple[int, int]
    batch: int
    rounds: int
    target_forwards: int
    draft_forwards: int
    drafted: int
    judged: int
    accepted: int
    seconds: float
    parts: dict[str, float]
    min_margin: float
    relaxation_per_token: float | None
    complete: bool
    round: list[list[int]] = field(repr=False)
    run: list[list[int]] = field(repr=False)
    source: list[list[int]] = field(repr=False)
    probability: list[list[float | None]] = field(repr=False)
    notes: list[str] = field(default_factory=list)
    expected_length: float | None = None

    @property
    def tokens(self) -> int:
        """Committed tokens."""
        return sum(value >= 0 for row in self.round for value in row)

    @property
    def tokens_per_forward(self) -> float:
        """TPF: tokens / target forwards (the papers' step compression)."""
        return self.tokens / max(1, self.target_forwards)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens committed per round."""
        return self.tokens / max(1, self.rounds)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / judged; 0 where nothing was judged."""
        return self.accepted / self.judged if self.judged else 0.0

    @property
    def own_seconds(self) -> float:
        """seconds without the caller's callback: what drawing took, however it was watched."""
        return self.seconds - self.parts.get("callback", 0.0)

    @property
    def skip_ratio(self) -> float:
        """Share of the rounds that were committed without a forward of the target (VVS)."""
        return 1.0 - self.target_forwards / self.rounds if self.rounds else 0.0

    @property
    def unverified(self) -> int:
        """Tokens that were committed in those rounds."""
        return sum(value == UNVERIFIED for row in self.source for value in row)

    @property
    def engine_share(self) -> float:
        """Share of the wall-clock spent outside the models' forwards and the codec; a callback's time is nobody's."""
        total = sum(self.parts.values()) - self.parts["codec"] - self.parts.get("callback", 0.0)
        return 1.0 - (self.parts["target"] + self.parts["draft_model"]) / total if total else 0.0

    def summary(self) -> dict[str, Any]:
        """The numbers, without the maps."""
        values = asdict(self)
        for name in ("round", "run", "source", "probability"):
            del values[name]
        derived = ("own_seconds", "tokens_per_forward", "mean_acceptance_length", "acceptance_rate", "skip_ratio", "unverified")
        for name in (*derived, "engine_share"):
            values[name] = getattr(self, name)
        values["min_margin"] = None if self.min_margin == float("inf") else self.min_margin
        return values

    def to_json(self, indent: int | None = None) -> str:
        """Everything as JSON; `from_json` reads it back."""
        maps = {name: getattr(self, name) for name in ("round", "run", "source", "probability")}
        return json.dumps({**self.summary(), **maps, "sources": SOURCES}, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """Read what `to_json` wrote."""
        values = json.loads(text)
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        known["grid"] = tuple(known["grid"])
        known["min_margin"] = float("inf") if known["min_margin"] is None else known["min_margin"]
        return cls(**known)

    def heatmap(self, image: Image | None = None, kind: str = "run", opacity: float = 0.6, legend: bool = True) -> Image:
        """The token map as a picture, over `image` if one is given. kind: run, round, source or probability."""
        from .heatmap import render

        return render(self, image, kind, opacity, legend)


def not_a_number(model: str, dtype: torch.dtype) -> str:
    """One sentence about a model that answers with NaN."""
    return f"{model} answers with NaN ({dtype}): load it in another dtype, or fetch its weights again"


class Clock:
    """Splits wall-clock into the parts of a trace; forwards are timed where they run and taken out of the lap they fall in."""

    def __init__(self) -> None:
        self.parts = dict.fromkeys(PARTS, 0.0)
        self._at = perf_counter()
        self._target = self._draft = 0.0

    def lap(self, part: str, sequence: Sequence) -> None:
        """Book the time since the last lap under `part`."""
        now = perf_counter()
        elapsed = now - self._at
        # A forward that ended before the clock began (a prompt's prefill) is not on it.
        target = min(sequence.model_seconds - self._target, elapsed)
        draft = min(sequence.draft_seconds - self._draft, elapsed - target)
        self._target, self._draft = sequence.model_seconds, sequence.draft_seconds
        self.parts["target"] += target
        self.parts["draft_model"] += draft
        self.parts[part] += elapsed - target - draft
        self._at = now

    def callback(self, seconds: float) -> None:
        """Book seconds that the caller's function has just spent, and take them out of the lap they fall in."""
        self.parts["callback"] += seconds
        self._at += seconds


@dataclass
class _Round:
    """What one round leaves behind, on the device it ran on."""

    before: Tensor
    added: Tensor
    verdict: Verdict
    log_p: Tensor | None
    nodes: int
    valid: Tensor | None


class Recorder:
    """Collects the rounds of a batch and turns them into traces at the end; keeps small tensors, never synchronises."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.rounds = 0
        self._log: list[_Round] = []
        self._counts: Tensor | None = None
        self._counted = 0

    def round(self, before: Tensor, added: Tensor, draft: Draft, scores: Scores | None, verdict: Verdict) -> None:
        """Note one round. before [B]: lengths before the commit; added [B]: tokens committed."""
        log_p, width = None, verdict.tokens.shape[1]
        if scores is not None and verdict.path is None:
            log_p = scores.log_p[:, :width].gather(2, verdict.tokens[..., None])[..., 0]
        elif scores is not None and verdict.path is not None:
            rows = torch.nn.functional.pad(verdict.path + 1, (1, 0))
            rows.scatter_(1, verdict.accepted[:, None], verdict.stop[:, None])
            log_p = scores.log_p.flatten(1).gather(1, rows * scores.log_p.shape[-1] + verdict.tokens)
        if log_p is not None and verdict.scored is not None:
            log_p = log_p.masked_fill(~verdict.scored[:, None], torch.nan)
        self._log.append(_Round(before, added, verdict, log_p, draft.nodes, draft.valid))
        self.rounds += 1

    def counts(self) -> Tensor:
        """What every row used so far: [3, B] target forwards, draft tokens judged, and of those the accepted ones."""
        for entry in self._log[self._counted :]:
            verdict = entry.verdict
            one = torch.ones_like(entry.added)
            scored = one if verdict.scored is None else verdict.scored.to(one)
            tested = verdict.accepted if verdict.trusted is None else verdict.accepted - verdict.trusted
            step = torch.stack((scored, verdict.judged, tested)) * (entry.added > 0)
            self._counts = step if self._counts is None else self._counts + step
        self._counted = len(self._log)
        return torch.zeros(3, 0, dtype=torch.long) if self._counts is None else self._counts

    def refuse_nan(self, family: str, dtype: torch.dtype) -> None:
        """Raise FloatingPointError if the target's opinion of a committed token was not a number."""
        scored = [entry for entry in self._log if entry.log_p is not None]
        opinions = [entry.log_p.flatten() for entry in scored if entry.log_p is not None]
        if not opinions or not bool(torch.cat(opinions).isnan().any()):
            return
        for entry in scored:
            if entry.log_p is None:
                continue
            step = torch.arange(entry.log_p.shape[1], device=entry.added.device)
            committed = step < torch.minimum(entry.added, entry.verdict.count)[:, None]
            if entry.verdict.scored is not None:
                committed &= entry.verdict.scored[:, None]
            if bool((entry.log_p.isnan() & committed).any()):
                raise FloatingPointError(not_a_number(family, dtype))

    def traces(
        self,
        sequence: Sequence,
        seeds: Tensor,
        method: str,
        exact: bool,
        draft_forwards: int = 0,
        measurable: bool = True,
        size: tuple[int, int] | None = None,
    ) -> list[Trace]:
        """One Trace per image. measurable False: the relaxation's cost is unknown and reported as None. size: rows and columns of
        the sequence's grid that the picture shows (None: all of them)."""
        rows, count = sequence.tokens.shape[0], sequence.limit - 1
        maps, margins, totals, cost, expected = self._totals(rows, count)
        if sequence.forced is not None:
            # Forced tokens before the first round were committed by nobody.
            column = torch.arange(count)
            leading = (maps["round"][:, :count] < 0) & (column < sequence.length.cpu()[:, None] - 1)
            run = leading.sum(1, keepdim=True).double().expand_as(leading)
            for name, value in (("round", run * 0), ("run", run), ("source", run * 0 + FORCED), ("p", run * 0 + 1)):
                maps[name][:, :count] = torch.where(leading, value, maps[name][:, :count])
        height, width = sequence.grid if size is None else size
        seconds = sum(self.clock.parts.values())
        traces = []
        for row in range(rows):
            rounds, forwards, drafted, judged, accepted = totals[:, row].tolist()
            grid = {name: plane[row, :count].view(sequence.grid)[:height, :width] for name, plane in maps.items()}
            margin = margins[row, :count]
            traces.append(
                Trace(
                    method=method,
                    seed=int(seeds[row]),
                    exact=exact,
                    grid=(height, width),
                    batch=rows,
                    rounds=rounds,
                    target_forwards=forwards,
                    draft_forwards=draft_forwards,
                    drafted=drafted,
                    judged=judged,
                    accepted=accepted,
                    seconds=seconds,
                    parts=dict(self.clock.parts),
                    min_margin=float(margin.min()) if count else float("inf"),
                    relaxation_per_token=float(cost[row]) / max(1, judged) if measurable else None,
                    complete=bool((grid["round"] >= 0).all()),
                    round=grid["round"].long().tolist(),
                    run=grid["run"].long().tolist(),
                    source=grid["source"].long().tolist(),
                    probability=[[None if value != value else value for value in line] for line in grid["p"].tolist()],
                    expected_length=None if expected is None else float(expected[row]) / max(1, rounds),
                )
            )
        return traces

    def _totals(self, rows: int, count: int) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor, Tensor | None]:
        """Maps [B, N + 1] (the last column takes what is not there), margins [B, N + 1], counts [5, B], cost and expected tokens
        [B] (None: not known); on the CPU."""
        maps = {name: torch.full((rows, count + 1), -1.0, dtype=torch.float64) for name in ("round", "run", "source", "p")}
        margins = torch.full((rows, count + 1), torch.inf, dtype=torch.float64)
        if not self._log:
            return maps, margins, torch.zeros(5, rows, dtype=torch.long), torch.zeros(rows), None
        log, verdicts = self._log, [entry.verdict for entry in self._log]
        before, added = (
            torch.stack([entry.before for entry in log]).cpu(),
            torch.stack([entry.added for entry in log]).cpu(),
        )
        last, accepted, length, judged = (
            torch.stack([getattr(verdict, name) for verdict in verdicts]).cpu()
            for name in ("source", "accepted", "count", "judged")
        )
        tested = accepted - torch.stack([v.accepted * 0 if v.trusted is None else v.trusted for v in verdicts]).cpu()
        one = torch.ones_like(added[0])
        scored = torch.stack([one if verdict.scored is None else verdict.scored.long().to(one.device) for verdict in verdicts])
        drafted = torch.stack([one * e.nodes if e.valid is None else e.valid.sum(1).to(one.device) for e in log])
        active = added > 0
        totals = (torch.stack((active.long(), scored.cpu(), drafted.cpu(), judged, tested)) * active).sum(1)
        cost = torch.zeros(rows, dtype=torch.float64)
        for number, verdict in enumerate(verdicts):
            if verdict.cost is not None:
                cost += verdict.cost.cpu() * active[number]
        known = [verdict.expected.cpu() for verdict in verdicts if verdict.expected is not None]
        expected = (torch.stack(known).double() * active).sum(0) if len(known) == len(verdicts) else None
        # [rounds, B, width]: every token committed in a round, side by side.
        width = int(added.max())
        step = torch.arange(width)
        place = torch.where(step < added[..., None], before[..., None] - 1 + step, count)
        kind = torch.where(step < accepted[..., None], ACCEPTED, last[..., None])
        kind = torch.where(last[..., None] == UNVERIFIED, UNVERIFIED, kind)
        forced = step >= length[..., None]
        unknown = torch.full((rows, 0), torch.nan)
        chance = torch.stack([_fit(unknown if e.log_p is None else e.log_p.cpu(), width, torch.nan) for e in log]).double().exp()
        open_gap = torch.full((rows, 0), torch.inf)
        gaps = [open_gap if verdict.margin is None else verdict.margin.cpu() for verdict in verdicts]
        gap = torch.stack([_fit(each, width, torch.inf) for each in gaps]).double()
        planes = {
            "round": torch.arange(len(log))[:, None, None].expand_as(place),
            "run": added[..., None].expand_as(place),
            "source": torch.where(forced, FORCED, kind),
            "p": torch.where(forced, 1.0, chance),
        }
        place = place.transpose(0, 1).flatten(1)
        for name, plane in planes.items():
            maps[name].scatter_(1, place, plane.transpose(0, 1).flatten(1).double())
        margins.scatter_(1, place, torch.where(forced, torch.inf, gap).transpose(0, 1).flatten(1))
        return maps, margins, totals, cost, expected


def _fit(values: Tensor, width: int, fill: float) -> Tensor:
    """values [B, M] cut or padded to [B, width]."""
    if values.shape[1] == width:
        return values
    return torch.nn.functional.pad(values, (0, max(0, width - values.shape[1])), value=fill)[:, :width]
