"""Language models that draw: what the families share whose prompt is read by the decoder itself.

Positions lie on one line, and rotary attention sees only their differences. So they are counted from the start column: image
columns lie at 0, 1, 2, ... and the prompt at -1, -2, ... before them, wherever a batch pads it. Conditional and unconditional
prompts may differ in length: each row is what it would be alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import torch
from diffusers.utils.accelerate_utils import apply_forward_hook
from torch import Tensor, nn

from .backbone import axis_angles
from .checkpoint import Checkpoint, Source
from .target import Conditioning, DiscreteTarget
from .weights import Part

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)


class LanguageTarget(DiscreteTarget):
    """A decoder over words and codes. Subclasses set `word_table` (embedding of vocabulary ids), `rope_base` and `positions`."""

    word_table: nn.Embedding
    rope_base: float
    positions: int

    def _factors(self, places: Tensor) -> Tensor:
        angles = axis_angles(places, self.backbone.config.width // 2, self.rope_base)
        factors = torch.polar(torch.ones_like(angles), angles)
        return factors if self.dtype == torch.float64 else factors.to(torch.complex64)

    def rotary(self, columns: Tensor, grid: tuple[int, int]) -> Tensor:
        """Complex [B, T, hd / 2] for columns [B, T] of a lattice."""
        key = (grid, self.dtype, columns.device)
        if key not in self._tables:
            self._tables.clear()
            self._tables[key] = self._factors(torch.arange(grid[0] * grid[1] + 1, device=columns.device))
        table = self._tables[key]
        return table[columns.clamp(max=table.shape[0] - 1)]

    def prompt_rotary(self, slots: int) -> Tensor:
        """Complex [1, P, hd / 2]: the slot before the start column lies at -1."""
        return self._factors(torch.arange(-slots, 0, device=self.home))[None]

    @apply_forward_hook
    def condition(self, rows: Items[Items[int]], images: int) -> Conditioning:
        """Vocabulary ids of every cache row (the conditional rows first), the last of each being its start column."""
        device = self.home
        longest = max(len(row) for row in rows) - 1
        pad = torch.tensor([longest + 1 - len(row) for row in rows], device=device)
        ids = torch.tensor([[0] * (longest + 1 - len(row)) + list(row) for row in rows], device=device)
        embedded = self.word_table(ids)
        return Conditioning(embedded[:, :-1], pad, embedded[:, -1], images)

    def check_rows(self, rows: Items[Items[int]], tokens: int) -> None:
        """Raise ValueError where a prompt and the picture's `tokens` take more positions than the model has, or where the
        tokenizer knows ids that the model does not."""
        longest = max(len(row) for row in rows)
        if longest + tokens > self.positions:
            raise ValueError(
                f"the prompt has {longest} tokens and this model reads at most {self.positions - tokens} beside a picture "
                f"of {tokens}: shorten it"
            )
        highest = max(max(row) for row in rows)
        if highest >= self.word_table.num_embeddings:
            raise ValueError(
                f"the tokenizer gives id {highest} and the model knows {self.word_table.num_embeddings}: "
                "the tokenizer belongs to another model"
            )


def token_id(tokenizer: Any, token: str) -> int:
    """The id of a special token. Raises ValueError if the tokenizer has none."""
    found = tokenizer.get_vocab().get(token)
    if found is None:
        raise ValueError(f"the tokenizer has no {token}: it belongs to another model")
    return int(found)


def check_prompts(prompts: Items[str]) -> None:
    """Raise ValueError for an empty prompt."""
    if not all(text.strip() for text in prompts):
        raise ValueError("the prompt is empty: write what to draw")


# -- checkpoints -----------------------------------------------------------------------------------------------------


def rope_base(config: dict[str, Any]) -> float:
    """The base of the rotary angles in a transformers config. Raises ValueError for positions that are scaled."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rotary positions scaled by {kind!r} are not supported: the model is not one of the published ones")
    return float(given.get("rope_theta", config.get("rope_theta", 10000.0)))


def decoder_config(config: dict[str, Any], checkpoint: Checkpoint, prefix: str, heads: int = 32) -> dict[str, Any]:
    """Sizes of a Llama-like decoder: heads and constants from its config, all else from the tensors.

    prefix: of the checkpoint's keys, before `layers.`; heads: where the config does not say (transformers' default).
    """
    first, width = f"{prefix}layers.0.", checkpoint.shape(f"{prefix}norm.weight")[0]
    stem = f"{prefix}layers."
    layers = {key.removeprefix(stem).split(".")[0] for key in checkpoint.entries if key.startswith(stem)}
    heads = int(config.get("num_attention_heads", heads))
    head_dim = checkpoint.shape(f"{first}self_attn.q_proj.weight")[0] // heads
    return {
        "words": checkpoint.shape(f"{prefix}embed_tokens.weight")[0],
        "dim": width,
        "layers": len(layers),
        "heads": heads,
        "kv_heads": checkpoint.shape(f"{first}self_attn.k_proj.weight")[0] // head_dim,
        "ffn": checkpoint.shape(f"{first}mlp.gate_proj.weight")[0],
        "rope_base": rope_base(config),
    }


def tokenizer_part(source: Source) -> Part | None:
    """The tokenizer in a folder, or the one named; None where there is none."""
    folder = source.named.get("tokenizer", source).folder
    files: dict[str, Path | str] = {name: folder / name for name in TOKENIZER_FILES if (folder / name).is_file()}
    return Part("AutoTokenizer", library="transformers", files=files) if files else None
