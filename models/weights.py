"""From a checkpoint's tensors to ours: which are joined, permuted or renamed, and whether they fit.

A family describes what it found as an `Assembly` of parts; each part says how every tensor of its component is made. That is
checked by shapes alone before anything is read, and then either built in memory or streamed into a folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from .backbone import BackboneConfig
from .checkpoint import Checkpoint, Source


def same(tensor: Tensor) -> Tensor:
    """The tensor as it is."""
    return tensor


def joined(*tensors: Tensor) -> Tensor:
    """Stacked along the output features."""
    return torch.cat(tensors)


def halves_to_pairs(weight: Tensor, heads: int) -> Tensor:
    """Reorder the output features [H * hd, ...] of each head from two rotary halves to interleaved (even, odd) pairs."""
    halves = weight.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).reshape(weight.shape)


@dataclass(frozen=True)
class Recipe:
    """One of our tensors: made of the checkpoint's tensors `keys` by `make`, which must accept meta tensors too."""

    keys: tuple[str, ...]
    make: Callable[..., Tensor] = same

    def read(self, checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor, on the CPU and contiguous; floating ones in `dtype` (None: as stored)."""
        tensor = self.make(*(checkpoint.read(key) for key in self.keys)).contiguous()
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    def planned(self, checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> Tensor:
        """The same on the meta device: shape and dtype without reading."""
        stored = (torch.empty(checkpoint.shape(key), dtype=checkpoint.dtype(key), device="meta") for key in self.keys)
        tensor = self.make(*stored)
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


@dataclass
class Part:
    """One component of a pipeline, found in a checkpoint.

    class_name: a class of `loading.CLASSES` with `config` its arguments, or of transformers (library="transformers") with
    `config` its configuration. weights: our name of every tensor -> how it is made; {} for tokenizers. ignore: regular
    expressions of checkpoint keys that nobody needs. files: files of the component by name: a path is copied, a text is written.
    tied: names the class fills in itself.
    """

    class_name: str
    config: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Recipe] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    ignore: tuple[str, ...] = ()
    files: dict[str, Path | str] = field(default_factory=dict)
    library: str | None = None
    tied: tuple[str, ...] = ()


@dataclass
class Assembly:
    """What a family found: its name, its components, its sampling defaults.

    absent: components the family needs and that were not found -> where the Hub has them.
    """

    family: str
    parts: dict[str, Part]
    defaults: dict[str, Any] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


def skeleton(part: Part, cls: Any) -> nn.Module:
    """The component without numbers, on the meta device."""
    with init_empty_weights():
        return cls(cls.config_class(**part.config)) if part.library else cls(**part.config)


def shapes(part: Part, cls: Any) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor the component is saved with."""
    state = skeleton(part, cls).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items() if name not in part.tied}


def check(assembly: Assembly, classes: Callable[[Part], Any], names: list[str] | None = None) -> None:
    """Raise ValueError unless every tensor of the components `names` (None: all) can be made and nothing is left over."""
    used: dict[int, tuple[Checkpoint, set[str], list[str], list[str]]] = {}
    for name, part in assembly.parts.items():
        if part.checkpoint is None or not part.weights:
            continue
        _, keys, ignore, checked = used.setdefault(id(part.checkpoint), (part.checkpoint, set(), [], []))
        keys |= {key for recipe in part.weights.values() for key in recipe.keys}
        ignore += part.ignore
        if names is None or name in names:
            checked.append(name)
    for checkpoint, keys, ignore, checked in used.values():
        missing: list[str] = []
        wrong: list[str] = []
        for name in checked:
            part = assembly.parts[name]
            for key, problem in misfits(part, classes(part)):
                (wrong if problem else missing).append(f"{key!r}{problem}")
        known = re.compile("|".join(f"(?:{pattern})" for pattern in ignore) or r"(?!)")
        unexpected = [repr(key) for key in checkpoint.entries if key not in keys and not known.search(key)]
        found = [("missing", missing), ("unexpected", unexpected if checked else []), ("of another shape", wrong)]
        problems = [f"{len(items)} {'is' if len(items) == 1 else 'are'} {what} ({some(items)})" for what, items in found if items]
        if problems:
            raise ValueError(
                f"the tensors in {checkpoint.where} do not fit {assembly.family}'s {' and '.join(checked)}: "
                f"{', '.join(problems)}; is this another model's file?"
            )


def misfits(part: Part, cls: Any) -> Iterator[tuple[str, str]]:
    """Tensors that cannot be made: (checkpoint key or our name, "" where it is missing, else what its shape is)."""
    if part.checkpoint is None:
        return
    for name, shape in shapes(part, cls).items():
        recipe = part.weights.get(name)
        absent = [name] if recipe is None else [key for key in recipe.keys if key not in part.checkpoint]
        if recipe is None or absent:
            yield from ((key, "") for key in absent)
            continue
        try:
            made = tuple(recipe.planned(part.checkpoint).shape)
        except (RuntimeError, IndexError, ValueError):
            stored = (part.checkpoint.shape(key) for key in recipe.keys)
            yield recipe.keys[0], f" {' with '.join(str(list(size)) for size in stored)} for {list(shape)}"
            continue
        if made != shape:
            yield recipe.keys[0], f" {list(made)} for {list(shape)}"


def some(items: list[str], limit: int = 2) -> str:
    """The first few of a list."""
    return ", ".join(items[:limit]) + (", ..." if len(items) > limit else "")


def build(part: Part, cls: Any, dtype: torch.dtype) -> Any:
    """The component in memory, ready to run."""
    model: Any = skeleton(part, cls)
    checkpoint = part.checkpoint
    if checkpoint is None:
        raise ValueError(f"no weights were found for {part.class_name}")
    wide = getattr(model, "_keep_in_fp32_modules", None) or ()
    state = {}
    for name, recipe in part.weights.items():
        keep = dtype == torch.float16 and any(word in name.split(".") for word in wide)
        tensor = recipe.read(checkpoint, torch.float32 if keep else dtype)
        # Not a view of a file that may go away.
        shared = len(recipe.keys) == 1 and tensor.dtype == checkpoint.dtype(recipe.keys[0])
        state[name] = tensor.clone() if shared else tensor
    checkpoint.close()
    model.load_state_dict(state, strict=not part.tied, assign=True)
    if part.tied:
        model.tie_weights()
    return model.eval()


# -- what many families share ----------------------------------------------------------------------------------------


def decoder_recipes(config: BackboneConfig, prefix: str = "", ours: str = "backbone.", style: str = "llama") -> dict[str, Recipe]:
    """Recipes of a `Backbone`'s tensors.

    style "llama": names of transformers' Llama, rotary halves become pairs. "pairs": the same names, pairs already. "fused":
    LlamaGen's own names. prefix: of the checkpoint's keys, before `layers.` and `norm.`. qk-norm and biases as in `config`.
    """
    recipes = {f"{ours}norm.weight": Recipe((f"{prefix}norm.weight",))}
    for layer in range(config.layers):
        recipes |= block_recipes(config, f"{prefix}layers.{layer}.", f"{ours}blocks.{layer}.", style)
    return recipes


def block_recipes(config: BackboneConfig, theirs: str, ours: str, style: str = "llama") -> dict[str, Recipe]:
    """Recipes of one `Block`."""
    if style == "fused":
        names = {
            "attention_norm": "attention_norm",
            "attention.qkv": "attention.wqkv",
            "attention.out": "attention.wo",
            "ffn_norm": "ffn_norm",
            "down": "feed_forward.w2",
        }
        recipes = {f"{ours}{own}.weight": Recipe((f"{theirs}{name}.weight",)) for own, name in names.items()}
        gate_up = (f"{theirs}feed_forward.w1.weight", f"{theirs}feed_forward.w3.weight")
        return {**recipes, f"{ours}gate_up.weight": Recipe(gate_up, joined)}
    if style not in ("llama", "pairs"):
        raise ValueError(f"unknown style {style!r}; choose 'llama', 'pairs' or 'fused'")

    def turned(weight: Tensor, heads: int) -> Tensor:
        return weight if style == "pairs" else halves_to_pairs(weight, heads)

    def qkv(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.cat((turned(query, config.heads), turned(key, config.groups), value))

    def one_head(weight: Tensor) -> Tensor:
        return turned(weight, 1)

    attention, mlp = f"{theirs}self_attn.", f"{theirs}mlp."
    recipes = {
        f"{ours}attention_norm.weight": Recipe((f"{theirs}input_layernorm.weight",)),
        f"{ours}attention.out.weight": Recipe((f"{attention}o_proj.weight",)),
        f"{ours}ffn_norm.weight": Recipe((f"{theirs}post_attention_layernorm.weight",)),
        f"{ours}gate_up.weight": Recipe((f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"), joined),
        f"{ours}down.weight": Recipe((f"{mlp}down_proj.weight",)),
    }
    for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
        recipes[f"{ours}attention.qkv.{kind}"] = Recipe(tuple(f"{attention}{name}_proj.{kind}" for name in "qkv"), qkv)
    for name in ("q_norm", "k_norm") if config.qk_norm else ():
        recipes[f"{ours}attention.{name}.weight"] = Recipe((f"{attention}{name}.weight",), one_head)
    return recipes


def head_part(source: Source, style: str, text: str = "zero") -> Part | None:
    """A draft head in EAGLE's published layout (config.json beside the weights), or None where the files hold none.

    style: of the rotary pairs, as in `decoder_recipes`. text: see `DraftHead`.
    """
    checkpoint, given = source.weights, source.config
    if checkpoint is None or "fc.weight" not in checkpoint or "layers.0.self_attn.q_proj.weight" not in checkpoint:
        return None
    dim, heads = checkpoint.shape("fc.weight")[0], given.get("num_attention_heads")
    if not isinstance(heads, int):
        raise ValueError(f"{source.path} has no config.json with num_attention_heads: fetch the draft head again")
    layers = len([key for key in checkpoint.entries if re.fullmatch(r"layers\.\d+\.self_attn\.q_proj\.weight", key)])
    config: dict[str, Any] = {
        "dim": dim,
        "layers": layers,
        "heads": heads,
        "ffn": checkpoint.shape("layers.0.mlp.gate_proj.weight")[0],
        "kv_heads": given.get("num_key_value_heads") or heads,
        "norm": "rms",
        "eps": given.get("rms_norm_eps", 1e-6),
        "qkv_bias": "layers.0.self_attn.q_proj.bias" in checkpoint,
        "first_norm": "layers.0.input_layernorm.weight" in checkpoint,
        "vocab_size": checkpoint.shape("embed_tokens.weight")[0] if "embed_tokens.weight" in checkpoint else None,
        "text": text,
    }
    shape = BackboneConfig(
        dim=dim, layers=layers, heads=heads, ffn=config["ffn"], kv_heads=config["kv_heads"], qkv_bias=config["qkv_bias"]
    )
    recipes = {"fc.weight": Recipe(("fc.weight",)), "fc.bias": Recipe(("fc.bias",))}
    if "fc.bias" not in checkpoint:
        recipes["fc.bias"] = Recipe(("fc.weight",), lambda weight: torch.zeros_like(weight[:, 0]))
    if config["vocab_size"]:
        recipes["codes.weight"] = Recipe(("embed_tokens.weight",))
    for layer in range(layers):
        recipes |= block_recipes(shape, f"layers.{layer}.", f"blocks.{layer}.", style)
    if not config["first_norm"]:
        del recipes["blocks.0.attention_norm.weight"]
    return Part("DraftHead", config, recipes, checkpoint, ignore=(r"\.rotary_emb\.inv_freq$",))
