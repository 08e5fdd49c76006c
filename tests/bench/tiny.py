"""A model family small enough to draw in milliseconds; random weights."""

import torch
from foredraft.models.codecs.vq import VQCodec
from foredraft.models.embedded import EmbeddedTarget, WordTokenizer
from foredraft.pipelines.speculative import SpeculativePipeline

DEFAULTS = {
    "guidance_scale": 1.5,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "grids": [[8, 8]],
    "window": {"cpu": 4, "cuda": 8},
}


def save_tiny(folder):
    """Write the family into a folder: 8 x 8 tokens of 32 codes, 32 x 32 pixels."""
    torch.manual_seed(0)
    words = ["fox", "red", "apple", "on", "blue", "white", "circle"]
    tokenizer = WordTokenizer(["fox", "red apple"], {"blue": (0, 0, 255), "white": (255, 255, 255)}, words)
    shape = {"vocab_size": 32, "words": len(words) + 1, "dim": 32, "heads": 2, "ffn": 48}
    target, draft = EmbeddedTarget(layers=2, **shape), EmbeddedTarget(layers=1, guided=True, **shape)
    # Far enough from uniform that drafts are both accepted and rejected.
    for model in (target, draft):
        torch.nn.init.normal_(model.head.weight, std=0.6)
    codec = VQCodec(vocab_size=32, code_dim=4, width=8, upper_width=8)
    SpeculativePipeline(target, codec, tokenizer, draft, DEFAULTS).save_pretrained(folder)
    return folder
