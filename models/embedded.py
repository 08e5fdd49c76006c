"""The embedded family: pictures of named things, drawn by a small LlamaGen-like decoder that ships with the package.

A prompt is at most eight words; a word table takes the place of a text encoder. Words sit left-padded before the start column,
with a learned embedding per slot counted from the right and no rotation; image tokens carry LlamaGen's 2-D rotary positions.
The unconditional prompt has no words at all.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import torch
from diffusers.configuration_utils import register_to_config
from diffusers.utils.accelerate_utils import apply_forward_hook
from torch import Tensor, nn

from .backbone import Backbone, BackboneConfig, axis_angles
from .target import Conditioning, DiscreteTarget

PAD = 0


class WordTokenizer:
    """Words to ids. Files: `words.json` with names, colours and words; id 0 is padding, `words` follow from 1."""

    file_name = "words.json"

    def __init__(self, names: Items[str], colours: dict[str, Items[int]], words: Items[str], max_words: int = 8):
        self.names, self.colours, self.words, self.max_words = list(names), dict(colours), list(words), max_words
        self.ids = {word: index for index, word in enumerate(self.words, start=1)}

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> WordTokenizer:
        """Read `words.json` from a folder."""
        path = Path(folder) / cls.file_name
        if not path.is_file():
            raise FileNotFoundError(f"no word table at {path}: the folder is incomplete, fetch it again")
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
            return cls(table["names"], table["colours"], table["words"], table.get("max_words", 8))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a word table: fetch the folder again") from error

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `words.json` into a folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        table = {"names": self.names, "colours": self.colours, "words": self.words, "max_words": self.max_words}
        (folder / self.file_name).write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def __call__(self, prompts: Items[str], empty: bool = False) -> Tensor:
        """Word ids [B, max_words], left-padded with 0; empty: a prompt may have no words.

        Raises ValueError that names the nearest known words or names.
        """
        rows = []
        for prompt in prompts:
            words = prompt.lower().replace("’", "'").replace(",", " ").split()
            if not words and not empty:
                raise ValueError(f"the prompt is empty: write a name, for example {self.names[0]!r}")
            unknown = [word for word in words if word not in self.ids]
            if unknown:
                raise ValueError(f"{self._unknown(unknown)} in the prompt {prompt!r}: {self._nearest(words, unknown)}")
            if len(words) > self.max_words:
                raise ValueError(
                    f"the prompt {prompt!r} has {len(words)} words, this model reads at most {self.max_words}: shorten it"
                )
            rows.append([PAD] * (self.max_words - len(words)) + [self.ids[word] for word in words])
        return torch.tensor(rows, dtype=torch.long)

    @staticmethod
    def _unknown(words: list[str]) -> str:
        quoted = ", ".join(repr(word) for word in words)
        return f"unknown word {quoted}" if len(words) == 1 else f"unknown words {quoted}"

    def _nearest(self, words: list[str], unknown: list[str]) -> str:
        near = {word: difflib.get_close_matches(word, self.words, n=3, cutoff=0.6) for word in unknown}
        if all(near.values()):
            return "nearest known words are " + "; ".join(f"{', '.join(close)} (for {word})" for word, close in near.items())
        text = " ".join(words).split(" on ")[0]
        close = difflib.get_close_matches(text, self.names, n=3, cutoff=0.0)
        colours = ", ".join(self.colours)
        return f"nearest known names are {', '.join(close)}; background colours are {colours} ('<name> on <colour>')"


class EmbeddedTarget(DiscreteTarget):
    """Target or small draft of the embedded family.

    guided=True marks a draft that was distilled from the guided distribution: it runs without unconditional rows.
    """

    @register_to_config
    def __init__(
        self,
        vocab_size: int = 512,
        words: int = 600,
        max_words: int = 8,
        dim: int = 128,
        layers: int = 12,
        heads: int = 2,
        ffn: int = 352,
        norm: str = "layer",
        rope_base: float = 100.0,
        guided: bool = False,
    ):
        super().__init__()
        self.vocab_size, self.guided_draft = vocab_size, guided
        shape = BackboneConfig(dim=dim, layers=layers, heads=heads, ffn=ffn, norm=norm)
        self.codes = nn.Embedding(vocab_size, dim)
        self.word_table = nn.Embedding(words, dim)
        self.slot_table = nn.Embedding(max_words, dim)
        self.start = nn.Parameter(torch.randn(dim) * 0.02)
        self.backbone = Backbone(shape)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        self._tables: dict[tuple[object, ...], Tensor] = {}
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)
        for block in self.backbone.blocks:
            for branch in (block.attention.out, block.down):
                nn.init.normal_(branch.weight, std=0.02 / (2 * layers) ** 0.5)

    def embed(self, tokens: Tensor) -> Tensor:
        """Codes [..., T] -> [..., T, D]."""
        return self.codes(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """Features [..., D] -> [..., V]."""
        return self.head(hidden)

    def table(self, grid: tuple[int, int]) -> Tensor:
        """Rotary factors of the start column and every cell of a grid in raster order: complex [N + 1, hd / 2].

        The first half of a head's pairs turns with the row, the second with the column; the start column is not turned.
        """
        dtype, device = self.head.weight.dtype, self.head.weight.device
        key = (grid, dtype, device)
        if key not in self._tables:
            height, width = grid
            pairs = self.backbone.config.width // 2
            cell = torch.arange(height * width, device=device)
            base = self.config.rope_base
            turned = torch.cat(
                (axis_angles(cell // width, pairs // 2, base), axis_angles(cell % width, pairs - pairs // 2, base)), -1
            )
            angles = torch.cat((turned.new_zeros(1, pairs), turned))
            factors = torch.polar(torch.ones_like(angles), angles)
            self._tables[key] = factors if dtype == torch.float64 else factors.to(torch.complex64)
        return self._tables[key]

    def rotary(self, columns: Tensor, grid: tuple[int, int]) -> Tensor:
        """Complex [B, T, hd / 2] for columns [B, T]; columns past the end of the image repeat the last cell."""
        table = self.table(grid)
        return table[columns.clamp(max=table.shape[0] - 1)]

    def prompt_rotary(self, slots: int) -> Tensor:
        """Words are not turned: complex ones [1, P, hd / 2]."""
        dtype = torch.complex128 if self.head.weight.dtype == torch.float64 else torch.complex64
        return torch.ones(1, slots, self.backbone.config.width // 2, dtype=dtype, device=self.head.weight.device)

    def word_embeddings(self, prompt_ids: Tensor) -> Tensor:
        """Word ids [R, P], right-aligned, -> [R, P, D]; slots count from the right."""
        slots = torch.arange(prompt_ids.shape[1] - 1, -1, -1, device=prompt_ids.device)
        return self.word_table(prompt_ids) + self.slot_table(slots)

    @apply_forward_hook
    def encode(
        self,
        components: dict[str, Any],
        prompts: list[str],
        negative: list[str] | None,
        guided: bool,
        grid: tuple[int, int],
    ) -> Conditioning:
        """Prompts -> Conditioning, with the word table among the pipeline's components."""
        tokenizer: WordTokenizer = components["tokenizer"]
        if len(tokenizer.words) >= self.config.words:
            raise ValueError(
                f"the word table has {len(tokenizer.words)} words and the model knows {self.config.words - 1}: "
                "the tokenizer belongs to another model"
            )
        if tokenizer.max_words > self.config.max_words:
            raise ValueError(
                f"the tokenizer reads up to {tokenizer.max_words} words and the model {self.config.max_words}: "
                "the tokenizer belongs to another model"
            )
        device = self.head.weight.device
        ids = tokenizer(prompts).to(device)
        return self.condition(ids, None if negative is None else tokenizer(negative, empty=True).to(device), guided)

    def condition(self, prompt_ids: Tensor, negative_ids: Tensor | None, guided: bool) -> Conditioning:
        """Prompt ids [B, P] (and the negative prompt's, None = no words) -> Conditioning with 2B rows if guided, else B."""
        rows = prompt_ids.shape[0]
        if guided and not self.guided_draft:
            negative = torch.zeros_like(prompt_ids) if negative_ids is None else negative_ids
            prompt_ids = torch.cat((prompt_ids, negative))
        pad = (prompt_ids != PAD).flip(1).cumprod(1).sum(1)
        pad = prompt_ids.shape[1] - pad
        trim = int(pad.min())
        prompt_ids, pad = prompt_ids[:, trim:], pad - trim
        start = self.start.expand(prompt_ids.shape[0], -1)
        return Conditioning(self.word_embeddings(prompt_ids), pad, start, rows)

    def forward(self, prompt_ids: Tensor, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        """Teacher forcing: prompt ids [B, P] left-padded, tokens [B, N] -> logits [B, N, V] that predict each token.

        The whole image in one causal pass, for training and as the reference that cached decoding is compared with.
        """
        return self.logits(self.teacher_features(prompt_ids, tokens, grid))

    def teacher_features(self, prompt_ids: Tensor, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        """Features [B, N, D] of one causal pass: position i has seen the prompt and tokens[:, :i]."""
        return self.backbone(*self.teacher_inputs(prompt_ids, tokens, grid))[:, prompt_ids.shape[1] :]

    def teacher_inputs(self, prompt_ids: Tensor, tokens: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """What the backbone reads in that pass: embeddings [B, P + N, D], rotary factors and mask."""
        rows, prompt = prompt_ids.shape
        image = torch.cat((self.start.expand(rows, 1, -1), self.embed(tokens[:, :-1])), 1)
        x = torch.cat((self.word_embeddings(prompt_ids), image), 1)
        columns = torch.arange(tokens.shape[1], device=tokens.device)[None]
        rotary = torch.cat((self.prompt_rotary(prompt), self.rotary(columns, grid)), 1)
        places = torch.arange(x.shape[1], device=tokens.device)
        pads = torch.nn.functional.pad(prompt_ids == PAD, (0, image.shape[1]))
        hidden = (places > places[:, None]) | (pads[:, None] & (places != places[:, None]))
        mask = torch.zeros(hidden.shape, dtype=x.dtype, device=x.device).masked_fill_(hidden, -torch.inf)[:, None]
        return x, rotary, mask
