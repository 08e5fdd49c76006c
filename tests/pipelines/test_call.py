"""The conventions of a call: prompts, sizes, outputs, callbacks, interruption."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from foredraft.pipelines.output import SpeculativeOutput
from PIL import Image
from torch import Tensor

from ..tiny import VARIANTS, VOCABULARY, codes, generators, name_of

METHODS = ("ar", "sjd", "speculative")
Pipe = Callable[..., Any]


def watch_rows(monkeypatch: pytest.MonkeyPatch, model: Any) -> list[int]:
    """Cache rows of every sequence the model begins."""
    rows: list[int] = []
    begin = model.begin

    def watched(*args: Any, **kwargs: Any) -> Any:
        sequence = begin(*args, **kwargs)
        rows.append(sequence.cache.rows)
        return sequence

    monkeypatch.setattr(model, "begin", watched)
    return rows


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_every_variant_draws(pipe: Pipe, variant: tuple[str, dict[str, Any]]) -> None:
    out = pipe(variant[0])("fox", num_images_per_prompt=2, generator=generators(1, 2), **variant[1])
    assert [image.size for image in out.images] == [(16, 16)] * 2
    assert out.tokens.shape == (2, 4, 4) and out.tokens.dtype == torch.long
    assert 0 <= int(out.tokens.min()) and int(out.tokens.max()) < VOCABULARY
    assert all(trace.complete and trace.tokens == 16 for trace in out.traces)


def test_string_and_list_of_one_are_the_same(pipe: Pipe) -> None:
    assert torch.equal(codes(pipe("sjd"), "fox"), codes(pipe("sjd"), ["fox"]))


@pytest.mark.parametrize("method", METHODS)
def test_batches_are_prompt_major(pipe: Pipe, method: str) -> None:
    run, seeds = pipe(method, torch.float64), (3, 4, 5, 6)
    batch = codes(run, ["fox", "cat on red"], num_images_per_prompt=2, generator=generators(*seeds))
    for row, (prompt, seed) in enumerate(zip(("fox", "fox", "cat on red", "cat on red"), seeds, strict=True)):
        assert torch.equal(batch[row], codes(run, prompt, generator=generators(seed))[0])


def test_no_generator_draws_fresh_pictures(pipe: Pipe) -> None:
    one, other = (pipe("ar")("fox", output_type="latent") for _ in range(2))
    assert one.traces[0].seed != other.traces[0].seed
    assert not torch.equal(one.tokens, other.tokens)


@pytest.mark.parametrize(("size", "grid"), [((None, None), (4, 4)), ((32, 32), (8, 8)), ((12, 20), (3, 5)), ((16, None), (4, 4))])
@pytest.mark.parametrize("method", METHODS)
def test_height_and_width(pipe: Pipe, method: str, size: tuple[int | None, int | None], grid: tuple[int, int]) -> None:
    out = pipe(method)("fox", height=size[0], width=size[1], output_type="np")
    assert out.tokens.shape == (1, *grid)
    assert out.images.shape == (1, 4 * grid[0], 4 * grid[1], 3)
    assert out.traces[0].grid == grid


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("scale", "factor"), [(1.0, 1), (1, 1), (2.5, 2), (None, 2)])
def test_guidance_of_one_runs_no_unconditional_rows(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch, method: str, scale: float | None, factor: int
) -> None:
    run = pipe(method)
    rows = watch_rows(monkeypatch, run.target)
    run(["fox", "cat"], num_images_per_prompt=2, guidance_scale=scale, output_type="latent")
    assert rows == [4 * factor]


def test_a_guided_draft_runs_no_unconditional_rows(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    run = pipe("speculative")
    rows = watch_rows(monkeypatch, run.draft_model)
    run("fox", guidance_scale=3.0, output_type="latent")
    assert rows == [1]


@pytest.mark.parametrize("method", METHODS)
def test_negative_prompts(pipe: Pipe, method: str) -> None:
    run = pipe(method, torch.float64)
    plain = codes(run, ["fox", "cat"], generator=generators(0, 1), guidance_scale=4.0)
    one = codes(run, ["fox", "cat"], generator=generators(0, 1), guidance_scale=4.0, negative_prompt="polar bear on red")
    each = codes(
        run,
        ["fox", "cat"],
        num_images_per_prompt=2,
        generator=generators(0, 9, 9, 1),
        guidance_scale=4.0,
        negative_prompt=["polar bear on red", "red apple"],
    )
    assert not torch.equal(plain, one)
    assert torch.equal(each[0], one[0]) and not torch.equal(each[3], one[1])


def test_guidance_pushes_away_from_the_negative_prompt(pipe: Pipe) -> None:
    """A negative prompt equal to the prompt cancels the guidance."""
    run = pipe("ar", torch.float64)
    assert torch.equal(codes(run, "fox", guidance_scale=5.0, negative_prompt="fox"), codes(run, "fox", guidance_scale=1.0))


def test_output_types_agree(pipe: Pipe) -> None:
    outs = {kind: pipe("sjd")("fox", generator=generators(7), output_type=kind) for kind in ("pil", "np", "pt", "latent")}
    assert isinstance(outs["pil"].images[0], Image.Image)
    array, tensor = outs["np"].images, outs["pt"].images
    assert array.shape == (1, 16, 16, 3) and array.dtype == np.float32 and 0 <= array.min() and array.max() <= 1
    assert tensor.shape == (1, 3, 16, 16) and tensor.dtype == torch.float32
    assert np.allclose(array, tensor.permute(0, 2, 3, 1).numpy())
    assert np.abs(np.asarray(outs["pil"].images[0], dtype=np.float32) / 255 - array[0]).max() <= 0.51 / 255
    assert torch.equal(outs["latent"].images, outs["pil"].tokens)


def test_return_dict_false_gives_a_tuple(pipe: Pipe) -> None:
    out = pipe("sjd")("fox", generator=generators(7))
    assert isinstance(out, SpeculativeOutput)
    images, tokens, traces = pipe("sjd")("fox", generator=generators(7), return_dict=False)
    assert torch.equal(tokens, out.tokens) and traces[0].seed == out.traces[0].seed
    assert np.array_equal(np.asarray(images[0]), np.asarray(out.images[0]))
    assert out["images"] is out.images and out.to_tuple()[1] is out.tokens


@pytest.mark.parametrize("method", METHODS)
def test_results_can_be_used_in_autograd(pipe: Pipe, method: str) -> None:
    """Nothing that leaves the call, nor the models afterwards, is an inference tensor."""
    run = pipe(method)
    out = run("fox", generator=generators(1), output_type="pt")
    assert not out.tokens.is_inference() and not out.images.is_inference()
    table = torch.nn.Embedding(VOCABULARY, 3)
    (table(out.tokens).sum() + (out.images * torch.ones(1, requires_grad=True)).sum()).backward()
    assert table.weight.grad is not None
    ids = run.tokenizer(["fox"])
    run.target(ids, out.tokens.flatten(1), (4, 4)).logsumexp(-1).sum().backward()
    assert run.target.head.weight.grad is not None
    run.target.zero_grad(set_to_none=True)


@pytest.mark.parametrize("method", METHODS)
def test_callback_sees_every_round(pipe: Pipe, method: str) -> None:
    run, seen = pipe(method), []

    def callback(pipeline: Any, number: int, low: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        assert pipeline is run
        seen.append((number, low, {name: value.clone() for name, value in tensors.items()}))
        return {"tokens": torch.full_like(tensors["tokens"], 3)}  # ignored

    out = run(["fox", "cat"], generator=generators(1, 2), callback_on_step_end=callback, output_type="latent")
    assert [number for number, _, _ in seen] == list(range(len(seen)))
    assert len(seen) == max(trace.rounds for trace in out.traces)
    assert seen[-1][1] == 16
    final = out.tokens.flatten(1)
    for _, low, tensors in seen:
        assert set(tensors) == {"tokens", "length"}
        assert low == int(tensors["length"].min())
        for row in range(2):
            count = int(tensors["length"][row])
            assert torch.equal(tensors["tokens"][row, :count], final[row, :count])


@pytest.mark.parametrize("wanted", [["length"], ["tokens"], ["tokens", "length"]])
def test_callback_tensor_inputs(pipe: Pipe, wanted: list[str]) -> None:
    seen: list[set[str]] = []
    pipe("sjd")(
        "fox",
        callback_on_step_end=lambda pipeline, number, low, tensors: seen.append(set(tensors)),
        callback_on_step_end_tensor_inputs=wanted,
    )
    assert seen and all(names == set(wanted) for names in seen)


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_running_counts_end_as_the_traces(pipe: Pipe, variant: tuple[str, dict[str, Any]]) -> None:
    seen: list[Tensor] = []
    out = pipe(variant[0])(
        ["fox", "cat"],
        generator=generators(1, 2),
        output_type="latent",
        callback_on_step_end=lambda pipeline, number, low, tensors: seen.append(tensors["counts"]),
        callback_on_step_end_tensor_inputs=["counts"],
        **variant[1],
    )
    assert seen[0].shape == (3, 2) and seen[0][0].tolist() == [1, 1]
    assert all((after >= before).all() for before, after in zip(seen, seen[1:], strict=False))
    for row, trace in enumerate(out.traces):
        assert seen[-1][:, row].tolist() == [trace.target_forwards, trace.judged, trace.accepted]


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_an_interrupted_call_leaves_the_pipeline_as_it_was(pipe: Pipe, variant: tuple[str, dict[str, Any]]) -> None:
    run, options = pipe(variant[0]), variant[1]
    whole = codes(run, ["fox", "cat"], generator=generators(1, 2), **options)

    def stop(pipeline: Any, number: int, low: int, tensors: dict[str, Tensor]) -> None:
        lengths.append(tensors["length"].tolist())
        pipeline._interrupt = number == 1
        assert pipeline.interrupt == (number == 1)

    lengths: list[list[int]] = []
    out = run(["fox", "cat"], generator=generators(1, 2), callback_on_step_end=stop, output_type="latent", **options)
    assert len(lengths) == 2 and not run.interrupt
    for row, count in enumerate(lengths[-1]):
        got = out.tokens[row].flatten()
        assert torch.equal(got[:count], whole[row].flatten()[:count])
        assert not got[count:].any(), "tokens that were not committed are zero"
        assert out.traces[row].tokens == count and out.traces[row].complete == (count == 16)
        assert torch.equal(torch.tensor(out.traces[row].round).flatten() >= 0, torch.arange(16) < count)
    assert torch.equal(codes(run, ["fox", "cat"], generator=generators(1, 2), **options), whole)


def test_an_interrupted_call_still_gives_a_picture(pipe: Pipe) -> None:
    def stop(pipeline: Any, *_: Any) -> None:
        pipeline._interrupt = True

    out = pipe("sjd")("fox", callback_on_step_end=stop)
    assert out.images[0].size == (16, 16) and out.traces[0].rounds == 1
    assert out.traces[0].heatmap(out.images[0]).size[0] > 0


@pytest.mark.parametrize("method", METHODS)
def test_an_exception_in_the_callback_leaves_the_pipeline_reusable(pipe: Pipe, method: str) -> None:
    run = pipe(method)
    whole = codes(run, "fox")

    def fail(pipeline: Any, *_: Any) -> None:
        pipeline._interrupt = True
        raise RuntimeError("the user's own error")

    with pytest.raises(RuntimeError, match="the user's own error"):
        run("fox", callback_on_step_end=fail)
    assert not run.interrupt
    assert torch.equal(codes(run, "fox"), whole)


def test_an_interrupt_before_the_call_is_forgotten(pipe: Pipe) -> None:
    pipe("sjd")._interrupt = True
    assert pipe("sjd")("fox", output_type="latent").traces[0].complete


def test_progress_bar(parts: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    from ..tiny import build_pipeline

    run = build_pipeline(parts, "sjd")
    run("fox")
    assert capsys.readouterr().err == ""
    run.set_progress_bar_config(disable=False, desc="drawing")
    run("fox")
    shown = capsys.readouterr().err
    assert "drawing" in shown and "16/16" in shown
