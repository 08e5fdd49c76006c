"""One seed, one picture: whatever the method (seeded), the batch or the order of the calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from foredraft.pipelines import base
from foredraft.pipelines.base import draw_seeds

from ..tiny import PROMPTS, SEEDED, VARIANTS, codes, generators, name_of

Pipe = Callable[..., Any]


@pytest.mark.parametrize("sampling", [{}, {"guidance_scale": 1.0, "top_k": 9}, {"temperature": 0.7, "top_p": 0.8}], ids=str)
@pytest.mark.parametrize("variant", SEEDED, ids=name_of)
def test_seeded_methods_draw_plain_decodings_picture(
    pipe: Pipe, variant: tuple[str, dict[str, Any]], sampling: dict[str, Any]
) -> None:
    call = {**sampling, "height": 32, "width": 32}
    plain = codes(pipe("ar", torch.float64), list(PROMPTS), generator=generators(1, 2, 3, 4), **call)
    fast = codes(pipe(variant[0], torch.float64), list(PROMPTS), generator=generators(1, 2, 3, 4), **call, **variant[1])
    assert torch.equal(plain, fast)


@pytest.mark.parametrize(("method", "options"), [("sjd", {"window": "auto"}), ("speculative", {"draft_length": "auto"})])
def test_the_clock_does_not_change_the_picture(pipe: Pipe, method: str, options: dict[str, Any]) -> None:
    call: dict[str, Any] = {"height": 32, "width": 32}
    plain = codes(pipe("ar", torch.float64), list(PROMPTS), generator=generators(1, 2, 3, 4), **call)
    for _ in range(3):
        fast = codes(pipe(method, torch.float64), list(PROMPTS), generator=generators(1, 2, 3, 4), **call, **options)
        assert torch.equal(plain, fast)


def test_greedy_decoding_ignores_the_seed(pipe: Pipe) -> None:
    plain = [codes(pipe("ar", torch.float64), seed=seed, temperature=0.0) for seed in (1, 2)]
    fast = codes(pipe("sjd", torch.float64), seed=3, temperature=0.0)
    assert torch.equal(plain[0], plain[1]) and torch.equal(plain[0], fast)


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_same_seed_same_picture_and_other_seed_another(pipe: Pipe, variant: tuple[str, dict[str, Any]]) -> None:
    run, options = pipe(variant[0]), variant[1]
    first, again, other = (codes(run, seed=seed, **options) for seed in (5, 5, 6))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_a_picture_does_not_depend_on_its_neighbours(pipe: Pipe, variant: tuple[str, dict[str, Any]]) -> None:
    """Tokens, rounds and counts of a row are those of the picture drawn alone."""
    run, options = pipe(variant[0], torch.float64), variant[1]
    call: dict[str, Any] = {"height": 32, "width": 32, "output_type": "latent", **options}
    batch = run(list(PROMPTS), generator=generators(1, 2, 3, 4), **call)
    counts = ("seed", "rounds", "target_forwards", "judged", "accepted", "tokens", "round", "run", "source")
    for row, prompt in enumerate(PROMPTS):
        alone = run(prompt, generator=generators(row + 1), **call)
        assert torch.equal(alone.tokens[0], batch.tokens[row]), prompt
        for name in counts:
            assert getattr(alone.traces[0], name) == getattr(batch.traces[row], name), (prompt, name)
        assert alone.traces[0].min_margin == pytest.approx(batch.traces[row].min_margin, abs=1e-9)


def test_a_picture_does_not_depend_on_the_length_of_its_neighbours_prompt(pipe: Pipe) -> None:
    run = pipe("sjd", torch.float64)
    alone = codes(run, "fox", generator=generators(1))
    for neighbour in ("fox", "red apple", "polar bear on red", "honey pot on blue"):
        both = codes(run, [neighbour, "fox"], generator=generators(9, 1))
        assert torch.equal(both[1], alone[0]), neighbour


def test_one_generator_yields_prompt_major_seeds(pipe: Pipe) -> None:
    prompts = ["fox", "cat"]
    one = torch.Generator().manual_seed(11)
    batch = pipe("sjd", torch.float64)(prompts, num_images_per_prompt=2, generator=one, output_type="latent")
    again = torch.Generator().manual_seed(11)
    singles = [pipe("sjd", torch.float64)(prompt, generator=again, output_type="latent") for prompt in prompts for _ in range(2)]
    assert [trace.seed for trace in batch.traces] == [out.traces[0].seed for out in singles]
    assert torch.equal(batch.tokens, torch.cat([out.tokens for out in singles]))


def test_seeds_are_63_bits_and_distinct() -> None:
    seeds = draw_seeds(torch.Generator().manual_seed(0), 64)
    assert seeds.dtype == torch.int64 and seeds.shape == (64,) and int(seeds.min()) >= 0
    assert len(set(seeds.tolist())) == 64 and int(seeds.max()) > 2**60
    assert torch.equal(draw_seeds(generators(*range(5)), 5)[3:4], draw_seeds(generators(3)[0], 1))


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_the_recorded_seed_reproduces_the_picture(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch, variant: tuple[str, dict[str, Any]]
) -> None:
    run, options = pipe(variant[0], torch.float64), variant[1]
    out = run(["fox", "cat"], output_type="latent", **options)
    seed = out.traces[1].seed
    assert isinstance(seed, int)
    monkeypatch.setattr(base, "draw_seeds", lambda generator, count: torch.tensor([seed]))
    assert torch.equal(codes(run, "cat", **options)[0], out.tokens[1])


def test_the_global_random_state_is_neither_read_nor_moved_with_a_generator(pipe: Pipe) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = codes(pipe("sjd"), seed=5, rule="exact", tail="coupled")
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(codes(pipe("sjd"), seed=5, rule="exact", tail="coupled"), first)


def test_a_generator_moves_by_one_draw_per_picture(pipe: Pipe) -> None:
    """Whatever the method draws meanwhile comes from the seeds, so the next picture is the same too."""
    one, other = generators(3, 3)
    codes(pipe("ar"), generator=one)
    codes(pipe("speculative"), generator=other, rule="exact", tree="dynamic")
    assert torch.equal(one.get_state(), other.get_state())
