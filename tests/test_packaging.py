"""One folder, three uses: pip package, wheel, and ComfyUI custom node loaded by path."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LOADER = Path(__file__).with_name("load_as_comfyui.py")
NOT_SOURCE = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "venv", "runs", "out")
NAME = re.compile(r"^[A-Za-z0-9_.-]+")

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def run(*command, cwd):
    """Runs a command away from the checkout and returns its standard output."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_checkout(folder):
    return Path(shutil.copytree(ROOT, folder, ignore=NOT_SOURCE))


def packages_of(root):
    """Every folder of the tree that Python would import as a package, in import notation."""
    tops = {entry.parent for entry in root.glob("*/__init__.py")} - {root / "tests"}
    inner = {entry.parent for top in tops for entry in top.rglob("__init__.py")}
    return {"foredraft"} | {".".join(["foredraft", *folder.relative_to(root).parts]) for folder in inner}


def folder_of(package):
    return ROOT.joinpath(*package.split(".")[1:])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy, so that no build folder of an earlier day leaks into it or stays behind."""
    folder = tmp_path_factory.mktemp("wheel")
    source = copy_checkout(folder / "source")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "wheel", *options, "-w", folder, source, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel):
    """A folder for sys.path in which the wheel is installed (a pure wheel is its own layout)."""
    folder = wheel.parent / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture
def node_folder(tmp_path):
    """A copy of the checkout where ComfyUI keeps custom nodes; a dot in its path, as ComfyUI replaces dots."""
    return copy_checkout(tmp_path / "comfy.ui" / "custom_nodes" / "ComfyUI-Foredraft")


def test_requirements_repeat_the_run_time_dependencies():
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    listed = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    assert listed == PROJECT["project"]["dependencies"]


def test_torch_is_not_pinned_and_gradio_is_an_extra():
    names = {NAME.match(entry).group(): entry for entry in PROJECT["project"]["dependencies"]}
    assert names["torch"] == "torch"
    assert "gradio" not in names
    assert not [entry for entry in names.values() if "==" in entry or "<" in entry]


def test_import_is_quick_and_loads_no_heavy_module(tmp_path):
    code = (
        "import sys, time; start = time.perf_counter(); import foredraft; took = time.perf_counter() - start;"
        "heavy = {'torch', 'diffusers', 'transformers', 'numpy', 'PIL', 'gradio', 'huggingface_hub'};"
        "print(took, sorted(heavy & set(sys.modules)))"
    )
    outputs = [run(sys.executable, "-c", code, cwd=tmp_path).split(maxsplit=1) for _ in range(3)]
    assert {heavy.strip() for _, heavy in outputs} == {"[]"}
    assert min(float(took) for took, _ in outputs) < 0.3


def test_every_public_name_resolves():
    import foredraft

    for name in foredraft.__all__:
        assert getattr(foredraft, name) is not None
    assert set(foredraft.__all__) <= set(dir(foredraft))
    assert foredraft.__version__ == PROJECT["project"]["version"]
    with pytest.raises(AttributeError, match="SJDPipelin'"):
        foredraft.SJDPipelin  # noqa: B018


def test_package_modules_import_each_other_relatively():
    """ComfyUI names the package by its path: `import foredraft` fails there, or finds a second copy of every class."""
    absolute = re.compile(r"^\s*(?:from|import) foredraft\b", re.MULTILINE)
    files = [
        *ROOT.glob("*.py"),
        *(f for name in packages_of(ROOT) - {"foredraft"} for f in folder_of(name).glob("*.py")),
    ]
    assert len(files) > 5
    assert not [str(file.relative_to(ROOT)) for file in files if absolute.search(file.read_text(encoding="utf-8"))]


def test_every_package_on_disk_is_listed():
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages_of(ROOT)


def test_wheel_holds_every_package_and_data_file(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    modules = {file for package in packages_of(ROOT) for file in folder_of(package).glob("*.py")}
    data = {file for file in (ROOT / "models" / "demo").rglob("*") if file.is_file() and file.suffix != ".pyc"}
    data |= {file for folder in ("locales", "workflows") for file in (ROOT / folder).rglob("*.json")}
    data |= set((ROOT / "web").glob("*.css"))
    data |= {file for file in (ROOT / "web" / "comfyui").rglob("*") if file.is_file()}
    expected = {f"foredraft/{file.relative_to(ROOT).as_posix()}" for file in modules | data}
    assert "foredraft/__init__.py" in expected
    assert sorted(expected - held) == []
    outside = {name for name in held if not re.match(r"foredraft(-[^/]*\.dist-info)?/", name)}
    assert sorted(outside) == []
    assert not [name for name in held if name.startswith("foredraft/tests")]


def test_wheel_carries_licence_and_notice(wheel):
    with zipfile.ZipFile(wheel) as archive:
        licences = {name.rpartition("/")[2] for name in archive.namelist() if ".dist-info/licenses/" in name}
    assert licences == {"LICENSE", "NOTICE"}


def test_wheel_imports_with_its_own_version(site, tmp_path):
    code = "import sys; sys.path.insert(0, sys.argv[1]);import foredraft; print(foredraft.__file__, foredraft.__version__)"
    file, version = run(sys.executable, "-c", code, site, cwd=tmp_path).split()
    assert Path(file).is_relative_to(site)
    assert version == PROJECT["project"]["version"]


def test_wheel_draws(site, tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import foredraft, torch;"
        "pipe = foredraft.SJDPipeline.from_pretrained(foredraft.DEMO);"
        "image = pipe('fox', generator=torch.Generator().manual_seed(0)).images[0];"
        "assert foredraft.DEMO.startswith(sys.argv[1]); print(len(image.convert('RGB').getcolors(1 << 20)))"
    )
    assert int(run(sys.executable, "-c", code, site, cwd=tmp_path).splitlines()[-1]) > 8


def test_loads_by_path_without_importing_torch(node_folder, tmp_path):
    report = json.loads(run(sys.executable, LOADER, node_folder, cwd=tmp_path).splitlines()[-1])
    assert report["version"] == PROJECT["project"]["version"]
    assert report["demo"] == str(node_folder / "models" / "demo")
    assert report["foreign"] == []
    assert report["torch"] is False
    assert {"ForedraftLoadTarget", "ForedraftSJD", "ForedraftSampler"} <= set(report["nodes"])
    assert report["names"] == report["nodes"]
    assert report["web"] == "./web/comfyui"


def test_a_broken_installation_is_not_a_pack_without_nodes(node_folder, tmp_path):
    """ComfyUI asks with `hasattr`, which takes an AttributeError for "no"."""
    (node_folder / "nodes" / "__init__.py").write_text("import json\n\njson.no_such_name\n")
    with pytest.raises(AssertionError, match="NODE_CLASS_MAPPINGS cannot be loaded"):
        run(sys.executable, LOADER, node_folder, cwd=tmp_path)


def test_what_the_registry_reads():
    comfy = PROJECT["tool"]["comfy"]
    assert (comfy["PublisherId"], comfy["DisplayName"]) == ("foredraft", "Foredraft")
    assert comfy["requires-comfyui"].startswith(">=")
    assert "web" not in comfy, "with WEB_DIRECTORY the browser would load the extension twice"
    assert (ROOT / comfy["Icon"]).is_file() or comfy["Icon"].startswith("https://")
    kept_out = (ROOT / ".comfyignore").read_text(encoding="utf-8").splitlines()
    for line in kept_out:
        assert line.startswith("#") or list(ROOT.glob(line.rstrip("/"))), f"{line} is not there"
    assert not {"nodes/", "models/", "bench/", "web/", "workflows/", "locales/"} & set(kept_out)


def test_the_blocker_blocks(tmp_path):
    """The control of the test below: a pack that imports itself by name does not load."""
    folder = tmp_path / "custom_nodes" / "ComfyUI-Bad"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("import foredraft\n")
    with pytest.raises(AssertionError, match="blocked"):
        run(sys.executable, LOADER, folder, cwd=tmp_path)


@pytest.mark.parametrize("installed", [False, True], ids=["alone", "beside an installed copy"])
def test_draws_when_loaded_by_path(node_folder, tmp_path, request, installed):
    options = ["--installed", request.getfixturevalue("site")] if installed else []
    report = json.loads(run(sys.executable, LOADER, node_folder, "--draw", *options, cwd=tmp_path).splitlines()[-1])
    assert report["name"].endswith("/custom_nodes/ComfyUI-Foredraft".replace("/", os.sep))
    assert report["target"].startswith(report["name"] + ".")
    assert report["pipeline"].startswith(report["name"] + ".")
    assert report["foreign"] == []
    assert report["colours"] > 8
