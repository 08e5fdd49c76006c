"""What a user sees while a picture is drawn: the bar, the unfinished picture, and an event for the browser's live panel."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..decoding.trace import Trace
from . import host

if TYPE_CHECKING:
    from PIL.Image import Image

EVENT = "foredraft.progress"
EVENT_SECONDS = 0.05
PREVIEW_SECONDS = 0.1
PREVIEW_SIZE = 512
PREVIEW_SHARE = 0.04
"""At most this share of the time goes into previews."""
UNDRAWN = 46


class Watcher:
    """`callback_on_step_end` of one call. Its interrupt check is the only thing that may end the call early.

    Every round: interrupt check and progress. Now and then: the first picture as far as it is drawn, and the event
    `foredraft.progress`, at most 20 times a second. Its payload: node, method (title), exact, images, rows, cols; tokens (of
    picture 0), total (tokens of a picture), rounds, forwards (of the target), tokens_per_forward, acceptance (of all judged
    draft tokens, null if none), run (for each committed token of picture 0 in raster order, how many were committed with it),
    seconds (since the call began), done, and speedup: an estimate, (tokens per picture x `single`) / seconds, where `single` is
    the measured time of one plain decoding step of the same batch; null if that is unknown.

    Args:
        node: id of the running node. title, exact: of the method. images: B. bar: ComfyUI's; before: what it showed so far. grid:
        rows and columns of tokens. single: seconds of a plain decoding step.
    """

    def __init__(
        self,
        node: Any,
        title: str,
        exact: bool,
        images: int,
        bar: Any,
        grid: tuple[int, int],
        before: int = 0,
        single: float | None = None,
    ):
        self.node, self.title, self.exact, self.images = node, title, exact, images
        self.bar, self.grid, self.before, self.single = bar, grid, before, single
        self.lengths: list[Tensor] = []
        self.begun = self.sent = perf_counter()
        self.preview_due = self.begun + PREVIEW_SECONDS
        self.shown = False

    tensors = ("tokens", "length", "counts")

    def __call__(self, pipeline: Any, number: int, count: int, tensors: dict[str, Any]) -> None:
        """After every round; see `SpeculativeDecodingPipeline.__call__`."""
        host.check_interrupt()
        self.lengths.append(tensors["length"])
        now = perf_counter()
        preview = None
        if now >= self.preview_due and count < tensors["tokens"].shape[1]:
            preview = ("JPEG", self.picture(pipeline, tensors["tokens"], tensors["length"]), PREVIEW_SIZE)
            self.shown = True
            took = perf_counter() - now
            self.preview_due = now + took + max(PREVIEW_SECONDS, took / PREVIEW_SHARE)
        self.bar.update_absolute(self.before + count, None, preview)
        if now - self.sent >= EVENT_SECONDS:
            self.sent = now
            self.send(number + 1, tensors)

    def picture(self, pipeline: Any, tokens: Tensor, length: Tensor) -> Any:
        """The first picture as a PIL image, grey where nothing is drawn yet."""
        height, width = self.grid
        drawn = (torch.arange(height * width, device=tokens.device) < length[0]).view(height, width)
        shape = (1, height, width, *tokens.shape[2:])
        known = tokens[:1].view(shape) * drawn.view(1, height, width, *[1] * (tokens.dim() - 2))
        pixels = pipeline._pictures(known, "pt")[0] * 255.0
        rows, cols = pixels.shape[-2] // height, pixels.shape[-1] // width
        seen = drawn.repeat_interleave(rows, 0).repeat_interleave(cols, 1)
        pixels = torch.where(seen, pixels, UNDRAWN).permute(1, 2, 0).round().to("cpu", torch.uint8)
        from PIL import Image

        return Image.fromarray(pixels.numpy())

    def send(self, rounds: int, tensors: dict[str, Any]) -> None:
        """The event of a call that goes on. Reading the tensors waits for the device, so this is not done every round."""
        ends = torch.stack([length[0] for length in self.lengths]).tolist()
        runs = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        total = tensors["tokens"].shape[1]
        forwards, judged, accepted = tensors["counts"].double().mean(1).tolist()
        self._send(
            tokens=ends[-1],
            drawn=float(tensors["length"].double().mean()),
            total=total,
            rounds=rounds,
            forwards=round(forwards),
            rate=float(tensors["length"].sum()) / max(1.0, forwards * self.images),
            acceptance=accepted / judged if judged else None,
            run=[length for length in runs for _ in range(length)],
            done=False,
        )

    def finish(self, traces: list[Trace], picture: Image) -> float | None:
        """The last event, with the traces' figures; returns the speed-up. The finished picture replaces an unfinished one."""
        first = traces[0]
        if self.shown:
            done = self.before + first.grid[0] * first.grid[1]
            self.bar.update_absolute(done, None, ("JPEG", picture, PREVIEW_SIZE))
        tokens, forwards = sum(trace.tokens for trace in traces), sum(trace.target_forwards for trace in traces)
        judged = sum(trace.judged for trace in traces)
        return self._send(
            tokens=first.tokens,
            drawn=tokens / len(traces),
            total=first.grid[0] * first.grid[1],
            rounds=max(trace.rounds for trace in traces),
            forwards=max(trace.target_forwards for trace in traces),
            rate=tokens / max(1, forwards),
            acceptance=sum(trace.accepted for trace in traces) / judged if judged else None,
            run=[length for row in first.run for length in row if length > 0],
            done=True,
        )

    def _send(self, tokens: int, drawn: float, total: int, rate: float, **values: Any) -> float | None:
        seconds = perf_counter() - self.begun
        speedup = None if self.single is None or seconds <= 0 else drawn * self.single / seconds
        payload = {
            "node": self.node,
            "method": self.title,
            "exact": self.exact,
            "images": self.images,
            "rows": self.grid[0],
            "cols": self.grid[1],
            "tokens": tokens,
            "total": total,
            "tokens_per_forward": rate,
            "seconds": seconds,
            "speedup": speedup,
            **values,
        }
        host.send(EVENT, payload)
        return speedup
