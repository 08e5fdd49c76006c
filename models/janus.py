"""Janus and Janus-Pro: a Llama decoder that draws through a generation embedding, an aligner and a head of its own.

Codes never pass through the word embedding: their 8-dimensional table and a two-layer aligner make the decoder's input, and
`gen_head` its output. The unconditional row is the prompt with all ids but the first and the last replaced by padding, which is
attended to like any word.

Source: Chen et al. 2025 (Janus-Pro), arXiv:2501.17811; github.com/deepseek-ai/Janus (generation_inference.py).
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import torch.nn.functional as F
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn

from .backbone import Backbone, BackboneConfig
from .checkpoint import Source
from .codecs.janus import codec_part
from .language import LanguageTarget, check_prompts, decoder_config, token_id, tokenizer_part
from .target import Conditioning
from .weights import Assembly, Part, Recipe, decoder_recipes

PROMPT = "<|User|>: {}\n\n<|Assistant|>:<begin_of_image>"
PAD = "<｜▁pad▁｜>"


class Aligner(nn.Module):
    """Codes' embeddings to the decoder's width: a linear layer, then GELU and linear layers."""

    def __init__(self, code_dim: int, dim: int, layers: int):
        super().__init__()
        self.first = nn.Linear(code_dim, dim)
        self.others = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers - 1))

    def forward(self, x: Tensor) -> Tensor:
        """[..., code_dim] -> [..., dim]."""
        x = self.first(x)
        for layer in self.others:
            x = layer(F.gelu(x))
        return x


class GenerationHead(nn.Module):
    """Features to logits over the codes: linear, GELU, linear."""

    def __init__(self, dim: int, width: int, codes: int):
        super().__init__()
        self.project = nn.Linear(dim, width)
        self.codes = nn.Linear(width, codes)

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., codes]."""
        return self.codes(F.gelu(self.project(x)))


class JanusTarget(LanguageTarget):
    """Janus-Pro's drawing half.

    Args:
        vocab_size: codes; words: vocabulary of the text.
        dim, layers, heads, kv_heads, head_dim, ffn, eps, rope_base: of the decoder.
        code_dim: dimensions of the generation embedding; aligner_layers; head_width: hidden width of the generation head.
        positions: tokens of prompt and picture together.
    """

    @register_to_config
    def __init__(
        self,
        vocab_size: int = 16384,
        words: int = 102400,
        dim: int = 2048,
        layers: int = 24,
        heads: int = 16,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        ffn: int = 5632,
        eps: float = 1e-6,
        rope_base: float = 10000.0,
        code_dim: int = 8,
        aligner_layers: int = 2,
        head_width: int = 2048,
        positions: int = 16384,
    ):
        super().__init__()
        self.vocab_size, self.rope_base, self.positions = vocab_size, rope_base, positions
        self.word_table = nn.Embedding(words, dim)
        self.codes = nn.Embedding(vocab_size, code_dim)
        self.aligner = Aligner(code_dim, dim, aligner_layers)
        self.backbone = Backbone(BackboneConfig(dim, layers, heads, ffn, kv_heads, head_dim, eps=eps))
        self.head = GenerationHead(dim, head_width, vocab_size)
        self._tables: dict[tuple[object, ...], Tensor] = {}

    def embed(self, tokens: Tensor) -> Tensor:
        """Codes [..., T] -> [..., T, D]."""
        return self.aligner(self.codes(tokens))

    def logits(self, hidden: Tensor) -> Tensor:
        """Features [..., D] -> [..., V]."""
        return self.head(hidden)

    def encode(
        self,
        components: dict[str, Any],
        prompts: list[str],
        negative: list[str] | None,
        guided: bool,
        grid: tuple[int, int],
    ) -> Conditioning:
        """Prompts in the chat format -> Conditioning; a negative prompt takes the place of the padded one."""
        tokenizer = components["tokenizer"]
        check_prompts(prompts)
        rows = [prompt_ids(tokenizer, text) for text in prompts]
        if guided:
            others = [""] * len(prompts) if negative is None else negative
            pad = pad_id(tokenizer)
            rows += [
                prompt_ids(tokenizer, other) if other.strip() else unconditional(row, pad)
                for row, other in zip(rows, others, strict=True)
            ]
        self.check_rows(rows, grid[0] * grid[1])
        return self.condition(rows, len(prompts))


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Vocabulary ids of the whole prompt: begin of text, the chat format, begin of image."""
    ids = list(tokenizer(PROMPT.format(text.strip()), add_special_tokens=False)["input_ids"])
    begin, image = tokenizer.bos_token_id, token_id(tokenizer, "<begin_of_image>")
    if begin is None:
        raise ValueError("the tokenizer has no token for the begin of a text: it belongs to another model")
    if ids[-1] != image:
        raise ValueError("the tokenizer does not read <begin_of_image> as one token: it belongs to another model")
    return ids if ids[0] == begin else [begin, *ids]


def pad_id(tokenizer: Any) -> int:
    """The id that fills the unconditional prompt: the model's own padding, whatever the tokenizer pads with."""
    own = tokenizer.get_vocab().get(PAD, tokenizer.pad_token_id)
    if own is None:
        raise ValueError(f"the tokenizer has no {PAD}: it belongs to another model")
    return int(own)


def unconditional(ids: Items[int], pad: int) -> list[int]:
    """The prompt without its words: padding between the first and the last id."""
    return [ids[0], *[pad] * (len(ids) - 2), ids[-1]]


# -- checkpoints -----------------------------------------------------------------------------------------------------

DEFAULTS: dict[str, Any] = {
    "guidance_scale": 5.0,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "grids": [[24, 24]],
    "window": {"cpu": 16, "cuda": 96},
}
# Our names -> transformers' and the original's. The aligner's further layers are added by number.
NAMES = {
    "word_table.weight": ("model.language_model.embed_tokens.weight", "language_model.model.embed_tokens.weight"),
    "codes.weight": ("model.generation_embeddings.weight", "gen_embed.weight"),
    "aligner.first": ("model.generation_aligner.fc1", "gen_aligner.layers.0"),
    "head.project": ("model.generation_head.proj_out", "gen_head.output_mlp_projector"),
    "head.codes": ("model.generation_head.vision_head", "gen_head.vision_head"),
}
IGNORED = (
    (r"^model\.vision_model\.", r"^model\.aligner\.", r"^lm_head\."),
    (r"^vision_model\.", r"^aligner\.", r"^language_model\.lm_head\.", r"\.rotary_emb\.inv_freq$"),
)


def recognise(source: Source) -> Assembly | None:
    """A folder of transformers' Janus (model type `janus`) or of the original one (`multi_modality`)."""
    kind = {"janus": 0, "multi_modality": 1}.get(source.config.get("model_type", ""))
    checkpoint = source.weights if kind is not None else None
    if kind is None or checkpoint is None:
        return None
    names = {ours: theirs[kind] for ours, theirs in NAMES.items()}
    for key in (names["word_table.weight"], names["codes.weight"], names["head.codes"] + ".weight"):
        if key not in checkpoint:
            raise ValueError(f"{checkpoint.where} has no tensor {key!r}: it is not Janus's, or not all of it, fetch it again")
    config = source.config.get("language_config" if kind else "text_config") or {}
    prefix = names["word_table.weight"].removesuffix("embed_tokens.weight")
    sizes = decoder_config(config, checkpoint, prefix)
    linear = {ours: theirs for ours, theirs in names.items() if not ours.endswith(".weight")}
    layer, more = 0, "gen_aligner.layers.{}" if kind else "model.generation_aligner.hidden_layers.{}"
    while (theirs := more.format(2 * layer + 2 if kind else layer)) + ".weight" in checkpoint:
        linear[f"aligner.others.{layer}"] = theirs
        layer += 1
    recipes = {ours: Recipe((theirs,)) for ours, theirs in names.items() if ours.endswith(".weight")}
    recipes |= {f"{ours}.{part}": Recipe((f"{theirs}.{part}",)) for ours, theirs in linear.items() for part in ("weight", "bias")}
    codes, code_dim = checkpoint.shape(names["codes.weight"])
    arguments = {
        **sizes,
        "vocab_size": codes,
        "eps": float(config.get("rms_norm_eps", 1e-6)),
        "code_dim": code_dim,
        "aligner_layers": layer + 1,
        "head_width": checkpoint.shape(names["head.project"] + ".weight")[0],
        "positions": int(config.get("max_position_embeddings", 16384)),
    }
    shape = {name: sizes[name] for name in ("dim", "layers", "heads", "ffn", "kv_heads")}
    recipes |= decoder_recipes(BackboneConfig(**shape), prefix)
    target = Part("JanusTarget", arguments, recipes, checkpoint, IGNORED[kind])
    style = ("gen_vision_model.", "llamagen") if kind else ("model.vqmodel.", "transformers")
    parts = {"target": target, "codec": codec_part(checkpoint, *style)}
    assembly = Assembly("janus", parts, {**DEFAULTS, "grids": grids(source.config)})
    tokenizer = tokenizer_part(source)
    if tokenizer is None:
        assembly.absent["tokenizer"] = "deepseek-community/Janus-Pro-1B"
    else:
        assembly.parts["tokenizer"] = tokenizer
    return assembly


def grids(config: dict[str, Any]) -> list[list[int]]:
    """The one grid a model was trained on: its understanding half's picture size in tokens of 16 pixels."""
    vision = config.get("vision_config") or {}
    size = vision.get("image_size", (vision.get("params") or {}).get("image_size", 384))
    side = (size if isinstance(size, int) else size[0]) // int(vision.get("patch_size", 16))
    return [[side, side]]
