"""LlamaGen once more, from its description alone: numpy, float64, no cache, every position at once.

`golden-llamagen.safetensors` holds some of its logits; when that file was written, the reference code (run outside this
repository) differed from them by 9e-6 at most.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def norm(x: Array, weight: Array) -> Array:
    """x [T, D]: divided by its root mean square."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight


def gelu(x: Array) -> Array:
    """The tanh form."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def turn(x: Array, text: int, side: int) -> Array:
    """Rotary positions of x [T, hd]: the first `text` rows vanish; image row i lies at (i // side, i % side)."""
    rows, width = x.shape
    quarter = width // 4
    out = np.zeros_like(x)
    for place in range(text, rows):
        cell = place - text
        for pair in range(width // 2):
            index = cell // side if pair < quarter else cell % side
            angle = index / 10000.0 ** ((pair % quarter) / quarter)
            even, odd = x[place, 2 * pair], x[place, 2 * pair + 1]
            out[place, 2 * pair] = even * np.cos(angle) - odd * np.sin(angle)
            out[place, 2 * pair + 1] = odd * np.cos(angle) + even * np.sin(angle)
    return out


def decoder(state: dict[str, Array], x: Array, reads: NDArray[np.bool_], text: int, side: int, heads: int) -> Array:
    """Embeddings x [T, D], reads [T, T] -> logits [T, V]."""
    layers = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("layers."))
    width = x.shape[1] // heads
    for layer in range(layers):
        own = {
            name.removeprefix(f"layers.{layer}."): value for name, value in state.items() if name.startswith(f"layers.{layer}.")
        }
        query, key, value = np.split(norm(x, own["attention_norm.weight"]) @ own["attention.wqkv.weight"].T, 3, axis=1)
        mixed = np.zeros_like(x)
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            scores = turn(query[:, part], text, side) @ turn(key[:, part], text, side).T / np.sqrt(width)
            weights = np.where(reads, np.exp(scores - np.where(reads, scores, -np.inf).max(1, keepdims=True)), 0.0)
            mixed[:, part] = weights / weights.sum(1, keepdims=True) @ value[:, part]
        x = x + mixed @ own["attention.wo.weight"].T
        y = norm(x, own["ffn_norm.weight"])
        gate, up = y @ own["feed_forward.w1.weight"].T, y @ own["feed_forward.w3.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ own["feed_forward.w2.weight"].T
    return norm(x, state["norm.weight"]) @ state["output.weight"].T


def text_logits(
    state: dict[str, Array], features: Array, count: int, codes: list[int], side: int, heads: int
) -> tuple[Array, Array]:
    """Conditional and unconditional logits [N, V] of every image position.

    features [120, C]: of the text encoder, the first `count` real; codes [N]: the image.
    """
    slots = len(features)
    shifted = np.concatenate((features[count:] * 0.0, features[:count]))
    both = []
    for caption in (shifted, state["cls_embedding.uncond_embedding"]):
        text = gelu(caption @ state["cls_embedding.cap_proj.fc1.weight"].T) @ state["cls_embedding.cap_proj.fc2.weight"].T
        x = np.concatenate((text, state["tok_embeddings.weight"][codes[:-1]]))
        # Both rows use the conditional text's mask; a slot of padding reads itself.
        place = np.arange(len(x))
        reads = (place[None] <= place[:, None]) & (place[None] >= slots - count) | (place[None] == place[:, None])
        both.append(decoder(state, x, reads, slots, side, heads)[slots - 1 :])
    return both[0], both[1]


def class_logits(state: dict[str, Array], number: int, codes: list[int], side: int, heads: int) -> tuple[Array, Array]:
    """Conditional and unconditional logits [N, V]; the last row of the table is the unconditional class."""
    table, both = state["cls_embedding.embedding_table.weight"], []
    for label in (number, len(table) - 1):
        x = np.concatenate((table[label : label + 1], state["tok_embeddings.weight"][codes[:-1]]))
        place = np.arange(len(x))
        both.append(decoder(state, x, place[None] <= place[:, None], 1, side, heads))
    return both[0], both[1]
