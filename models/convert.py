"""Checkpoints of a known family into one folder of safetensors with a model_index.json.

Tensors are made and written one at a time, so that memory holds one of them (and what the operating system keeps of the mapped
input). The folder is written under a temporary name and renamed when it is whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import torch
from diffusers import __version__ as diffusers_version
from tqdm.auto import tqdm

from . import loading
from .checkpoint import DTYPE_NAMES
from .weights import Assembly, Part

OURS, THEIRS = "diffusion_pytorch_model.safetensors", "model.safetensors"
SPARE = 64 * 2**20
"""Free bytes that a conversion leaves on the disk."""


def convert(
    source: Any,
    out: Any,
    family: str | None = None,
    named: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    progress: bool | None = None,
    **hub: Any,
) -> Path:
    """Convert a checkpoint; returns the new folder.

    Args:
        source: original file or folder, transformers folder, Hub id, or 'owner/name/file.pt' on the Hub.
        out: the folder to make; it must not exist yet.
        family: the checkpoint's family; None = whichever recognises it.
        named: places of single components, such as {"codec": "vq_ds16_t2i.pt", "text_encoder": "google/flan-t5-xl"}.
        dtype: of the floating tensors; None = as they are stored.
        progress: a progress bar on stderr; None = where stderr is a terminal.
        hub: revision, cache_dir, token, local_files_only, force_download.

    Raises:
        ValueError, FileNotFoundError, FileExistsError, OSError: in one sentence, and then nothing is left behind.
    """
    folder = Path(out)
    temporary = folder.with_name(f".{folder.name}.partial")
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists already: choose another name or remove it")
    if temporary.exists():
        raise FileExistsError(
            f"{temporary} is left from a conversion that was killed, or another one is running: remove it first"
        )
    if not folder.resolve().parent.is_dir():
        raise FileNotFoundError(f"cannot write {folder}: there is no folder {folder.resolve().parent}")
    assembly = complete(source, family, named or {}, hub)
    check_space(assembly, folder, dtype)
    try:
        temporary.mkdir()
        write_folder(assembly, temporary, dtype, progress)
        temporary.replace(folder)
    except OSError as error:
        raise OSError(f"{folder} could not be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def complete(source: Any, family: str | None, named: dict[str, Any], hub: dict[str, Any]) -> Assembly:
    """The assembly of a source, with what is absent fetched from the Hub."""
    place = loading.resolve(source, hub)
    if place.is_dir() and (place / loading.INDEX).is_file():
        raise ValueError(f"{place} is a converted folder already: load it as it is")
    if family is not None and family not in loading.FAMILIES:
        raise ValueError(f"there is no family {family!r}: choose one of {', '.join(loading.FAMILIES)}")
    found = loading.recognise(loading.source_of(place, named, hub), family)
    fetched = {name: where for name, where in found.absent.items() if name not in named and name != "tokenizer"}
    if fetched:
        found = loading.recognise(loading.source_of(place, {**named, **fetched}, hub), family)
    return found


def check_space(assembly: Assembly, folder: Path, dtype: torch.dtype | None) -> None:
    """Raise OSError unless the disk has room for the converted folder."""
    needed = sum(planned_bytes(part, dtype) for part in assembly.parts.values()) + SPARE
    free = shutil.disk_usage(folder.resolve().parent).free
    if free < needed:
        raise OSError(
            f"{folder} needs {needed / 1e9:.1f} GB and the disk has {free / 1e9:.1f} GB: make room or choose another disk"
        )


def planned_bytes(part: Part, dtype: torch.dtype | None) -> int:
    """Bytes of a part's tensors once written."""
    if part.checkpoint is None:
        return 0
    planned = (recipe.planned(part.checkpoint, dtype) for recipe in part.weights.values())
    return sum(tensor.numel() * tensor.itemsize for tensor in planned)


def write_folder(assembly: Assembly, folder: Path, dtype: torch.dtype | None, progress: bool | None) -> None:
    """Every component and, last, the index."""
    index: dict[str, Any] = {"_class_name": "AutoregressivePipeline", "_diffusers_version": diffusers_version}
    total = sum(planned_bytes(part, dtype) for part in assembly.parts.values())
    hidden = None if progress is None else not progress
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"{assembly.family} -> safetensors", disable=hidden) as bar:
        for name, part in assembly.parts.items():
            place = folder / name
            place.mkdir()
            loading.write_files(part, place)
            if part.weights:
                write_config(part, place)
                write_safetensors(part, place / (THEIRS if part.library else OURS), dtype, bar.update)
            index[name] = loading.index_entry(part.class_name)
    index["family"] = assembly.family
    index["defaults"] = assembly.defaults
    loading.write_index(folder, index)


def write_config(part: Part, place: Path) -> None:
    """config.json, in the form that the class reads."""
    head = {} if part.library else {"_class_name": part.class_name, "_diffusers_version": diffusers_version}
    text = json.dumps({**head, **part.config}, indent=2, sort_keys=True) + "\n"
    (place / "config.json").write_text(text, encoding="utf-8")


def write_safetensors(
    part: Part, path: Path, dtype: torch.dtype | None, wrote: Callable[[int], Any] = lambda count: None
) -> None:
    """One safetensors file, tensor by tensor: 8 bytes of header length, the header as JSON, the numbers.

    Source of the format: github.com/huggingface/safetensors. wrote(bytes) is called after every tensor.
    """
    checkpoint = part.checkpoint
    if checkpoint is None:
        raise ValueError(f"no weights were found for {part.class_name}")
    plans = {name: recipe.planned(checkpoint, dtype) for name, recipe in part.weights.items()}
    files = {file: number for number, file in enumerate(checkpoint.files)}

    def place(name: str) -> tuple[int, int]:
        # Wide types first, so that every tensor is aligned; then in the order of the input's files.
        return -plans[name].itemsize, files[checkpoint.entries[part.weights[name].keys[0]].file]

    order, header, offset = sorted(plans, key=place), {"__metadata__": {"format": "pt"}}, 0
    for name in order:
        plan = plans[name]
        size = prod(plan.shape) * plan.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[plan.dtype],
            "shape": list(plan.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            tensor = part.weights[name].read(checkpoint, dtype)
            if tuple(tensor.shape) != tuple(plans[name].shape) or tensor.dtype != plans[name].dtype:
                raise ValueError(f"{checkpoint.where} changed while it was read: fetch it again")
            stream.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            wrote(tensor.numel() * tensor.itemsize)
        stream.flush()
        os.fsync(stream.fileno())
    checkpoint.close()
