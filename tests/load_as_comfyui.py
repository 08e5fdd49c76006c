"""A program: load a custom node folder by path, as ComfyUI does, and report what came of it as JSON.

    python load_as_comfyui.py FOLDER [--installed SITE] [--draw]

`foredraft` cannot be imported, unless --installed names a site folder that holds a second copy of it.
"""

import argparse
import importlib.abc
import importlib.util
import json
import os
import sys


class Blocker(importlib.abc.MetaPathFinder):
    """Makes `foredraft` unimportable, though this environment may have it installed."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] == "foredraft":
            raise ModuleNotFoundError(f"No module named {fullname!r} (blocked)", name=fullname)
        return None


def load(folder):
    """ComfyUI's own steps: the module is named by its path, with the dots replaced."""
    name = folder.replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, os.path.join(folder, "__init__.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return name, module


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--installed")
    parser.add_argument("--draw", action="store_true")
    args = parser.parse_args()
    if args.installed:
        sys.path.insert(0, args.installed)
        import foredraft

        if not foredraft.__file__.startswith(args.installed):
            raise SystemExit(f"the second copy came from {foredraft.__file__}, not from {args.installed}")
    else:
        sys.meta_path.insert(0, Blocker())

    name, module = load(args.folder)
    torch_at_once = "torch" in sys.modules
    report = {
        "name": name,
        "version": module.__version__,
        "demo": module.DEMO,
        "torch": torch_at_once,
        "web": module.WEB_DIRECTORY if hasattr(module, "WEB_DIRECTORY") else None,
        "nodes": sorted(module.NODE_CLASS_MAPPINGS) if hasattr(module, "NODE_CLASS_MAPPINGS") else [],
        "names": sorted(module.NODE_DISPLAY_NAME_MAPPINGS),
    }
    if args.draw:
        import torch

        pipe = module.SJDPipeline.from_pretrained(module.DEMO)
        image = pipe("fox", generator=torch.Generator().manual_seed(0)).images[0]
        report["size"] = image.size
        report["colours"] = len(image.convert("RGB").getcolors(maxcolors=image.width * image.height))
        report["pipeline"] = type(pipe).__module__
        report["target"] = type(pipe.target).__module__
    # Submodules of an installed copy: any means that two copies of our classes met.
    report["foreign"] = sorted(m for m in sys.modules if m.startswith("foredraft."))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
