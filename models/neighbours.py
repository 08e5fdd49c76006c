"""The nearest codes of every code of a codebook: looked up once, kept in the user's cache.

A cached table is a safetensors file under huggingface_hub's assets cache, named by a hash of the codebook and the question.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

METRICS = ("raw", "normalised")
CHUNK = 1024


def nearest_codes(codebook: Tensor, k: int, metric: str = "raw", cache: Path | None = None) -> Tensor:
    """The k nearest other codes of each code, nearest first: int32 [V, min(k, V - 1)] on the codebook's device.

    Args:
        codebook: float [V, D], V >= 2. k: at least 1.
        metric: "raw": L2 between the codes as they are (LANTERN); "normalised": between the codes scaled to length 1, for
            decoders that scale them.
        cache: folder of the kept tables, `cache_folder()` if None. One that cannot be written is done without.

    Equal distances are ordered by code.
    """
    if metric not in METRICS:
        raise ValueError(f"unknown metric {metric!r}; choose one of {', '.join(METRICS)}")
    if codebook.ndim != 2 or len(codebook) < 2 or k < 1:
        raise ValueError(f"neighbours need a codebook [V, D] of at least 2 codes and k >= 1, got {tuple(codebook.shape)}, k={k}")
    points = codebook.detach().double().cpu()
    if metric == "normalised":
        points = torch.nn.functional.normalize(points, dim=-1)
    k = min(k, len(points) - 1)
    path = (cache_folder() if cache is None else cache) / f"{fingerprint(points)}-{k}.safetensors"
    table = _read(path, len(points), k)
    if table is None:
        table = search(points, k)
        _write(path, table)
    return table.to(codebook.device)


def search(points: Tensor, k: int) -> Tensor:
    """The table, computed: float64 [V, D] -> int32 [V, k]. Holds `CHUNK` rows of distances at a time."""
    table = torch.empty(len(points), k, dtype=torch.int32)
    for first in range(0, len(points), CHUNK):
        rows = torch.cdist(points[first : first + CHUNK], points)
        own = torch.arange(first, first + len(rows))
        rows[torch.arange(len(rows)), own] = torch.inf
        codes = rows.topk(k, dim=1, largest=False, sorted=False).indices.sort(1).values
        order = rows.gather(1, codes).sort(dim=1, stable=True).indices
        table[first : first + len(rows)] = codes.gather(1, order)
    return table


def cache_folder() -> Path:
    """Where tables are kept. Nothing is created here."""
    from huggingface_hub import constants

    return Path(constants.HF_ASSETS_CACHE) / "foredraft" / "neighbours"


def fingerprint(points: Tensor) -> str:
    """A hash of the codes."""
    shape = "x".join(map(str, points.shape))
    return hashlib.sha256(shape.encode() + points.contiguous().numpy().tobytes()).hexdigest()[:32]


def _read(path: Path, codes: int, k: int) -> Tensor | None:
    """A kept table, or None: not there, damaged, or of another size."""
    try:
        table = load_file(path)["near"]
    except (OSError, KeyError, SafetensorError):
        return None
    fits = table.shape == (codes, k) and table.dtype == torch.int32
    return table if fits and 0 <= int(table.min()) and int(table.max()) < codes else None


def _write(path: Path, table: Tensor) -> None:
    """Keep a table: whole or not at all."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.safetensors")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"near": table}, temporary)
        temporary.replace(path)
    except (OSError, SafetensorError):
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
