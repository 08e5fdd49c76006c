"""Load Target, Load Draft: which models there are, and reading them into ComfyUI's care.

A model folder holds a model_index.json and one folder per component. What a target cannot do without is loaded by Load Target,
everything else (a small draft model, a draft head, a low-resolution sibling, ...) is a draft that Load Draft offers by itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import DEMO
from . import host

EMBEDDED = "demo"
NONE = "none"
DTYPES = ("float32", "bfloat16", "float16", "float64")
# Components of the target itself; a family may lack the last one.
TARGET_PARTS = ("target", "codec", "tokenizer", "text_encoder")
INDEX = "model_index.json"


class Cost(NamedTuple):
    """A measured time: seconds, and when it was measured, by `perf_counter`."""

    seconds: float
    measured: float


@dataclass
class Target:
    """FOREDRAFT_TARGET. parts: components by name; patcher: ComfyUI's handle on those with weights; defaults: the family's.

    costs: of one plain decoding step, by the shape of the call (see `sample.py`). planners: what measured time taught methods
    about draft lengths; they hold no model and change no picture.
    """

    name: str
    parts: dict[str, Any]
    defaults: dict[str, Any] | None
    patcher: Any
    costs: dict[Any, Cost] = field(default_factory=dict)
    planners: dict[Any, dict[Any, Any]] = field(default_factory=dict)

    def get_models(self) -> list[Any]:
        """For ComfyUI's bookkeeping of models in use."""
        return [self.patcher]

    def get_ram_usage(self) -> int:
        """Bytes, for ComfyUI's cache under memory pressure."""
        return host.size(self.patcher.model)


@dataclass
class Draft:
    """FOREDRAFT_DRAFT: components that draft, by name, and ComfyUI's handles on them; no part at all is a valid draft."""

    parts: dict[str, Any] = field(default_factory=dict)
    patchers: list[Any] = field(default_factory=list)
    name: str = NONE

    def get_models(self) -> list[Any]:
        """For ComfyUI's bookkeeping of models in use."""
        return list(self.patchers)

    def get_ram_usage(self) -> int:
        """Bytes, for ComfyUI's cache under memory pressure."""
        return sum(host.size(each.model) for each in self.patchers)


# -- what there is ---------------------------------------------------------------------------------------------------


def families() -> dict[str, Path]:
    """Every model folder by the name the menus show, the embedded one first. Folders are listed, names are never joined."""
    found = {EMBEDDED: Path(DEMO)}
    for root in host.model_roots():
        if root.is_dir():
            for index in sorted([*root.glob(f"*/{INDEX}"), *root.glob(f"*/*/{INDEX}")]):
                found.setdefault(index.parent.relative_to(root).as_posix(), index.parent)
    return found


def components(folder: Path) -> dict[str, str]:
    """Component -> class name, from a folder's index; nothing where it cannot be read (loading says why)."""
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        return {name: entry[1] for name, entry in index.items() if isinstance(entry, list) and len(entry) == 2}
    except (OSError, ValueError, AttributeError):
        return {}


def targets() -> dict[str, Path]:
    """The folders that hold a target."""
    return {name: folder for name, folder in families().items() if "target" in components(folder) or name == EMBEDDED}


def drafts() -> dict[str, tuple[Path, str]]:
    """Every component that can draft, `family/component` -> (folder, component), the embedded family's first."""
    found = {}
    for name, folder in families().items():
        for part in components(folder):
            if part not in TARGET_PARTS:
                found[f"{name}/{part}"] = (folder, part)
    return found


def fingerprint(folder: Path, parts: list[str]) -> str:
    """Changes when a file of the components changes: names, sizes, times."""
    files = [folder / INDEX, *(path for part in parts for path in (folder / part).rglob("*") if path.is_file())]
    stats = [(path.relative_to(folder).as_posix(), path.stat()) for path in sorted(files) if path.exists()]
    return json.dumps([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])


def missing(what: str, name: str, known: list[str]) -> ValueError:
    """One sentence about a model that is not there."""
    roots = " or ".join(str(root) for root in host.model_roots())
    return ValueError(
        f"there is no {what} {name!r}: put its folder (with a {INDEX}) into {roots} and press R, "
        f"or choose one of {', '.join(known)}"
    )


def read(folder: Path, names: list[str], who: str, dtype: str) -> dict[str, Any]:
    """Components and defaults, as ordinary tensors: ComfyUI may move them outside inference mode."""
    from ..models import loading

    with torch.inference_mode(False):
        return loading.load_components(folder, names, who, {"torch_dtype": getattr(torch, dtype)})


def modules(parts: dict[str, Any]) -> dict[str, torch.nn.Module]:
    """The components that have weights."""
    return {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}


# -- nodes -----------------------------------------------------------------------------------------------------------


class LoadTarget:
    """Loads an autoregressive image model: the target, its codec and its tokenizer."""

    DESCRIPTION = (
        "Loads an autoregressive image model: the target whose pictures are drawn, its codec and its tokenizer. "
        "The small demo model is included and downloads nothing; more models go into ComfyUI's models/foredraft folder."
    )
    CATEGORY = "Foredraft"
    FUNCTION = "load"
    RETURN_TYPES = ("FOREDRAFT_TARGET",)
    RETURN_NAMES = ("target",)
    OUTPUT_TOOLTIPS = ("The target with its codec and tokenizer, for the sampler and the comparison.",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """See ComfyUI."""
        return {
            "required": {
                "model": (
                    list(targets()),
                    {"default": EMBEDDED, "tooltip": "demo is included; the others are folders in models/foredraft."},
                ),
                "dtype": (
                    list(DTYPES),
                    {
                        "default": DTYPES[0],
                        "tooltip": "Precision of the weights. float32 keeps the promise of one picture per seed; the 16-bit "
                        "types halve the memory.",
                    },
                ),
            }
        }

    @classmethod
    def IS_CHANGED(cls, model: str | None = None, dtype: str | None = None) -> str:
        """Reload when a file changed."""
        folder = targets().get(model or "")
        return fingerprint(folder, list(TARGET_PARTS)) if folder else ""

    def load(self, model: str, dtype: str) -> tuple[Target]:
        """Read the folder."""
        known = targets()
        if model not in known:
            raise missing("model", model, list(known))
        folder = known[model]
        held = components(folder)
        names = [name for name in TARGET_PARTS if name in held or name != "text_encoder"]
        absent = [name for name in names if name not in held]
        if absent:
            raise ValueError(f"the model {model!r} in {folder} lists no {absent[0]}: it is incomplete, fetch it again")
        parts = read(folder, names, "Load Target", dtype)
        defaults = parts.pop("defaults")
        return (Target(model, parts, defaults, host.patcher(modules(parts))),)


class LoadDraft:
    """Loads what drafts for a target: a small sibling, or whatever else a model folder offers."""

    DESCRIPTION = (
        "Loads what drafts for a target, for example its small sibling (draft_model). Methods that draft by themselves, such as "
        "SJD, need none. A method that needs several gets them by chaining these nodes."
    )
    CATEGORY = "Foredraft"
    FUNCTION = "load"
    RETURN_TYPES = ("FOREDRAFT_DRAFT",)
    RETURN_NAMES = ("draft",)
    OUTPUT_TOOLTIPS = ("The draft, for the sampler and the comparison.",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """See ComfyUI."""
        found = list(drafts())
        return {
            "required": {
                "model": (
                    [NONE, *found],
                    {
                        "default": found[0] if found else NONE,
                        "tooltip": "Model folder / component; it must be made for the target. none: nothing is loaded.",
                    },
                ),
                "dtype": (
                    list(DTYPES),
                    {"default": DTYPES[0], "tooltip": "Precision of the weights; choose the target's."},
                ),
            },
            "optional": {
                "draft": ("FOREDRAFT_DRAFT", {"tooltip": "Another draft to hand on together with this one."}),
            },
        }

    @classmethod
    def IS_CHANGED(cls, model: str | None = None, dtype: str | None = None, draft: Any = None) -> str:
        """Reload when a file changed."""
        folder, part = drafts().get(model or "", (None, ""))
        return fingerprint(folder, [part]) if folder else ""

    def load(self, model: str, dtype: str, draft: Draft | None = None) -> tuple[Draft]:
        """Read the component; the draft that came in is handed on unchanged beside it."""
        before = draft or Draft()
        if model == NONE:
            return (before,)
        known = drafts()
        if model not in known:
            raise missing("draft", model, [NONE, *known])
        folder, part = known[model]
        if part in before.parts:
            raise ValueError(f"two of the chained drafts are a {part}: keep one of them")
        parts = read(folder, [part], "Load Draft", dtype)
        del parts["defaults"]
        names = [name for name in (before.name, model) if name != NONE]
        held = modules(parts)
        patchers = [host.patcher(held)] if held else []
        return (Draft({**before.parts, **parts}, [*before.patchers, *patchers], " + ".join(names)),)
