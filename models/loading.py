"""Folders on disk and on the Hub: which classes they hold, and how they are read and written.

Components are built with the classes of *this* copy of the package: a pack that ComfyUI loaded by its path must work whether or
not `foredraft` is installed too. What is written names them `foredraft...` whatever the package is called at run time.
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from diffusers import __version__ as diffusers_version
from safetensors import SafetensorError

from ..pipelines.options import unknown_option

INDEX = "model_index.json"

# Class -> the module of this package that defines it. A family adds its classes here.
CLASSES = {
    "EmbeddedTarget": "models.embedded",
    "WordTokenizer": "models.embedded",
    "VQCodec": "models.codecs.vq",
    "DraftHead": "models.head",
}

_HUB = ("revision", "cache_dir", "token", "local_files_only", "force_download")


def component_class(name: str) -> type:
    """The class of this package called `name`. Raises KeyError for a foreign one."""
    package = __package__.rpartition(".")[0]
    return getattr(importlib.import_module(f".{CLASSES[name]}", package), name)


def resolve(source: Any, hub: dict[str, Any]) -> Path:
    """The local folder of a path or Hub id (downloaded into the Hub's cache)."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    text = str(source)
    if (
        folder.exists()
        or folder.is_absolute()
        or text.startswith((".", "~"))
        or text.count("/") != 1
        or os.sep in text.replace("/", "")
    ):
        raise FileNotFoundError(f"there is no folder {text!r}: give a folder with a {INDEX}, or a Hub id such as 'owner/name'")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(text, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model"], **hub))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"{text!r} is neither a folder here nor a model the Hub hands out to you: check the name, your network and your token"
        ) from error


def read_index(folder: Path) -> dict[str, Any]:
    """The folder's model_index.json."""
    path = folder / INDEX
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {INDEX}: it is not a Foredraft model folder")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: fetch the folder again") from error
    if not isinstance(index, dict):
        raise ValueError(f"{path} does not describe a model: fetch the folder again")
    return index


def load_components(source: Any, names: list[str], who: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The named components of a folder or Hub id, and the family's defaults, ready for a pipeline's constructor."""
    known = [*names, "defaults", "torch_dtype", *_HUB]
    for name in kwargs:
        if name not in known:
            raise TypeError(unknown_option(name, known, f"{who}.from_pretrained"))
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"{who}.from_pretrained needs a folder or a Hub id, got {type(source).__name__}")
    dtype = torch.float32 if kwargs.get("torch_dtype") is None else kwargs["torch_dtype"]
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"torch_dtype must be a floating dtype such as torch.float32 or torch.float16, got {dtype!r}")
    folder = resolve(source, {name: kwargs[name] for name in _HUB if name in kwargs})
    index = read_index(folder)
    parts: dict[str, Any] = {"defaults": kwargs.get("defaults", index.get("defaults"))}
    check_defaults(parts["defaults"], folder)
    for name in names:
        if name in kwargs:
            parts[name] = kwargs[name]
            continue
        entry = index.get(name)
        if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[1], str):
            raise ValueError(f"{folder} holds no {name}, which {who} needs: choose another method, or pass {name}=...")
        parts[name] = load_component(folder, name, entry[1], dtype)
    return parts


def check_defaults(defaults: Any, folder: Path) -> None:
    """Raise ValueError unless the family's defaults have the form that pipelines read."""
    wrong = None
    if defaults is not None and not isinstance(defaults, dict):
        wrong = "not a table"
    elif defaults:
        grids, window = defaults.get("grids", []), defaults.get("window", {})
        pairs = isinstance(grids, list) and all(isinstance(g, list | tuple) and len(g) == 2 for g in grids)
        if not pairs or not all(isinstance(side, int) for grid in grids for side in grid):
            wrong = "grids"
        elif not isinstance(window, dict) or not all(isinstance(width, int) for width in window.values()):
            wrong = "window"
    if wrong:
        raise ValueError(f"the defaults in {folder / INDEX} are not understood ({wrong}): fetch the folder again")


def load_component(folder: Path, name: str, class_name: str, dtype: torch.dtype) -> Any:
    """One component; every failure becomes one sentence."""
    if class_name not in CLASSES:
        raise ValueError(
            f"the {name} in {folder} is a {class_name}, which Foredraft does not know: is this another library's model?"
        )
    cls: Any = component_class(class_name)
    place = folder / name
    if not place.is_dir():
        raise FileNotFoundError(f"{folder} has no folder {name!r}: the model is incomplete, fetch it again")
    if not issubclass(cls, torch.nn.Module):
        return cls.from_pretrained(place)
    if not any(place.glob("*.safetensors")):
        others = sorted(path.name for path in place.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        found = f" ({others[0]} may run code when it is opened, so it is not read)" if others else ""
        raise FileNotFoundError(f"no safetensors file in {place}{found}: fetch or convert the {name} as safetensors")
    try:
        model, report = cls.from_pretrained(place, torch_dtype=dtype, use_safetensors=True, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, SafetensorError) as error:
        raise ValueError(
            f"the {name} in {place} cannot be read, its files are damaged or of another model: fetch it again"
        ) from error
    wrong = [*report.get("missing_keys", []), *report.get("unexpected_keys", [])]
    if wrong:
        raise ValueError(
            f"the {name} in {place} does not fit {class_name}: {len(wrong)} tensors are missing or unexpected, "
            f"{wrong[0]!r} among them"
        )
    return model.eval()


def save_components(pipeline: Any, directory: Any, names: list[str], kwargs: dict[str, Any]) -> None:
    """Write each component into a folder of its own, and the index that names them."""
    folder = Path(directory)
    if folder.is_file():
        raise ValueError(f"{folder} is a file: give a folder to save into")
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {"_class_name": type(pipeline).__name__, "_diffusers_version": diffusers_version}
    for name in names:
        component = getattr(pipeline, name)
        options = kwargs if isinstance(component, torch.nn.Module) else {}
        component.save_pretrained(folder / name, **options)
        class_name = type(component).__name__
        index[name] = [f"foredraft.{CLASSES[class_name]}", class_name]
    index["defaults"] = pipeline.config.defaults
    temporary = folder / f"{INDEX}.tmp"
    temporary.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    temporary.replace(folder / INDEX)
