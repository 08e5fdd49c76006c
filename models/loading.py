"""Folders on disk and on the Hub: which classes they hold, and how they are read and written.

Components are built with the classes of *this* copy of the package: a pack that ComfyUI loaded by its path must work whether or
not `foredraft` is installed too. What is written names them `foredraft...` whatever the package is called at run time.

Three kinds of places can be loaded: a folder with a model_index.json; a transformers folder of a known family; the original files
of a known family. The last two are described by the family's `recognise` (see `weights.Assembly`).
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import __version__ as diffusers_version
from safetensors import SafetensorError

from ..pipelines.options import unknown_option
from . import weights
from .checkpoint import SUFFIXES, Source
from .weights import Assembly, Part

INDEX = "model_index.json"

# Class -> the module of this package that defines it. A family adds its classes here.
CLASSES = {
    "EmbeddedTarget": "models.embedded",
    "WordTokenizer": "models.embedded",
    "VQCodec": "models.codecs.vq",
    "LlamaGenTarget": "models.llamagen",
    "ClassTokenizer": "models.llamagen",
    "JanusTarget": "models.janus",
    "JanusCodec": "models.codecs.janus",
    "ChameleonTarget": "models.chameleon",
    "ChameleonCodec": "models.codecs.chameleon_vq",
    "DraftHead": "models.head",
}

# Family -> the module whose `recognise` describes its checkpoints.
FAMILIES = {
    "llamagen": "models.llamagen",
    "janus": "models.janus",
    "chameleon": "models.chameleon",
}

# Classes of transformers that components may be.
LIBRARY = ("AutoTokenizer", "T5EncoderModel")

_PLACEMENT = ("quantization", "device_map", "max_memory", "offload_folder")
_HUB = ("revision", "cache_dir", "token", "local_files_only", "force_download")
_READABLE = ["*.json", "*.safetensors", "*.txt", "*.model"]


def component_class(name: str) -> type:
    """The class of this package called `name`. Raises KeyError for a foreign one."""
    package = __package__.rpartition(".")[0]
    return getattr(importlib.import_module(f".{CLASSES[name]}", package), name)


def part_class(part: Part) -> Any:
    """The class of a part, ours or transformers'."""
    return library_class(part.class_name) if part.library else component_class(part.class_name)


def library_class(name: str) -> Any:
    """A class of transformers."""
    import transformers

    return getattr(transformers, name)


# -- finding ---------------------------------------------------------------------------------------------------------


def resolve(source: Any, hub: dict[str, Any]) -> Path:
    """The local folder or weight file of a path, a Hub id, or a file on the Hub ('owner/name/file.pt')."""
    place, text = Path(source), str(source)
    if place.is_dir() or (place.is_file() and place.suffix in SUFFIXES):
        return place
    parts = text.split("/")
    weight_file = len(parts) > 2 and place.suffix in SUFFIXES
    if (
        place.exists()
        or place.is_absolute()
        or text.startswith((".", "~"))
        or (len(parts) != 2 and not weight_file)
        or os.sep in text.replace("/", "")
    ):
        raise FileNotFoundError(
            f"there is no folder {text!r}: give a folder with a {INDEX}, a checkpoint, or a Hub id such as 'owner/name'"
        )
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        if weight_file:
            return Path(huggingface_hub.hf_hub_download("/".join(parts[:2]), "/".join(parts[2:]), **hub))
        folder = Path(huggingface_hub.snapshot_download(text, allow_patterns=_READABLE, **hub))
        if not any(folder.rglob("*.safetensors")):
            folder = Path(huggingface_hub.snapshot_download(text, allow_patterns=[*_READABLE, "*.bin"], **hub))
    except (EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"{text!r} is neither a folder here nor a model the Hub hands out to you: check the name, your network and your token"
        ) from error
    return folder


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


def recognise(source: Source, family: str | None = None) -> Assembly:
    """What a checkpoint of a known family holds (family: ask only this one). Nothing is read but names and shapes.

    Raises ValueError in one sentence if no family knows it or its tensors do not fit.
    """
    package = __package__.rpartition(".")[0]
    for name in [family] if family else FAMILIES:
        found = importlib.import_module(f".{FAMILIES[name]}", package).recognise(source)
        if found is not None:
            weights.check(found, part_class)
            return found
    known, kind = family or f"any of {', '.join(FAMILIES)}", source.config.get("model_type")
    if source.path.is_dir() and not source.files() and not kind:
        raise FileNotFoundError(f"{source.path} has no {INDEX} and no weights: it is not a Foredraft model folder")
    what = f"holds a {kind!r} model" if kind else "is another model's checkpoint"
    raise ValueError(f"{source.path} {what}, which is not {known}: give a folder or a file of a family that Foredraft knows")


def source_of(place: Path, given: dict[str, Any], hub: dict[str, Any]) -> Source:
    """A Source with the places given for single components."""
    return Source(place, {name: Source(resolve(path, hub)) for name, path in given.items()})


# -- loading ---------------------------------------------------------------------------------------------------------


def load_components(
    source: Any, names: list[str], who: str, kwargs: dict[str, Any], optional: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The named components of a folder, checkpoint or Hub id, and the family's defaults, ready for a pipeline's constructor.

    kwargs: components to use instead, or where to load them from. optional: components that may be absent.
    """
    known = [*names, "defaults", "torch_dtype", *_PLACEMENT, *_HUB]
    for name in kwargs:
        if name not in known:
            raise TypeError(unknown_option(name, known, f"{who}.from_pretrained"))
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"{who}.from_pretrained needs a folder, a checkpoint or a Hub id, got {type(source).__name__}")
    dtype = torch.float32 if kwargs.get("torch_dtype") is None else kwargs["torch_dtype"]
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"torch_dtype must be a floating dtype such as torch.float32 or torch.float16, got {dtype!r}")
    hub = {name: kwargs[name] for name in _HUB if name in kwargs}
    paths = {name: kwargs[name] for name in names if isinstance(kwargs.get(name), str | os.PathLike)}
    ready = {name: kwargs[name] for name in names if name in kwargs and name not in paths}
    place = resolve(source, hub)
    if place.is_dir() and (place / INDEX).is_file():
        parts = _from_index(place, [name for name in names if name not in ready], who, dtype, optional, paths, hub)
    else:
        parts = _from_checkpoint(place, [name for name in names if name not in ready], who, dtype, optional, paths, hub)
    parts.update(ready)
    if "defaults" in kwargs:
        parts["defaults"] = kwargs["defaults"]
    check_defaults(parts["defaults"], place)
    place_target(parts, kwargs)
    return parts


def place_target(parts: dict[str, Any], options: dict[str, Any]) -> None:
    """Quantize and spread the target as asked, and put what works beside it on the same device."""
    if not any(options.get(name) is not None for name in _PLACEMENT):
        return
    from . import placement

    if options.get("quantization") is not None:
        placement.quantize(parts["target"], options["quantization"])
    if options.get("device_map") is not None:
        placement.spread(parts["target"], options["device_map"], options.get("max_memory"), options.get("offload_folder"))
        for name, part in parts.items():
            if name != "target" and isinstance(part, torch.nn.Module):
                part.to(parts["target"].home)


def _from_index(
    folder: Path,
    names: list[str],
    who: str,
    dtype: torch.dtype,
    optional: tuple[str, ...],
    paths: dict[str, Any],
    hub: dict[str, Any],
) -> dict[str, Any]:
    index = read_index(folder)
    check_defaults(index.get("defaults"), folder)
    parts: dict[str, Any] = {"defaults": index.get("defaults")}
    for name in names:
        entry = index.get(name)
        if name in paths:
            parts[name] = load_part(paths[name], name, dtype, hub)
        elif isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], str):
            parts[name] = load_component(folder, name, entry[1], dtype)
        elif name in optional:
            parts[name] = None
        else:
            raise ValueError(f"{folder} holds no {name}, which {who} needs: choose another method, or pass {name}=...")
    return parts


def _from_checkpoint(
    place: Path,
    names: list[str],
    who: str,
    dtype: torch.dtype,
    optional: tuple[str, ...],
    paths: dict[str, Any],
    hub: dict[str, Any],
) -> dict[str, Any]:
    own = {name: path for name, path in paths.items() if name in ("codec", "text_encoder", "tokenizer")}
    assembly = recognise(source_of(place, own, hub))
    fetched = {name: where for name, where in assembly.absent.items() if name in names and name not in own}
    if fetched:
        assembly = recognise(source_of(place, {**own, **{n: w for n, w in fetched.items() if n != "tokenizer"}}, hub))
    parts: dict[str, Any] = {"defaults": assembly.defaults}
    for name in names:
        if name in paths and name not in own:
            parts[name] = load_part(paths[name], name, dtype, hub)
        elif name in assembly.parts:
            parts[name] = build(assembly.parts[name], dtype)
        elif name in optional:
            parts[name] = None
        else:
            raise ValueError(f"{place} holds no {name}, which {who} needs: choose another method, or pass {name}=...")
    return parts


def load_part(source: Any, name: str, dtype: torch.dtype, hub: dict[str, Any] | None = None) -> Any:
    """One component from a place of its own: another model folder, a component's folder, or a checkpoint.

    A draft model is another model's target.
    """
    place = resolve(source, hub or {})
    if place.is_dir():
        alias = "target" if name == "draft_model" else name
        if (place / INDEX).is_file():
            index = read_index(place)
            own = name if name in index else alias
            entry = index.get(own)
            if not isinstance(entry, list) or len(entry) != 2:
                raise ValueError(f"{place} holds no {name}: give a folder that has one")
            return load_component(place, own, entry[1], dtype)
        class_name = Source(place).config.get("_class_name")
        if class_name in CLASSES:
            return load_component(place.parent, place.name, class_name, dtype)
    found = recognise(Source(place)).parts
    part = found.get(name) or (found.get("target") if name == "draft_model" else None)
    if part is None:
        raise ValueError(f"{place} holds {' and '.join(found)} and no {name}: give a checkpoint that has one")
    return build(part, dtype)


def build(part: Part, dtype: torch.dtype) -> Any:
    """A component of an assembly, in memory."""
    cls = part_class(part)
    if part.weights:
        return weights.build(part, cls, dtype)
    with tempfile.TemporaryDirectory() as folder:
        write_files(part, Path(folder))
        return cls.from_pretrained(folder)


def write_files(part: Part, folder: Path) -> None:
    """Copy or write the files of a part."""
    for name, content in part.files.items():
        if isinstance(content, Path):
            shutil.copyfile(content, folder / name)
        else:
            (folder / name).write_text(content, encoding="utf-8")


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
    """One component of a folder with an index; every failure becomes one sentence."""
    if class_name not in CLASSES and class_name not in LIBRARY:
        raise ValueError(
            f"the {name} in {folder} is a {class_name}, which Foredraft does not know: is this another library's model?"
        )
    cls: Any = component_class(class_name) if class_name in CLASSES else library_class(class_name)
    place, reader = folder / name, cls
    if not place.is_dir():
        raise FileNotFoundError(f"{folder} has no folder {name!r}: the model is incomplete, fetch it again")
    if not (isinstance(cls, type) and issubclass(cls, torch.nn.Module)):
        try:
            return reader.from_pretrained(place)
        except (OSError, ValueError, KeyError, TypeError) as error:
            if class_name in CLASSES:
                raise
            raise ValueError(f"the {name} in {place} cannot be read, its files are damaged: fetch it again") from error
    if not any(place.glob("*.safetensors")):
        others = sorted(path.name for path in place.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        found = f" ({others[0]} may run code when it is opened, so it is not read)" if others else ""
        raise FileNotFoundError(f"no safetensors file in {place}{found}: fetch or convert the {name} as safetensors")
    try:
        with silent_transformers():
            options = {"torch_dtype": dtype, "use_safetensors": True, "output_loading_info": True}
            model, report = reader.from_pretrained(place, **options)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, SafetensorError) as error:
        raise ValueError(
            f"the {name} in {place} cannot be read, its files are damaged or of another model: fetch it again"
        ) from error
    wrong = [*report.get("missing_keys", []), *report.get("unexpected_keys", [])]
    if wrong:
        raise ValueError(
            f"the {name} in {place} does not fit {class_name}: {len(wrong)} tensors are missing or unexpected, "
            f"{sorted(wrong)[0]!r} among them"
        )
    return model.eval()


@contextmanager
def silent_transformers() -> Iterator[None]:
    """Without transformers' progress bars, as the rest of the loading is silent."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


# -- saving ----------------------------------------------------------------------------------------------------------


def index_entry(class_name: str) -> list[str]:
    """What model_index.json says of a component."""
    return [f"foredraft.{CLASSES[class_name]}", class_name] if class_name in CLASSES else ["transformers", class_name]


def saved_class(component: Any) -> str:
    """The name a component is loaded by. Tokenizers of transformers name their own class in their files."""
    name = type(component).__name__
    if name in CLASSES or name in LIBRARY:
        return name
    if re.match(r"transformers\.", type(component).__module__) and hasattr(component, "convert_tokens_to_ids"):
        return "AutoTokenizer"
    raise ValueError(f"a {name} cannot be saved with a pipeline: Foredraft would not know how to load it")


def save_components(pipeline: Any, directory: Any, names: list[str], kwargs: dict[str, Any]) -> None:
    """Write each component into a folder of its own, and the index that names them."""
    folder = Path(directory)
    if folder.is_file():
        raise ValueError(f"{folder} is a file: give a folder to save into")
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {"_class_name": type(pipeline).__name__, "_diffusers_version": diffusers_version}
    for name in names:
        component = getattr(pipeline, name)
        if component is None:
            continue
        if getattr(component, "quantization", None):
            raise ValueError(f"the {name} is quantized and cannot be saved: save it before it is quantized")
        index[name] = index_entry(saved_class(component))
        options = kwargs if isinstance(component, torch.nn.Module) else {}
        component.save_pretrained(folder / name, **options)
    index["defaults"] = pipeline.config.defaults
    write_index(folder, index)


def write_index(folder: Path, index: dict[str, Any]) -> None:
    """Write model_index.json, whole or not at all."""
    temporary = folder / f"{INDEX}.tmp"
    temporary.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    temporary.replace(folder / INDEX)
