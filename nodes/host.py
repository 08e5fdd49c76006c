"""Everything the nodes ask of ComfyUI, in one place.

Its modules (`comfy`, `folder_paths`, `server`) are imported inside the functions: they exist only in a running ComfyUI, and the
nodes must load, and be tested, without one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

MODEL_KIND = "foredraft"


# -- files -----------------------------------------------------------------------------------------------------------


def model_roots() -> list[Path]:
    """The folders that hold users' models: `models/foredraft`, and what extra_model_paths.yaml adds under `foredraft`."""
    import folder_paths

    folder_paths.add_model_folder_path(MODEL_KIND, os.path.join(folder_paths.models_dir, MODEL_KIND))
    return [Path(root) for root in folder_paths.get_folder_paths(MODEL_KIND)]


# -- memory ----------------------------------------------------------------------------------------------------------


class ForedraftModels(torch.nn.Module):
    """Modules that are loaded and unloaded together. ComfyUI writes attributes such as `device` on it; diffusers forbids that."""

    def __init__(self, parts: dict[str, torch.nn.Module]):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def patcher(parts: dict[str, torch.nn.Module]) -> Any:
    """A handle by which ComfyUI moves the modules between its devices. They rest on the offload device."""
    import comfy.model_management as management
    import comfy.model_patcher as patching

    cls = getattr(patching, "CoreModelPatcher", patching.ModelPatcher)
    offload = management.unet_offload_device()
    return cls(ForedraftModels(parts).to(offload), load_device=management.get_torch_device(), offload_device=offload)


def load(patchers: list[Any], memory: int) -> torch.device:
    """Bring the models to their device in one call, leaving room for `memory` bytes; returns the device."""
    import comfy.model_management as management

    # Our layers cannot stream their weights from the CPU, so half a model on the device would not run.
    management.load_models_gpu(patchers, memory_required=memory, force_full_load=True)
    for each in patchers:
        if any(tensor.device.type != each.load_device.type for tensor in tensors(each.model)):
            each.model.to(each.load_device)
    return patchers[0].load_device


def tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers."""
    yield from module.parameters()
    yield from module.buffers()


def size(module: torch.nn.Module) -> int:
    """Bytes of a module's tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(module))


@contextmanager
def memory_advice(advice: str) -> Iterator[None]:
    """Turn the allocator's report of a full device into one sentence, of the type by which ComfyUI knows to unload models."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise torch.cuda.OutOfMemoryError(f"the device has not enough memory for this: {advice}") from None


# -- progress --------------------------------------------------------------------------------------------------------


def check_interrupt() -> None:
    """Raise ComfyUI's InterruptProcessingException if the user pressed cancel."""
    import comfy.model_management as management

    management.throw_exception_if_processing_interrupted()


def progress_bar(total: int) -> Any:
    """The bar of the node that is running."""
    import comfy.utils

    return comfy.utils.ProgressBar(total)


def send(event: str, payload: dict[str, Any]) -> None:
    """Send an event to the browser that queued the prompt; nothing happens where no server runs."""
    try:
        from server import PromptServer
    except ImportError:
        return
    instance = getattr(PromptServer, "instance", None)
    if instance is not None:
        instance.send_sync(event, payload, instance.client_id)


# -- pictures --------------------------------------------------------------------------------------------------------


def image_batch(pictures: Iterable[Any], paper: tuple[int, int, int] = (255, 255, 255)) -> torch.Tensor:
    """PIL pictures as IMAGE: float32 [B, H, W, 3] in 0..1; smaller ones are extended to the largest with `paper`."""
    import numpy as np
    from PIL import Image

    pictures = [picture.convert("RGB") for picture in pictures]
    size = (max(picture.width for picture in pictures), max(picture.height for picture in pictures))
    arrays = []
    for picture in pictures:
        if picture.size != size:
            canvas = Image.new("RGB", size, paper)
            canvas.paste(picture, (0, 0))
            picture = canvas
        arrays.append(np.asarray(picture, dtype=np.float32) / 255.0)
    return torch.from_numpy(np.stack(arrays))


def pictures_of(images: torch.Tensor) -> list[Any]:
    """IMAGE [B, H, W, C] as PIL pictures."""
    from PIL import Image

    array = images[..., :3].mul(255.0).round().clamp(0, 255).to(device="cpu", dtype=torch.uint8).numpy()
    return [Image.fromarray(each) for each in array]
