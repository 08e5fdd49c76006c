"""Tiny random models of transformers' own classes, with tokenizers: peers to compare with, and checkpoints of their layout."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from foredraft.decoding.types import Draft
from foredraft.models.checkpoint import Checkpoint, Entry, Source
from foredraft.models.codecs.chameleon_vq import ChameleonCodec
from foredraft.models.loading import part_class
from foredraft.models.weights import Assembly, Part, check, shapes
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
JANUS_CODES, CHAMELEON_CODES = 40, 24
JANUS_SPECIAL = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<image_placeholder>",
    "<begin_of_image>",
    "<end_of_image>",
    "<|User|>",
    "<|Assistant|>",
)


def lively(model: torch.nn.Module, seed: int = 0) -> Any:
    """The model with weights that leave nothing at its default."""
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = 0.3 if weight.ndim == 1 or "norm" in name else 1.6 * max(weight[0].numel(), 4) ** -0.5
            scale = 1.0 if "embed" in name else scale
            noise = torch.randn(weight.shape, generator=dice) * scale
            weight.copy_(noise + (1.0 if "norm" in name and name.endswith("weight") else 0.0))
    return model.eval()


def tokenizer(vocabulary: dict[str, int], special: list[str], **names: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges."""
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def numbered(*groups: tuple[str, ...] | list[str]) -> dict[str, int]:
    """Names in order -> ids."""
    return {name: index for index, name in enumerate(name for group in groups for name in group)}


def janus_tokenizer() -> PreTrainedTokenizerFast:
    """Janus's special tokens and bytes."""
    begin, end, pad, image, boi, eoi, *_ = JANUS_SPECIAL
    names = {"bos_token": begin, "eos_token": end, "pad_token": pad}
    extra = {"image_token": image, "boi_token": boi, "eoi_token": eoi}
    return tokenizer(numbered(JANUS_SPECIAL, BYTES), list(JANUS_SPECIAL), extra_special_tokens=extra, **names)


def janus(side: int = 6) -> Any:
    """JanusForConditionalGeneration that draws side x side codes."""
    text = transformers.LlamaConfig(
        vocab_size=len(JANUS_SPECIAL) + len(BYTES),
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    vision = transformers.JanusVisionConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=16 * side,
        patch_size=16,
        projection_dim=32,
        num_image_tokens=side * side,
    )
    vq = transformers.JanusVQVAEConfig(
        embed_dim=8,
        num_embeddings=JANUS_CODES,
        latent_channels=32,
        base_channels=32,
        channel_multiplier=[1, 1, 1, 1, 2],
        num_res_blocks=1,
        projection_dim=32,
        image_token_embed_dim=32,
    )
    config = transformers.JanusConfig(text_config=text, vision_config=vision, vq_config=vq, image_token_id=3)
    model = lively(transformers.JanusForConditionalGeneration(config))
    model.generation_config.bos_token_id, model.generation_config.pad_token_id = 0, 2
    model.generation_config.generation_kwargs = {"boi_token_id": JANUS_SPECIAL.index("<begin_of_image>")}
    return model


def chameleon_vocabulary() -> dict[str, int]:
    """Names of Chameleon's vocabulary, the codes in an order of their own."""
    order = torch.randperm(CHAMELEON_CODES, generator=torch.Generator().manual_seed(5)).tolist()
    letters = str.maketrans("0123456789", "ABCDEFGHIJ")
    codes = [f"IMGIMG{str(code).translate(letters)}Z" for code in order]
    rest = ["<eoss>", "<racm3:break>", "<reserved08706>", "<image>", "<reserved08799>"]
    sizes = [f"<reserved{8800 + patches:05d}>" for patches in range(1, 25)]
    return numbered(["<s>", "<pad>", "</s>", "<unk>"], codes, rest, sizes, BYTES)


def chameleon_tokenizer() -> PreTrainedTokenizerFast:
    """Chameleon's special tokens, codes and bytes."""
    table = chameleon_vocabulary()
    special = [name for name in table if name.startswith("<") and len(name) > 1]
    return tokenizer(table, special, bos_token="<s>", pad_token="<pad>", eos_token="</s>", sep_token="<reserved08706>")


def chameleon(swin: bool = False, kv_heads: int = 4) -> Any:
    """ChameleonForConditionalGeneration."""
    vocabulary = chameleon_vocabulary()
    vq = transformers.ChameleonVQVAEConfig(
        embed_dim=16,
        num_embeddings=CHAMELEON_CODES,
        latent_channels=32,
        base_channels=32,
        channel_multiplier=[1, 1, 1, 1, 2],
        num_res_blocks=1,
    )
    config = transformers.ChameleonConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        swin_norm=swin,
        vq_config=vq,
        vocabulary_map=vocabulary,
    )
    return lively(transformers.ChameleonForConditionalGeneration(config))


def chameleon_codec() -> ChameleonCodec:
    """Its image tokenizer, the half that draws."""
    sizes = {"code_dim": 16, "latent": 32, "width": 32, "multipliers": (1, 1, 1, 1, 2), "blocks": 1}
    return lively(ChameleonCodec(vocab_size=CHAMELEON_CODES, **sizes), 1)


def write_vqgan(folder: Path) -> Path:
    """Meta's file: a training checkpoint with the encoder and the loss in it."""
    state = chameleon_codec().state_dict()
    others = {name: torch.zeros(2) for name in ("encoder.conv_in.weight", "quant_conv.weight", "loss.logvar")}
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"state_dict": {**state, **others}, "epoch": 3}, folder / "vqgan.ckpt")
    return folder / "vqgan.ckpt"


def save_lumina(model: Any, folder: Path) -> Path:
    """Lumina-mGPT's folder: no image tokenizer among the weights; Meta's file beside them."""
    state = {name: tensor for name, tensor in model.state_dict().items() if ".vqmodel." not in name}
    config = {**model.config.to_dict(), "model_type": "chameleon", "mask_image_logits": False, "z_loss_weight": 1e-5}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(state, folder / "model.safetensors")
    chameleon_tokenizer().save_pretrained(folder)
    write_vqgan(folder)
    return folder


def save_anole(model: Any, folder: Path) -> Path:
    """Anole's folder in transformers' layout: the image tokenizer's decoder among the weights."""
    save_transformers(model, chameleon_tokenizer(), folder)
    codec = {f"model.vqmodel.{name}": tensor for name, tensor in chameleon_codec().state_dict().items()}
    save_file({**model.state_dict(), **codec}, folder / "model.safetensors")
    return folder


def save_meta(model: Any, folder: Path) -> Path:
    """Meta's and Anole's original layout: models/7b and tokenizer; rotary pairs are neighbours, one qk-norm for all heads."""
    renamed = {
        "self_attn.q_proj": "attention.wq",
        "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo",
        "self_attn.q_norm": "attention.q_normalization",
        "self_attn.k_norm": "attention.k_normalization",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "lm_head": "output",
        "embed_tokens": "tok_embeddings",
    }
    config, state = model.config, {"rope.freqs": torch.zeros(4)}
    width = config.hidden_size // config.num_attention_heads
    for name, tensor in model.state_dict().items():
        if ".vqmodel." in name:
            continue
        new = name.removeprefix("model.")
        for old, by in renamed.items():
            new = new.replace(old, by)
        if "q_proj" in name or "k_proj" in name:
            tensor = tensor.view(-1, 2, width // 2, tensor.shape[-1]).transpose(1, 2).reshape(tensor.shape)
        elif "q_norm" in name or "k_norm" in name:
            tensor = tensor[0].view(2, -1).t().reshape(-1)
        state[new] = tensor.clone()
    place = folder / "models" / "7b"
    place.mkdir(parents=True, exist_ok=True)
    torch.save(state, place / "consolidated.pth")
    sizes = {"dim": config.hidden_size, "n_heads": config.num_attention_heads, "norm_eps": 1e-5, "rope_theta": 5000.0}
    (place / "params.json").write_text(json.dumps({"model": sizes}), encoding="utf-8")
    (place / "consolidate_params.json").write_text(json.dumps({"model_parallel_size": 1}), encoding="utf-8")
    write_vqgan(folder / "tokenizer")
    chameleon_tokenizer().backend_tokenizer.save(str(folder / "tokenizer" / "text_tokenizer.json"))
    return folder


def save_transformers(model: Any, words: PreTrainedTokenizerFast, folder: Path, **config: Any) -> Path:
    """A folder as transformers writes it; config: further entries of config.json."""
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    if config:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **config}), encoding="utf-8")
    return folder


@torch.inference_mode()
def along(target: Any, sequence: Any, tokens: torch.Tensor, widths: tuple[int, ...] = (0, 3, 11, 40)) -> torch.Tensor:
    """Raw logits [R, N, V] of every index while tokens [B, N] are decoded in chunks of several widths, cached as in a run."""
    found, turn = [], 0
    while not sequence.done:
        first = sequence.low - 1
        width = min(widths[turn % len(widths)], tokens.shape[1] - first - 1)
        hidden = target.features(sequence, Draft(tokens[:, first : first + width]))
        assert sequence.low == sequence.high
        found.append((first, target.logits(hidden[:, -(width + 1) :])))
        count = torch.full((len(tokens),), width + 1)
        sequence.commit(tokens[:, first : first + width + 1], count, count - 1)
        sequence.refresh()
        turn += 1
    logits = torch.full((found[0][1].shape[0], tokens.shape[1], found[0][1].shape[2]), torch.nan, dtype=found[0][1].dtype)
    for first, piece in found:
        logits[:, first : first + piece.shape[1]] = piece
    return logits


def largest_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """max |one - other|, after checking that the comparison is of something."""
    assert one.shape == other.shape and float(other.std()) > 0.3
    return float((one - other).abs().max())


def write_pickles(state: dict[str, torch.Tensor], folder: Path, config: dict[str, Any], shards: int = 1) -> None:
    """pytorch_model.bin, or several of them with an index, and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return
    names, where = sorted(state), {}
    for shard in range(shards):
        file = f"pytorch_model-{shard + 1:05d}-of-{shards:05d}.bin"
        torch.save({name: state[name] for name in names[shard::shards]}, folder / file)
        where.update(dict.fromkeys(names[shard::shards], file))
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}), encoding="utf-8")


class Skeleton(Checkpoint):
    """A checkpoint of which only names and shapes exist."""

    def __init__(self, tensors: dict[str, torch.Tensor], where: Path):
        super().__init__([])
        self.files = [where]
        self.entries = {name: Entry(where, tuple(tensor.shape), torch.bfloat16) for name, tensor in tensors.items()}


def assembly_of(model: Any, config: Any, family: str, folder: Path) -> Assembly:
    """What a family recognises in a model on the meta device, checked by names and shapes."""
    source = Source(folder)
    source.__dict__["config"] = json.loads(config.to_json_string(use_diff=False))
    source.__dict__["weights"] = Skeleton(model.state_dict(), folder / "model.safetensors")
    found = importlib.import_module(f"foredraft.models.{family}").recognise(source)
    assert found is not None
    check(found, part_class)
    return found


def parameters(part: Part) -> int:
    """Numbers in a component."""
    return sum(torch.Size(shape).numel() for shape in shapes(part, part_class(part)).values())
