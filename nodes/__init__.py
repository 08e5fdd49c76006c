"""The ComfyUI layer over the pipelines: thin nodes, one per thing a user does.

The nodes have ComfyUI's first form (NODE_CLASS_MAPPINGS). It loads in every version of ComfyUI, needs nothing of ComfyUI at
import, and can be tested without it; the newer schema rejects a whole pack over one keyword an older version does not know.
Node ids, the names and order of inputs and outputs, and socket types are stored in users' graphs: add, never change.
"""

from __future__ import annotations

from typing import Any

from .compare import Compare
from .load import LoadDraft, LoadTarget
from .method import method_nodes
from .sample import Sampler
from .trace import Heatmap, TraceStats

_METHODS = method_nodes()

NODE_CLASS_MAPPINGS: dict[str, Any] = {
    "ForedraftLoadTarget": LoadTarget,
    "ForedraftLoadDraft": LoadDraft,
    **_METHODS,
    "ForedraftSampler": Sampler,
    "ForedraftHeatmap": Heatmap,
    "ForedraftTraceStats": TraceStats,
    "ForedraftCompare": Compare,
}

NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {
    "ForedraftLoadTarget": "Load Target",
    "ForedraftLoadDraft": "Load Draft",
    **{name: node.pipeline.config_class.title for name, node in _METHODS.items()},
    "ForedraftSampler": "Speculative Sampler",
    "ForedraftHeatmap": "Acceptance Heatmap",
    "ForedraftTraceStats": "Trace Stats",
    "ForedraftCompare": "Speculative Compare",
}
