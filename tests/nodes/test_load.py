"""Load Target and Load Draft: what is offered, what is read, what is refused."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from foredraft import NODE_CLASS_MAPPINGS
from foredraft.nodes.load import Draft, Target, drafts, targets

from ..tiny import sentence, states_equal
from .conftest import Make
from .graphs import inputs_of
from .stand_in import ModelPatcher, Stage, installed

LoadTarget, LoadDraft = NODE_CLASS_MAPPINGS["ForedraftLoadTarget"], NODE_CLASS_MAPPINGS["ForedraftLoadDraft"]


def test_the_included_model_comes_first(stage: Stage) -> None:
    assert list(targets()) == ["demo", "tiny"]
    assert inputs_of("ForedraftLoadTarget")["model"][0] == ["demo", "tiny"]
    assert inputs_of("ForedraftLoadDraft")["model"][0] == [
        *("none", "demo/draft_model", "demo/draft_head"),
        *("tiny/draft_model", "tiny/draft_head"),
    ]
    assert stage.roots == {"foredraft": [str(stage.models / "foredraft")]}


def test_without_a_models_folder(tmp_path: Path) -> None:
    with installed(Stage(tmp_path / "nothing")):
        assert list(targets()) == ["demo"]


def test_folders_of_extra_model_paths_and_nested_ones(tmp_path: Path, folder: Path) -> None:
    extra = tmp_path / "elsewhere"
    shutil.copytree(folder, extra / "maker" / "model")
    with installed(Stage(tmp_path / "models", extra=[extra])):
        assert list(targets()) == ["demo", "maker/model"]
        assert isinstance(LoadTarget().load("maker/model", "float32")[0], Target)


def test_any_component_beside_the_target_is_a_draft(tmp_path: Path, folder: Path) -> None:
    """A folder with a draft head alone is a draft and no target; a broken index hides its folder, nothing else."""
    root = tmp_path / "models" / "foredraft"
    for name, index in (("head", {"draft_head": ["foredraft.models.x", "X"], "defaults": {}}), ("broken", None), ("list", [1])):
        (root / name).mkdir(parents=True)
        (root / name / "model_index.json").write_text("{" if index is None else json.dumps(index))
    with installed(Stage(tmp_path / "models")):
        assert list(targets()) == ["demo"]
        assert list(drafts()) == ["demo/draft_model", "demo/draft_head", "head/draft_head"]


def test_load_target(node: Make, parts: dict) -> None:
    (target,) = node("ForedraftLoadTarget", model="tiny")
    assert set(target.parts) == {"target", "codec", "tokenizer"}
    assert states_equal(target.parts["target"], parts["target"])
    assert target.defaults == parts["defaults"]
    assert isinstance(target.patcher, ModelPatcher)
    assert target.get_models() == [target.patcher]
    assert set(dict(target.patcher.model.named_children())) == {"target", "codec"}
    weights = sum(w.numel() * 4 for name in ("target", "codec") for w in parts[name].state_dict().values())
    assert target.get_ram_usage() == weights


def test_weights_are_ordinary_tensors(node: Make) -> None:
    """ComfyUI runs nodes in inference mode but unloads models outside it."""
    (target,) = node("ForedraftLoadTarget", model="tiny")
    assert torch.is_inference_mode_enabled()
    assert not any(weight.is_inference() for weight in target.patcher.model.parameters())
    with torch.inference_mode(False):
        target.patcher.model.to(torch.float64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_dtype(node: Make, dtype: str) -> None:
    (target,) = node("ForedraftLoadTarget", model="tiny", dtype=dtype)
    (draft,) = node("ForedraftLoadDraft", model="tiny/draft_model", dtype=dtype)
    assert target.parts["target"].dtype == draft.parts["draft_model"].dtype == getattr(torch, dtype)


def test_load_draft(node: Make, parts: dict) -> None:
    (draft,) = node("ForedraftLoadDraft", model="tiny/draft_model")
    assert states_equal(draft.parts["draft_model"], parts["draft_model"])
    assert draft.name == "tiny/draft_model" and len(draft.patchers) == 1
    assert node("ForedraftLoadDraft", model="none")[0] == Draft()


def test_drafts_are_chained_without_changing_them(node: Make) -> None:
    (first,) = node("ForedraftLoadDraft", model="tiny/draft_model")
    (same,) = node("ForedraftLoadDraft", model="none", draft=first)
    assert same is first
    other = Draft({"draft_head": object()}, ["handle"], "x/draft_head")
    (both,) = node("ForedraftLoadDraft", model="tiny/draft_model", draft=other)
    assert set(both.parts) == {"draft_head", "draft_model"} and len(both.patchers) == 2
    assert both.name == "x/draft_head + tiny/draft_model"
    assert set(other.parts) == {"draft_head"} and other.patchers == ["handle"]
    with pytest.raises(ValueError) as error:
        node("ForedraftLoadDraft", model="tiny/draft_model", draft=first)
    sentence(error, "draft_model", "keep one")


@pytest.mark.parametrize("name", ["../tiny", "..", "/etc", "tiny/../tiny", "", "tiny/", "nothing"])
@pytest.mark.parametrize("kind", ["ForedraftLoadTarget", "ForedraftLoadDraft"])
def test_no_name_leads_out_of_the_folders(node: Make, kind: str, name: str) -> None:
    with pytest.raises(ValueError) as error:
        node(kind, model=name)
    sentence(error, repr(name), "choose one of", "demo")


def test_damaged_files_are_one_sentence(stage: Stage, node: Make, folder: Path) -> None:
    copy = Path(shutil.copytree(folder, stage.models / "foredraft" / "damaged"))
    weights = next((copy / "target").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError) as error:
        node("ForedraftLoadTarget", model="damaged")
    sentence(error, "target", "damaged", "fetch it again")
    shutil.rmtree(copy / "codec")
    with pytest.raises((ValueError, FileNotFoundError)) as gone:
        node("ForedraftLoadTarget", model="damaged")
    sentence(gone, "damaged")


def test_a_folder_without_a_codec_says_so(stage: Stage, node: Make, folder: Path) -> None:
    copy = Path(shutil.copytree(folder, stage.models / "foredraft" / "bare"))
    index = json.loads((copy / "model_index.json").read_text())
    del index["codec"]
    (copy / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError) as error:
        node("ForedraftLoadTarget", model="bare")
    sentence(error, "bare", "codec", "fetch")


def test_a_changed_file_is_noticed(stage: Stage, folder: Path) -> None:
    copy = Path(shutil.copytree(folder, stage.models / "foredraft" / "mine"))
    before = LoadTarget.IS_CHANGED(model="mine", dtype="float32")
    drafted = LoadDraft.IS_CHANGED(model="mine/draft_model", dtype="float32", draft=None)
    assert before and drafted and before == LoadTarget.IS_CHANGED(model="mine", dtype="float32")
    weights = next((copy / "target").glob("*.safetensors"))
    weights.touch()
    after = LoadTarget.IS_CHANGED(model="mine", dtype="float32")
    assert after != before
    weights.write_bytes(weights.read_bytes() + b" ")
    assert LoadTarget.IS_CHANGED(model="mine", dtype="float32") != after
    assert LoadDraft.IS_CHANGED(model="mine/draft_model", dtype="float32") == drafted
    # Linked inputs are None here.
    assert LoadTarget.IS_CHANGED(model=None, dtype=None) == "" == LoadDraft.IS_CHANGED(model=None, dtype=None, draft=None)


def test_nothing_of_ours_keeps_a_model(stage: Stage, node: Make) -> None:
    """ComfyUI frees a model by dropping the loader's output."""
    (target,) = node("ForedraftLoadTarget", model="tiny")
    (draft,) = node("ForedraftLoadDraft", model="tiny/draft_model")
    (method,) = node("ForedraftSpeculative")
    images, record = node("ForedraftSampler", target=target, draft=draft, method=method)
    node("ForedraftCompare", target=target, draft=draft, method_1=method)
    watched = [weakref.ref(part) for part in (target.parts["target"], target.parts["codec"], draft.parts["draft_model"])]
    alone = watched[2]
    stage.loads.clear()
    del draft, method
    gc.collect()
    assert alone() is None, "the target keeps a draft that is no longer connected"
    del target
    gc.collect()
    assert [ref() for ref in watched] == [None, None, None]
    assert images.shape[0] == len(record.traces) == 1
