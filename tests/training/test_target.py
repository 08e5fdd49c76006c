"""Training of target and draft on tokens: corruption, optimiser, resuming, distillation, sampling."""

import math
from dataclasses import replace

import pytest
import torch
from foredraft.decoding.sampling import Sampling
from foredraft.models.embedded import EmbeddedTarget
from foredraft.training.bank import Bank, prompt_table
from foredraft.training.common import batches, seeded, trapezoid
from foredraft.training.distill import DistillRecipe, distill, overlap, own_bank, sample_tokens
from foredraft.training.names import COLOURS, NAMES, word_table
from foredraft.training.target import (
    GRID,
    DenseAttention,
    Optimiser,
    TargetRecipe,
    corrupt,
    cross_entropy,
    deepen,
    train_on_bank,
)

CPU = torch.device("cpu")
RECIPE = TargetRecipe(steps=12, batch=4, save_every=4, dropout=0.25)


def model(layers=2, guided=False):
    torch.manual_seed(0)
    words = len(word_table()) + 1
    return EmbeddedTarget(vocab_size=512, words=words, dim=32, layers=layers, heads=2, ffn=64, guided=guided)


@pytest.fixture(scope="module")
def bank():
    """Pictures whose every row of tokens is one code that depends on the colour."""
    colours = torch.arange(40) % len(COLOURS)
    rows = colours[:, None, None] * 16 + torch.arange(16)[None, :, None]
    tokens = rows.expand(40, 16, 16).flatten(1)
    return Bank(tokens.to(torch.int16), torch.arange(40).to(torch.int16), colours.to(torch.int16))


def test_prompt_table_covers_all():
    table = prompt_table()
    assert table.shape == (len(NAMES), len(COLOURS), 8)
    assert table.flatten(0, 1).unique(dim=0).shape[0] == len(NAMES) * len(COLOURS)


def test_corruption_is_of_the_asked_rate_and_two_kinds():
    tokens = torch.arange(64)[:, None].expand(64, 4096).contiguous()
    changed = corrupt(tokens, 0.2, 512, seeded(0))
    neighbour = (changed == tokens.roll(1, 0)).float().mean()
    random = ((changed != tokens) & (changed != tokens.roll(1, 0))).float().mean()
    assert abs(neighbour - 0.05) < 0.015 and abs(random - 0.05) < 0.015
    assert torch.equal(corrupt(tokens, 0.0, 512, seeded(0)), tokens)


def test_dense_attention_equals_the_fused_kernel():
    words, tokens = prompt_table()[:3, 1], torch.randint(0, 512, (3, 256), generator=seeded(1))
    target = model()
    plain = target(words, tokens, grid=GRID)
    with DenseAttention():
        dense = target(words, tokens, grid=GRID)
    assert torch.allclose(plain, dense, atol=1e-5)


def test_optimiser_gives_muon_the_inner_matrices_only():
    target = model()
    muon, adam = (part for part, _ in Optimiser(target, RECIPE).parts)
    assert len(muon.param_groups[0]["params"]) == 4 * 2
    held = sum(len(part.param_groups[0]["params"]) for part in (muon, adam))
    assert held == len(list(target.parameters()))
    inner = {id(p) for p in muon.param_groups[0]["params"]}
    assert id(target.head.weight) not in inner and id(target.codes.weight) not in inner


def test_schedule_and_batches():
    assert trapezoid(0, 1000, 0.4) == pytest.approx(0.02)
    assert trapezoid(300, 1000, 0.4) == 1 and trapezoid(700, 1000, 0.4) == pytest.approx(0.5)
    whole, later = batches(10, 3, 0), batches(10, 3, 0, start=4)
    ahead = [next(whole) for _ in range(8)]
    assert all(torch.equal(a, next(later)) for a in ahead[4:])
    assert len(torch.cat(ahead[:3]).unique()) == 9


@pytest.mark.parametrize(("shallow", "end"), [(0.0, 8), (0.45, 8), (0.45, 4), (1 / 3, 4)])
def test_training_learns_and_resumes_to_the_same_weights(tmp_path, bank, monkeypatch, shallow, end):
    """Before it has grown, at that very step, and after."""
    recipe = replace(RECIPE, shallow=shallow)
    whole = train_on_bank(model(), {0.0: bank}, recipe, tmp_path / "a.pt", 0, CPU)
    assert cross_entropy(whole, bank, 16) < math.log(512) - 0.15
    state = torch.load(tmp_path / "a.pt", weights_only=True)
    assert state["step"] == 12
    from foredraft.training import target as stage

    def stop(step, steps, hold):
        if step >= end:
            raise KeyboardInterrupt
        return trapezoid(step, steps, hold)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stage, "trapezoid", stop)
        train_on_bank(model(), {0.0: bank}, recipe, tmp_path / "b.pt", 0, CPU)
    resumed = train_on_bank(model(), {0.0: bank}, recipe, tmp_path / "b.pt", 0, CPU)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_growing_changes_nothing_at_first():
    """And the layers that came are trained from then on."""
    words, tokens = prompt_table()[:3, 1], torch.randint(0, 512, (3, 256), generator=seeded(1))
    grown = model(4)
    blocks = grown.backbone.blocks
    grown.backbone.blocks = blocks[::2]
    before = grown(words, tokens, grid=GRID)
    deepen(blocks)
    grown.backbone.blocks = blocks
    after = grown(words, tokens, grid=GRID)
    assert torch.equal(before, after) and len(grown.backbone.blocks) == 4
    after.square().mean().backward()
    assert blocks[1].down.weight.grad.abs().max() > 0


def test_later_banks_are_read_from_their_share_on(tmp_path, bank, monkeypatch):
    read = []
    batch = Bank.batch
    monkeypatch.setattr(Bank, "batch", lambda self, *args: read.append(self) or batch(self, *args))
    later = Bank(bank.tokens, bank.names, bank.colours)
    recipe = TargetRecipe(steps=4, batch=2, save_every=4)
    train_on_bank(model(1), {0.0: bank, 0.5: later}, recipe, tmp_path / "a.pt", 0, CPU)
    assert [part is later for part in read] == [False, False, True, True]


def test_sampling_follows_the_guided_distribution():
    target = model().eval()
    with torch.no_grad():
        target.head.weight.mul_(20)
    words = prompt_table()[:2, 3]
    tokens, entropies = sample_tokens(target, words, Sampling(guidance_scale=1.5), seeded(2))
    assert tokens.shape == entropies.shape == (2, 256)
    with torch.no_grad():
        logits = target(torch.cat([words, torch.zeros_like(words)]), tokens.repeat(2, 1), grid=GRID)
    guided = torch.lerp(logits[2:], logits[:2], 1.5).log_softmax(-1)
    expected = -(guided.exp() * guided).sum(-1)
    assert torch.allclose(entropies, expected, atol=1e-4)
    surprise = -guided.gather(-1, tokens[..., None]).mean()
    assert abs(surprise - entropies.mean()) < 0.3


def test_distillation_raises_the_overlap(tmp_path, bank):
    target = model()
    with torch.no_grad():
        # Far from uniform, so that there is something to imitate.
        target.head.weight.mul_(10)
    target.eval()
    recipe = DistillRecipe(own_pictures=8, sample_batch=8, steps=40, batch=4, other_rate=0.05, save_every=20)
    ways = [Sampling(guidance_scale=1.5)]
    own = own_bank(target, recipe.own_pictures, recipe.sample_batch, ways, tmp_path / "own.pt", 0)
    assert len(own) == 8
    assert torch.equal(own_bank(target, 8, 8, ways, tmp_path / "own.pt", 0).tokens, own.tokens)
    draft = model(layers=1, guided=True)
    before = overlap(draft.eval(), target, own, recipe.guidance, 8)
    after = overlap(distill(draft, target, bank, own, recipe, tmp_path / "d.pt", 0, CPU), target, own, 1.5, 8)
    assert after > before + 0.02
