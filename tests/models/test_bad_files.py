"""Damaged, foreign and dangerous model folders: one sentence each, and nothing is executed."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foredraft import AutoregressivePipeline, SJDPipeline, SpeculativePipeline
from safetensors.torch import load_file, save_file

from ..tiny import sentence

WEIGHTS = "diffusion_pytorch_model.safetensors"
Edit = Callable[[Path], Any]


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """The family's folder, to be spoilt."""
    return Path(shutil.copytree(folder, tmp_path / "family"))


def index(folder: Path, **changes: Any) -> None:
    """Change entries of the index; None removes one."""
    path = folder / "model_index.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def truncate(path: Path, part: float) -> None:
    """Cut a file."""
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])


def tensors(path: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of a safetensors file."""
    state = load_file(path)
    edit(state)
    save_file(state, path, metadata={"format": "pt"})


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize(
    ("edit", "kind", "holds"),
    [
        (lambda f: truncate(f / "target" / WEIGHTS, 0.5), ValueError, ("target", "damaged", "fetch it again")),
        (lambda f: truncate(f / "target" / WEIGHTS, 0.0), ValueError, ("target", "damaged", "fetch it again")),
        (lambda f: truncate(f / "codec" / WEIGHTS, 0.99), ValueError, ("codec", "damaged", "fetch it again")),
        (lambda f: (f / "target" / WEIGHTS).write_bytes(b"\0" * 4096), ValueError, ("target", "damaged")),
        (lambda f: (f / "codec" / WEIGHTS).unlink(), FileNotFoundError, ("safetensors", "codec", "fetch or convert")),
        (lambda f: shutil.rmtree(f / "target"), FileNotFoundError, ("'target'", "incomplete", "fetch it again")),
        (lambda f: (f / "target" / "config.json").unlink(), (ValueError, FileNotFoundError), ("target", "fetch it again")),
        (lambda f: (f / "target" / "config.json").write_text("{"), ValueError, ("target", "fetch it again")),
        (lambda f: (f / "target" / "config.json").write_text("[]"), ValueError, ("target", "fetch it again")),
        (lambda f: (f / "tokenizer" / "words.json").unlink(), FileNotFoundError, ("words.json", "incomplete", "fetch it again")),
        (lambda f: (f / "tokenizer" / "words.json").write_text("{"), ValueError, ("words.json", "fetch")),
        (lambda f: (f / "tokenizer" / "words.json").write_text('{"names": []}'), ValueError, ("words.json", "fetch")),
        (lambda f: (f / "tokenizer" / "words.json").write_text("[]"), ValueError, ("words.json", "fetch")),
        (lambda f: (f / "model_index.json").unlink(), FileNotFoundError, ("model_index.json", "not a Foredraft model folder")),
        (lambda f: (f / "model_index.json").write_text("{,"), ValueError, ("model_index.json", "not valid JSON", "again")),
        (lambda f: (f / "model_index.json").write_bytes(b"\xff\xfe\x00"), ValueError, ("model_index.json", "again")),
        (lambda f: (f / "model_index.json").write_text("[1]"), ValueError, ("model_index.json", "does not describe a model")),
        (lambda f: index(f, target=None), ValueError, ("no target", "SJDPipeline", "target=")),
        (lambda f: index(f, target="EmbeddedTarget"), ValueError, ("target", "SJDPipeline")),
        (lambda f: index(f, target=[None, None]), ValueError, ("target",)),
        (lambda f: index(f, target=["x", ["y"]]), ValueError, ("target",)),
        (lambda f: index(f, target=["diffusers", "UNet2DConditionModel"]), ValueError, ("UNet2DConditionModel", "another")),
        (lambda f: index(f, codec=["foredraft.models.embedded", "WordTokenizer"]), (ValueError, FileNotFoundError), ("codec",)),
        (lambda f: index(f, defaults=[1, 2]), ValueError, ("defaults", "model_index.json")),
        (lambda f: index(f, defaults={"grids": 7}), ValueError, ("grids", "model_index.json")),
    ],
)
def test_a_spoilt_folder(copy: Path, edit: Edit, kind: Any, holds: tuple[str, ...]) -> None:
    edit(copy)
    with pytest.raises(kind) as error:
        SJDPipeline.from_pretrained(copy)
    sentence(error, *holds)


@pytest.mark.parametrize(
    ("edit", "holds"),
    [
        (lambda s: s.pop("head.weight"), ("head.weight",)),
        (lambda s: s.update(other=torch.zeros(2)), ("other",)),
        (lambda s: s.update({"model." + name: s.pop(name) for name in list(s)}), ("EmbeddedTarget",)),
        (lambda s: s.update({"head.weight": torch.zeros(48, 31)}), ()),
        (lambda s: s.update({"codes.weight": torch.zeros(50, 32)}), ()),
        (lambda s: s.clear(), ()),
    ],
    ids=["missing", "unexpected", "foreign", "narrow", "longer", "empty"],
)
def test_weights_of_another_model(copy: Path, edit: Callable[..., Any], holds: tuple[str, ...]) -> None:
    tensors(copy / "target" / WEIGHTS, edit)
    with pytest.raises(ValueError) as error:
        SJDPipeline.from_pretrained(copy)
    sentence(error, "target", str(copy / "target"), *holds)


def test_another_librarys_folder(tmp_path: Path) -> None:
    """A diffusers pipeline of another kind."""
    entries = {
        "_class_name": "StableDiffusionPipeline",
        "_diffusers_version": "0.30.0",
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
    }
    (tmp_path / "model_index.json").write_text(json.dumps(entries))
    with pytest.raises(ValueError) as error:
        SJDPipeline.from_pretrained(tmp_path)
    sentence(error, str(tmp_path), "target", "SJDPipeline")


def test_a_transformers_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ValueError) as error:
        SJDPipeline.from_pretrained(tmp_path)
    sentence(error, str(tmp_path), "'llama'", "llamagen")


@pytest.mark.parametrize("name", ["diffusion_pytorch_model.bin", "pytorch_model.bin", "model.pt", "weights.pth", "last.ckpt"])
def test_a_pickle_is_never_opened(copy: Path, tmp_path: Path, name: str) -> None:
    marker = tmp_path / "executed"
    (copy / "target" / WEIGHTS).unlink()
    with open(copy / "target" / name, "wb") as file:
        pickle.dump(Payload(marker), file)
    with pytest.raises(FileNotFoundError) as error:
        SJDPipeline.from_pretrained(copy)
    sentence(error, "target", name, "code", "safetensors")
    assert not marker.exists()


def test_a_pickle_under_the_name_of_safetensors_is_never_opened(copy: Path, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    (copy / "target" / WEIGHTS).write_bytes(pickle.dumps(Payload(marker)))
    with pytest.raises(ValueError) as error:
        SJDPipeline.from_pretrained(copy)
    sentence(error, "target", "damaged", "fetch it again")
    torch.save(Payload(marker), copy / "target" / WEIGHTS)
    with pytest.raises(ValueError):
        SJDPipeline.from_pretrained(copy)
    assert not marker.exists()


def test_a_pickle_beside_safetensors_is_not_read(copy: Path, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    (copy / "target" / "diffusion_pytorch_model.bin").write_bytes(pickle.dumps(Payload(marker)))
    SJDPipeline.from_pretrained(copy)
    assert not marker.exists()


def test_the_payload_of_these_tests_does_run(tmp_path: Path) -> None:
    """The negative control of the three tests above."""
    pickle.loads(pickle.dumps(Payload(tmp_path / "executed")))  # noqa: S301
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize("source", ["/no/such/folder", "./absent", "~/absent-family", "absent", "a/b/c"])
def test_a_folder_that_is_not_there(source: str) -> None:
    with pytest.raises(FileNotFoundError) as error:
        SJDPipeline.from_pretrained(source)
    sentence(error, "folder", "model_index.json", "Hub id")


def test_an_id_the_hub_cannot_give() -> None:
    """The real client, offline."""
    with pytest.raises(FileNotFoundError) as error:
        SJDPipeline.from_pretrained("nobody-here/no-such-model")
    sentence(error, "'nobody-here/no-such-model'", "Hub", "check the name")


@pytest.mark.parametrize("source", [None, 5, ["a"]])
def test_a_source_of_the_wrong_type(source: Any) -> None:
    with pytest.raises(TypeError) as error:
        SJDPipeline.from_pretrained(source)
    sentence(error, "folder", "Hub id", type(source).__name__)


def test_a_file_in_place_of_a_folder(folder: Path) -> None:
    with pytest.raises(FileNotFoundError) as error:
        SJDPipeline.from_pretrained(folder / "model_index.json")
    sentence(error, "model_index.json", "folder")


@pytest.mark.parametrize("name", ["model_index.json", "target"])
def test_unknown_arguments_of_from_pretrained(folder: Path, name: str) -> None:
    with pytest.raises(TypeError) as error:
        SJDPipeline.from_pretrained(folder, torch_dtpe=torch.float16)
    sentence(error, "SJDPipeline.from_pretrained", "'torch_dtpe'", "'torch_dtype'")
    with pytest.raises(TypeError) as error:
        SJDPipeline.from_pretrained(folder, draft_model=None)
    sentence(error, "SJDPipeline.from_pretrained", "'draft_model'")


@pytest.mark.parametrize("dtype", ["float32", "half", 16, torch.int8, torch.complex64])
def test_a_dtype_that_is_none(folder: Path, dtype: Any) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        SJDPipeline.from_pretrained(folder, torch_dtype=dtype)
    sentence(error, "torch_dtype", "torch.float32", str(dtype))


def test_a_broken_draft_does_not_stop_other_methods(copy: Path) -> None:
    truncate(copy / "draft_model" / WEIGHTS, 0.5)
    AutoregressivePipeline.from_pretrained(copy)
    with pytest.raises(ValueError) as error:
        SpeculativePipeline.from_pretrained(copy)
    sentence(error, "draft_model", "damaged")


def test_saving_onto_a_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError) as error:
        SJDPipeline.from_pretrained(folder).save_pretrained(tmp_path / "file")
    sentence(error, str(tmp_path / "file"), "folder")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_failed_save_leaves_no_index(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder has an index only when everything else is in it."""
    run = SJDPipeline.from_pretrained(folder)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run.tokenizer, "save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        run.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new" / "model_index.json").exists()
