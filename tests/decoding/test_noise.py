"""The random numbers: uniform, independent, and a function of nothing but (seed, index, stream, salt, code)."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from foredraft.decoding.noise import COIN, DRAFT, DRAW, RECOVER, SKIP, TAIL, Noise, splitmix64, unit
from foredraft.decoding.sampling import draw, draw_distinct
from torch import Tensor

from .tabular import check_law, seeds

STREAMS = (DRAW, COIN, RECOVER, DRAFT, SKIP, TAIL)
ROWS = 100_000


def chi_z(u: Tensor, bins: int = 256) -> float:
    """Chi-square z of numbers in (0, 1) against the uniform law."""
    counts = torch.bincount((u.flatten().double() * bins).long(), minlength=bins)
    return check_law(counts, torch.full((bins,), 1 / bins, dtype=torch.float64)).z


def largest_gap(u: Tensor) -> float:
    """Kolmogorov-Smirnov distance times sqrt(N): above 2.2 once in 10,000 times."""
    ordered = u.flatten().double().sort().values
    count = len(ordered)
    grid = torch.arange(1, count + 1, dtype=torch.float64) / count
    distance = max(float((grid - ordered).max()), float((ordered - grid + 1 / count).max()))
    return distance * math.sqrt(count)


def joint_z(a: Tensor, b: Tensor, bins: int = 16) -> float:
    """Chi-square z of a pair of uniform numbers against independence."""
    cell = (a.flatten().double() * bins).long() * bins + (b.flatten().double() * bins).long()
    counts = torch.bincount(cell, minlength=bins * bins)
    return check_law(counts, torch.full((bins * bins,), bins**-2.0, dtype=torch.float64)).z


def exponential_to_uniform(log_e: Tensor) -> Tensor:
    """1 - exp(-E), uniform if E is exponential."""
    return -torch.expm1(-log_e.exp())


@pytest.mark.parametrize("stream", STREAMS)
def test_uniform(stream):
    """Per stream: over seeds, over indices, over salts."""
    for u in (
        Noise(seeds(ROWS)).uniform(torch.tensor([[3]]), stream, dtype=torch.float64),
        Noise(seeds(10)).uniform(torch.arange(20_000)[None], stream, dtype=torch.float64),
        torch.stack([Noise(seeds(500)).uniform(torch.arange(10)[None], stream, salt, torch.float64) for salt in range(30)]),
    ):
        assert ((u > 0) & (u < 1)).all()
        assert abs(chi_z(u)) < 5
        assert largest_gap(u) < 2.2
        assert u.flatten().unique().numel() > 0.999 * u.numel()


@pytest.mark.parametrize("stream", [DRAW, TAIL])
def test_exponential(stream):
    """Per code: -log1p(-u) of uniform u, over seeds and over the codes of one seed."""
    for log_e in (
        Noise(seeds(30_000)).log_exponential(torch.tensor([[7]]), 8, stream, dtype=torch.float64),
        Noise(seeds(20)).log_exponential(torch.arange(3)[None], 4096, stream, dtype=torch.float64),
    ):
        assert log_e.isfinite().all()
        assert abs(chi_z(exponential_to_uniform(log_e))) < 5
        assert largest_gap(exponential_to_uniform(log_e)) < 2.2


def test_neighbours_are_independent():
    """Pairs that differ in one argument only: seed, index, stream, salt, code."""
    noise, index = Noise(seeds(ROWS)), torch.tensor([[5]])
    base = {stream: noise.uniform(index, stream, dtype=torch.float64) for stream in STREAMS}
    pairs = [(base[a], base[b]) for a, b in itertools.combinations(STREAMS, 2)]
    for step in (1, 2, 16, 1024):
        pairs.append((base[COIN], noise.uniform(index + step, COIN, dtype=torch.float64)))
    for salt in (1, 2, 3, 300):
        pairs.append((base[TAIL], noise.uniform(index, TAIL, salt, torch.float64)))
    for distance in (1, 2, 1 << 20, 1 << 32, 1 << 40, 1 << 62):
        pairs.append((base[DRAW], Noise(seeds(ROWS) + distance).uniform(index, DRAW, dtype=torch.float64)))
    pairs.append((base[DRAW][:-1], base[DRAW][1:]))
    codes = exponential_to_uniform(noise.log_exponential(index, 3, DRAW, dtype=torch.float64))
    pairs += [(codes[..., a], codes[..., b]) for a, b in itertools.combinations(range(3), 2)]
    pairs.append((codes[..., 0], base[DRAW]))
    scores = [joint_z(a, b) for a, b in pairs]
    assert max(map(abs, scores)) < 5, scores
    assert abs(sum(scores)) / math.sqrt(len(scores)) < 4
    correlations = [float(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]) for a, b in pairs]
    assert max(map(abs, correlations)) < 5 / math.sqrt(ROWS - 1)


def test_no_two_places_share_a_key():
    """Index, stream and salt have bits of their own."""
    noise = Noise(torch.tensor([0, -1, 2**63 - 1]))
    places = [
        noise.keys(torch.tensor([[0, 1, 4095, 2**24 - 1]]), stream, salt) for stream in STREAMS for salt in (0, 1, 7, 2**20)
    ]
    keys = torch.cat([place.flatten() for place in places])
    assert keys.unique().numel() == keys.numel()


def test_the_same_numbers_whatever_is_asked():
    """Order, batch, window, subset: nothing changes a number."""
    noise = Noise(seeds(50, 1000))
    index = torch.arange(12).expand(50, -1)
    whole = noise.log_exponential(index, 9, DRAW)
    for row in (0, 17, 49):
        alone = Noise(seeds(1, 1000 + row))
        for place in (11, 3, 0):
            assert torch.equal(alone.log_exponential(index[:1, place : place + 1], 9, DRAW)[0, 0], whole[row, place])
    ragged = (torch.arange(50) % 5)[:, None] + torch.arange(4)
    assert torch.equal(noise.log_exponential(ragged, 9, DRAW), whole.gather(1, ragged[..., None].expand(-1, -1, 9)))
    rows = torch.tensor([4, 2, 40])
    assert torch.equal(noise.select(rows).uniform(index[:3], COIN, 2), noise.uniform(index, COIN, 2)[rows])
    assert torch.equal(noise.log_exponential(index, 5, DRAW), whole[..., :5])  # a code's number knows no vocabulary


@pytest.mark.parametrize("contiguous", [True, False])
def test_kept_noise_is_the_same_noise(contiguous):
    """`draws` keeps a stretch of columns: forwards, backwards, far jumps, other vocabularies and dtypes give equal numbers."""
    noise = Noise(seeds(6))
    walk = [(0, 3), (1, 6), (4, 30), (30, 45), (44, 60), (43, 45), (2, 9), (300, 302), (0, 400), (301, 303), (5, 5 + 33), (6, 70)]
    for dtype, vocabulary in ((torch.float32, 5), (torch.float64, 5), (torch.float64, 11), (torch.float32, 5)):
        for first, last in walk:
            index = torch.arange(first, last).expand(6, -1)
            if not contiguous:
                start = torch.tensor([0, 1, 0, 2, 0, 1]).clamp(max=last - first - 1)[:, None]
                index = (first + start + torch.arange(2)).clamp(max=last - 1)
            kept = noise.draws(index, (first, last), contiguous, vocabulary, dtype)
            assert torch.equal(kept, noise.log_exponential(index, vocabulary, DRAW, dtype=dtype))


def test_precision():
    """float32 and float64 are roundings of one number, and neither reaches 0 or 1."""
    noise, index = Noise(seeds(ROWS)), torch.tensor([[2]])
    single, double = (noise.uniform(index, COIN, dtype=dtype) for dtype in (torch.float32, torch.float64))
    assert (single.double() - double).abs().max() <= 2.0**-24
    one, two = (noise.log_exponential(index, 4, DRAW, dtype=dtype) for dtype in (torch.float32, torch.float64))
    relative = (one.double() - two).abs() / two.abs().clamp(min=1)
    assert relative.quantile(0.999) < 1e-5
    edge = torch.tensor([0, 1, 0x7FFFFFFF, -1, -(2**31)], dtype=torch.int32)
    for dtype in (torch.float32, torch.float64):
        u = unit(edge, dtype)
        assert ((u > 0) & (u < 1)).all()
        log_e = u.neg().log1p().neg().log()
        assert log_e.isfinite().all()


def by_hand(seed: int, index: int, stream: int, salt: int, code: int) -> tuple[float, float]:
    """(uniform, E of a code) in Python integers: a changed hash would change every user's image for a seed."""
    wide, narrow = 2**64 - 1, 2**32 - 1

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & wide
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & wide
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & wide
        return x ^ (x >> 31)

    def scatter(x: int) -> int:
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & narrow
        x = ((x ^ (x >> 15)) * 0x846CA68B) & narrow
        return x ^ (x >> 16)

    key = mix(mix(seed & wide) ^ (index + (stream << 24 | salt << 28)))
    bits = scatter(scatter((code * 0x9E3779B1 & narrow) ^ (key & narrow)) ^ (key >> 32))
    return ((key >> 33) + 0.5) / 2**31, -math.log1p(-((bits & 0x7FFFFFFF) + 0.5) / 2**31)


def test_the_hash_itself():
    """Against integers by hand, negative and large seeds included; splitmix64's first output for 0 is the published one."""
    assert int(splitmix64(torch.tensor([0]))[0]) & (2**64 - 1) == 0xE220A8397B1DCDAF
    for seed, index, stream, salt in ((0, 0, DRAW, 0), (-1, 3, COIN, 2), (2**63 - 1, 4095, RECOVER, 77), (-(2**63), 9, TAIL, 1)):
        noise, place = Noise(torch.tensor([seed])), torch.tensor([[index]])
        uniform = float(noise.uniform(place, stream, salt, torch.float64))
        exponential = noise.log_exponential(place, 5, stream, salt, torch.float64).exp().flatten().tolist()
        assert uniform == pytest.approx(by_hand(seed, index, stream, salt, 0)[0], abs=1e-15)
        assert exponential == pytest.approx([by_hand(seed, index, stream, salt, code)[1] for code in range(5)], rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_follow_p(dtype):
    """argmax(log p - log E) is a draw from p, also for consecutive seeds, small p and p = 0."""
    p = torch.tensor([0.001, 0.5, 0.0, 0.3, 0.199], dtype=dtype)
    for index in range(4):
        log_e = Noise(seeds(200_000)).log_exponential(torch.tensor([[index]]), 5, DRAW, dtype=dtype)
        result = check_law(torch.bincount(draw(p.log(), log_e).flatten(), minlength=5), p.double())
        assert result.passes, str(result)


def test_shared_noise_agrees_as_often_as_it_should():
    """P(two laws give the same token) = sum_x 1 / sum_y max(p_y / p_x, q_y / q_x) (METHODS.md, 'Seeded verification')."""
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    expected = sum(1 / float(torch.maximum(p / p[x], q / q[x]).sum()) for x in range(3))
    tv = 0.5 * float((p - q).abs().sum())
    assert (1 - tv) / (1 + tv) < expected < 1 - tv
    log_e = Noise(seeds(200_000)).log_exponential(torch.tensor([[0]]), 3, DRAW, dtype=torch.float64)
    agree = float((draw(p.log(), log_e) == draw(q.log(), log_e)).double().mean())
    assert abs(agree - expected) < 5 * math.sqrt(expected * (1 - expected) / 200_000)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_distinct_draws_are_draws_without_replacement(count):
    """The law of the whole ordered tuple."""
    p = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    log_e = Noise(seeds(200_000)).log_exponential(torch.tensor([[1]]), 4, DRAW, dtype=torch.float64)[:, 0]
    codes, exist = draw_distinct(p.log().expand(200_000, -1), log_e, count)
    assert exist.all()
    law, code = torch.zeros(4**count, dtype=torch.float64), torch.zeros(200_000, dtype=torch.long)
    for chosen in itertools.permutations(range(4), count):
        left, chance = 1.0, 1.0
        for x in chosen:
            chance, left = chance * float(p[x]) / left, left - float(p[x])
        law[sum(x * 4 ** (count - 1 - i) for i, x in enumerate(chosen))] = chance
    for column in codes.T:
        code = code * 4 + column
    result = check_law(torch.bincount(code, minlength=4**count), law)
    assert result.passes, str(result)


def test_distinct_draws_stop_where_the_support_ends():
    p = torch.tensor([0.0, 0.7, 0.0, 0.3], dtype=torch.float64)
    log_e = Noise(seeds(100)).log_exponential(torch.tensor([[1]]), 4, DRAW, dtype=torch.float64)[:, 0]
    codes, exist = draw_distinct(p.log().expand(100, -1), log_e, 9)
    assert codes.shape == (100, 4)  # never more than there are codes
    assert exist.tolist() == [[True, True, False, False]] * 100
    assert (codes[:, :2].sort(1).values == torch.tensor([1, 3])).all()
    assert (codes.sort(1).values == torch.arange(4)).all()


def test_pairs_are_uniform_and_independent() -> None:
    """The two halves of a key: the first is `uniform`'s, both fill 16 x 16 cells evenly."""
    noise, index = Noise(torch.arange(50)), torch.arange(4000)[None]
    first, second = noise.uniform_pair(index, COIN, 3, torch.float64)
    assert torch.equal(first, noise.uniform(index, COIN, 3, torch.float64))
    cells = ((first * 16).long() * 16 + (second * 16).long()).flatten().bincount(minlength=256).double()
    expected = cells.sum() / 256
    chi_square = float(((cells - expected) ** 2 / expected).sum())
    assert abs(chi_square - 255) < 5 * (2 * 255) ** 0.5
