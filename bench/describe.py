"""What is in a model folder or a checkpoint, read from its index and the headers of its files."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..models import loading, weights
from ..models.checkpoint import DTYPE_NAMES, Source
from ..models.weights import Part
from ..pipelines import methods
from .report import table

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
ITEM_SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass
class Component:
    """One component: its class, its configuration, how many numbers of which kind it holds in how many bytes."""

    class_name: str
    config: dict[str, Any]
    count: int = 0
    kind: str = ""
    size: int = 0

    def row(self, name: str) -> list[str]:
        """Of the table."""
        return [name, self.class_name, f"{self.count:,}" if self.count else "", self.kind, _size(self.size) if self.size else ""]


def describe(source: Any) -> str:
    """Family, classes, sizes, grid, codebook, defaults, memory and fitting methods of a folder, checkpoint or Hub id, as text.

    Raises FileNotFoundError or ValueError in one sentence.
    """
    place = loading.resolve(source, {})
    if place.is_dir() and ((place / loading.INDEX).is_file() or not Source(place).files() and not Source(place).config):
        index = loading.read_index(place)
        named = {name: entry[1] for name, entry in index.items() if isinstance(entry, list) and len(entry) == 2}
        parts = {name: Component(kind, _config(place, name), *_weights(place / name)) for name, kind in named.items()}
        family, defaults, absent = index.get("family", ""), dict(index.get("defaults") or {}), {}
        total = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    else:
        found = loading.recognise(Source(place))
        parts = {name: _planned(part) for name, part in found.parts.items()}
        family, defaults, absent = found.family, dict(found.defaults), found.absent
        used = {file for part in found.parts.values() if part.checkpoint for file in part.checkpoint.files}
        total = sum(file.stat().st_size for file in used)
    have = {**parts, **absent}
    fitting = [name for name, cls in methods().items() if all(part in have for part in cls.required_components())]
    cell = parts["codec"].config.get("downsample") if "codec" in parts else None
    codes = parts["target"].config.get("vocab_size") if "target" in parts else None
    grids = defaults.pop("grids", [])
    facts = [("family", family), ("codebook", f"{codes} codes" if codes else "")]
    for height, width in grids[:3]:
        size = f" ({height * cell} x {width * cell} pixels)" if cell else ""
        facts.append(("grid", f"{height} x {width} tokens{size}"))
    if len(grids) > 3:
        facts.append(("", f"and {len(grids) - 3} more sizes"))
    windows = defaults.pop("window", None)
    if isinstance(windows, dict):
        facts.append(("Jacobi window", ", ".join(f"{count} on {kind}" for kind, count in windows.items())))
    facts.append(("defaults", ", ".join(f"{name} {value}" for name, value in defaults.items())))
    facts.append(("methods", ", ".join(fitting) or ("none" if "target" in parts else "")))
    facts.append(("memory", _memory(parts, grids)))
    facts.append(("from the Hub", ", ".join(f"{name} {where}" for name, where in absent.items())))
    facts.append(("files", _size(total)))
    width = max(len(name) for name, _ in facts) + 2
    listed = table(("component", "class", "parameters", "dtype", "weights"), [part.row(name) for name, part in parts.items()])
    return "\n".join([str(place), "", listed, "", *(f"{name:<{width}}{text}" for name, text in facts if text)])


def _planned(part: Part) -> Component:
    """A component of a checkpoint, as it would be converted."""
    if part.checkpoint is None:
        return Component(part.class_name, part.config)
    made = [recipe.planned(part.checkpoint) for recipe in part.weights.values()]
    kinds = Counter({tensor.dtype: 0 for tensor in made})
    for tensor in made:
        kinds[tensor.dtype] += tensor.numel()
    kind = DTYPE_NAMES[kinds.most_common(1)[0][0]]
    size = sum(tensor.numel() * tensor.itemsize for tensor in made)
    return Component(part.class_name, part.config, sum(kinds.values()), DTYPES.get(kind, kind), size)


def _memory(parts: dict[str, Component], grids: list[Any]) -> str:
    """What a run needs: weights as they are stored, and the cache of one guided picture of the first grid."""
    target = parts.get("target")
    weighed = sum(part.size for name, part in parts.items() if name not in ("draft_model", "draft_head"))
    if target is None or target.class_name not in loading.CLASSES or not grids or target.kind not in ITEM_SIZES:
        return ""
    config = {name: value for name, value in target.config.items() if not name.startswith("_")}
    shape: Any = weights.skeleton(Part(target.class_name, config), loading.component_class(target.class_name))
    backbone = shape.backbone.config
    per_token = 2 * backbone.layers * backbone.groups * backbone.width + backbone.dim
    cache = 2 * prod(grids[0]) * per_token * ITEM_SIZES[target.kind]
    height, width = grids[0]
    return (
        f"{_size(weighed + cache)}: weights {_size(weighed)}, cache {_size(cache)} a guided picture of {height} x {width} tokens"
    )


def _config(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: fetch the folder again") from error


def _weights(place: Path) -> tuple[int, str, int]:
    """Parameters, dtype and bytes of a component's safetensors files."""
    count, kinds, size = 0, Counter(), 0
    for path in sorted(place.glob("*.safetensors")):
        size += path.stat().st_size
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    tensor = file.get_slice(name)
                    numbers = prod(tensor.get_shape())
                    count += numbers
                    kinds[tensor.get_dtype()] += numbers
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: fetch the folder again") from error
    kind = kinds.most_common(1)[0][0] if kinds else ""
    return count, DTYPES.get(kind, kind), size


def _size(count: int) -> str:
    """Bytes for people."""
    if count >= 1e9:
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"
