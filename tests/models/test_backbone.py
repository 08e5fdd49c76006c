"""The backbone against independent implementations with the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from foredraft.decoding.cache import Cache
from foredraft.decoding.layout import Layout, causal_mask
from foredraft.models.backbone import Backbone, BackboneConfig, axis_angles, make_norm, rotate
from torch import Tensor

DIM, LAYERS, HEADS, FFN, STEPS, BASE = 32, 3, 4, 56, 11, 10000.0
COMMON: dict[str, Any] = {
    "vocab_size": 7,
    "hidden_size": DIM,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "rope_theta": BASE,
    "attn_implementation": "eager",
}


@dataclass(frozen=True)
class Peer:
    """A transformers architecture and the backbone it corresponds to."""

    name: str
    kv_heads: int = HEADS
    norm: str = "rms"
    bias: bool = False
    qk_norm: bool = False
    head_dim: int = DIM // HEADS

    def build(self) -> Any:
        """The peer, with weights that leave nothing at its default."""
        config = getattr(transformers, f"{self.name}Config")
        extra: dict[str, Any] = {"rms_norm_eps": 1e-5, "head_dim": self.head_dim}
        if self.name == "StableLm":
            extra = {"layer_norm_eps": 1e-5, "partial_rotary_factor": 1.0, "use_qkv_bias": self.bias}
        torch.manual_seed(0)
        model = getattr(transformers, f"{self.name}Model")(config(num_key_value_heads=self.kv_heads, **COMMON, **extra))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                spread = torch.randn_like(weight) * (0.3 if "norm" in name or "bias" in name else 0.25)
                weight.copy_(spread + (1.0 if "norm" in name and name.endswith("weight") else 0.0))
                if self.norm == "layer" and name.endswith("norm.bias") or "layernorm.bias" in name:
                    weight.zero_()
        return model.double().eval()

    def config(self) -> BackboneConfig:
        """Ours."""
        return BackboneConfig(
            DIM, LAYERS, HEADS, FFN, self.kv_heads, self.head_dim, self.norm, 1e-5, qkv_bias=self.bias, qk_norm=self.qk_norm
        )


PEERS = [
    Peer("Llama"),
    Peer("Llama", kv_heads=2),
    Peer("Llama", kv_heads=1, head_dim=12),
    Peer("Qwen2", kv_heads=2, bias=True),
    Peer("Qwen3", kv_heads=2, qk_norm=True, head_dim=16),
    Peer("StableLm", kv_heads=2, norm="layer"),
]


def interleaved(weight: Tensor, heads: int, width: int) -> Tensor:
    """Rows of rotary halves (i, i + width / 2) -> rows of (even, odd) pairs."""
    return weight.view(heads, 2, width // 2, -1).transpose(1, 2).reshape(weight.shape)


def copied(peer: Any, config: BackboneConfig) -> Backbone:
    """Our backbone with the peer's weights."""
    ours, width = Backbone(config).double().eval(), config.width
    with torch.no_grad():
        for block, layer in zip(ours.blocks, peer.layers, strict=True):
            attention: Any = layer.self_attn
            for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
                q, k, v = (getattr(getattr(attention, f"{name}_proj"), kind) for name in "qkv")
                stacked = torch.cat((interleaved(q, config.heads, width), interleaved(k, config.groups, width), v))
                getattr(block.attention.qkv, kind).copy_(stacked)
            block.attention.out.weight.copy_(attention.o_proj.weight)
            if config.qk_norm:
                block.attention.q_norm.weight.copy_(interleaved(attention.q_norm.weight, 1, width))
                block.attention.k_norm.weight.copy_(interleaved(attention.k_norm.weight, 1, width))
            block.attention_norm.weight.copy_(layer.input_layernorm.weight)
            block.ffn_norm.weight.copy_(layer.post_attention_layernorm.weight)
            block.gate_up.weight.copy_(torch.cat((layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight)))
            block.down.weight.copy_(layer.mlp.down_proj.weight)
        ours.norm.weight.copy_(peer.norm.weight)
    return ours


def rotary(places: Tensor, width: int) -> Tensor:
    """The usual 1-D rotary factors."""
    angles = axis_angles(places, width // 2, BASE)
    return torch.polar(torch.ones_like(angles), angles)


def causal(steps: int) -> Tensor:
    """Additive mask [1, 1, T, T]."""
    return torch.full((steps, steps), -torch.inf, dtype=torch.float64).triu(1)[None, None]


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: f"{peer.name}-{peer.kv_heads}-{peer.head_dim}")
def test_equals_transformers(peer: Peer) -> None:
    theirs, config = peer.build(), peer.config()
    ours = copied(theirs, config)
    x = torch.randn(2, STEPS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(inputs_embeds=x, use_cache=False).last_hidden_state
        got = ours(x, rotary(torch.arange(STEPS)[None], config.width), causal(STEPS))
        single = ours.float()(
            x.float(), rotary(torch.arange(STEPS)[None], config.width).to(torch.complex64), causal(STEPS).float()
        )
    # transformers keeps its rotary table in float32.
    assert (got - expected).abs().max() < 1e-5
    assert (single - expected).abs().max() < 1e-4
    assert expected.std() > 0.3, "the comparison is of something"


@pytest.mark.parametrize("change", ["rotary", "mask", "kv", "bias", "q_norm"])
def test_the_comparison_notices_a_difference(change: str) -> None:
    """Negative control: each ingredient matters by far more than the tolerance."""
    peer = PEERS[4] if change == "q_norm" else PEERS[3]
    theirs, config = peer.build(), peer.config()
    ours = copied(theirs, config)
    x = torch.randn(2, STEPS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    turns, mask = rotary(torch.arange(STEPS)[None], config.width), causal(STEPS)
    with torch.no_grad():
        expected = theirs(inputs_embeds=x, use_cache=False).last_hidden_state
        if change == "rotary":
            turns = turns.conj()
        elif change == "mask":
            mask = torch.zeros_like(mask)
        elif change == "kv":
            ours.blocks[0].attention.qkv.weight.copy_(ours.blocks[0].attention.qkv.weight.flip(0))
        elif change == "bias":
            ours.blocks[1].attention.qkv.bias.zero_()
        else:
            ours.blocks[0].attention.q_norm.weight.copy_(ours.blocks[0].attention.q_norm.weight.flip(0))
        assert (ours(x, turns, mask) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: f"{peer.name}-{peer.kv_heads}-{peer.head_dim}")
def test_cached_in_pieces_equals_at_once(peer: Peer) -> None:
    config = peer.config()
    ours = copied(peer.build(), config)
    x = torch.randn(2, STEPS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    cache = Cache(LAYERS, 2, STEPS + 2, config.groups, config.width, DIM, torch.float64, torch.device("cpu"))
    pad, turns = torch.zeros(2, dtype=torch.long), rotary(torch.arange(STEPS)[None], config.width)
    with torch.no_grad():
        whole = ours(x, turns, causal(STEPS))
        pieces = []
        for first, last in ((0, 1), (1, 4), (4, 9), (9, STEPS)):
            places = torch.arange(first, last).expand(2, -1)
            layout = Layout(places, cache.flat(places), causal_mask(places, pad, last, torch.float64), last)
            pieces.append(ours(x[:, first:last], turns[:, first:last], layout.mask, cache, layout))
    assert torch.allclose(torch.cat(pieces, 1), whole, atol=1e-12)
    assert torch.allclose(cache.hidden[:, :STEPS], whole, atol=1e-12), "the hidden plane is what the head reads"


def test_rotation_keeps_lengths_and_sees_only_distance() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 1, 8, dtype=torch.float64), torch.randn(1, 1, 1, 8, dtype=torch.float64)

    def product(i: int, j: int) -> float:
        one, other = (rotate(x, rotary(torch.tensor([[place]]), 8)) for x, place in ((q, i), (k, j)))
        assert torch.allclose(one.norm(), q.norm())
        return float((one * other).sum())

    assert product(3, 1) == pytest.approx(product(9, 7), abs=1e-12)
    assert abs(product(3, 1) - product(3, 2)) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rotated_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, turns = torch.randn(2, 5, 3, 8).to(dtype), rotary(torch.arange(5)[None], 8).to(torch.complex64)
    got = rotate(x, turns)
    assert got.dtype == dtype and torch.equal(got, rotate(x.float(), turns).to(dtype))


def test_axis_angles_by_formula() -> None:
    got = axis_angles(torch.tensor([0, 1, 5]), 3, 100.0)
    assert got.dtype == torch.float64 and got.shape == (3, 3)
    for row, place in enumerate((0, 1, 5)):
        for pair in range(3):
            assert float(got[row, pair]) == pytest.approx(place * 100.0 ** (-pair / 3), abs=1e-12)


def test_an_unknown_norm_is_named() -> None:
    with pytest.raises(ValueError, match="'batch'.*'rms' or 'layer'"):
        make_norm("batch", 8, 1e-5)
