"""The embedded family's target and word tokenizer, and the codec."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foredraft.decoding.sampling import Sampling
from foredraft.decoding.sequence import Sequence
from foredraft.decoding.tree import static_tree
from foredraft.decoding.types import Draft
from foredraft.models.codecs.vq import VQCodec
from foredraft.models.embedded import EmbeddedTarget, WordTokenizer
from torch import Tensor

from ..tiny import COLOURS, NAMES, VOCABULARY, sentence

GRID, COUNT = (3, 5), 15
# Unequal lengths, and one of full length so that nothing is trimmed away.
PROMPTS = ["fox", "red apple on blue", "polar bear on white fox cat fox"]
Pipe = Callable[..., Any]
# Accepted nodes, round by round, of the tree below: none, a root, a whole branch, others.
PATHS: tuple[list[int], ...] = ([], [1], [1, 4, 5], [0, 2], [1, 3], [0])


@pytest.fixture(scope="module")
def target(pipe: Pipe) -> EmbeddedTarget:
    """The tiny target in float64."""
    return pipe("sjd", torch.float64).target


@pytest.fixture(scope="module")
def ids(pipe: Pipe) -> Tensor:
    """PROMPTS as word ids."""
    return pipe("sjd").tokenizer(PROMPTS)


def truth(rows: int = len(PROMPTS)) -> Tensor:
    """Image tokens to decode along."""
    return torch.randint(VOCABULARY, (rows, COUNT), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def reference(target: EmbeddedTarget, ids: Tensor, negative: Tensor | None, tokens: Tensor, scale: float) -> Tensor:
    """log p [B, N, V] by an uncached forward and the formula of guidance, without the engine."""
    logits = target(ids, tokens, GRID)
    if scale != 1.0:
        free = target(torch.zeros_like(ids) if negative is None else negative, tokens, GRID)
        logits = free + scale * (logits - free)
    return logits.log_softmax(-1)


@torch.inference_mode()
def commit(sequence: Sequence, tokens: Tensor, accepted: Tensor, path: Tensor | None = None) -> None:
    """Commit accepted[b] + 1 tokens of each row."""
    sequence.commit(tokens, accepted + 1, accepted, path)
    sequence.refresh()


@pytest.mark.parametrize(("scale", "negative"), [(1.0, False), (2.5, False), (2.5, True)])
@pytest.mark.parametrize("width", [0, 1, 4, 20])
def test_cached_equals_uncached(target: EmbeddedTarget, ids: Tensor, width: int, scale: float, negative: bool) -> None:
    """Ragged prompts, ragged rows, drafts right and wrong: every row of every round is what a fresh forward says."""
    other = ids.roll(1, 0) if negative else None
    sampling = Sampling(guidance_scale=scale)
    sequence = target.begin(target.condition(ids, other, sampling.guided), GRID, sampling, width)
    assert sequence.cache is not None and sequence.cache.rows == (6 if scale != 1.0 else 3)
    full, dice, rounds = truth(), torch.Generator().manual_seed(5), 0
    while not sequence.done:
        place = sequence.length[:, None] - 1 + torch.arange(width + 1)
        right = full.gather(1, place.clamp(max=COUNT - 1))
        accepted = torch.randint(width + 1, (3,), generator=dice) if width else torch.zeros(3, dtype=torch.long)
        drafted = torch.where(torch.arange(width) < accepted[:, None], right[:, :width], (right[:, :width] + 1) % VOCABULARY)
        scores = target.score(sequence, Draft(drafted, valid=place[:, :width] < COUNT if width else None))
        tried = torch.nn.functional.pad(full, (0, width + 1)).scatter(1, place[:, :width], drafted)[:, :COUNT]
        expected = reference(target, ids, other, tried, scale)
        inside = (place < COUNT) & (sequence.length < sequence.limit)[:, None]
        wanted = expected.gather(1, place.clamp(max=COUNT - 1)[..., None].expand(-1, -1, VOCABULARY))
        assert torch.allclose(scores.log_p[inside], wanted[inside], atol=1e-10)
        assert torch.equal(scores.index[inside], place[inside])
        commit(sequence, right, accepted)
        rounds += 1
    assert torch.equal(sequence.tokens[:, 1:], full) and rounds >= COUNT / (width + 1)


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_cached_equals_uncached_in_a_tree(target: EmbeddedTarget, ids: Tensor, scale: float) -> None:
    """Every node of a tree is scored after its own ancestors, and the accepted path stays in the cache."""
    sampling, full = Sampling(guidance_scale=scale), truth()
    tree = static_tree([(0,), (1,), (0, 0), (1, 0), (1, 1), (1, 1, 0)], torch.device("cpu"))
    parents, nodes = tree.parents[0].tolist(), tree.parents.shape[1]
    sequence = target.begin(target.condition(ids, None, sampling.guided), GRID, sampling, nodes)
    for kept in PATHS:
        start = sequence.low - 1
        drafted = torch.randint(VOCABULARY, (3, nodes), generator=torch.Generator().manual_seed(start))
        for step, node in enumerate(kept):
            drafted[:, node] = full[:, start + step]
        scores = target.score(sequence, Draft(drafted, tree=tree))
        for node in range(-1, nodes):
            line = [] if node < 0 else [node]
            while line and parents[line[0]] >= 0:
                line.insert(0, parents[line[0]])
            if start + len(line) >= COUNT:  # past the end of the image
                continue
            tried = full.clone()
            for step, member in enumerate(line):
                tried[:, start + step] = drafted[:, member]
            expected = reference(target, ids, None, tried, scale)[:, start + len(line)]
            assert torch.allclose(scores.log_p[:, node + 1], expected, atol=1e-10), (kept, node)
        path = torch.full((3, tree.levels), -1)
        path[:, : len(kept)] = torch.tensor(kept, dtype=torch.long)
        commit(sequence, full[:, start : start + tree.levels + 1], torch.full((3,), len(kept)), path)
    assert sequence.low == 1 + sum(len(kept) + 1 for kept in PATHS)


def test_padding_is_never_read(target: EmbeddedTarget, ids: Tensor) -> None:
    """A prompt answers the same at every width, and a prompt of pads the same as no prompt."""
    tokens = truth()
    with torch.no_grad():
        wide = target(ids[:1], tokens[:1], GRID)
        assert torch.allclose(wide, target(ids[:1, -1:], tokens[:1], GRID), atol=1e-12)
        empty = target(torch.zeros_like(ids[:1]), tokens[:1], GRID)
        assert torch.allclose(empty, target(ids[:1, :0], tokens[:1], GRID), atol=1e-12)
        assert (wide - empty).abs().max() > 0.1


def test_unconditional_rows(target: EmbeddedTarget, ids: Tensor) -> None:
    """The second half of the cache rows has no words; a guided draft has no second half."""
    both = target.condition(ids[:2], None, True)
    assert both.rows == 2 and both.prefix.shape[0] == 4 and both.pad.tolist()[2:] == [both.prefix.shape[1]] * 2
    alone = target.condition(ids[:2], None, False)
    assert alone.prefix.shape[0] == 2 and alone.pad.min() == 0
    distilled = EmbeddedTarget(words=20, dim=8, layers=1, ffn=8, guided=True)
    assert distilled.condition(ids[:2], None, True).prefix.shape[0] == 2


def test_the_causal_mask_hides_the_future(target: EmbeddedTarget, ids: Tensor) -> None:
    tokens = truth()
    other = tokens.clone()
    other[:, 7] = (other[:, 7] + 1) % VOCABULARY
    with torch.no_grad():
        a, b = target(ids, tokens, GRID), target(ids, other, GRID)
    assert torch.equal(a[:, :8], b[:, :8]) and (a[:, 8:] - b[:, 8:]).abs().max() > 1e-3


@pytest.mark.parametrize("grid", [(3, 5), (16, 16), (1, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rotary_table_by_formula(pipe: Pipe, grid: tuple[int, int], dtype: torch.dtype) -> None:
    """The start column is not turned; the first half of the pairs turns with the row, the second with the column."""
    model = pipe("sjd", dtype).target
    table, pairs, base = model.table(grid), model.backbone.config.width // 2, model.config.rope_base
    assert table.shape == (grid[0] * grid[1] + 1, pairs) and table.is_complex()
    assert torch.equal(table[0], torch.ones(pairs, dtype=table.dtype))
    for row in range(grid[0]):
        for column in range(grid[1]):
            angles = [place * base ** (-i / (pairs // 2)) for place in (row, column) for i in range(pairs // 2)]
            expected = torch.tensor([complex(torch.tensor(a).cos(), torch.tensor(a).sin()) for a in angles])
            assert torch.allclose(table[1 + row * grid[1] + column], expected.to(table.dtype), atol=1e-5)
    past = model.rotary(torch.tensor([[grid[0] * grid[1] + 5]]), grid)
    assert torch.equal(past[0, 0], table[-1])


def test_half_precision_forward(pipe: Pipe, ids: Tensor) -> None:
    half, full = pipe("sjd", torch.bfloat16).target, pipe("sjd").target
    with torch.no_grad():
        difference = half(ids, truth(), GRID).float() - full(ids, truth(), GRID)
    assert difference.abs().mean() < 0.15


def test_encode_checks_the_tokenizer(target: EmbeddedTarget, pipe: Pipe) -> None:
    words = pipe("sjd").tokenizer.words
    fits = target.encode({"tokenizer": WordTokenizer(NAMES, COLOURS, words)}, ["fox"], None, False, GRID)
    assert fits.rows == 1
    with pytest.raises(ValueError) as error:
        target.encode({"tokenizer": WordTokenizer(NAMES, COLOURS, [*words, "zebra"])}, ["fox"], None, False, GRID)
    sentence(error, f"{len(words) + 1} words", f"knows {len(words)}", "belongs to another model")


class TestWordTokenizer:
    """Words to ids and back from disk."""

    @pytest.fixture
    def tokenizer(self) -> WordTokenizer:
        """Four words of two names and a colour."""
        return WordTokenizer(["fox", "red apple"], {"red": (1, 2, 3), "sea blue": (1, 1, 1)}, ["apple", "fox", "on", "red"], 4)

    def test_ids_are_left_padded_from_one(self, tokenizer: WordTokenizer) -> None:
        got = tokenizer(["fox", "red apple on red"])
        assert got.dtype == torch.long and got.tolist() == [[0, 0, 0, 2], [4, 1, 3, 4]]

    @pytest.mark.parametrize("text", ["Fox", "  fox\t", "fox,", "FOX"])
    def test_spelling(self, tokenizer: WordTokenizer, text: str) -> None:
        assert tokenizer([text]).tolist() == [[0, 0, 0, 2]]

    def test_typographic_apostrophes(self) -> None:
        assert WordTokenizer(["o'clock"], {}, ["o'clock"])(["O’clock"])[0, -1] == 1

    @pytest.mark.parametrize(
        ("text", "holds"),
        [
            ("", ("empty", "'fox'")),
            (",", ("empty", "'fox'")),
            ("fox fox fox fox fox", ("5 words", "at most 4", "shorten")),
            ("foxx", ("unknown word 'foxx'", "nearest known words are fox")),
            ("foxx onn", ("unknown words 'foxx', 'onn'", "fox (for foxx)", "on (for onn)")),
            ("quux", ("unknown word 'quux'", "nearest known names are", "background colours are red, sea blue")),
            ("fox on quux", ("'quux'", "names are fox", "'<name> on <colour>'")),
        ],
    )
    def test_errors(self, tokenizer: WordTokenizer, text: str, holds: tuple[str, ...]) -> None:
        with pytest.raises(ValueError) as error:
            tokenizer(["fox", text])
        sentence(error, *holds)

    def test_round_trip(self, tokenizer: WordTokenizer, tmp_path: Path) -> None:
        tokenizer.save_pretrained(tmp_path / "new")
        again = WordTokenizer.from_pretrained(str(tmp_path / "new"))
        assert (again.names, again.words, again.max_words) == (tokenizer.names, tokenizer.words, 4)
        assert list(again.colours) == ["red", "sea blue"] and again(["red fox"]).tolist() == [[0, 0, 4, 2]]
        assert json.loads((tmp_path / "new" / "words.json").read_text())["colours"]["red"] == [1, 2, 3]


class TestCodec:
    """Tokens to pixels."""

    @pytest.fixture
    def codec(self, pipe: Pipe) -> VQCodec:
        """The tiny codec."""
        return pipe("sjd").codec

    @pytest.mark.parametrize("grid", [(4, 4), (3, 5), (1, 1), (16, 16)])
    def test_decode(self, codec: VQCodec, grid: tuple[int, int]) -> None:
        pixels = codec.decode(torch.randint(VOCABULARY, (2, *grid)))
        assert pixels.shape == (2, 3, 4 * grid[0], 4 * grid[1]) and pixels.dtype == torch.float32
        assert -1 <= float(pixels.min()) and float(pixels.max()) <= 1 and not pixels.requires_grad

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_other_dtypes(self, pipe: Pipe, codec: VQCodec, dtype: torch.dtype) -> None:
        tokens = torch.randint(VOCABULARY, (1, 4, 4), generator=torch.Generator().manual_seed(0))
        pixels = pipe("sjd", dtype).codec.decode(tokens)
        assert pixels.dtype == dtype and (pixels.float() - codec.decode(tokens)).abs().max() < 0.1

    def test_a_picture_does_not_depend_on_its_neighbours(self, codec: VQCodec) -> None:
        tokens = torch.randint(VOCABULARY, (4, 4, 4))
        batch = codec.decode(tokens)
        assert torch.allclose(torch.cat([codec.decode(tokens[i : i + 1]) for i in range(4)]), batch, atol=1e-5)

    def test_codebook(self, codec: VQCodec) -> None:
        book = codec.codebook()
        assert book.shape == (VOCABULARY, 4) and book.dtype == torch.float32
        assert torch.allclose(book.norm(dim=-1), torch.ones(VOCABULARY), atol=1e-6)

    def test_every_code_is_its_own_nearest(self, codec: VQCodec) -> None:
        tokens = torch.arange(VOCABULARY).view(1, 6, 8)
        assert torch.equal(codec.nearest(codec.embed(tokens)), tokens)

    def test_encode(self, codec: VQCodec) -> None:
        tokens = codec.encode(torch.rand(2, 3, 12, 20) * 2 - 1)
        assert tokens.shape == (2, 3, 5) and tokens.dtype == torch.long and int(tokens.max()) < VOCABULARY
        with pytest.raises(ValueError) as error:
            codec.encode(torch.zeros(1, 3, 12, 18))
        sentence(error, "12 x 18", "multiples of 4")

    def test_other_cell_sizes_are_refused(self) -> None:
        with pytest.raises(ValueError) as error:
            VQCodec(downsample=8)
        sentence(error, "4 x 4 pixels", "downsample=8", "use 4")
