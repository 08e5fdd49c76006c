"""LlamaGen: text- and class-conditional pictures from a Llama decoder over VQ codes.

Text is 120 slots before the image: T5 features, moved to the right end, through a small MLP. The last of them is column 0. What
is peculiar, and kept: the rotary rows of all text slots are zeros, so that queries and keys of text vanish and an image token
gives every text slot the same weight; the unconditional row reads learned embeddings under the *conditional* row's text mask;
the first image token stands at grid cell (0, 0). Class-conditional models have one class embedding as column 0 and no text.

Source: Sun et al. 2024 (LlamaGen, arXiv:2406.06525); layouts of the files at github.com/FoundationVision/LlamaGen.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import register_to_config
from diffusers.utils.accelerate_utils import apply_forward_hook
from torch import Tensor, nn

from .backbone import Backbone, BackboneConfig, axis_angles
from .checkpoint import Checkpoint, Source
from .codecs.janus import codec_part
from .target import Conditioning, DiscreteTarget
from .weights import Assembly, Part, Recipe, decoder_recipes, head_part


class CaptionProjection(nn.Module):
    """Text features to embeddings; holds the learned features of the unconditional prompt [slots, caption_dim]."""

    def __init__(self, caption_dim: int, dim: int, slots: int):
        super().__init__()
        self.up = nn.Linear(caption_dim, dim, bias=False)
        self.down = nn.Linear(dim, dim, bias=False)
        self.register_buffer("unconditional", torch.zeros(slots, caption_dim))

    def forward(self, features: Tensor, guided: bool) -> Tensor:
        """Right-aligned features [B, T, C] -> [B, T, D]; guided: followed by B unconditional rows."""
        if guided:
            features = torch.cat((features, self.unconditional[-features.shape[1] :].expand(features.shape)))
        return self.down(F.gelu(self.up(features), approximate="tanh"))


class LlamaGenTarget(DiscreteTarget):
    """Target or small draft.

    Args:
        vocab_size: codes V. dim, layers, heads, ffn, eps, rope_base: the decoder.
        caption_dim: width of the text encoder's features, None for a class-conditional model; text_slots: longest prompt.
        classes: classes of a class-conditional model (one more embedding is the unconditional one), None for a text model.
    """

    @register_to_config
    def __init__(
        self,
        vocab_size: int = 16384,
        dim: int = 1280,
        layers: int = 36,
        heads: int = 20,
        ffn: int = 3584,
        eps: float = 1e-5,
        rope_base: float = 10000.0,
        caption_dim: int | None = 2048,
        text_slots: int = 120,
        classes: int | None = None,
    ):
        super().__init__()
        if (caption_dim is None) == (classes is None):
            raise ValueError("a LlamaGen model reads either text (caption_dim) or classes")
        self.vocab_size = vocab_size
        self.codes = nn.Embedding(vocab_size, dim)
        self.caption = None if caption_dim is None else CaptionProjection(caption_dim, dim, text_slots)
        self.labels = None if classes is None else nn.Embedding(classes + 1, dim)
        self.backbone = Backbone(BackboneConfig(dim=dim, layers=layers, heads=heads, ffn=ffn, eps=eps))
        self.head = nn.Linear(dim, vocab_size, bias=False)
        self._tables: dict[tuple[object, ...], Tensor] = {}

    def embed(self, tokens: Tensor) -> Tensor:
        """Codes [..., T] -> [..., T, D]."""
        return self.codes(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """Features [..., D] -> [..., V]."""
        return self.head(hidden)

    def table(self, grid: tuple[int, int], device: torch.device) -> Tensor:
        """Rotary factors of column 0 (zero) and of every cell in raster order: complex [N + 1, hd / 2].

        The first half of a head's pairs turns with the row, the second with the column.
        """
        double = self.head.weight.dtype == torch.float64
        key = (grid, double, device)
        if key not in self._tables:
            height, width = grid
            pairs = self.backbone.config.width // 2
            cell = torch.arange(height * width, device=device)
            base = self.config.rope_base
            turned = (axis_angles(cell // width, pairs // 2, base), axis_angles(cell % width, pairs - pairs // 2, base))
            angles = torch.cat(turned, -1)
            factors = F.pad(torch.polar(torch.ones_like(angles), angles), (0, 0, 1, 0))
            self._tables[key] = factors if double else factors.to(torch.complex64)
        return self._tables[key]

    def rotary(self, columns: Tensor, grid: tuple[int, int]) -> Tensor:
        """Complex [B, T, hd / 2] for columns [B, T]; columns past the end of the image repeat the last cell."""
        table = self.table(grid, columns.device)
        return table[columns.clamp(max=table.shape[0] - 1)]

    def prompt_rotary(self, slots: int) -> Tensor:
        """Zeros [1, P, hd / 2], not ones: text has no queries and keys."""
        dtype = torch.complex128 if self.head.weight.dtype == torch.float64 else torch.complex64
        return torch.zeros(1, slots, self.backbone.config.width // 2, dtype=dtype, device=self.home)

    def encode(
        self,
        components: dict[str, Any],
        prompts: list[str],
        negative: list[str] | None,
        guided: bool,
        grid: tuple[int, int],
    ) -> Conditioning:
        """Prompts -> Conditioning: class numbers through `tokenizer`, text through `tokenizer` and `text_encoder`."""
        if negative is not None:
            raise ValueError("LlamaGen has no negative prompt: leave negative_prompt out")
        tokenizer = components["tokenizer"]
        if self.labels is not None:
            if not isinstance(tokenizer, ClassTokenizer) or tokenizer.count != self.config.classes:
                raise ValueError(f"this LlamaGen draws {self.config.classes} classes: its tokenizer belongs to another model")
            return self.condition_on_classes(tokenizer(prompts).to(self.home), guided)
        encoder = components.get("text_encoder")
        if encoder is None or isinstance(tokenizer, ClassTokenizer):
            raise ValueError("this LlamaGen reads text and has no text encoder: pass text_encoder= (google/flan-t5-xl)")
        if encoder.config.d_model != self.config.caption_dim:
            raise ValueError(
                f"the text encoder has {encoder.config.d_model} features and the model reads {self.config.caption_dim}: "
                "load google/flan-t5-xl, or the encoder the model was trained with"
            )
        texts = sorted(set(prompts))
        ids = self.token_ids(tokenizer, texts)
        place = next(encoder.parameters()).device
        place = self.home if place.type == "meta" else place
        features = encoder(input_ids=ids["input_ids"].to(place), attention_mask=ids["attention_mask"].to(place))
        rows = torch.tensor([texts.index(prompt) for prompt in prompts])
        features, count = features.last_hidden_state.to(self.home)[rows], ids["attention_mask"].sum(1)[rows]
        return self.condition(features, count.to(self.home), guided)

    def token_ids(self, tokenizer: Any, texts: list[str]) -> Any:
        """Cleaned texts -> ids, right-padded. Raises ValueError for an empty text and one that is too long."""
        for text in texts:
            if not text.strip():
                raise ValueError("the prompt is empty: say what to draw")
        ids = tokenizer([clean_caption(text) for text in texts], padding=True, return_tensors="pt")
        count = ids["attention_mask"].sum(1)
        if int(count.max()) > self.config.text_slots:
            text = texts[int(count.argmax())]
            raise ValueError(
                f"the prompt {text[:40]!r}... has {int(count.max())} tokens, LlamaGen reads at most {self.config.text_slots}: "
                "shorten it"
            )
        return ids

    @apply_forward_hook
    def condition(self, features: Tensor, count: Tensor, guided: bool) -> Conditioning:
        """Text features [B, T, C], of which the first count [B] of each row are real, -> Conditioning.

        The real ones are moved to the right end; slots left of the longest prompt are dropped, since nobody reads them.
        """
        if self.caption is None:
            raise ValueError("this LlamaGen draws classes, not text")
        longest = int(count.max())
        slots = torch.arange(longest, device=features.device)
        pad = longest - count
        place = (slots - pad[:, None]).clamp(min=0)
        features = features.gather(1, place[..., None].expand(-1, -1, features.shape[-1]))
        features = features.masked_fill((slots < pad[:, None])[..., None], 0.0)
        rows = self.caption(features.to(self.codes.weight.dtype), guided)
        pad = pad.repeat(len(rows) // len(pad))
        return Conditioning(rows[:, :-1], pad, rows[:, -1], len(features))

    @apply_forward_hook
    def condition_on_classes(self, classes: Tensor, guided: bool) -> Conditioning:
        """Class numbers [B] -> Conditioning without a prompt: column 0 is the class."""
        if self.labels is None:
            raise ValueError("this LlamaGen reads text, not classes")
        rows = len(classes)
        if guided:
            classes = torch.cat((classes, torch.full_like(classes, self.config.classes)))
        start = self.labels(classes)
        pad = torch.zeros(len(classes), dtype=torch.long, device=start.device)
        return Conditioning(start[:, None][:, :0], pad, start, rows)


class ClassTokenizer:
    """Class numbers, or names where the model's file has them. File: `classes.json` with count and names."""

    file_name = "classes.json"

    def __init__(self, count: int = 1000, names: Items[str] = ()):
        self.count, self.names = count, list(names)
        self.ids = {name.lower(): number for number, name in enumerate(self.names)}

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> ClassTokenizer:
        """Read `classes.json` from a folder."""
        path = Path(folder) / cls.file_name
        if not path.is_file():
            raise FileNotFoundError(f"no class table at {path}: the folder is incomplete, fetch it again")
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
            return cls(int(table["count"]), [str(name) for name in table.get("names", [])])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a class table: fetch the folder again") from error

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `classes.json` into a folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / self.file_name).write_text(self.to_json(), encoding="utf-8")

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps({"count": self.count, "names": self.names}, indent=1, ensure_ascii=False) + "\n"

    def __call__(self, prompts: Items[str]) -> Tensor:
        """Class numbers [B]. Raises ValueError for anything else than a number or a known name."""
        numbers = []
        for prompt in prompts:
            text = prompt.strip().lower()
            number = self.ids.get(text, int(text) if re.fullmatch(r"\d{1,9}", text) else -1)
            if not 0 <= number < self.count:
                what = "a class name or a number" if self.names else "a class number"
                raise ValueError(f"{prompt!r} is no class of this model: write {what} from 0 to {self.count - 1}")
            numbers.append(number)
        return torch.tensor(numbers, dtype=torch.long)


def clean_caption(text: str) -> str:
    """The caption as in training: lower case, without links, markup and file names.

    diffusers has the cleaning these models share (DeepFloyd IF's, applied twice); it needs ftfy and beautifulsoup4. Without them
    plain text comes out the same, and captions with markup keep it.
    """
    if importlib.util.find_spec("ftfy") is None or importlib.util.find_spec("bs4") is None:
        return re.sub(r"\s+", " ", text).strip().lower()
    from diffusers.pipelines.pixart_alpha.pipeline_pixart_alpha import PixArtAlphaPipeline

    cleaner = PixArtAlphaPipeline.__new__(PixArtAlphaPipeline)
    return cleaner._text_preprocessing(text, clean_caption=True)[0]


# -- checkpoints -----------------------------------------------------------------------------------------------------

TEXT_ENCODER = "google/flan-t5-xl"
CODECS = {"t2i": "peizesun/llamagen_t2i/vq_ds16_t2i.pt", "c2i": "FoundationVision/LlamaGen/vq_ds16_c2i.pt"}
SAMPLING = {"t2i": {"guidance_scale": 7.5, "top_k": 1000}, "c2i": {"guidance_scale": 4.0, "top_k": 2000}}
# Heads are 64 wide except in the two widest published models, which have 32 heads.
HEADS = {3200: 32, 4096: 32}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "spiece.model", "added_tokens.json")


def recognise(source: Source) -> Assembly | None:
    """LlamaGen's own files: a GPT checkpoint (alone or in a folder with its tokenizer and T5), or a published draft head."""
    if source.path.is_dir() and source.config.get("model_type", "llama") == "llama":
        # Published heads call themselves Llama models; LlamaGen's own files have no config.json.
        head = head_part(source, "pairs")
        if head is not None:
            return Assembly("llamagen", {"draft_head": head})
    if source.config:
        return None
    found: dict[str, list[Checkpoint]] = {"target": [], "codec": []}
    for path in [source.path] if source.path.is_file() else source.files(".pt", ".pth", ".bin", ".ckpt", ".safetensors"):
        checkpoint = Checkpoint([path])
        for name, key in (("target", "layers.0.attention.wqkv.weight"), ("codec", "quantize.codebook_used")):
            if key in checkpoint:
                found[name].append(checkpoint)
        checkpoint.close()
    if not found["target"]:
        alone = source.path.is_file() and found["codec"]
        return Assembly("llamagen", {"codec": codec_part(found["codec"][0])}) if alone else None
    if len(found["target"]) > 1:
        names = ", ".join(checkpoint.files[0].name for checkpoint in found["target"])
        raise ValueError(f"{source.path} holds several models ({names}): give the path of one file")
    target = target_part(found["target"][0])
    kind = "t2i" if target.config["caption_dim"] else "c2i"
    assembly = Assembly(
        "llamagen",
        {"target": target},
        {**SAMPLING[kind], "temperature": 1.0, "top_p": 1.0, "grids": grids(found["target"][0], kind), "window": WINDOW},
    )
    codec = codec_checkpoint(source, found["codec"], kind)
    if codec is None:
        assembly.absent["codec"] = CODECS[kind]
    else:
        assembly.parts["codec"] = codec_part(codec)
    if kind == "c2i":
        table = ClassTokenizer(target.config["classes"]).to_json()
        assembly.parts["tokenizer"] = Part("ClassTokenizer", files={ClassTokenizer.file_name: table})
    else:
        add_text_encoder(assembly, source)
    return assembly


WINDOW = {"cpu": 16, "cuda": 32}


def target_part(checkpoint: Checkpoint) -> Part:
    """The decoder, its sizes read from the tensors."""
    codes, dim = checkpoint.shape("tok_embeddings.weight")
    layers = len([key for key in checkpoint.entries if re.fullmatch(r"layers\.\d+\.attention\.wqkv\.weight", key)])
    config: dict[str, Any] = {
        "vocab_size": codes,
        "dim": dim,
        "layers": layers,
        "heads": HEADS.get(dim, max(1, dim // 64)),
        "ffn": checkpoint.shape("layers.0.feed_forward.w1.weight")[0],
        "caption_dim": None,
        "classes": None,
    }
    recipes = {"codes.weight": Recipe(("tok_embeddings.weight",)), "head.weight": Recipe(("output.weight",))}
    if "cls_embedding.uncond_embedding" in checkpoint:
        config["text_slots"], config["caption_dim"] = checkpoint.shape("cls_embedding.uncond_embedding")
        recipes["caption.up.weight"] = Recipe(("cls_embedding.cap_proj.fc1.weight",))
        recipes["caption.down.weight"] = Recipe(("cls_embedding.cap_proj.fc2.weight",))
        recipes["caption.unconditional"] = Recipe(("cls_embedding.uncond_embedding",))
    elif "cls_embedding.embedding_table.weight" in checkpoint:
        config["classes"] = checkpoint.shape("cls_embedding.embedding_table.weight")[0] - 1
        recipes["labels.weight"] = Recipe(("cls_embedding.embedding_table.weight",))
    else:
        raise ValueError(f"{checkpoint.where} has neither a caption nor a class embedding: it is not one of LlamaGen's models")
    shape = BackboneConfig(dim=dim, layers=layers, heads=config["heads"], ffn=config["ffn"])
    recipes |= decoder_recipes(shape, style="fused")
    return Part("LlamaGenTarget", config, recipes, checkpoint, ignore=(r"^freqs_cis$", r"\.kv_cache\.", r"^causal_mask$"))


def grids(checkpoint: Checkpoint, kind: str) -> list[list[int]]:
    """Token grids [rows, columns], the trained one first: from the stored rotary table, else the file's name, else all."""
    if "freqs_cis" in checkpoint:
        rows = checkpoint.shape("freqs_cis")[0]
        side = round((rows - (120 if kind == "t2i" else 1)) ** 0.5)
        return [[side, side]]
    size = re.search(r"(256|384|512)", checkpoint.files[0].stem)
    sides = [int(size.group()) // 16] if size else [16, 24, 32]
    return [[side, side] for side in sides]


def codec_checkpoint(source: Source, beside: list[Checkpoint], kind: str) -> Checkpoint | None:
    """The VQ file: the one named, else the one in the same folder (of several, the one of this kind)."""
    if "codec" in source.named:
        return source.named["codec"].weights
    if source.path.is_file():
        beside = [Checkpoint([path]) for path in source.files() if path.stem.startswith("vq_")]
    fitting = [item for item in beside if f"_{kind}" in item.files[0].stem] if len(beside) > 1 else beside
    return fitting[0] if len(fitting) == 1 else None


def add_text_encoder(assembly: Assembly, source: Source) -> None:
    """T5's encoder and tokenizer: the folder named, else one in or under the checkpoint's folder."""
    place = source.named.get("text_encoder")
    if place is None:
        below = [path.parent for depth in ("*", "*/*") for path in sorted(source.folder.glob(f"{depth}/config.json"))]
        place = next(
            (item for item in map(Source, below) if item.config.get("model_type") == "t5" and tokenizer_files(item)), None
        )
    if place is None:
        assembly.absent.update(text_encoder=TEXT_ENCODER, tokenizer=TEXT_ENCODER)
        return
    assembly.parts["text_encoder"] = text_encoder_part(place)
    if not tokenizer_files(place):
        raise FileNotFoundError(f"{place.folder} has no tokenizer files beside T5's weights: fetch it again")
    assembly.parts["tokenizer"] = Part("AutoTokenizer", library="transformers", files=tokenizer_files(place))


def tokenizer_files(source: Source) -> dict[str, Path | str]:
    """The tokenizer's files in a folder, by name."""
    return {name: source.folder / name for name in TOKENIZER_FILES if (source.folder / name).is_file()}


def text_encoder_part(source: Source) -> Part:
    """The encoder half of a T5 folder."""
    checkpoint = source.weights
    if checkpoint is None or source.config.get("model_type") != "t5":
        raise ValueError(f"{source.path} is not a folder with a T5 model: give one such as {TEXT_ENCODER}")
    table = "shared.weight" if "shared.weight" in checkpoint else "encoder.embed_tokens.weight"
    names = [key for key in checkpoint.entries if key.startswith("encoder.") and key != "encoder.embed_tokens.weight"]
    recipes = {"shared.weight": Recipe((table,)), **{name: Recipe((name,)) for name in names}}
    config = {**source.config, "architectures": ["T5EncoderModel"]}
    ignore = (r"^decoder\.", r"^lm_head\.", r"embed_tokens\.weight$")
    tied = ("encoder.embed_tokens.weight",)
    return Part("T5EncoderModel", config, recipes, checkpoint, ignore, library="transformers", tied=tied)
