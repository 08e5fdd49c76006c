"""Chameleon's VQ decoder once more, from the papers' formulas, in numpy and float64: an opinion of its own to compare with.

`python -m tests.models.vqgan_numpy` (from the repository root) writes the golden pixels beside this file.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent / "golden-chameleon-vq.npz"
CODES, CODE_DIM, LATENT, WIDTH, MULTIPLIERS, BLOCKS = 16, 8, 64, 32, (1, 2, 2), 1
Array = np.ndarray
State = dict[str, Array]


def numbers(name: str, shape: tuple[int, ...]) -> Array:
    """Weights as a function of their name, the same everywhere: a hashed counter, uniform with variance 1 / fan-in."""
    count, key = int(np.prod(shape)), zlib.crc32(name.encode())
    with np.errstate(over="ignore"):
        x = (np.arange(count, dtype=np.uint64) + np.uint64(key << 20)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    uniform = ((x ^ (x >> np.uint64(31))) >> np.uint64(40)).astype(np.float64) / 2**24 * 2 - 1
    if name.endswith("embedding.weight"):
        return (1.5 * uniform).reshape(shape)
    if len(shape) == 1:
        return 0.3 * uniform + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
    return (uniform * (3.0 / np.prod(shape[1:])) ** 0.5).reshape(shape)


def shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of Meta's file that the decoder needs."""
    found: dict[str, tuple[int, ...]] = {"quantize.embedding.weight": (CODES, CODE_DIM)}

    def conv(name: str, inside: int, outside: int, size: int) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = (outside, inside, size, size), (outside,)

    def norm(name: str, channels: int) -> None:
        found[f"{name}.weight"] = found[f"{name}.bias"] = (channels,)

    def block(name: str, inside: int, outside: int) -> None:
        norm(f"{name}.norm1", inside)
        conv(f"{name}.conv1", inside, outside, 3)
        norm(f"{name}.norm2", outside)
        conv(f"{name}.conv2", outside, outside, 3)
        if inside != outside:
            conv(f"{name}.nin_shortcut", inside, outside, 1)

    widths = [WIDTH * factor for factor in MULTIPLIERS]
    last = widths[-1]
    conv("post_quant_conv", CODE_DIM, LATENT, 1)
    conv("decoder.conv_in", LATENT, last, 3)
    block("decoder.mid.block_1", last, last)
    norm("decoder.mid.attn_1.norm", last)
    for part in ("q", "k", "v", "proj_out"):
        conv(f"decoder.mid.attn_1.{part}", last, last, 1)
    block("decoder.mid.block_2", last, last)
    for level in reversed(range(len(widths))):
        for number in range(BLOCKS + 1):
            block(f"decoder.up.{level}.block.{number}", last, widths[level])
            last = widths[level]
        if level:
            conv(f"decoder.up.{level}.upsample.conv", last, last, 3)
    norm("decoder.norm_out", last)
    conv("decoder.conv_out", last, 3, 3)
    return found


def state() -> State:
    """The weights."""
    return {name: numbers(name, shape) for name, shape in shapes().items()}


def conv(w: State, name: str, x: Array) -> Array:
    """Convolution with zeros around: [C, H, W] -> [C', H, W]."""
    kernel = w[f"{name}.weight"]
    reach = kernel.shape[-1] // 2
    padded = np.pad(x, ((0, 0), (reach, reach), (reach, reach)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel.shape[2:], axis=(1, 2))
    return np.einsum("chwij,ocij->ohw", windows, kernel) + w[f"{name}.bias"][:, None, None]


def norm(w: State, name: str, x: Array) -> Array:
    """Group normalisation in 32 groups."""
    groups = x.reshape(32, -1)
    scaled = (groups - groups.mean(1, keepdims=True)) / np.sqrt(groups.var(1, keepdims=True) + 1e-6)
    return scaled.reshape(x.shape) * w[f"{name}.weight"][:, None, None] + w[f"{name}.bias"][:, None, None]


def swish(x: Array) -> Array:
    """x * sigmoid(x)."""
    return x / (1.0 + np.exp(-x))


def block(w: State, name: str, x: Array) -> Array:
    """Residual block."""
    h = conv(w, f"{name}.conv1", swish(norm(w, f"{name}.norm1", x)))
    h = conv(w, f"{name}.conv2", swish(norm(w, f"{name}.norm2", h)))
    return h + (conv(w, f"{name}.nin_shortcut", x) if f"{name}.nin_shortcut.weight" in w else x)


def attention(w: State, name: str, x: Array) -> Array:
    """One head over all places."""
    h = norm(w, f"{name}.norm", x)
    q, k, v = (conv(w, f"{name}.{part}", h).reshape(len(x), -1) for part in "qkv")
    scores = q.T @ k / np.sqrt(len(x))
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    return x + conv(w, f"{name}.proj_out", (v @ weights.T).reshape(x.shape))


def decode(w: State, tokens: Array) -> Array:
    """Codes [h, w] -> pixels [3, 4h, 4w], not clipped."""
    x = conv(w, "post_quant_conv", w["quantize.embedding.weight"][tokens].transpose(2, 0, 1))
    x = block(w, "decoder.mid.block_1", conv(w, "decoder.conv_in", x))
    x = block(w, "decoder.mid.block_2", attention(w, "decoder.mid.attn_1", x))
    for level in reversed(range(len(MULTIPLIERS))):
        for number in range(BLOCKS + 1):
            x = block(w, f"decoder.up.{level}.block.{number}", x)
        if level:
            x = conv(w, f"decoder.up.{level}.upsample.conv", x.repeat(2, 1).repeat(2, 2))
    return conv(w, "decoder.conv_out", swish(norm(w, "decoder.norm_out", x)))


def example() -> Array:
    """Codes of a picture that is not square: [2, 3, 5]."""
    return (np.arange(30).reshape(2, 3, 5) * 7 + 3) % CODES


if __name__ == "__main__":
    pixels = np.stack([decode(state(), tokens) for tokens in example()])
    np.savez_compressed(GOLDEN, tokens=example().astype(np.uint8), pixels=pixels.astype(np.float32))
