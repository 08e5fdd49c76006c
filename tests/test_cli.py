"""The command line, in-process on a tiny family."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest
import torch
from foredraft import cli
from foredraft.decoding.trace import Trace
from foredraft.pipelines import methods
from PIL import Image

from .bench.tiny import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("family")))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_help_is_quick_and_loads_no_torch():
    code = "import sys; from foredraft.cli import main; c = main(['--help']); assert 'torch' not in sys.modules; sys.exit(c)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in cli.COMMANDS)


def test_every_option_of_every_method_is_a_flag(capsys):
    assert cli.main(["generate", "--help"]) == 0
    text = capsys.readouterr().out
    for pipeline in methods().values():
        for item in dataclasses.fields(pipeline.config_class):
            assert re.search(rf"--{item.name.replace('_', '-')}\b", text), item.name
    assert "--no-refine" in text


def test_generate_draws_picture_and_map(model, tmp_path, capsys):
    assert cli.main(["generate", "red apple on blue", "--model", model]) == 0
    assert files(tmp_path) == ["red-apple-on-blue-heatmap.png", "red-apple-on-blue.png"]
    assert Image.open("red-apple-on-blue.png").size == (32, 32)
    assert Image.open("red-apple-on-blue-heatmap.png").height >= 512
    out = capsys.readouterr().out
    assert "| sjd" in out and "exact" in out and "wrote red-apple-on-blue.png" in out


def test_compare_flag_times_plain_decoding_and_tells_whether_it_is_the_same(model, capsys):
    assert cli.main(["generate", "fox", "--model", model, "--compare", "--json", "t.json"]) == 0
    out = capsys.readouterr().out
    assert "| ar " in out and "| sjd" in out and "1.00x" in out
    assert "sjd: the picture is plain decoding's, token for token" in out
    record = json.loads(open("t.json").read())
    trace = Trace.from_json(json.dumps(record["traces"][0]))
    assert trace.complete and trace.method == "sjd" and record["ar_seconds"] > 0


def test_several_pictures_and_options(model, tmp_path, capsys):
    arguments = ["--num", "2", "--out", "a.png", "--rule", "exact", "--tail", "coupled", "--window", "3", "--no-refine"]
    assert cli.main(["generate", "fox", "--model", model, "--compare", *arguments]) == 0
    assert files(tmp_path) == ["a-0-heatmap.png", "a-0.png", "a-1-heatmap.png", "a-1.png"]
    out = capsys.readouterr().out
    assert "token for token" not in out and "tail=coupled" in out and "refine=False" in out


def test_the_same_seed_draws_the_same_picture(model):
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        assert cli.main(["generate", "fox", "--model", model, "--seed", seed, "--out", f"{name}.png"]) == 0
    a, b, c = (open(f"{name}.png", "rb").read() for name in "abc")
    assert a == b != c


def test_other_methods(model, capsys):
    assert cli.main(["generate", "fox", "--model", model, "--method", "ar"]) == 0
    arguments = ["--method", "speculative", "--tree", "dynamic", "--draft-length", "2", "--temperature", "0.9"]
    assert cli.main(["generate", "fox", "--model", model, *arguments]) == 0
    assert "| speculative tree=dynamic" in capsys.readouterr().out


def test_notes_of_a_trace_are_printed(model, monkeypatch, capsys):
    drawn = Trace.heatmap

    def noting(trace, *args):
        trace.notes.append("speculation did not pay")
        return drawn(trace, *args)

    monkeypatch.setattr(Trace, "heatmap", noting)
    assert cli.main(["generate", "fox", "--model", model]) == 0
    assert "sjd: speculation did not pay\n" in capsys.readouterr().out


BAD = {
    "no prompt": (["generate"], "prompt"),
    "empty prompt": (["generate", ""], "empty"),
    "unknown word": (["generate", "fxo"], "fox"),
    "unknown method": (["generate", "fox", "--method", "sdj"], "did you mean 'sjd'"),
    "unknown flag": (["generate", "fox", "--tial", "reuse"], "did you mean --tail"),
    "another method's": (["generate", "fox", "--tree", "chain"], "option of cool_sd and speculative, not of sjd"),
    "bad choice": (["generate", "fox", "--rule", "sedeed"], "did you mean 'seeded'"),
    "bad range": (["generate", "fox", "--window", "0"], "window must be between"),
    "clash": (["generate", "fox", "--tail", "reuse"], "rule"),
    "grid": (["generate", "fox", "--height", "64"], "32 x 32"),
    "sampling": (["generate", "fox", "--temperature", "-1"], "temperature"),
    "negative prompt": (["generate", "fox", "--negative-prompt", "apple", "--guidance-scale", "1"], "guidance_scale"),
    "number": (["generate", "fox", "--num", "none"], "--num"),
    "suffix": (["generate", "fox", "--out", "fox.text"], ".png"),
    "folder": (["generate", "fox", "--out", "nowhere/fox.png"], "no folder nowhere"),
    "json folder": (["generate", "fox", "--json", "nowhere/fox.json"], "no folder nowhere"),
    "device": (["generate", "fox", "--device", "tpu"], "tpu"),
    "spec": (["compare", "fox", "--methods", "sjd:tail"], "no value"),
    "spec option": (["compare", "fox", "--methods", "sjd:tial=reuse"], "did you mean 'tail'"),
    "only drawn": (["bench", "pictures", "--drawn"], "are for pareto, cool_sd and vvs, not for pictures"),
    "bench": (["bench", "speeed"], "did you mean 'speed'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_leaves_nothing(case, model, tmp_path, capsys):
    arguments, expected = BAD[case]
    assert cli.main([*arguments, "--model", model]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("foredraft: ") and "\n" not in error and expected in error
    assert files(tmp_path) == []


def test_unknown_command_and_missing_model(capsys):
    for arguments in (["gennerate"], ["info", "/nowhere"], ["generate", "fox", "--model", "/nowhere"], ["train"]):
        assert cli.main(arguments) == 2
        error = capsys.readouterr().err.strip()
        assert error.startswith("foredraft: ") and "\n" not in error


def test_a_failed_write_leaves_no_file(model, tmp_path, monkeypatch, capsys):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device", "fox-heatmap.png")

    monkeypatch.setattr(Trace, "heatmap", full)
    assert cli.main(["generate", "fox", "--model", model]) == 2
    assert "No space left" in capsys.readouterr().err
    assert files(tmp_path) == []


def test_interrupted(model, tmp_path, monkeypatch, capsys):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(Trace, "heatmap", stop)
    assert cli.main(["generate", "fox", "--model", model]) == 130
    assert files(tmp_path) == []


def test_compare_writes_a_contact_sheet(model, tmp_path, capsys):
    methods = ["sjd", "sjd:rule=exact,tail=reuse", "speculative:tree=dynamic"]
    assert cli.main(["compare", "fox", "--methods", *methods, "--model", model, "--repeats", "2"]) == 0
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("| ")]
    assert len(lines) == 5 and lines[1].startswith("| ar ") and "relaxed" in lines[3]
    assert "speculative tree=dynamic: the picture is plain decoding's" in out
    assert Image.open("compare.png").width > 4 * 288 and files(tmp_path) == ["compare.png"]


def test_info_describes_the_folder(model, capsys):
    assert cli.main(["info", model]) == 0
    out = capsys.readouterr().out
    for text in ("EmbeddedTarget", "VQCodec", "32 codes", "8 x 8 tokens", "ar, sjd, speculative", "guidance_scale 1.5"):
        assert text in out


def test_info_of_a_folder_without_a_draft(model, tmp_path, capsys):
    import shutil
    from pathlib import Path

    folder = Path(shutil.copytree(model, tmp_path / "copy"))
    index = json.loads((folder / "model_index.json").read_text())
    del index["draft_model"]
    (folder / "model_index.json").write_text(json.dumps(index))
    assert cli.main(["info", str(folder)]) == 0
    assert re.search(r"methods +ar, sjd\n", capsys.readouterr().out)
    assert cli.main(["generate", "fox", "--model", str(folder), "--method", "speculative"]) == 2
    assert "draft_model" in capsys.readouterr().err


def test_train_help(capsys):
    for stage in ("demo", "head"):
        assert cli.main(["train", stage, "--help"]) == 0
        assert "smoke" in capsys.readouterr().out
