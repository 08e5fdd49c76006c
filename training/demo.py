"""`foredraft train demo`: the embedded family rebuilt from public packages, stage by stage.

pictures -> codec -> token banks -> target -> draft on ground truth -> the target's own pictures -> distilled draft -> the
family's folder, to which `foredraft train head` adds the draft head. Every stage resumes from its checkpoint in the work folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from ..decoding.sampling import Sampling
from ..models.codecs.vq import VQCodec
from ..models.embedded import EmbeddedTarget, WordTokenizer
from .adherence import save_reference
from .bank import build_bank
from .common import half_state
from .data import FAINT, FINE, NARROW, Augmentation, load_pictures, premultiply
from .distill import DistillRecipe, distill, own_bank
from .measure import measure
from .names import COLOURS, MAX_WORDS, NAMES, word_table
from .target import TargetRecipe, train_on_bank
from .tokenizer import TokenizerRecipe, reconstruction_psnr, train_codec

logger = logging.getLogger(__name__)

DEMO = Path(__file__).parents[1] / "models" / "demo"
_STATIC = ("README.md", "LICENSES")


@dataclass(frozen=True)
class Recipe:
    """Everything but the seed that decides the weights.

    Attributes:
        ranges: the augmentation from which share of target's and draft's steps on; the codec sees the first.
        per_name, held_per_name: pictures of each name in each token bank, and in the held-out one.
        layers, width: the target's; the draft has one layer.
        measured: pictures the figures are taken from.
    """

    codec: TokenizerRecipe = TokenizerRecipe()
    ranges: tuple[tuple[float, Augmentation], ...] = (
        (0.0, Augmentation()),
        (0.35, NARROW),
        (0.565, FINE),
        (0.78, FAINT),
    )
    per_name: int = 64
    held_per_name: int = 4
    target: TargetRecipe = TargetRecipe()
    draft: TargetRecipe = TargetRecipe(steps=4000, shallow=0.0)
    distillation: DistillRecipe = DistillRecipe()
    layers: int = 22
    width: int = 128
    codec_width: int = 96
    measured: int = 400


FULL = Recipe()
SMOKE = Recipe(
    codec=TokenizerRecipe(steps=60, save_every=30),
    per_name=1,
    held_per_name=1,
    target=TargetRecipe(steps=24, save_every=12),
    draft=TargetRecipe(steps=30, save_every=15),
    distillation=DistillRecipe(own_pictures=16, sample_batch=8, steps=8, save_every=4),
    layers=4,
    width=64,
    codec_width=32,
    measured=8,
)


def train_demo(
    out_dir: str | Path,
    data: str | Path | None = None,
    smoke: bool = False,
    work_dir: str | Path | None = None,
    resume: bool = True,
    seed: int = 0,
    device: str = "auto",
) -> dict[str, float]:
    """Train the embedded family and write its folder.

    Args:
        out_dir: the family's folder, e.g. models/demo; its weights are replaced only when all stages are done.
        data: folder with noto_emoji64_rgba.npz; None fetches the pictures with npm.
        smoke: a size that runs through every stage in at most two minutes and draws nothing recognisable.
        work_dir: checkpoints, kept; default `<out_dir>.work`.
        resume: continue from the checkpoints in `work_dir`; False starts over.
        seed: of weights, augmentation and order.
        device: "auto" (a GPU if there is one), or a torch device.

    Returns:
        The figures of `measure` and the codec's PSNR in dB.
    """
    recipe, out = (SMOKE if smoke else FULL), Path(out_dir)
    base = Path(work_dir) if work_dir is not None else out.with_name(f"{out.name}.work")
    work = base / ("smoke" if smoke else "full")
    _open_work(work, recipe, seed, resume)
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    return _stages(recipe, out, Path(data) if data is not None else None, base, work, seed, place)


def _stages(
    recipe: Recipe, out: Path, data: Path | None, base: Path, work: Path, seed: int, device: torch.device
) -> dict[str, float]:
    pictures = load_pictures(data, base)
    rgba = premultiply(pictures)
    torch.manual_seed(seed)
    codec, wide = VQCodec(width=recipe.codec_width), recipe.ranges[0][1]
    codec = train_codec(codec, rgba, wide, recipe.codec, work / "codec.pt", seed, device)
    banks = {}
    for index, (share, ranges) in enumerate(recipe.ranges):
        path, label = work / f"bank-{index}.pt", f"token bank {index + 1}/{len(recipe.ranges)}"
        banks[share] = build_bank(codec, rgba, recipe.per_name, ranges, path, seed, label)
    last, final = recipe.ranges[-1]
    held = build_bank(codec, rgba, recipe.held_per_name, final, work / "held.pt", seed + 1000, "held-out bank")
    target = _model(recipe, seed, draft=False)
    train_on_bank(target, banks, recipe.target, work / "target.pt", seed, device, held)
    # What ships is half precision: the draft imitates the rounded target.
    target.load_state_dict(half_state(target.state_dict()))
    taught = recipe.distillation
    guided = Sampling(guidance_scale=taught.guidance)
    own = own_bank(target, taught.own_pictures, taught.sample_batch, [guided], work / "own.pt", seed)
    draft = _model(recipe, seed, draft=True)
    train_on_bank(draft, banks, recipe.draft, work / "draft.pt", seed + 1, device, held, label="draft")
    distill(draft, target, banks[last], own, taught, work / "distilled.pt", seed, device)
    draft.load_state_dict(half_state(draft.state_dict()))
    save_reference(pictures, work / "reference.safetensors")
    figures = measure(target, draft, codec, held, own, recipe, work / "reference.safetensors", seed)
    for small in (False, True):
        name = "psnr_32px" if small else "psnr_64px"
        figures[name] = reconstruction_psnr(codec, rgba, wide, seed, small)
    (work / "figures.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    _write_family(out, codec, target, draft, work)
    return figures


def _model(recipe: Recipe, seed: int, draft: bool) -> EmbeddedTarget:
    """The target, or its one-layer sibling for drafting, freshly initialised."""
    torch.manual_seed(seed)
    return EmbeddedTarget(
        vocab_size=512,
        words=len(word_table()) + 1,
        max_words=MAX_WORDS,
        dim=recipe.width,
        layers=1 if draft else recipe.layers,
        heads=recipe.width // 64,
        ffn=recipe.width * 11 // 4,
        guided=draft,
    )


def _open_work(work: Path, recipe: Recipe, seed: int, resume: bool) -> None:
    """Make the work folder; refuse checkpoints that another recipe or seed has left."""
    work.mkdir(parents=True, exist_ok=True)
    if not resume:
        for path in work.glob("*.pt"):
            path.unlink()
    wanted = json.loads(json.dumps({"seed": seed, **dataclasses.asdict(recipe)}))
    note = work / "recipe.json"
    if any(work.glob("*.pt")) and note.is_file() and json.loads(note.read_text(encoding="utf-8")) != wanted:
        raise ValueError(f"{work} holds checkpoints of another recipe or seed; use another work folder or start over.")
    note.write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")


def _write_family(out: Path, codec: VQCodec, target: EmbeddedTarget, draft: EmbeddedTarget, work: Path) -> None:
    """Write all components beside `out`, in half precision, then move them in."""
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    for name, component in (("codec", codec), ("target", target), ("draft_model", draft)):
        component.cpu().half().save_pretrained(partial / name)
    colours = {name: list(colour) for name, colour in COLOURS.items()}
    WordTokenizer(NAMES, colours, word_table(), MAX_WORDS).save_pretrained(partial / "tokenizer")
    shutil.copy(work / "reference.safetensors", partial / "reference.safetensors")
    for path in partial.rglob("*.safetensors"):
        # safetensors makes files that only their owner can read.
        path.chmod(0o644)
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(partial.iterdir()):
        goal = out / path.name
        if goal.is_dir():
            shutil.rmtree(goal)
        path.replace(goal)
    partial.rmdir()
    # A head belongs to the target it was trained with.
    shutil.rmtree(out / "draft_head", ignore_errors=True)
    names = json.loads((DEMO / "model_index.json").read_text(encoding="utf-8"))
    names.pop("draft_head", None)
    (out / "model_index.json").write_text(json.dumps(names, indent=2) + "\n", encoding="utf-8")
    for name in _STATIC:
        source, goal = DEMO / name, out / name
        if goal.exists() or not source.exists():
            continue
        if source.is_dir():
            shutil.copytree(source, goal)
        else:
            shutil.copy(source, goal)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `foredraft train demo`."""
    parser.add_argument("--smoke", action="store_true", help="a two-minute run through every stage")
    parser.add_argument("--data", type=Path, help="folder with noto_emoji64_rgba.npz (default: fetched with npm)")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder to write (default: ./demo)")
    parser.add_argument("--work", type=Path, help="folder for checkpoints (default: <out>.work)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ... (default: auto)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, augmentation and order (default: 0)")
    parser.add_argument("--restart", action="store_true", help="ignore checkpoints and start over")


def run(args: argparse.Namespace) -> int:
    """Run `foredraft train demo` with parsed options; returns the exit status."""
    figures = train_demo(args.out, args.data, args.smoke, args.work, not args.restart, args.seed, args.device)
    for name, value in figures.items():
        logger.info("%s: %.3f", name, value)
    logger.info("wrote %s", args.out)
    return 0
