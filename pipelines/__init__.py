"""One file per speculative method, each a `DiffusionPipeline` with a configuration of its own."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Any


@cache
def methods() -> dict[str, Any]:
    """Every method: short name -> pipeline class, in the order plain decoding first, then by file name.

    A method exists by its file existing: any module here that defines a subclass of `SpeculativeDecodingPipeline` counts.
    """
    base = importlib.import_module(".base", __package__).SpeculativeDecodingPipeline
    found: dict[str, Any] = {}
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: (module.name != "autoregressive", module.name)):
        loaded: Any = importlib.import_module(f".{module.name}", __package__)
        for name, value in vars(loaded).items():
            if isinstance(value, type) and issubclass(value, base) and value.__module__ == loaded.__name__ and value is not base:
                method: Any = getattr(loaded, name)
                found[method.config_class.name] = method
    return found
