"""How far to draft, decided by what a round costs and what it keeps.

Only seeded decoding may ask: there the draft length changes the time and never the picture.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from time import perf_counter


class Planner:
    """Chooses the draft length that commits the most tokens per second.

    A round's cost is a line over its draft length, fitted to the medians of measured rounds; what it commits is 1 + the sum over
    k of the chance that the first k drafts are kept, estimated from what earlier rounds kept (older ones count less). Length 0 is
    a choice like any other: speculation that does not pay switches itself off, and is tried again now and then.

    lengths: the candidates, 0 among them; start: where to begin. A planner may be kept from one picture to the next.
    """

    decay = 0.97
    prior = 4.0
    patience = 48

    def __init__(self, lengths: tuple[int, ...], start: int):
        self.lengths = tuple(sorted({0, start, *lengths}))
        near = [length for length in (start, start // 2, start * 2) if length in self.lengths]
        self._explore = [*near, *near, 0, 0]
        top = self.lengths[-1]
        self._seconds: dict[int, deque[float]] = {length: deque(maxlen=9) for length in self.lengths}
        self._tested, self._kept = [0.0] * (top + 1), [0.0] * (top + 1)
        self._begun: float | None = None
        self._length = start
        self._idle = 0
        self.rounds = self.rounds_off = 0

    def begin(self) -> None:
        """A new picture: the time since the last round is not a round's."""
        self._begun = None
        self.rounds = self.rounds_off = 0

    def choose(self) -> int:
        """The draft length of the round that begins now."""
        now = perf_counter()
        if self._begun is not None:
            self._seconds[self._length].append(now - self._begun)
        self._begun = now
        if self._explore:
            self._length = self._explore.pop()
        else:
            self._length = max(self.lengths, key=self.rate)
        self._idle = self._idle + 1 if self._length == 0 else 0
        if self._idle > self.patience:
            self._explore = [self.lengths[len(self.lengths) // 2]] * 2
            self._idle = 0
        self.rounds += 1
        self.rounds_off += self._length == 0
        return self._length

    def note(self, accepted: list[int]) -> None:
        """What the round kept, one number per row that is not complete."""
        for k in range(1, self._length + 1):
            self._tested[k] = self.decay * self._tested[k] + len(accepted)
            self._kept[k] = self.decay * self._kept[k] + sum(count >= k for count in accepted)

    def cost(self, length: int) -> float:
        """Seconds of a round, by the fitted line."""
        points = [(size, median(times)) for size, times in self._seconds.items() if times]
        if len(points) < 2:
            return 1.0
        mean_x, mean_y = sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)
        spread = sum((x - mean_x) ** 2 for x, _ in points)
        slope = max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in points) / spread)
        return max(1e-9, mean_y + slope * (length - mean_x))

    def tokens(self, length: int) -> float:
        """Tokens a row is expected to commit in a round."""
        total, chance, ratio = 1.0, 1.0, 0.5
        for k in range(1, length + 1):
            # What was seen, with the geometric continuation of the shorter drafts worth a few rounds beside it.
            guess = chance * ratio
            chance = min(chance, (self._kept[k] + self.prior * guess) / (self._tested[k] + self.prior))
            ratio = chance ** (1.0 / k)
            total += chance
        return total

    def rate(self, length: int) -> float:
        """Expected tokens per second."""
        return self.tokens(length) / self.cost(length)

    @property
    def notes(self) -> list[str]:
        """What a user should know about this picture."""
        if self.rounds_off <= 2:
            return []
        return [f"speculation did not pay and was off in {self.rounds_off} of {self.rounds} rounds"]
