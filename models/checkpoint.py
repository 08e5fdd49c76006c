"""Checkpoint files of any origin, read one tensor at a time.

Safetensors, and pickled .pt, .pth, .bin and .ckpt files, which are opened with `weights_only=True` and nothing else: a file that
wants to run code is refused.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

PICKLES = (".pt", ".pth", ".bin", ".ckpt")
SUFFIXES = (".safetensors", *PICKLES)

# Under which key training scripts store the weights.
WRAPPERS = ("model", "module", "state_dict", "model_state_dict")

_STORED = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
DTYPE_NAMES = {dtype: name for name, dtype in _STORED.items()}


class Inert:
    """Takes the place of a class that a pickle names and that holds no weights."""


# What training scripts leave in their files beside weights; read as empty objects of `Inert`.
_BYSTANDERS = (
    "pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint",
    "lightning.pytorch.callbacks.model_checkpoint.ModelCheckpoint",
)


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies and what it is."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class Checkpoint:
    """Tensors of one or several files by name. Opening reads names and shapes only.

    Raises ValueError or FileNotFoundError in one sentence: a missing, truncated, foreign or unsafe file.
    """

    def __init__(self, files: list[Path]):
        self.files = files
        self.entries: dict[str, Entry] = {}
        self._open: tuple[Path, Any] | None = None
        for file in files:
            if not file.is_file():
                raise FileNotFoundError(f"{file} is missing: the checkpoint is incomplete, fetch it again")
            for name, tensor in self._tensors(file):
                self.entries[name] = Entry(file, *tensor)

    def _tensors(self, file: Path) -> Iterator[tuple[str, tuple[tuple[int, ...], torch.dtype]]]:
        content = self._content(file)
        if isinstance(content, dict):
            for name, tensor in content.items():
                yield name, (tuple(tensor.shape), tensor.dtype)
            return
        for name in content.keys():  # noqa: SIM118 - not a mapping
            part = content.get_slice(name)
            kind = part.get_dtype()
            if kind not in _STORED:
                raise ValueError(f"{file} holds tensors of type {kind}, which cannot be read: fetch another version of the model")
            yield name, (tuple(part.get_shape()), _STORED[kind])

    def _content(self, file: Path) -> Any:
        """The file's tensors, by name; only the last file stays open."""
        if self._open is None or self._open[0] != file:
            self._open = None
            self._open = (file, open_safetensors(file) if file.suffix == ".safetensors" else open_pickle(file))
        return self._open[1]

    @property
    def where(self) -> str:
        """For messages: the file, or the folder of several."""
        return str(self.files[0] if len(self.files) == 1 else self.files[0].parent)

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor."""
        return self.entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Of one tensor."""
        return self.entries[name].dtype

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU, as it is stored. It may share memory with the file: copy it before keeping it."""
        file = self.entries[name].file
        content = self._content(file)
        try:
            return content[name] if isinstance(content, dict) else content.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged: fetch it again") from error

    def close(self) -> None:
        """Let go of the open file."""
        self._open = None


def open_safetensors(file: Path) -> Any:
    """A handle on a safetensors file."""
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is truncated or not a safetensors file: fetch it again") from error


def open_pickle(file: Path) -> dict[str, Tensor]:
    """The state dict in a pickled checkpoint, mapped into memory rather than read where the format allows it."""
    with file.open("rb") as stream:
        magic = stream.read(4)
    zipped = zipfile.is_zipfile(file)
    if magic[:2] == b"PK" and not zipped:
        raise ValueError(f"{file} is truncated: fetch it again")
    allowed: list[Any] = [argparse.Namespace, *((Inert, name) for name in _BYSTANDERS)]
    try:
        with torch.serialization.safe_globals(allowed):
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        asked = re.search(r"GLOBAL ([\w.]+)", str(error))
        if asked is None and "Unsupported class" not in str(error):
            raise ValueError(f"{file} is truncated or not a PyTorch checkpoint: fetch it again") from error
        what = f" ({asked.group(1)})" if asked else ""
        raise ValueError(
            f"{file} holds more than weights{what} and could run code when opened, so it is not read: "
            "get a safetensors version of the model"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, OSError) as error:
        if "TorchScript" in str(error):
            raise ValueError(f"{file} is a TorchScript program and not a checkpoint: get the model's weights") from error
        raise ValueError(f"{file} is truncated or not a PyTorch checkpoint: fetch it again") from error
    return state_dict(content, file)


def state_dict(content: Any, file: Path) -> dict[str, Tensor]:
    """The tensors by name, wherever the training script put them."""
    for _ in WRAPPERS:
        inner = next((content[key] for key in WRAPPERS if isinstance(content, dict) and isinstance(content.get(key), dict)), None)
        if inner is None:
            break
        content = inner
    tensors = {}
    if isinstance(content, dict):
        tensors = {key: value for key, value in content.items() if isinstance(key, str) and isinstance(value, Tensor)}
    if not tensors:
        raise ValueError(f"{file} holds no weights: is it a file of another kind?")
    return tensors


@dataclass
class Source:
    """What the user pointed at: a file or a folder, and files named for single components."""

    path: Path
    named: dict[str, Source] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The folder, or the file's."""
        return self.path if self.path.is_dir() else self.path.parent

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json of a folder; {} where there is none."""
        return (self.json("config.json") or {}) if self.path.is_dir() else {}

    def json(self, name: str) -> dict[str, Any] | None:
        """A JSON file of the folder, None where there is none. Raises ValueError if it is damaged."""
        path = self.folder / name
        if not path.is_file():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not valid JSON: fetch it again") from error
        if not isinstance(content, dict):
            raise ValueError(f"{path} does not describe a model: fetch it again")
        return content

    @cached_property
    def weights(self) -> Checkpoint | None:
        """The tensors of a file, or of a folder's one model (shards together); None where there is no or no single one."""
        if self.path.is_file():
            return Checkpoint([self.path])
        for index in sorted(self.path.glob("*.safetensors.index.json")) + sorted(self.path.glob("*.bin.index.json")):
            listed = (self.json(index.name) or {}).get("weight_map")
            if not isinstance(listed, dict) or not listed:
                raise ValueError(f"{index} lists no weights: fetch it again")
            names = sorted({Path(str(name)).name for name in listed.values()})
            return Checkpoint([self.path / name for name in names])
        for suffix in SUFFIXES:
            found = self.files(suffix)
            if len(found) == 1 or (found and all(re.search(r"-\d+-of-\d+$", file.stem) for file in found)):
                return Checkpoint(found)
        return None

    def files(self, *suffixes: str) -> list[Path]:
        """Weight files that lie directly in the folder."""
        wanted = suffixes or SUFFIXES
        return sorted(path for path in self.folder.iterdir() if path.suffix in wanted and path.is_file())
