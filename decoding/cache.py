"""A position-indexed cache: undoing a rejected draft is lowering an integer.

Every cache row (conditional rows first, then the unconditional ones) owns `slots` places: the left-padded prompt, one place per
image column, scratch places for the nodes of a draft tree, and a last *trash* slot that takes the writes of idle rows and of
invalid draft nodes. Slots at or above a row's `cached` column are simply overwritten; writing a slot is idempotent, so ragged
rows need no alignment.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import Layout


class Cache:
    """Keys and values [layers, R, slots, kv heads, head width] and the hidden plane [R, slots, D]."""

    def __init__(
        self,
        layers: int,
        rows: int,
        slots: int,
        heads: int,
        width: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.rows, self.slots = rows, slots
        planes = torch.zeros(2, layers, rows, slots, heads, width, dtype=dtype, device=device)
        self.keys, self.values = planes
        self._planes = planes.view(2 * layers, rows * slots, -1)
        self.hidden = torch.zeros(rows, slots, dim, dtype=dtype, device=device)
        self._flat = [(k.view(rows * slots, -1), v.view(rows * slots, -1)) for k, v in zip(self.keys, self.values, strict=True)]
        self._first = torch.arange(rows, device=device) * slots

    @property
    def trash(self) -> int:
        """The slot nobody reads."""
        return self.slots - 1

    def flat(self, slots: Tensor) -> Tensor:
        """Indices into the flattened (row, slot) plane for slots [R, T]: [R * T]."""
        return (slots + self._first[:, None]).reshape(-1)

    def update(self, layer: int, layout: Layout, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write key, value [R, T, H, hd] at layout.flat; return what this round reads: [R, tier, H, hd] each."""
        keys, values = self._flat[layer]
        count = layout.flat.shape[0]
        keys.index_copy_(0, layout.flat, key.reshape(count, -1))
        values.index_copy_(0, layout.flat, value.reshape(count, -1))
        return self.keys[layer, :, : layout.tier], self.values[layer, :, : layout.tier]

    def update_hidden(self, layout: Layout, hidden: Tensor) -> None:
        """Write hidden [R, T, D] at layout.flat."""
        self.hidden.view(self.rows * self.slots, -1).index_copy_(0, layout.flat, hidden.reshape(layout.flat.shape[0], -1))

    def hidden_at(self, slots: Tensor) -> Tensor:
        """Hidden states at slots [R, T]: [R, T, D]."""
        return self.hidden.view(self.rows * self.slots, -1).index_select(0, self.flat(slots)).view(*slots.shape, -1)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots source [R, M] to target [R, M], all planes. Reads finish before writes, so the two may overlap."""
        source, target = self.flat(source), self.flat(target)
        hidden = self.hidden.view(self.rows * self.slots, -1)
        for plane, axis in ((self._planes, 1), (hidden, 0)):
            plane.index_copy_(axis, target, plane.index_select(axis, source))
