"""What is in a model folder, read from its index and the headers of its files."""

from __future__ import annotations

import json
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..models import loading
from ..pipelines import methods
from .report import table

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def describe(source: Any) -> str:
    """Classes, sizes, grid, codebook, defaults and fitting methods of a folder or Hub id, as text.

    Raises FileNotFoundError or ValueError in one sentence.
    """
    folder = loading.resolve(source, {})
    index = loading.read_index(folder)
    parts = {name: entry[1] for name, entry in index.items() if isinstance(entry, list) and len(entry) == 2}
    lines = [[name, class_name, *_weights(folder / name)] for name, class_name in parts.items()]
    defaults = dict(index.get("defaults") or {})
    cell = _config(folder, "codec").get("downsample")
    fitting = [name for name, cls in methods().items() if all(part in parts for part in cls.required_components())]
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    facts = [("codebook", f"{codes} codes" if (codes := _config(folder, "target").get("vocab_size")) else "")]
    for height, width in defaults.pop("grids", []):
        size = f" ({height * cell} x {width * cell} pixels)" if cell else ""
        facts.append(("grid", f"{height} x {width} tokens{size}"))
    windows = defaults.pop("window", None)
    if isinstance(windows, dict):
        facts.append(("Jacobi window", ", ".join(f"{count} on {kind}" for kind, count in windows.items())))
    facts.append(("defaults", ", ".join(f"{name} {value}" for name, value in defaults.items())))
    facts.append(("methods", ", ".join(fitting) or "none"))
    facts.append(("files", _size(total)))
    width = max(len(name) for name, _ in facts) + 2
    listed = table(("component", "class", "parameters", "dtype", "weights"), lines)
    return "\n".join([str(folder), "", listed, "", *(f"{name:<{width}}{text}" for name, text in facts if text)])


def _config(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: fetch the folder again") from error


def _weights(place: Path) -> list[str]:
    """Parameters, dtype and size of a component's safetensors files."""
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
    if not size:
        return ["", "", ""]
    kind = kinds.most_common(1)[0][0]
    return [f"{count:,}", DTYPES.get(kind, kind), _size(size)]


def _size(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"
