"""Speculative Jacobi decoding, SJD and SJD++: no draft model, the target's last iteration is the draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..decoding.drafters.jacobi import INITS, TAILS, JacobiDrafter
from ..decoding.rules import Clustered, Exact
from ..decoding.verify import Match, Prefix
from .base import Method, Run, SpeculativeDecodingPipeline
from .options import AUTO, MethodConfig, option

WINDOWS = (0, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
NOT_SEEDED = {"rule": ("exact", "clustered")}


@dataclass(frozen=True)
class SJDConfig(MethodConfig):
    """Knobs of SJD and SJD++."""

    name: ClassVar[str] = "sjd"
    title: ClassVar[str] = "Speculative Jacobi decoding (SJD, SJD++)"
    paper: ClassVar[str] = "Teng et al. 2025 (SJD); SJD++; Wiggers & Hoogeboom 2020 (seeded)"

    rule: str = option(
        "seeded",
        "seeded: the same picture as plain decoding with this seed; exact: the same distribution, another picture; "
        "clustered: look-alike codes count together (GSD, relaxed)",
        choices=("seeded", "exact", "clustered"),
    )
    tail: str = option(
        "gumbel",
        "how unaccepted tokens are redrawn: gumbel and coupled (exact), resample (SJD, exact), reuse (SJD++, relaxed)",
        choices=TAILS,
        visible_if=NOT_SEEDED,
    )
    init: str = option("above", "where a new slot of the window takes its first token from", choices=INITS)
    window: int | str | None = option(
        None,
        "tokens drafted per forward; automatic = the family's value for this device; 'auto' measures (seeded only)",
        low=1,
        high=1024,
        automatic=True,
        timing=True,
    )
    tau: float = option(
        0.5,
        "SJD++: keep a token while its probability has not fallen below tau times the old one",
        low=0.0,
        high=2.0,
        step=0.05,
        visible_if={"tail": ("reuse",), **NOT_SEEDED},
    )
    refine: bool = option(True, "refine unaccepted tokens from round to round; off is the paper's ablation (slow)")

    def check(self) -> None:
        """Seeded decoding has one tail, the position's own noise; timing may decide only where it cannot change the picture."""
        if self.rule == "seeded" and self.tail != "gumbel":
            raise ValueError(f"tail={self.tail!r} needs rule='exact' or 'clustered': under rule='seeded' it is always 'gumbel'")
        if self.window == AUTO and self.rule != "seeded":
            raise ValueError(
                "window='auto' follows the clock and is allowed only under rule='seeded', where it cannot change the picture"
            )

    @property
    def exact(self) -> bool:
        """reuse and clustered are relaxed."""
        return self.rule == "seeded" or (self.rule == "exact" and (self.tail != "reuse"))


class SJDPipeline(SpeculativeDecodingPipeline):
    """Speculative Jacobi decoding. The default, rule="seeded", draws the same picture as plain decoding, faster."""

    config_class = SJDConfig

    def window(self, config: SJDConfig, device: torch.device) -> int:
        """W: as asked, or the family's value for this kind of device."""
        if isinstance(config.window, int):
            return config.window
        windows = self.family_default("window", {})
        return int(windows.get(device.type, windows.get("cpu", 16)))

    def scratch(self, config: Any, device: torch.device) -> int:
        """The window; the largest one if it is chosen by the clock."""
        return max(WINDOWS) if config.window == AUTO else self.window(config, device)

    def method(self, run: Run) -> Method:
        """Jacobi drafts, verified by the rule."""
        config: SJDConfig = run.config
        seeded = config.rule == "seeded"
        drafter = JacobiDrafter(
            self.scratch(config, run.device),
            self.target.vocab_size,
            config.tail,
            config.init,
            config.tau,
            seeded,
            config.refine,
            torch.float64 if run.dtype == torch.float64 else torch.float32,
            self.planner(run, WINDOWS, self.window(SJDConfig(), run.device)) if config.window == AUTO else None,
        )
        if seeded:
            return Method(drafter, Match())
        rule = Exact() if config.rule == "exact" else Clustered(self.codec.codebook().to(run.device))
        return Method(drafter, Prefix(rule), measurable=config.tail != "reuse")
