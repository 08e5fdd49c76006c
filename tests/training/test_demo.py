"""`foredraft train demo --smoke`: every stage, from pictures to a family folder that loads; then resumed."""

import argparse
import json
import time

import numpy as np
import pytest
import torch
from foredraft.models.codecs.vq import VQCodec
from foredraft.models.embedded import EmbeddedTarget, WordTokenizer
from foredraft.training import demo
from foredraft.training.data import ARCHIVE
from foredraft.training.names import NAMES


@pytest.mark.timeout(400)
def test_smoke_run_writes_a_family_and_resumes(tmp_path, pictures):
    np.savez(tmp_path / ARCHIVE, images=pictures, names=np.array(NAMES))
    out = tmp_path / "family"
    figures = demo.train_demo(out, data=tmp_path, smoke=True, device="cpu")
    assert {"held_out", "entropy", "name", "colour", "overlap", "psnr_64px", "psnr_32px"} == set(figures)
    assert "draft_head" not in json.loads((out / "model_index.json").read_text()), "a head is trained for a finished family"
    target, draft = (EmbeddedTarget.from_pretrained(out / name) for name in ("target", "draft_model"))
    assert draft.config.guided and not target.config.guided
    assert VQCodec.from_pretrained(out / "codec").codebook().shape == (512, 8)
    tokenizer = WordTokenizer.from_pretrained(out / "tokenizer")
    assert tokenizer(["red apple on blue"]).shape == (1, 8)
    for path in out.rglob("*.safetensors"):
        assert path.stat().st_size < 4_000_000
    assert not (tmp_path / "family.partial").exists()
    # A second run finds every stage done and rewrites the same weights.
    began = time.monotonic()
    demo.train_demo(out, data=tmp_path, smoke=True, device="cpu")
    assert time.monotonic() - began < 60
    again = EmbeddedTarget.from_pretrained(out / "target")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in target.state_dict().items())


def test_another_recipe_is_refused(tmp_path):
    demo._open_work(tmp_path, demo.SMOKE, 0, resume=True)
    (tmp_path / "codec.pt").touch()
    demo._open_work(tmp_path, demo.SMOKE, 0, resume=True)
    with pytest.raises(ValueError, match="another recipe or seed"):
        demo._open_work(tmp_path, demo.SMOKE, 1, resume=True)
    demo._open_work(tmp_path, demo.SMOKE, 1, resume=False)
    assert not (tmp_path / "codec.pt").exists()
    assert json.loads((tmp_path / "recipe.json").read_text())["seed"] == 1


def test_options_reach_the_training(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(demo, "train_demo", lambda *args: seen.append(args) or {"entropy": 1.2})
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    assert demo.run(parser.parse_args(["--smoke", "--out", str(tmp_path), "--restart", "--seed", "3"])) == 0
    assert seen == [(tmp_path, None, True, None, False, 3, "auto")]
