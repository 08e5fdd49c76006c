"""Speculative Sampler: the picture of a seed, ComfyUI's rules, and what the browser is told."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from foredraft import cli
from foredraft.nodes import host, progress, sample
from foredraft.nodes.host import pictures_of
from foredraft.nodes.load import Draft
from foredraft.nodes.method import node_id
from foredraft.pipelines import methods
from PIL import Image

from ..tiny import SEEDED, VARIANTS, codes, name_of, sentence
from .conftest import Make
from .graphs import default_of, widgets_of
from .stand_in import InterruptProcessingException, ModelPatcher, Stage

IDS = {name: node_id(pipeline) for name, pipeline in methods().items()}
KEYS = {
    *("node", "method", "exact", "images", "rows", "cols", "tokens", "total", "rounds", "forwards", "tokens_per_forward"),
    *("acceptance", "seconds", "speedup", "run", "done"),
}
Draw = Callable[..., tuple[torch.Tensor, Any]]


@pytest.fixture
def draw(node: Make, target: Any, draft: Any) -> Draw:
    """`draw((method, options), **inputs)`: one run of the sampler on the tiny family, with all that drafts."""
    draft = node("ForedraftLoadDraft", model="tiny/draft_head", draft=draft)[0]

    def run(variant: tuple[str, dict[str, Any]] | None = None, **inputs: Any) -> Any:
        method = None if variant is None else node(IDS[variant[0]], **variant[1])[0]
        given = {"target": target, "draft": draft, "method": method, "node": "7", **inputs}
        return node("ForedraftSampler", **given)

    return run


def pictures(pipe: Any, variant: tuple[str, dict[str, Any]], prompt: str, seed: int, **call: Any) -> torch.Tensor:
    """The same picture by the pipeline, as IMAGE."""
    generator = torch.Generator().manual_seed(seed)
    out = pipe(variant[0])(prompt, generator=generator, output_type="pt", **call, **variant[1])
    return out.images.permute(0, 2, 3, 1)


# -- the picture -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_the_node_draws_what_the_pipeline_draws(draw: Draw, pipe: Any, variant: tuple[str, dict[str, Any]]) -> None:
    images, record = draw(variant, prompt="red apple on blue", seed=3, batch_size=2)
    assert torch.equal(images, pictures(pipe, variant, "red apple on blue", 3, num_images_per_prompt=2))
    assert [trace.method for trace in record.traces] == [variant[0]] * 2
    assert record.traces[0].exact == record.traces[1].exact
    assert images.shape == (2, 16, 16, 3) and images.dtype == torch.float32 and images.device.type == "cpu"
    assert images.is_contiguous() and 0.0 <= float(images.min()) and float(images.max()) <= 1.0


@pytest.mark.parametrize("seed", [0, 2**32 + 3, 2**63, 2**64 - 1])
def test_seeds_of_every_size(draw: Draw, pipe: Any, seed: int) -> None:
    assert torch.equal(draw(("sjd", {}), seed=seed)[0], pictures(pipe, ("sjd", {}), "fox", seed))


@pytest.mark.parametrize("variant", SEEDED, ids=name_of)
def test_one_seed_one_picture_whatever_the_method(draw: Draw, variant: tuple[str, dict[str, Any]]) -> None:
    plain, _ = draw(("ar", {}), seed=2**64 - 1)
    assert torch.equal(draw(variant, seed=2**64 - 1)[0], plain)
    assert not torch.equal(draw(("ar", {}), seed=1)[0], plain), "the seed does nothing"


def test_without_a_method_it_is_seeded_sjd(draw: Draw) -> None:
    images, record = draw()
    assert record.traces[0].method == "sjd" and record.traces[0].exact
    assert torch.equal(images, draw(("ar", {}))[0])


def test_the_node_draws_what_the_command_draws(draw: Draw, folder: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    assert cli.main(["generate", "cat on red", "--model", str(folder), "--seed", "11", "--method", "sjd"]) == 0
    torch.set_num_threads(threads)
    images, _ = draw(("sjd", {}), prompt="cat on red", seed=11)
    written = Image.open(tmp_path / "cat-on-red.png").convert("RGB")
    assert written.tobytes() == pictures_of(images)[0].tobytes()


def test_the_demo_model_and_a_prompt_over_lines(node: Make, stage: Stage) -> None:
    (target,) = node("ForedraftLoadTarget")
    images, record = node("ForedraftSampler", target=target, prompt="red apple\non blue", seed=1)
    assert images.shape == (1, 64, 64, 3)
    assert record.traces[0].tokens_per_forward > 2
    assert record.speedup is not None and record.speedup > 0
    blue = images[0, :4, :4].mean((0, 1))
    assert blue[2] > blue[0] + 0.2


# -- settings --------------------------------------------------------------------------------------------------------


def test_below_zero_is_the_familys_own(draw: Draw, pipe: Any) -> None:
    own = codes(pipe("sjd"), "fox", 0)
    images, _ = draw(("sjd", {}))
    assert torch.equal(images, pictures(pipe, ("sjd", {}), "fox", 0)) and own.shape == (1, 4, 4)
    greedy, _ = draw(("sjd", {}), temperature=0.0)
    assert torch.equal(greedy, pictures(pipe, ("sjd", {}), "fox", 0, temperature=0.0))
    assert not torch.equal(greedy, images)


@pytest.mark.parametrize(
    ("values", "call"),
    [
        ({}, {}),
        ({"guidance_scale": 1.0}, {"guidance_scale": 1.0}),
        ({"temperature": 0.0, "top_k": 0, "top_p": 1.0}, {"temperature": 0.0, "top_k": 0, "top_p": 1.0}),
        ({"top_k": 5, "top_p": 0.9}, {"top_k": 5, "top_p": 0.9}),
        ({"width": 20, "height": 12}, {"width": 20, "height": 12}),
        ({"negative_prompt": "  "}, {}),
        ({"negative_prompt": "cat"}, {"negative_prompt": "cat"}),
    ],
)
def test_widgets_to_arguments(draw: Draw, pipe: Any, values: dict[str, Any], call: dict[str, Any]) -> None:
    defaults = {name: default_of("ForedraftSampler", name) for name in widgets_of("ForedraftSampler")}
    assert sample.call_arguments({**defaults, **values}) == {"num_images_per_prompt": 1, **call}
    images, _ = draw(("sjd", {}), **values)
    assert torch.equal(images, pictures(pipe, ("sjd", {}), "fox", 0, **call))


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"prompt": ""}, ("prompt", "empty")),
        ({"prompt": "zebra"}, ("unknown word", "zebra")),
        ({"width": 18}, ("multiples of 4", "18")),
        ({"width": 400, "height": 400}, ("400",)),
        ({"guidance_scale": 0.5}, ("guidance", "0.5")),
        ({"negative_prompt": "cat", "guidance_scale": 1.0}, ("negative", "guidance")),
    ],
)
def test_bad_values_are_one_sentence(draw: Draw, stage: Stage, inputs: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        draw(("sjd", {}), **inputs)
    sentence(error, *words)


def test_a_method_without_its_draft_says_what_to_connect(draw: Draw) -> None:
    for draft in (None, Draft()):
        with pytest.raises(ValueError) as error:
            draw(("speculative", {}), draft=draft)
        sentence(error, "draft_model", "connect Load Draft")


def test_a_draft_of_another_codebook_is_refused(draw: Draw, node: Make) -> None:
    with pytest.raises(ValueError) as error:
        draw(("speculative", {}), draft=node("ForedraftLoadDraft", model="demo/draft_model")[0])
    sentence(error, "codes", "codebook", "512", "48")


def test_a_draft_in_another_dtype_works(draw: Draw, node: Make) -> None:
    half = node("ForedraftLoadDraft", model="tiny/draft_model", dtype="bfloat16")[0]
    assert torch.equal(draw(("speculative", {}), draft=half)[0], draw(("ar", {}))[0])


# -- memory ----------------------------------------------------------------------------------------------------------


def test_models_are_loaded_in_one_request(draw: Draw, target: Any, draft: Any, stage: Stage) -> None:
    draw(("speculative", {}))
    (load,) = stage.loads
    assert load["models"] == [target.patcher, draft.patchers[0]] and load["full"] is True and load["memory"] > 0


def test_a_draft_nobody_needs_is_not_loaded(draw: Draw, target: Any, stage: Stage) -> None:
    draw(("sjd", {}))
    assert [load["models"] for load in stage.loads] == [[target.patcher]]


def test_the_request_covers_cache_and_pictures(draw: Draw, target: Any, stage: Stage) -> None:
    draw(("sjd", {}))
    draw(("sjd", {}), batch_size=4)
    one, four = (load["memory"] for load in stage.loads)
    shape = target.parts["target"].backbone.config
    cache = 2 * 17 * (2 * shape.layers * shape.groups * shape.width + shape.dim) * 4
    assert one > cache and four > 3.5 * one


def test_a_small_model_draws_on_one_thread_and_gives_the_others_back(draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    during: list[int] = []
    monkeypatch.setattr(progress.host, "check_interrupt", lambda: during.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        draw()
        with pytest.raises(ValueError, match="unknown word"):
            draw(prompt="zebra")
        assert torch.get_num_threads() == 3 and set(during) == {1}
    finally:
        torch.set_num_threads(before)


def test_out_of_memory_says_what_to_do(draw: Draw, stage: Stage) -> None:
    stage.out_of_memory = True
    with pytest.raises(torch.cuda.OutOfMemoryError) as error:
        draw()
    sentence(error, "memory", "fewer pictures")
    stage.out_of_memory = False
    draw()


def test_weights_left_behind_are_brought_over(target: Any) -> None:
    """Under --novram ComfyUI leaves layers that cannot stream where they are; they must follow to the device."""
    target.patcher.load_device = torch.device("meta")
    assert host.load([target.patcher], 0).type == "meta"
    assert {tensor.device.type for tensor in host.tensors(target.patcher.model)} == {"meta"}


def test_the_cores_own_patcher_is_used_where_there_is_one(node: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    class Core(ModelPatcher):
        """What newer versions choose for their own models."""

    monkeypatch.setattr(sys.modules["comfy.model_patcher"], "CoreModelPatcher", Core, raising=False)
    assert type(node("ForedraftLoadTarget", model="tiny")[0].patcher) is Core


def test_a_reloaded_target_draws_the_same(node: Make, draw: Draw) -> None:
    """ComfyUI may drop the loader's output and run the loader again."""
    images, _ = draw()
    assert torch.equal(draw(target=node("ForedraftLoadTarget", model="tiny")[0])[0], images)


def test_inputs_are_not_changed(draw: Draw, target: Any, draft: Any) -> None:
    before = dict(target.parts), dict(target.defaults), dict(draft.parts), list(draft.patchers)
    weights = {name: weight.clone() for name, weight in target.patcher.model.state_dict().items()}
    draw(("speculative", {"draft_length": 0}))
    draw(("sjd", {"window": -1}), temperature=0.5)
    assert (dict(target.parts), dict(target.defaults), dict(draft.parts), list(draft.patchers)) == before
    assert all(torch.equal(weight, weights[name]) for name, weight in target.patcher.model.state_dict().items())


def test_what_the_clock_taught_is_kept(draw: Draw, target: Any) -> None:
    draw(("sjd", {"window": -1}))
    (planner,) = target.planners["sjd", "tiny/draft_model + tiny/draft_head"].values()
    draw(("sjd", {"window": -1}))
    assert list(target.planners["sjd", "tiny/draft_model + tiny/draft_head"].values()) == [planner]


# -- progress --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_progress_every_round(draw: Draw, stage: Stage, variant: tuple[str, dict[str, Any]]) -> None:
    _, record = draw(variant, batch_size=2)
    # Once an unfinished picture was shown, the finished one follows the last round.
    shown = any(preview is not None for _, _, preview in stage.progress)
    assert len(stage.progress) == max(trace.rounds for trace in record.traces) + shown
    values = [value for value, _, _ in stage.progress]
    assert values == sorted(values) and values[-1] == 16
    assert {total for _, total, _ in stage.progress} == {16}


def test_an_interrupt_ends_the_round_and_nothing_else(draw: Draw, stage: Stage, target: Any) -> None:
    whole, _ = draw(("sjd", {}))
    rounds, stage.progress = len(stage.progress), []
    for after in (1, 2, 5):
        stage.checks, stage.interrupt_after, stage.progress = 0, after, []
        with pytest.raises(InterruptProcessingException):
            draw(("sjd", {}))
        assert stage.checks == after and len(stage.progress) < rounds
        assert torch.equal(draw(("sjd", {}))[0], whole)


def test_an_interrupt_while_the_plain_step_is_timed(draw: Draw, stage: Stage, target: Any) -> None:
    stage.interrupt_after = 4
    with pytest.raises(InterruptProcessingException):
        draw(("sjd", {}))
    assert not target.costs and not stage.progress
    draw(("sjd", {}))
    assert len(target.costs) == 1


def test_live_previews(draw: Draw, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PREVIEW_SECONDS", 0.0)
    monkeypatch.setattr(progress, "PREVIEW_SHARE", 1e9)
    images, _ = draw(("ar", {}))
    previews = [(value, preview) for value, _, preview in stage.progress if preview is not None]
    assert [value for value, _ in previews] == list(range(1, 17))
    for value, (kind, picture, size) in previews:
        assert kind == "JPEG" and size == 512 and picture.size == (16, 16) and picture.mode == "RGB"
        for cell in range(16):
            y, x = divmod(cell, 4)
            block = picture.crop((4 * x, 4 * y, 4 * x + 4, 4 * y + 4))
            blank = block.getcolors() == [(16, (progress.UNDRAWN,) * 3)]
            assert blank == (cell >= value)
    whole = pictures_of(images)[0]
    # Away from the border of what is drawn, a preview shows nearly the picture's own pixels (the codec normalises over all).
    late, last, final = (each.crop((0, 0, 4, 4)).tobytes() for each in (*(previews[at][1][1] for at in (-2, -1)), whole))
    assert last == final, "in the end the finished picture"
    assert max(abs(one - other) for one, other in zip(late, final, strict=True)) <= 24


def test_previews_take_a_small_share(draw: Draw, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 0.0}
    monkeypatch.setattr(progress, "perf_counter", lambda: clock["now"])

    def picture(self: Any, *arguments: Any) -> str:
        clock["now"] += 0.5
        return "picture"

    def check() -> None:
        clock["now"] += 1.0

    monkeypatch.setattr(progress.Watcher, "picture", picture)
    monkeypatch.setattr(progress.host, "check_interrupt", check)
    draw(("ar", {}), width=32, height=32)
    shown = sum(preview == ("JPEG", "picture", 512) for _, _, preview in stage.progress)
    assert shown > 2 and shown * 0.5 <= progress.PREVIEW_SHARE * clock["now"] + 0.5


def test_events_tell_the_browser(draw: Draw, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVENT_SECONDS", 0.0)
    _, record = draw(("sjd", {"rule": "exact", "tail": "reuse"}), batch_size=2)
    trace = record.traces[0]
    assert {(event, sid) for event, _, sid in stage.events} == {("foredraft.progress", "browser")}
    payloads = [data for _, data, _ in stage.events]
    assert json.loads(json.dumps(payloads)) == payloads
    for data in payloads:
        assert set(data) == KEYS
        assert (data["node"], data["images"], data["rows"], data["cols"], data["total"]) == ("7", 2, 4, 4, 16)
        assert data["method"] == record.title and data["exact"] is False
        assert len(data["run"]) == data["tokens"]
        assert data["speedup"] > 0 and data["seconds"] > 0
    assert [data["done"] for data in payloads] == [False] * (len(payloads) - 1) + [True]
    assert [data["rounds"] for data in payloads[:-1]] == list(range(1, len(payloads)))
    runs = [length for row in trace.run for length in row]
    for data in payloads:
        assert data["run"] == runs[: data["tokens"]]
    last, total = payloads[-1], sum(one.target_forwards for one in record.traces)
    assert last["tokens"] == 16 and last["tokens_per_forward"] == 32 / total
    assert last["acceptance"] == sum(t.accepted for t in record.traces) / sum(t.judged for t in record.traces)
    assert record.speedup == last["speedup"]
    before = payloads[-2]
    assert before["tokens_per_forward"] == pytest.approx(last["tokens_per_forward"])
    assert before["acceptance"] == pytest.approx(last["acceptance"])


def test_a_picture_of_a_few_tokens_has_no_estimate(draw: Draw, stage: Stage, target: Any) -> None:
    """Nothing that is no JSON reaches the browser."""
    target.defaults["grids"] = []
    for width in (4, 8, 12, 16):
        _, record = draw(("sjd", {}), width=width, height=4)
        assert (record.speedup is None) == (width <= 12)
    assert [data["speedup"] is None for _, data, _ in stage.events if data["done"]] == [True, True, True, False]


def test_events_are_rare_but_always_the_last(draw: Draw, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVENT_SECONDS", 1e9)
    draw(("ar", {}))
    assert [data["done"] for _, data, _ in stage.events] == [True]
    assert stage.events[0][1]["acceptance"] is None


def test_without_a_server_nothing_is_sent(draw: Draw, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "server", None)
    draw(("sjd", {}))
    assert not stage.events


def test_the_plain_step_is_timed_once_and_replaced_by_a_whole_run(
    draw: Draw, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw(("sjd", {}))
    ((key, first),) = target.costs.items()
    draw(("sjd", {}), seed=5)
    assert target.costs == {key: first}
    with monkeypatch.context() as patch:
        patch.setattr("foredraft.nodes.sample.COST_SECONDS", 0.0)
        draw(("sjd", {}), seed=5)
    assert target.costs[key].measured > first.measured, "an old measurement is made again"
    _, record = draw(("ar", {}))
    assert record.speedup == 1.0
    trace = record.traces[0]
    assert target.costs[key].seconds == (trace.seconds - trace.parts["codec"]) / 16
    draw(("sjd", {}), batch_size=3)
    assert len(target.costs) == 2
