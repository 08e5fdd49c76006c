"""Folders and Hub ids: reading, writing, sharing components."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import foredraft
import huggingface_hub
import pytest
import torch
from foredraft import AutoregressivePipeline, SJDPipeline, SpeculativePipeline
from foredraft.models.embedded import EmbeddedTarget
from huggingface_hub import errors

from ..tiny import DEFAULTS, build_pipeline, codes, sentence, states_equal

MODELS = ("target", "codec", "draft_model")
Pipe = Callable[..., Any]


def quiet(pipe: Any) -> Any:
    """Without a progress bar."""
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("cls", [AutoregressivePipeline, SJDPipeline, SpeculativePipeline])
def test_a_loaded_pipeline_draws_what_the_saved_one_drew(pipe: Pipe, folder: Path, cls: Any) -> None:
    loaded = quiet(cls.from_pretrained(folder))
    assert type(loaded) is cls
    original = pipe(cls.config_class.name)
    for name in cls.component_names():
        part = getattr(loaded, name)
        if isinstance(part, torch.nn.Module):
            assert states_equal(part, getattr(original, name)) and not part.training
    assert loaded.config.defaults == DEFAULTS
    assert torch.equal(codes(loaded), codes(original))


def test_a_path_may_be_a_string(folder: Path) -> None:
    assert SJDPipeline.from_pretrained(str(folder)).tokenizer.names[0] == "fox"


def test_loading_says_nothing_about_components_it_does_not_use(
    folder: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    SJDPipeline.from_pretrained(folder)
    shown = capsys.readouterr()
    assert shown.out + shown.err == "" and not caplog.records
    assert not [warning for warning in recwarn if "draft" in str(warning.message)]


def test_the_index_names_this_package(folder: Path) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    assert index["_class_name"] == "SpeculativePipeline" and index["defaults"] == DEFAULTS
    modules = {name: value for name, value in index.items() if isinstance(value, list)}
    assert set(modules) == {"target", "codec", "tokenizer", "draft_model"}
    assert modules["codec"] == ["foredraft.models.codecs.vq", "VQCodec"]
    assert all(module.startswith("foredraft.") for module, _ in modules.values())
    assert not list(folder.rglob("*.tmp")) and not list(folder.rglob("*.bin"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_torch_dtype(folder: Path, dtype: torch.dtype) -> None:
    loaded = SpeculativePipeline.from_pretrained(folder, torch_dtype=dtype)
    for name in MODELS:
        floating = [tensor for tensor in getattr(loaded, name).state_dict().values() if tensor.is_floating_point()]
        assert {tensor.dtype for tensor in floating} == {dtype}, name
    assert loaded.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_draws(folder: Path, dtype: torch.dtype) -> None:
    loaded = quiet(SJDPipeline.from_pretrained(folder, torch_dtype=dtype))
    out = loaded("fox", generator=torch.Generator().manual_seed(0), output_type="np")
    assert out.traces[0].complete and out.images.shape == (1, 16, 16, 3)
    assert out.images.min() >= 0 and out.images.max() <= 1


def test_round_trip_from_half_precision(parts: dict[str, Any], tmp_path: Path) -> None:
    half = build_pipeline(parts, "speculative", torch.float16)
    half.save_pretrained(tmp_path)
    again = SpeculativePipeline.from_pretrained(tmp_path, torch_dtype=torch.float16)
    wide = SpeculativePipeline.from_pretrained(tmp_path)
    for name in MODELS:
        assert states_equal(getattr(again, name), getattr(half, name)), name
        for key, tensor in getattr(wide, name).state_dict().items():
            stored = getattr(half, name).state_dict()[key]
            assert tensor.dtype == torch.float32 and torch.equal(tensor, stored.float()), (name, key)


def test_round_trip_after_from_pipe(pipe: Pipe, tmp_path: Path) -> None:
    plain = quiet(AutoregressivePipeline.from_pipe(pipe("speculative")))
    plain.save_pretrained(tmp_path)
    loaded = quiet(SJDPipeline.from_pretrained(tmp_path))
    assert states_equal(loaded.target, plain.target) and states_equal(loaded.codec, plain.codec)
    assert not (tmp_path / "draft_model").exists()
    assert torch.equal(codes(loaded, seed=4), codes(plain, seed=4))
    with pytest.raises(ValueError) as error:
        SpeculativePipeline.from_pretrained(tmp_path)
    sentence(error, "draft_model", "SpeculativePipeline", "draft_model=")


def test_saving_twice_changes_nothing(folder: Path, tmp_path: Path) -> None:
    SpeculativePipeline.from_pretrained(folder).save_pretrained(tmp_path)
    SpeculativePipeline.from_pretrained(tmp_path).save_pretrained(tmp_path)
    for path in sorted(folder.rglob("*.safetensors")):
        assert path.read_bytes() == (tmp_path / path.relative_to(folder)).read_bytes()
    assert (folder / "model_index.json").read_text() == (tmp_path / "model_index.json").read_text()


def test_diffusers_reads_the_folder_too(folder: Path) -> None:
    """model_index.json is in diffusers' own format: the generic loader understands every entry."""
    from diffusers import DiffusionPipeline

    config = DiffusionPipeline.load_config(folder)
    assert config["target"] == ["foredraft.models.embedded", "EmbeddedTarget"]
    assert states_equal(EmbeddedTarget.from_pretrained(folder / "target"), SJDPipeline.from_pretrained(folder).target)


def test_components_can_be_replaced(folder: Path) -> None:
    other = EmbeddedTarget.from_pretrained(folder / "target").to(torch.float64)
    loaded = SJDPipeline.from_pretrained(folder, target=other, defaults={**DEFAULTS, "top_k": 5})
    assert loaded.target is other and loaded.config.defaults["top_k"] == 5


def test_from_pipe_shares_the_components(pipe: Pipe) -> None:
    source = pipe("speculative")
    target = SJDPipeline.from_pipe(source)
    for name in ("target", "codec", "tokenizer"):
        assert getattr(target, name) is getattr(source, name)
    assert target.config.defaults == DEFAULTS and "draft_model" not in target.components
    changed = SJDPipeline.from_pipe(source, defaults={**DEFAULTS, "guidance_scale": 3.0})
    assert changed.config.defaults["guidance_scale"] == 3.0 and source.config.defaults["guidance_scale"] == 1.5


def test_from_pipe_names_what_is_missing(pipe: Pipe) -> None:
    with pytest.raises(ValueError) as error:
        SpeculativePipeline.from_pipe(pipe("sjd"))
    sentence(error, "SpeculativePipeline", "draft_model=")
    again = SpeculativePipeline.from_pipe(pipe("sjd"), draft_model=pipe("speculative").draft_model)
    assert again.draft_model is pipe("speculative").draft_model


@pytest.mark.parametrize("cls", [AutoregressivePipeline, SJDPipeline, SpeculativePipeline])
def test_what_diffusers_asks_of_a_pipeline(folder: Path, cls: Any) -> None:
    loaded = quiet(cls.from_pretrained(folder))
    assert isinstance(loaded, __import__("diffusers").DiffusionPipeline)
    assert set(loaded.components) == set(cls.component_names())
    order = loaded.model_cpu_offload_seq.split("->")
    models = [name for name, part in loaded.components.items() if isinstance(part, torch.nn.Module)]
    assert set(models) <= {*order, *loaded._exclude_from_cpu_offload} and order.index("target") < order.index("codec")
    assert cls._callback_tensor_inputs == ["tokens", "length", "counts"]
    assert loaded.to(torch.float64) is loaded
    assert loaded.target.dtype == loaded.codec.dtype == torch.float64
    assert loaded.to("cpu").device == torch.device("cpu")
    assert codes(loaded).shape == (1, 4, 4)
    assert cls(**{**loaded.components, "defaults": loaded.config.defaults}).target is loaded.target


def test_a_pipeline_without_family_defaults_draws(pipe: Pipe) -> None:
    parts = pipe("sjd").components
    bare = quiet(SJDPipeline(**parts))
    assert bare.config.defaults == {}
    assert codes(bare, height=16, width=16).shape == (1, 4, 4)
    assert codes(bare, height=16, width=16, window=2).shape == (1, 4, 4)


def stub(monkeypatch: pytest.MonkeyPatch, answer: Callable[..., str]) -> list[dict[str, Any]]:
    """Put `answer` in place of the Hub client's download; returns the calls it gets."""
    calls: list[dict[str, Any]] = []

    def download(repo_id: str, **options: Any) -> str:
        calls.append({"repo_id": repo_id, **options})
        return answer(repo_id, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


def test_a_hub_id(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path, pipe: Pipe) -> None:
    def copy(repo_id: str, **_: Any) -> str:
        return str(shutil.copytree(folder, tmp_path / "snapshot", dirs_exist_ok=True))

    calls = stub(monkeypatch, copy)
    loaded = quiet(SJDPipeline.from_pretrained("someone/tiny-family", revision="v1", token="t", cache_dir=tmp_path))
    assert torch.equal(codes(loaded), codes(pipe("sjd")))
    assert [call["repo_id"] for call in calls] == ["someone/tiny-family"]
    assert (calls[0]["revision"], calls[0]["token"], calls[0]["cache_dir"]) == ("v1", "t", tmp_path)
    patterns = calls[0]["allow_patterns"]
    assert "*.safetensors" in patterns and "*.json" in patterns
    assert not {"*.bin", "*.pt", "*.py", "*"} & set(patterns), "nothing that can hold code is fetched"


def hub_error(kind: str) -> Exception:
    """One of the Hub client's own errors, made the way the installed version wants it."""
    if kind == "LocalEntryNotFoundError":
        return errors.LocalEntryNotFoundError("offline, and not in the cache")
    if kind == "OfflineModeIsEnabled":
        return errors.OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
    response: Any = SimpleNamespace(headers={}, request=None, status_code=404)
    return getattr(errors, kind)("404 Client Error", response=response)


@pytest.mark.parametrize(
    "kind",
    ["RepositoryNotFoundError", "GatedRepoError", "RevisionNotFoundError", "LocalEntryNotFoundError", "OfflineModeIsEnabled"],
)
def test_what_the_hub_refuses_is_one_sentence(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def refuse(repo_id: str, **_: Any) -> str:
        raise hub_error(kind)

    stub(monkeypatch, refuse)
    with pytest.raises(FileNotFoundError) as error:
        SJDPipeline.from_pretrained("someone/absent")
    sentence(error, "someone/absent", "check the name")
    assert isinstance(error.value.__cause__, Exception)


@pytest.mark.parametrize("identifier", ["no body/has this", "someone/absent--", "a/b" + "c" * 200])
def test_ids_the_hub_client_does_not_accept(identifier: str) -> None:
    with pytest.raises(FileNotFoundError) as error:
        SJDPipeline.from_pretrained(identifier)
    sentence(error, identifier[:20])


def test_the_demo_path_is_a_folder_of_this_copy() -> None:
    assert Path(foredraft.DEMO) == Path(foredraft.__file__).parent / "models" / "demo"
