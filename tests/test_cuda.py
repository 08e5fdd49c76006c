"""On a GPU: every method runs there, seeds hold, half precisions draw, offloading works. Skipped where there is none."""

from __future__ import annotations

from typing import Any

import foredraft
import pytest
import torch
from foredraft.pipelines import methods

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

FULL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
PROMPTS = ["fox", "red apple on blue", "owl on green"]
SEEDED: list[tuple[str, dict[str, Any]]] = [
    ("sjd", {}),
    ("sjd", {"window": 5}),
    ("speculative", {}),
    ("speculative", {"tree": "static"}),
    ("speculative", {"tree": "dynamic"}),
    ("cool_sd", {}),
    ("cool_sd", {"tree": "static"}),
    ("cool_sd", {"tree": "dynamic"}),
]
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("ar", {}),
    *[("sjd", {"rule": "exact", "tail": tail}) for tail in ("resample", "coupled", "gumbel", "reuse")],
    ("sjd", {"rule": "clustered"}),
    *[("speculative", {"rule": "exact", "tree": tree}) for tree in ("chain", "static", "dynamic")],
    *[("cool_sd", {"rule": rule}) for rule in ("exact", "annealed", "uniform", "lantern", "lantern++")],
    ("cool_sd", {"rule": "exact", "tree": "dynamic"}),
    ("vvs", {}),
    ("vvs", {"schedule": "uniform"}),
]


def load(method: str, dtype: torch.dtype) -> Any:
    """The embedded family on the GPU."""
    pipeline = methods()[method].from_pretrained(foredraft.DEMO, torch_dtype=dtype).to("cuda")
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw(pipeline: Any, prompts: list[str] = PROMPTS, **options: Any) -> Any:
    """Codes, with one seed per picture."""
    seeds = [torch.Generator().manual_seed(5 + number) for number in range(len(prompts))]
    return pipeline(prompts, generator=seeds, output_type="latent", **options)


@pytest.mark.parametrize(("method", "options"), SEEDED)
@pytest.mark.parametrize("call", [FULL, {}])
def test_seeded_draws_plain_decodings_picture_in_double_precision(
    method: str, options: dict[str, Any], call: dict[str, Any]
) -> None:
    plain = draw(load("ar", torch.float64), **call).images
    ours = draw(load(method, torch.float64), rule="seeded", **options, **call)
    assert torch.equal(torch.as_tensor(ours.images), torch.as_tensor(plain))
    assert ours.traces[0].tokens_per_forward > 1.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("method", "options"), OTHERS)
def test_every_method_draws(method: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    output = load(method, dtype)(PROMPTS, generator=torch.Generator("cuda").manual_seed(3), **options)
    assert [image.size for image in output.images] == [(64, 64)] * 3
    assert all(trace.tokens == 256 for trace in output.traces)


def test_a_row_alone_is_the_row_of_the_batch() -> None:
    pipeline = load("sjd", torch.float64)
    together = torch.as_tensor(draw(pipeline, rule="exact").images)
    for number, prompt in enumerate(PROMPTS):
        seed = [torch.Generator().manual_seed(5 + number)]
        alone = pipeline([prompt], generator=seed, output_type="latent", rule="exact").images
        assert torch.equal(torch.as_tensor(alone)[0], together[number])


def test_the_gpu_draws_what_the_cpu_draws_in_double_precision() -> None:
    pipeline = load("sjd", torch.float64)
    there = torch.as_tensor(draw(pipeline, rule="exact", window=16).images).cpu()
    here = torch.as_tensor(draw(pipeline.to("cpu"), rule="exact", window=16).images)
    assert torch.equal(there, here)


def test_weights_may_wait_on_the_cpu() -> None:
    whole = torch.as_tensor(draw(load("cool_sd", torch.float32)).images)
    pipeline = methods()["cool_sd"].from_pretrained(foredraft.DEMO)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.enable_model_cpu_offload()
    for _ in range(2):
        assert torch.equal(torch.as_tensor(draw(pipeline).images).cpu(), whole.cpu())
    assert pipeline("fox").images[0].size == (64, 64)


def test_no_memory_is_kept_after_a_run() -> None:
    pipeline = load("sjd", torch.float32)
    draw(pipeline)
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        draw(pipeline)
    assert torch.cuda.memory_allocated() <= before + 2**20
