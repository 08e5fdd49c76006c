"""Where the tokens of one forward go: slots, columns and the attention mask. Pure functions of integers.

A forward feeds `pending` committed columns and then K draft nodes. Committed column c lives at slot `prompt + c`. Draft node k
of a row with `length` committed columns lives at slot `prompt + length + k`; in a chain that is already its final place, in a
tree the accepted path is copied there when it is committed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """One forward over R cache rows and T = pending + K tokens.

    columns [B, T]: the image column of each fed token (tree nodes: length - 1 + depth); flat [R * T]: index of each token's
    slot in the cache's flattened (row, slot) plane; mask: additive float [R, 1, T, tier]; tier: how many slots are read.
    """

    columns: Tensor
    flat: Tensor
    mask: Tensor
    tier: int


def ancestors(parents: Tensor, height: int | None = None) -> Tensor:
    """Which nodes each node may see: bool [B, K, K], true on the diagonal and at every ancestor.

    parents [B, K]: index of each node's parent, -1 for a child of the last committed token; a parent stands before its child.
    height: no node is deeper than this (None: not known).
    """
    nodes = parents.shape[1]
    own = torch.arange(nodes, device=parents.device)
    reach = (parents[..., None] == own) | (own[:, None] == own)
    steps, furthest = 1, (nodes if height is None else min(height, nodes)) - 1
    while steps < furthest:
        reach = reach.float() @ reach.float() > 0
        steps *= 2
    return reach


def fed_columns(length: Tensor, pending: int, draft_depths: Tensor) -> Tensor:
    """Columns of the fed tokens: [B, pending + K]; pending columns before 0 are clipped (they repeat column 0).

    length [B]; draft_depths [B or 1, K] counts from 1.
    """
    back = torch.arange(-pending, 0, device=length.device)
    committed = (length[:, None] + back).clamp_(min=0)
    if draft_depths.shape[1] == 0:
        return committed
    return torch.cat((committed, length[:, None] - 1 + draft_depths), 1)


def fed_slots(length: Tensor, pending: int, nodes: int, prompt: int) -> Tensor:
    """Slots of the fed tokens: [B, pending + nodes]."""
    offsets = torch.arange(-pending, nodes, device=length.device)
    return (length[:, None] + offsets).clamp_(min=0) + prompt


def causal_mask(slots: Tensor, pad: Tensor, tier: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [R, 1, T, tier]: a token at slot s reads the slots from its row's first prompt token up to s.

    slots [R, T]; pad [R] = number of left pads of each cache row.
    """
    return _additive(_later(slots, pad, tier), dtype)


def _later(slots: Tensor, pad: Tensor, tier: int) -> Tensor:
    """What a token does not read in a chain, the padding and what comes after it: bool [R, T, tier]."""
    keys = torch.arange(tier, device=slots.device)
    return (keys > slots[..., None]) | (keys < pad[:, None, None])


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """bool [R, T, tier] -> 0 and -inf [R, 1, T, tier]."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)[:, None]


class ChainLayouts:
    """Plans of the common case, one pending token and a chain after it, from tables made once.

    pad [R]: left pads per cache row; prompt: slots before column 0; slots: places per cache row, the last being the trash slot.
    The masks hold the same numbers as `causal_mask`.
    """

    def __init__(self, pad: Tensor, prompt: int, slots: int, dtype: torch.dtype):
        keys = torch.arange(slots, device=pad.device)
        self.prompt, self.slots = prompt, slots
        self.first = torch.arange(len(pad), device=pad.device)[:, None] * slots + prompt
        self.padding = torch.zeros(len(pad), 1, 1, slots, dtype=dtype, device=pad.device)
        self.padding.masked_fill_((keys < pad[:, None])[:, None, None], -torch.inf)
        # Zeros, then -inf: a window of it that begins later hides more.
        self.horizon = self.padding.new_zeros(2 * slots)
        self.horizon[slots:] = -torch.inf
        self.stairs: dict[int, Tensor] = {}

    def even(self, column: int, columns: Tensor) -> Layout:
        """All rows at the same column: every row of columns [B, T] is column, column + 1, ..."""
        count, end = columns.shape[1], self.prompt + column + columns.shape[1]
        mask = self.padding[..., :end]
        if count > 1:
            if count not in self.stairs:
                keys = torch.arange(self.slots + count, device=columns.device)
                later = keys > (torch.arange(count, device=keys.device) + self.slots)[:, None]
                stairs = torch.zeros(later.shape, dtype=mask.dtype, device=keys.device)
                self.stairs[count] = stairs.masked_fill_(later, -torch.inf)
            mask = mask + self.stairs[count][:, self.slots - (end - count) :]
        return Layout(columns, (columns[:1] + self.first).reshape(-1), mask, end)

    def ragged(self, columns: Tensor, tier: int, idle: Tensor | None) -> Layout:
        """Rows at their own columns [B, T]; idle [B, T]: tokens whose writes go to the trash slot (None: no token's)."""
        rows, count = columns.shape
        begin = (self.slots - 1 - self.prompt - columns).view(-1)
        hidden = self.horizon.unfold(0, tier, 1).index_select(0, begin).view(rows, count, tier)
        mask = self.padding[..., :tier].view(-1, rows, 1, tier) + hidden
        first = self.first.view(-1, rows, 1)
        flat = columns + first
        if idle is not None:
            flat = torch.where(idle, first + (self.slots - 1 - self.prompt), flat)
        return Layout(columns, flat.view(-1), mask.view(-1, 1, count, tier), tier)


def tree_mask(slots: Tensor, pad: Tensor, tier: int, dtype: torch.dtype, first: Tensor, seen: Tensor) -> Tensor:
    """Additive mask [R, 1, T, tier] whose last K queries are the nodes of a draft tree.

    first [R]: the slot of node 0, i.e. prompt + length; seen [R, K, K] from `ancestors`. Committed queries stay causal; a node
    reads everything committed and its own ancestors.
    """
    nodes = seen.shape[1]
    hidden = _later(slots, pad, tier)
    own = (first[:, None] + torch.arange(nodes, device=slots.device)).clamp_(max=tier - 1)
    hidden[:, -nodes:].scatter_(2, own[:, None].expand(-1, nodes, -1), ~seen)
    return _additive(hidden, dtype)
