"""What a relaxed setting gains and what it loses, against exact decoding: shared by the benches `pareto` and `cool_sd`.

Each setting draws the same prompts, picture i with a seed of its own, independent of the reference's. Loss has three measures:

- divergence: Jensen-Shannon divergence between the histograms of codes at each place of the grid, setting against reference,
  averaged over the places, in nats. Histograms of a few hundred pictures differ by chance, so plain decoding with other seeds is
  a setting like the others: its divergence is the floor.
- lost: the target's log-likelihood of the committed tokens, in nats per token, that is lost against the reference's pictures of
  the same prompts.
- names: the share of pictures that show what the prompt names (see `training/adherence.py`).

Errors are one standard deviation: of a mean over pictures (in pairs of one prompt), of a share, and by the jackknife over groups
of pictures for divergence.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ..decoding.types import Draft
from ..training import adherence
from ..training.names import prompt_text
from . import pictures
from .cases import Case, Family
from .compare import AR
from .record import Laws, recording
from .report import Totals

COUNT, QUICK = 400, 8
BATCH = {"cpu": 16, "cuda": 512}
CALL: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
OTHER = 1_000_000
"""Where the seeds of the settings begin; the reference's begin at 0."""
GROUPS = 20
HEADERS = tuple("setting;speed-up;TPF;length;expected;accepted;divergence;log p lost;names;relaxation;law".split(";"))


@dataclass(frozen=True)
class Drawing:
    """How a bench draws its settings. count: pictures of each (None: `COUNT`, or `QUICK` when quick); partial: file of finished
    settings; drawn_only: leave out what is not in that file."""

    count: int | None = None
    partial: Path | None = None
    drawn_only: bool = False


ANEW = Drawing()


@dataclass(frozen=True)
class Setting:
    """One point of a plot: a case, the series it belongs to, and the value of the knob that tells it from its neighbours."""

    series: str
    case: Case
    knob: str = ""

    @property
    def name(self) -> str:
        """Unique within a bench."""
        return f"{self.series}, {self.knob}" if self.knob else self.series


PLAIN = Setting("plain decoding", Case(AR, call=CALL))


@dataclass
class Point:
    """One setting, measured. speedups: one per timed picture, plain decoding just before over the setting's own."""

    series: str
    knob: str
    options: dict[str, Any]
    pictures: int
    totals: Totals
    divergence: float
    divergence_error: float
    log_p: float
    lost: float
    lost_error: float
    names: float
    tv: float | None
    speedups: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The setting's."""
        return f"{self.series}, {self.knob}" if self.knob else self.series

    @property
    def speedup(self) -> float:
        """Median."""
        return median(self.speedups) if self.speedups else 1.0

    @property
    def names_error(self) -> float:
        """Standard error of a share."""
        return float((self.names * (1 - self.names) / self.pictures) ** 0.5)

    def row(self) -> list[str]:
        """One line under `HEADERS`."""
        totals = self.totals
        return [
            self.name,
            f"{self.speedup:.2f}x",
            f"{totals.tokens_per_forward:.2f}",
            f"{totals.mean_acceptance_length:.2f}",
            "" if totals.expected_length is None else f"{totals.expected_length:.2f}",
            f"{totals.acceptance_rate:.0%}",
            f"{self.divergence:.4f} ± {self.divergence_error:.4f}",
            f"{self.lost:.3f} ± {self.lost_error:.3f}",
            f"{self.names:.1%} ± {self.names_error:.1%}",
            "" if totals.exact or totals.relaxation is None else f"{totals.relaxation:.4f}",
            "exact" if totals.exact else "relaxed",
        ]

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` reads it back."""
        return {**dataclasses.asdict(self), "name": self.name, "speedup": self.speedup, "names_error": self.names_error}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Point:
        """Read what `to_dict` wrote."""
        known = {item.name: values[item.name] for item in dataclasses.fields(cls)}
        return cls(**{**known, "totals": Totals(**known["totals"])})


class Partial:
    """Finished settings, written after each, so that a bench that was ended goes on where it was.

    path: a JSON file, or None to keep nothing. key: what the settings depend on; a file with another key is begun anew.
    """

    def __init__(self, path: Path | None, key: dict[str, Any]):
        self.path, self.key, self.done = path, json.loads(json.dumps(key)), {}
        if path is not None and path.is_file():
            try:
                record = json.loads(path.read_text(encoding="utf-8"))
            except ValueError:
                record = {}
            if record.get("key") == self.key:
                self.done = dict(record["done"])

    def put(self, name: str, value: Any) -> None:
        """Keep a setting."""
        self.done[name] = value
        if self.path is None:
            return
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        temporary.write_text(json.dumps({"key": self.key, "done": self.done}) + "\n", encoding="utf-8")
        temporary.replace(self.path)


def key_of(family: Family, count: int) -> dict[str, Any]:
    """What drawn settings depend on, wherever they were drawn: the model's weights, the pictures, the sampling."""
    files = sorted(family.folder.rglob("*.safetensors"))
    stamps = [[str(path.relative_to(family.folder)), hashlib.sha256(path.read_bytes()).hexdigest()] for path in files]
    return {"files": stamps, "dtype": str(family.dtype), "count": count, **CALL}


def available(family: Family, settings: Sequence[Setting]) -> tuple[list[Setting], list[str]]:
    """The settings this folder has the components for, and one note per method it has not."""
    fitting, missing = [], {}
    for setting in settings:
        name = setting.case.method
        if name not in missing:
            try:
                family.pipeline(name)
            except (ValueError, FileNotFoundError) as error:
                missing[name] = f"Left out: {name} ({error})."
        if name not in missing:
            fitting.append(setting)
    return fitting, list(missing.values())


def measure(
    family: Family, settings: Sequence[Setting], quick: bool, repeats: int, drawing: Drawing, tag: str = ""
) -> list[Point]:
    """Draw, judge and time every setting, plain decoding (the floor) first.

    Args:
        settings: what to measure; names must differ. quick: a few pictures. repeats: timed pictures per setting; with 0 nothing
            is timed, and a later call with the same `drawing.partial`, on any machine, times what was drawn.
        drawing: see there. tag: told to the progress bar.

    Returns:
        one point per setting, `PLAIN` in front.
    """
    pictures.check(family)
    count = drawing.count or (QUICK if quick else COUNT)
    settings = [PLAIN, *settings]
    if len({setting.name for setting in settings}) < len(settings):
        raise ValueError("two settings of this bench have the same name")
    kept = Partial(drawing.partial, key_of(family, count))
    if drawing.drawn_only:
        settings = [setting for setting in settings if setting.name in kept.done]
        if not settings:
            raise ValueError(f"{drawing.partial} holds no finished setting of this model with {count} pictures")
    bar = tqdm(total=(len(settings) + 1) * count, unit=" pictures", mininterval=5, desc=tag, disable=None)
    if "reference" not in kept.done:
        drawn = draw(family, PLAIN.case, count, 0, bar)
        kept.put("reference", {"tokens": drawn.tokens.tolist(), "log_p": drawn.log_p.tolist()})
    tokens, log_p = (torch.tensor(kept.done["reference"][name]) for name in ("tokens", "log_p"))
    bar.update(count - bar.n)
    points = []
    for setting in settings:
        if setting.name in kept.done:
            point = Point.from_dict(kept.done[setting.name])
            bar.update(count)
        else:
            bar.set_description(setting.name)
            point = judge(setting, draw(family, setting.case, count, OTHER, bar), tokens, log_p)
            kept.put(setting.name, point.to_dict())
        if setting is not PLAIN and not point.speedups and repeats:
            point.speedups = time(family, setting.case, repeats)
            kept.put(setting.name, point.to_dict())
        points.append(point)
    bar.close()
    return points


@dataclass
class Drawn:
    """The pictures of one setting. tokens [n, N]; log_p [n]: mean over the tokens; right: how many show the prompted name."""

    tokens: Tensor
    log_p: Tensor
    right: int
    traces: list[Any]
    tv: float | None
    codes: int


def draw(family: Family, case: Case, count: int, first: int, bar: Any) -> Drawn:
    """`count` pictures in batches; picture i has seed first + i."""
    wanted, laws = pictures.subjects(count), Laws()
    noted = dataclasses.replace(case, build=recording(laws, case.build))
    tokens, traces, right = [], [], 0
    size = BATCH.get(family.device.type, BATCH["cpu"])
    for start in range(0, count, size):
        part = wanted[start : start + size]
        generators = [torch.Generator().manual_seed(first + start + number) for number in range(len(part))]
        output = pictures.draw(family, noted, [prompt_text(*each) for each in part], generators)
        found = adherence.nearest_name(output.images.cpu() * 2 - 1, pictures.reference(family))
        right += sum(got == name for got, (name, _) in zip(found, part, strict=True))
        tokens.append(output.tokens.flatten(1).cpu())
        traces += output.traces
        bar.update(len(part))
    codes = torch.cat(tokens)
    if any(trace.unverified for trace in traces):
        texts = [prompt_text(*each) for each in wanted]
        parts = [slice(at, at + size) for at in range(0, count, size)]
        log_p = torch.cat([likelihood(family, case, texts[part], codes[part]) for part in parts])
    else:
        chances = [torch.tensor(trace.probability, dtype=torch.float64) for trace in traces]
        log_p = torch.stack([each.clamp(min=1e-12).log().mean() for each in chances]).float()
    return Drawn(codes, log_p, right, traces, laws.tv, family.pipeline(case.method).target.vocab_size)


@torch.no_grad()
def likelihood(family: Family, case: Case, prompts: list[str], tokens: Tensor) -> Tensor:
    """The target's mean log-probability of whole pictures, tokens [B, N], in one forward: [B].

    For methods that commit tokens the target never judged; guidance and warp are the case's.
    """
    pipeline = family.pipeline(case.method)
    names = ("guidance_scale", "temperature", "top_k", "top_p")
    sampling, target = pipeline._sampling(*(case.call.get(name) for name in names)), pipeline.target
    grid = pipeline._grid(case.call.get("height"), case.call.get("width"))
    conditioning = target.encode(pipeline.components, prompts, None, sampling.guided, grid)
    sequence = target.begin(conditioning, target.lattice(grid), sampling, tokens.shape[1])
    draft = Draft(tokens.to(sequence.tokens.device))
    log_p = target.score(sequence, draft).log_p[:, :-1].gather(2, draft.tokens[..., None])[..., 0]
    return log_p.double().clamp(min=math.log(1e-12)).mean(1).float().cpu()


def judge(setting: Setting, drawn: Drawn, tokens: Tensor, log_p: Tensor) -> Point:
    """The pictures of a setting against the reference's: tokens [n, N], log_p [n]."""
    far, error = divergence(drawn.tokens, tokens, drawn.codes)
    lost = log_p - drawn.log_p
    return Point(
        setting.series,
        setting.knob,
        setting.case.options,
        len(drawn.tokens),
        Totals.of(drawn.traces),
        far,
        error,
        float(drawn.log_p.mean()),
        float(lost.mean()),
        float(lost.std(correction=0)) / max(1, len(lost) - 1) ** 0.5,
        drawn.right / len(drawn.tokens),
        drawn.tv,
    )


def divergence(tokens: Tensor, reference: Tensor, codes: int) -> tuple[float, float]:
    """Mean over the places of the Jensen-Shannon divergence between code histograms, in nats, and its jackknife error.

    tokens [n, N], reference [m, N] of values below `codes`.
    """
    base = histogram(reference, codes)
    whole = histogram(tokens, codes)
    value = jensen_shannon(whole, base)
    groups = [part for part in torch.arange(len(tokens)).tensor_split(min(GROUPS, len(tokens))) if len(part)]
    if len(groups) < 2:
        return value, 0.0
    others = torch.tensor([jensen_shannon(whole - histogram(tokens[part], codes), base) for part in groups])
    count = len(groups)
    return value, float(((count - 1) / count * (others - others.mean()).square().sum()) ** 0.5)


def histogram(tokens: Tensor, codes: int) -> Tensor:
    """How often each code occurs at each place: [n, N] -> float64 [N, codes]."""
    places = tokens.shape[1]
    flat = (torch.arange(places) * codes + tokens).flatten()
    return torch.bincount(flat, minlength=places * codes).view(places, codes).double()


def jensen_shannon(one: Tensor, other: Tensor) -> float:
    """Mean over rows of the divergence of two histograms [N, V], in nats (at most log 2)."""
    a, b = one / one.sum(1, keepdim=True), other / other.sum(1, keepdim=True)
    middle = 0.5 * (a + b)
    entropy = [-torch.special.xlogy(law, law).sum(1) for law in (middle, a, b)]
    return float((entropy[0] - 0.5 * (entropy[1] + entropy[2])).mean().clamp(min=0))


def time(family: Family, case: Case, repeats: int) -> list[float]:
    """Speed-ups over plain decoding, one picture at a time, each timed right after plain decoding's."""
    names = [prompt_text(*each) for each in pictures.subjects(max(repeats, 2))]
    for each in (PLAIN.case, case):
        family.warm_up(each, names[0])
    ratios = []
    for number in range(repeats):
        seconds = [family.draw(each, names[number], number)[1] for each in (PLAIN.case, case)]
        ratios.append(seconds[0] / seconds[1])
    return ratios
