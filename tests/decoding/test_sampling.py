"""From logits to tokens: guidance, temperature, top-k, top-p, grammar, and the two ways to draw."""

from __future__ import annotations

import pytest
import torch
from foredraft.decoding.noise import DRAW, Noise
from foredraft.decoding.sampling import Sampling, apply_grammar, draw, draw_with_margin, guide, inverse_cdf, kth_largest, warp

from .tabular import seeds
from .test_rules import TIGHT, laws


def logits(rows: int = 20, vocabulary: int = 8, seed: int = 0) -> torch.Tensor:
    """Normal numbers, float64."""
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


def test_guidance():
    """u + s (c - u); a scale of 1 is the conditional row, and asks for no other."""
    c, u = logits(seed=1), logits(seed=2)
    for scale in (1.0, 1.5, 3.0, 7.5):
        assert (guide(torch.cat((c, u)), scale) - (u + scale * (c - u))).abs().max() < TIGHT
    assert torch.equal(guide(torch.cat((c, u)), 1.0), c)
    assert not Sampling().guided and not Sampling(guidance_scale=1.0).guided and Sampling(guidance_scale=3.0).guided


def test_rows_are_normalised_whatever_the_options():
    raw = logits()
    for temperature in (0.0, 0.3, 1.0, 5.0):
        for top_k in (0, 1, 3, 8, 100):
            for top_p in (1.0, 0.9, 0.3, 1e-9):
                log_p = warp(raw, Sampling(1.0, temperature, top_k, top_p))
                assert not log_p.isnan().any()
                assert (log_p.exp().sum(-1) - 1).abs().max() < TIGHT
                kept = (log_p > -torch.inf).sum(-1)
                assert (kept >= 1).all()
                if top_k and top_k < 8:
                    assert (kept <= top_k).all()
                if temperature == 0.0 or top_k == 1 or top_p == 1e-9:
                    assert (kept == 1).all()
                best = raw.argmax(-1, keepdim=True)
                assert torch.equal(log_p.argmax(-1, keepdim=True), best)


def test_neutral_settings_are_the_softmax():
    raw = logits()
    for sampling in (Sampling(), Sampling(top_k=8), Sampling(top_k=20), Sampling(top_p=1.0)):
        assert torch.equal(warp(raw, sampling), raw.log_softmax(-1))
    assert (warp(raw, Sampling(temperature=2.0)) - (raw / 2).log_softmax(-1)).abs().max() < TIGHT
    assert warp(raw.to(torch.bfloat16), Sampling()).dtype == torch.float32  # never in half precision
    assert warp(raw, Sampling(temperature=0.5, top_k=3)).dtype == torch.float64


def test_temperature_zero_is_the_first_best_code():
    log_p = warp(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), Sampling(temperature=0.0))
    assert log_p.exp().tolist() == [[0.0, 1.0, 0.0, 0.0]]


def test_top_k_keeps_what_ties_with_the_last_code_kept():
    """The border is a value, so that no order of equal codes decides, on any device."""
    raw = torch.tensor([[5.0, 1.0, 1.0, 0.5, 0.0], [3.0, 2.0, 2.0, 2.0, 1.0], [5.0, 4.0, 3.0, 2.0, 1.0]])
    log_p = warp(raw, Sampling(top_k=3))
    kept = log_p > -torch.inf
    assert kept.tolist() == [[True, True, True, False, False], [True] * 4 + [False], [True] * 3 + [False] * 2]
    assert torch.equal(kept[:1], warp(raw[:1], Sampling(top_k=3)) > -torch.inf)  # alone as in a batch
    assert torch.equal(log_p, torch.where(kept, raw, -torch.inf).log_softmax(-1))
    wide = torch.randn(3, 7, 300, generator=torch.Generator().manual_seed(0))
    for k in (1, 5, 299):
        assert torch.equal(kth_largest(wide, k), wide.sort(-1, descending=True).values[..., k - 1 : k])


def test_top_p_at_its_boundary():
    """A code is kept iff the more probable ones hold less than top_p: exactly half is enough for 0.5, not for more."""
    raw = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64).log()
    for top_p, kept in ((0.5, 1), (0.5 + 1e-9, 2), (0.75, 2), (0.75 + 1e-9, 3), (0.875 + 1e-9, 4), (1.0, 4), (1e-12, 1)):
        assert int((warp(raw, Sampling(top_p=top_p)) > -torch.inf).sum()) == kept


def test_the_order_is_temperature_top_k_top_p():
    """Each changes what the next one sees: checked against the three steps done by hand."""
    raw = logits(50, 12, seed=3)
    log_p = warp(raw, Sampling(temperature=0.7, top_k=6, top_p=0.8))
    for row, got in zip(raw / 0.7, log_p, strict=True):
        order = row.argsort(descending=True)[:6]
        mass = row[order].softmax(0)
        keep = order[(mass.cumsum(0) - mass) < 0.8]
        expected = torch.full_like(row, -torch.inf)
        expected[keep] = row[keep].log_softmax(0)
        assert torch.allclose(got, expected, atol=TIGHT, rtol=0)
    other = warp(raw, Sampling(top_p=0.8))
    assert not torch.equal(other > -torch.inf, log_p > -torch.inf)


def test_grammar_makes_rows_one_hot():
    """Only where a token is forced; an index past the end reads the last entry."""
    log_p = logits(3, 4).log_softmax(-1)[:, None].expand(-1, 3, -1).contiguous()
    index = torch.tensor([[0, 1, 2], [1, 2, 3], [2, 3, 4]])
    forced = torch.tensor([-1, 2, -1, 0])
    done = apply_grammar(log_p, index, forced)
    assert torch.equal(done[0, 0], log_p[0, 0]) and torch.equal(done[2, 0], log_p[2, 0])
    assert done[0, 1].exp().tolist() == [0, 0, 1, 0]
    assert done[1, 2].exp().tolist() == done[2, 1].exp().tolist() == [1, 0, 0, 0]
    assert (done.exp().sum(-1) - 1).abs().max() < TIGHT


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"guidance_scale": 0.5}, "guidance_scale"),
        ({"guidance_scale": float("nan")}, "guidance_scale"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
    ],
)
def test_bad_settings_are_named(options, name):
    with pytest.raises(ValueError, match=name):
        Sampling(**options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inverse_cdf_by_enumeration(dtype):
    """Over a fine grid of u every code gets its share; weights need not be normalised; codes of weight 0 get nothing."""
    weights = torch.cat((laws(30, 20, 6, 0.5), torch.eye(6, dtype=torch.float64))).to(dtype) * 3.0
    steps = 20_000
    u = ((torch.arange(steps, dtype=torch.float64) + 0.5) / steps).to(dtype)
    for row in weights:
        share = torch.bincount(inverse_cdf(row.expand(steps, -1), u), minlength=6).double() / steps
        assert (share - row.double() / float(row.double().sum())).abs().max() <= 2 / steps
        assert (share[row == 0] == 0).all()


def test_inverse_cdf_at_the_ends():
    """The smallest and the largest u there are: the first and the last code that weighs anything."""
    weights = torch.tensor([[0.0, 0.2, 0.0, 0.3, 0.0, 0.0]])
    for dtype in (torch.float32, torch.float64):
        low, high = torch.tensor([0.5 * 2.0**-31], dtype=dtype), torch.tensor([1.0 - 2.0**-24], dtype=dtype)
        for row in (weights.to(dtype), weights.to(dtype) * 1e-30, torch.nn.functional.one_hot(torch.tensor([3]), 6).to(dtype)):
            first, last = inverse_cdf(row, low), inverse_cdf(row, high)
            assert float(row[0, first]) > 0 and last.tolist() == [3]
    tail = torch.full((1, 50_000), 1e-9)
    tail[0, 0], tail[0, 40_000:] = 1.0, 0.0
    assert int(inverse_cdf(tail, torch.tensor([1.0 - 2.0**-24]))) < 40_000


def test_inverse_cdf_of_nothing_stays_inside_the_vocabulary():
    """A row without mass is never drawn from on purpose; if it is, the code must still be one."""
    assert 0 <= int(inverse_cdf(torch.zeros(1, 4), torch.tensor([0.5]))) < 4


def test_margin():
    """The gap between the two best noisy scores; a small perturbation below half of it cannot change the draw."""
    log_p = logits(400, 6, seed=4).log_softmax(-1)
    log_e = Noise(seeds(400)).log_exponential(torch.tensor([[0]]), 6, DRAW, dtype=torch.float64)[:, 0]
    code, gap = draw_with_margin(log_p, log_e)
    assert torch.equal(code, draw(log_p, log_e)) and (gap >= 0).all()
    shaken = log_p + (torch.rand(log_p.shape, generator=torch.Generator().manual_seed(0)) - 0.5) * gap[:, None] * 0.99
    assert torch.equal(draw(shaken, log_e), code)
    top = (log_p - log_e).topk(2).values
    assert torch.allclose(gap, top[:, 0] - top[:, 1])
    one_hot = torch.full((1, 6), -torch.inf, dtype=torch.float64)
    one_hot[0, 4] = 0
    code, gap = draw_with_margin(one_hot, log_e[:1])
    assert code.tolist() == [4] and gap.tolist() == [torch.inf]
    code, gap = draw_with_margin(torch.zeros(1, 1, dtype=torch.float64), log_e[:1, :1])
    assert code.tolist() == [0] and gap.tolist() == [torch.inf]
