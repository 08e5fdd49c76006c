"""The VQ codec and its training."""

import pytest
import torch
from foredraft.models.codecs.vq import VQCodec
from foredraft.training.common import seeded
from foredraft.training.data import Augmentation, premultiply
from foredraft.training.tokenizer import CodebookAverage, TokenizerRecipe, reconstruction_psnr, train_codec

RECIPE = TokenizerRecipe(steps=30, batch=4, save_every=10)


@pytest.fixture(scope="module")
def rgba(pictures):
    return premultiply(torch.from_numpy(pictures[:24]).permute(0, 3, 1, 2))


def small_codec():
    torch.manual_seed(0)
    return VQCodec(vocab_size=64, width=16, upper_width=16)


@pytest.mark.parametrize("size", [64, 32])
def test_shapes_and_ranges(size):
    codec = small_codec().eval()
    tokens = codec.encode(torch.rand(2, 3, size, size) * 2 - 1)
    assert tokens.shape == (2, size // 4, size // 4) and tokens.dtype == torch.long
    pixels = codec.decode(tokens)
    assert pixels.shape == (2, 3, size, size) and pixels.abs().max() <= 1
    assert codec.config.downsample == 4 and codec.config.vocab_size == 64
    assert torch.allclose(codec.codebook().norm(dim=-1), torch.ones(64), atol=1e-5)


def test_encoding_an_odd_size_is_refused():
    with pytest.raises(ValueError, match="30 x 64"):
        small_codec().encode(torch.zeros(1, 3, 30, 64))


def test_a_token_depends_on_its_neighbourhood_only():
    codec = small_codec().eval()
    picture = torch.rand(1, 3, 64, 64) * 2 - 1
    changed = picture.clone()
    changed[..., 40:] = 0
    # Three 3 x 3 convolutions reach three cells: columns 0 to 6 of 16 cannot see column 10 and beyond.
    before, after = codec.project(picture), codec.project(changed)
    assert torch.equal(before[..., :7], after[..., :7])
    assert not torch.equal(before[..., 9:], after[..., 9:])


def test_saved_codec_is_the_same_in_half_precision(tmp_path, rgba):
    codec = train_codec(small_codec(), rgba, Augmentation(), RECIPE, tmp_path / "c.pt", 0, torch.device("cpu"))
    pixels = torch.rand(2, 3, 64, 64) * 2 - 1
    tokens = codec.encode(pixels)
    codec.half().save_pretrained(tmp_path / "codec")
    loaded = VQCodec.from_pretrained(tmp_path / "codec", torch_dtype=torch.float32).eval()
    assert torch.equal(loaded.encode(pixels), tokens)


def test_training_improves_and_resumes_to_the_same_weights(tmp_path, rgba):
    device = torch.device("cpu")
    untrained = reconstruction_psnr(small_codec().eval(), rgba, Augmentation(), 0, small=False)
    whole = train_codec(small_codec(), rgba, Augmentation(), RECIPE, tmp_path / "a.pt", 0, device)
    assert reconstruction_psnr(whole, rgba, Augmentation(), 0, small=False) > untrained + 3
    # Stop after the first 20 of 30 steps, with the schedule of 30.
    path = tmp_path / "b.pt"
    with pytest.raises(KeyboardInterrupt):
        _interrupted(rgba, path, device, after=20)
    resumed = train_codec(small_codec(), rgba, Augmentation(), RECIPE, path, 0, device)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def _interrupted(rgba, path, device, after):
    from foredraft.training import tokenizer

    seen = 0
    original = tokenizer.sample_pictures

    def counted(*args):
        nonlocal seen
        seen += 1
        if seen > after:
            raise KeyboardInterrupt
        return original(*args)

    tokenizer.sample_pictures = counted
    try:
        train_codec(small_codec(), rgba, Augmentation(), RECIPE, path, 0, device)
    finally:
        tokenizer.sample_pictures = original


def test_dead_codes_restart_on_latents():
    codec = small_codec()
    book = CodebookAverage(codec, 0.9)
    book.counts[:5] = 0
    latents = torch.nn.functional.normalize(torch.randn(40, 8), dim=-1)
    untouched = codec.codes[5:].clone()
    book.restart(codec, latents, seeded(0))
    assert torch.cdist(codec.codes[:5], latents).amin(1).max() < 1e-3
    assert torch.equal(codec.codes[5:], untouched)
