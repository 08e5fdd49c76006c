"""Training of a draft head: the unrolled forward against real drafting, the loss, resuming, and the whole command."""

from __future__ import annotations

import argparse
import dataclasses
import json

import pytest
import torch
from accelerate import Accelerator
from foredraft.decoding.drafters.head import HeadDrafter
from foredraft.decoding.noise import Noise
from foredraft.decoding.sampling import Sampling, guide
from foredraft.decoding.types import Draft
from foredraft.models.embedded import EmbeddedTarget
from foredraft.models.head import DraftHead
from foredraft.training import head as stage
from foredraft.training.bank import Bank, prompt_table
from foredraft.training.head import SMOKE, Features, HeadRecipe, Unrolled, agreement, losses, train, train_head
from foredraft.training.names import COLOURS, word_table
from foredraft.training.target import GRID

RECIPE = dataclasses.replace(SMOKE, depths=((0.0, 1), (0.5, 3)))


def model() -> EmbeddedTarget:
    """A small untrained target, far from uniform."""
    torch.manual_seed(0)
    target = EmbeddedTarget(vocab_size=512, words=len(word_table()) + 1, dim=32, layers=2, heads=2, ffn=64).eval()
    with torch.no_grad():
        target.head.weight.mul_(30)
    return target


TARGET = model()


@pytest.fixture(scope="module")
def own() -> Bank:
    """Random pictures."""
    count = torch.arange(16)
    tokens = torch.randint(0, 512, (16, 256), generator=torch.Generator().manual_seed(0))
    return Bank(tokens.to(torch.int16), count.to(torch.int16), (count % len(COLOURS)).to(torch.int16))


def test_unrolled_steps_are_what_drafting_computes(own):
    """Step s of training at a column equals the law of a drafted node at depth s, cache and masks of the drafter included."""
    torch.manual_seed(1)
    target, head = model().double(), DraftHead.for_target(TARGET, ffn=24).double().eval()
    words, tokens = own.batch(torch.tensor([0, 3]), prompt_table())
    both, twice = torch.cat((words, torch.zeros_like(words))), tokens.repeat(2, 1)
    sampling, length, depth = Sampling(guidance_scale=1.5), 30, 3
    with torch.inference_mode():
        features = target.backbone(*target.teacher_inputs(both, twice, GRID))
        predictions = Unrolled(head, target, depth)(both, twice, features)
        conditioning = target.condition(words, None, True)
        sequence = target.begin(conditioning, GRID, sampling, 8)
        sequence.tokens, sequence.length = torch.nn.functional.pad(tokens, (1, 0)), torch.full((2,), length)
        sequence._uneven = True
        sequence.refresh()
        target.features(sequence, Draft(tokens[:, :0]))
        sequence.cached, sequence._uneven = sequence.length - 1, True
        sequence.refresh()
        drafter = HeadDrafter(head, target, head.begin(target, conditioning, GRID, sampling, 8), length=0)
        drafter.propose(sequence, Noise(torch.arange(2)))
        drafter._sequence = sequence
        scores = drafter.root()
        for step in range(depth):
            # Drafting began after column length - 1 - step ... here it begins after length - 1, and goes down along the picture.
            expected = guide(target.logits(predictions[step][:, length - 1 + step]), 1.5).log_softmax(-1)
            assert torch.allclose(scores.log_p[:, 0], expected, atol=1e-9)
            if step + 1 < depth:
                scores = drafter.extend(tokens[:, length - 1 + step])


def test_features_are_remembered(own, monkeypatch):
    """Each picture is computed once, prompt and no prompt, and later read in half precision."""
    features, rows = Features(TARGET, own), torch.tensor([2, 5])
    words, tokens, first = features(rows)
    assert words.shape == (4, 8) and not words[2:].any() and torch.equal(tokens[:2], tokens[2:])
    monkeypatch.setattr(features, "target", None)
    again = features(rows.flip(0))[2]
    assert torch.equal(again, first[[1, 0, 3, 2]])
    with torch.no_grad():
        exact = TARGET.backbone(*TARGET.teacher_inputs(words, tokens, GRID))
    assert (exact - first).abs().max() < 0.1


def test_loss_of_a_perfect_head_is_none(own):
    """Predictions that are the features: no divergence, no distance, overlap 1."""

    class Perfect(torch.nn.Module):
        def forward(self, words, tokens, features):
            return [features[:, words.shape[1] :]] * 2

    batch = Features(TARGET, own)(torch.tensor([0, 1]))
    total, overlaps = losses(Perfect(), TARGET, batch, torch.tensor([1.5, 2.0]), RECIPE, 0.3)
    assert abs(float(total.detach())) < 1e-4 and all(value > 0.9999 for value in overlaps)


def test_training_raises_the_overlap(own, tmp_path):
    target, held = model(), torch.arange(12, 16)
    recipe = dataclasses.replace(RECIPE, steps=60, batch=4, save_every=60, depths=((0.0, 1), (0.75, 2)))
    torch.manual_seed(2)
    head = DraftHead.for_target(target, ffn=32)
    before, _ = agreement(head.eval(), target, own, held, 1.5, depth=2)
    train(head, target, own, recipe, tmp_path / "head.pt", 0, Accelerator(cpu=True))
    after, accepted = agreement(head, target, own, held, 1.5, depth=2)
    assert after[0] > before[0] + 0.02 and after[1] > before[1] + 0.02
    assert 0 < accepted < 4


def test_an_interrupted_training_resumes_to_the_same_weights(own, tmp_path, monkeypatch):
    def run(name: str) -> DraftHead:
        torch.manual_seed(2)
        head = DraftHead.for_target(TARGET, ffn=32)
        return train(head, model(), own, RECIPE, tmp_path / name, 0, Accelerator(cpu=True))

    whole, trapezoid = run("a.pt"), stage.trapezoid

    def stop(step, *args):
        if step == 4:
            raise KeyboardInterrupt
        return trapezoid(step, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stage, "trapezoid", stop)
        run("b.pt")
    resumed = run("b.pt")
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


@pytest.mark.timeout(400)
def test_smoke_run_writes_a_head_and_resumes(tmp_path):
    """`foredraft train head --size smoke` for a family of which only the target is there."""
    family = tmp_path / "family"
    model().save_pretrained(family / "target")
    (family / "model_index.json").write_text(
        json.dumps({"target": ["foredraft.models.embedded", "EmbeddedTarget"], "defaults": {}})
    )
    parser = argparse.ArgumentParser()
    stage.add_arguments(parser)
    assert stage.run(parser.parse_args([str(family), "--size", "smoke", "--device", "cpu"])) == 0
    head = DraftHead.from_pretrained(family / "draft_head")
    head.check(TARGET)
    names = json.loads((family / "model_index.json").read_text())
    assert names["draft_head"] == ["foredraft.models.head", "DraftHead"] and list(names)[-1] == "defaults"
    figures = train_head(family, size="smoke", device="cpu", out_dir=tmp_path / "again")
    assert set(figures) == {"accepted", *(f"overlap_{depth}" for depth in range(1, 6))}
    other = DraftHead.from_pretrained(tmp_path / "again")
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in head.state_dict().items())
    with pytest.raises(ValueError, match="another recipe or seed"):
        train_head(family, size="smoke", device="cpu", seed=1)
    with pytest.raises(FileNotFoundError, match="no folder 'target'"):
        train_head(tmp_path / "nowhere", size="smoke")


def test_what_is_not_trained_is_said():
    with pytest.raises(ValueError, match="not trained here"):
        Unrolled(DraftHead.for_target(TARGET, layers=2), TARGET)
    assert HeadRecipe().depths[0] == (0.0, 1)
