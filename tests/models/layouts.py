"""Tiny random checkpoints in the published layouts: the same keys and file types, small sizes."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

# Two heads of 64 features: the width is what LlamaGen's files tell the number of heads by.
DIM, LAYERS, FFN, CODES, CAPTION, SLOTS, CLASSES = 128, 2, 96, 64, 32, 120, 7
LEVELS = (1, 1, 2, 2, 4)


def random_state(shapes: dict[str, tuple[int, ...]], seed: int = 0, scale: float = 0.35) -> dict[str, Tensor]:
    """Normal numbers; norms near one. Lively enough that every tensor counts. The same numbers with every version of numpy."""
    generator = np.random.RandomState(seed)
    state = {}
    for name, shape in shapes.items():
        numbers = torch.from_numpy(generator.standard_normal(shape).astype(np.float32))
        norm = "norm" in name and name.endswith("weight")
        state[name] = 1 + 0.1 * numbers if norm else numbers * (scale if len(shape) < 2 else scale / 128**0.5 * 4)
    return state


def llamagen_shapes(kind: str = "t2i", dim: int = DIM, layers: int = LAYERS, ffn: int = FFN) -> dict[str, tuple[int, ...]]:
    """Keys and shapes of a GPT checkpoint of github.com/FoundationVision/LlamaGen."""
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (CODES, dim)}
    if kind == "t2i":
        shapes["cls_embedding.uncond_embedding"] = (SLOTS, CAPTION)
        shapes["cls_embedding.cap_proj.fc1.weight"] = (dim, CAPTION)
        shapes["cls_embedding.cap_proj.fc2.weight"] = (dim, dim)
    else:
        shapes["cls_embedding.embedding_table.weight"] = (CLASSES + 1, dim)
    for layer in range(layers):
        own = f"layers.{layer}."
        shapes[f"{own}attention.wqkv.weight"] = (3 * dim, dim)
        shapes[f"{own}attention.wo.weight"] = (dim, dim)
        shapes[f"{own}feed_forward.w1.weight"] = (ffn, dim)
        shapes[f"{own}feed_forward.w3.weight"] = (ffn, dim)
        shapes[f"{own}feed_forward.w2.weight"] = (dim, ffn)
        shapes[f"{own}attention_norm.weight"] = (dim,)
        shapes[f"{own}ffn_norm.weight"] = (dim,)
    shapes["norm.weight"] = (dim,)
    shapes["output.weight"] = (CODES, dim)
    return shapes


def llamagen_state(kind: str = "t2i", seed: int = 0, **sizes: int) -> dict[str, Tensor]:
    """A GPT checkpoint. The embeddings differ enough for drafts to be wrong sometimes."""
    state = random_state(llamagen_shapes(kind, **sizes), seed)
    for name in ("tok_embeddings.weight", "cls_embedding.embedding_table.weight", "cls_embedding.uncond_embedding"):
        if name in state:
            state[name] = state[name] * 6
    state["output.weight"] = state["output.weight"] * 1.5
    return state


def vq_shapes(base: int = 32, latent: int = 32, levels: tuple[int, ...] = LEVELS, blocks: int = 1) -> dict[str, tuple[int, ...]]:
    """Keys and shapes of LlamaGen's VQ file: two to three residual blocks per level, attention at the coarsest."""
    shapes: dict[str, tuple[int, ...]] = {}

    def conv(name: str, inside: int, outside: int, kernel: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (outside, inside, kernel, kernel), (outside,)

    def norm(name: str, width: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (width,), (width,)

    def residual(name: str, inside: int, outside: int) -> None:
        norm(f"{name}.norm1", inside)
        conv(f"{name}.conv1", inside, outside, 3)
        norm(f"{name}.norm2", outside)
        conv(f"{name}.conv2", outside, outside, 3)
        if inside != outside:
            conv(f"{name}.nin_shortcut", inside, outside, 1)

    def attention(name: str, width: int) -> None:
        norm(f"{name}.norm", width)
        for part in ("q", "k", "v", "proj_out"):
            conv(f"{name}.{part}", width, width, 1)

    def middle(name: str, width: int) -> None:
        residual(f"{name}.mid.0", width, width)
        attention(f"{name}.mid.1", width)
        residual(f"{name}.mid.2", width, width)

    widths, last = [base * level for level in levels], len(levels) - 1
    conv("encoder.conv_in", 3, base, 3)
    for level, width in enumerate(widths):
        inside = widths[max(level - 1, 0)]
        for block in range(blocks):
            residual(f"encoder.conv_blocks.{level}.res.{block}", inside if block == 0 else width, width)
            if level == last:
                attention(f"encoder.conv_blocks.{level}.attn.{block}", width)
        if level != last:
            conv(f"encoder.conv_blocks.{level}.downsample.conv", width, width, 3)
    middle("encoder", widths[-1])
    norm("encoder.norm_out", widths[-1])
    conv("encoder.conv_out", widths[-1], latent, 3)
    shapes["quantize.embedding.weight"] = (CODES, 8)
    shapes["quantize.codebook_used"] = (65536,)
    conv("quant_conv", latent, 8, 1)
    conv("post_quant_conv", 8, latent, 1)
    conv("decoder.conv_in", latent, widths[-1], 3)
    middle("decoder", widths[-1])
    inside = widths[-1]
    for place, width in enumerate(reversed(widths)):
        for block in range(blocks + 1):
            residual(f"decoder.conv_blocks.{place}.res.{block}", inside, width)
            inside = width
            if place == 0:
                attention(f"decoder.conv_blocks.{place}.attn.{block}", width)
        if place != last:
            conv(f"decoder.conv_blocks.{place}.upsample.conv", width, width, 3)
    norm("decoder.norm_out", widths[0])
    conv("decoder.conv_out", widths[0], 3, 3)
    return shapes


def vq_state(seed: int = 1, **sizes: Any) -> dict[str, Tensor]:
    """A VQ checkpoint."""
    return random_state(vq_shapes(**sizes), seed, scale=0.3)


def save_state(state: dict[str, Tensor], path: Path, form: str) -> Path:
    """Write a state dict as published files are.

    form: ddp ("model", with the training script's arguments), deepspeed ("module"), lightning ("state_dict"), bare, legacy (the
    old format, which cannot be mapped), safetensors.
    """
    if form == "safetensors":
        path = path.with_suffix(".safetensors")
        save_file(state, path)
        return path
    key = {"ddp": "model", "deepspeed": "module", "lightning": "state_dict"}.get(form)
    content: Any = {key: state, "args": Namespace(gpt_model="GPT-XL"), "steps": 7} if key else state
    torch.save(content, path, _use_new_zipfile_serialization=form != "legacy")
    return path


def t5_folder(folder: Path, sharded: bool = False) -> Path:
    """A tiny FLAN-T5 in transformers' layout: gated GELU, both halves, a word tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

    words = "a of the red apple fox cat on blue polar bear photo painting in forest".split()
    vocabulary = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>", *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    torch.manual_seed(5)
    shape = {"d_model": CAPTION, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": len(vocabulary)}
    model = T5ForConditionalGeneration(T5Config(feed_forward_proj="gated-gelu", tie_word_embeddings=False, **shape))
    model.save_pretrained(folder, max_shard_size="30KB" if sharded else "5GB")
    fast.save_pretrained(folder)
    return folder


def llamagen_folder(folder: Path, kind: str = "t2i", form: str = "ddp", name: str | None = None) -> Path:
    """A folder as a user of LlamaGen has it: GPT, VQ, and T5 beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = name or {"t2i": "t2i_XL_stage1_256", "c2i": "c2i_B_256"}[kind]
    save_state(llamagen_state(kind), folder / f"{stem}.pt", form)
    save_state(vq_state(), folder / f"vq_ds16_{kind}.pt", "ddp")
    if kind == "t2i":
        t5_folder(folder / "t5-ckpt" / "flan-t5-xl")
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def head_folder(folder: Path, target: dict[str, Tensor], vocabulary: int | None = None) -> Path:
    """A draft head in the layout of jadohu/llamagen_drafter: the frozen embedding is the target's output head."""
    width = DIM
    shapes: dict[str, tuple[int, ...]] = {f"layers.0.self_attn.{name}_proj.weight": (width, width) for name in "qkvo"}
    shapes |= {"layers.0.mlp.gate_proj.weight": (FFN, width), "layers.0.mlp.up_proj.weight": (FFN, width)}
    shapes |= {"layers.0.mlp.down_proj.weight": (width, FFN), "layers.0.post_attention_layernorm.weight": (width,)}
    shapes |= {"fc.weight": (width, 2 * width), "fc.bias": (width,)}
    state = {"embed_tokens.weight": target["output.weight"][:vocabulary].clone(), **random_state(shapes, 9)}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": FFN,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "vocab_size": CODES,
        "input_type": "t2i",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(state, folder / "pytorch_model.bin")
    return folder
