"""The draft head as a component: published layout, folders, errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from foredraft.decoding.drafters.head import HeadDrafter
from foredraft.decoding.loop import decode
from foredraft.decoding.noise import Noise
from foredraft.decoding.sampling import Sampling
from foredraft.decoding.trace import Recorder
from foredraft.decoding.verify import Match
from foredraft.models import loading
from foredraft.models.embedded import EmbeddedTarget
from foredraft.models.head import DraftHead, from_published
from safetensors.torch import save_file
from torch import Tensor

from ..tiny import sentence, states_equal

Pipe = Callable[..., Any]
DIM, HEADS, FFN, CODES = 16, 2, 24, 10
CONFIG = {
    "hidden_size": DIM,
    "intermediate_size": FFN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "vocab_size": CODES,
}


def published(first_norm: bool = False) -> dict[str, Tensor]:
    """Random weights under the published names, in the published shapes."""
    shapes = {
        "embed_tokens.weight": (CODES, DIM),
        "fc.weight": (DIM, 2 * DIM),
        "fc.bias": (DIM,),
        **{f"layers.0.self_attn.{name}_proj.weight": (DIM, DIM) for name in "qkvo"},
        "layers.0.mlp.gate_proj.weight": (FFN, DIM),
        "layers.0.mlp.up_proj.weight": (FFN, DIM),
        "layers.0.mlp.down_proj.weight": (DIM, FFN),
        "layers.0.post_attention_layernorm.weight": (DIM,),
    }
    if first_norm:
        shapes["layers.0.input_layernorm.weight"] = (DIM,)
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(folder: Path, weights: dict[str, Tensor], kind: str = "bin", **changes: Any) -> Path:
    """A published folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    if kind == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors")
    return folder


def by_formula(weights: dict[str, Tensor], tokens: Tensor, features: Tensor, angles: Tensor, halves: bool) -> Tensor:
    """The published forward, written out: tokens [T], features [T, D], angles [T, hd / 2] -> [T, D]."""

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weights[name]

    def turn(x: Tensor) -> Tensor:
        x = x.view(len(x), HEADS, -1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        even, odd = x.chunk(2, -1) if halves else (x[..., ::2], x[..., 1::2])
        turned = even * cos - odd * sin, odd * cos + even * sin
        return torch.cat(turned, -1) if halves else torch.stack(turned, -1).flatten(-2)

    layer = {name.removeprefix("layers.0."): value for name, value in weights.items()}
    x = F.linear(torch.cat((weights["embed_tokens.weight"][tokens], features), -1), weights["fc.weight"], weights["fc.bias"])
    inner = norm(x, "layers.0.input_layernorm.weight") if "input_layernorm.weight" in layer else x
    query, key = (turn(inner @ layer[f"self_attn.{name}_proj.weight"].T) for name in "qk")
    value = (inner @ layer["self_attn.v_proj.weight"].T).view(len(x), HEADS, -1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / (DIM // HEADS) ** 0.5
    scores = scores + torch.full((len(x), len(x)), -torch.inf).triu(1)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)
    x = x + mixed @ layer["self_attn.o_proj.weight"].T
    inner = norm(x, "layers.0.post_attention_layernorm.weight")
    gate, up = inner @ layer["mlp.gate_proj.weight"].T, inner @ layer["mlp.up_proj.weight"].T
    return x + (F.silu(gate) * up) @ layer["mlp.down_proj.weight"].T


@pytest.mark.parametrize("halves", [False, True], ids=["pairs", "halves"])
@pytest.mark.parametrize("first_norm", [False, True])
@pytest.mark.parametrize("kind", ["bin", "safetensors"])
def test_published_head_by_formula(tmp_path, halves, first_norm, kind):
    """Loaded under our names, the head computes what the published layout says, embedding included."""
    weights = published(first_norm)
    head = from_published(write(tmp_path / "head", weights, kind), halves=halves)
    tokens, features = torch.tensor([3, 1, 9, 0, 7]), torch.randn(5, DIM, generator=torch.Generator().manual_seed(1))
    angles = torch.rand(5, DIM // HEADS // 2, generator=torch.Generator().manual_seed(2)) * 6
    mask = torch.full((5, 5), -torch.inf).triu(1)[None, None]
    target: Any = None  # the head brings its own embedding
    with torch.no_grad():
        rotary = torch.polar(torch.ones_like(angles), angles)[None]
        got = head(head.embed(target, tokens)[None], features[None], rotary, mask)[0]
        assert torch.allclose(got, by_formula(weights, tokens, features, angles, halves), atol=1e-4, rtol=1e-4)
        if halves:
            other = from_published(tmp_path / "head")
            assert not torch.allclose(other(head.embed(target, tokens)[None], features[None], rotary, mask)[0], got, atol=1e-2)
    assert not head.codes.weight.requires_grad and head.config.text == "zero"


def test_published_head_without_bias_or_embedding(tmp_path):
    """Some heads have neither: the bias is zero, and the target's embedding is used."""
    weights = {name: value for name, value in published().items() if name not in ("fc.bias", "embed_tokens.weight")}
    head = from_published(write(tmp_path / "head", weights))
    assert head.codes is None and not head.fc.bias.any()


def test_published_head_is_saved_as_ours(tmp_path):
    head = from_published(write(tmp_path / "head", published()))
    head.save_pretrained(tmp_path / "ours")
    assert states_equal(DraftHead.from_pretrained(tmp_path / "ours"), head)


@pytest.mark.parametrize(
    ("fault", "error", "holds"),
    [
        ("no config", FileNotFoundError, ("no config.json",)),
        ("no weights", FileNotFoundError, ("neither model.safetensors nor pytorch_model.bin",)),
        ("cut", ValueError, ("pytorch_model.bin", "damaged")),
        ("code", ValueError, ("pytorch_model.bin", "damaged")),
        ("config", ValueError, ("config.json", "does not describe a draft head")),
        ("missing", ValueError, ("1 tensors", "down.weight")),
        ("foreign", ValueError, ("1 tensors", "lm_head.weight")),
        ("size", ValueError, ("of another size", "fc.weight")),
    ],
)
def test_damaged_published_heads(tmp_path, fault, error, holds):
    weights = published()
    if fault == "missing":
        del weights["layers.0.mlp.down_proj.weight"]
    elif fault == "foreign":
        weights["lm_head.weight"] = torch.zeros(2)
    elif fault == "size":
        weights["fc.weight"] = torch.zeros(DIM, DIM)
    folder = write(tmp_path / "head", weights)
    path = folder / "pytorch_model.bin"
    if fault == "no config":
        (folder / "config.json").unlink()
    elif fault == "no weights":
        path.unlink()
    elif fault == "cut":
        path.write_bytes(path.read_bytes()[:100])
    elif fault == "code":
        torch.save({"fc.weight": print}, path)
    elif fault == "config":
        (folder / "config.json").write_text('{"hidden_size": 3}')
    with pytest.raises(error) as caught:
        from_published(folder)
    sentence(caught, *holds)


def test_a_head_for_a_target(pipe: Pipe, tmp_path: Path) -> None:
    """Shape and norm are the target's, embeddings and features count alike, and the folder is a component like any other."""
    target: EmbeddedTarget = pipe("sjd").target
    head = DraftHead.for_target(target, ffn=20)
    head.check(target)
    left, right = head.fc.weight.detach().chunk(2, 1)
    sizes = [part.detach().square().mean().sqrt() for part in (target.codes.weight, target.backbone.norm.weight)]
    assert 0.8 < float(left.std() * sizes[0] / (right.std() * sizes[1])) < 1.25
    head.half().save_pretrained(tmp_path / "draft_head")
    again = loading.load_component(tmp_path, "draft_head", "DraftHead", torch.float16)
    assert isinstance(again, DraftHead) and states_equal(again, head)


def test_a_head_of_another_target(pipe: Pipe) -> None:
    target = pipe("sjd").target
    with pytest.raises(ValueError) as error:
        DraftHead(dim=64, heads=2, ffn=8).check(target)
    sentence(error, "64 features", "made for this target")
    with pytest.raises(ValueError) as error:
        DraftHead.for_target(target, vocab_size=5).check(target)
    sentence(error, "5 codes", "48", "one codebook")
    with pytest.raises(ValueError, match="unknown text 'none'; choose 'prompt' or 'zero'"):
        DraftHead(text="none")


def test_text_of_code_zero(pipe: Pipe) -> None:
    """A head of the published kind drafts for a target of another embedding: seeded tokens are plain decoding's."""
    part = pipe("sjd", torch.float64)
    target = part.target
    torch.manual_seed(0)
    head = DraftHead.for_target(target, vocab_size=48, text="zero", first_norm=False, ffn=20).double().eval()
    sampling = Sampling(guidance_scale=1.5)
    tokens = []
    for drafted in (False, True):
        conditioning = target.encode(part.components, ["red apple on blue", "fox"], None, True, (4, 4))
        sequence = target.begin(conditioning, (3, 5), sampling, 4)
        own = head.begin(target, conditioning, (3, 5), sampling, 4)
        assert torch.equal(own.start, head.codes.weight[:1].expand(4, -1))
        drafter = HeadDrafter(head, target, own, length=3 if drafted else 0, seeded=True)
        tokens.append(decode(target, drafter, Match(), sequence, Noise(torch.tensor([1, 2])), Recorder()))
        assert (drafter.draft_forwards > 0) == drafted
    assert torch.equal(*tokens)
