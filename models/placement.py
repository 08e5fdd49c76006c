"""Large targets on small machines: weight-only quantization, and weights that wait on the CPU or the disk.

Quantization is torchao's (an optional extra, `pip install foredraft[quantization]`), offloading accelerate's.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import nn

QUANTIZATIONS = ("int8", "int4")


def quantize(model: Any, kind: str) -> Any:
    """Round the decoder's matrices to 8 or 4 bits, in place; embeddings, norms and output head stay as they are.

    "int4" is stored in 4 bits on CUDA only (and there needs bfloat16); elsewhere a number of 4 bits takes a byte.
    """
    if kind not in QUANTIZATIONS:
        raise ValueError(f"quantization must be one of {', '.join(QUANTIZATIONS)}, got {kind!r}")
    if importlib.util.find_spec("torchao") is None:
        raise ModuleNotFoundError("quantization needs torchao, which is not installed: pip install 'foredraft[quantization]'")
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    weight = next(model.backbone.parameters())
    group = next(size for size in (128, 64, 32, 16, 8, 4, 2, 1) if all(part.in_features % size == 0 for part in linears(model)))
    if kind == "int8":
        config: Any = Int8WeightOnlyConfig()
    elif weight.device.type == "cuda":
        if weight.dtype != torch.bfloat16:
            raise ValueError(f"quantization='int4' on CUDA needs torch_dtype=torch.bfloat16, got {weight.dtype}")
        config = Int4WeightOnlyConfig(group_size=group, int4_packing_format="tile_packed_to_4d")
    else:
        four: Any = vars(torch)["int4"]
        config = IntxWeightOnlyConfig(weight_dtype=four, granularity=PerGroup(group))
    quantize_(model.backbone, config)
    model.quantization = kind
    return model


def linears(model: Any) -> list[nn.Linear]:
    """The decoder's matrices."""
    return [part for part in model.backbone.modules() if isinstance(part, nn.Linear)]


def spread(model: Any, device_map: Any, max_memory: dict[Any, Any] | None = None, offload_folder: Any = None) -> Any:
    """Put a target's parts where `device_map` says: "auto", or {module name: device, "cpu" or "disk"}.

    Parts on the CPU or the disk are brought to the one accelerator (or, without one, the CPU) for their forward. The cache of a
    run lies on one device, so that there may be only one accelerator.
    """
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import get_max_memory

    if device_map == "auto":
        memory = get_max_memory(max_memory)
        accelerators = [place for place in memory if place not in ("cpu", "disk")]
        allowed = {place: size for place, size in memory.items() if place not in accelerators[1:]}
        device_map = infer_auto_device_map(model, max_memory=allowed, no_split_module_classes=["Block"])
    if not isinstance(device_map, dict) or not device_map:
        raise ValueError(f"device_map must be 'auto' or a table of module names and devices, got {device_map!r}")
    places = {str(place) for place in device_map.values()}
    working = places - {"cpu", "disk"}
    if len(working) > 1:
        raise ValueError(f"device_map names {' and '.join(sorted(working))}: one accelerator, 'cpu' and 'disk' are possible")
    if "disk" in places and offload_folder is None:
        raise ValueError("device_map puts parts on the disk: say where with offload_folder=")
    folder = None if offload_folder is None else Path(offload_folder)
    return dispatch_model(model, device_map, main_device=None if working else "cpu", offload_dir=folder, force_hooks=True)
