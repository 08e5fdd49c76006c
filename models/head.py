"""Draft head in EAGLE's layout: one decoder layer that continues the target's own features.

At column c the head reads the embedding of the column's token and the target's feature of the column before it (its last hidden
state, which the output head reads), and predicts the column's own feature; the target's frozen output head turns that into a
distribution of the next token. Further down a draft the head reads its own predictions. Embedding and output head stay the
target's and are not part of the head's file, unless a published checkpoint brings an embedding of its own.

Source: Li et al. 2024 (EAGLE); Jang et al. 2025 (LANTERN) for the heads published for LlamaGen and Anole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError  # noqa: S403 (the error only; weights are read with weights_only=True)
from typing import Any

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ..decoding.cache import Cache
from ..decoding.drafters.head import HeadSequence
from ..decoding.layout import Layout, causal_mask
from ..decoding.sampling import Sampling
from .backbone import BackboneConfig, Block, make_norm
from .target import Conditioning, DiscreteTarget


class DraftHead(ModelMixin, ConfigMixin):
    """One or more decoder layers over fc([embedding; feature]).

    first_norm: the first layer normalises its input (LlamaGen's heads' does not). final_norm: predictions are normalised.
    vocab_size: codes of the head's own frozen embedding, None = the target's embedding is used. text: what stands for the
    embeddings of the prompt: "prompt" the target's own, "zero" those of code 0 (LlamaGen's heads). qk_norm: see `BackboneConfig`.
    """

    @register_to_config
    def __init__(
        self,
        dim: int = 128,
        layers: int = 1,
        heads: int = 2,
        ffn: int = 512,
        kv_heads: int | None = None,
        norm: str = "layer",
        eps: float = 1e-5,
        qkv_bias: bool = False,
        first_norm: bool = True,
        final_norm: bool = False,
        vocab_size: int | None = None,
        text: str = "prompt",
        qk_norm: bool | str = False,
    ):
        super().__init__()
        if text not in ("prompt", "zero"):
            raise ValueError(f"unknown text {text!r}; choose 'prompt' or 'zero'")
        self.shape = BackboneConfig(dim, layers, heads, ffn, kv_heads, norm=norm, eps=eps, qkv_bias=qkv_bias, qk_norm=qk_norm)
        self.codes = nn.Embedding(vocab_size, dim) if vocab_size else None
        self.fc = nn.Linear(2 * dim, dim)
        blocks = [Block(self.shape) for _ in range(layers)]
        if not first_norm:
            blocks[0].attention_norm = nn.Identity()
        for block in blocks:
            for branch in (block.attention.out, block.down):
                nn.init.normal_(branch.weight, std=0.02 / (2 * layers) ** 0.5)
        self.blocks = nn.ModuleList(blocks)
        self.last_norm = make_norm(norm, dim, eps) if final_norm else nn.Identity()
        if self.codes is not None:
            self.codes.requires_grad_(False)

    @classmethod
    def for_target(cls, target: DiscreteTarget, **changes: Any) -> DraftHead:
        """A freshly initialised head of the target's width, heads and norm.

        Embeddings are often much smaller than features; fc begins with both halves of its input counting alike.
        """
        shape = target.backbone.config
        given = {"dim": shape.dim, "heads": shape.heads, "kv_heads": shape.kv_heads, "norm": shape.norm, "eps": shape.eps}
        head = cls(**{**given, **changes})
        with torch.no_grad():
            codes = torch.arange(target.vocab_size, device=target.device)
            table = target.embed(codes) if head.codes is None else head.codes.weight
            size = table.square().mean().sqrt()
            scale = target.backbone.norm.get_parameter("weight").square().mean().sqrt()
            head.fc.weight[:, : shape.dim].mul_((scale / size).to(head.fc.weight))
        return head

    def check(self, target: DiscreteTarget) -> None:
        """Raise ValueError unless this head continues the features of that target."""
        width, pairs = target.backbone.config.dim, target.backbone.config.width
        if (self.shape.dim, self.shape.width) != (width, pairs):
            raise ValueError(
                f"the draft head has {self.shape.dim} features in heads of {self.shape.width} and the target {width} in heads "
                f"of {pairs}: load a head made for this target"
            )
        if self.codes is not None and self.codes.num_embeddings != target.vocab_size:
            raise ValueError(
                f"the draft head has {self.codes.num_embeddings} codes and the target {target.vocab_size}: "
                "they must share one codebook, load a head made for this target"
            )

    def embed(self, target: DiscreteTarget, tokens: Tensor) -> Tensor:
        """Input embeddings of codes [..., T] -> [..., T, D]."""
        return target.embed(tokens) if self.codes is None else nn.functional.embedding(tokens, self.codes.weight)

    def forward(
        self,
        x: Tensor,
        features: Tensor,
        rotary: Tensor,
        mask: Tensor,
        cache: Cache | None = None,
        layout: Layout | None = None,
    ) -> Tensor:
        """Predicted features [R, T, D].

        x [R, T, D]: embedding of the token of each column; features [R, T, D]: of the column before it; rotary complex
        [R or 1, T, hd / 2] of the column; mask additive [R or 1, 1, T, S].
        """
        x = self.fc(torch.cat((x, features), -1))
        for layer, block in enumerate(self.blocks):
            x = block(x, rotary, mask, cache, layer, layout)
        return self.last_norm(x)

    def begin(
        self, target: DiscreteTarget, conditioning: Conditioning, grid: tuple[int, int], sampling: Sampling, scratch: int
    ) -> HeadSequence:
        """The head's own sequence and cache for one run, still empty: the prompt is read in the first round.

        The first slots of the cache are `scratch` places for drafted nodes; prompt and columns follow. Each row leaves out its
        first prompt slot, before which there is no feature.
        """
        prefix, pad = conditioning.prefix, conditioning.pad
        rows, prompt = prefix.shape[:2]
        count, device, shape = grid[0] * grid[1], prefix.device, self.shape
        start = conditioning.start
        if self.config.text == "zero":
            empty = self.embed(target, torch.zeros(1, 1, dtype=torch.long, device=device))
            prefix, start = empty.expand(rows, prompt, -1), empty[0].expand(rows, -1)
        slots = scratch + prompt + count + 1 + 1
        cache = Cache(shape.layers, rows, slots, shape.groups, shape.width, shape.dim, prefix.dtype, device)
        return HeadSequence(
            tokens=torch.zeros(conditioning.rows, count + 1, dtype=torch.long, device=device),
            length=torch.ones(conditioning.rows, dtype=torch.long, device=device),
            cached=torch.zeros(conditioning.rows, dtype=torch.long, device=device),
            cache=cache,
            grid=grid,
            sampling=sampling,
            prompt=scratch + prompt,
            pad=scratch + torch.clamp(pad + 1, max=prompt),
            start=start,
            forced=target.forced(grid),
            scratch=scratch,
            prefix=prefix,
            bare=pad >= prompt,
        )

    def prefill(self, target: DiscreteTarget, own: HeadSequence, hidden: Tensor) -> None:
        """Read the prompt: hidden [R, P, D] are the target's features of its slots."""
        prefix, cache, pad = own.prefix, own.cache, own.pad
        if prefix is None or cache is None or pad is None or prefix.shape[1] < 2:
            return
        rows, prompt = prefix.shape[:2]
        places = own.scratch + torch.arange(prompt, device=prefix.device).expand(rows, prompt)
        tier = own.scratch + prompt
        mask = causal_mask(places, torch.zeros_like(pad), tier, prefix.dtype)
        # A slot that is left out reads itself alone, so that no row of the mask is empty.
        reads = torch.minimum(pad[:, None], places)
        keys = torch.arange(tier, device=prefix.device)
        mask = mask.masked_fill((keys < reads[..., None])[:, None], -torch.inf)
        before = torch.cat((torch.zeros_like(hidden[:, :1]), hidden[:, :-1]), 1)
        layout = Layout(places, cache.flat(places), mask, tier)
        self(prefix, before, target.prompt_rotary(prompt), mask, cache, layout)

    def step(self, target: DiscreteTarget, own: HeadSequence, tokens: Tensor, features: Tensor, layout: Layout) -> Tensor:
        """One forward over tokens [B, T] in layout.columns, features [R, T, D] of the columns before: predictions [R, T, D]."""
        columns = layout.columns
        x = target.embed_at(tokens, columns, own.grid) if self.codes is None else self.codes(tokens)
        rotary = target.rotary(columns, own.grid)
        repeat = features.shape[0] // tokens.shape[0]
        if repeat > 1:
            x = x.repeat(repeat, 1, 1)
            rotary = rotary.repeat(repeat, 1, 1) if rotary.shape[0] > 1 else rotary
        if own.low <= own.pending and own.start is not None:
            x = torch.where((columns == 0).repeat(repeat, 1)[..., None], own.start[:, None], x)
        return self(x, features, rotary, layout.mask, own.cache, layout)


_LAYER = "layers.{}."
_PARTS = {
    "self_attn.o_proj.weight": "attention.out.weight",
    "mlp.down_proj.weight": "down.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "input_layernorm.weight": "attention_norm.weight",
}
_FUSED = {
    "attention.qkv.{}": ("self_attn.q_proj.{}", "self_attn.k_proj.{}", "self_attn.v_proj.{}"),
    "gate_up.{}": ("mlp.gate_proj.{}", "mlp.up_proj.{}"),
}


def from_published(folder: str | Path, halves: bool = False, text: str = "zero") -> DraftHead:
    """A head from a published checkpoint: `config.json` beside `model.safetensors` or `pytorch_model.bin`.

    halves: rotary pairs are stored as two halves (heads of Chameleon's kind), not as (even, odd) neighbours (LlamaGen's).

    Raises FileNotFoundError or ValueError in one sentence.
    """
    folder = Path(folder)
    place = folder / "config.json"
    if not place.is_file():
        raise FileNotFoundError(f"no config.json in {folder}: give the folder of a published draft head")
    try:
        given = json.loads(place.read_text(encoding="utf-8"))
        dim, heads, count = given["hidden_size"], given["num_attention_heads"], given["num_hidden_layers"]
        ffn, kv_heads = given["intermediate_size"], given.get("num_key_value_heads", heads)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{place} does not describe a draft head: fetch the folder again") from error
    state = published_state(read_weights(folder), count, heads, kv_heads, halves)
    head = DraftHead(
        dim=dim,
        layers=count,
        heads=heads,
        ffn=ffn,
        kv_heads=kv_heads,
        norm="rms",
        eps=given.get("rms_norm_eps", 1e-6),
        qkv_bias="blocks.0.attention.qkv.bias" in state,
        first_norm="blocks.0.attention_norm.weight" in state,
        vocab_size=len(state["codes.weight"]) if "codes.weight" in state else None,
        text=text,
    )
    wanted = head.state_dict()
    state.setdefault("fc.bias", torch.zeros(dim))
    wrong = [name for name in (*wanted, *state) if name not in state or name not in wanted]
    wrong += [name for name in wanted if name not in wrong and wanted[name].shape != state[name].shape]
    if wrong:
        raise ValueError(
            f"the weights in {folder} do not fit their config.json: {len(wrong)} tensors are missing, unexpected or of another "
            f"size, {wrong[0]!r} among them"
        )
    head.load_state_dict(state)
    return head.eval()


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of `model.safetensors`, or else of `pytorch_model.bin` (without running code that a pickle may hold)."""
    path = folder / "model.safetensors"
    try:
        if path.is_file():
            return load_file(path)
        path = folder / "pytorch_model.bin"
        if not path.is_file():
            raise FileNotFoundError(f"{folder} has neither model.safetensors nor pytorch_model.bin: fetch it again")
        state = torch.load(path, map_location="cpu", weights_only=True)
        return {name: value for name, value in state.items() if isinstance(value, Tensor)}
    except (SafetensorError, UnpicklingError, RuntimeError, EOFError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read, it is damaged or no file of weights: fetch it again") from error


def published_state(weights: Mapping[str, Tensor], layers: int, heads: int, kv_heads: int, halves: bool) -> dict[str, Tensor]:
    """EAGLE's names and separate projections -> this class's. Names that are not known are kept, and so found out later."""
    rest = dict(weights)
    state = {}
    for old, new in (("embed_tokens.weight", "codes.weight"), ("fc.weight", "fc.weight"), ("fc.bias", "fc.bias")):
        if old in rest:
            state[new] = rest.pop(old)
    for layer in range(layers):
        old_layer, new_layer = _LAYER.format(layer), f"blocks.{layer}."
        for old, new in _PARTS.items():
            if old_layer + old in rest:
                state[new_layer + new] = rest.pop(old_layer + old)
        for fused, names in _FUSED.items():
            for kind in ("weight", "bias"):
                parts = [rest.pop(old_layer + name.format(kind), None) for name in names]
                if halves and len(parts) == 3:
                    parts[:2] = [
                        None if part is None else interleaved(part, count)
                        for part, count in zip(parts[:2], (heads, kv_heads), strict=True)
                    ]
                whole = [part for part in parts if part is not None]
                if len(whole) == len(parts):
                    state[new_layer + fused.format(kind)] = torch.cat(whole)
    rest = {name: value for name, value in rest.items() if not name.endswith("rotary_emb.inv_freq")}
    return {**state, **rest}


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection [heads * hd, ...] from two halves to (even, odd) pairs."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
