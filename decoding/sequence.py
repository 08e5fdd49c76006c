"""What has been committed so far, and the cache that remembers it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .cache import Cache
from .layout import ChainLayouts
from .sampling import Sampling


@dataclass
class Sequence:
    """B images in the making.

    tokens [B, N + 1]: column 0 is the start column (its embedding is a row of `start`), image token i sits in column i + 1.
    length [B]: columns committed so far (at least 1). cached [B]: columns whose keys, values and features are final;
    `cached <= length - 1`, and columns below it never change. pending: how many committed columns the next forward feeds, the
    same for all rows (a row that has fewer feeds final columns again, which is idempotent). limit = N + 1: the full length.
    low, high: smallest and largest length, read from the device once a round. prompt: slots before column 0; pad [R]: left pads
    per cache row; start [R, D] embeddings of column 0. forced [N]: the grammar's token at each index, -1 = free.
    chains: tables of the common layout, made when first needed.
    model_seconds, draft_seconds: time spent in forwards of the target and of the draft so far.
    """

    tokens: Tensor
    length: Tensor
    cached: Tensor
    cache: Cache | None
    grid: tuple[int, int]
    sampling: Sampling
    prompt: int = 0
    pad: Tensor | None = None
    start: Tensor | None = None
    forced: Tensor | None = None
    pending: int = 1
    low: int = 1
    high: int = 1
    model_seconds: float = 0.0
    draft_seconds: float = 0.0
    chains: ChainLayouts | None = None
    _uneven: bool = True
    _ahead: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    _counting: Tensor | None = field(default=None, repr=False)
    _storage: Tensor | None = field(default=None, repr=False)
    _view: Tensor | None = field(default=None, repr=False)
    _next_free: Tensor | None = field(default=None, repr=False)

    @property
    def limit(self) -> int:
        """Columns of a finished image: N + 1."""
        return self.tokens.shape[1]

    @property
    def active(self) -> Tensor:
        """Rows that still miss tokens: bool [B]."""
        return self.length < self.limit

    @property
    def done(self) -> bool:
        """Whether every row is complete (as of the last `refresh`)."""
        return self.low >= self.limit

    def commit(
        self, tokens: Tensor, count: Tensor, accepted: Tensor, path: Tensor | None = None, scored: Tensor | None = None
    ) -> Tensor:
        """Append tokens[b, :count[b]] to every row; keep the cache of the accepted draft nodes. Returns how many were added [B].

        tokens [B, M]; count, accepted [B]; path [B, D]: the accepted nodes of a tree in order of depth (None: a chain); scored
        [B]: False where no forward was run, so that nothing new is cached. Rows stop at `limit`. Columns the grammar forces
        right after the new ones are appended as well: they need no forward of their own. Columns at and beyond `length` hold
        whatever was tried there last.
        """
        before = self.length
        count = torch.minimum(count, self.limit - before)
        if path is not None and self.cache is not None and path.shape[1]:
            self._keep_path(before, torch.minimum(accepted, count), path)
        place = self.ahead(tokens.shape[1]) + 1
        if self.high + tokens.shape[1] > self.limit:
            place.clamp_(max=self.limit)
        self._writable().scatter_(1, place, tokens)
        self.length = before + count
        # What was scored is cached up to the last committed token, which no forward has fed yet; finished rows are fed nothing.
        fed = count > 0 if scored is None else scored & (count > 0)
        self.cached = torch.where(fed, self.length - 1, self.cached)
        self._uneven = self._uneven or scored is not None
        if self.forced is not None:
            self.append_forced()
        return self.length - before

    def refresh(self) -> None:
        """The one host synchronisation of a round: read the lengths and, where rows may differ in it, what is pending."""
        if self._uneven or self.forced is not None:
            gap = torch.where(self.active, self.length - self.cached, 1)
            self.low, self.high, self.pending = torch.stack((self.length.min(), self.length.max(), gap.max())).tolist()
            self._uneven = self.pending > 1
        elif len(self.length) == 1:
            self.low = self.high = int(self.length)
        else:
            self.low, self.high = torch.stack(torch.aminmax(self.length)).tolist()

    def follow(self, other: Sequence) -> None:
        """Take over another sequence's tokens; columns stay cached up to the first one that was fed something else here."""
        column, fed = self.steps(self.limit), torch.minimum(self.cached, other.length - 1)
        same = (self.tokens == other.tokens) & (column < fed[:, None])
        self.tokens, self.length, self.cached = other.tokens.clone(), other.length, same.byte().argmin(1)
        gap = self.length - self.cached
        if other.high >= self.limit:
            gap = torch.where(self.active, gap, 1)
        self.low, self.high, self.pending = other.low, other.high, int(gap.max())
        self._uneven = self.pending > 1

    def clear_ahead(self) -> None:
        """Zero the columns that are not committed."""
        column = torch.arange(self.limit, device=self.tokens.device)
        self.tokens = torch.where(column < self.length[:, None], self.tokens, 0)

    def ahead(self, count: int) -> Tensor:
        """Image-token indices of the next tokens: [B, count], the first being `length - 1`."""
        if self._ahead is None or self._ahead[0] is not self.length or self._ahead[1].shape[1] < count:
            if self.low == self.high and not self._uneven:
                index = self.steps(self.low - 1 + count)[self.low - 1 :].expand(len(self.length), -1)
            else:
                index = (self.length - 1)[:, None] + self.steps(count)
            self._ahead = (self.length, index)
        return self._ahead[1][:, :count]

    def steps(self, count: int) -> Tensor:
        """0 .. count - 1 on the sequence's device, made once."""
        if self._counting is None or self._counting.shape[0] < count:
            self._counting = torch.arange(max(count, self.limit + 64), device=self.length.device)
        return self._counting[:count]

    def _writable(self) -> Tensor:
        """The storage behind `tokens` and one column more, which takes what lies past the end: [B, N + 2]."""
        if self._storage is None or self.tokens is not self._view:
            self._storage = torch.nn.functional.pad(self.tokens, (0, 1))
            self.tokens = self._view = self._storage[:, : self.limit]
        return self._storage

    def append_forced(self) -> None:
        """Append every forced token that follows directly (forced [N] holds the token of a forced index, -1 elsewhere)."""
        forced = self.forced
        if forced is None:
            return
        if self._next_free is None:
            count = forced.shape[0]
            free = torch.where(forced < 0, torch.arange(count, device=forced.device), count)
            following = free.flip(0).cummin(0).values.flip(0)
            self._next_free = torch.nn.functional.pad(following, (0, 1), value=count)
        reach = self._next_free[self.length - 1] + 1
        columns = torch.arange(1, self.limit, device=forced.device)
        inside = (columns >= self.length[:, None]) & (columns < reach[:, None])
        tokens = self._writable()[:, 1 : self.limit]
        tokens.copy_(torch.where(inside, forced, tokens))
        self.length = reach

    def _keep_path(self, before: Tensor, accepted: Tensor, path: Tensor) -> None:
        """Copy the accepted tree nodes from their scratch slots to their columns' slots."""
        cache = self.cache
        if cache is None:
            return
        depth = self.steps(path.shape[1])
        kept = depth < accepted[:, None]
        base = self.prompt + before[:, None]
        source = torch.where(kept, base + path.clamp(min=0), cache.trash)
        target = torch.where(kept, base + depth, cache.trash)
        repeat = cache.rows // len(before)
        cache.move(source.repeat(repeat, 1), target.repeat(repeat, 1))
