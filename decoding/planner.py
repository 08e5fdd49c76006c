"""How far to draft, decided by what rounds cost and what they commit.

Only seeded decoding may ask: there the draft length changes the time and never the picture.
"""

from __future__ import annotations

from time import perf_counter


class Planner:
    """Climbs to the draft length that commits the most tokens per second.

    Lengths are tried in blocks of rounds, because in Jacobi decoding what a round keeps depends on the rounds before it. After
    each block the planner returns to the best length it knows, unless a neighbour of that one is unknown, or has not been tried
    for a while: then that is next. Length 0 is a choice like any other: speculation that does not pay switches itself off.

    lengths: the candidates, 0 is always among them; start: where to begin. A planner may be kept from one picture to the next.
    """

    block = 14
    settle = 4
    patience = 10
    fade = 0.8

    def __init__(self, lengths: tuple[int, ...], start: int):
        self.lengths = tuple(sorted({0, start, *lengths}))
        self._place = self.lengths.index(start)
        self._tokens = [0.0] * len(self.lengths)
        self._seconds = [0.0] * len(self.lengths)
        self._seen = [0] * len(self.lengths)
        self._blocks = self._rounds_here = 0
        self._gained = self._spent = 0.0
        self._begun: float | None = None
        self.rounds = self.rounds_off = 0

    def begin(self) -> None:
        """A new picture: the time since the last round is not a round's."""
        self._begun = None
        self.rounds = self.rounds_off = 0

    def choose(self) -> int:
        """The draft length of the round that begins now."""
        now = perf_counter()
        if self._begun is not None:
            # The first rounds at a length still live on what the length before it drafted.
            if self._rounds_here > self.settle:
                self._spent += now - self._begun
            else:
                self._gained = 0.0
            if self._rounds_here >= self.block:
                self._close()
        self._begun = now
        self._rounds_here += 1
        length = self.lengths[self._place]
        self.rounds += 1
        self.rounds_off += length == 0
        return length

    def skip(self, seconds: float) -> None:
        """Leave out seconds that somebody else has just spent."""
        if self._begun is not None:
            self._begun += seconds

    def note(self, accepted: list[int]) -> None:
        """What the round kept, one number per row that is not complete."""
        self._gained += 1.0 + sum(accepted) / len(accepted) if accepted else 0.0

    def rate(self, place: int) -> float:
        """Tokens per second of the length at `place`, which has been tried."""
        return self._tokens[place] / self._seconds[place]

    def _close(self) -> None:
        """End a block: book it and decide where to go."""
        here = self._place
        self._tokens[here] = self.fade * self._tokens[here] + self._gained
        self._seconds[here] = self.fade * self._seconds[here] + self._spent
        self._blocks += 1
        self._seen[here] = self._blocks
        self._gained = self._spent = 0.0
        self._rounds_here = 0
        best = max((place for place in range(len(self.lengths)) if self._seconds[place] > 0), key=self.rate)
        near = [place for place in (best + 1, best - 1) if 0 <= place < len(self.lengths)]
        waiting = [place for place in near if not self._seen[place] or self._blocks - self._seen[place] > self.patience]
        self._place = min(waiting, key=lambda place: self._seen[place]) if waiting else best

    @property
    def notes(self) -> list[str]:
        """What a user should know about this picture."""
        if self.rounds_off * 2 < self.rounds:
            return []
        return [f"speculation did not pay and was off in {self.rounds_off} of {self.rounds} rounds"]
