"""The token bank: augmented pictures encoded once, so that target and draft training read tokens only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from ..models.codecs.vq import VQCodec
from .common import load_whole, save_whole, seeded
from .data import Augmentation, colour_table, render
from .names import COLOURS, MAX_WORDS, NAMES, prompt_text, word_ids, word_table


@dataclass(frozen=True)
class Bank:
    """Encoded pictures.

    Attributes:
        tokens: int16 [M, 256], raster order.
        names: int16 [M], index into NAMES.
        colours: int16 [M], index into COLOURS.
    """

    tokens: Tensor
    names: Tensor
    colours: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, rows: Tensor, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Word ids [B, 8] and tokens [B, 256] of the rows; prompts from `prompt_table`."""
        return prompts[self.names[rows].long(), self.colours[rows].long()], self.tokens[rows].long()


def prompt_table() -> Tensor:
    """Word ids of every name on every colour: LongTensor [names, colours, 8]."""
    words = word_table()
    ids = [[word_ids(prompt_text(name, colour), words) for colour in COLOURS] for name in NAMES]
    return torch.tensor(ids, dtype=torch.long).view(len(NAMES), len(COLOURS), MAX_WORDS)


def build_bank(
    codec: VQCodec, rgba: Tensor, per_name: int, ranges: Augmentation, path: Path, seed: int, label: str = "token bank"
) -> Bank:
    """`per_name` augmented pictures of each name on random backgrounds, encoded; read from `path` if it is there.

    Args:
        rgba: premultiplied pictures [N, 4, 64, 64] in [0, 1], on the CPU.
    """
    if state := load_whole(path):
        return Bank(**state)
    table, device = colour_table(), next(codec.parameters()).device
    names = torch.arange(len(rgba))
    tokens, chosen = [], []
    for turn in tqdm(range(per_name), desc=label, mininterval=5):
        generator = seeded(seed, 2, turn)
        colours = torch.randint(0, len(table), (len(rgba),), generator=generator)
        for part in names.split(64):
            pixels = render(rgba[part], table[colours[part]], ranges, generator)
            tokens.append(codec.encode(pixels.to(device)).flatten(1).cpu().to(torch.int16))
        chosen.append(colours)
    bank = Bank(torch.cat(tokens), names.repeat(per_name).to(torch.int16), torch.cat(chosen).to(torch.int16))
    save_whole({"tokens": bank.tokens, "names": bank.names, "colours": bank.colours}, path)
    return bank
