"""ComfyUI's modules as far as the nodes use them, writing down what they are asked."""

from __future__ import annotations

import sys
import types
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


class InterruptProcessingException(Exception):
    """What ComfyUI throws when the user cancels: a plain Exception."""


class ModelPatcher:
    """Holds a module; like the real one it writes `device` on it, which not every module allows."""

    def __init__(self, model: Any, load_device: torch.device, offload_device: torch.device, size: int = 0):
        self.model, self.load_device, self.offload_device = model, load_device, offload_device
        self.model.device = offload_device


@dataclass
class Stage:
    """What happened so far. interrupt_after: cancel at the n-th check; out_of_memory: loading fails."""

    models: Path
    extra: list[Path] = field(default_factory=list)
    loads: list[dict[str, Any]] = field(default_factory=list)
    progress: list[tuple[int, int, Any]] = field(default_factory=list)
    events: list[tuple[str, dict[str, Any], Any]] = field(default_factory=list)
    checks: int = 0
    interrupt_after: int | None = None
    out_of_memory: bool = False
    roots: dict[str, list[str]] = field(default_factory=dict)


def build(stage: Stage) -> dict[str, types.ModuleType]:
    """The modules, by name."""
    names = ("comfy", "comfy.model_management", "comfy.model_patcher", "comfy.utils", "folder_paths", "server")
    made = {name: types.ModuleType(name) for name in names}
    management, patching, utils = made["comfy.model_management"], made["comfy.model_patcher"], made["comfy.utils"]
    made["comfy"].__path__ = []
    made["comfy"].model_management, made["comfy"].model_patcher, made["comfy"].utils = management, patching, utils
    cpu = torch.device("cpu")

    def check() -> None:
        stage.checks += 1
        if stage.interrupt_after is not None and stage.checks >= stage.interrupt_after:
            stage.interrupt_after = None
            raise InterruptProcessingException

    def load_models_gpu(models: Any, memory_required: float = 0, force_full_load: bool = False) -> None:
        if stage.out_of_memory:
            raise torch.cuda.OutOfMemoryError("Allocation on device 0 would exceed allowed memory. (out of memory)")
        stage.loads.append({"models": list(models), "memory": memory_required, "full": force_full_load})

    management.InterruptProcessingException = InterruptProcessingException
    management.throw_exception_if_processing_interrupted = check
    management.get_torch_device = lambda: cpu
    management.unet_offload_device = lambda: cpu
    management.load_models_gpu = load_models_gpu
    patching.ModelPatcher = ModelPatcher

    class ProgressBar:
        def __init__(self, total: int, node_id: Any = None):
            self.total = total

        def update_absolute(self, value: int, total: int | None = None, preview: Any = None) -> None:
            self.total = self.total if total is None else total
            check()
            stage.progress.append((min(value, self.total), self.total, preview))

    utils.ProgressBar = ProgressBar

    def add_model_folder_path(name: str, path: str, is_default: bool = False) -> None:
        paths = stage.roots.setdefault(name, [str(each) for each in stage.extra])
        if path not in paths:
            paths.append(path)

    made["folder_paths"].models_dir = str(stage.models)
    made["folder_paths"].add_model_folder_path = add_model_folder_path
    made["folder_paths"].get_folder_paths = lambda name: list(stage.roots[name])

    class PromptServer:
        client_id = "browser"

        def send_sync(self, event: str, data: dict[str, Any], sid: Any = None) -> None:
            stage.events.append((event, data, sid))

    PromptServer.instance = PromptServer()
    made["server"].PromptServer = PromptServer
    return made


@contextmanager
def installed(stage: Stage) -> Any:
    """While open, the stand-ins are importable under their real names."""
    made = build(stage)
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        yield stage
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
