"""Chameleon's VQ decoder against an independent derivation of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from foredraft.models.codecs.chameleon_vq import ChameleonCodec

from ..tiny import sentence
from . import vqgan_numpy as reference


@pytest.fixture(scope="module")
def codec() -> ChameleonCodec:
    """Ours, with the reference's weights."""
    sizes: dict[str, Any] = {"code_dim": reference.CODE_DIM, "latent": reference.LATENT, "width": reference.WIDTH}
    sizes |= {"multipliers": reference.MULTIPLIERS, "blocks": reference.BLOCKS, "downsample": 4}
    made = ChameleonCodec(vocab_size=reference.CODES, **sizes).eval()
    weights = {name: torch.from_numpy(value).float() for name, value in reference.state().items()}
    made.load_state_dict(weights, strict=True)
    return made


def test_pixels_equal_an_independent_derivation(codec: ChameleonCodec) -> None:
    tokens = reference.example()
    expected = np.stack([reference.decode(reference.state(), each) for each in tokens]).clip(-1, 1)
    got = codec.decode(torch.from_numpy(tokens))
    assert got.shape == (2, 3, 12, 20) and expected.std() > 0.3
    assert np.abs(got.numpy() - expected).max() < 1e-4


def test_pixels_equal_the_golden_ones(codec: ChameleonCodec) -> None:
    """Stored from the derivation, and equal to what Meta's published code made of the same weights."""
    golden = np.load(reference.GOLDEN)
    got = codec.decode(torch.from_numpy(golden["tokens"].astype(np.int64)))
    assert np.abs(got.numpy() - golden["pixels"].clip(-1, 1)).max() < 1e-4
    assert np.array_equal(golden["tokens"], reference.example())


@pytest.mark.parametrize(
    "change", ["decoder.mid.attn_1.q.weight", "decoder.up.0.block.1.norm2.bias", "decoder.up.2.upsample.conv.weight"]
)
def test_every_part_counts(codec: ChameleonCodec, change: str) -> None:
    """Negative control: a part that is left out is seen."""
    weights = {name: torch.from_numpy(value).float() for name, value in reference.state().items()}
    golden = np.load(reference.GOLDEN)
    other = ChameleonCodec.from_config(codec.config).eval()
    other.load_state_dict({**weights, change: weights[change] * 0})
    got = other.decode(torch.from_numpy(golden["tokens"].astype(np.int64)))
    assert np.abs(got.numpy() - golden["pixels"].clip(-1, 1)).max() > 1e-2


def test_codes_are_looked_up_as_they_are(codec: ChameleonCodec) -> None:
    assert torch.equal(codec.codebook(), codec.quantize.embedding.weight)
    assert codec.codebook().norm(dim=-1).std() > 0.1


def test_published_sizes() -> None:
    with torch.device("meta"):
        codec = ChameleonCodec()
    assert sum(weight.numel() for weight in codec.parameters()) == 41_457_795
    assert codec.config.downsample == 16 and codec.quantize.embedding.weight.shape == (8192, 256)
    assert "decoder.up.3.block.0.nin_shortcut.weight" in codec.state_dict(), "the levels are counted from full resolution"


def test_levels_and_pixels_per_token_must_agree() -> None:
    with pytest.raises(ValueError) as error:
        ChameleonCodec(downsample=8)
    sentence(error, "5 levels", "16 pixels")


def test_half_precision_draws(codec: ChameleonCodec) -> None:
    golden = np.load(reference.GOLDEN)
    half = ChameleonCodec.from_config(codec.config).eval()
    half.load_state_dict(codec.state_dict())
    got = half.to(torch.bfloat16).decode(torch.from_numpy(golden["tokens"].astype(np.int64)))
    assert got.dtype == torch.bfloat16 and np.abs(got.float().numpy() - golden["pixels"].clip(-1, 1)).mean() < 0.05
