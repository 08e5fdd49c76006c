"""A program that writes what follows from the node definitions: `python -m tests.nodes.write [--pictures [NAME ...]]`.

workflows/*.json and their API twins, locales/en, node_list.json (for ComfyUI-Manager, which cannot read node ids that are made at
run time); with --pictures also workflows/*.jpg (all, or those named), by running the graphs. Run it in the root of the checkout.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from foredraft import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
from PIL import Image

from .graphs import ROOT, WORKFLOWS, graphs, inputs_of, to_api, to_saved
from .stand_in import Stage, installed

HEIGHT, GAP = 512, 16
SOCKETS = {
    "FOREDRAFT_TARGET": "Foredraft target",
    "FOREDRAFT_DRAFT": "Foredraft draft",
    "FOREDRAFT_METHOD": "Foredraft method",
    "FOREDRAFT_TRACE": "Foredraft trace",
}


def texts() -> dict[str, Any]:
    """locales/en/nodeDefs.json: the English texts of the definitions, with names for people."""
    found = {}
    for name, cls in NODE_CLASS_MAPPINGS.items():
        entry: dict[str, Any] = {"display_name": NODE_DISPLAY_NAME_MAPPINGS[name], "description": cls.DESCRIPTION}
        inputs = {
            each: {"name": each.replace("_", " "), "tooltip": options["tooltip"]}
            for each, (_, options) in inputs_of(name).items()
        }
        if inputs:
            entry["inputs"] = inputs
        outputs = zip(cls.RETURN_NAMES, cls.OUTPUT_TOOLTIPS, strict=True)
        entry["outputs"] = {
            str(slot): {"name": each.replace("_", " "), "tooltip": text} for slot, (each, text) in enumerate(outputs)
        }
        found[name] = entry
    return found


def dump(values: Any) -> str:
    """JSON as it is committed."""
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def files() -> dict[str, str]:
    """Every generated text file by its path in the checkout."""
    made = {
        "locales/en/nodeDefs.json": dump(texts()),
        "locales/en/main.json": dump({"dataTypes": SOCKETS}),
        "node_list.json": dump({name: cls.DESCRIPTION.split(". ")[0].rstrip(".") for name, cls in NODE_CLASS_MAPPINGS.items()}),
    }
    for name, nodes in graphs().items():
        made[f"workflows/{name}.json"] = dump(to_saved(name, nodes))
        made[f"tests/nodes/api/{name}.json"] = dump(to_api(nodes))
    return made


def run(prompt: dict[str, Any]) -> dict[str, list[Image.Image]]:
    """Run an API prompt through the node classes, as ComfyUI would: the pictures of its PreviewImage nodes by node id."""
    results: dict[str, tuple[Any, ...]] = {}
    shown: dict[str, list[Image.Image]] = {}

    def value(given: Any) -> Any:
        return result(given[0])[given[1]] if isinstance(given, list) else given

    def result(number: str) -> tuple[Any, ...]:
        if number not in results:
            node = prompt[number]
            inputs = {name: value(given) for name, given in node["inputs"].items()}
            if node["class_type"] == "PreviewImage":
                array = inputs["images"].mul(255).round().to(torch.uint8).numpy()
                shown[number] = [Image.fromarray(each) for each in array]
                results[number] = ()
            else:
                cls = NODE_CLASS_MAPPINGS[node["class_type"]]
                if "hidden" in cls.INPUT_TYPES():
                    inputs["node"] = number
                out = getattr(cls(), cls.FUNCTION)(**inputs)
                results[number] = out["result"] if isinstance(out, dict) else out
        return results[number]

    with torch.inference_mode():
        for number in prompt:
            result(number)
    return shown


def sheet(pictures: list[Image.Image]) -> Image.Image:
    """Pictures side by side at one height."""
    scaled = []
    for picture in pictures:
        size = (round(picture.width * HEIGHT / picture.height), HEIGHT)
        scaled.append(picture.resize(size, Image.Resampling.BICUBIC if picture.height < HEIGHT else Image.Resampling.LANCZOS))
    canvas = Image.new("RGB", (sum(each.width for each in scaled) + GAP * (len(scaled) - 1), HEIGHT), "white")
    x = 0
    for each in scaled:
        canvas.paste(each, (x, 0))
        x += each.width + GAP
    return canvas


def main() -> None:
    """Write everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", nargs="*", metavar="NAME", help="draw workflows/*.jpg as well")
    wanted = parser.parse_args().pictures
    with tempfile.TemporaryDirectory() as models, installed(Stage(Path(models))):
        for name, text in files().items():
            path = ROOT / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        for name, nodes in graphs().items():
            if wanted is None or (wanted and name not in wanted):
                continue
            each = [picture for batch in run(to_api(nodes)).values() for picture in batch]
            drawn = each[:2] if name == "compare" else each
            sheet(drawn).save(WORKFLOWS / f"{name}.jpg", quality=92)


if __name__ == "__main__":
    main()
