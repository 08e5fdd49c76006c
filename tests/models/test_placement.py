"""Quantized targets, and targets spread over memory and disk, on the CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from foredraft import SJDPipeline, SpeculativePipeline

from ..tiny import folder, generators, parts, sentence  # noqa: F401 - fixtures
from . import layouts

CALL: dict[str, Any] = {"output_type": "latent", "guidance_scale": 2.0, "top_k": 0}
SPREAD = {
    "codes": "cpu",
    "caption": "disk",
    "backbone.blocks.0": "cpu",
    "backbone.blocks.1": "disk",
    "backbone.norm": "cpu",
    "head": "disk",
}
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LlamaGen as a user has it. Do not change it."""
    return layouts.llamagen_folder(tmp_path_factory.mktemp("original") / "llamagen")


def load(place: Path, **options: Any) -> Any:
    """A quiet pipeline that draws 4 x 4 tokens."""
    pipe = SJDPipeline.from_pretrained(place, **options)
    pipe.set_progress_bar_config(disable=True)
    pipe.register_to_config(defaults={**pipe.config.defaults, "grids": [[4, 4]]})
    return pipe


def drawn(pipe: Any) -> torch.Tensor:
    """What it draws."""
    return pipe("a red apple", generator=generators(0), **CALL).tokens


def test_parts_on_the_disk_draw_the_same(original: Path, tmp_path: Path) -> None:
    pipe = load(original, device_map=SPREAD, offload_folder=tmp_path)
    weights = dict(pipe.target.named_parameters())
    assert weights["head.weight"].is_meta and weights["backbone.blocks.1.down.weight"].is_meta and list(tmp_path.iterdir())
    assert pipe.target.home == torch.device("cpu")
    assert torch.equal(drawn(pipe), drawn(load(original)))


def test_an_automatic_map(original: Path) -> None:
    assert torch.equal(drawn(load(original, device_map="auto")), drawn(load(original)))


def test_the_embedded_family_spreads_too(folder: Path) -> None:  # noqa: F811
    run, plain = (SJDPipeline.from_pretrained(folder, **options) for options in ({"device_map": "auto"}, {}))
    for pipe in (run, plain):
        pipe.set_progress_bar_config(disable=True)
    assert torch.equal(run("fox", generator=generators(0)).tokens, plain("fox", generator=generators(0)).tokens)


def test_maps_that_cannot_be(original: Path) -> None:
    for options, words in (
        ({"device_map": SPREAD}, "offload_folder="),
        ({"device_map": {"codes": 0, "backbone": 1, "caption": "cpu", "head": "cpu"}}, "one accelerator"),
        ({"device_map": "everywhere"}, "'everywhere'"),
        ({"device_map": {}}, "must be 'auto'"),
    ):
        with pytest.raises(ValueError) as error:
            load(original, **options)
        sentence(error, words)


def test_model_offload_draws_the_same(original: Path, tmp_path: Path) -> None:
    """On the CPU nothing is saved, but every hook runs: the text encoder leaves before the target, the draft stays."""
    state = layouts.llamagen_state()
    small = {name: tensor for name, tensor in state.items() if not name.startswith("layers.1.")}
    draft = layouts.save_state(small, tmp_path / "t2i_draft_256.pt", "bare")
    pipe = SpeculativePipeline.from_pretrained(original, draft_model=str(draft))
    pipe.set_progress_bar_config(disable=True)
    pipe.register_to_config(defaults={**pipe.config.defaults, "grids": [[4, 4]]})
    plain = drawn(pipe)
    pipe.enable_model_cpu_offload(device="cpu")
    hooked = [name for name, part in pipe.components.items() if hasattr(part, "_hf_hook")]
    assert set(hooked) == {"text_encoder", "target", "codec"}
    assert torch.equal(drawn(pipe), plain) and torch.equal(drawn(pipe), plain)


def test_sequential_offload_draws_the_same(original: Path) -> None:
    """What `enable_sequential_cpu_offload` does to every model; its own device name 'cpu:0' is one accelerate cannot handle."""
    from accelerate import cpu_offload

    pipe = load(original)
    plain = drawn(pipe)
    for name in ("target", "text_encoder", "codec"):
        cpu_offload(getattr(pipe, name), torch.device("cpu"))
    assert pipe.target.head.weight.is_meta and pipe.text_encoder.shared.weight.is_meta
    assert torch.equal(drawn(pipe), plain)
    assert pipe.codec.decode(plain).shape == (1, 3, 64, 64)


@needs_torchao
@pytest.mark.parametrize(("kind", "most"), [("int8", 0.05), ("int4", 0.6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_targets(original: Path, kind: str, most: float, dtype: torch.dtype) -> None:
    wide, pipe = load(original, torch_dtype=dtype), load(original, torch_dtype=dtype, quantization=kind)
    layer = pipe.target.backbone.blocks[0]
    x = torch.randn(4, layouts.DIM, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad():
        exact, rounded = wide.target.backbone.blocks[0].gate_up(x), layer.gate_up(x)
    error = (exact - rounded).float().std() / exact.float().std()
    assert 1e-4 < error < most
    assert type(pipe.target.head.weight) is torch.nn.Parameter, "the output head keeps its precision"
    assert pipe("fox", generator=generators(0), **CALL).traces[0].complete


@needs_torchao
def test_a_quantized_target_is_not_saved(original: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        load(original, quantization="int8").save_pretrained(tmp_path)
    sentence(error, "target is quantized")


def test_quantizations_that_cannot_be(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError) as error:
        load(original, quantization="int3")
    sentence(error, "int8, int4", "'int3'")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "torchao" else found(name, *rest))
    with pytest.raises(ModuleNotFoundError) as missing:
        load(original, quantization="int8")
    sentence(missing, "pip install 'foredraft[quantization]'")
