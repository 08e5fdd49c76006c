"""Rules by enumeration: one-step laws to 1e-12, relaxed rules against their definitions."""

from __future__ import annotations

import pytest
import torch
from foredraft.decoding.rules import Clustered, Exact, normalised, pick, point_mass
from torch import Tensor

TIGHT = 1e-12


def laws(seed: int, rows: int, vocabulary: int, zeros: float = 0.0) -> Tensor:
    """Random probability rows [rows, V]; zeros: share of entries that are exactly 0."""
    generator = torch.Generator().manual_seed(seed)
    mass = -torch.rand(rows, vocabulary, generator=generator, dtype=torch.float64).log()
    keep = torch.rand(rows, vocabulary, generator=generator) >= zeros
    keep.scatter_(1, torch.randint(vocabulary, (rows, 1), generator=generator), True)
    mass = mass * keep
    return mass / mass.sum(1, keepdim=True)


def pairs(vocabulary: int) -> tuple[Tensor, Tensor]:
    """Rows of p and q: dense, with zeros, one-hot on either or both sides, equal, disjoint."""
    dense, holes = laws(0, 40, vocabulary), laws(1, 40, vocabulary, 0.5)
    other, spots = laws(2, 40, vocabulary), laws(3, 40, vocabulary, 0.5)
    hot = torch.eye(vocabulary, dtype=torch.float64)
    low = torch.zeros(1, vocabulary, dtype=torch.float64)
    low[0, 0] = 1
    p = torch.cat((dense, dense, holes, holes, hot, hot, dense[:vocabulary], hot, low))
    q = torch.cat((other, spots, other, spots, hot, hot.flip(0), hot, dense[:vocabulary], dense[:1]))
    return torch.cat((p, dense)), torch.cat((q, dense))


def one_step(rule: Exact | Clustered, p: Tensor, q: Tensor) -> Tensor:
    """Law of one draft from q, judged by the rule: [M, V]. The residual of each x is enumerated."""
    rows, vocabulary = p.shape
    x = torch.arange(vocabulary).expand(rows, -1)
    wide_p, wide_q = (law[:, None].expand(-1, vocabulary, -1) for law in (p, q))
    keep = rule.accept(wide_p, wide_q, x)
    residual = rule.residual(wide_p, wide_q, x)
    assert not keep.isnan().any() and not residual.isnan().any()
    assert (residual.sum(-1) - 1).abs().max() < TIGHT
    assert ((keep >= 0) & (keep <= 1)).all()
    return q * keep + ((q * (1 - keep))[..., None] * residual).sum(1)


@pytest.mark.parametrize("vocabulary", [2, 3, 7])
def test_exact_one_step_law(vocabulary):
    p, q = pairs(vocabulary)
    assert (one_step(Exact(), p, q) - p).abs().max() < TIGHT


def test_exact_hand_table():
    p = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    q = torch.tensor([[0.2, 0.6, 0.2]], dtype=torch.float64)
    for x, expected in ((0, 1.0), (1, 0.5), (2, 1.0)):
        assert Exact().accept(p, q, torch.tensor([x])).item() == pytest.approx(expected, abs=TIGHT)
    assert Exact().residual(p, q, torch.tensor([1]))[0].tolist() == pytest.approx([1.0, 0.0, 0.0], abs=TIGHT)


@pytest.mark.parametrize("vocabulary", [2, 3, 7])
def test_point_mass_one_step_law(vocabulary):
    """A deterministic draft (q None) is the point mass at x: same f, same law, and the law is p."""
    p, _ = pairs(vocabulary)
    for code in range(vocabulary):
        x = torch.full((len(p),), code)
        hot = point_mass(x, p)
        keep, rest = Exact().accept(p, None, x), Exact().residual(p, None, x)
        assert (keep - Exact().accept(p, hot, x)).abs().max() < TIGHT
        assert not rest.isnan().any() and (rest.sum(-1) - 1).abs().max() < TIGHT
        assert (hot * keep[:, None] + (1 - keep)[:, None] * rest - p).abs().max() < TIGHT
        sure = p[:, code] == 1
        assert torch.equal(rest[sure], p[sure])  # nothing is left: p, never uniform


@pytest.mark.parametrize("rule", [Exact(), Clustered(torch.randn(5, 2, generator=torch.Generator().manual_seed(0)))])
def test_forbidden_tokens_are_never_kept(rule):
    """f = 0 where p = 0 or q = 0, also when both are."""
    p, q = laws(4, 200, 5, 0.5), laws(5, 200, 5, 0.5)
    for code in range(5):
        x = torch.full((200,), code)
        keep = rule.accept(p, q, x)
        assert (keep[(p[:, code] == 0) | (q[:, code] == 0)] == 0).all()
        assert (rule.accept(p, None, x)[p[:, code] == 0] == 0).all()
        assert (rule.residual(p, q, x)[p == 0] == 0).all()


def test_a_residual_of_no_mass_is_p():
    p = laws(6, 30, 4)
    x = torch.zeros(30, dtype=torch.long)
    assert torch.equal(Exact().residual(p, p, x), p)
    assert torch.equal(normalised(torch.zeros_like(p), p), p)
    tiny = torch.full((1, 2), 5e-324, dtype=torch.float64)
    assert not normalised(tiny, torch.ones_like(tiny)).isnan().any()


def test_single_precision_leaves_no_spurious_mass():
    """Where q >= p nothing of p is left over, to the bit."""
    p, q = laws(7, 500, 6).float(), laws(8, 500, 6).float()
    x = torch.zeros(500, dtype=torch.long)
    assert (Exact().residual(p, q, x)[p <= q] == 0).all()


CODEBOOK = torch.tensor([[0.0, 0.0], [0.5, 0.0], [0.6, 0.1], [3.0, 0.0], [3.2, 0.1], [9.0, 9.0], [0.55, 0.05], [3.1, 0.0]])


def brute_cluster(p: Tensor, x: int, codebook: Tensor, reach: int, gap: float, radius: float) -> list[int]:
    """C(x) word by word: METHODS.md, section 0."""
    points = codebook.double()
    distance = ((points[:, None] - points) ** 2).sum(-1).sqrt()
    scale = torch.stack([distance[i][torch.arange(len(points)) != i].min() for i in range(len(points))]).mean()
    order = sorted(range(len(p)), key=lambda code: -float(p[code]))
    rank = order.index(x)
    near = order[max(0, rank - reach) : rank + reach + 1]
    chosen = {c for c in near if abs(float(p[c] - p[x])) < gap and float(distance[x, c] / scale) ** 2 < radius}
    return sorted(chosen | {x})


@pytest.mark.parametrize(("reach", "gap", "radius"), [(1, 0.15, 0.5), (2, 0.05, 4.0), (7, 0.15, 0.5), (7, 0.15, 50.0)])
def test_clustered_against_its_definition(reach, gap, radius):
    rule = Clustered(CODEBOOK, reach, gap, radius)
    p, q = laws(9, 25, 8), laws(10, 25, 8)
    sizes = set()
    for row in range(25):
        expected = torch.zeros(8, dtype=torch.float64)
        for x in range(8):
            cluster = brute_cluster(p[row], x, CODEBOOK, reach, gap, radius)
            sizes.add(len(cluster))
            expected[x] = (p[row, cluster].sum() / q[row, cluster].sum()).clamp(max=1.0)
        codes = torch.arange(8)
        wide = p[row].expand(8, -1), q[row].expand(8, -1)
        assert (rule.accept(*wide, codes) - expected).abs().max() < TIGHT
        left = (p[row] - q[row] * expected).clamp(min=0)
        residual = rule.residual(p[row][None], q[row][None], codes[:1])[0]
        if float(left.sum()) > 1e-9:
            assert (residual - left / left.sum()).abs().max() < 1e-9
        cost = rule.cost(p[row][None], q[row][None], codes[:1]).item()
        assert cost == pytest.approx(float((q[row] * expected - p[row]).clamp(min=0).sum()), abs=TIGHT)
    assert len(sizes) > 1


def test_clustered_one_step_law_and_cost():
    """The law sums to 1 and its excess over p is what `cost` says, zeros of p and q included."""
    rule = Clustered(CODEBOOK)
    p, q = pairs(8)
    law = one_step(rule, p, q)
    assert (law.sum(1) - 1).abs().max() < TIGHT
    assert (law[p == 0] == 0).all()
    x = torch.arange(8).expand(len(p), -1)
    keep = rule.accept(p[:, None].expand(-1, 8, -1), q[:, None].expand(-1, 8, -1), x)
    cost = rule.cost(p, q, x[:, 0])
    assert (cost - (q * keep - p).clamp(min=0).sum(1)).abs().max() < TIGHT
    assert float(cost.max()) > 0.05
    tv = 0.5 * (law - p).abs().sum(1)
    assert (tv <= cost + TIGHT).all()


def test_clustered_point_mass_is_its_one_hot_law():
    rule = Clustered(CODEBOOK)
    p = laws(11, 60, 8, 0.3)
    for code in range(8):
        x = torch.full((60,), code)
        hot = point_mass(x, p)
        assert torch.equal(rule.accept(p, None, x), rule.accept(p, hot, x))
        assert torch.equal(rule.residual(p, None, x), rule.residual(p, hot, x))
        assert torch.equal(rule.cost(p, None, x), rule.cost(p, hot, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("setting", [{"radius": 0.0}, {"reach": 0}, {"gap": 0.0}])
def test_clustered_neutral_setting_is_exact_to_the_bit(dtype, setting):
    """Clusters of one code: f, residual and a cost of 0, bit for bit the exact rule's."""
    rule = Clustered(CODEBOOK, **setting)
    p, q = (law.to(dtype) for law in pairs(8))
    for code in range(8):
        x = torch.full((len(p),), code)
        assert torch.equal(rule.accept(p, q, x), Exact().accept(p, q, x))
        assert torch.equal(rule.residual(p, q, x), Exact().residual(p, q, x))
        assert (rule.cost(p, q, x) == 0).all()


def test_a_codebook_of_equal_codes_is_one_cluster():
    """Distances of 0 leave no scale; codes that are the same are still near each other."""
    rule = Clustered(torch.zeros(4, 3), gap=2.0)
    p, q = laws(12, 20, 4), laws(13, 20, 4)
    assert (rule.accept(p, q, torch.zeros(20, dtype=torch.long)) > 1 - TIGHT).all()


def test_pick_and_point_mass_keep_leading_dimensions():
    p = laws(14, 12, 5).view(3, 4, 5)
    x = torch.arange(12).view(3, 4) % 5
    assert torch.equal(pick(p, x), (p * point_mass(x, p)).sum(-1))
