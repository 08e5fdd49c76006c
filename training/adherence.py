"""Does a picture show what the prompt names? A fixed feature, no learned model.

A picture's background colour is the median of its border. Each reference picture (12 x 12 RGBA, premultiplied) is put
on that colour at three sizes, as it is and mirrored, brought to CIELAB, and compared with the picture, averaged to
12 x 12, by the mean squared difference over a few small shifts; the nearest reference names it. Averaging over cells
of 5 x 5 pixels, shifting and resizing absorb the training's augmentation; the background adds no difference.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from .data import colour_table, premultiply
from .names import COLOURS, NAMES

REFERENCE = Path(__file__).parents[1] / "models" / "demo" / "reference.safetensors"
CELLS = 12
SIZES = (1.0, 0.92, 0.85)
SHIFTS = tuple((x, y) for y in (-1.5, 0.0, 1.5) for x in (-1.5, 0.0, 1.5))
Pictures = Tensor | Sequence[Image.Image]


def save_reference(pictures: Tensor, path: Path) -> None:
    """Write the reference pictures; uint8 straight alpha [N, 4, 64, 64] -> half precision [N, 4, 12, 12]."""
    path.parent.mkdir(parents=True, exist_ok=True)
    small = F.adaptive_avg_pool2d(premultiply(pictures), CELLS)
    save_file({"rgba": small.half().contiguous()}, str(path))


def nearest_name(images: Pictures, reference: Path = REFERENCE) -> list[str]:
    """The name of the reference nearest to each picture.

    Args:
        images: float [B, 3, H, W] in [-1, 1], or PIL images; any size, square.
    """
    return [NAMES[index] for index in distances(images, reference).argmin(1).tolist()]


def background_colour(images: Pictures) -> list[str]:
    """The name of the colour nearest (in CIELAB) to each picture's border."""
    borders = to_lab(_border(_pixels(images))[:, :, None, None])[:, :, 0, 0]
    table = to_lab(colour_table()[:, :, None, None])[:, :, 0, 0]
    names = list(COLOURS)
    return [names[index] for index in torch.cdist(borders, table).argmin(1).tolist()]


@torch.no_grad()
def distances(images: Pictures, reference: Path = REFERENCE) -> Tensor:
    """Mean squared CIELAB difference of each picture to each reference: float32 [B, N]."""
    pixels, references = _pixels(images), _references(reference)
    shifted = torch.stack([to_lab(cells) for cells in _shifted_cells(pixels)], 1).flatten(2)
    rows = []
    for picture, border in zip(shifted, _border(pixels), strict=True):
        rgb, alpha = references[:, :3], references[:, 3:]
        candidates = to_lab(rgb + (1 - alpha) * border[None, :, None, None]).flatten(1)
        squares = torch.cdist(candidates, picture).amin(1).square() / candidates.shape[1]
        rows.append(squares.view(-1, len(NAMES)).amin(0))
    return torch.stack(rows)


def to_lab(rgb: Tensor) -> Tensor:
    """sRGB [B, 3, H, W] in [0, 1] -> CIELAB under D65 (CIE 15; IEC 61966-2-1 for sRGB)."""
    linear = torch.where(rgb <= 0.04045, rgb / 12.92, ((rgb.clamp_min(0) + 0.055) / 1.055) ** 2.4)
    to_xyz = rgb.new_tensor([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) / rgb.new_tensor(
        [[0.9505], [1.0], [1.089]]
    )
    xyz = torch.einsum("ij,bjhw->bihw", to_xyz, linear)
    root = torch.where(xyz > 216 / 24389, xyz.clamp_min(1e-8) ** (1 / 3), (24389 / 27 * xyz + 16) / 116)
    x, y, z = root.unbind(1)
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], 1)


def _pixels(images: Pictures) -> Tensor:
    """Pictures as float32 [B, 3, 64, 64] in [0, 1]."""
    if not isinstance(images, Tensor):
        arrays = [np.asarray(image.convert("RGB"), dtype=np.float32) / 255 for image in images]
        pixels = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)
    else:
        pixels = (images.float() + 1) / 2
    if pixels.shape[-1] != 64:
        pixels = F.interpolate(pixels, (64, 64), mode="area")
    return pixels.clamp(0, 1)


def _border(pixels: Tensor) -> Tensor:
    """The median colour of the outer two pixels: [B, 3, H, W] -> [B, 3]."""
    ring = torch.cat([pixels[:, :, :2].flatten(2), pixels[:, :, -2:].flatten(2),
                      pixels[:, :, :, :2].flatten(2), pixels[:, :, :, -2:].flatten(2)], 2)  # fmt: skip
    return ring.median(2).values


def _shifted_cells(pixels: Tensor) -> list[Tensor]:
    """The picture averaged to the grid of the references, moved by each of SHIFTS (pixels): [B, 3, 12, 12] each."""
    theta = torch.eye(2, 3).repeat(len(pixels), 1, 1)
    cells = []
    for x, y in SHIFTS:
        theta[:, 0, 2], theta[:, 1, 2] = 2 * x / pixels.shape[-1], 2 * y / pixels.shape[-2]
        grid = F.affine_grid(theta, list(pixels.shape), align_corners=False)
        moved = F.grid_sample(pixels, grid, padding_mode="border", align_corners=False)
        cells.append(F.adaptive_avg_pool2d(moved, CELLS))
    return cells


@functools.lru_cache(maxsize=2)
def _references(path: Path) -> Tensor:
    """Every reference at each of SIZES, as it is and mirrored: float32 [sizes * 2 * N, 4, 12, 12]."""
    rgba = load_file(str(path))["rgba"].float()
    variants = []
    for size in SIZES:
        theta = torch.eye(2, 3).mul(1 / size).repeat(len(rgba), 1, 1)
        grid = F.affine_grid(theta, list(rgba.shape), align_corners=False)
        resized = F.grid_sample(rgba, grid, padding_mode="zeros", align_corners=False)
        variants += [resized, resized.flip(-1)]
    return torch.cat(variants)
