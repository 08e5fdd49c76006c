"""Random numbers as a function of (row seed, image-token index, stream, salt).

Nothing here has state: the same numbers come out whatever the order of the questions, the batch around a row, the window or the
device, because everything is integer arithmetic up to the last conversion. That is what lets every drafter share the target's
own draw, and what makes an image independent of its neighbours in the batch.

Key: splitmix64(splitmix64(seed) ^ (index, stream, salt)), Steele et al. 2014. Per code: two rounds of a 32-bit integer hash.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .sampling import rows_at

DRAW, COIN, RECOVER, DRAFT, SKIP, TAIL = range(6)

_MASK32 = 0xFFFFFFFF


def _wrap(value: int, bits: int) -> int:
    """A Python integer as a signed two's-complement number of `bits` bits."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _shift(x: Tensor, bits: int, width: int) -> Tensor:
    """Logical right shift of a signed tensor."""
    return (x >> bits).bitwise_and_((1 << (width - bits)) - 1)


_GOLDEN = _wrap(0x9E3779B97F4A7C15, 64)
_MIX1, _MIX2 = _wrap(0xBF58476D1CE4E5B9, 64), _wrap(0x94D049BB133111EB, 64)
_HASH1, _HASH2, _SPREAD = _wrap(0x7FEB352D, 32), _wrap(0x846CA68B, 32), _wrap(0x9E3779B1, 32)


def splitmix64(x: Tensor) -> Tensor:
    """One step of splitmix64 on int64 tensors."""
    x = x + _GOLDEN
    x = (x ^ _shift(x, 30, 64)) * _MIX1
    x = (x ^ _shift(x, 27, 64)) * _MIX2
    return x ^ _shift(x, 31, 64)


def hash32_(x: Tensor) -> Tensor:
    """One round of a 32-bit avalanche hash (two multiplications, three xor-shifts) on int32 tensors, in place."""
    x.bitwise_xor_(_shift(x, 16, 32)).mul_(_HASH1)
    x.bitwise_xor_(_shift(x, 15, 32)).mul_(_HASH2)
    return x.bitwise_xor_(_shift(x, 16, 32))


def unit(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """31 random bits -> (0, 1), never 0 or 1. Values near 0 keep full relative precision."""
    u = (bits & 0x7FFFFFFF).to(dtype).add_(0.5).mul_(2.0**-31)
    return u.clamp_(max=1.0 - 2.0**-24)


class Noise:
    """The random numbers of B images, one 64-bit seed each.

    seeds: int64 [B]. Methods take image-token indices [B, M] (N and beyond are allowed). Numbers that are asked for again and
    again (the window of Jacobi decoding moves a few tokens a round) are kept for a while; that changes speed, never values.
    """

    chunk = 32

    def __init__(self, seeds: Tensor):
        self.seeds = seeds
        self._mixed = splitmix64(seeds)
        self._draws: Tensor | None = None
        self._first = 0
        self._tables: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def select(self, rows: Tensor) -> Noise:
        """The same numbers for a subset of the rows."""
        return Noise(self.seeds[rows])

    def keys(self, index: Tensor, stream: int, salt: int = 0) -> Tensor:
        """64-bit keys [B, M]."""
        place = index + ((stream << 24) | (salt << 28))
        return splitmix64(self._mixed[:, None] ^ place)

    def uniform(self, index: Tensor, stream: int, salt: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """One number in (0, 1) per index: [B, M]."""
        return unit(_shift(self.keys(index, stream, salt), 33, 64), dtype)

    def uniform_pair(
        self, index: Tensor, stream: int, salt: int = 0, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """Two independent numbers in (0, 1) per index, the first of them `uniform`'s: [B, M] each, from the halves of one key."""
        keys = self.keys(index, stream, salt)
        return unit(_shift(keys, 33, 64), dtype), unit(keys, dtype)

    def uniform_table(self, limit: int, stream: int, salt: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """`uniform` for every index below limit, made once: [B, limit or more]."""
        key = (stream, salt, dtype)
        if key not in self._tables or self._tables[key].shape[1] < limit:
            self._tables[key] = self.uniform(torch.arange(limit, device=self.seeds.device)[None], stream, salt, dtype)
        return self._tables[key]

    def log_exponential(
        self, index: Tensor, vocabulary: int, stream: int, salt: int = 0, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """log E per code, E = -log1p(-u) exponential: [B, M, V]. argmax(log p - log E) is a draw from p."""
        keys = self.keys(index, stream, salt)
        low, high = (keys & _MASK32).to(torch.int32), _shift(keys, 32, 64).to(torch.int32)
        codes = torch.arange(vocabulary, dtype=torch.int32, device=index.device) * _SPREAD
        bits = hash32_(hash32_(codes ^ low[..., None]).bitwise_xor_(high[..., None]))
        return unit(bits, dtype).neg_().log1p_().neg_().log_()

    def draws(
        self,
        index: Tensor,
        span: tuple[int, int],
        contiguous: bool,
        vocabulary: int,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """`log_exponential` of the DRAW stream, kept over neighbouring questions: [B, M, V]. Do not write into the result.

        span: index lies in [span[0], span[1]); contiguous: every row of index is that very range.
        """
        first, last = span
        if last - first > 4 * (index.shape[1] + self.chunk):
            return self.log_exponential(index, vocabulary, DRAW, dtype=dtype)
        kept = self._draws
        if kept is None or kept.shape[2] != vocabulary or kept.dtype != dtype or first < self._first:
            kept, self._first = self._fresh(first, max(last, first + self.chunk), vocabulary, dtype), first
        elif last > self._first + kept.shape[1]:
            end = self._first + kept.shape[1]
            begin = min(first, end)
            more = self._fresh(end, max(last, end + self.chunk), vocabulary, dtype)
            kept, self._first = torch.cat((kept[:, begin - self._first :], more), 1), begin
        self._draws = kept
        if contiguous:
            return kept[:, first - self._first : last - self._first]
        return rows_at(kept, index - self._first)

    def _fresh(self, first: int, last: int, vocabulary: int, dtype: torch.dtype) -> Tensor:
        index = torch.arange(first, last, device=self.seeds.device).expand(len(self.seeds), -1)
        return self.log_exponential(index, vocabulary, DRAW, dtype=dtype)
