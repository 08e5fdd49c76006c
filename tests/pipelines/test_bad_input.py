"""Bad input: one sentence that names the thing, what was expected and the remedy, before any model runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from foredraft import SJDPipeline, SpeculativePipeline
from foredraft.models.backbone import Backbone
from foredraft.models.embedded import EmbeddedTarget, WordTokenizer

from ..tiny import DEFAULTS, build_pipeline, codes, generators, sentence

METHODS = ("ar", "sjd", "speculative")
NAN, INF = float("nan"), float("inf")
Pipe = Callable[..., Any]


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward of any decoder ends the test."""

    def ran(*_: Any, **__: Any) -> None:
        pytest.fail("a model ran")

    monkeypatch.setattr(Backbone, "forward", ran)


# prompt, arguments, error, what the sentence must hold.
CASES: list[tuple[Any, dict[str, Any], type[Exception], tuple[str, ...]]] = [
    # The prompt.
    (3, {}, TypeError, ("prompt", "string", "int")),
    (None, {}, TypeError, ("prompt", "string", "NoneType")),
    (["fox", 3], {}, TypeError, ("prompt", "string")),
    (b"fox", {}, TypeError, ("prompt", "string", "bytes")),
    ([], {}, ValueError, ("prompts", "empty", "at least one")),
    ("", {}, ValueError, ("prompt", "empty", "'fox'")),
    ("  \n", {}, ValueError, ("prompt", "empty", "'fox'")),
    (["fox", ""], {}, ValueError, ("prompt", "empty", "'fox'")),
    ("fox " * 9, {}, ValueError, ("9 words", "at most 8", "shorten")),
    (["fox", "red apple on blue cat cat cat cat cat"], {}, ValueError, ("9 words", "at most 8")),
    ("foks", {}, ValueError, ("'foks'", "fox", "nearest known")),
    ("fix on blu", {}, ValueError, ("'fix'", "'blu'", "fox", "blue")),
    ("polar bar", {}, ValueError, ("'bar'", "bear")),
    ("fox on magenta", {}, ValueError, ("'magenta'", "white", "red", "blue", "on <colour>")),
    (["fox", "submarine"], {}, ValueError, ("'submarine'", "nearest known names")),
    # The negative prompt.
    ("fox", {"negative_prompt": "cat", "guidance_scale": 1.0}, ValueError, ("negative prompt", "guidance_scale", "above 1")),
    ("fox", {"negative_prompt": ["cat"] * 2}, ValueError, ("2 negative prompts", "1 prompts")),
    ("fox", {"negative_prompt": []}, ValueError, ("0 negative prompts", "one each")),
    ("fox", {"negative_prompt": 5}, TypeError, ("negative_prompt", "string", "int")),
    ("fox", {"negative_prompt": [5]}, TypeError, ("negative_prompt", "string")),
    ("fox", {"negative_prompt": "foks"}, ValueError, ("'foks'", "fox")),
    # How many.
    ("fox", {"num_images_per_prompt": 0}, ValueError, ("num_images_per_prompt", "at least 1", "0")),
    ("fox", {"num_images_per_prompt": -2}, ValueError, ("num_images_per_prompt", "at least 1")),
    ("fox", {"num_images_per_prompt": 1.5}, ValueError, ("num_images_per_prompt", "whole number", "1.5")),
    ("fox", {"num_images_per_prompt": "2"}, ValueError, ("num_images_per_prompt", "whole number", "'2'")),
    ("fox", {"num_images_per_prompt": True}, ValueError, ("num_images_per_prompt", "whole number")),
    ("fox", {"num_images_per_prompt": None}, ValueError, ("num_images_per_prompt", "whole number")),
    # The size.
    ("fox", {"height": 17}, ValueError, ("height", "multiples of 4", "17 x 16")),
    ("fox", {"width": -4}, ValueError, ("width", "multiples of 4", "16 x -4")),
    ("fox", {"height": 0, "width": 0}, ValueError, ("multiples of 4", "0 x 0")),
    ("fox", {"height": 64, "width": 64}, ValueError, ("16 x 16", "32 x 32", "12 x 20", "64 x 64")),
    ("fox", {"height": 20, "width": 12}, ValueError, ("12 x 20", "20 x 12")),
    ("fox", {"height": "16"}, (TypeError, ValueError), ("height", "'16'")),
    ("fox", {"width": 16.0}, (TypeError, ValueError), ("width", "whole", "16.0")),
    ("fox", {"height": NAN}, (TypeError, ValueError), ("height", "nan")),
    # Guidance, temperature, top-k, top-p.
    ("fox", {"guidance_scale": 0.5}, ValueError, ("guidance_scale", "at least 1", "0.5")),
    ("fox", {"guidance_scale": NAN}, ValueError, ("guidance_scale", "at least 1", "nan")),
    ("fox", {"guidance_scale": INF}, ValueError, ("guidance_scale", "inf")),
    ("fox", {"guidance_scale": "3"}, (TypeError, ValueError), ("guidance_scale", "'3'")),
    ("fox", {"temperature": -0.1}, ValueError, ("temperature", "at least 0", "greedy", "-0.1")),
    ("fox", {"temperature": NAN}, ValueError, ("temperature", "at least 0", "nan")),
    ("fox", {"temperature": INF}, ValueError, ("temperature", "inf")),
    ("fox", {"temperature": "hot"}, (TypeError, ValueError), ("temperature", "'hot'")),
    ("fox", {"temperature": True}, (TypeError, ValueError), ("temperature", "True")),
    ("fox", {"top_k": -1}, ValueError, ("top_k", "at least 0", "every code", "-1")),
    ("fox", {"top_k": 2.5}, (TypeError, ValueError), ("top_k", "whole", "2.5")),
    ("fox", {"top_k": NAN}, (TypeError, ValueError), ("top_k", "nan")),
    ("fox", {"top_k": "5"}, (TypeError, ValueError), ("top_k", "'5'")),
    ("fox", {"top_p": 0.0}, ValueError, ("top_p", "(0, 1]", "0.0")),
    ("fox", {"top_p": 1.01}, ValueError, ("top_p", "(0, 1]", "1.01")),
    ("fox", {"top_p": NAN}, ValueError, ("top_p", "(0, 1]", "nan")),
    ("fox", {"top_p": "0.5"}, (TypeError, ValueError), ("top_p", "'0.5'")),
    # Generators.
    ("fox", {"generator": 7}, TypeError, ("generator", "torch.Generator", "int")),
    ("fox", {"generator": generators(1, 2)}, ValueError, ("2 generators", "1 pictures", "one each")),
    ("fox", {"generator": []}, ValueError, ("0 generators", "1 pictures")),
    (["fox", "cat"], {"generator": generators(1)}, ValueError, ("1 generators", "2 pictures")),
    ("fox", {"generator": [7]}, TypeError, ("generator", "torch.Generator", "int")),
    ("fox", {"generator": [None]}, TypeError, ("generator", "torch.Generator", "NoneType")),
    # What comes back.
    ("fox", {"output_type": "jpg"}, ValueError, ("output_type", "pil", "latent", "'jpg'")),
    ("fox", {"output_type": None}, ValueError, ("output_type", "pil", "None")),
    ("fox", {"output_type": ["pil"]}, ValueError, ("output_type", "pil")),
    ("fox", {"callback_on_step_end": 3}, TypeError, ("callback_on_step_end", "int")),
    ("fox", {"callback_on_step_end_tensor_inputs": ["logits"]}, ValueError, ("tensor_inputs", "tokens", "length", "'logits'")),
    # Unknown options.
    ("fox", {"guidence_scale": 3.0}, TypeError, ("'guidence_scale'", "'guidance_scale'")),
    ("fox", {"num_images": 3}, TypeError, ("'num_images'", "'num_images_per_prompt'")),
    ("fox", {"seed": 3}, TypeError, ("no option 'seed'",)),
]


def case_id(value: Any) -> str | None:
    """Short ids for the table above."""
    return ",".join(f"{k}={v}"[:40] for k, v in value.items()) if isinstance(value, dict) else None


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(("prompt", "call", "kind", "holds"), CASES, ids=case_id)
def test_bad_arguments(pipe: Pipe, prompt: Any, call: dict[str, Any], kind: Any, holds: tuple[str, ...]) -> None:
    with pytest.raises(kind) as error:
        pipe("sjd")(prompt, **call)
    sentence(error, *holds)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("method", METHODS)
def test_the_errors_are_every_methods(pipe: Pipe, method: str) -> None:
    for call, kind, holds in (
        ({"height": 17}, ValueError, "multiples of 4"),
        ({"prompt": "foks"}, ValueError, "fox"),
        ({"temprature": 1}, TypeError, "'temperature'"),
        ({"generator": generators(1, 2)}, ValueError, "2 generators"),
    ):
        with pytest.raises(kind) as error:
            pipe(method)(**{"prompt": "fox", **call})
        sentence(error, holds)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("method", "options", "kind", "holds"),
    [
        ("ar", {"window": 3}, TypeError, ("Autoregressive", "'window'")),
        ("sjd", {"windw": 3}, TypeError, ("'windw'", "did you mean 'window'")),
        ("sjd", {"draft_length": 3}, TypeError, ("'draft_length'",)),
        ("sjd", {"window": 0}, ValueError, ("window", "between 1 and 1024", "0")),
        ("sjd", {"window": "wide"}, ValueError, ("window", "'wide'")),
        ("sjd", {"rule": "exact", "window": "auto"}, ValueError, ("window", "seeded")),
        ("sjd", {"tail": "coupled"}, ValueError, ("tail", "rule", "seeded")),
        ("sjd", {"tau": NAN}, ValueError, ("tau", "nan")),
        ("sjd", {"rule": "lantern"}, ValueError, ("rule", "seeded, exact, clustered")),
        ("sjd", {"refine": "yes"}, ValueError, ("refine", "True or False")),
        ("speculative", {"draft_lenght": 3}, TypeError, ("'draft_length'",)),
        ("speculative", {"tree": "binary"}, ValueError, ("tree", "chain, static, dynamic")),
        ("speculative", {"rule": "clustered"}, ValueError, ("rule", "seeded, exact")),
        ("speculative", {"draft_length": 33}, ValueError, ("draft_length", "between 1 and 32")),
    ],
    ids=lambda value: case_id(value) or (value if isinstance(value, str) else None),
)
def test_bad_options(pipe: Pipe, method: str, options: dict[str, Any], kind: Any, holds: tuple[str, ...]) -> None:
    with pytest.raises(kind) as error:
        pipe(method)("fox", **options)
    sentence(error, *holds)


@pytest.mark.parametrize("prompt", ["FOX", " fox ", "Red  Apple on BLUE", "red apple, on blue"])
def test_harmless_spelling_is_understood(pipe: Pipe, prompt: str) -> None:
    plain = "red apple on blue" if "apple" in prompt.lower() else "fox"
    assert torch.equal(codes(pipe("sjd"), prompt), codes(pipe("sjd"), plain))


def test_an_empty_negative_prompt_is_the_unconditional_one(pipe: Pipe) -> None:
    """diffusers' habit: negative_prompt="" means none."""
    assert torch.equal(codes(pipe("sjd"), "fox", negative_prompt=""), codes(pipe("sjd"), "fox"))


def test_the_pipeline_works_after_every_error(pipe: Pipe) -> None:
    run = pipe("sjd")
    whole = codes(run)
    for prompt, call, _, _ in CASES:
        with pytest.raises((TypeError, ValueError)):
            run(prompt, **call)
    assert torch.equal(codes(run), whole) and not run.interrupt


def with_nan(
    parts: dict[str, Any], method: str, name: str, part: str = "target", dtype: Any = torch.float32, place: int = 0
) -> Any:
    """A pipeline whose `part` has NaN at one place of one weight."""
    run = build_pipeline(parts, method, dtype)
    with torch.no_grad():
        weight = dict(getattr(run, part).named_parameters())[name]
        weight.view(-1)[place] = NAN
    return run


@pytest.mark.parametrize(
    "name", ["head.weight", "start", "backbone.blocks.1.down.weight", "backbone.norm.weight", "codes.weight", "slot_table.weight"]
)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_weights(parts: dict[str, Any], method: str, name: str, dtype: torch.dtype) -> None:
    run = with_nan(parts, method, name, dtype=dtype)
    if name == "codes.weight":  # every code, else it may never be fed
        torch.nn.init.constant_(run.target.codes.weight, NAN)
    with pytest.raises(FloatingPointError) as error:
        run("fox", generator=torch.Generator().manual_seed(0))
    sentence(error, "EmbeddedTarget", "NaN", str(dtype), "load it in another dtype")


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("options", [{}, {"rule": "exact"}, {"tree": "static"}, {"rule": "exact", "tree": "dynamic"}], ids=str)
def test_nan_weights_of_the_draft(parts: dict[str, Any], options: dict[str, Any], place: int) -> None:
    run = with_nan(parts, "speculative", "head.weight", "draft_model", place=place)
    with pytest.raises(FloatingPointError) as error:
        run("fox", generator=torch.Generator().manual_seed(0), **options)
    sentence(error, "draft", "NaN", "float32")


def test_a_draft_of_another_codebook(parts: dict[str, Any], folder: Any) -> None:
    config = dict(parts["draft_model"].config)
    other = EmbeddedTarget.from_config({**config, "vocab_size": 32})
    for build in (
        lambda: build_pipeline({**parts, "draft_model": other}, "speculative"),
        lambda: SpeculativePipeline.from_pretrained(folder, draft_model=other),
        lambda: SpeculativePipeline.from_pipe(build_pipeline(parts, "sjd"), draft_model=other),
    ):
        with pytest.raises(ValueError) as error:
            build()
        sentence(error, "draft", "32", "48", "codebook", "made for this target")


def test_a_codec_of_another_codebook(parts: dict[str, Any]) -> None:
    other = type(parts["codec"])(vocab_size=32, code_dim=4, width=16, upper_width=8)
    with pytest.raises(ValueError) as error:
        SJDPipeline(parts["target"], other, parts["tokenizer"], DEFAULTS)
    sentence(error, "codec", "32", "48")


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("method", METHODS)
def test_a_tokenizer_of_another_model(parts: dict[str, Any], method: str) -> None:
    words = [*parts["tokenizer"].words, "zebra"]
    other = WordTokenizer(["fox"], parts["tokenizer"].colours, words)
    with pytest.raises(ValueError) as error:
        build_pipeline({**parts, "tokenizer": other}, method)("fox")
    sentence(error, "12 words", "11", "tokenizer belongs to another model")


@pytest.mark.usefixtures("no_model")
def test_a_tokenizer_with_longer_prompts_than_the_model_reads(parts: dict[str, Any]) -> None:
    longer = copy.copy(parts["tokenizer"])
    longer.max_words = 12
    with pytest.raises(ValueError) as error:
        build_pipeline({**parts, "tokenizer": longer}, "ar")("fox " * 10)
    sentence(error, "12", "8", "tokenizer belongs to another model")
