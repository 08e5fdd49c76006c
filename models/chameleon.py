"""Chameleon and what became of it: Lumina-mGPT and Anole, one decoder over words and image codes alike.

Image codes are ids of the text vocabulary, in an order of their own (`image_ids`); embedding and output head are kept in the
order of the codes, so that only codes can be drawn. Queries and keys are normalised per head.

Lumina-mGPT names the size three times: in the prompt's words, and as two size tokens after the image start; every row of codes
ends with a row end, which is forced. Its unconditional row begins at the image start. Anole draws 32 x 32 codes without row ends;
its unconditional row is begin of text and image start.

Source: Chameleon team 2024, arXiv:2405.09818; Liu et al. 2024 (Lumina-mGPT), arXiv:2408.02657; Chern et al. 2024 (Anole),
arXiv:2407.06135, and their inference code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn

from .backbone import Backbone, BackboneConfig
from .checkpoint import Checkpoint, Source
from .codecs.chameleon_vq import PUBLISHED, codec_part, codec_source
from .language import LanguageTarget, check_prompts, rope_base, tokenizer_part
from .target import Conditioning
from .weights import Assembly, Part, Recipe, halves_to_pairs, head_part, joined

LUMINA_PROMPT = "Generate an image of {width}x{height} according to the following prompt:\n{text}"
PIXELS, PATCH = 16, 32
# Names in the vocabulary; a size token's number is 8800 + patches.
BEGIN, TURN, START, ROW_END, SIZE, FIRST = "<s>", "<reserved08706>", "<racm3:break>", "<reserved08799>", "<reserved{:05d}>", 8800


class ChameleonTarget(LanguageTarget):
    """Decoder of the Chameleon family.

    Args:
        vocab_size: codes; words: vocabulary ids, codes included.
        dim, layers, heads, kv_heads, ffn, eps, rope_base: of the decoder. post_norm: Chameleon 30B's order of norms.
        positions: tokens of prompt and picture together.
        begin_id, turn_id, start_id: begin of text, end of turn and image start. row_end_id: the row end (None: rows have none).
        size_ids: size tokens of 1, 2, ... patches of 32 pixels (None: sizes are not named).
    """

    @register_to_config
    def __init__(
        self,
        vocab_size: int = 8192,
        words: int = 65536,
        dim: int = 4096,
        layers: int = 32,
        heads: int = 32,
        kv_heads: int | None = None,
        ffn: int = 11008,
        eps: float = 1e-5,
        rope_base: float = 10000.0,
        post_norm: bool = False,
        positions: int = 4096,
        begin_id: int = 0,
        turn_id: int = 8710,
        start_id: int = 8197,
        row_end_id: int | None = None,
        size_ids: list[int] | None = None,
    ):
        super().__init__()
        self.vocab_size, self.rope_base, self.positions = vocab_size, rope_base, positions
        shape = BackboneConfig(dim, layers, heads, ffn, kv_heads, eps=eps, qk_norm="heads", post_norm=post_norm)
        self.word_table = nn.Embedding(words, dim)
        self.codes = nn.Embedding(vocab_size, dim)
        self.backbone = Backbone(shape)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        self._tables: dict[tuple[object, ...], Tensor] = {}

    def embed(self, tokens: Tensor) -> Tensor:
        """Codes [..., T] -> [..., T, D]."""
        return self.codes(tokens)

    def embed_at(self, tokens: Tensor, columns: Tensor, grid: tuple[int, int]) -> Tensor:
        """Tokens [B, T] in columns [B, T] of a lattice: codes, or the row end in the last column of each row."""
        x = self.codes(tokens)
        if self.config.row_end_id is None:
            return x
        ends = (columns % grid[1] == 0)[..., None]
        return torch.where(ends, self.word_table(torch.full_like(columns[:1, :1], self.config.row_end_id)), x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Features [..., D] -> [..., V]."""
        return self.head(hidden)

    def lattice(self, grid: tuple[int, int]) -> tuple[int, int]:
        """One column more for the row ends. Raises ValueError for sizes without a size token."""
        sizes = self.config.size_ids
        if sizes is not None:
            step, largest = PATCH // PIXELS, len(sizes) * PATCH
            if any(side % step or side // step > len(sizes) for side in grid):
                raise ValueError(
                    f"this model draws sizes that are multiples of {PATCH} pixels up to {largest}, "
                    f"got {grid[0] * PIXELS} x {grid[1] * PIXELS}"
                )
        return (grid[0], grid[1] + (self.config.row_end_id is not None))

    def forced(self, grid: tuple[int, int]) -> Tensor | None:
        """The last column of a lattice, where rows have ends."""
        if self.config.row_end_id is None:
            return None
        forced = torch.full(grid, -1, device=self.home)
        forced[:, -1] = 0
        return forced.flatten()

    def encode(
        self,
        components: dict[str, Any],
        prompts: list[str],
        negative: list[str] | None,
        guided: bool,
        grid: tuple[int, int],
    ) -> Conditioning:
        """Prompts -> Conditioning; a negative prompt takes the place of the unconditional row."""
        tokenizer = components["tokenizer"]
        check_prompts(prompts)
        rows = [self.prompt_ids(tokenizer, text, grid) for text in prompts]
        if guided:
            others = [""] * len(prompts) if negative is None else negative
            rows += [self.prompt_ids(tokenizer, other, grid) if other.strip() else self.unconditional(grid) for other in others]
        height, width = self.lattice(grid)
        self.check_rows(rows, height * width)
        return self.condition(rows, len(prompts))

    def prompt_ids(self, tokenizer: Any, text: str, grid: tuple[int, int]) -> list[int]:
        """Vocabulary ids of the whole prompt, up to the last token before the first code."""
        if self.config.size_ids is not None:
            text = LUMINA_PROMPT.format(height=grid[0] * PIXELS, width=grid[1] * PIXELS, text=text)
        words = tokenizer(text, add_special_tokens=False)["input_ids"]
        return [self.config.begin_id, *words, self.config.turn_id, *self.opening(grid)]

    def unconditional(self, grid: tuple[int, int]) -> list[int]:
        """What the unconditional row has read before the first code."""
        return self.opening(grid) if self.config.size_ids is not None else [self.config.begin_id, *self.opening(grid)]

    def opening(self, grid: tuple[int, int]) -> list[int]:
        """Image start and, where sizes are named, height and width."""
        sizes, step = self.config.size_ids, PATCH // PIXELS
        return [self.config.start_id, *([] if sizes is None else [sizes[side // step - 1] for side in grid])]


def image_ids(vocabulary: Mapping[str, int]) -> list[int]:
    """Vocabulary id of each code: `IMGIMG`, the code's digits as letters (A = 0), `Z`.

    Raises ValueError unless the codes are 0, 1, 2, ... without a gap.
    """
    digits = str.maketrans("ABCDEFGHIJ", "0123456789")
    found = {}
    for name, index in vocabulary.items():
        if name.startswith("IMGIMG"):
            number = name[len("IMGIMG") : -1].translate(digits)
            if not number.isdecimal():
                raise ValueError(f"{name!r} in the vocabulary is not an image code: the tokenizer is of another model")
            found[int(number)] = index
    if not found or sorted(found) != list(range(len(found))):
        raise ValueError("the vocabulary names no image codes, or not all of them: the tokenizer is of another model")
    return [found[code] for code in range(len(found))]


# -- checkpoints -----------------------------------------------------------------------------------------------------

LUMINA = {"guidance_scale": 4.0, "temperature": 1.0, "top_k": 2000, "top_p": 1.0, "window": {"cpu": 16, "cuda": 96}}
ANOLE = {"guidance_scale": 3.0, "temperature": 0.7, "top_k": 0, "top_p": 0.9, "window": {"cpu": 16, "cuda": 96}}
LARGEST = 64
KINDS = ("chameleon", "chameleon_xllmx", "anole")
# Ours -> transformers' names and Meta's; `{}` is the layer.
NAMES = {
    "word_table.weight": ("model.embed_tokens.weight", "tok_embeddings.weight"),
    "head.weight": ("lm_head.weight", "output.weight"),
    "backbone.norm.weight": ("model.norm.weight", "norm.weight"),
}
LAYER = {
    "attention_norm.weight": ("input_layernorm.weight", "attention_norm.weight"),
    "attention.out.weight": ("self_attn.o_proj.weight", "attention.wo.weight"),
    "ffn_norm.weight": ("post_attention_layernorm.weight", "ffn_norm.weight"),
    "gate": ("mlp.gate_proj.weight", "feed_forward.w1.weight"),
    "up": ("mlp.up_proj.weight", "feed_forward.w3.weight"),
    "down.weight": ("mlp.down_proj.weight", "feed_forward.w2.weight"),
    "query": ("self_attn.q_proj.weight", "attention.wq.weight"),
    "key": ("self_attn.k_proj.weight", "attention.wk.weight"),
    "value": ("self_attn.v_proj.weight", "attention.wv.weight"),
    "q_norm": ("self_attn.q_norm.{}", "attention.q_normalization.{}"),
    "k_norm": ("self_attn.k_norm.{}", "attention.k_normalization.{}"),
}


def recognise(source: Source) -> Assembly | None:
    """A folder of transformers' Chameleon (Chameleon, Anole, Lumina-mGPT) or of Meta's (`consolidated.pth` and `params.json`), or
    a published draft head."""
    if source.config.get("model_type") in KINDS and source.weights is not None:
        head = draft_head(source)
        if head is not None:
            return Assembly("chameleon", {"draft_head": head})
        return assemble(source, source.weights, source.config, 0, vocabulary(source))
    root = source.folder
    for place in (root, root / "models" / "7b"):
        if (place / "params.json").is_file() and (place / "consolidated.pth").is_file():
            inner, checkpoint = Source(place, source.named), Checkpoint([place / "consolidated.pth"])
            if "layers.0.attention.q_normalization.weight" not in checkpoint:
                return None
            given = {**(inner.json("params.json") or {}), **(inner.json("consolidate_params.json") or {})}
            return assemble(source, checkpoint, {**given, **given.get("model", {})}, 1, vocabulary(source))
    return None


def assemble(source: Source, checkpoint: Checkpoint, config: dict[str, Any], kind: int, table: Mapping[str, int]) -> Assembly:
    """The parts of a decoder checkpoint. kind: which column of names; table: the vocabulary."""
    missing = next((theirs[kind] for theirs in NAMES.values() if theirs[kind] not in checkpoint), None)
    if missing is not None:
        raise ValueError(f"{checkpoint.where} has no tensor {missing!r}: it is not Chameleon's, or not all of it, fetch it again")
    lumina = is_lumina(source, checkpoint, config, kind)
    arguments = sizes(checkpoint, config, kind)
    ids, named = (
        image_ids(table),
        {"begin_id": BEGIN, "turn_id": TURN, "start_id": START, **({"row_end_id": ROW_END} if lumina else {})},
    )
    absent = [name for name in named.values() if name not in table]
    if absent:
        raise ValueError(f"the vocabulary of {source.path} has no {absent[0]}: it is not Chameleon's, fetch the model again")
    arguments |= {"vocab_size": len(ids), **{name: table[token] for name, token in named.items()}}
    if lumina:
        names = [SIZE.format(FIRST + patches) for patches in range(1, LARGEST + 1)]
        arguments["size_ids"] = [table[name] for name in names if name in table]
    target = Part("ChameleonTarget", arguments, recipes(arguments, kind, ids), checkpoint, (r"^rope\.freqs$", r"\.inv_freq$"))
    assembly = Assembly("chameleon", {"target": target}, {**(LUMINA if lumina else ANOLE), "grids": grids(source, lumina)})
    codec, prefix = codec_source(source, checkpoint)
    if codec is None:
        assembly.absent["codec"] = PUBLISHED
    else:
        assembly.parts["codec"] = codec_part(codec, prefix, codec is checkpoint)
    if codec is not checkpoint:
        target.ignore += (r"^model\.vqmodel\.",)
    tokenizer = text_tokenizer(source)
    if tokenizer is None:
        assembly.absent["tokenizer"] = "Alpha-VLLM/Lumina-mGPT-7B-768"
    else:
        assembly.parts["tokenizer"] = tokenizer
    return assembly


def is_lumina(source: Source, checkpoint: Checkpoint, config: Mapping[str, Any], kind: int) -> bool:
    """Lumina-mGPT's files have the names of its trainer's options in their config, and no image tokenizer among their weights."""
    bare = kind == 0 and not any(key.startswith("model.vqmodel.") for key in checkpoint.entries)
    return bare or "mask_image_logits" in config or "lumina" in published_name(source).lower()


def published_name(source: Source) -> str:
    """The folder's name, or the repository's where the folder lies in the Hub's cache."""
    place = source.folder
    return place.parent.parent.name if place.parent.name == "snapshots" else place.name


def sizes(checkpoint: Checkpoint, config: Mapping[str, Any], kind: int) -> dict[str, Any]:
    """The decoder's arguments: heads and constants from its config, all else from the tensors."""
    stem, name = ("model.layers." if kind == 0 else "layers."), {ours: theirs[kind] for ours, theirs in LAYER.items()}
    heads = int(config.get("num_attention_heads" if kind == 0 else "n_heads", 32))
    words, dim = checkpoint.shape(NAMES["word_table.weight"][kind])
    return {
        "words": words,
        "dim": dim,
        "layers": len({key.removeprefix(stem).split(".")[0] for key in checkpoint.entries if key.startswith(stem)}),
        "heads": heads,
        "kv_heads": checkpoint.shape(f"{stem}0.{name['key']}")[0] // (dim // heads),
        "ffn": checkpoint.shape(f"{stem}0.{name['gate']}")[0],
        "eps": float(config.get("rms_norm_eps", config.get("norm_eps", 1e-5))),
        "rope_base": rope_base(dict(config)),
        "post_norm": bool(config.get("swin_norm", False)),
        "positions": int(config.get("max_position_embeddings", 4096)),
    }


def recipes(arguments: Mapping[str, Any], kind: int, ids: list[int]) -> dict[str, Recipe]:
    """How every tensor of the decoder is made. transformers keeps rotary pairs as two halves, Meta as neighbours."""
    heads, groups, pairs = arguments["heads"], arguments["kv_heads"], kind == 1
    rows = torch.tensor(ids)

    def of_codes(table: Tensor) -> Tensor:
        return table.index_select(0, rows.to(table.device))

    def turned(weight: Tensor, count: int) -> Tensor:
        return weight if pairs else halves_to_pairs(weight, count)

    def qkv(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.cat((turned(query, heads), turned(key, groups), value))

    top = {ours: theirs[kind] for ours, theirs in NAMES.items()}
    made = {
        "word_table.weight": Recipe((top["word_table.weight"],)),
        "codes.weight": Recipe((top["word_table.weight"],), of_codes),
        "head.weight": Recipe((top["head.weight"],), of_codes),
        "backbone.norm.weight": Recipe((top["backbone.norm.weight"],)),
    }
    for layer in range(arguments["layers"]):
        stem, ours = f"{'' if kind else 'model.'}layers.{layer}.", f"backbone.blocks.{layer}."
        name = {key: stem + theirs[kind] for key, theirs in LAYER.items()}
        made |= {ours + key: Recipe((name[key],)) for key in LAYER if key.endswith(".weight")}
        made[f"{ours}gate_up.weight"] = Recipe((name["gate"], name["up"]), joined)
        made[f"{ours}attention.qkv.weight"] = Recipe((name["query"], name["key"], name["value"]), qkv)
        for norm, count in (("q_norm", heads), ("k_norm", groups)):
            made |= norm_recipes(f"{ours}attention.{norm}.", name[norm], count, pairs)
    return made


def norm_recipes(ours: str, theirs: str, count: int, pairs: bool) -> dict[str, Recipe]:
    """Gain and bias of a `HeadNorm`. Files hold one row for all heads, for each part of them (Meta's ranks), or for each head."""

    def spread(given: Tensor) -> Tensor:
        given = given.view(-1, given.shape[-1])
        rows = given.repeat_interleave(count // len(given), 0)
        return rows if pairs else halves_to_pairs(rows.flatten(), count).view(count, -1)

    return {f"{ours}{part}": Recipe((theirs.format(part),), spread) for part in ("weight", "bias")}


def draft_head(source: Source) -> Part | None:
    """A published draft head (LANTERN's, for Anole): one of the decoder's layers; its embedding is the target's."""
    part = head_part(source, "llama", "prompt")
    if part is None:
        return None
    part.config |= {"qk_norm": "heads", "vocab_size": None}
    part.weights.pop("codes.weight", None)
    part.ignore += (r"^embed_tokens\.weight$",)
    for layer in range(part.config["layers"]):
        for norm, count in (("q_norm", part.config["heads"]), ("k_norm", part.config["kv_heads"])):
            stem = f"layers.{layer}.self_attn.{norm}."
            part.weights |= norm_recipes(f"blocks.{layer}.attention.{norm}.", stem + "{}", count, False)
    return part


def vocabulary(source: Source) -> dict[str, int]:
    """Names and ids of the text vocabulary: of the config, else of the tokenizer. Raises FileNotFoundError without either."""
    table = source.config.get("vocabulary_map")
    if isinstance(table, dict) and table:
        return table
    path = next((path for path in tokenizer_files(source) if path.is_file()), None)
    if path is None:
        raise FileNotFoundError(f"{source.path} has neither a vocabulary nor a tokenizer.json: fetch the whole model")
    content = Source(path).json(path.name) or {}
    try:
        added = {token["content"]: token["id"] for token in content.get("added_tokens", [])}
        return {**content["model"]["vocab"], **added}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a tokenizer: fetch it again") from error


def tokenizer_files(source: Source) -> list[Path]:
    """Where the text tokenizer may lie: transformers' file, or Meta's beside or above the weights."""
    folder = source.named.get("tokenizer", source).folder
    meta = [place / "tokenizer" / "text_tokenizer.json" for place in (folder, folder.parent, folder.parent.parent)]
    return [folder / "tokenizer.json", folder / "text_tokenizer.json", *meta]


def text_tokenizer(source: Source) -> Part | None:
    """transformers' tokenizer, or Meta's as one."""
    part = tokenizer_part(source)
    if part is not None:
        return part
    path = next((path for path in tokenizer_files(source) if path.is_file()), None)
    if path is None:
        return None
    files: dict[str, Path | str] = {
        "tokenizer.json": path,
        "tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "pad_token": "<pad>"}\n',
    }
    return Part("AutoTokenizer", library="transformers", files=files)


def grids(source: Source, lumina: bool) -> list[list[int]]:
    """Grids in codes, the default first. Lumina-mGPT: every shape of about the trained area, sides at most 4 : 1."""
    if not lumina:
        return [[32, 32]]
    found = re.search(r"(?<!\d)(512|768|1024)(?!\d)", published_name(source))
    areas = [int(found.group())] if found else [768, 512, 1024]
    step, shapes = PATCH // PIXELS, []
    for area in areas:
        count = (area // PATCH) ** 2
        square = [step * (area // PATCH)] * 2
        pairs = ((h, w) for w in range(1, count + 1) for h in range(max(1, count // (w + 1)), count // w + 1))
        others = [[step * h, step * w] for h, w in pairs if max(h, w) <= 4 * min(h, w)]
        shapes += [square, *(shape for shape in others if shape != square)]
    return shapes
