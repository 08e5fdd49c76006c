"""Conversion: what comes out, and that nothing comes out of a bad checkpoint."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foredraft import SJDPipeline
from foredraft.cli import main
from foredraft.models import loading, weights
from foredraft.models.checkpoint import Checkpoint, Source
from foredraft.models.convert import convert, write_safetensors
from foredraft.models.weights import Part, Recipe
from safetensors.torch import load_file, save_file

from ..tiny import generators, sentence
from . import layouts

CALL: dict[str, Any] = {"output_type": "latent", "guidance_scale": 2.0, "top_k": 0}
GPT = "t2i_XL_stage1_256.pt"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LlamaGen as a user has it. Do not change it."""
    return layouts.llamagen_folder(tmp_path_factory.mktemp("original") / "llamagen")


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    """One to spoil."""
    return Path(shutil.copytree(original, tmp_path / "copy"))


def drawn(place: Path, **components: Any) -> torch.Tensor:
    """The first tokens that a place draws."""

    def stop(pipe: Any, number: int, *_: Any) -> None:
        pipe._interrupt = number == 12

    pipe = SJDPipeline.from_pretrained(place, **components)
    pipe.set_progress_bar_config(disable=True)
    tokens = pipe("a red apple", generator=generators(0), callback_on_step_end=stop, **CALL).tokens
    assert len(tokens.unique()) > 8
    return tokens


def nothing_left(folder: Path) -> bool:
    """Whether a failed conversion to folder / "out" left no trace."""
    return not [path for path in folder.iterdir() if "out" in path.name or "partial" in path.name]


# -- what comes out --------------------------------------------------------------------------------------------------


def test_a_converted_folder_draws_the_same(original: Path, tmp_path: Path) -> None:
    folder = convert(original, tmp_path / "out", "llamagen")
    index = layouts.read_json(folder / "model_index.json")
    assert index["family"] == "llamagen" and index["defaults"]["guidance_scale"] == 7.5
    assert {name: entry[1] for name, entry in index.items() if isinstance(entry, list)} == {
        "target": "LlamaGenTarget",
        "codec": "JanusCodec",
        "text_encoder": "T5EncoderModel",
        "tokenizer": "AutoTokenizer",
    }
    assert torch.equal(drawn(folder), drawn(original))
    stored = load_file(folder / "target" / "diffusion_pytorch_model.safetensors")
    assert torch.equal(stored["head.weight"], layouts.llamagen_state()["output.weight"])
    text = load_file(folder / "text_encoder" / "model.safetensors")
    assert not [name for name in text if name.startswith(("decoder", "lm_head"))], "only the encoder's half"
    assert not (tmp_path / ".out.partial").exists()
    again = SJDPipeline.from_pretrained(folder)
    again.save_pretrained(tmp_path / "saved")
    for name in ("target", "codec"):
        saved = load_file(tmp_path / "saved" / name / "diffusion_pytorch_model.safetensors")
        ours = load_file(folder / name / "diffusion_pytorch_model.safetensors")
        assert saved.keys() == ours.keys() and all(torch.equal(saved[key], ours[key]) for key in saved)


def test_a_single_file_with_its_components_named(original: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copyfile(original / GPT, alone / GPT)
    named = {"codec": original / "vq_ds16_t2i.pt", "text_encoder": original / "t5-ckpt" / "flan-t5-xl"}
    folder = convert(alone / GPT, tmp_path / "out", named=named)
    assert torch.equal(drawn(folder), drawn(original))
    assert torch.equal(drawn(alone / GPT, **{name: str(place) for name, place in named.items()}), drawn(original))


def test_what_is_absent_is_asked_of_the_hub(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked = []

    def file(repo: str, name: str, **_: Any) -> str:
        asked.append(f"{repo}/{name}")
        return str(original / "vq_ds16_t2i.pt")

    def snapshot(repo: str, **_: Any) -> str:
        asked.append(repo)
        return str(original / "t5-ckpt" / "flan-t5-xl")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", file)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    shutil.copyfile(original / GPT, tmp_path / GPT)
    assert torch.equal(drawn(convert(tmp_path / GPT, tmp_path / "out")), drawn(original))
    assert sorted(asked) == ["google/flan-t5-xl", "peizesun/llamagen_t2i/vq_ds16_t2i.pt"]
    asked.clear()
    assert torch.equal(drawn(tmp_path / GPT), drawn(original))
    assert sorted(asked) == ["google/flan-t5-xl", "peizesun/llamagen_t2i/vq_ds16_t2i.pt"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_conversion_to_half_precision(original: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    folder = convert(original, tmp_path / "out", dtype=dtype)
    state = load_file(folder / "target" / "diffusion_pytorch_model.safetensors")
    assert {tensor.dtype for tensor in state.values()} == {dtype}
    assert torch.equal(state["codes.weight"], layouts.llamagen_state()["tok_embeddings.weight"].to(dtype))


def test_a_sharded_text_encoder(original: Path, tmp_path: Path) -> None:
    """transformers' own shards, with an index."""
    copy = Path(shutil.copytree(original, tmp_path / "copy"))
    place = layouts.t5_folder(tmp_path / "sharded", sharded=True)
    assert len(list(place.glob("*.safetensors"))) > 2
    shutil.rmtree(copy / "t5-ckpt")
    shutil.move(place, copy / "flan-t5-xl")
    assert torch.equal(drawn(convert(copy, tmp_path / "out")), drawn(original))


def test_the_writer_writes_what_safetensors_writes(tmp_path: Path) -> None:
    state = {
        "half": torch.randn(3, 5).half(),
        "b16": torch.randn(7).bfloat16(),
        "wide": torch.randn(2, 2, dtype=torch.float64),
        "whole": torch.arange(5),
        "flag": torch.tensor([True, False]),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
    }
    torch.save(state, tmp_path / "state.pt")
    part = Part("Any", weights={name: Recipe((name,)) for name in state}, checkpoint=Checkpoint([tmp_path / "state.pt"]))
    write_safetensors(part, tmp_path / "ours.safetensors", None)
    again = load_file(tmp_path / "ours.safetensors")
    assert again.keys() == state.keys()
    assert all(again[name].dtype == state[name].dtype and torch.equal(again[name], state[name]) for name in state)


# -- what cannot be converted ----------------------------------------------------------------------------------------


class Evil:
    """A pickle that runs code when it is opened."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def spoil(name: str, folder: Path) -> None:
    """One kind of damage to the GPT file of a folder."""
    path = folder / GPT
    content, state = path.read_bytes(), layouts.llamagen_state()
    if name == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif name == "truncated legacy":
        layouts.save_state(state, path, "legacy")
        path.write_bytes(path.read_bytes()[: len(content) // 2])
    elif name == "truncated safetensors":
        layouts.save_state(state, path, "safetensors")
        path.unlink()
        whole = path.with_suffix(".safetensors")
        whole.write_bytes(whole.read_bytes()[: len(content) // 2])
    elif name == "empty":
        path.write_bytes(b"")
    elif name == "noise":
        path.write_bytes(bytes(range(256)) * 40)
    elif name == "text":
        path.write_text("<!DOCTYPE html><html>404</html>")
    elif name == "evil":
        torch.save({"model": state, "extra": Evil(folder / "executed")}, path)
    elif name == "evil legacy":
        torch.save({"model": Evil(folder / "executed")}, path, _use_new_zipfile_serialization=False)
    elif name == "evil plain pickle":
        path.write_bytes(pickle.dumps({"model": Evil(folder / "executed")}))
    elif name == "whole model":
        torch.save(torch.nn.Linear(2, 2), path)
    elif name == "no tensors":
        torch.save({"model": {"steps": 3}}, path)
    elif name == "missing":
        torch.save({"model": {key: value for key, value in state.items() if "ffn_norm" not in key}}, path)
    elif name == "unexpected":
        torch.save({"model": {**state, "layers.0.attention.q_norm.weight": torch.ones(64), "lora": torch.ones(3)}}, path)
    elif name == "mis-shaped":
        torch.save({"model": {**state, "output.weight": torch.zeros(63, layouts.DIM)}}, path)
    elif name == "not joinable":
        torch.save({"model": {**state, "layers.0.feed_forward.w3.weight": torch.zeros(layouts.FFN, 7)}}, path)
    elif name == "another model":
        torch.save({"model.layers.0.weight": torch.zeros(3)}, path)


DAMAGE = {
    "truncated": ("truncated", "fetch it again"),
    "truncated legacy": ("truncated", "fetch it again"),
    "truncated safetensors": ("truncated", "fetch it again"),
    "empty": ("truncated or not a PyTorch checkpoint",),
    "noise": ("not a PyTorch checkpoint",),
    "text": ("not a PyTorch checkpoint",),
    "evil": ("could run code", "not read", "safetensors"),
    "evil legacy": ("could run code", "not read", "safetensors"),
    "evil plain pickle": ("not a PyTorch checkpoint",),
    "whole model": ("could run code", "torch.nn.modules.linear.Linear"),
    "no tensors": ("holds no weights",),
    "missing": ("2 are missing", "'layers.0.ffn_norm.weight'"),
    "unexpected": ("2 are unexpected", "'layers.0.attention.q_norm.weight'"),
    "mis-shaped": ("1 is of another shape", "'output.weight' [63, 128] for [64, 128]"),
    "not joinable": ("1 is of another shape", "'layers.0.feed_forward.w1.weight'"),
    "another model": ("is another model's checkpoint",),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_bad_checkpoint_is_one_sentence_and_leaves_nothing(copy: Path, tmp_path: Path, name: str) -> None:
    spoil(name, copy)
    for run in (lambda: convert(copy, tmp_path / "out", "llamagen"), lambda: SJDPipeline.from_pretrained(copy)):
        with pytest.raises((ValueError, FileNotFoundError)) as error:
            run()
        text = sentence(error, *DAMAGE[name])
        assert name in ("another model",) or GPT.split(".")[0] in text, "the file is named"
    assert nothing_left(tmp_path) and not (copy / "executed").exists()


def test_a_missing_shard(original: Path, tmp_path: Path) -> None:
    place = layouts.t5_folder(tmp_path / "sharded", sharded=True)
    sorted(place.glob("*.safetensors"))[1].unlink()
    with pytest.raises(FileNotFoundError) as error:
        convert(original / GPT, tmp_path / "out", named={"codec": original / "vq_ds16_t2i.pt", "text_encoder": place})
    sentence(error, "is missing", "00002-of", "fetch it again")
    assert nothing_left(tmp_path)


def test_an_index_of_shards_that_is_damaged(tmp_path: Path) -> None:
    for text, words in (("{", "not valid JSON"), ('{"weight_map": {}}', "lists no weights")):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ValueError) as error:
            _ = Source(tmp_path).weights
        sentence(error, words)


def test_a_shard_named_outside_the_folder_is_not_opened(tmp_path: Path) -> None:
    inside = tmp_path / "model"
    inside.mkdir()
    save_file({"x": torch.ones(1)}, tmp_path / "secret.safetensors")
    (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../secret.safetensors"}}))
    with pytest.raises(FileNotFoundError):
        _ = Source(inside).weights


def test_another_codebook(copy: Path, tmp_path: Path) -> None:
    state = layouts.vq_state()
    torch.save({"model": {**state, "quantize.embedding.weight": torch.randn(32, 8)}}, copy / "vq_ds16_t2i.pt")
    with pytest.raises(ValueError) as error:
        SJDPipeline.from_pretrained(copy)
    sentence(error, "32 codes", "64")


def test_places_that_cannot_be_written(original: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / ".out.partial").mkdir()
    for out, words in (("taken", "exists already"), ("file", "exists already"), ("out", "left from"), ("no/where", "no folder")):
        with pytest.raises((FileExistsError, FileNotFoundError)) as error:
            convert(original, tmp_path / out)
        sentence(error, words)
    assert (taken / "mine").read_text() == "mine" and (tmp_path / "file").read_text() == "mine"


def test_no_room_on_the_disk(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 10**6))
    with pytest.raises(OSError) as error:
        convert(original, tmp_path / "out")
    sentence(error, "needs 0.1 GB", "the disk has 0.0 GB", "make room")
    assert nothing_left(tmp_path)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_conversion_that_stops_half_way(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Any) -> None:
    count = 0
    read = Recipe.read

    def fails(self: Recipe, *arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 9:
            assert list((tmp_path / ".out.partial" / "target").iterdir())
            raise failure
        return read(self, *arguments)

    monkeypatch.setattr(Recipe, "read", fails)
    with pytest.raises((KeyboardInterrupt, OSError)) as error:
        convert(original, tmp_path / "out")
    if error.type is not KeyboardInterrupt:
        sentence(error, "could not be written", "No space left on device")
    assert nothing_left(tmp_path)
    monkeypatch.undo()
    assert torch.equal(drawn(convert(original, tmp_path / "out")), drawn(original))


def test_the_command_when_it_is_terminated(original: Path, tmp_path: Path) -> None:
    """SIGTERM in the middle of writing: nothing is left but the input."""
    slow = (
        "import sys, time\n"
        "from foredraft.models.weights import Recipe\n"
        "read = Recipe.read\n"
        "Recipe.read = lambda self, *a: (print('writing', flush=True), time.sleep(0.2), read(self, *a))[-1]\n"
        "from foredraft.cli import main\n"
        f"sys.exit(main(['convert', 'llamagen', {str(original)!r}, '--out', {str(tmp_path / 'out')!r}]))\n"
    )
    run = subprocess.Popen([sys.executable, "-c", slow], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None and run.stdout.readline() == "writing\n"
    time.sleep(0.5)
    run.send_signal(signal.SIGTERM)
    _, shown = run.communicate(timeout=60)
    assert run.returncode == 130 and shown.endswith("foredraft: interrupted\n")
    assert nothing_left(tmp_path)


def test_the_command(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["convert", "llamagen", str(original), "--dtype", "bfloat16"]) == 0
    shown = capsys.readouterr().out
    assert (tmp_path / "llamagen-llamagen" / "model_index.json").is_file()
    assert "LlamaGenTarget" in shown and "bfloat16" in shown and "16 x 16 tokens" in shown
    for arguments, words in (
        (["convert", "llamagenn", str(original), "--out", "x"], "choose one of"),
        (["convert", "llamagen", str(tmp_path / "nowhere"), "--out", "x"], "there is no folder"),
        (["convert", "llamagen", str(original), "--out", "x", "--component", "codec"], "NAME=PLACE"),
        (["convert", "llamagen", "llamagen-llamagen", "--out", "x"], "converted folder already"),
    ):
        assert main(arguments) == 2
        text = capsys.readouterr().err
        assert text.count("\n") == 1 and words in text
    assert not (tmp_path / "x").exists()


# -- draft heads -----------------------------------------------------------------------------------------------------


def test_a_published_draft_head(tmp_path: Path) -> None:
    state = layouts.llamagen_state()
    head = loading.load_part(layouts.head_folder(tmp_path / "head", state), "draft_head", torch.float32)
    stored = torch.load(tmp_path / "head" / "pytorch_model.bin", weights_only=True)
    assert torch.equal(head.codes.weight, state["output.weight"]), "the frozen embedding is the target's output head"
    query = stored["layers.0.self_attn.q_proj.weight"]
    assert torch.equal(head.blocks[0].attention.qkv.weight[: layouts.DIM], query), "its rotary pairs are interleaved already"
    assert isinstance(head.blocks[0].attention_norm, torch.nn.Identity) and isinstance(head.last_norm, torch.nn.Identity)
    assert head.config.text == "zero" and head.config.eps == 1e-6 and head.config.norm == "rms"


def test_a_draft_head_without_its_parts(tmp_path: Path) -> None:
    place = layouts.head_folder(tmp_path / "head", layouts.llamagen_state())
    stored = torch.load(place / "pytorch_model.bin", weights_only=True)
    del stored["layers.0.mlp.down_proj.weight"]
    torch.save(stored, place / "pytorch_model.bin")
    with pytest.raises(ValueError) as error:
        loading.load_part(place, "draft_head", torch.float32)
    sentence(error, "1 is missing", "'layers.0.mlp.down_proj.weight'", "draft_head")
    (place / "config.json").write_text("{}")
    with pytest.raises(ValueError) as error:
        loading.load_part(place, "draft_head", torch.float32)
    sentence(error, "config.json", "num_attention_heads")


# -- permutations ----------------------------------------------------------------------------------------------------


def test_halves_become_pairs() -> None:
    rows = torch.arange(12.0)[:, None]  # two heads of six features
    assert weights.halves_to_pairs(rows, 2)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert weights.halves_to_pairs(rows[:, 0], 1).tolist() == [0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11]


# -- memory ----------------------------------------------------------------------------------------------------------


# The peak is that of memory in use from here on, not what starting Python and torch took.
MEASURE = """
import sys
from pathlib import Path
from foredraft.models.convert import convert
import foredraft.models.llamagen, foredraft.models.codecs.janus, transformers
from transformers import T5EncoderModel, JanusVQVAE
def memory(field):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
Path("/proc/self/clear_refs").write_text("5")
idle = memory("VmRSS")
convert(sys.argv[1], sys.argv[2], progress=False)
print(idle, memory("VmHWM"))
"""


def shard_t5(folder: Path, shards: int, megabytes: int) -> Path:
    """A T5 encoder of a realistic size in `shards` files of about `megabytes` each, written without holding more than one."""
    width, inner = 2048, 5120
    per_layer = 4 * width * width + 3 * width * inner
    layers = max(1, round(megabytes * 1e6 / 4 / per_layer)) * shards
    config = {"model_type": "t5", "d_model": width, "d_kv": 64, "d_ff": inner, "num_layers": layers, "num_heads": 32}
    config |= {"vocab_size": 64, "feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 32}
    layouts.t5_folder(folder)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "config.json").write_text(json.dumps(config))
    places: dict[str, str] = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        tensors = (
            {"shared.weight": torch.zeros(64, width), "encoder.final_layer_norm.weight": torch.ones(width)} if not shard else {}
        )
        for layer in range(shard * layers // shards, (shard + 1) * layers // shards):
            own = f"encoder.block.{layer}.layer"
            for part in "qkvo":
                tensors[f"{own}.0.SelfAttention.{part}.weight"] = torch.full((width, width), 0.01)
            if layer == 0:
                tensors[f"{own}.0.SelfAttention.relative_attention_bias.weight"] = torch.zeros(32, 32)
            tensors[f"{own}.0.layer_norm.weight"] = tensors[f"{own}.1.layer_norm.weight"] = torch.ones(width)
            for part, shape in (("wi_0", (inner, width)), ("wi_1", (inner, width)), ("wo", (width, inner))):
                tensors[f"{own}.1.DenseReluDense.{part}.weight"] = torch.full(shape, 0.01)
        save_file({key: value.clone() for key, value in tensors.items()}, folder / name)
        places |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's own figures")
def test_memory_of_a_large_conversion(original: Path, tmp_path: Path) -> None:
    """2 GB in shards: above what an idle process has, at most 1.3 x the largest shard."""
    copy = Path(shutil.copytree(original, tmp_path / "copy"))
    shutil.rmtree(copy / "t5-ckpt")
    state = layouts.llamagen_state()
    state["cls_embedding.uncond_embedding"] = torch.zeros(layouts.SLOTS, 2048)
    state["cls_embedding.cap_proj.fc1.weight"] = torch.zeros(layouts.DIM, 2048)
    layouts.save_state(state, copy / GPT, "ddp")
    shard_t5(copy / "flan-t5-xl", shards=4, megabytes=500)
    shards = [path.stat().st_size for path in (copy / "flan-t5-xl").glob("*.safetensors")]
    assert len(shards) == 4 and sum(shards) > 1.9e9
    command = [sys.executable, "-c", MEASURE, str(copy), str(tmp_path / "out")]
    idle, peak = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    print(f"largest shard {max(shards) / 1e6:.0f} MB, idle {idle / 1e6:.0f} MB, peak {peak / 1e6:.0f} MB")
    assert peak - idle < 1.3 * max(shards)
    length = struct.unpack("<Q", (tmp_path / "out" / "text_encoder" / "model.safetensors").open("rb").read(8))[0]
    assert length < 10**6


@pytest.mark.parametrize("kind", ["pt", "bin"])
def test_pickles_are_mapped_and_not_read(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    load: Callable[..., Any] = torch.load

    def spy(*arguments: Any, **options: Any) -> Any:
        seen.append(options)
        return load(*arguments, **options)

    monkeypatch.setattr(torch, "load", spy)
    layouts.save_state(layouts.llamagen_state(), tmp_path / f"x.{kind}", "ddp")
    Checkpoint([tmp_path / f"x.{kind}"])
    layouts.save_state(layouts.llamagen_state(), tmp_path / f"y.{kind}", "legacy")
    Checkpoint([tmp_path / f"y.{kind}"])
    assert [(call["weights_only"], call["mmap"]) for call in seen] == [(True, True), (True, False)]


# -- foredraft info --------------------------------------------------------------------------------------------------


def test_info_of_a_checkpoint(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place in (original, original / GPT, convert(original, tmp_path / "out")):
        assert main(["info", str(place)]) == 0
        shown = capsys.readouterr().out
        for words in (
            "LlamaGenTarget",
            "246,144",
            "float32",
            "JanusCodec",
            "T5EncoderModel",
            "llamagen\n",
            "64 codes",
            "16 x 16 tokens (256 x 256 pixels)",
            "guidance_scale 7.5, top_k 1000",
            "ar, sjd",
            "cache 1.3 MB a guided picture",
        ):
            assert words in shown, words


def test_info_says_what_the_hub_has_to_give(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copyfile(original / GPT, tmp_path / GPT)
    assert main(["info", str(tmp_path / GPT)]) == 0
    shown = capsys.readouterr().out
    assert "codec peizesun/llamagen_t2i/vq_ds16_t2i.pt" in shown and "text_encoder google/flan-t5-xl" in shown


def test_info_of_a_draft_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(layouts.head_folder(tmp_path / "head", layouts.llamagen_state()))]) == 0
    shown = capsys.readouterr().out
    assert "DraftHead" in shown and "methods" not in shown
