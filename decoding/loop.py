"""The one loop: draft, score, verify, commit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .noise import Noise
from .sequence import Sequence
from .trace import Recorder
from .types import Drafter, TargetModel, Verifier
from .verify import merge, unverified


@torch.inference_mode()
def decode(
    target: TargetModel,
    drafter: Drafter,
    verifier: Verifier,
    sequence: Sequence,
    noise: Noise,
    recorder: Recorder,
    on_round: Callable[[Sequence, Recorder], bool] | None = None,
) -> Tensor:
    """Decode until every row is complete: codes [B, N].

    on_round sees the sequence after every round and ends the decoding by returning True; tokens not yet decoded are then 0.
    """
    clock = recorder.clock
    while not sequence.done:
        clock.lap("other", sequence)
        draft = drafter.propose(sequence, noise)
        clock.lap("draft", sequence)
        checked = draft.check is None or bool(draft.check.any())
        scores = target.score(sequence, draft) if checked else None
        verdict = unverified(draft) if scores is None else verifier(draft, scores, noise)
        if scores is not None and draft.check is not None:
            verdict = merge(draft.check, verdict, draft)
        clock.lap("verify", sequence)
        drafter.observe(sequence, draft, scores, verdict, noise)
        clock.lap("draft", sequence)
        before = sequence.length
        added = sequence.commit(verdict.tokens, verdict.count, verdict.accepted, verdict.path, verdict.scored)
        sequence.refresh()
        recorder.round(before, added, draft, scores, verdict)
        if on_round is not None and on_round(sequence, recorder):
            break
    if not sequence.done:
        sequence.clear_ahead()
    clock.lap("other", sequence)
    return sequence.tokens[:, 1:]
