"""Janus-Pro against transformers' own classes, and what is peculiar to it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import init_empty_weights
from foredraft import SJDPipeline, SpeculativePipeline
from foredraft.decoding.sampling import Sampling, guide
from foredraft.models.janus import JanusTarget, prompt_ids, unconditional
from torch import Tensor

from ..tiny import SEEDED, VARIANTS, build_pipeline, codes, generators, lively_head, name_of, sentence
from . import peers

PROMPTS = ["a fox", "two grey birds on a wire", "x"]
DRAFT = {"layers": 1}


@pytest.fixture(scope="module")
def peer() -> Any:
    """transformers' model, 6 x 6 codes."""
    return peers.janus()


@pytest.fixture(scope="module")
def folder(peer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as transformers saves it."""
    return peers.save_transformers(peer, peers.janus_tokenizer(), tmp_path_factory.mktemp("janus"))


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Callable[..., Any]:
    """`pipe(method, dtype=None)`: a pipeline over the folder; the draft is the target's first layer."""
    loaded = SJDPipeline.from_pretrained(folder)
    target = loaded.target
    draft = JanusTarget(**{**{k: v for k, v in target.config.items() if not k.startswith("_")}, **DRAFT}).eval()
    draft.load_state_dict({name: target.state_dict()[name].clone() for name in draft.state_dict()})
    parts = {**loaded.components, "draft_model": draft, "draft_head": lively_head(target), "defaults": loaded.config.defaults}

    @cache
    def made(method: str, dtype: torch.dtype | None = None) -> Any:
        return build_pipeline(parts, method, dtype)

    return made


@torch.no_grad()
def drawn_by_transformers(model: Any, prompts: list[str], scale: float) -> tuple[Tensor, Tensor]:
    """A picture of transformers' own image loop: tokens [B, N], logits of its head, conditional rows first [2B, N, V]."""
    words = peers.janus_tokenizer()
    words.padding_side = "left"
    texts = [words.bos_token + f"<|User|>: {prompt}\n\n<|Assistant|>:<begin_of_image>" for prompt in prompts]
    inputs = words(texts, padding=True, return_tensors="pt", add_special_tokens=False)
    seen: list[Tensor] = []
    hook = model.model.generation_head.register_forward_hook(lambda _module, _inputs, output: seen.append(output.clone()))
    try:
        tokens = model.generate(
            inputs.input_ids,
            attention_mask=inputs.attention_mask,
            generation_mode="image",
            guidance_scale=scale,
            do_sample=True,
            top_k=0,
        )
    finally:
        hook.remove()
    return tokens, torch.stack(seen, 1)


def ours_along(target: Any, prompts: list[str], tokens: Tensor, grid: tuple[int, int], scale: float) -> Tensor:
    """Our cached logits for the same tokens [2B, N, V]."""
    conditioning = target.encode({"tokenizer": peers.janus_tokenizer()}, prompts, None, scale != 1.0, grid)
    return peers.along(target, target.begin(conditioning, grid, Sampling(guidance_scale=scale), 41), tokens)


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one", "ragged"])
def test_logits_equal_transformers_over_a_full_picture(tmp_path: Path, prompts: list[str]) -> None:
    """24 x 24 codes drawn by transformers' own loop, with guidance."""
    model = peers.janus(24)
    target = SJDPipeline.from_pretrained(peers.save_transformers(model, peers.janus_tokenizer(), tmp_path)).target
    torch.manual_seed(0)
    tokens, theirs = drawn_by_transformers(model, prompts, 5.0)
    assert tokens.shape == (len(prompts), 576) and len(tokens.unique()) > 20
    ours = ours_along(target, prompts, tokens, (24, 24), 5.0)
    assert peers.largest_difference(ours, theirs) < 1e-4
    assert peers.largest_difference(guide(ours, 5.0), guide(theirs, 5.0)) < 1e-4


@pytest.mark.parametrize("change", ["pad", "head", "aligner", "codes", "rotary"])
def test_the_comparison_notices_a_difference(peer: Any, folder: Path, change: str) -> None:
    """Negative control: each peculiarity matters by far more than the tolerance; the prompt's padding is attended to."""
    target = SJDPipeline.from_pretrained(folder).target
    torch.manual_seed(0)
    tokens, theirs = drawn_by_transformers(peer, PROMPTS[:1], 5.0)
    with torch.no_grad():
        if change == "pad":
            target.word_table.weight[2] = 0.0
        elif change == "head":
            target.head.project.bias.zero_()
        elif change == "aligner":
            target.aligner.others[0].bias.zero_()
        elif change == "codes":
            target.codes.weight.copy_(target.codes.weight.roll(1, 0))
        else:
            target.rope_base = 10000.0
    difference = (ours_along(target, PROMPTS[:1], tokens, (6, 6), 5.0) - theirs).abs()
    assert difference.max() > 1e-2
    if change == "pad":
        assert difference[0].max() < 1e-4, "only the unconditional row holds padding"


def test_codes_have_an_embedding_an_aligner_and_a_head_of_their_own(peer: Any, pipe: Callable[..., Any]) -> None:
    target = pipe("ar").target
    tokens = torch.arange(peers.JANUS_CODES)[None]
    hidden = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(target.embed(tokens), peer.prepare_embeddings_for_image_generation(tokens), atol=1e-6)
        assert torch.allclose(target.logits(hidden), peer.model.generation_head(hidden), atol=1e-5)
    assert target.embed(tokens).std() > 0.1


def test_the_unconditional_prompt_is_built_of_padding(pipe: Callable[..., Any]) -> None:
    words = peers.janus_tokenizer()
    ids = prompt_ids(words, " a fox ")
    assert words.convert_ids_to_tokens(ids)[:3] == ["<｜begin▁of▁sentence｜>", "<|User|>", ":"]
    assert words.decode(ids).endswith("a fox\n\n<|Assistant|>:<begin_of_image>")
    assert unconditional(ids, 2) == [ids[0], *[2] * (len(ids) - 2), ids[-1]]
    target = pipe("ar").target
    made = target.encode({"tokenizer": words}, PROMPTS, None, True, (6, 6))
    assert made.pad[:3].tolist() == made.pad[3:].tolist() and made.rows == 3, "as long as the prompt it stands for"
    assert torch.equal(made.start[0], target.word_table.weight[4]) and torch.equal(made.start[0], made.start[5])
    plain = target.encode({"tokenizer": words}, PROMPTS, ["", "bad", " "], True, (6, 6))
    assert torch.equal(made.prefix[3, -4:], plain.prefix[3, -4:]) and plain.pad[4] != made.pad[4]


@pytest.mark.parametrize("prefix", ["transformers", "original"])
def test_pixels_equal_transformers(peer: Any, folder: Path, tmp_path: Path, prefix: str) -> None:
    place = folder if prefix == "transformers" else original(peer, tmp_path)
    codec = SJDPipeline.from_pretrained(place).codec
    tokens = torch.randint(peers.JANUS_CODES, (2, 6, 6), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = peer.decode_image_tokens(tokens.flatten(1)).permute(0, 3, 1, 2)
    assert peers.largest_difference(codec.decode(tokens), theirs) < 1e-4
    assert codec.decode(tokens[:, :3, :5]).shape == (2, 3, 48, 80), "any grid"


def original(peer: Any, folder: Path, shards: int = 1) -> Path:
    """The checkpoint in the original repository's layout: pickles with its own names."""
    renamed = (
        (r"^model\.vqmodel\.(encoder|decoder)\.(?:up|down)\.(\d+)\.block\.", r"gen_vision_model.\1.conv_blocks.\2.res."),
        (r"^model\.vqmodel\.(encoder|decoder)\.(?:up|down)\.", r"gen_vision_model.\1.conv_blocks."),
        (r"^model\.vqmodel\.(.*)mid\.block_1", r"gen_vision_model.\1mid.0"),
        (r"^model\.vqmodel\.(.*)mid\.attn_1", r"gen_vision_model.\1mid.1"),
        (r"^model\.vqmodel\.(.*)mid\.block_2", r"gen_vision_model.\1mid.2"),
        (r"^model\.vqmodel\.", "gen_vision_model."),
        (r"^model\.generation_embeddings", "gen_embed"),
        (r"^model\.generation_aligner\.fc1", "gen_aligner.layers.0"),
        (r"^model\.generation_aligner\.hidden_layers\.0", "gen_aligner.layers.2"),
        (r"^model\.generation_head\.proj_out", "gen_head.output_mlp_projector"),
        (r"^model\.generation_head", "gen_head"),
        (r"^model\.language_model", "language_model.model"),
        (r"^lm_head", "language_model.lm_head"),
        (r"^model\.vision_model\.embeddings\.position_embedding\.weight", "vision_model.vision_tower.pos_embed"),
        (r"^model\.vision_model\.", "vision_model.vision_tower."),
        (r"^model\.aligner\.", "aligner."),
    )
    state = {}
    for name, tensor in peer.state_dict().items():
        new = next((re.sub(old, by, name) for old, by in renamed if re.search(old, name)), name)
        state[new] = tensor.clone()
    state["gen_vision_model.quantize.codebook_used"] = torch.zeros(4)
    text = peer.config.text_config
    config = {
        "model_type": "multi_modality",
        "architectures": ["MultiModalityCausalLM"],
        "vision_config": {"cls": "CLIPVisionTower", "model_type": "vision", "params": {"image_size": 96}},
        "language_config": {
            "model_type": "llama",
            "max_position_embeddings": 1024,
            "num_attention_heads": text.num_attention_heads,
            "rope_theta": 5000.0,
            "vocab_size": text.vocab_size,
        },
    }
    peers.write_pickles(state, folder, config, shards)
    peers.janus_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("shards", [1, 3])
def test_the_original_layout_is_the_same_model(peer: Any, folder: Path, tmp_path: Path, shards: int) -> None:
    first = SJDPipeline.from_pretrained(folder)
    second = SJDPipeline.from_pretrained(original(peer, tmp_path, shards))
    assert first.config.defaults == second.config.defaults
    assert first.config.defaults["grids"] == [[6, 6]] and first.config.defaults["guidance_scale"] == 5.0
    for name in ("target", "codec"):
        one, other = getattr(first, name).state_dict(), getattr(second, name).state_dict()
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    assert {k: v for k, v in first.target.config.items() if k[0] != "_"} == {
        k: v for k, v in second.target.config.items() if k[0] != "_"
    }


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_every_method_draws_a_picture(pipe: Callable[..., Any], variant: tuple[str, dict[str, Any]]) -> None:
    method, options = variant
    out = pipe(method)(PROMPTS, generator=torch.Generator().manual_seed(1), output_type="pt", **options)
    assert out.images.shape == (3, 3, 96, 96) and out.tokens.shape == (3, 6, 6)
    assert 0 <= int(out.tokens.min()) and int(out.tokens.max()) < peers.JANUS_CODES
    assert all(trace.complete and trace.tokens == 36 for trace in out.traces)


@pytest.mark.parametrize("variant", SEEDED, ids=name_of)
def test_seeded_equals_plain_decoding(pipe: Callable[..., Any], variant: tuple[str, dict[str, Any]]) -> None:
    method, options = variant
    call: dict[str, Any] = {"num_images_per_prompt": 2, "top_k": 20}
    plain = codes(pipe("ar", torch.float64), PROMPTS, 7, **call)
    assert torch.equal(codes(pipe(method, torch.float64), PROMPTS, 7, **call, **options), plain)


def test_a_row_alone_is_the_row_of_the_batch(pipe: Callable[..., Any]) -> None:
    together = codes(pipe("sjd", torch.float64), PROMPTS, generator=generators(3, 4, 5))
    for row, seed in enumerate((3, 4, 5)):
        assert torch.equal(codes(pipe("sjd", torch.float64), PROMPTS[row], generator=generators(seed))[0], together[row])


def test_guidance_of_one_runs_no_unconditional_rows(pipe: Callable[..., Any]) -> None:
    made = pipe("ar").target.encode({"tokenizer": peers.janus_tokenizer()}, PROMPTS, None, False, (6, 6))
    assert len(made.prefix) == 3
    assert codes(pipe("sjd"), "a fox", guidance_scale=1.0).shape == (1, 6, 6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_draws(pipe: Callable[..., Any], dtype: torch.dtype) -> None:
    out = pipe("sjd", dtype)(PROMPTS, output_type="pt")
    assert out.images.isfinite().all() and out.tokens.shape == (3, 6, 6)


def test_a_saved_pipeline_is_the_same_pipeline(pipe: Callable[..., Any], tmp_path: Path) -> None:
    first = pipe("speculative")
    first.save_pretrained(tmp_path)
    again = SpeculativePipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert torch.equal(codes(again, PROMPTS, 3), codes(first, PROMPTS, 3))


@pytest.mark.parametrize(
    ("sizes", "total"),
    [
        # Published totals: deepseek-ai/Janus-Pro-1B and -7B, by transformers' class.
        ({"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16}, 2.09e9),
        ({"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 30, "num_attention_heads": 32}, 7.42e9),
    ],
    ids=["1B", "7B"],
)
def test_skeletons_of_the_published_sizes(sizes: dict[str, int], total: float, tmp_path: Path) -> None:
    """On the meta device: every published tensor is ours or belongs to the understanding half, and every size fits."""
    width = sizes["hidden_size"]
    text = transformers.LlamaConfig(
        vocab_size=102400, max_position_embeddings=16384, num_key_value_heads=sizes["num_attention_heads"], **sizes
    )
    config = transformers.JanusConfig(
        text_config=text,
        vision_config=transformers.JanusVisionConfig(projection_dim=width),
        vq_config=transformers.JanusVQVAEConfig(projection_dim=width, image_token_embed_dim=width),
        tie_word_embeddings=False,
    )
    with init_empty_weights():
        model = transformers.JanusForConditionalGeneration(config)
    assert sum(weight.numel() for weight in model.parameters()) == pytest.approx(total, rel=0.01)
    assembly = peers.assembly_of(model, config, "janus", tmp_path)
    count = peers.parameters(assembly.parts["target"])
    model_parts = model.model
    used = (
        model_parts.language_model,
        model_parts.generation_embeddings,
        model_parts.generation_aligner,
        model_parts.generation_head,
    )
    assert count == sum(weight.numel() for part in used for weight in part.parameters())
    assert peers.parameters(assembly.parts["codec"]) == sum(weight.numel() for weight in model_parts.vqmodel.parameters())
    assert assembly.parts["target"].config["head_width"] == width


def test_bad_input(pipe: Callable[..., Any]) -> None:
    sjd = pipe("sjd")
    with pytest.raises(ValueError) as error:
        sjd(["a fox", "  "])
    sentence(error, "the prompt is empty")
    with pytest.raises(ValueError) as error:
        sjd("x" * 1000)
    sentence(error, "at most 988", "36")
    with pytest.raises(ValueError) as error:
        sjd("a fox", height=80)
    sentence(error, "96 x 96")
    with pytest.raises(ValueError) as error:
        sjd.target.encode({"tokenizer": peers.chameleon_tokenizer()}, ["fox"], None, True, (6, 6))
    sentence(error, "<begin_of_image>", "another model")
