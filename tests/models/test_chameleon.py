"""Lumina-mGPT, Anole and Chameleon against transformers' own classes, and what is peculiar to each."""

from __future__ import annotations

import json
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
from foredraft.models.chameleon import ChameleonTarget, image_ids
from foredraft.models.loading import load_part
from foredraft.models.target import visible, visible_count
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.chameleon.modeling_chameleon import ChameleonImageVocabularyMapping

from ..tiny import SEEDED, VARIANTS, build_pipeline, codes, generators, lively_head, name_of, sentence
from . import peers

PROMPTS = ["a fox", "two grey birds on a wire", "x"]
TABLE = peers.chameleon_vocabulary()
CODES = image_ids(TABLE)
START, ROW_END, TURN = TABLE["<racm3:break>"], TABLE["<reserved08799>"], TABLE["<reserved08706>"]
GRID = {"lumina": (4, 6), "anole": (5, 4)}
DEFAULTS = {"lumina": {"grids": [[4, 6], [6, 2], [2, 8]]}, "anole": {"grids": [[5, 4]]}}


@pytest.fixture(scope="module")
def peer() -> Any:
    """transformers' model."""
    return peers.chameleon()


@pytest.fixture(scope="module")
def folder(peer: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`folder(kind)`: the model in Lumina-mGPT's or in Anole's layout."""
    root = tmp_path_factory.mktemp("chameleon")
    peers.save_lumina(peer, root / "lumina")
    peers.save_anole(peer, root / "anole")
    return lambda kind: root / kind


@pytest.fixture(scope="module")
def pipe(folder: Callable[[str], Path]) -> Callable[..., Any]:
    """`pipe(kind, method, dtype=None)`: a pipeline of small pictures; the draft is the target's first layer."""

    @cache
    def parts(kind: str) -> dict[str, Any]:
        loaded = SJDPipeline.from_pretrained(folder(kind))
        target = loaded.target
        draft = ChameleonTarget(**{**arguments(target), "layers": 1}).eval()
        draft.load_state_dict({name: target.state_dict()[name].clone() for name in draft.state_dict()})
        window = {"cpu": 6, "cuda": 6}
        defaults = {**loaded.config.defaults, **DEFAULTS[kind], "top_k": 15, "top_p": 1.0, "window": window}
        return {**loaded.components, "draft_model": draft, "draft_head": lively_head(target), "defaults": defaults}

    @cache
    def made(kind: str, method: str, dtype: torch.dtype | None = None) -> Any:
        return build_pipeline(parts(kind), method, dtype)

    return made


def arguments(target: Any) -> dict[str, Any]:
    """What the target was made with."""
    return {name: value for name, value in target.config.items() if not name.startswith("_")}


def picture(grid: tuple[int, int], rows: int = 1) -> Tensor:
    """Random codes [B, h, w]."""
    return torch.randint(peers.CHAMELEON_CODES, (rows, *grid), generator=torch.Generator().manual_seed(3))


def words(text: str) -> list[int]:
    """Ids of a text."""
    return peers.chameleon_tokenizer()(text, add_special_tokens=False)["input_ids"]


def contexts(kind: str, prompt: str, grid: tuple[int, int]) -> tuple[list[int], list[int]]:
    """Ids before the first code, conditional and unconditional, written down by hand."""
    if kind == "anole":
        return [0, *words(prompt), TURN, START], [0, START]
    size = [TABLE[f"<reserved{8800 + side // 2:05d}>"] for side in grid]
    text = f"Generate an image of {16 * grid[1]}x{16 * grid[0]} according to the following prompt:\n{prompt}"
    return [0, *words(text), TURN, START, *size], [START, *size]


def image_tokens(kind: str, image: Tensor) -> list[int]:
    """Vocabulary ids of a picture [h, w]: rows of codes, with row ends in Lumina-mGPT."""
    end = [ROW_END] if kind == "lumina" else []
    return [token for row in image.tolist() for token in [*(CODES[code] for code in row), *end]]


@torch.no_grad()
def by_transformers(model: Any, context: list[int], image: list[int]) -> Tensor:
    """Logits of the codes at every image token, before the mask that transformers puts on them: [N, V]."""
    hidden = model.model(input_ids=torch.tensor([context + image])).last_hidden_state[0]
    return model.lm_head(hidden[len(context) - 1 : -1])[:, CODES]


def both(model: Any, target: Any, kind: str, prompts: list[str], grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Our cached logits [2B, N, V] and transformers', along one random picture per prompt."""
    images, lattice = picture(grid, len(prompts)), target.lattice(grid)
    sequence_tokens = torch.nn.functional.pad(images, (0, lattice[1] - grid[1])).flatten(1)
    conditioning = target.encode({"tokenizer": peers.chameleon_tokenizer()}, prompts, None, True, grid)
    ours = peers.along(target, target.begin(conditioning, lattice, Sampling(guidance_scale=4.0), 41), sequence_tokens)
    pairs = [contexts(kind, prompt, grid) for prompt in prompts]
    rows = [(pairs[row][side], image_tokens(kind, images[row])) for side in (0, 1) for row in range(len(prompts))]
    theirs = torch.stack([by_transformers(model, context, image) for context, image in rows])
    # A row end that follows what was just committed is appended without a forward: nobody asks what the model thinks of it.
    skipped, forced = ours.isnan().any(-1), target.forced(lattice)
    assert not skipped.any() or (forced is not None and not skipped[:, forced < 0].any())
    return torch.where(skipped[..., None], theirs, ours), theirs


@pytest.mark.parametrize(
    ("kind", "grid"), [("lumina", (48, 48)), ("lumina", (12, 40)), ("anole", (32, 32))], ids=["lumina", "wide", "anole"]
)
def test_logits_equal_transformers_over_a_full_picture(
    peer: Any, folder: Callable[[str], Path], kind: str, grid: tuple[int, int]
) -> None:
    """The whole picture with guidance; the unconditional rows have a context of their own."""
    target = SJDPipeline.from_pretrained(folder(kind)).target
    ours, theirs = both(peer, target, kind, PROMPTS[1:2], grid)
    assert ours.shape[1] == grid[0] * (grid[1] + (kind == "lumina"))
    assert peers.largest_difference(ours, theirs) < 1e-4
    assert peers.largest_difference(guide(ours, 4.0), guide(theirs, 4.0)) < 1e-4


@pytest.mark.parametrize("kind", ["lumina", "anole"])
def test_logits_equal_transformers_in_a_ragged_batch(peer: Any, folder: Callable[[str], Path], kind: str) -> None:
    ours, theirs = both(peer, SJDPipeline.from_pretrained(folder(kind)).target, kind, PROMPTS, (6, 10))
    assert peers.largest_difference(ours, theirs) < 1e-4


@pytest.mark.parametrize(("swin", "kv_heads"), [(False, 2), (True, 2)], ids=["grouped", "post-norm"])
def test_logits_equal_transformers_for_the_30b_anatomy(tmp_path: Path, swin: bool, kv_heads: int) -> None:
    model = peers.chameleon(swin, kv_heads)
    target = SJDPipeline.from_pretrained(peers.save_lumina(model, tmp_path)).target
    ours, theirs = both(model, target, "lumina", PROMPTS[:1], (6, 10))
    assert peers.largest_difference(ours, theirs) < 1e-4


@pytest.mark.parametrize("change", ["q_norm", "k_bias", "order", "row_end", "size", "turn", "rotary"])
def test_the_comparison_notices_a_difference(peer: Any, folder: Callable[[str], Path], change: str) -> None:
    """Negative control: every peculiarity matters by far more than the tolerance."""
    target = SJDPipeline.from_pretrained(folder("lumina")).target
    norms = target.backbone.blocks[1].attention
    with torch.no_grad():
        if change == "q_norm":
            norms.q_norm.weight.copy_(norms.q_norm.weight.roll(1, 0))
        elif change == "k_bias":
            norms.k_norm.bias.zero_()
        elif change == "order":
            target.codes.weight.copy_(target.word_table.weight[4 : 4 + peers.CHAMELEON_CODES])
        elif change == "row_end":
            target.register_to_config(row_end_id=ROW_END + 1)
        elif change == "size":
            target.register_to_config(size_ids=target.config.size_ids[1:])
        elif change == "turn":
            target.register_to_config(turn_id=TURN + 1)
        else:
            target.rope_base = 10000.0
    ours, theirs = both(peer, target, "lumina", PROMPTS[:1], (4, 6))
    assert (ours - theirs).abs().max() > 1e-2


def test_codes_are_ids_of_the_vocabulary(peer: Any, pipe: Callable[..., Any]) -> None:
    mapping = ChameleonImageVocabularyMapping(TABLE)
    assert CODES == [mapping.img2bpe[code] for code in range(peers.CHAMELEON_CODES)]
    assert CODES != sorted(CODES), "their order is not the order of the ids"
    target = pipe("lumina", "ar").target
    tokens = torch.arange(peers.CHAMELEON_CODES)[None]
    assert torch.equal(target.embed(tokens), peer.model.embed_tokens(torch.tensor([CODES])))
    assert torch.equal(target.head.weight, peer.lm_head.weight[CODES])


@pytest.mark.parametrize("table", [{}, {"IMGIMGAZ": 4, "IMGIMGCZ": 5}, {"IMGIMGAZ": 4, "IMGIMGXZ": 5}])
def test_a_vocabulary_without_codes_is_refused(table: dict[str, int]) -> None:
    with pytest.raises(ValueError) as error:
        image_ids(table)
    sentence(error, "another model")


@pytest.mark.parametrize("rows", [1, 2])
def test_one_qk_norm_for_several_heads(peer: Any, tmp_path: Path, rows: int) -> None:
    """Published files have one row of gains for each part the heads were trained in; transformers' class has one per head."""
    place = peers.save_lumina(peer, tmp_path)
    state = load_file(place / "model.safetensors")
    for name in [name for name in state if "_norm." in name and "self_attn" in name]:
        state[name] = state[name][:rows].clone()
    save_file(state, place / "model.safetensors")
    loaded = SJDPipeline.from_pretrained(place).target
    model = peers.chameleon()
    with torch.no_grad():
        for layer in model.model.layers:
            for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                norm.weight.copy_(norm.weight[:rows].repeat_interleave(4 // rows, 0))
                norm.bias.copy_(norm.bias[:rows].repeat_interleave(4 // rows, 0))
    ours, theirs = both(model, loaded, "lumina", PROMPTS[:1], (4, 6))
    assert peers.largest_difference(ours, theirs) < 1e-4


@pytest.mark.parametrize(("grid", "names"), [((4, 6), (8802, 8803)), ((12, 2), (8806, 8801))])
def test_sizes_are_named_height_first(pipe: Callable[..., Any], grid: tuple[int, int], names: tuple[int, int]) -> None:
    target, tokenizer = pipe("lumina", "ar").target, peers.chameleon_tokenizer()
    ids = target.prompt_ids(tokenizer, "a fox", grid)
    assert ids[-3:] == [START, *(TABLE[f"<reserved{name:05d}>"] for name in names)]
    assert ids[0] == 0 and ids[-4] == TURN and f"{16 * grid[1]}x{16 * grid[0]} according" in tokenizer.decode(ids)


def test_the_unconditional_context_starts_again(pipe: Callable[..., Any]) -> None:
    """Lumina-mGPT's begins at the image start, Anole's is begin of text and image start; neither holds a word of the prompt."""
    for kind, length in (("lumina", 3), ("anole", 2)):
        target = pipe(kind, "ar").target
        made = target.encode({"tokenizer": peers.chameleon_tokenizer()}, PROMPTS, None, True, GRID[kind])
        slots = made.prefix.shape[1]
        assert (slots - made.pad[3:] + 1).tolist() == [length] * 3
        first, second = contexts(kind, PROMPTS[0], GRID[kind])[1][:2]
        assert torch.equal(made.prefix[3, slots - length + 1], target.word_table.weight[first])
        assert torch.equal(made.start[3], target.word_table.weight[contexts(kind, "", GRID[kind])[1][-1]]) and second is not None


@pytest.mark.parametrize("grid", [(4, 6), (6, 2), (2, 8)])
def test_row_ends_are_forced_and_cost_no_forward(pipe: Callable[..., Any], grid: tuple[int, int]) -> None:
    seen: list[tuple[int, ...]] = []

    def watch(_pipe: Any, _round: int, count: int, tensors: dict[str, Tensor]) -> None:
        seen.append((count, *tensors["tokens"].shape, int(tensors["length"].max())))

    height, width = grid
    call = {"height": 16 * height, "width": 16 * width, "output_type": "pt"}
    out = pipe("lumina", "ar")(PROMPTS[:2], callback_on_step_end=watch, **call)
    assert out.tokens.shape == (2, *grid) and out.images.shape == (2, 3, 16 * height, 16 * width)
    assert [trace.target_forwards for trace in out.traces] == [height * width] * 2
    assert all(trace.tokens == height * width and trace.grid == grid and trace.complete for trace in out.traces)
    assert seen[-1] == (height * width, 2, height * width, height * width) and seen[0][0] == 1
    assert [count for count, *_ in seen] == list(range(1, height * width + 1))
    sjd = pipe("lumina", "sjd")(PROMPTS[:2], **call)
    assert all(trace.target_forwards <= height * width and trace.complete for trace in sjd.traces)
    assert sjd.traces[0].heatmap(None).size[0] > 0


def test_row_ends_are_in_the_sequence(pipe: Callable[..., Any]) -> None:
    target = pipe("lumina", "ar").target
    assert target.lattice((4, 6)) == (4, 7)
    forced = target.forced((4, 7))
    assert forced.view(4, 7)[:, -1].tolist() == [0] * 4 and (forced.view(4, 7)[:, :-1] == -1).all()
    columns = torch.arange(1, 29)[None]
    x = target.embed_at(torch.full_like(columns, 3), columns, (4, 7))[0].view(4, 7, -1)
    assert torch.equal(x[:, -1], target.word_table.weight[ROW_END].expand(4, -1))
    assert torch.equal(x[:, :-1], target.codes.weight[3].expand(4, 6, -1))


def test_anole_has_no_row_ends(pipe: Callable[..., Any], folder: Callable[[str], Path]) -> None:
    target = pipe("anole", "ar").target
    assert target.forced((5, 4)) is None and target.lattice((5, 4)) == (5, 4) and target.config.size_ids is None
    defaults = SJDPipeline.from_pretrained(folder("anole")).config.defaults
    assert defaults["grids"] == [[32, 32]] and (defaults["temperature"], defaults["top_p"]) == (0.7, 0.9)


def test_a_negative_prompt_takes_the_place_of_the_unconditional_row(pipe: Callable[..., Any]) -> None:
    target, tokenizer = pipe("lumina", "ar").target, peers.chameleon_tokenizer()
    made = target.encode({"tokenizer": tokenizer}, PROMPTS, ["blurred", "", "x"], True, (4, 6))
    lengths = (made.prefix.shape[1] - made.pad[3:] + 1).tolist()
    assert lengths == [len(target.prompt_ids(tokenizer, text, (4, 6))) if text else 3 for text in ("blurred", "", "x")]
    drawn = codes(pipe("lumina", "sjd", torch.float64), "a fox", negative_prompt="blurred")
    assert torch.equal(drawn, codes(pipe("lumina", "ar", torch.float64), "a fox", negative_prompt="blurred"))
    assert not torch.equal(drawn, codes(pipe("lumina", "ar", torch.float64), "a fox"))


def test_an_interrupted_picture_ends_where_it_was(pipe: Callable[..., Any]) -> None:
    def stop(made: Any, _round: int, count: int, _tensors: dict[str, Tensor]) -> None:
        made._interrupt = count >= 8

    out = pipe("lumina", "ar")("a fox", callback_on_step_end=stop, output_type="latent")
    assert not out.traces[0].complete and out.traces[0].tokens == 8
    assert (out.tokens.flatten()[8:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_draws(pipe: Callable[..., Any], dtype: torch.dtype) -> None:
    out = pipe("lumina", "sjd", dtype)(PROMPTS, output_type="pt")
    assert out.images.isfinite().all() and out.tokens.shape == (3, 4, 6)


def test_visible_cells_of_a_lattice() -> None:
    tokens = torch.arange(2 * 3 * 5).view(2, 15)
    assert visible(tokens, (3, 5), (3, 4)).flatten(1)[0].tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13]
    assert visible_count(torch.arange(16), (3, 5), (3, 4)).tolist() == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 9, 10, 11, 12, 12]
    assert visible_count(torch.arange(7), (2, 3), (2, 3)).tolist() == list(range(7))


@pytest.mark.parametrize("kind", ["lumina", "anole"])
@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_every_method_draws_a_picture(pipe: Callable[..., Any], kind: str, variant: tuple[str, dict[str, Any]]) -> None:
    method, options = variant
    out = pipe(kind, method)(PROMPTS, generator=torch.Generator().manual_seed(1), output_type="pt", **options)
    height, width = GRID[kind]
    assert out.images.shape == (3, 3, 16 * height, 16 * width) and out.tokens.shape == (3, height, width)
    assert 0 <= int(out.tokens.min()) and int(out.tokens.max()) < peers.CHAMELEON_CODES
    assert all(trace.complete and trace.tokens == height * width for trace in out.traces)
    assert all(trace.target_forwards <= height * width for trace in out.traces)


@pytest.mark.parametrize("kind", ["lumina", "anole"])
@pytest.mark.parametrize("variant", SEEDED, ids=name_of)
def test_seeded_equals_plain_decoding(pipe: Callable[..., Any], kind: str, variant: tuple[str, dict[str, Any]]) -> None:
    method, options = variant
    plain = codes(pipe(kind, "ar", torch.float64), PROMPTS, 7, num_images_per_prompt=2)
    assert torch.equal(codes(pipe(kind, method, torch.float64), PROMPTS, 7, num_images_per_prompt=2, **options), plain)


def test_a_published_head_continues_the_features(peer: Any, folder: Callable[[str], Path], tmp_path: Path) -> None:
    """LANTERN's layout for Anole: a decoder layer over fc([embedding; feature]), with a frozen copy of the embedding."""
    layer, fc = peer.model.layers[1], torch.nn.Linear(64, 32)
    state = {f"layers.0.{name}": tensor for name, tensor in layer.state_dict().items()}
    state |= {f"fc.{name}": tensor for name, tensor in fc.state_dict().items()}
    config = {**peer.config.to_dict(), "num_hidden_layers": 1}
    peers.write_pickles({**state, "embed_tokens.weight": peer.model.embed_tokens.weight.data}, tmp_path, config)
    head = load_part(tmp_path, "draft_head", torch.float32)
    target = SJDPipeline.from_pretrained(folder("anole")).target
    head.check(target)
    assert head.codes is None and head.config.text == "prompt"
    x, features = torch.randn(2, 1, 9, 32, generator=torch.Generator().manual_seed(0))
    causal = torch.full((9, 9), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        positions = peer.model.rotary_emb(x, torch.arange(9)[None])
        joined = fc(torch.cat((x, features), -1))
        theirs = layer(joined, attention_mask=causal, position_embeddings=positions)[0]
        ours = head(x, features, target.rotary(torch.arange(9)[None], (3, 3)), causal)
    assert peers.largest_difference(ours, theirs) < 1e-4


@pytest.mark.parametrize("kind", ["lumina", "anole"])
def test_a_row_alone_is_the_row_of_the_batch(pipe: Callable[..., Any], kind: str) -> None:
    together = codes(pipe(kind, "sjd", torch.float64), PROMPTS, generator=generators(3, 4, 5))
    for row, seed in enumerate((3, 4, 5)):
        assert torch.equal(codes(pipe(kind, "sjd", torch.float64), PROMPTS[row], generator=generators(seed))[0], together[row])


def test_the_original_layout_is_the_same_model(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Meta's folder, as Anole is published too: found from its root and from models/7b."""
    model = peers.chameleon()
    with torch.no_grad():
        for layer in model.model.layers:
            for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                norm.weight.copy_(norm.weight[:1].expand(4, -1))
                norm.bias.copy_(norm.bias[:1].expand(4, -1))
    first = SJDPipeline.from_pretrained(peers.save_anole(model, tmp_path / "hf"))
    place = peers.save_meta(model, tmp_path / "meta")
    for root in (place, place / "models" / "7b"):
        second = SJDPipeline.from_pretrained(root)
        for name in ("target", "codec"):
            one, other = getattr(first, name).state_dict(), getattr(second, name).state_dict()
            assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
        assert arguments(first.target) == arguments(second.target) and first.config.defaults == second.config.defaults
        assert second.tokenizer("fox<reserved08706>", add_special_tokens=False)["input_ids"] == [*words("fox"), TURN]


def test_the_image_tokenizer_may_come_from_elsewhere(peer: Any, folder: Callable[[str], Path], tmp_path: Path) -> None:
    place = peers.save_transformers(peer, peers.chameleon_tokenizer(), tmp_path / "plain")
    wanted = peers.chameleon_codec().state_dict()
    for source in (peers.write_vqgan(tmp_path / "vq"), folder("anole")):
        codec = SJDPipeline.from_pretrained(place, codec=source).codec
        assert all(torch.equal(wanted[name], tensor) for name, tensor in codec.state_dict().items())
    with pytest.raises(ValueError) as error:
        SJDPipeline.from_pretrained(place, codec=place)
    sentence(error, "no decoder", "vqgan")


def test_a_saved_pipeline_is_the_same_pipeline(pipe: Callable[..., Any], tmp_path: Path) -> None:
    first = pipe("lumina", "speculative")
    first.save_pretrained(tmp_path)
    again = SpeculativePipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert torch.equal(codes(again, PROMPTS, 3, height=96, width=32), codes(first, PROMPTS, 3, height=96, width=32))


def test_shapes_of_lumina(peer: Any, folder: Callable[[str], Path], tmp_path: Path) -> None:
    """The published rule: every size in patches of 32 pixels along the hyperbola of the trained area, sides at most 4 : 1."""

    def published(patches: int) -> set[tuple[int, int]]:
        found, wide, high = set(), patches, 1
        while wide > 0:
            if max(wide, high) / min(wide, high) <= 4.0:
                found.add((2 * high, 2 * wide))
            if (high + 1) * wide <= patches:
                high += 1
            else:
                wide -= 1
        return found

    cached = "models--Alpha-VLLM--Lumina-mGPT-7B-512/snapshots/768abc"
    for name, side in (("Lumina-mGPT-7B-768-Omni", 768), ("Lumina-mGPT-7B-1024", 1024), (cached, 512)):
        place = tmp_path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(folder("lumina"))
        grids = SJDPipeline.from_pretrained(place).config.defaults["grids"]
        assert grids[0] == [side // 16] * 2 and {tuple(grid) for grid in grids} == published((side // 32) ** 2)
        assert len(grids) == len({tuple(grid) for grid in grids})


@pytest.mark.parametrize("kind", ["lumina", "anole"])
def test_skeletons_of_the_published_sizes(kind: str, tmp_path: Path) -> None:
    """On the meta device: 7B as published; what is not kept are the output rows of words and the tokenizer's encoder."""
    letters = str.maketrans("0123456789", "ABCDEFGHIJ")
    names = ["<s>", "<pad>", "</s>", "<unk>", *(f"IMGIMG{str(code).translate(letters)}Z" for code in range(8192)), "<eoss>"]
    names += ["<racm3:break>", *(f"<reserved{number:05d}>" for number in range(8194, 8865) if number != 8707), "<image>"]
    vocabulary = peers.numbered(names)
    vocabulary |= {f"<reserved{number:05d}>": number + 4 for number in range(8194, 8865)}
    config = transformers.ChameleonConfig(vocabulary_map=vocabulary, vq_config=transformers.ChameleonVQVAEConfig())
    with init_empty_weights():
        model = transformers.ChameleonForConditionalGeneration(config)
    published = sum(weight.numel() for name, weight in model.named_parameters() if ".vqmodel." not in name)
    assert published == pytest.approx(7.01e9, rel=0.002)
    if kind == "lumina":
        del model.model.vqmodel
    assembly = peers.assembly_of(model, config, "chameleon", tmp_path)
    count = peers.parameters(assembly.parts["target"])
    assert count == published - (65536 - 8192) * 4096 + 8192 * 4096, "without words' output rows, with the codes' rows apart"
    options = assembly.parts["target"].config
    assert (options["start_id"], options["turn_id"]) == (8197, 8710)
    assert options.get("row_end_id") == (8803 if kind == "lumina" else None)
    if kind == "lumina":
        assert options["size_ids"][:2] == [8805, 8806] and options["size_ids"][23] == 8804 + 24


def test_bad_input(pipe: Callable[..., Any], folder: Callable[[str], Path], tmp_path: Path) -> None:
    sjd = pipe("lumina", "sjd")
    with pytest.raises(ValueError) as error:
        sjd("")
    sentence(error, "the prompt is empty")
    with pytest.raises(ValueError) as error:
        sjd("x" * 5000)
    sentence(error, "4068", "28")
    with pytest.raises(ValueError) as error:
        sjd.target.lattice((3, 6))
    sentence(error, "32", "48 x 96")
    with pytest.raises(ValueError) as error:
        sjd.target.lattice((50, 2))
    sentence(error, "up to 768")
    with pytest.raises(ValueError) as error:
        SJDPipeline.from_pretrained(folder("lumina"))("fox", height=16, width=16)
    sentence(error, "sizes, nearest are")
    config = json.loads((folder("lumina") / "config.json").read_text(encoding="utf-8"))
    config["rope_parameters"] = {"rope_type": "yarn", "factor": 4.0}
    place = peers.save_lumina(peers.chameleon(), tmp_path)
    (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ValueError) as error:
        SJDPipeline.from_pretrained(place)
    sentence(error, "yarn")
