"""The VQ codec of LlamaGen and Janus: transformers' JanusVQVAE in both layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from foredraft.models import loading
from foredraft.models.checkpoint import Checkpoint, Source
from foredraft.models.codecs.janus import JanusCodec, codec_part, original_name
from transformers import JanusVQVAE
from transformers.models.janus.configuration_janus import JanusVQVAEConfig

from ..tiny import sentence
from . import layouts

SHAPE: dict[str, Any] = {"num_embeddings": layouts.CODES, "latent_channels": 32, "base_channels": 32, "num_res_blocks": 1}


def reference(state: dict[str, torch.Tensor], levels: tuple[int, ...], side: int) -> JanusVQVAE:
    """transformers' class with LlamaGen's numbers, for square grids of one size."""
    model = JanusVQVAE(JanusVQVAEConfig(channel_multiplier=list(levels), num_patches=side, **SHAPE)).eval()
    model.load_state_dict({name: state[original_name(name)] for name in model.state_dict()})
    return model


@pytest.mark.parametrize(("levels", "cell", "side"), [(layouts.LEVELS, 16, 4), (layouts.LEVELS, 16, 6), ((1, 2, 2, 4), 8, 4)])
def test_pixels_are_those_of_transformers(tmp_path: Path, levels: tuple[int, ...], cell: int, side: int) -> None:
    state = layouts.vq_state(levels=levels)
    path = layouts.save_state(state, tmp_path / "vq_ds16_t2i.pt", "ddp")
    codec = loading.build(loading.recognise(Source(path)).parts["codec"], torch.float32)
    assert codec.config.downsample == cell and list(codec.config.channel_multiplier) == list(levels)
    tokens = torch.randint(layouts.CODES, (2, side, side), generator=torch.Generator().manual_seed(0))
    theirs = reference(state, levels, side).decode(tokens.flatten(1))
    ours = codec.decode(tokens)
    assert ours.shape == (2, 3, cell * side, cell * side) and theirs.std() > 0.05
    assert (ours - theirs).abs().max() <= 1e-4


def test_transformers_own_layout(tmp_path: Path) -> None:
    """As in a Janus folder: the same tensors under `model.vqmodel.`, among others."""
    state = layouts.vq_state()
    model = reference(state, layouts.LEVELS, 4)
    named = {f"model.vqmodel.{name}": tensor for name, tensor in model.state_dict().items()}
    path = layouts.save_state({**named, "model.norm.weight": torch.ones(3)}, tmp_path / "janus.pt", "bare")
    codec = loading.build(codec_part(Checkpoint([path]), "model.vqmodel.", "transformers"), torch.float32)
    tokens = torch.randint(layouts.CODES, (1, 4, 4))
    assert (codec.decode(tokens) - model.decode(tokens.flatten(1))).abs().max() <= 1e-4
    original = {f"gen_vision_model.{name}": tensor for name, tensor in state.items()}
    path = layouts.save_state(original, tmp_path / "deepseek.bin", "bare")
    again = loading.build(codec_part(Checkpoint([path]), "gen_vision_model.", "llamagen"), torch.float32)
    assert torch.equal(again.decode(tokens), codec.decode(tokens))


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> JanusCodec:
    """Do not change it."""
    path = layouts.save_state(layouts.vq_state(), tmp_path_factory.mktemp("vq") / "vq_ds16_t2i.pt", "ddp")
    return loading.build(loading.recognise(Source(path)).parts["codec"], torch.float32)


def test_a_picture_may_have_any_grid(codec: JanusCodec) -> None:
    tokens = torch.randint(layouts.CODES, (1, 3, 5))
    assert codec.decode(tokens).shape == (1, 3, 48, 80)
    assert codec.encode(codec.decode(tokens)).shape == (1, 3, 5)
    with pytest.raises(ValueError) as error:
        codec.encode(torch.zeros(1, 3, 40, 48))
    assert "multiples of 16" in str(error.value)


def test_codes_are_normalised_when_they_are_looked_up(codec: JanusCodec) -> None:
    assert not torch.allclose(codec.vq.quantize.embedding.weight.norm(dim=-1), torch.ones(layouts.CODES), atol=1e-2)
    assert torch.allclose(codec.codebook().norm(dim=-1), torch.ones(layouts.CODES))
    tokens = torch.randint(layouts.CODES, (1, 2, 2))
    before = codec.decode(tokens)
    with torch.no_grad():
        codec.vq.quantize.embedding.weight.mul_(3.0)
        assert torch.allclose(codec.decode(tokens), before, atol=1e-5)
        codec.vq.quantize.embedding.weight.div_(3.0)


def test_the_nearest_code_on_the_sphere(codec: JanusCodec) -> None:
    pixels = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(2)) * 2 - 1
    with torch.no_grad():
        latents = codec.vq.quant_conv(codec.vq.encoder(pixels))[0].flatten(1).T
    distance = torch.cdist(torch.nn.functional.normalize(latents, dim=-1), codec.codebook())
    assert torch.equal(codec.encode(pixels).flatten(), distance.argmin(-1))


def test_a_file_without_a_codec(tmp_path: Path) -> None:
    path = layouts.save_state({"quantize.embedding.weight": torch.ones(4, 8)}, tmp_path / "x.pt", "bare")
    with pytest.raises(ValueError) as error:
        codec_part(Checkpoint([path]))
    sentence(error, "encoder.conv_in.weight", "image tokenizer")
    with pytest.raises(ValueError) as error:
        JanusCodec(channel_multiplier=(1, 2), downsample=16)
    sentence(error, "2 levels make 2 pixels")
