"""`foredraft train head`: a draft head for a frozen target, trained on the target's own pictures.

The head is unrolled over its own predictions, as it drafts: step s reads at each column what step s - 1 predicted for the column
before, and sees the target's features only up to the column where that draft began. Every step is compared with the target's
features (smooth L1) and with its guided distribution (forward KL that turns into total variation, as in `distill`).

Source: Li et al. 2024 (EAGLE), for the loss; Li et al. 2025 (EAGLE-3, arXiv:2503.01840), for unrolling ("training-time test");
Park et al. 2025 (LANTERN++), for conditional and unconditional rows.
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
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from tqdm import tqdm

from ..decoding.sampling import Sampling, guide
from ..models.backbone import Attention, Block, rotate
from ..models.embedded import PAD, EmbeddedTarget
from ..models.head import DraftHead
from .bank import Bank, prompt_table
from .common import Average, batches, half_state, load_whole, save_whole, seeded, trapezoid
from .distill import own_bank
from .names import MAX_WORDS
from .target import GRID, DenseAttention, Optimiser, TargetRecipe

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeadRecipe:
    """How a head is trained.

    Attributes:
        ffn: width of the head's feed-forward layer.
        samplings: (guidance scale, temperature, top-k) the target's pictures are drawn with, in turn.
        own_pictures, held_out: how many of them, and how many of these are only measured on.
        guidance: the scale whose guided distribution is learnt; every second picture takes one from U(1, 2 guidance) instead.
        depths: how many steps the head is unrolled, from which share of the training on (unrolling costs time); fade: weight of
            each step relative to the one before.
        feature_weight: of the smooth L1 loss on features.
    """

    ffn: int = 1024
    samplings: tuple[tuple[float, float, int], ...] = ((1.5, 0.9, 100), (1.5, 1.0, 0))
    own_pictures: int = 32768
    sample_batch: int = 1024
    held_out: int = 256
    guidance: float = 1.5
    depths: tuple[tuple[float, int], ...] = ((0.0, 1), (0.6, 2), (0.85, 4))
    fade: float = 0.9
    feature_weight: float = 1.0
    steps: int = 12000
    batch: int = 64
    matrix_rate: float = 0.02
    other_rate: float = 3e-3
    hold: float = 0.3
    average: float = 0.997
    save_every: int = 500


FULL = HeadRecipe()
SHORT = HeadRecipe(own_pictures=2048, sample_batch=64, held_out=128, steps=4000, batch=8, average=0.99, save_every=100)
SMOKE = HeadRecipe(ffn=32, own_pictures=16, sample_batch=8, held_out=4, steps=6, batch=2, save_every=3)
SIZES = {"full": FULL, "short": SHORT, "smoke": SMOKE}


class Unrolled(nn.Module):
    """A head over a whole image at once, step after step on its own predictions; the frozen target comes along."""

    def __init__(self, head: DraftHead, target: EmbeddedTarget, depth: int = 1):
        super().__init__()
        if head.codes is not None or len(head.blocks) != 1:
            raise ValueError("heads with an embedding of their own, or with several layers, are not trained here")
        self.head, self.depth = head, depth
        self._frozen = (target,)  # in a tuple, so that it is no part of this module's parameters

    @property
    def target(self) -> EmbeddedTarget:
        """The frozen target."""
        return self._frozen[0]

    def forward(self, words: Tensor, tokens: Tensor, features: Tensor) -> list[Tensor]:
        """Words [R, P], tokens [R, N], the target's features [R, P + N, D] -> the predictions of every step [R, N, D]."""
        prompt = words.shape[1]
        x, rotary, _ = self.target.teacher_inputs(words, tokens, GRID)
        block, attend = self.head.blocks[0], Unrolling(self.head.blocks[0].attention, rotary, head_mask(words, tokens.shape[1]))
        before = features.roll(1, 1)
        # No feature lies before the first column of a row without a prompt.
        before[:, prompt] = before[:, prompt].masked_fill((words == PAD).all(1, keepdim=True), 0.0)
        predictions = []
        for _ in range(self.depth):
            hidden = self.head.fc(torch.cat((x, before), -1))
            hidden = hidden + attend(block.attention_norm(hidden))
            hidden = self.head.last_norm(hidden + feed_forward(block, hidden))
            predictions.append(hidden[:, prompt:])
            before = hidden.roll(1, 1)
        return predictions


class Features:
    """The target's features of a bank's pictures. On a CPU each is computed when it is first met and kept in half precision."""

    def __init__(self, target: EmbeddedTarget, own: Bank):
        self.target, self.own, self.prompts = target, own, prompt_table()
        self.device = next(target.parameters()).device
        steps, kept = MAX_WORDS + own.tokens.shape[1], len(own) if self.device.type == "cpu" else 0
        self.kept = torch.zeros(kept, 2, steps, target.backbone.config.dim, dtype=torch.float16)
        self.known = torch.zeros(kept, dtype=torch.bool)

    @torch.no_grad()
    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Words [2M, P], tokens [2M, N] and features [2M, P + N, D] of rows [M]: with their prompts, then without."""
        words, tokens = self.own.batch(rows, self.prompts)
        both, twice = torch.cat((words, torch.zeros_like(words))).to(self.device), tokens.repeat(2, 1).to(self.device)
        if len(self.kept) and bool(self.known[rows].all()):
            return both, twice, self.kept[rows].transpose(0, 1).flatten(0, 1).float()
        with torch.autocast(self.device.type, torch.bfloat16), DenseAttention():
            features = self.target.backbone(*self.target.teacher_inputs(both, twice, GRID)).half()
        if len(self.kept):
            self.kept[rows] = torch.stack(features.chunk(2), 1)
            self.known[rows] = True
        return both, twice, features.float()


def feed_forward(block: Block, x: Tensor) -> Tensor:
    """The second half of a block, without the residual."""
    gate, up = block.gate_up(block.ffn_norm(x)).chunk(2, -1)
    return block.down(F.silu(gate) * up)


def head_mask(words: Tensor, count: int) -> Tensor:
    """Additive mask [R, T, T] of a head's first step: causal, without pads and each row's first word."""
    prompt = words.shape[1]
    first = torch.clamp((words == PAD).sum(1) + 1, max=prompt)
    place = torch.arange(prompt + count, device=words.device)
    hidden = (place > place[:, None]) | ((place < first[:, None])[:, None] & (place != place[:, None]))
    return torch.zeros(hidden.shape, device=words.device).masked_fill_(hidden, -torch.inf)


class Unrolling:
    """Attention of step s = 1, 2, ...: keys of the first step up to s - 1 columns back, then one key of each later step."""

    def __init__(self, attention: Attention, rotary: Tensor, mask: Tensor):
        self.attention, self.rotary, self.mask = attention, rotary, mask.repeat_interleave(attention.heads, 0)
        self.kept: list[tuple[Tensor, Tensor]] = []

    def __call__(self, x: Tensor) -> Tensor:
        """x [R, T, D] -> [R, T, D]."""
        own = self.attention
        rows, steps, _ = x.shape
        pairs, value = own.qkv(x).split(((own.heads + own.groups) * own.width, own.groups * own.width), -1)
        turned = rotate(pairs.view(rows, steps, own.heads + own.groups, own.width), self.rotary)
        query, key = turned.split((own.heads, own.groups), 2)
        times = own.heads // own.groups
        key = key.repeat_interleave(times, 2)
        value = value.view(rows, steps, own.groups, own.width).repeat_interleave(times, 2)
        query, key, value = (part.transpose(1, 2).flatten(0, 1) for part in (query, key, value))
        back = len(self.kept)
        self.kept.append((key, value))
        first_key, first_value = self.kept[0]
        mask = self.mask.roll(back, 1).to(query.dtype)
        scores = [torch.baddbmm(mask, query, first_key.transpose(1, 2), alpha=own.width**-0.5)]
        later = [(k.roll(back - 1 - i, 1), v.roll(back - 1 - i, 1)) for i, (k, v) in enumerate(self.kept[1:])]
        scores += [(query * k).sum(-1, keepdim=True) * own.width**-0.5 for k, _ in later]
        weights = torch.cat(scores, -1).softmax(-1, dtype=torch.float32).to(value.dtype)
        mixed = weights[..., :steps] @ first_value
        for i, (_, v) in enumerate(later):
            mixed = mixed + weights[..., steps + i, None] * v
        return own.out(mixed.view(rows, own.heads, steps, own.width).transpose(1, 2).reshape(rows, steps, -1))


def losses(
    model: nn.Module,
    target: EmbeddedTarget,
    batch: tuple[Tensor, Tensor, Tensor],
    scale: Tensor,
    recipe: HeadRecipe,
    share: float,
) -> tuple[Tensor, list[float]]:
    """The loss of one batch of `Features`, and each step's mean overlap with the guided target; scale [B] of the guidance.

    share: how far the training has come, 0 to 1.
    """
    words, _, features = batch
    with torch.autocast(words.device.type, torch.bfloat16):
        predictions, features = model(*batch), features[:, words.shape[1] :]
        with torch.no_grad():
            p = _guided(target.logits(features), scale).softmax(-1)
            entropy = torch.special.entr(p).sum(-1)
        total, overlaps = torch.zeros((), device=words.device), []
        for step, hidden in enumerate(predictions):
            # A draft cannot have begun before column 0.
            log_q = _guided(target.logits(hidden[:, step:]), scale).log_softmax(-1)
            divergence = -(p[:, step:] * log_q).sum(-1).mean() - entropy[:, step:].mean()
            variation = (p[:, step:] - log_q.exp()).abs().sum(-1).mean() / 2
            distance = F.smooth_l1_loss(hidden[:, step:].float(), features[:, step:].float())
            part = (1 - share) * divergence + share * variation + recipe.feature_weight * (1 - share) * distance
            total = total + recipe.fade**step * part
            overlaps.append(1 - float(variation.detach()))
    return total, overlaps


def _guided(logits: Tensor, scale: Tensor) -> Tensor:
    """`guide` with a scale [B] of each picture: [2B, N, V] -> float32 [B, N, V]."""
    conditional, unconditional = logits.float().chunk(2)
    return torch.lerp(unconditional, conditional, scale[:, None, None])


def train(
    head: DraftHead, target: EmbeddedTarget, own: Bank, recipe: HeadRecipe, checkpoint: Path, seed: int, place: Accelerator
) -> DraftHead:
    """Train the head, resuming from `checkpoint`; returns it with averaged weights.

    Several processes share each batch; the checkpoint is the first one's.
    """
    device = place.device
    target.to(device).eval().requires_grad_(False)
    head.to(device).train()
    features = Features(target, own)
    rates = TargetRecipe(matrix_rate=recipe.matrix_rate, other_rate=recipe.other_rate)
    optimiser, average, start = Optimiser(head, rates), Average(head, recipe.average), 0
    if state := load_whole(checkpoint):
        head.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        average.state = {name: value.to(device) for name, value in state["average"].items()}
        start = state["step"]
    unrolled = Unrolled(head, target)
    model = place.prepare_model(unrolled)
    order = batches(len(own) - recipe.held_out, recipe.batch, seed, start)
    mine = slice(place.process_index, None, place.num_processes)
    todo = range(start, recipe.steps)
    bar = tqdm(todo, initial=start, total=recipe.steps, desc="draft head", mininterval=5, disable=not place.is_local_main_process)
    for step in bar:
        scale = 1 + (2 * recipe.guidance - 1) * torch.rand(recipe.batch, generator=seeded(seed, 11, step))
        scale[::2] = recipe.guidance
        rows = next(order)[mine]
        unrolled.depth = max(depth for share, depth in recipe.depths if share * recipe.steps <= step)
        total, overlaps = losses(model, target, features(rows), scale[mine].to(device), recipe, step / recipe.steps)
        place.backward(total)
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimiser.step(trapezoid(step, recipe.steps, recipe.hold))
        average.update(head, step)
        if step % 20 == 0:
            bar.set_postfix(overlap=" ".join(f"{value:.3f}" for value in overlaps), refresh=False)
        if place.is_main_process and ((step + 1) % recipe.save_every == 0 or step + 1 == recipe.steps):
            state = {"model": head.state_dict(), "optimiser": optimiser.state_dict(), "average": average.state}
            save_whole({**state, "step": step + 1}, checkpoint)
    head.load_state_dict(average.state)
    return head.eval()


@torch.no_grad()
def agreement(
    head: DraftHead, target: EmbeddedTarget, own: Bank, rows: Tensor, guidance: float, depth: int = 5
) -> tuple[list[float], float]:
    """How far the head agrees with the guided target at temperature 1, on the target's own pictures.

    Returns:
        The mean of 1 - TV at each depth of a draft (depth 1 first), and the expected number of accepted tokens of a chain of
        four: the sum over d of the mean product of the overlaps along d columns.
    """
    model, features = Unrolled(head, target, depth), Features(target, own)
    sums, chain, count = [0.0] * depth, 0.0, 0
    for part in rows.split(16):
        batch = features(part)
        predictions = model(*batch)
        p = guide(target.logits(batch[2][:, MAX_WORDS:]), guidance).softmax(-1)
        kept = torch.ones(())
        for step, hidden in enumerate(predictions):
            q = guide(target.logits(hidden), guidance).softmax(-1)
            overlap = torch.minimum(p, q).sum(-1)[:, step:]
            sums[step] += float(overlap.mean()) * len(part)
            if step < 4:
                kept = (kept[:, : overlap.shape[1]] if kept.ndim else kept) * overlap
                chain += float(kept.mean()) * len(part)
        count += len(part)
    return [value / count for value in sums], chain / count


def train_head(
    family: str | Path,
    size: str = "full",
    work_dir: str | Path | None = None,
    out_dir: str | Path | None = None,
    resume: bool = True,
    seed: int = 0,
    device: str = "auto",
) -> dict[str, float]:
    """Train a draft head for the target of a family's folder.

    Args:
        family: folder with `target`, e.g. models/demo.
        size: "full" for a GPU; "short" for a CPU (a sixteenth of the pictures, a twenty-fourth of the samples), for a head that
            agrees less; "smoke", which runs through every stage in seconds and drafts nothing useful.
        work_dir: checkpoints, kept; default `<family>.head.work`.
        out_dir: the head's folder; default `<family>/draft_head`, and then the family's index names it.
        resume: continue from the checkpoints in `work_dir`; False starts over.
        seed: of weights, pictures and order.
        device: "auto" (a GPU if there is one), or a torch device.

    Returns:
        overlap_1 ... overlap_5 and accepted, see `agreement`.
    """
    if size not in SIZES:
        raise ValueError(f"unknown size {size!r}; choose one of {', '.join(SIZES)}")
    recipe, folder = SIZES[size], Path(family)
    base = Path(work_dir) if work_dir is not None else folder.with_name(f"{folder.name}.head.work")
    work = base / size
    if not (folder / "target").is_dir():
        raise FileNotFoundError(f"{folder} has no folder 'target': give the folder of a family made by `foredraft train demo`")
    place = Accelerator(cpu=device == "cpu" or (device == "auto" and not torch.cuda.is_available()))
    open_work(work, recipe, seed, resume)
    target = EmbeddedTarget.from_pretrained(folder / "target").float().to(place.device).eval()
    samplings = [Sampling(*values) for values in recipe.samplings]
    with place.main_process_first():
        own = own_bank(target, recipe.own_pictures, recipe.sample_batch, samplings, work / "own.pt", seed + 20)
    torch.manual_seed(seed)
    head = DraftHead.for_target(target, ffn=recipe.ffn)
    train(head, target, own, recipe, work / "head.pt", seed, place)
    head.load_state_dict(half_state(head.state_dict()))
    overlaps, accepted = agreement(head, target, own, torch.arange(len(own))[-recipe.held_out :], recipe.guidance)
    figures = {**{f"overlap_{depth}": value for depth, value in enumerate(overlaps, 1)}, "accepted": accepted}
    if place.is_main_process:
        (work / "figures.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        write_head(head, folder, Path(out_dir) if out_dir is not None else None)
    return figures


def open_work(work: Path, recipe: HeadRecipe, seed: int, resume: bool) -> None:
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


def write_head(head: DraftHead, family: Path, out: Path | None) -> None:
    """Write the head in half precision beside its place, then move it in; the family's index learns its name."""
    goal = family / "draft_head" if out is None else out
    partial = goal.with_name(f"{goal.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    head.cpu().half().save_pretrained(partial)
    for path in partial.rglob("*.safetensors"):
        path.chmod(0o644)  # safetensors makes files that only their owner can read
    if goal.is_dir():
        shutil.rmtree(goal)
    partial.replace(goal)
    index = family / "model_index.json"
    if out is None and index.is_file():
        names = json.loads(index.read_text(encoding="utf-8"))
        defaults = names.pop("defaults", None)
        names["draft_head"] = ["foredraft.models.head", "DraftHead"]
        index.write_text(json.dumps({**names, "defaults": defaults}, indent=2) + "\n", encoding="utf-8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `foredraft train head`."""
    parser.add_argument("family", type=Path, help="folder of a family made by `foredraft train demo`")
    parser.add_argument("--size", choices=tuple(SIZES), default="full", help="full (GPU), short (CPU) or smoke (default: full)")
    parser.add_argument("--out", type=Path, help="the head's folder (default: draft_head in the family's)")
    parser.add_argument("--work", type=Path, help="folder for checkpoints (default: <family>.head.work)")
    parser.add_argument("--device", default="auto", help="auto or cpu (default: auto)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, pictures and order (default: 0)")
    parser.add_argument("--restart", action="store_true", help="ignore checkpoints and start over")


def run(args: argparse.Namespace) -> int:
    """Run `foredraft train head` with parsed options; returns the exit status."""
    figures = train_head(args.family, args.size, args.work, args.out, not args.restart, args.seed, args.device)
    for name, value in figures.items():
        logger.info("%s: %.3f", name, value)
    return 0
