"""LlamaGen: the published layout, its peculiarities, parity with an independent derivation, every method."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foredraft import AutoregressivePipeline, SJDPipeline, SpeculativePipeline
from foredraft.decoding.sampling import Sampling
from foredraft.decoding.types import no_draft
from foredraft.models import loading, weights
from foredraft.models.checkpoint import Source
from foredraft.models.llamagen import ClassTokenizer, LlamaGenTarget, clean_caption, recognise
from foredraft.models.weights import Part
from foredraft.pipelines import methods
from safetensors.torch import load_file
from torch import Tensor

from ..tiny import SEEDED, VARIANTS, generators, name_of, sentence
from . import layouts
from .derive_llamagen import class_logits, text_logits

SIDE, SMALL = 16, 6
CALL: dict[str, Any] = {"output_type": "latent", "guidance_scale": 2.0, "top_k": 0}
GOLDEN_AT = (0, 1, 2, 15, 16, 17, 100, 200, 255)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    """As in a pipeline's call."""
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders as users have them, of both kinds. Do not change them."""
    return {kind: layouts.llamagen_folder(tmp_path_factory.mktemp("llamagen") / kind, kind) for kind in ("t2i", "c2i")}


@pytest.fixture(scope="module")
def parts(originals: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All components of a text-conditional model: the draft is the target's first layer."""
    state = layouts.llamagen_state()
    small = {name: tensor for name, tensor in state.items() if not name.startswith("layers.1.")}
    draft = layouts.save_state(small, tmp_path_factory.mktemp("draft") / "t2i_draft_256.pt", "bare")
    head = layouts.head_folder(tmp_path_factory.mktemp("head"), state)
    pipe = SpeculativePipeline.from_pretrained(originals["t2i"], draft_model=draft)
    loaded = {**pipe.components, "draft_head": loading.load_part(head, "draft_head", torch.float32)}
    return {**loaded, "defaults": {**pipe.config.defaults, "grids": [[SMALL, SMALL]], "window": {"cpu": 6}}}


def pipeline(parts: dict[str, Any], method: str, dtype: torch.dtype = torch.float32) -> Any:
    """A method's pipeline over copies of the components in dtype."""
    cls = methods()[method]
    chosen = {name: copy.deepcopy(parts[name]) for name in (*cls.component_names(), "defaults")}
    for part in chosen.values():
        if isinstance(part, torch.nn.Module):
            part.to(dtype)
    pipe = cls(**chosen)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def read_target(path: Path, dtype: torch.dtype = torch.float32) -> LlamaGenTarget:
    """The target in a checkpoint."""
    return loading.build(loading.recognise(Source(path)).parts["target"], dtype)


@torch.no_grad()
def teacher_logits(target: LlamaGenTarget, conditioning: Any, tokens: Tensor) -> Tensor:
    """Raw logits [R, N, V] through the cache, one token a forward, as plain decoding runs."""
    rows, count = tokens.shape
    sequence = target.begin(conditioning, (SIDE, SIDE), Sampling(guidance_scale=2.0), 0)
    logits = []
    for column in range(count):
        logits.append(target.logits(target.features(sequence, no_draft(rows, tokens.device)))[:, -1])
        sequence.commit(tokens[:, column : column + 1], torch.ones(rows).long(), torch.zeros(rows).long())
        sequence.refresh()
    return torch.stack(logits, 1)


# -- parity ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def image() -> tuple[Tensor, Tensor, int]:
    """Codes [1, 256], text features [1, 120, C] and how many of them are real."""
    numbers = np.random.RandomState(7)
    tokens = torch.from_numpy(numbers.randint(0, layouts.CODES, SIDE * SIDE))[None]
    features = torch.from_numpy(numbers.standard_normal((layouts.SLOTS, layouts.CAPTION)).astype(np.float32))
    return tokens, features[None], 11


def conditions(target: LlamaGenTarget, kind: str, features: Tensor, count: int) -> Any:
    """The golden file's prompt."""
    if kind == "c2i":
        return target.condition_on_classes(torch.tensor([3]), True)
    return target.condition(features, torch.tensor([count]), True)


@pytest.mark.parametrize("kind", ["t2i", "c2i"])
def test_logits_over_an_image_are_the_references(originals: dict[str, Path], image: Any, kind: str) -> None:
    """golden-llamagen.safetensors was compared with the reference code: 1e-5 at most, before guidance."""
    tokens, features, count = image
    target = read_target(next(originals[kind].glob(f"{kind}_*.pt")))
    ours = teacher_logits(target, conditions(target, kind, features, count), tokens)
    golden = load_file(Path(__file__).with_name("golden-llamagen.safetensors"))[kind]
    assert golden.std() > 1
    assert (ours[:, list(GOLDEN_AT)] - golden).abs().max() < 5e-5
    guided, wanted = ours[1] + 7.5 * (ours[0] - ours[1]), golden[1] + 7.5 * (golden[0] - golden[1])
    assert (guided[list(GOLDEN_AT)] - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["t2i", "c2i"])
def test_logits_over_an_image_are_those_of_the_derivation(originals: dict[str, Path], image: Any, kind: str) -> None:
    tokens, features, count = image
    state = {name: tensor.double().numpy() for name, tensor in layouts.llamagen_state(kind).items()}
    codes = tokens[0].tolist()
    if kind == "t2i":
        derived = text_logits(state, features[0].double().numpy(), count, codes, SIDE, 2)
    else:
        derived = class_logits(state, 3, codes, SIDE, 2)
    target = read_target(next(originals[kind].glob(f"{kind}_*.pt")), torch.float64)
    ours = teacher_logits(target, conditions(target, kind, features, count), tokens)
    assert (ours - torch.from_numpy(np.stack(derived))).abs().max() < 1e-9
    golden = load_file(Path(__file__).with_name("golden-llamagen.safetensors"))[kind]
    assert (ours[:, list(GOLDEN_AT)] - golden).abs().max() < 1e-5


# -- peculiarities ---------------------------------------------------------------------------------------------------


def test_rotary_rows_of_text_are_zeros(originals: dict[str, Path], image: Any) -> None:
    _, features, count = image
    target = read_target(next(originals["t2i"].glob("t2i_*.pt")))
    assert not target.prompt_rotary(7).abs().any() and target.prompt_rotary(7).shape == (1, 7, 32)
    table = target.rotary(torch.arange(SIDE * SIDE + 1)[None], (SIDE, SIDE))[0]
    assert not table[0].abs().any()
    assert torch.equal(table[1], torch.ones_like(table[1])), "the first image token is at cell (0, 0), not turned"
    assert torch.allclose(table[1:].abs(), torch.ones(256, 32)), "image tokens are turned, not scaled"
    sequence = target.begin(target.condition(features, torch.tensor([count]), True), (SIDE, SIDE), Sampling(2.0), 0)
    target.features(sequence, no_draft(1, features.device))
    assert not sequence.cache.keys[:, :, :count].any(), "keys of text vanish"
    assert sequence.cache.values[:, :, :count].any(), "but their values are read"


def test_rows_turn_the_first_half_and_columns_the_second(originals: dict[str, Path]) -> None:
    target = read_target(next(originals["t2i"].glob("t2i_*.pt")))
    table = target.rotary(torch.arange(1, 257)[None], (SIDE, SIDE))[0].view(SIDE, SIDE, 32)
    assert torch.equal(table[3, :, :16], table[3:4, :1, :16].expand(1, SIDE, 16)[0])
    assert torch.equal(table[:, 5, 16:], table[:1, 5, 16:].expand(SIDE, 16))
    assert torch.allclose(table[4, 9, 0], torch.polar(torch.tensor(1.0), torch.tensor(4.0)))
    assert torch.allclose(table[4, 9, 16], torch.polar(torch.tensor(1.0), torch.tensor(9.0)))
    wide = target.rotary(torch.arange(1, 1025)[None], (32, 32))[0].view(32, 32, 32)
    assert torch.equal(wide[:SIDE, :SIDE], table), "512 px models use the same angles on a larger grid"


def test_the_unconditional_row_shares_the_text_mask(originals: dict[str, Path], image: Any) -> None:
    tokens, features, _ = image
    target = read_target(next(originals["t2i"].glob("t2i_*.pt")))
    short, long = (target.condition(features, torch.tensor([count]), True) for count in (4, 30))
    assert short.pad.tolist() == [0, 0] and short.prefix.shape[1] == 3 and long.prefix.shape[1] == 29
    both = target.condition(features.expand(2, -1, -1), torch.tensor([4, 30]), True)
    assert both.pad.tolist() == [26, 0, 26, 0] and both.rows == 2
    one, other = (teacher_logits(target, condition, tokens[:, :3])[1] for condition in (short, long))
    assert not torch.allclose(one, other), "the unconditional row knows how long the conditional text is"


def test_the_unconditional_row_reads_the_buffer(originals: dict[str, Path], image: Any) -> None:
    tokens, features, count = image
    target = read_target(next(originals["t2i"].glob("t2i_*.pt")))
    stored = layouts.llamagen_state()["cls_embedding.uncond_embedding"]
    assert torch.equal(dict(target.named_buffers())["caption.unconditional"], stored)
    conditioning = target.condition(features, torch.tensor([count]), True)
    direct = target.caption(stored[None, -count:], False)
    assert torch.allclose(conditioning.prefix[1], direct[0, :-1], atol=1e-6)
    assert torch.allclose(conditioning.start[1], direct[0, -1], atol=1e-6)
    before = teacher_logits(target, conditioning, tokens[:, :2])
    target.caption.unconditional[-count:] += 1.0
    after = teacher_logits(target, target.condition(features, torch.tensor([count]), True), tokens[:, :2])
    assert torch.equal(before[0], after[0]) and not torch.allclose(before[1], after[1])
    target.caption.unconditional[:-count] += 1.0
    again = teacher_logits(target, target.condition(features, torch.tensor([count]), True), tokens[:, :2])
    assert torch.equal(after, again), "slots left of the text are not read"


def test_without_guidance_there_is_no_unconditional_row(originals: dict[str, Path], image: Any) -> None:
    _, features, count = image
    target = read_target(next(originals["t2i"].glob("t2i_*.pt")))
    assert target.condition(features, torch.tensor([count]), False).prefix.shape[0] == 1
    classes = read_target(next(originals["c2i"].glob("c2i_*.pt")))
    assert classes.condition_on_classes(torch.tensor([1, 2]), False).start.shape[0] == 2
    guided = classes.condition_on_classes(torch.tensor([1, 2]), True)
    assert torch.equal(guided.start[2], classes.labels.weight[layouts.CLASSES]) and guided.prefix.shape == (4, 0, layouts.DIM)


# -- layout ----------------------------------------------------------------------------------------------------------

# Model, width, layers, hidden width, parameters in millions as published.
PUBLISHED = {
    "B": (768, 12, 2048, 111),
    "L": (1024, 24, 2816, 343),
    "XL": (1280, 36, 3584, 775),
    "XXL": (1536, 48, 4096, 1411),
    "3B": (3200, 24, 8704, 3089),
}


@pytest.mark.parametrize("size", PUBLISHED)
def test_a_skeleton_of_every_published_size(size: str) -> None:
    dim, layers, ffn, millions = PUBLISHED[size]
    heads = 32 if size == "3B" else dim // 64
    config = {"dim": dim, "layers": layers, "heads": heads, "ffn": ffn, "caption_dim": None, "classes": 1000}
    model = weights.skeleton(Part("LlamaGenTarget", config), LlamaGenTarget)
    count = sum(weight.numel() for weight in model.parameters())
    assert round(count / 1e6) == pytest.approx(millions, rel=0.01)
    assert all(weight.is_meta for weight in model.parameters())


def test_the_published_names_make_the_xl_model(tmp_path: Path) -> None:
    """Names and shapes of t2i_XL_stage2_512.pt: the whole map, checked without a number."""
    shapes = layouts.llamagen_shapes("t2i", dim=1280, layers=36, ffn=3584)
    shapes["tok_embeddings.weight"] = shapes["output.weight"] = (16384, 1280)
    shapes["cls_embedding.uncond_embedding"] = (120, 2048)
    shapes["cls_embedding.cap_proj.fc1.weight"] = (1280, 2048)
    path = tmp_path / "t2i_XL_stage2_512.pt"
    torch.save({"model": {name: torch.zeros(1).expand(shape) for name, shape in shapes.items()}}, path)
    found = recognise(Source(path))
    assert found is not None and found.defaults["grids"] == [[32, 32]]
    weights.check(found, loading.part_class)
    part = found.parts["target"]
    assert part.config["heads"] == 20 and part.config["ffn"] == 3584
    assert {key for recipe in part.weights.values() for key in recipe.keys} == set(shapes)
    assert sum(weight.numel() for weight in weights.skeleton(part, LlamaGenTarget).parameters()) == 777_678_080
    assert found.absent == {
        "codec": "peizesun/llamagen_t2i/vq_ds16_t2i.pt",
        "text_encoder": "google/flan-t5-xl",
        "tokenizer": "google/flan-t5-xl",
    }


@pytest.mark.parametrize("form", ["ddp", "deepspeed", "lightning", "bare", "legacy", "safetensors"])
def test_every_form_of_file_gives_the_same_model(tmp_path: Path, form: str) -> None:
    state = layouts.llamagen_state()
    path = layouts.save_state(state, tmp_path / "t2i_XL_stage1_256.pt", form)
    target = read_target(path)
    path.unlink()  # nothing stays mapped
    assert torch.equal(target.codes.weight, state["tok_embeddings.weight"])
    assert torch.equal(target.head.weight, state["output.weight"])
    assert torch.equal(target.backbone.blocks[1].attention.qkv.weight, state["layers.1.attention.wqkv.weight"])
    gate, up = target.backbone.blocks[0].gate_up.weight.chunk(2)
    assert torch.equal(gate, state["layers.0.feed_forward.w1.weight"]) and torch.equal(
        up, state["layers.0.feed_forward.w3.weight"]
    )
    assert not target.training


@pytest.mark.parametrize(
    ("name", "grids"),
    [
        ("t2i_XL_stage1_256", [[16, 16]]),
        ("t2i_XL_stage2_512", [[32, 32]]),
        ("c2i_L_384", [[24, 24]]),
        ("mine", [[16, 16], [24, 24], [32, 32]]),
    ],
)
def test_the_grid_comes_from_the_file_name(tmp_path: Path, name: str, grids: list[list[int]]) -> None:
    found = recognise(Source(layouts.save_state(layouts.llamagen_state(), tmp_path / f"{name}.pt", "ddp")))
    assert found is not None and found.defaults["grids"] == grids


def test_a_stored_rotary_table_tells_the_grid(tmp_path: Path) -> None:
    state = {**layouts.llamagen_state(), "freqs_cis": torch.zeros(120 + 24 * 24, 32, 2)}
    found = loading.recognise(Source(layouts.save_state(state, tmp_path / "mine.pt", "ddp")))
    assert found.defaults["grids"] == [[24, 24]]


def test_defaults_are_the_published_ones(originals: dict[str, Path]) -> None:
    text = loading.recognise(Source(originals["t2i"])).defaults
    assert (text["guidance_scale"], text["top_k"], text["top_p"], text["temperature"]) == (7.5, 1000, 1.0, 1.0)
    assert loading.recognise(Source(originals["c2i"])).defaults["top_k"] == 2000


def test_two_models_in_a_folder(originals: dict[str, Path], tmp_path: Path) -> None:
    for stage in ("t2i_XL_stage1_256", "t2i_XL_stage2_512"):
        layouts.save_state(layouts.llamagen_state(), tmp_path / f"{stage}.pt", "ddp")
    with pytest.raises(ValueError) as error:
        AutoregressivePipeline.from_pretrained(tmp_path)
    sentence(error, "several models", "t2i_XL_stage1_256.pt", "t2i_XL_stage2_512.pt", "one file")


# -- whole pipelines -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_every_method_draws_an_image(parts: dict[str, Any], variant: tuple[str, dict[str, Any]]) -> None:
    method, options = variant
    out = pipeline(parts, method)(["a red apple", "fox"], generator=generators(0, 1), **{**CALL, "output_type": "pt"}, **options)
    assert out.tokens.shape == (2, SMALL, SMALL) and 0 <= int(out.tokens.min()) and int(out.tokens.max()) < layouts.CODES
    assert out.images.shape == (2, 3, 96, 96) and float(out.images.std()) > 0
    assert all(trace.complete for trace in out.traces)


@pytest.mark.parametrize("variant", SEEDED, ids=name_of)
def test_seeded_is_plain_decoding_in_float64(parts: dict[str, Any], variant: tuple[str, dict[str, Any]]) -> None:
    method, options = variant
    calls = {"prompt": ["a red apple", "polar bear in blue forest"], **CALL}
    plain = pipeline(parts, "ar", torch.float64)(generator=generators(3, 4), **calls)
    drawn = pipeline(parts, method, torch.float64)(generator=generators(3, 4), **calls, **options)
    assert torch.equal(drawn.tokens, plain.tokens)
    assert len(plain.tokens.unique()) > 15


def test_a_long_and_a_short_text_do_not_touch_each_other(parts: dict[str, Any]) -> None:
    pipe = pipeline(parts, "sjd", torch.float64)
    prompts = ["fox", "a photo of the polar bear in the blue forest on a red apple"]
    both = pipe(prompts, generator=generators(0, 1), **CALL).tokens
    for row, prompt in enumerate(prompts):
        assert torch.equal(pipe(prompt, generator=generators(row), **CALL).tokens[0], both[row])


def test_the_text_encoder_is_transformers(parts: dict[str, Any], originals: dict[str, Path]) -> None:
    from transformers import AutoTokenizer, T5ForConditionalGeneration

    place = originals["t2i"] / "t5-ckpt" / "flan-t5-xl"
    model, ids = T5ForConditionalGeneration.from_pretrained(place), AutoTokenizer.from_pretrained(place)("a red apple")
    wanted = model.encoder(torch.tensor([ids["input_ids"]])).last_hidden_state[0]
    target = parts["target"]
    conditioning = target.encode(parts, ["a red apple"], None, False, (16, 16))
    assert len(wanted) == 4 and conditioning.prefix.shape[1] == 3
    assert torch.allclose(conditioning.start[0], target.caption(wanted[None], False)[0, -1], atol=1e-5)


def test_classes(originals: dict[str, Path]) -> None:
    pipe = SJDPipeline.from_pretrained(originals["c2i"])
    pipe.set_progress_bar_config(disable=True)
    out = pipe(["3", "6"], generator=generators(0, 0), **CALL)
    assert out.tokens.shape == (2, SIDE, SIDE) and not torch.equal(out.tokens[0], out.tokens[1])
    assert pipe.text_encoder is None and isinstance(pipe.tokenizer, ClassTokenizer)
    for prompt in ("7", "-1", "fox", "", "1.5"):
        with pytest.raises(ValueError) as error:
            pipe(prompt, **CALL)
        sentence(error, f"{prompt!r} is no class", "from 0 to 6")


def test_class_names(tmp_path: Path) -> None:
    ClassTokenizer(3, ["Tench", "goldfish", "shark"]).save_pretrained(tmp_path)
    again = ClassTokenizer.from_pretrained(tmp_path)
    assert again(["tench", "2", " Goldfish "]).tolist() == [0, 2, 1]
    (tmp_path / "classes.json").write_text("[]")
    with pytest.raises(ValueError) as error:
        ClassTokenizer.from_pretrained(tmp_path)
    sentence(error, "classes.json", "class table")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(originals: dict[str, Path], dtype: torch.dtype) -> None:
    pipe = SJDPipeline.from_pretrained(originals["t2i"], torch_dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    assert pipe.target.dtype == pipe.codec.dtype == dtype
    pipe.register_to_config(defaults={**pipe.config.defaults, "grids": [[4, 4]]})
    out = pipe("fox", generator=generators(0), **{**CALL, "output_type": "np"})
    assert out.traces[0].complete and np.isfinite(out.images).all() and out.images.shape == (1, 64, 64, 3)


def test_t5_keeps_what_overflows_in_float16_wide(originals: dict[str, Path]) -> None:
    pipe = SJDPipeline.from_pretrained(originals["t2i"], torch_dtype=torch.float16)
    kinds = {name.split(".")[-2]: weight.dtype for name, weight in pipe.text_encoder.named_parameters()}
    assert kinds["wo"] == torch.float32 and kinds["wi_0"] == torch.float16


def test_round_trip_through_save_pretrained(originals: dict[str, Path], tmp_path: Path) -> None:
    for kind, prompt in (("t2i", "fox"), ("c2i", "2")):
        pipe = SJDPipeline.from_pretrained(originals[kind])
        pipe.save_pretrained(tmp_path / kind)
        index = json.loads((tmp_path / kind / "model_index.json").read_text())
        assert index["target"] == ["foredraft.models.llamagen", "LlamaGenTarget"]
        assert index.get("text_encoder") == (["transformers", "T5EncoderModel"] if kind == "t2i" else None)
        again = SJDPipeline.from_pretrained(tmp_path / kind)
        for run in (pipe, again):
            run.set_progress_bar_config(disable=True)
            run.register_to_config(defaults={**run.config.defaults, "grids": [[4, 4]]})
        assert torch.equal(
            again(prompt, generator=generators(0), **CALL).tokens, pipe(prompt, generator=generators(0), **CALL).tokens
        )


# -- prompts ---------------------------------------------------------------------------------------------------------


def test_captions_are_cleaned_as_in_training() -> None:
    assert clean_caption("  A RED  apple ") == "a red apple"
    pytest.importorskip("ftfy"), pytest.importorskip("bs4")
    assert clean_caption("see https://example.com/a.png <b>A fox</b> -- cat") == "see a fox - cat"
    assert clean_caption("photo.jpg of a fox") == "of a fox"


def test_captions_without_the_cleaning_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert clean_caption("  A RED\n apple ") == "a red apple"


def test_prompts_that_cannot_be_drawn(parts: dict[str, Any]) -> None:
    pipe = pipeline(parts, "ar")
    for prompt in ("", "  "):
        with pytest.raises(ValueError) as error:
            pipe(prompt, **CALL)
        sentence(error, "prompt is empty")
    with pytest.raises(ValueError) as error:
        pipe("fox " * 120, **CALL)
    sentence(error, "121 tokens", "at most 120", "shorten")
    with pytest.raises(ValueError) as error:
        pipe("fox", negative_prompt="cat", **CALL)
    sentence(error, "LlamaGen has no negative prompt")


def test_components_of_other_models(parts: dict[str, Any]) -> None:
    from transformers import T5Config, T5EncoderModel

    wide = T5EncoderModel(T5Config(d_model=48, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=24))
    for changed, words in (
        ({"text_encoder": None}, "has no text encoder"),
        ({"text_encoder": wide}, "48 features and the model reads 32"),
        ({"tokenizer": ClassTokenizer(7)}, "no text encoder"),
    ):
        with pytest.raises(ValueError) as error:
            pipeline({**parts, **changed}, "ar")("fox", **CALL)
        sentence(error, words)
